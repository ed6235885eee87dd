"""The run directory: its lock, what is written once about the run, and where things lie in it.

    runs/NAME/
      run.lock        held by `flock` for the life of the process that trains; says who holds it
      run.json        written once: config, seed, data identity, tokenizer digest, numerics id (sealed by its digest)
      tokenizer.json  a copy of the dataset's
      metrics.jsonl
      ckpt/step-00001514/…

`run.json` is written last, so a directory without one is not a run yet, and `create` may take it over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from ptxtrain.engine.config import Config, from_dict, to_dict
from ptxtrain.engine.durable import DISK, Durable, is_real_directory, read_regular
from ptxtrain.engine.errors import PtxtrainError, RunInUse
from ptxtrain.engine.sealed import Damaged, read_sealed, seal

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

RUNS = Path("runs")  # where runs without a directory of their own are made and looked for
_FORMAT = 1
_RUN_LIMIT = 16 << 20  # bytes of run.json: the data identity has a line per shard
TOKENIZER_LIMIT = 256 << 20
_OURS_BEFORE_RUN_JSON = {"run.lock", "ckpt", "tokenizer.json", ".tmp-tokenizer.json", ".tmp-run.json"}
_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What `run.json` says. It never changes after the run is made."""

    path: Path
    run_id: str  # 32 hex digits, in every checkpoint's manifest
    version: str  # of ptxtrain
    created: str  # UTC, ISO 8601
    config: Config
    seed: int
    data: dict[str, Any]  # the dataset's identity: order, size and digest of each shard
    tokenizer_sha256: str
    numerics_id: str  # device kind, CPU features used, kernel text

    @property
    def data_id(self) -> str:
        return data_id(self.data)

    @property
    def checkpoints(self) -> Path:
        return self.path / "ckpt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    def check_tokenizer(self) -> None:
        """Raises PtxtrainError where `tokenizer.json` is missing or is not the one that the run was made with."""
        try:
            data = read_regular(self.tokenizer, TOKENIZER_LIMIT)
        except OSError as error:
            raise PtxtrainError(
                f"cannot read {self.tokenizer}: {error.strerror}. Copy tokenizer.json from the run's dataset there."
            ) from error
        if hashlib.sha256(data).hexdigest() != self.tokenizer_sha256:
            raise PtxtrainError(
                f"{self.tokenizer} is not the tokenizer that the run was made with (its digest differs). "
                "Copy tokenizer.json from the run's dataset over it."
            )


