"""The kernel cache: rendered PTX, NVRTC's output and compiled objects. User-only, because what lies in it is executed."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ptxtrain.engine.errors import PtxtrainError


def cache_root() -> Path:
    """`$PTXTRAIN_CACHE`, else `$XDG_CACHE_HOME/ptxtrain`, else `~/.cache/ptxtrain`."""
    if chosen := os.environ.get("PTXTRAIN_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ptxtrain"


def cache_dir(sub: str) -> Path:
    """The folder `sub` of the cache, made if need be, with mode 0700.

    Raises:
        PtxtrainError: another user owns it or may write to it (its files are executed), or it cannot be made.
    """
    root = cache_root()
    path = root / sub
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (root, path):
            info = folder.lstat()
            if not stat.S_ISDIR(info.st_mode):
                raise PtxtrainError(f"the kernel cache {folder} is not a folder; set PTXTRAIN_CACHE to another place")
            if hasattr(os, "getuid") and (info.st_uid != os.getuid() or info.st_mode & 0o022):
                raise PtxtrainError(
                    f"the kernel cache {folder} belongs to or may be written by another user, and its files are "
                    "executed; run `chmod 700` on it or set PTXTRAIN_CACHE to another place"
                )
    except OSError as error:
        raise PtxtrainError(
            f"the kernel cache {path} cannot be made ({error.strerror}); set PTXTRAIN_CACHE to another place"
        ) from error
    return path


def write_once(path: Path, data: bytes) -> None:
    """Write a cache file so that a reader sees all of it or none: a temporary file, then a rename.

    Losing a race to another process is fine, both wrote the same. A full disk is an error with the path in it.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PtxtrainError(
            f"cannot write {path} in the kernel cache ({error.strerror}); free some space or set PTXTRAIN_CACHE"
        ) from error
