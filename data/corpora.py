"""Text in: files, folders and `@stdlib`, as a list of text files first and as pieces of documents when they are read.

A corpus lists the same files in the same order wherever it lies. Nothing is left out in silence: what is skipped is
counted by kind.
"""

from __future__ import annotations

import codecs
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ptxtrain.data.errors import DataError
from ptxtrain.data.files import open_regular, reason, shown

STDLIB = "@stdlib"
SEPARATOR = "<|endoftext|>"  # parts the documents of a text file, as in TinyStories and its like
CHUNK_BYTES = 1 << 20

# Tests, and folders that are generated tables or escaped text, teach repetition; tests are not installed everywhere
# either.
_NOT_IN_STDLIB = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of UTF-8 text. `name` is its place within the sources, the same wherever they lie; it orders the files."""

    name: str
    path: Path
    size: int


@dataclass(slots=True)
class Source:
    """What one SOURCE gave: text files, their bytes, and what was skipped, counted by kind."""

    name: str
    files: list[TextFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        """Bytes of all text files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a document, usually all of it; `is_last` where the document ends."""

    text: str
    is_last: bool


def _chunks(path: Path, size: int) -> Iterator[str]:
    """The text of a file of `size` bytes, a part at a time, without a byte-order mark.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        DataError: it cannot be read or no longer has `size` bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    seen = 0
    with open_regular(path, follow_links=True) as file:
        while True:
            try:
                data = file.read(CHUNK_BYTES)
            except OSError as error:
                raise DataError(f"cannot read {shown(path)}: {reason(error)}") from error
            seen += len(data)
            yield decoder.decode(data, final=not data)
            if not data:
                break
    if seen != size:
        raise DataError(f"{shown(path)} changed from {size:,} to {seen:,} bytes while it was read; run again")


def _kind(path: Path, size: int) -> str:
    """ "text", "empty" (no bytes, or only spaces) or "binary" (not UTF-8, or with NULs)."""
    is_blank = True
    try:
        for text in _chunks(path, size):
            if "\0" in text:
                return "binary"
            is_blank = is_blank and not text.strip()
    except UnicodeDecodeError:
        return "binary"
    return "empty" if is_blank else "text"


def _walk(root: Path, source: Source, keep: Callable[[str], bool], enter: Callable[[str], bool]) -> Iterator[Path]:
    """Files below `root`, sorted by name at each level; links to folders are not followed (they may lead back)."""

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read the folder {shown(error.filename or root)}: {reason(error)}") from error

    for folder, folders, names in os.walk(root, onerror=fail):
        source.skipped["linked folders"] += sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        folders[:] = sorted(filter(enter, folders), key=os.fsencode)
        for name in sorted(names, key=os.fsencode):
            if keep(name):
                yield Path(folder, name)


def _add(source: Source, path: Path, name: str) -> str:
    """Put a file into the source if it is text; its kind otherwise."""
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return "broken links" if os.path.islink(path) else "vanished files"
    except OSError as error:
        raise DataError(f"cannot read {shown(path)}: {reason(error)}") from error
    if not stat.S_ISREG(info.st_mode):
        return "special files"
    kind = _kind(path, info.st_size)
    if kind == "text":
        source.files.append(TextFile(name, path, info.st_size))
        return ""
    return {"empty": "empty files", "binary": "binary files"}[kind]


def _stdlib_root() -> Path:
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise DataError(
            f"this Python has no sources of its standard library at {shown(root)}; pass a text file or a folder as SOURCE"
        )
    return root


def _read_folder(source: Source, root: Path) -> None:
    def is_visible(name: str) -> bool:
        return not name.startswith(".")

    def is_wanted_source(name: str) -> bool:
        # _sysconfigdata is a table of how this Python was built.
        return name.endswith(".py") and not name.startswith((".", "_sysconfigdata"))

    if source.name == STDLIB:
        paths = _walk(root, source, is_wanted_source, lambda name: is_visible(name) and name not in _NOT_IN_STDLIB)
    else:
        paths = _walk(root, source, is_visible, is_visible)
    for path in paths:
        if skipped := _add(source, path, path.relative_to(root).as_posix()):
            source.skipped[skipped] += 1
    if not source.files:
        counted = ", ".join(f"{count:,} {kind}" for kind, count in sorted(source.skipped.items()) if count)
        raise DataError(f"{shown(root)} holds no text{f' ({counted})' if counted else ''}; text files must be UTF-8")