class RunDirectory:
    """A run that this process holds: nobody else can open it until `close`, or until the process ends, however it ends."""

    def __init__(self, info: RunInfo, lock: int, io: Durable = DISK) -> None:
        self.info, self.io = info, io
        self._lock = lock

    @property
    def path(self) -> Path:
        return self.info.path

    @property
    def config(self) -> Config:
        return self.info.config

    @classmethod
    def create(
        cls,
        path: Path,
        config: Config,
        *,
        data_identity: dict[str, Any],
        tokenizer_path: Path,
        numerics_id: str,
        seed: int | None = None,  # the configuration's own when None
        io: Durable = DISK,
    ) -> RunDirectory:
        """Makes a run in a new or empty directory and locks it.

        Raises PtxtrainError where there is a run already (the message suggests `ptxtrain resume`), where the directory
        holds anything else, and where it cannot be written; RunInUse where another process is making it.
        """
        seed = config.train.seed if seed is None else seed
        refuse_existing(path)
        try:
            tokenizer = read_regular(tokenizer_path, TOKENIZER_LIMIT)
        except OSError as error:
            raise PtxtrainError(f"cannot read tokenizer {tokenizer_path}: {error.strerror}.") from error
        lock = -1
        try:
            io.make_directories(path)
            lock = _lock(path)
            refuse_existing(path)  # by one that held the lock until now
            if not is_real_directory(path / "ckpt"):
                io.mkdir(path / "ckpt")
            io.write_once(path / "tokenizer.json", tokenizer)
            info = RunInfo(
                path=path,
                run_id=secrets.token_hex(16),
                version=_version(),
                created=datetime.now(UTC).isoformat(),
                config=config,
                seed=seed,
                data=json.loads(json.dumps(data_identity)),  # as it will be read back
                tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
                numerics_id=numerics_id,
            )
            values = {
                field.name: getattr(info, field.name) for field in dataclasses.fields(info) if field.name != "path"
            }
            io.write_once(path / "run.json", seal({"format": _FORMAT, **values, "config": to_dict(config)}))
        except BaseException as error:
            if lock >= 0:
                _unlock(lock)
            if isinstance(error, OSError):
                raise PtxtrainError(f"cannot make the run directory {path}: {error.strerror}.") from error
            raise
        return cls(info, lock, io)

    @classmethod
    def open(cls, path: Path, io: Durable = DISK) -> RunDirectory:
        """Locks an existing run. Raises RunInUse (exit 5) naming the holder, PtxtrainError where there is no sound run."""
        read_info(path)  # before a lock file is made in a directory that is no run
        lock = _lock(path)
        try:
            return cls(read_info(path), lock, io)
        except BaseException:
            _unlock(lock)
            raise

    def close(self) -> None:
        """Lets the lock go. The lock file stays."""
        if self._lock >= 0:
            _unlock(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_info(path: Path) -> RunInfo:
    """A run's `run.json`, without locking the run (`sample` and `info` read runs in training). Raises PtxtrainError."""
    try:
        values = read_sealed(path / "run.json", _RUN_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise PtxtrainError(f"{path} is not a run directory: it has no run.json.") from None
    except Damaged as error:
        raise PtxtrainError(
            f"{path}: {error}; the run cannot be trusted. Start another with `ptxtrain train`."
        ) from None
    if (found := values.pop("format", None)) != _FORMAT:
        raise PtxtrainError(f"{path}/run.json has format {found!r}; this ptxtrain reads format {_FORMAT}.")
    types = {"run_id": str, "version": str, "created": str, "seed": int, "data": dict, "numerics_id": str}
    types |= {"tokenizer_sha256": str, "config": dict}
    for key, kind in types.items():
        if not isinstance(values.get(key), kind):
            raise PtxtrainError(f"{path}/run.json has no sound {key!r}.")
    values["config"] = from_dict(values["config"], f"{path}/run.json")
    return RunInfo(path=path, **{key: values[key] for key in types})


def data_id(identity: dict[str, Any]) -> str:
    """16 hex digits that stand for a dataset's identity: tokenizer, and order, size and digest of each shard."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def resume_command(path: Path, steps: int | None = None, data: Path | None = None) -> str:
    """What carries a run on, as a shell takes it. `steps` and `data`: where they are not the run's own."""
    words = ["ptxtrain", "resume", str(path)]
    words += ["--steps", str(steps)] if steps is not None else []
    words += ["--data", str(data)] if data is not None else []
    return shlex.join(words)


def refuse_existing(path: Path) -> None:
    """Raises PtxtrainError unless a run can be made at `path`: nothing there, an empty directory, or an unfinished start."""
    if (path / "run.json").exists():
        raise PtxtrainError(
            f"{path} already holds a run. Go on with it by `{resume_command(path)}`, or name another --run."
        )
    try:
        names = {entry.name for entry in os.scandir(path)}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise PtxtrainError(f"{path} cannot be a run directory: it, or a folder above it, is a file.") from None
    except OSError as error:
        raise PtxtrainError(f"cannot read {path}: {error.strerror}.") from error
    ours = names <= _OURS_BEFORE_RUN_JSON and not ("ckpt" in names and any(os.scandir(path / "ckpt")))
    if not ours:
        raise PtxtrainError(f"{path} is not empty and is not a run. Name a new or an empty directory with --run.")


def new_run_path(preset: str, root: Path = RUNS) -> Path:
    """A directory that is not there yet, named from preset and local time: `runs/tiny-20260131-174501`."""
    stem = f"{preset}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    path, number = root / stem, 2
    while path.exists():
        path, number = root / f"{stem}-{number}", number + 1
    return path


def newest_run(root: Path = RUNS, note: Callable[[str], None] = print) -> Path:
    """The run under `root` that was made last, by the time in its run.json. Raises PtxtrainError where there is none.

    One whose run.json cannot be used may be the one that is meant: each gets a line to `note`.
    """
    found: list[tuple[str, str, Path]] = []
    if root.is_dir():
        for entry in os.scandir(root):
            try:
                info = read_info(Path(entry.path))
                found.append((info.created, entry.name, info.path))
            except PtxtrainError as error:
                if os.path.lexists(os.path.join(entry.path, "run.json")):
                    note(f"left out: {error}")
    if not found:
        raise PtxtrainError(f"there is no run under {root}{os.sep}. Start one with `ptxtrain train --preset tiny`.")
    return max(found)[2]


def run_and_step(path: Path) -> tuple[Path, int | None]:
    """A RUN as (path, None), a CKPT `RUN/ckpt/step-00001514` as (RUN, 1514). Raises PtxtrainError on anything else."""
    if (path / "run.json").exists():
        return path, None
    whole = Path(os.path.abspath(path))  # of `.` and `../step-00001514` too
    matched, run = _STEP_NAME.fullmatch(whole.name), whole.parent.parent
    if matched and whole.parent.name == "ckpt" and (run / "run.json").exists():
        as_given = len(path.parts) > 2 and ".." not in path.parts
        return (path.parent.parent if as_given else run), int(matched[1])
    what = "does not exist" if not path.exists() else "is neither a run nor a checkpoint in a run"
    raise PtxtrainError(f"{path} {what}. Give a run directory (runs/NAME) or one of its ckpt/step-… directories.")


def _lock(path: Path) -> int:
    """A locked descriptor of run.lock. The lock belongs to the open file, so the kernel lets go of it when we end."""
    lock_path = path / "run.lock"
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = os.open(lock_path, flags, 0o644)
    except OSError as error:
        raise PtxtrainError(f"cannot open {lock_path}: {error.strerror}.") from error
    try:
        _take(fd)
    except (BlockingIOError, PermissionError):
        holder = _holder(fd)
        os.close(fd)
        raise RunInUse(f"{path} is in use by {holder}. Wait for it, or stop it there with Ctrl+C.") from None
    except OSError as error:
        os.close(fd)
        raise PtxtrainError(
            f"cannot lock {lock_path}: {error.strerror}. Put the run on a local file system."
        ) from error
    # Who holds it is for people; a full disk must not keep the run from starting.
    with contextlib.suppress(OSError):
        who = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, (json.dumps(who) + "\n").encode())
    return fd


def _holder(fd: int) -> str:
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        who = json.loads(os.read(fd, 4096))
        return f"process {who['pid']} on {who['host']} since {who['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


if sys.platform == "win32":
    # A locked byte cannot be read by others there, so it lies far behind the text.
    _LOCK_BYTE = 1 << 30

    def _take(fd: int) -> None:
        os.lseek(fd, _LOCK_BYTE, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

else:

    def _take(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)


def _version() -> str:
    try:
        return metadata.version("ptxtrain")
    except metadata.PackageNotFoundError:
        return "unknown"
