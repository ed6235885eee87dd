"""All durable I/O: create, write, fsync, rename, unlink and fsync of directories.

Every call that changes the disk passes through one object's `hook` before it is made, so that a test can record it, make
it fail with an errno, cut a write short, or end the process there. Nothing else in the engine changes a run directory,
save for the text in its lock file, which is for people.
A failed fsync is never retried: the kernel may have dropped the pages and would then report success.

Windows has no fsync of directories and no `posix_fallocate`; both are left out there, so a rename may be lost by a power
cut, though never by a killed process. Neither has it `O_NOFOLLOW`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_BINARY = getattr(os, "O_BINARY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a fifo must not wait for its other end
CHUNK = 8 << 20  # bytes handed to one os.write


@dataclass(frozen=True, slots=True)
class Call:
    """One call about to be made: mkdir, create, append, allocate, write, truncate, fsync, rename, unlink, rmdir or fsync_dir."""

    op: str
    path: Path  # of a file's descriptor: the path it was created at
    target: Path | None = None  # of a rename
    data: memoryview | None = None  # of a write
    size: int | None = None  # of an allocate or truncate


# Called before each call. It may raise (the call is then not made) or, for a write, return the most bytes to write.
Hook = Callable[[Call], int | None]


class Durable:
    """The disk, with a hook before every change. Methods raise OSError; descriptors are plain integers."""

    def __init__(self, hook: Hook | None = None) -> None:
        self.hook = hook
        self._paths: dict[int, Path] = {}

    def mkdir(self, path: Path) -> None:
        """Makes one directory, which must not exist. Durable once its parent is fsynced."""
        self._before(Call("mkdir", path))
        os.mkdir(path)

    def make_directories(self, path: Path) -> None:
        """Makes a directory and its missing parents, and fsyncs each parent that got a new entry."""
        missing: list[Path] = []
        at = path
        while not at.is_dir():
            missing.append(at)
            if at == at.parent:
                break
            at = at.parent
        for directory in reversed(missing):
            self.mkdir(directory)
            self.fsync_dir(directory.parent)

    def create(self, path: Path) -> int:
        """Opens a new file for writing; one that exists, or a link in its place, is an error."""
        self._before(Call("create", path))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _CLOSE_ON_EXEC | _BINARY, 0o644)
        self._paths[fd] = path
        return fd

    def append(self, path: Path) -> int:
        """Opens a file for appending, made when missing; a link in its place is an error."""
        self._before(Call("append", path))
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _NO_FOLLOW | _CLOSE_ON_EXEC | _BINARY, 0o644)
        self._paths[fd] = path
        return fd

    def allocate(self, fd: int, size: int) -> None:
        """Reserves `size` bytes, so that a full disk shows before anything is written."""
        if size == 0 or not hasattr(os, "posix_fallocate"):
            return
        self._before(Call("allocate", self._paths[fd], size=size))
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise  # those three: the file system cannot reserve; the writes will tell

    def write(self, fd: int, data: bytes | memoryview) -> None:
        """Writes all of `data` (C-contiguous), going on after short writes."""
        rest = memoryview(data).cast("B")
        while len(rest):
            piece = rest[:CHUNK]
            most = self._before(Call("write", self._paths[fd], data=piece))
            rest = rest[os.write(fd, piece if most is None else piece[:most]) :]

    def truncate(self, fd: int, size: int) -> None:
        """Cuts an open file to `size` bytes."""
        self._before(Call("truncate", self._paths[fd], size=size))
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        """Returns once the file's bytes are on the medium."""
        self._before(Call("fsync", self._paths[fd]))
        os.fsync(fd)

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Renames atomically. A file in place of the target is replaced; a directory with entries is an error."""
        self._before(Call("rename", source, target=target))
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        self._before(Call("unlink", path))
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        self._before(Call("rmdir", path))
        os.rmdir(path)

    def fsync_dir(self, path: Path) -> None:
        """Returns once the directory's entries (new, renamed, removed) are on the medium. Nothing on Windows."""
        self._before(Call("fsync_dir", path))
        if os.name == "nt":
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _CLOSE_ON_EXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_new(self, path: Path, pieces: Iterable[bytes | memoryview], size: int) -> None:
        """A new file with the given pieces, `size` bytes in all, fsynced. Its directory is not."""
        fd = self.create(path)
        try:
            self.allocate(fd, size)
            for piece in pieces:
                self.write(fd, piece)
            self.fsync(fd)
        finally:
            self.close(fd)

    def write_once(self, path: Path, data: bytes) -> None:
        """A new small file that appears whole or not at all, fsynced with its directory."""
        part = path.with_name(f".tmp-{path.name}")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(part)
        try:
            self.write_new(part, [data], len(data))
            self.rename(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(part)
            raise
        self.fsync_dir(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Removes a directory and what is in it; links are removed, never followed."""
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(Path(entry.path))
            else:
                self.unlink(Path(entry.path))
        self.rmdir(path)

    def _before(self, call: Call) -> int | None:
        return self.hook(call) if self.hook is not None else None


DISK = Durable()


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor for reading `path`, which must be a regular file: a link, fifo or device raises OSError at once."""
    fd = os.open(path, os.O_RDONLY | _NO_FOLLOW | _NO_WAIT | _CLOSE_ON_EXEC | _BINARY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield fd
    finally:
        os.close(fd)


def read_regular(path: Path, limit: int) -> bytes:
    """A regular file's bytes. One longer than `limit`, or that is no regular file, raises OSError and is not read."""
    with open_regular(path) as fd:
        size = os.fstat(fd).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes; at most {limit:,} are expected", str(path))
        data = bytearray()
        while len(data) <= limit and (piece := os.read(fd, min(1 << 20, limit + 1 - len(data)))):
            data += piece
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"grew past {limit:,} bytes while it was read", str(path))
        return bytes(data)


def is_real_directory(path: Path) -> bool:
    """Whether `path` is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
