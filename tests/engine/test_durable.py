from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ptxtrain.engine import durable
from ptxtrain.engine.durable import Call, Durable, open_regular, read_regular


class Record:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> None:
        self.calls.append(call)

    def trace(self) -> list[str]:
        return [f"{c.op} {c.path.name}" + (f" {c.target.name}" if c.target else "") for c in self.calls]


def test_write_once_order_of_calls(tmp_path: Path) -> None:
    record = Record()
    Durable(record).write_once(tmp_path / "a.json", b"{}")
    assert record.trace() == [
        "unlink .tmp-a.json",
        "create .tmp-a.json",
        "allocate .tmp-a.json",
        "write .tmp-a.json",
        "fsync .tmp-a.json",
        "rename .tmp-a.json a.json",
        f"fsync_dir {tmp_path.name}",
    ]
    assert (tmp_path / "a.json").read_bytes() == b"{}"


def test_fsyncs_reach_the_system_for_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    Durable().write_once(tmp_path / "a", b"x")
    assert synced == [str(tmp_path / ".tmp-a"), str(tmp_path)]


def test_make_directories_fsyncs_every_parent_with_a_new_name(tmp_path: Path) -> None:
    record = Record()
    Durable(record).make_directories(tmp_path / "a" / "b")
    assert record.trace() == ["mkdir a", f"fsync_dir {tmp_path.name}", "mkdir b", "fsync_dir a"]
    Durable(record).make_directories(tmp_path / "a" / "b")
    assert len(record.calls) == 4


def test_create_refuses_what_exists_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("a", "link"):
        with pytest.raises(FileExistsError):
            Durable().create(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == b"kept" and not (tmp_path / "elsewhere").exists()
    with pytest.raises(OSError, match="symbolic link"):
        Durable().append(tmp_path / "link")


def test_short_writes_go_on_and_every_byte_arrives(tmp_path: Path) -> None:
    data = os.urandom(1000)
    sizes = iter([1, 7, 100, 3, *[50] * 100])
    Durable(lambda call: next(sizes) if call.op == "write" else None).write_new(
        tmp_path / "a", [data[:600], data[600:]], 1000
    )
    assert (tmp_path / "a").read_bytes() == data


def test_large_writes_are_cut_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "CHUNK", 16)
    record = Record()
    Durable(record).write_new(tmp_path / "a", [memoryview(bytes(range(40)))], 40)
    assert [len(c.data) for c in record.calls if c.data is not None] == [16, 16, 8]
    assert (tmp_path / "a").read_bytes() == bytes(range(40))


def test_a_real_short_write_at_the_file_size_limit_is_an_error(tmp_path: Path) -> None:
    """The kernel writes what fits under RLIMIT_FSIZE and fails the rest: no file of another length passes for written."""
    code = f"""
import resource, signal, sys
from pathlib import Path
from ptxtrain.engine.durable import Durable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
io = Durable(); fd = io.create(Path({str(tmp_path)!r}) / "a")
try:
    io.write(fd, bytes(150))
except OSError as error:
    sys.exit(error.errno)
"""
    import subprocess
    import sys

    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == errno.EFBIG
    assert (tmp_path / "a").stat().st_size == 100


@pytest.mark.parametrize("op", ["create", "allocate", "write", "fsync", "rename", "fsync_dir"])
def test_an_error_keeps_the_old_file_and_is_never_retried(tmp_path: Path, op: str) -> None:
    (tmp_path / "a").write_bytes(b"old")
    seen: list[str] = []

    def hook(call: Call) -> None:
        seen.append(call.op)
        if call.op == op:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        Durable(hook).write_once(tmp_path / "a", b"new")
    assert seen.count(op) == 1
    assert (tmp_path / "a").read_bytes() == (b"new" if op == "fsync_dir" else b"old")
    assert os.listdir(tmp_path) == ["a"]


def test_file_system_that_cannot_reserve_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int):
        def fallocate(fd: int, offset: int, size: int) -> None:
            raise OSError(number, os.strerror(number))

        return fallocate

    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    Durable().write_new(tmp_path / "a", [b"x"], 1)
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        Durable().write_new(tmp_path / "b", [b"x"], 1)


def test_remove_tree_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"")
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "f").write_bytes(b"")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    Durable().remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists() and (tmp_path / "kept" / "file").exists()


def test_reading_refuses_links_fifos_devices_and_long_files_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "fifo")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    for name, limit in (("a", 4), ("link", 99), ("fifo", 99)):
        with pytest.raises(OSError):  # noqa: PT011 - each has an errno of its own
            read_regular(tmp_path / name, limit)
    with pytest.raises(OSError, match="not a regular file"), open_regular(Path("/dev/zero")):
        pass


def test_without_fsync_of_directories_there_is_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(durable.os, "open", lambda *args: opened.append(args))
    monkeypatch.setattr(durable.os, "name", "nt")
    Durable().fsync_dir(tmp_path)
    monkeypatch.undo()
    assert opened == []
