"""A run small enough to be saved hundreds of times, and the ways to hurt it: recorded, failing and ending disks.

A bench function takes the modules under test, so that the same checks run on the real ones and on one-line mutants.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ptxtrain.engine import checkpoint, checkpointfiles, durable
from ptxtrain.engine.config import load_preset
from ptxtrain.engine.durable import Call, Durable
from ptxtrain.engine.rundir import RunDirectory
from ptxtrain.engine.tensorfile import Place

TABLE = (Place("embedding", (5, 4), 0), Place("layers.0.qkv", (4, 3), 20), Place("final_norm", (4,), 32))
NUMBERS = 36


class Killed(BaseException):
    """The process ended here: nothing that would run afterwards in a real one may touch the disk."""


@dataclass
class Modules:
    """What a bench runs on; `mutant` replaces one of them by an edited copy."""

    checkpoint: types.ModuleType = checkpoint
    files: types.ModuleType = checkpointfiles
    durable: types.ModuleType = durable


def mutant(stem: str, old: str, new: str) -> Modules:
    """The modules with one line of one of them changed; `old` must occur exactly once in its source."""
    modules = Modules()
    names = {"durable": durable, "files": checkpointfiles, "checkpoint": checkpoint}
    source = Path(names[stem].__file__ or "").read_text()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {stem}"
    edited = types.ModuleType(names[stem].__name__)
    edited.__dict__["__file__"] = names[stem].__file__
    real = sys.modules[edited.__name__]
    sys.modules[edited.__name__] = edited  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), f"<mutant of {stem}>", "exec"), edited.__dict__)
        setattr(modules, stem, edited)
        if stem == "files":  # checkpoint must use the edited one
            modules.checkpoint = _copy_of(checkpoint)
    finally:
        sys.modules[edited.__name__] = real
    return modules


def _copy_of(module: types.ModuleType) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    real = sys.modules[module.__name__]
    sys.modules[module.__name__] = copy
    try:
        spec.loader.exec_module(copy)
    finally:
        sys.modules[module.__name__] = real
    return copy


def snapshot(step: int, modules: Modules | None = None, **values: object) -> checkpoint.Snapshot:
    """A state that depends on the step alone."""
    rng = np.random.default_rng(step)
    params, m, v = (rng.standard_normal(NUMBERS).astype(np.float32) for _ in range(3))
    cls = (modules or Modules()).files.Snapshot
    made: checkpoint.Snapshot = cls(step, params, m, np.abs(v), position=(step // 7, 3 * step), **values)
    return made


def prepare_resume(
    run: RunDirectory,
    *,
    step: int | None = None,
    note: Callable[[str], None] = print,
    modules: Modules | None = None,
) -> checkpoint.Snapshot:
    """Loads and makes ready, as `ptxtrain resume` does once nothing refuses."""
    module = (modules or Modules()).checkpoint
    found: tuple[checkpoint.Snapshot, set[int]] = module.load_and_refused(run.path, TABLE, step=step, note=note)
    module.make_ready(run, *found, note=note)
    return found[0]


def same(a: checkpoint.Snapshot, b: checkpoint.Snapshot) -> bool:
    arrays = all(x.tobytes() == y.tobytes() for x, y in ((a.params, b.params), (a.m, b.m), (a.v, b.v)))
    return arrays and (a.step, a.position, a.best_val, a.state) == (b.step, b.position, b.best_val, b.state)


def make_run(folder: Path, io: Durable | None = None, name: str = "run") -> RunDirectory:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "tokenizer.json").write_text('{"model": "none"}')
    return RunDirectory.create(
        folder / name,
        load_preset("tiny"),
        data_identity={"shards": ["a", "b"]},
        tokenizer_path=folder / "tokenizer.json",
        numerics_id="cpu:test",
        io=io or Durable(),
    )


@dataclass
class Bench:
    """A run with a Saver over it, and everything that they said."""

    folder: Path
    modules: Modules = field(default_factory=Modules)
    keep: int = 3
    template: Path | None = None  # a closed run to start from a copy of
    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.io: Durable = self.modules.durable.Durable()
        if self.template is None:
            self.run = make_run(self.folder, self.io)
        else:
            shutil.copytree(self.template, self.folder / "run")
            self.run = RunDirectory.open(self.folder / "run", self.io)
        self.path = self.run.path
        self.open_saver()

    def open_saver(self) -> None:
        self.saver = self.modules.checkpoint.Saver(
            self.run, TABLE, keep=self.keep, announce=self.said.append, warn=self.warned.append
        )

    def restart(self) -> checkpoint.Snapshot:
        """A new process on the same directory: resumes, and is ready to save."""
        self.run.close()
        self.io = self.modules.durable.Durable()
        self.run = RunDirectory.open(self.path, self.io)
        resumed = prepare_resume(self.run, note=self.warned.append, modules=self.modules)
        self.open_saver()
        return resumed

    def save(self, step: int, **values: object) -> bool:
        self.saver.submit(snapshot(step, self.modules, **values))
        outcome = self.saver.wait()
        assert outcome is not None and outcome.step == step
        return bool(outcome.saved)

    def announced(self) -> list[int]:
        return [int(line.removeprefix("saved step ")) for line in self.said]

    def load(self, **values: object) -> checkpoint.Snapshot:
        loaded: checkpoint.Snapshot = self.modules.checkpoint.load(self.path, TABLE, note=self.warned.append, **values)
        return loaded

    def leftovers(self) -> list[str]:
        return [name for name in os.listdir(self.path / "ckpt") if name.startswith((".tmp", ".gone"))]


class FailAt:
    """A hook: the n-th call (from 0), or every call from there on, raises `error`; `count` tells how many there were."""

    def __init__(self, n: int, error: Callable[[], BaseException], forever: bool = False) -> None:
        self.n, self.error, self.forever, self.count = n, error, forever, 0
        self.hit: Call | None = None

    def __call__(self, call: Call) -> None:
        at, self.count = self.count, self.count + 1
        if at == self.n or (self.forever and at > self.n):
            self.hit = self.hit or call
            raise self.error()


def disk_error(number: int) -> Callable[[], OSError]:
    return lambda: OSError(number, os.strerror(number))


DISK_FULL, BROKEN = disk_error(errno.ENOSPC), disk_error(errno.EIO)


class PowerCut:
    """What a disk may hold after a power cut: a model of which bytes and which names are still in memory alone.

    Fed with a trace of calls; `state` writes one of the allowed states to a folder: a file's unsynced bytes absent, zero,
    partial or there; each directory's unsynced names in any subset.
    """

    @dataclass
    class File:
        data: bytearray = field(default_factory=bytearray)
        safe: bytes = b""

    @dataclass
    class Directory:
        names: dict[str, PowerCut.File | PowerCut.Directory] = field(default_factory=dict)
        safe: dict[str, PowerCut.File | PowerCut.Directory] = field(default_factory=dict)

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, self._scan(root)

    def _scan(self, path: Path) -> Directory:
        names: dict[str, PowerCut.File | PowerCut.Directory] = {}
        for entry in sorted(path.iterdir()):
            data = None if entry.is_dir() else entry.read_bytes()
            names[entry.name] = self._scan(entry) if data is None else self.File(bytearray(data), data)
        return self.Directory(names, dict(names))

    def _find(self, path: Path) -> File | Directory:
        at: PowerCut.File | PowerCut.Directory = self.top
        for part in path.relative_to(self.root).parts:
            assert isinstance(at, self.Directory)
            at = at.names[part]
        return at

    def feed(self, call: Call) -> None:
        parent = self._find(call.path.parent) if call.path != self.root else self.top
        assert isinstance(parent, self.Directory)
        name = call.path.name
        if call.op == "mkdir":
            parent.names[name] = self.Directory()
        elif call.op == "create":
            parent.names[name] = self.File()
            self._open = parent.names[name]
        elif call.op == "append":
            parent.names.setdefault(name, self.File())
        elif call.op == "truncate":
            file = parent.names[name]
            assert isinstance(file, self.File) and call.size is not None
            del file.data[call.size :]
        elif call.op == "allocate":
            pass  # space, no bytes; what is read there is zero, as an unsynced write may leave it
        elif call.op == "write":
            file = parent.names[name]
            assert isinstance(file, self.File) and call.data is not None
            file.data += call.data
        elif call.op == "fsync":
            file = parent.names[name]
            assert isinstance(file, self.File)
            file.safe = bytes(file.data)
        elif call.op == "rename":
            assert call.target is not None
            target = self._find(call.target.parent)
            assert isinstance(target, self.Directory)
            target.names[call.target.name] = parent.names.pop(name)
        elif call.op in ("unlink", "rmdir"):
            parent.names.pop(name, None)  # the call may have been made for nothing
        elif call.op == "fsync_dir":
            directory = self._find(call.path)
            assert isinstance(directory, self.Directory)
            directory.safe = dict(directory.names)
        else:
            raise AssertionError(call.op)

    def state(self, folder: Path, rng: random.Random, keep: float) -> None:
        """Each unsynced thing is on the medium with probability `keep`."""
        self._write(self.top, folder, rng, keep)

    def _write(self, node: Directory, path: Path, rng: random.Random, keep: float) -> None:
        path.mkdir()
        for name in sorted(node.names.keys() | node.safe.keys()):
            entry = (node.names if rng.random() < keep else node.safe).get(name)
            if isinstance(entry, self.Directory):
                self._write(entry, path / name, rng, keep)
            elif isinstance(entry, self.File):
                data = entry.safe
                if data != entry.data:
                    cut = rng.randrange(len(entry.data) + 1)
                    whole = bytes(entry.data)
                    half = whole[:cut] + bytes(len(whole) - cut)
                    data = rng.choice([entry.safe, bytes(len(whole)), half, half[:cut]])
                    data = whole if rng.random() < keep else data
                (path / name).write_bytes(data)
