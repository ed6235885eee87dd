"""Careful access to files that may be hostile or truncated, and directories that appear whole or not at all.

Readers open a file once, look at what they opened (never at the name again) and bound what they read. Writers go
through `os.write`, because a short write or a full disk raises nothing in `ndarray.tofile`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from ptxtrain.data.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def shown(path: str | os.PathLike[str]) -> str:
    """`path` as it can stand in a line of text: control characters and undecodable bytes escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in os.fspath(path))


def reason(error: OSError) -> str:
    """What the system said, for the end of a message."""
    return error.strerror or str(error) or type(error).__name__


def open_regular(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """Open a regular file to read it; a link (unless followed), fifo, device or folder is refused at once.

    Raises:
        DataError: it is missing, unreadable or not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
        if os.path.islink(path):
            raise DataError(f"{shown(path)} is a link; put the file itself there")
    try:
        handle = os.open(path, flags)
    except OSError as error:
        raise DataError(f"cannot read {shown(path)}: {reason(error)}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{shown(path)} is not a regular file")
    return os.fdopen(handle, "rb", buffering=0)


def read_exactly(file: BinaryIO, offset: int, size: int, path: Path) -> bytes:
    """`size` bytes at `offset`, or an error that says where the file ends."""
    try:
        file.seek(offset)
        parts, missing = [], size
        while missing and (part := file.read(missing)):
            parts.append(part)
            missing -= len(part)
    except OSError as error:
        raise DataError(f"cannot read {shown(path)} at byte {offset:,}: {reason(error)}") from error
    if missing:
        raise DataError(
            f"{shown(path)} ends at byte {offset + size - missing:,}, {missing:,} bytes early; copy it again"
        )
    return b"".join(parts)


def read_small(path: Path, limit: int, *, follow_links: bool = False) -> bytes:
    """A whole file of at most `limit` bytes; its size is looked at before anything is read."""
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DataError(f"{shown(path)} has {size:,} bytes; at most {limit:,} are read")
        return read_exactly(file, 0, size, path)


def parse_json(data: bytes, path: Path) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN or infinities, bounded nesting."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(items)) != len(items):
            raise ValueError("a key occurs twice")
        return found

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        what = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{shown(path)} is not valid JSON: {what}") from error


def write_all(handle: int, data: bytes | memoryview, path: Path) -> None:
    """Write every byte, however the system splits it."""
    view = memoryview(data).cast("B")
    try:
        while view:
            view = view[os.write(handle, view) :]
    except OSError as error:
        raise DataError(
            f"cannot write {shown(path)}: {reason(error)}; free some space or choose another place"
        ) from error


def create(path: Path) -> int:
    """A new file to write, never an existing one."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise DataError(f"cannot create {shown(path)}: {reason(error)}") from error


def sync(handle: int, path: Path) -> None:
    """fsync, with the path in the error."""
    try:
        os.fsync(handle)
    except OSError as error:
        raise DataError(f"cannot write {shown(path)} to the disk: {reason(error)}") from error


def write_file(path: Path, data: bytes) -> None:
    """A new file with `data`, on the disk when this returns."""
    handle = create(path)
    try:
        write_all(handle, data, path)
        sync(handle, path)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; Windows has no such call."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(handle, path)
    finally:
        os.close(handle)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP that Python handles; the first one that came is delivered at the end.

    Handlers are exchanged rather than signals masked: a mask holds for one thread, and the system would hand the signal
    to another.
    """
    caught: list[int] = []
    earlier: dict[int, Any] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and callable(handler := signal.getsignal(number)):
                earlier[number] = handler
                signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        if caught:
            earlier[caught[0]](caught[0], None)


def _lock(folder: Path) -> int | None:
    """A locked handle on `folder`: its sign that a living process works in it. None where there are no such locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove what killed processes left: temporary folders that nobody holds a lock on."""
    for entry in os.scandir(parent):
        if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                handle = _lock(Path(entry.path))
                if handle is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(handle)


def _make_temporary(parent: Path, prefix: str) -> tuple[Path, int | None]:
    while True:
        path = parent / f"{prefix}{secrets.token_hex(4)}"
        os.mkdir(path)
        try:
            handle = _lock(path)
            if handle is None or os.fstat(handle).st_ino == os.stat(path).st_ino:
                return path, handle
            os.close(handle)
        except (BlockingIOError, FileNotFoundError):
            pass  # taken for a leftover between mkdir and the lock, and removed: make another


def check_free(target: Path, what: str) -> None:
    """Raise DataError unless `target` can become a new directory."""
    try:
        if not os.path.lexists(target):
            return
        if not target.is_dir():
            raise DataError(f"{what} {shown(target)} exists and is not a folder; choose another name")
        if os.path.ismount(target):
            raise DataError(f"{what} {shown(target)} is where a file system is mounted; choose a folder inside it")
        if any(os.scandir(target)):
            raise DataError(f"{what} {shown(target)} exists and is not empty; choose another name or remove it first")
    except OSError as error:
        raise DataError(f"cannot read {what} {shown(target)}: {reason(error)}") from error


@contextlib.contextmanager
def new_directory(target: Path, what: str) -> Iterator[Path]:
    """A temporary directory beside `target` that becomes `target` when the block ends, and vanishes if it raises.

    `target` may be missing or an empty folder. Files put into it must be synced by whoever writes them.

    Raises:
        DataError: `target` is taken (also by another process meanwhile), or the system refuses.
    """
    target = Path(os.path.realpath(target))
    check_free(target, what)
    parent, prefix = target.parent, f".{target.name}.tmp-"
    temporary: Path | None = None
    handle: int | None = None
    made: list[Path] = []
    placed = False
    try:
        with signals_held():
            for folder in [*reversed(parent.parents), parent]:
                if not folder.exists():
                    folder.mkdir(exist_ok=True)
                    made.append(folder)
            _remove_stale(parent, prefix)
            temporary, handle = _make_temporary(parent, prefix)
        yield temporary
        with signals_held():
            sync_directory(temporary)
            check_free(target, what)
            if target.is_dir():
                target.rmdir()
            os.rename(temporary, target)
            placed = True
            sync_directory(parent)
    except OSError as error:
        raise DataError(f"cannot make {what} {shown(target)}: {reason(error)}; choose another place") from error
    finally:
        with signals_held():
            if not placed:
                if temporary is not None:
                    shutil.rmtree(temporary, ignore_errors=True)
                for folder in reversed(made):
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            if handle is not None:
                os.close(handle)
