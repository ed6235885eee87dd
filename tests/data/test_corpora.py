"""Sources: what counts as text, in which order, and how documents are cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptxtrain.data import corpora
from ptxtrain.data.corpora import SEPARATOR, Piece, TextFile, pieces, read_source, read_sources
from ptxtrain.data.errors import DataError


def cut(path: Path, limit: int = 1000) -> list[Piece]:
    return list(pieces(TextFile(path.name, path, path.stat().st_size), limit))


def refused(name: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        read_source(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_read_sorted_and_what_is_skipped_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("b/z.txt", "b/a.md", "a/x.py", "B/x.txt", "top.txt", ".hidden.txt", ".git/config"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    (root / "nul.bin").write_bytes(b"text\0text")
    (root / "latin.txt").write_bytes("Größe".encode("latin-1"))
    (root / "late.txt").write_bytes(b"a" * 3_000_000 + b"\xff")
    (root / "cut.txt").write_bytes("fünf🙂".encode()[:-1])
    (root / "empty.txt").touch()
    (root / "blank.txt").write_text(" \n\t\n")
    (root / "link.txt").symlink_to(root / "top.txt")
    (root / "broken.txt").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "fifo")
    source = read_source(str(root))
    assert [file.name for file in source.files] == ["link.txt", "top.txt", "B/x.txt", "a/x.py", "b/a.md", "b/z.txt"]
    assert {kind: count for kind, count in source.skipped.items() if count} == {
        "binary files": 4,
        "empty files": 2,
        "broken links": 1,
        "linked folders": 1,
        "special files": 1,
    }
    assert source.bytes == sum(os.stat(file.path).st_size for file in source.files)


def test_the_standard_library_is_python_and_no_tests() -> None:
    source = read_source("@stdlib")
    names = [file.name for file in source.files]
    assert 3_000_000 < source.bytes < 40_000_000
    assert "argparse.py" in names and "json/decoder.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))]


def test_sources_that_are_none_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in refused(tmp_path / "absent.txt")
    assert "there is @stdlib" in refused("@fineweb")
    (tmp_path / "empty.txt").touch()
    assert "is empty; pass" in refused(tmp_path / "empty.txt")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert "is not UTF-8 text; pass" in refused(tmp_path / "binary")
    (tmp_path / "folder").mkdir()
    assert "holds no text; text files must be UTF-8" in refused(tmp_path / "folder")
    (tmp_path / "folder" / "x").write_bytes(b"\xff")
    assert "holds no text (1 binary files)" in refused(tmp_path / "folder")
    os.mkfifo(tmp_path / "fifo")
    assert "is not a regular file" in refused(tmp_path / "fifo")
    assert "\\n" in refused(f"{tmp_path}/a\nb")
    refused("a\0b")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "absent"))
    assert "no sources of its standard library" in refused("@stdlib")
    with pytest.raises(DataError, match="no SOURCE"):
        read_sources([])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_and_folders_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.txt").write_text("text")
    (tmp_path / "f" / "a.txt").chmod(0)
    assert "Permission denied" in refused(tmp_path / "f")
    (tmp_path / "f").chmod(0)
    try:
        assert "Permission denied" in refused(tmp_path / "f")
    finally:
        (tmp_path / "f").chmod(0o700)


def test_a_separator_parts_documents(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_text(f"{SEPARATOR}one\n{SEPARATOR}\ntwo\n\n{SEPARATOR}\n \n{SEPARATOR}{SEPARATOR}three")
    assert cut(path) == [Piece("one\n", True), Piece("two\n\n", True), Piece("three", True)]


def test_long_documents_are_cut_at_lines_then_spaces_then_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789\n" * 4)
    assert [piece.text for piece in cut(path, 25)] == ["0123456789\n0123456789\n"] * 2
    path.write_text("0123456789 " * 4)
    assert [piece.text for piece in cut(path, 25)] == ["0123456789 0123456789", " 0123456789 0123456789 "]
    path.write_text("x" * 60)
    assert [len(piece.text) for piece in cut(path, 25)] == [25, 25, 10]
    assert [piece.is_last for piece in cut(path, 25)] == [False, False, True]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(
        st.text(st.sampled_from("ab🙂é \n"), max_size=120).filter(lambda text: text.strip() and text[0] not in " \n"),
        min_size=1,
        max_size=6,
    ),
    limit=st.integers(len(SEPARATOR), 60),
    chunk=st.integers(1, 50),
)
def test_pieces_join_to_the_documents_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: list[str], limit: int, chunk: int
) -> None:
    monkeypatch.setattr(corpora, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes(f"\n{SEPARATOR}\n".join(documents).encode())
    joined, current = [], ""
    for piece in cut(path, limit):
        assert 0 < len(piece.text) <= limit
        current += piece.text
        if piece.is_last:
            joined.append(current)
            current = ""
    assert current == ""
    # The line break before a separator stays with its document, the one behind it goes.
    assert joined == [text + "\n" for text in documents[:-1]] + documents[-1:]


def test_a_byte_order_mark_goes_and_line_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert cut(path) == [Piece("one\r\ntwo", True)]


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text " * 10)
    file = TextFile("a.txt", path, 50)
    for data in (b"text " * 11, b"text " * 9, b"\xff" * 50):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"changed .*run again"):
            list(pieces(file, 1000))
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        list(pieces(file, 1000))
