"""One checkpoint directory: the files in it, written with digests and read with distrust.

    model.safetensors   the weights, f32
    optim.safetensors   AdamW's m and v, f32, as "m.NAME" and "v.NAME"
    MANIFEST.json       written last and sealed by its own digest; binds run, step, loader position, random and other
                        state, best validation, elapsed time, numerics id, and each file's size and SHA-256

A reader wants exactly these three regular files, compares size and digest before it uses a byte, and never allocates more
than the model's own table calls for. Whatever is wrong raises `Damaged` with one clause that says what.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxtrain.engine.digest import SumOfBuffer, join, state_digest, state_sum
from ptxtrain.engine.durable import Durable, is_real_directory, open_regular
from ptxtrain.engine.sealed import Damaged, read_sealed, seal
from ptxtrain.engine.tensorfile import Layout, TensorPlace

MODEL, OPTIM, MANIFEST = "model.safetensors", "optim.safetensors", "MANIFEST.json"
_FORMAT = 2
_MANIFEST_LIMIT = 1 << 20
_PIECE = 1 << 22  # bytes hashed, written or read at once

Floats = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after update `step`, on the host. The arrays belong to the snapshot: nobody changes them."""

    step: int
    params: Floats  # flat, in the parameter table's order, as m and v
    m: Floats
    v: Floats
    position: tuple[int, int]  # the loader's next (file, token)
    best_val: float | None = None  # lowest validation loss so far
    elapsed: float = 0.0  # seconds of training so far, all attempts
    state: dict[str, Any] = field(default_factory=dict)  # JSON: random counters and whatever else later steps depend on
    numerics_id: str = ""  # filled in by `Saver` and by loading
    data_id: str = ""  # what `position` counts in; filled in likewise
    device_sum: int | None = None  # `sum()` as the device had it, for the writer to compare; None: there was no device
    _sum: int | None = field(default=None, init=False, repr=False)

    def sum(self) -> int:
        """The 64 bits of `engine.digest.state_sum`, computed once."""
        if self._sum is None:
            self._sum = state_sum(self.params, self.m, self.v)
        return self._sum

    def digest(self) -> str:
        """16 hex digits over weights, m, v, step and loader position."""
        return state_digest(self.sum(), self.params.size, self.step, self.position)


