"""What a run's bits depend on besides its config, and how this process differs in it: data, tokenizer, kernels, device.

A checkpoint says what it was made with, so what was accepted once need not be accepted again; a run without one says it in its
`run.json`. Each difference has a name, by which a user accepts it: `--accept-data`, `--accept-kernels` and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ptxtrain.engine.checkpointfiles import Snapshot
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.rundir import RunInfo, data_id

if TYPE_CHECKING:
    from ptxtrain.data.shards import Dataset

KINDS = ("data", "tokenizer", "kernels", "device")
_KERNELS = "; kernels "


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not what the state was made with. `what` is one of KINDS."""

    what: str
    text: str


def join_numerics(device: str, kernels: str) -> str:
    """A numerics id of the device's own account and the digest of all kernels' texts."""
    return f"{device}{_KERNELS}{kernels}"


def split_numerics(numerics: str) -> tuple[str, str]:
    """(device, kernels) of a numerics id."""
    device, _, kernels = numerics.partition(_KERNELS)
    return device, kernels


def changes(start: Snapshot, info: RunInfo, dataset: Dataset | None, numerics: str | None) -> list[Change]:
    """How `dataset` and `numerics` (None: not looked at) differ from what `start` was made with, in the order of KINDS."""
    found: list[Change] = []
    if dataset is not None and data_id(dataset.identity()) != (start.data_id or info.data_id):
        found.append(Change("data", _data_text(start, info, dataset)))
        # Only here: data that were accepted once came with their tokenizer.
        if dataset.tokenizer_digest != info.tokenizer_sha256:
            found.append(Change("tokenizer", f"its tokenizer is not that of {dataset.directory}"))
    if numerics is not None:
        before, now = (split_numerics(which) for which in (start.numerics_id or info.numerics_id, numerics))
        if before[1] != now[1]:
            found.append(Change("kernels", f"its kernels were [{before[1]}], here they are [{now[1]}]"))
        if before[0] != now[0]:
            found.append(Change("device", f"its device was [{before[0]}], here it is [{now[0]}]"))
    return found


def _data_text(start: Snapshot, info: RunInfo, dataset: Dataset) -> str:
    how = dataset.difference(info.data) if start.data_id in ("", info.data_id) else None
    return f"{dataset.directory} is not the data that it was trained on" + (f" ({how})" if how else "")


def refuse(path: Any, found: Sequence[Change], accepted: Collection[str]) -> list[Change]:
    """The changes, all of which must be accepted.

    Raises:
        PtxtrainError: one is not; it names each of those, and the flag that would accept it.
    """
    refused = [change for change in found if change.what not in accepted]
    if refused:
        flags = " ".join(f"--accept-{change.what}" for change in refused)
        raise PtxtrainError(
            f"{path}: {'; '.join(change.text for change in refused)}. Go on where that is as it was (for data: --data DIR), or "
            f"accept bits other than an unbroken run's by {flags}"
        )
    return list(found)


def start_position(start: Snapshot, info: RunInfo, dataset: Dataset) -> tuple[int, int]:
    """Where to go on in accepted data: the same place if the shards up to it are the same, else the beginning."""
    file = start.position[0]
    before, now = (_train_shards(identity) for identity in (info.data, dataset.identity()))
    same = start.data_id in ("", info.data_id) and len(now) > file and before[: file + 1] == now[: file + 1]
    return start.position if same else (0, 0)


def _train_shards(identity: dict[str, Any]) -> list[Any]:
    shards = identity.get("shards")
    return [s for s in shards if str(s.get("name")).startswith("train-")] if isinstance(shards, list) else []
