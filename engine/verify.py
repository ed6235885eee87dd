"""Checks everything that can be checked of a run, a checkpoint or a dataset without running it. Changes nothing.

A run may be in training meanwhile: what its retention takes away while it is read is no damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ptxtrain.data.errors import DataError
from ptxtrain.engine.checkpointfiles import Manifest, verify_files
from ptxtrain.engine.durable import is_real_directory
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.history import History, disagreements, read_history
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.rundir import RunInfo, data_id, read_info, run_and_step
from ptxtrain.engine.sealed import Damaged
from ptxtrain.engine.stepdirs import list_steps, step_name

if TYPE_CHECKING:
    from ptxtrain.data.shards import Dataset

OK, NOTE, FAIL = "ok", "note", "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `state` is OK, NOTE (worth knowing, nothing wrong) or FAIL."""

    what: str
    state: str
    text: str


def kind_of(path: Path) -> str:
    """ "run", "checkpoint" or "dataset". Raises PtxtrainError on anything else."""
    if (path / "run.json").exists():
        return "run"
    if (path / "manifest.json").exists():
        return "dataset"
    try:
        run_and_step(path)
        found = os.path.lexists(path)
    except PtxtrainError:
        found = False
    if not found:
        what = "is neither a run, a checkpoint in a run, nor a dataset" if path.exists() else "does not exist"
        raise PtxtrainError(
            f"{path} {what}. Give a run directory (runs/NAME), one of its ckpt/step-…, or a directory that "
            "`ptxtrain tokenize` made"
        )
    return "checkpoint"


def verify(path: Path) -> Iterator[Finding]:
    """What is found, as it is found; the first thing that cannot be read ends it. Raises PtxtrainError as `kind_of`."""
    kind = kind_of(path)
    if kind == "dataset":
        yield from _dataset(path)
        return
    run, step = run_and_step(path)
    try:
        info = read_info(run)
    except PtxtrainError as error:
        yield Finding("run.json", FAIL, str(error))
        return
    yield Finding("run.json", OK, f"run {info.run_id}, {info.config.name}, made {info.created[:19]} by {info.version}")
    try:
        history = read_history(info.metrics)
    except Damaged as error:
        yield Finding("metrics", FAIL, str(error))
        history = History([], [], [], 0)
    if step is not None:
        yield from _checkpoint(info, step, history)
        return
    yield _tokenizer(info)
    yield from _data(info, history)
    yield from _checkpoints(info, history)
    yield from _metrics(history)


def _tokenizer(info: RunInfo) -> Finding:
    try:
        info.check_tokenizer()
    except PtxtrainError as error:
        return Finding("tokenizer", FAIL, str(error))
    return Finding("tokenizer", OK, f"SHA-256 {info.tokenizer_sha256[:16]}…, the one that the run was made with")


def _data(info: RunInfo, history: History) -> Iterator[Finding]:
    """The dataset where the run has it: that it is the same, by its headers. Its tokens are checked by `verify DATASET`."""
    from ptxtrain.data.shards import Dataset

    place = Path(info.config.data.path)
    if not info.config.data.path or not place.is_dir():
        yield Finding("data", NOTE, f"not at {place}; verify them where they lie now")
        return
    try:
        dataset = Dataset(place)
    except DataError as error:
        yield Finding("data", FAIL, str(error))
        return
    known = {info.data_id, *(attempt.begin.get("data") for attempt in history.attempts)}
    if data_id(dataset.identity()) not in known:
        how = dataset.difference(info.data)
        yield Finding("data", FAIL, f"{place} is not what the run was trained on ({how})")
        return
    count = len(dataset.train) + len(dataset.val)
    yield Finding("data", OK, f"{place}: {count} shards by their headers; `ptxtrain verify {place}` reads every token")


def _checkpoints(info: RunInfo, history: History) -> Iterator[Finding]:
    if not is_real_directory(info.checkpoints):
        yield Finding("ckpt", FAIL, f"{info.checkpoints} is missing, or is no directory of the run's own")
        return
    sound: list[int] = []
    try:
        steps = list_steps(info.path)
    except PtxtrainError as error:
        yield Finding("ckpt", FAIL, str(error))
        return
    for step in steps:
        for finding in _checkpoint(info, step, history):
            sound += [step] if finding.state == OK else []
            yield finding
    yield from _other_names(info)
    if sound:
        yield Finding("resume", NOTE, f"would go on behind step {sound[-1]}")
    elif steps:
        yield Finding("resume", NOTE, "would refuse: no checkpoint is sound; with --step 0 it begins again")
    else:
        yield Finding("resume", NOTE, "would begin at step 0: there is no checkpoint")