def read_source(name: str) -> Source:
    """Look at one SOURCE: a text file, a folder (all its UTF-8 files, hidden ones left out) or `@stdlib`.

    Every file is read once to see that it is text.

    Raises:
        DataError: it is missing, unreadable, or holds no text.
    """
    source = Source(name)
    if name == STDLIB:
        _read_folder(source, _stdlib_root())
        return source
    path = Path(name)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        if name.startswith("@"):
            raise DataError(
                f"there is no corpus {shown(name)}; there is {STDLIB}, or pass a file or a folder"
            ) from error
        what = reason(error) if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot read {shown(name)}: {what}") from error
    if stat.S_ISDIR(mode):
        _read_folder(source, path)
        return source
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{shown(name)} is not a regular file; the text is read three times, so write it to a file first"
        )
    if skipped := _add(source, path, path.name):
        what = "is empty" if skipped == "empty files" else "is not UTF-8 text"
        raise DataError(f"{shown(name)} {what}; pass a UTF-8 text file, a folder or {STDLIB}")
    return source


def read_sources(names: Sequence[str]) -> list[Source]:
    """Look at every SOURCE in turn."""
    if not names:
        raise DataError(f"no SOURCE given; pass a text file, a folder or {STDLIB}")
    return [read_source(name) for name in names]


def pieces(file: TextFile, limit: int) -> Iterator[Piece]:
    """The documents of a text file, those longer than `limit` characters cut into pieces, at line ends where possible.

    The literal `<|endoftext|>` parts documents; documents without any text are left out. Memory is bounded by `limit`,
    not by the file.
    """
    assert limit >= len(SEPARATOR)
    try:
        yield from _mark_last(_cut(_chunks(file.path, file.size), limit))
    except UnicodeDecodeError as error:
        raise DataError(f"{shown(file.path)} changed while it was read: it is no longer UTF-8; run again") from error


def _cut(chunks: Iterable[str], limit: int) -> Iterator[str | None]:
    """Pieces of at most `limit` characters; None where a document ends."""
    held = ""
    is_after_separator = False  # a line break right behind a separator belongs to it
    for chunk in chunks:
        held += chunk
        *whole, held = held.split(SEPARATOR)
        for document in whole:
            yield from _cut_document(document.removeprefix("\n") if is_after_separator else document, limit, 0)
            yield None
            is_after_separator = True
        if is_after_separator and held:
            held, is_after_separator = held.removeprefix("\n"), False
        # Keep back more than a separator, which may have begun at the end.
        cut = list(_cut_document(held, limit, limit + len(SEPARATOR)))
        held = held[sum(map(len, cut)) :]
        yield from cut
    yield from _cut_document(held, limit, 0)


def _cut_document(text: str, limit: int, keep: int) -> Iterator[str]:
    """Cut `text` behind a line's end, else before a space, else anywhere, as late as `limit` allows.

    Stops when at most `keep` characters are left.
    """
    start = 0
    while len(text) - start > keep:
        stop = start + limit
        if stop < len(text):
            middle = start + limit // 2
            line, word = text.rfind("\n", middle, stop), text.rfind(" ", middle, stop)
            stop = line + 1 if line >= 0 else word if word >= 0 else stop
        yield text[start:stop]
        start = stop


def _mark_last(cut: Iterable[str | None]) -> Iterator[Piece]:
    """Join end marks to the piece before them.

    Pieces of blanks before a document's first text are dropped, and so are documents of blanks alone.
    """
    waiting: str | None = None
    for text in cut:
        if text is None:
            if waiting is not None:
                yield Piece(waiting, True)
            waiting = None
        elif waiting is not None or text.strip():
            if waiting is not None:
                yield Piece(waiting, False)
            waiting = text
    if waiting is not None:
        yield Piece(waiting, True)