@dataclass(frozen=True, slots=True)
class Manifest:
    """MANIFEST.json."""

    run_id: str
    step: int
    position: tuple[int, int]
    best_val: float | None
    best_saved: tuple[int, float] | None  # (step, loss) of the saved step with the lowest validation loss then known
    elapsed: float
    state: dict[str, Any]
    numerics_id: str  # of the process that saved it
    data_id: str  # of the data that `position` counts in
    state_digest: str
    files: dict[str, tuple[int, str]]  # name -> (bytes, SHA-256)

    def to_bytes(self) -> bytes:
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        values = {key: getattr(self, key) for key in self.__slots__}
        return seal({"format": _FORMAT, **values, "files": files})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Manifest:
        """Checked for types and ranges. Raises Damaged."""
        if values.get("format") != _FORMAT:
            raise Damaged(f"{MANIFEST} has format {values.get('format')!r}; this ptxtrain reads format {_FORMAT}")
        try:
            best, files = values["best_saved"], values["files"]
            manifest = cls(
                run_id=_text(values["run_id"]),
                step=_natural(values["step"]),
                position=(_natural(values["position"][0]), _natural(values["position"][1])),
                best_val=None if values["best_val"] is None else _finite(values["best_val"]),
                best_saved=None if best is None else (_natural(best[0]), _finite(best[1])),
                elapsed=_finite(values["elapsed"]),
                state=values["state"],
                numerics_id=_text(values["numerics_id"]),
                data_id=_text(values["data_id"]),
                state_digest=_text(values["state_digest"]),
                files={name: (_natural(files[name]["bytes"]), files[name]["sha256"]) for name in (MODEL, OPTIM)},
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Damaged(f"{MANIFEST} lacks a sound {error}") from error
        if set(files) != {MODEL, OPTIM} or not isinstance(manifest.state, dict):
            raise Damaged(f"{MANIFEST} does not list exactly {MODEL} and {OPTIM}")
        return manifest


def checkpoint_bytes(table: Sequence[TensorPlace]) -> int:
    """Disk that one checkpoint takes, its manifest counted as 4 KiB."""
    return Layout(table).file_bytes + Layout(table, ("m.", "v.")).file_bytes + 4096


def check_finite(snapshot: Snapshot, table: Sequence[TensorPlace]) -> None:
    """Raises Damaged naming the first tensor with a NaN or an infinity."""
    for what, array in (("", snapshot.params), ("m.", snapshot.m), ("v.", snapshot.v)):
        for place in table:
            end = place.offset + math.prod(place.shape)
            for start in range(place.offset, end, _PIECE // 4):
                piece = array[start : min(end, start + _PIECE // 4)]
                if not np.isfinite(piece).all():
                    first = start + int(np.flatnonzero(~np.isfinite(piece))[0]) - place.offset
                    raise Damaged(
                        f"{what}{place.name}[{first}] of step {snapshot.step} is {array[place.offset + first]}"
                    )


def check_device(snapshot: Snapshot) -> None:
    """Raises Damaged where the host's copy is not what the device held."""
    if snapshot.device_sum is not None and snapshot.sum() != snapshot.device_sum:
        raise Damaged(
            f"its bits on the host have the sum {snapshot.sum():016x}, on the device they had {snapshot.device_sum:016x}"
        )


def write_files(
    io: Durable,
    directory: Path,  # exists and is empty
    snapshot: Snapshot,
    table: Sequence[TensorPlace],
    run_id: str,
    best_saved: tuple[int, float] | None,
) -> Manifest:
    """Writes and fsyncs the three files, the manifest last, then fsyncs the directory. Raises OSError."""
    files: dict[str, tuple[int, str]] = {}
    for name, prefixes, arrays in _contents(snapshot):
        layout = Layout(table, prefixes)
        assert all(array.size == layout.numbers and array.dtype == np.dtype("<f4") for array in arrays)
        digest = hashlib.sha256()
        pieces = _hashed([memoryview(layout.header), *(np.ascontiguousarray(a).data.cast("B") for a in arrays)], digest)
        io.write_new(directory / name, pieces, layout.file_bytes)
        files[name] = (layout.file_bytes, digest.hexdigest())
    manifest = Manifest(
        run_id=run_id,
        step=snapshot.step,
        position=snapshot.position,
        best_val=snapshot.best_val,
        best_saved=best_saved,
        elapsed=snapshot.elapsed,
        state=snapshot.state,
        numerics_id=snapshot.numerics_id,
        data_id=snapshot.data_id,
        state_digest=snapshot.digest(),
        files=files,
    )
    data = manifest.to_bytes()
    io.write_new(directory / MANIFEST, [data], len(data))
    io.fsync_dir(directory)
    return manifest


def read_manifest(directory: Path, run_id: str, step: int) -> Manifest:
    """The manifest of a directory that holds exactly our three names. Raises Damaged."""
    if not is_real_directory(directory):
        raise Damaged("it is gone" if not os.path.lexists(directory) else "it is not a directory")
    names: set[str] = set()
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                names.add(entry.name)
                if entry.name not in (MODEL, OPTIM, MANIFEST):
                    raise Damaged(f"it holds {entry.name[:60]!r}, which is not one of its files")
        if missing := {MODEL, OPTIM, MANIFEST} - names:
            raise Damaged(f"{', '.join(sorted(missing))} is missing")
        manifest = Manifest.from_values(read_sealed(directory / MANIFEST, _MANIFEST_LIMIT))
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from error
    if manifest.run_id != run_id:
        raise Damaged(f"{MANIFEST} belongs to another run")
    if manifest.step != step:
        raise Damaged(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def read_snapshot(directory: Path, table: Sequence[TensorPlace], run_id: str, step: int) -> Snapshot:
    """The whole state, every byte of it verified. Raises Damaged. Memory: the state itself and a few MiB."""
    manifest = read_manifest(directory, run_id, step)
    model, optim = Layout(table), Layout(table, ("m.", "v."))
    _check_sizes(directory, manifest, {MODEL: model, OPTIM: optim})  # before anything is allocated
    params, m, v = (np.empty(model.numbers, np.float32) for _ in range(3))
    snapshot = Snapshot(
        step=step,
        params=params,
        m=m,
        v=v,
        position=manifest.position,
        best_val=manifest.best_val,
        elapsed=manifest.elapsed,
        state=manifest.state,
        numerics_id=manifest.numerics_id,
        data_id=manifest.data_id,
    )
    for name, prefixes, arrays in _contents(snapshot):
        _read_file(directory / name, Layout(table, prefixes), manifest.files[name], [a.data.cast("B") for a in arrays])
    if snapshot.digest() != manifest.state_digest:
        raise Damaged(f"its state has digest {snapshot.digest()}, its manifest says {manifest.state_digest}")
    check_finite(snapshot, table)
    return snapshot


def verify_files(directory: Path, table: Sequence[TensorPlace], run_id: str, step: int) -> Manifest:
    """Reads every byte back from the medium, where the system lets us, and compares: SHA-256 of the files, digest of the
    state, every number finite. Raises Damaged. Memory: a few MiB."""
    manifest = read_manifest(directory, run_id, step)
    layouts = {MODEL: Layout(table), OPTIM: Layout(table, ("m.", "v."))}
    _check_sizes(directory, manifest, layouts)
    sums = [SumOfBuffer(buffer) for buffer in range(3)]
    for name, parts in ((MODEL, sums[:1]), (OPTIM, sums[1:])):
        _read_file(directory / name, layouts[name], manifest.files[name], parts)
    found = state_digest(join(sums), layouts[MODEL].numbers, step, manifest.position)
    if found != manifest.state_digest:
        raise Damaged(f"its state has digest {found}, its manifest says {manifest.state_digest}")
    return manifest


def _contents(snapshot: Snapshot) -> list[tuple[str, tuple[str, ...], list[Floats]]]:
    return [(MODEL, ("",), [snapshot.params]), (OPTIM, ("m.", "v."), [snapshot.m, snapshot.v])]


def _hashed(parts: Sequence[memoryview], digest: Any) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _PIECE):
            piece = part[start : start + _PIECE]
            digest.update(piece)
            yield piece


def _check_sizes(directory: Path, manifest: Manifest, layouts: Mapping[str, Layout]) -> None:
    for name, layout in layouts.items():
        size, _ = manifest.files[name]
        try:
            found = os.lstat(directory / name).st_size
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from error
        if found != size:
            raise Damaged(f"{name} has {found:,} bytes, its manifest says {size:,}")
        if not 8 + layout.data_bytes <= size <= 8 + layout.header_limit + layout.data_bytes:
            raise Damaged(f"{name} has {size:,} bytes, this model's has {layout.file_bytes:,}")


def _read_file(
    path: Path, layout: Layout, expected: tuple[int, str], out: Sequence[memoryview] | Sequence[SumOfBuffer]
) -> None:
    """Reads and hashes a whole file, each buffer in it into its part of `out`: memory, or a sum, which also wants every number
    finite. Nothing of it is used before it agrees."""
    size, sha256 = expected
    digest, finite = hashlib.sha256(), True
    try:
        with open_regular(path) as fd, open(fd, "rb", buffering=0, closefd=False) as file:
            if isinstance(out[0], SumOfBuffer) and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what was fsynced is read from the medium again
            first = bytearray(8)
            _fill(file, memoryview(first), digest, path.name)
            header = bytearray(layout.header_bytes(bytes(first), size, path.name))
            _fill(file, memoryview(header), digest, path.name)
            for part in out:
                if isinstance(part, SumOfBuffer):
                    finite &= _feed(file, part, layout.numbers, digest, path.name)
                else:
                    _fill(file, part, digest, path.name)
            if file.read(1):
                raise Damaged(f"{path.name} is longer than its manifest says")
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from error
    if digest.hexdigest() != sha256:
        raise Damaged(f"{path.name} is not what was written (its SHA-256 differs)")
    layout.check_header(bytes(header), path.name)
    if not finite:
        raise Damaged(f"{path.name} holds a number that is not finite")


def _feed(file: Any, part: SumOfBuffer, numbers: int, digest: Any, name: str) -> bool:
    """One buffer's numbers into a sum; whether all are finite."""
    scratch = np.empty(min(_PIECE // 4, numbers), "<f4")
    finite = True
    for start in range(0, numbers, scratch.size):
        piece = scratch[: min(scratch.size, numbers - start)]
        _fill(file, piece.data.cast("B"), digest, name)
        finite = finite and bool(np.isfinite(piece).all())
        part.feed(piece)
    return finite


def _fill(file: Any, target: memoryview, digest: Any, name: str) -> None:
    at = 0
    while at < len(target):
        count = file.readinto(target[at : at + _PIECE])
        if not count:
            raise Damaged(f"{name} ends too early")
        digest.update(target[at : at + count])
        at += count


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"number ({str(value)[:40]})")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text ({str(value)[:40]})")
    return value


def _finite(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"number ({str(value)[:40]})")
    return float(value)