def _checkpoint(info: RunInfo, step: int, history: History) -> Iterator[Finding]:
    what, directory = f"step {step}", info.checkpoints / step_name(step)
    try:
        manifest = verify_files(directory, parameter_table(info.config.model), info.run_id, step)
        _place(info, manifest, history)
        unknown = _digest(manifest, history)
    except Damaged as error:
        if os.path.lexists(directory):
            yield Finding(what, FAIL, f"{step_name(step)}: {error}")
        return
    size = sum(length for length, _ in manifest.files.values())
    yield Finding(what, OK, f"digest {manifest.state_digest}, {size:,} bytes, every number finite{unknown}")


def _place(info: RunInfo, manifest: Manifest, history: History) -> None:
    """The place in the data follows from the step alone, as long as the data were never changed. Raises Damaged."""
    from ptxtrain.data.loader import position_after

    known = {info.data_id, *(a.begin["data"] for a in history.attempts if "data" in a.begin)}
    if known != {manifest.data_id} or manifest.step == 0:
        return
    config, counts = info.config, train_tokens(info)
    if max(counts, default=0) <= config.model.context:
        return
    place = position_after(counts, config.model.context, manifest.step * config.batch.sequences)
    if (place.file, place.token) != manifest.position:
        raise Damaged(
            f"its place in the data is shard {manifest.position[0]}, token {manifest.position[1]:,}; {manifest.step} steps "
            f"lead to shard {place.file}, token {place.token:,}"
        )


def train_tokens(info: RunInfo) -> list[int]:
    """Tokens of each training shard, as the run recorded them."""
    shards = [shard for shard in info.data.get("shards", []) if isinstance(shard, dict)]
    return [int(shard["tokens"]) for shard in shards if str(shard["name"]).startswith("train-")]


def _digest(manifest: Manifest, history: History) -> str:
    """Holds a checkpoint's digest against the metrics' of its step. Raises Damaged; text where there is nothing to compare."""
    said = {line["digest"] for _, line in history.of_step(manifest.step) if "digest" in line}
    said |= {a.begin["digest"] for a in history.attempts if a.begin.get("begins_after") == manifest.step}
    if said and manifest.state_digest not in said:
        raise Damaged(f"its state has digest {manifest.state_digest}, metrics.jsonl says {' or '.join(sorted(said))}")
    return "" if said else "; metrics.jsonl has no line of that step"


def _other_names(info: RunInfo) -> Iterator[Finding]:
    names = sorted(os.listdir(info.checkpoints))
    mine = {step_name(step) for step in list_steps(info.path)}
    for name in names:
        if name in mine:
            continue
        if name.startswith(".aside-step-"):
            yield Finding(
                "ckpt", NOTE, f"{name} was set aside by resume; goes once {info.config.train.keep} later steps stand"
            )
        elif name.startswith((".tmp-", ".gone-")):
            yield Finding(
                "ckpt",
                NOTE,
                f"{name} is being written or removed, or was when a process ended; the next start clears it",
            )
        else:
            yield Finding("ckpt", NOTE, f"{name[:60]} is not of the run's making and is left alone")


def _metrics(history: History) -> Iterator[Finding]:
    for fault in history.faults:
        yield Finding("metrics", FAIL, fault)
    wrong = disagreements(history)
    for text in wrong:
        yield Finding("metrics", FAIL, text)
    for gap in history.gaps:
        yield Finding("metrics", NOTE, f"{gap}; a power cut or a full disk may lose lines")
    if history.faults or wrong:
        return
    made, attempts = sum(len(attempt.steps) for attempt in history.attempts), len(history.attempts)
    again = made - len(history.steps())
    text = f"{history.lines} lines, {made - again} steps, {attempts} attempt{'s' if attempts != 1 else ''}"
    yield Finding("metrics", OK, text + (f"; {again} steps were made again, with the same bits" if again else ""))


def _dataset(path: Path) -> Iterator[Finding]:
    from ptxtrain.data.shards import Dataset

    try:
        dataset = Dataset(path)
    except DataError as error:
        yield Finding("dataset", FAIL, str(error))
        return
    yield Finding(
        "manifest", OK, f"vocabulary {dataset.vocab_size:,}, {len(dataset.train)} + {len(dataset.val)} shards"
    )
    yield Finding("tokenizer", OK, f"SHA-256 {dataset.tokenizer_digest[:16]}…, as the manifest says")
    yield from _shards(dataset)
    listed = {shard.path.name for shard in [*dataset.train, *dataset.val]}
    for name in sorted(set(os.listdir(path)) - listed - {"manifest.json", "tokenizer.json"}):
        yield Finding("dataset", NOTE, f"{name[:60]} is not in the manifest and is not used")


def _shards(dataset: Dataset) -> Iterator[Finding]:
    for shard in [*dataset.train, *dataset.val]:
        try:
            shard.verify()
        except DataError as error:
            yield Finding(shard.path.name, FAIL, str(error))
        else:
            blocks = f"{shard.blocks:,} block{'s' if shard.blocks != 1 else ''}"
            text = f"{shard.count:,} tokens in {blocks}, all below {dataset.vocab_size:,}"
            yield Finding(shard.path.name, OK, text)
