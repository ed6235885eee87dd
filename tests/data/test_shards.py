"""`.tok` shards: the layout, what is read back, and that nothing but what was written is ever accepted."""

from __future__ import annotations

import hashlib
import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptxtrain.data import shards
from ptxtrain.data.errors import DataError
from ptxtrain.data.shards import HEADER_BYTES, MAGIC, ShardWriter, TokShard, write_shard

IN_TMP = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 bytes, so that small files have several."""
    monkeypatch.setattr(shards, "BLOCK_BYTES", 64)


def fresh(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def forge(path: Path, *, item: int = 2, vocab: int = 100, end: int = 0, count: int | None = None, body: bytes) -> Path:
    """A file whose digests all hold, whatever its header claims; packed here from the documented offsets."""
    blocks = [body[at : at + shards.BLOCK_BYTES] for at in range(0, len(body), shards.BLOCK_BYTES)]
    table = b"".join(hashlib.sha256(block).digest() for block in blocks)
    claimed = len(body) // item if count is None else count
    head = MAGIC + struct.pack("<IIIIQI", 1, item, vocab, end, claimed, shards.BLOCK_BYTES) + bytes(28) + bytes(32)
    path.write_bytes(head + hashlib.sha256(head + table).digest() + body + table)
    return path


def refused(path: Path) -> str:
    """The message with which opening and verifying refuses a file."""
    with pytest.raises(DataError) as caught:
        TokShard(path).verify()
    message = str(caught.value)
    assert "\n" not in message and path.name in message
    return message


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    tokens = np.arange(100)
    path = tmp_path / "a.tok"
    digest = write_shard(path, tokens, vocab_size=4096, end_of_text=7, tokenizer_digest=bytes(range(32)))
    data = path.read_bytes()
    assert data[:8] == b"\x89TOK\r\n\x1a\n"
    assert struct.unpack_from("<IIIIQI", data, 8) == (1, 2, 4096, 7, 100, 1 << 20)
    assert data[36:64] == bytes(28) and data[64:96] == bytes(range(32))
    assert data[128:328] == tokens.astype("<u2").tobytes()
    assert data[328:] == hashlib.sha256(data[128:328]).digest()
    assert data[96:128] == hashlib.sha256(data[:96] + data[328:]).digest() == bytes.fromhex(digest)


@pytest.mark.parametrize(("vocab", "dtype"), [(257, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4"), (1 << 31, "<u4")])
def test_tokens_take_two_bytes_up_to_65536_ids(tmp_path: Path, vocab: int, dtype: str) -> None:
    tokens = np.array([0, vocab - 1, 5])
    write_shard(tmp_path / "a.tok", tokens, vocab_size=vocab, end_of_text=vocab - 1)
    shard = TokShard(tmp_path / "a.tok")
    shard.verify()
    assert shard.tokens.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(shard.tokens, tokens)
    assert (shard.count, shard.vocab_size, shard.end_of_text) == (3, vocab, vocab - 1)


@IN_TMP
@given(
    tokens=st.lists(st.integers(0, 299), min_size=1, max_size=300),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    wide=st.booleans(),
)
def test_round_trip_however_it_is_appended(
    tmp_path: Path, small_blocks: None, tokens: list[int], cuts: list[int], wide: bool
) -> None:
    vocab = 70_000 if wide else 300
    array = np.array(tokens)
    digest = write_shard(fresh(tmp_path / "whole.tok"), array, vocab_size=vocab)
    fields = {"vocab_size": vocab, "end_of_text": 0, "tokenizer_digest": bytes(32)}
    with ShardWriter(fresh(tmp_path / "parts.tok"), **fields) as writer:
        for part in np.split(array, sorted(min(cut, len(array)) for cut in cuts)):
            writer.append(part)
        assert writer.finish() == digest
    assert (tmp_path / "parts.tok").read_bytes() == (tmp_path / "whole.tok").read_bytes()
    shard = TokShard(tmp_path / "whole.tok")
    shard.verify()
    np.testing.assert_array_equal(shard.tokens, array)
    low, high = sorted((len(array) // 3, len(array) * 2 // 3))
    np.testing.assert_array_equal(shard.read(low, high), array[low:high])
    assert not shard.tokens.flags.writeable


def test_every_flipped_bit_is_refused(tmp_path: Path, small_blocks: None) -> None:
    path = tmp_path / "a.tok"
    write_shard(path, np.arange(77) * 3, vocab_size=300)  # three blocks, the last one short
    data = bytearray(path.read_bytes())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        refused(path)
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    TokShard(path).verify()


def test_every_other_length_is_refused(tmp_path: Path, small_blocks: None) -> None:
    path = tmp_path / "a.tok"
    write_shard(path, np.arange(77), vocab_size=300)
    data = path.read_bytes()
    for length in [*range(len(data)), len(data) + 1, len(data) + 32, len(data) + 64]:
        path.write_bytes(data.ljust(length, b"\0")[:length])
        refused(path)


def test_a_flip_is_found_when_its_block_is_used(tmp_path: Path, small_blocks: None) -> None:
    path = tmp_path / "a.tok"
    write_shard(path, np.arange(96), vocab_size=300)  # blocks of 32 tokens
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 64 + 10] ^= 1
    path.write_bytes(data)
    shard = TokShard(path)
    np.testing.assert_array_equal(shard.read(0, 32), np.arange(32))
    with pytest.raises(DataError, match=r"damaged between byte 192 and byte 256"):
        shard.read(31, 33)
    with pytest.raises(DataError, match="damaged"):  # and again: an error does not make it good
        shard.read(40, 41)
    np.testing.assert_array_equal(shard.read(64, 96), np.arange(64, 96))


@pytest.mark.parametrize("count", [0, 1, 2**36 + 1, 2**40, 2**63, 2**64 - 1])
def test_hostile_counts_are_refused_fast_in_little_memory(tmp_path: Path, count: int) -> None:
    path = forge(tmp_path / "a.tok", body=bytes(20), count=count)
    begin = time.process_time()
    refused(path)
    assert time.process_time() - begin < 1
    tracemalloc.start()
    refused(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_huge_sparse_file_is_refused_fast_in_little_memory(tmp_path: Path) -> None:
    """The sizes agree, so that the whole table is read: 8 MiB at most."""
    path = forge(tmp_path / "a.tok", body=b"", count=2**36)
    blocks = 2**37 // shards.BLOCK_BYTES
    try:
        os.truncate(path, HEADER_BYTES + 2**37 + 32 * blocks)
    except OSError:
        pytest.skip("this file system has no sparse files of 128 GiB")
    begin = time.process_time()
    assert "digest" in refused(path)
    assert time.process_time() - begin < 1
    tracemalloc.start()
    refused(path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


@settings(IN_TMP, max_examples=200)
@given(
    fields=st.tuples(*[st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2, 4, 100, 1 << 20, 1 << 31])] * 5),
    count=st.integers(0, 2**64 - 1) | st.integers(0, 40),
    body=st.binary(max_size=100),
)
def test_random_headers_are_refused_or_true(tmp_path: Path, fields: tuple[int, ...], count: int, body: bytes) -> None:
    version, item, vocab, end, block = fields
    head = MAGIC + struct.pack("<IIIIQI", version, item, vocab, end, count, block) + bytes(28) + bytes(32)
    path = tmp_path / "a.tok"
    table = hashlib.sha256(body).digest()
    path.write_bytes(head + hashlib.sha256(head + table).digest() + body + table)
    try:
        shard = TokShard(path)
        shard.verify()
    except DataError:
        return
    assert (version, block, count * item) == (1, shards.BLOCK_BYTES, len(body))
    assert shard.tokens.tobytes() == body and int(shard.tokens.max()) < vocab


def test_a_bad_id_under_good_digests_is_named_with_its_offset(tmp_path: Path, small_blocks: None) -> None:
    ids = np.arange(60, dtype="<u2")
    ids[50] = 100
    path = forge(tmp_path / "a.tok", body=ids.tobytes(), vocab=100)
    assert "token 50 (byte 228) is id 100, not below the vocabulary of 100" in refused(path)
    with pytest.raises(DataError, match="token 50 "):
        TokShard(path).read(33, 60)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"vocab": 0}, "damaged header"),
        ({"vocab": 2**31 + 1, "item": 4}, "damaged header"),
        ({"end": 100}, "damaged header"),
        ({"item": 4}, "damaged header"),
        ({"vocab": 70_000}, "damaged header"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(tmp_path: Path, fields: dict[str, int], what: str) -> None:
    assert what in refused(forge(tmp_path / "a.tok", body=bytes(40), **fields))


def test_a_newer_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    write_shard(path, np.arange(5), vocab_size=10)
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    assert "version 2; this ptxtrain reads version 1" in refused(path)


def test_links_fifos_folders_and_absent_files_are_refused_at_once(tmp_path: Path) -> None:
    write_shard(tmp_path / "good.tok", np.arange(5), vocab_size=10)
    (tmp_path / "link.tok").symlink_to(tmp_path / "good.tok")
    os.mkfifo(tmp_path / "fifo.tok")
    (tmp_path / "folder.tok").mkdir()
    (tmp_path / "empty.tok").touch()
    (tmp_path / "text.tok").write_text("text\n" * 100)
    assert "is a link" in refused(tmp_path / "link.tok")
    assert "not a regular file" in refused(tmp_path / "fifo.tok")
    assert "not a regular file" in refused(tmp_path / "folder.tok")
    assert "No such file" in refused(tmp_path / "absent.tok")
    assert "0 bytes" in refused(tmp_path / "empty.tok")
    assert "is not a .tok shard" in refused(tmp_path / "text.tok")


def test_truncation_while_in_use_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    write_shard(path, np.arange(5000) % 300, vocab_size=300)
    shard = TokShard(path)
    shard.read(0, 10)
    os.truncate(path, 100)
    with pytest.raises(DataError, match=r"changed from 10,160 to 100 bytes while in use"):
        shard.read(4000, 4010)


def test_writing_in_place_while_in_use_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    write_shard(path, np.arange(500) % 300, vocab_size=300)
    shard = TokShard(path)
    shard.read(0, 10)
    os.utime(path)  # a new time alone changes nothing
    np.testing.assert_array_equal(shard.read(0, 10), np.arange(10))
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\1")
    os.utime(path, ns=(1, 1))  # whatever the clock's resolution
    for _ in range(2):
        with pytest.raises(DataError, match="is damaged"):
            shard.read(0, 10)


def test_replacing_between_opening_and_use_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    write_shard(path, np.arange(500), vocab_size=500)
    shard = TokShard(path)
    write_shard(tmp_path / "b.tok", np.arange(500)[::-1], vocab_size=500)
    os.replace(tmp_path / "b.tok", path)
    for use in (lambda: shard.tokens, lambda: shard.read(0, 1), shard.verify):
        with pytest.raises(DataError, match="was replaced"):
            use()


def test_an_unfinished_file_is_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.tok"
    with ShardWriter(path, vocab_size=10, end_of_text=0, tokenizer_digest=bytes(32)) as writer:
        writer.append(np.arange(10))
    assert "not a .tok shard" in refused(path)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    writer = ShardWriter(tmp_path / "a.tok", vocab_size=10, end_of_text=0, tokenizer_digest=bytes(32))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._handle or -1)
    os.close(full)
    with writer, pytest.raises(DataError, match=r"cannot write .*a\.tok: No space left on device; free some space"):
        writer.append(np.arange(10))


def test_closing_and_using_again(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tok", np.arange(500), vocab_size=500)
    shard = TokShard(tmp_path / "a.tok")
    view = shard.read(3, 6)
    shard.close()
    np.testing.assert_array_equal(view, [3, 4, 5])
    np.testing.assert_array_equal(shard.read(4, 8), [4, 5, 6, 7])
