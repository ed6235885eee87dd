"""`.tok` shards: a run of token ids in a file that is checked before it is mapped and before each part of it is used.

Everything is little-endian. A shard is a header of 128 bytes, the tokens, and a table of digests:

    offset  bytes  what
    0       8      magic 89 'T' 'O' 'K' 0D 0A 1A 0A (a copy made in text mode, or cut to seven bits, no longer has it)
    8       4      version: 1
    12      4      bytes of a token: 2 (u16, vocabularies up to 65,536) or 4 (u32)
    16      4      vocabulary size: every token is below it
    20      4      id of the end-of-text token
    24      8      number of tokens, at least 1
    32      4      bytes of a block: 1,048,576
    36      28     zero
    64      32     SHA-256 of the tokenizer.json that made the tokens
    96      32     header digest: SHA-256 of bytes 0-95 followed by the table of digests
    128     …      the tokens
    …       32·n   SHA-256 of each block of the tokens, the last one shorter

The header digest covers the table and the table the tokens, so that it stands for every byte of the file, and opening a
shard reads only the header and the table. Nothing is mapped before the sizes in the header agree with the file's,
because touching a map past the end of its file kills the process; sizes are looked at again before each use. Each block
is compared with its digest when it is first used.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ptxtrain.data.errors import DataError
from ptxtrain.data.files import create, open_regular, read_exactly, shown, sync, write_all
from ptxtrain.data.manifest import Manifest, ShardEntry, read_manifest, read_tokenizer

MAGIC = b"\x89TOK\r\n\x1a\n"
VERSION = 1
BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 32
MAX_TOKENS = 1 << 36  # keeps the table of digests, which is held in memory, at 8 MiB
MAX_VOCAB = 1 << 31  # ids travel as i32

_FIELDS = struct.Struct("<8s4IQI28x32s")
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES
assert HEADER_BYTES == 128


def token_bytes(vocab_size: int) -> int:
    """Bytes of a stored token: 2 up to 65,536 ids, else 4."""
    return 2 if vocab_size <= 1 << 16 else 4


class ShardWriter:
    """Writes one shard front to back in bounded memory.

    The header comes last, so that an unfinished file is never taken for a shard. Use as a context manager; `finish`
    makes the file durable and gives its header digest.
    """

    def __init__(self, path: Path, *, vocab_size: int, end_of_text: int, tokenizer_digest: bytes) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self.tokenizer_digest = tokenizer_digest
        self.count = 0
        self.dtype = np.dtype(f"<u{token_bytes(vocab_size)}")
        self._table: list[bytes] = []
        self._block = hashlib.sha256()
        self._room = BLOCK_BYTES
        self._handle: int | None = create(path)
        write_all(self._handle, bytes(HEADER_BYTES), path)

    def append(self, tokens: NDArray[Any]) -> None:
        """Add `tokens` [n], any integer dtype, all below the vocabulary size."""
        assert self._handle is not None
        if not len(tokens):
            return
        assert int(tokens.min()) >= 0 and int(tokens.max()) < self.vocab_size
        data = memoryview(np.ascontiguousarray(tokens, self.dtype).data).cast("B")
        write_all(self._handle, data, self.path)
        self.count += len(tokens)
        while data:
            part = data[: self._room]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_block()
            data = data[len(part) :]

    def _end_block(self) -> None:
        self._table.append(self._block.digest())
        self._block, self._room = hashlib.sha256(), BLOCK_BYTES

    def finish(self) -> str:
        """Write table and header, sync, close; the header digest in hex. A shard of no tokens is our own mistake."""
        assert self._handle is not None and 0 < self.count <= MAX_TOKENS
        if self._room != BLOCK_BYTES:
            self._end_block()
        table = b"".join(self._table)
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.dtype.itemsize,
            self.vocab_size,
            self.end_of_text,
            self.count,
            BLOCK_BYTES,
            self.tokenizer_digest,
        )
        digest = hashlib.sha256(fields + table)
        write_all(self._handle, table, self.path)
        os.lseek(self._handle, 0, os.SEEK_SET)
        write_all(self._handle, fields + digest.digest(), self.path)
        sync(self._handle, self.path)
        self.close()
        return digest.hexdigest()

    def close(self) -> None:
        """Close without finishing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_shard(
    path: Path, tokens: NDArray[Any], *, vocab_size: int, end_of_text: int = 0, tokenizer_digest: bytes = bytes(32)
) -> str:
    """Write `tokens` [n] as one shard; its header digest in hex."""
    with ShardWriter(path, vocab_size=vocab_size, end_of_text=end_of_text, tokenizer_digest=tokenizer_digest) as writer:
        writer.append(tokens)
        return writer.finish()


@dataclass(frozen=True, slots=True)
class Header:
    """A shard's header and table of digests, held against each other and the file's size. Digests in hex."""

    size: int  # bytes of the file
    item: int  # bytes of a token
    count: int  # tokens
    vocab_size: int
    end_of_text: int
    tokenizer_digest: str
    digest: str
    table: bytes


def _refusal(path: Path, what: str) -> DataError:
    return DataError(f"{shown(path)} {what}; copy it again or tokenize the text again")


def read_header(file: BinaryIO, path: Path) -> Header:
    """Header and table of an open file. Reads 128 bytes, then, once all sizes agree, at most 8 MiB.

    Raises:
        DataError: the file is not a shard, or not what was written.
    """
    size = os.fstat(file.fileno()).st_size
    if size < HEADER_BYTES:
        raise _refusal(path, f"has {size:,} bytes, less than a shard's header of {HEADER_BYTES}")
    header = read_exactly(file, 0, HEADER_BYTES, path)
    magic, version, item, vocab, end, count, block, tokenizer = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise _refusal(path, "is not a .tok shard")
    if version != VERSION:
        raise DataError(
            f"{shown(path)} is a .tok shard of version {version}; this ptxtrain reads version {VERSION}: "
            "tokenize the text again or use the ptxtrain that wrote it"
        )
    if not 0 < count <= MAX_TOKENS:
        raise _refusal(path, f"claims {count:,} tokens, not 1 to {MAX_TOKENS:,}")
    if not 0 < vocab <= MAX_VOCAB or end >= vocab or item != token_bytes(vocab) or block != BLOCK_BYTES:
        raise _refusal(
            path, f"has a damaged header (vocabulary {vocab}, end of text {end}, token bytes {item}, block {block})"
        )
    blocks = -(-count * item // BLOCK_BYTES)
    expected = HEADER_BYTES + count * item + blocks * DIGEST_BYTES
    if size != expected:
        raise _refusal(path, f"has {size:,} bytes, but its {count:,} tokens make {expected:,}")
    table = read_exactly(file, HEADER_BYTES + count * item, blocks * DIGEST_BYTES, path)
    digest = hashlib.sha256(header[:-DIGEST_BYTES] + table)
    if digest.digest() != header[-DIGEST_BYTES:]:
        raise _refusal(path, "does not match its header digest")
    return Header(size, item, count, vocab, end, tokenizer.hex(), digest.hexdigest(), table)


class TokShard:
    """A shard whose header, table of digests and sizes hold.

    Its tokens are mapped on first use and checked block by block as they are used.

    Attributes: `path`, `count` (tokens), `vocab_size`, `end_of_text`, `size` (bytes of the file), `digest` (hex, stands
    for every byte), `tokenizer_digest` (hex), `dtype`.

    Raises:
        DataError: the file is missing, a link, not a regular file, not a shard, or not what was written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open_regular(self.path) as file:
            header = read_header(file, self.path)
        self._header = header
        self.dtype = np.dtype(f"<u{header.item}")
        self.size, self.count = header.size, header.count
        self.vocab_size, self.end_of_text = header.vocab_size, header.end_of_text
        self.tokenizer_digest, self.digest = header.tokenizer_digest, header.digest
        self.blocks = len(header.table) // DIGEST_BYTES
        self._file: BinaryIO | None = None
        self._map: mmap.mmap | None = None
        self._tokens: NDArray[Any] | None = None
        self._modified = 0  # the file's time stamp when its blocks were last known to be unchecked
        self._checked = bytearray()  # one flag a block

    def _same(self, file: BinaryIO, what: str) -> None:
        if read_header(file, self.path) != self._header:
            raise _refusal(self.path, what)

    @property
    def tokens(self) -> NDArray[Any]:
        """All tokens [count], u16 or u32, mapped and read-only, its blocks not yet checked: see `read`."""
        if self._tokens is None:
            file = open_regular(self.path)
            try:
                self._modified = os.fstat(file.fileno()).st_mtime_ns
                self._same(file, "was replaced since it was opened")
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
            except BaseException:
                file.close()
                raise
            self._file = file
            self._checked = bytearray(self.blocks)
            self._tokens = np.frombuffer(self._map, self.dtype, self.count, HEADER_BYTES)
        return self._tokens

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [stop - start] as a view of the map: sizes looked at just now, blocks compared with their digests.

        Raises:
            DataError: the file changed, or a block is not what was written.
        """
        assert 0 <= start <= stop <= self.count
        tokens = self.tokens
        assert self._file is not None and self._map is not None
        now = os.fstat(self._file.fileno())
        if now.st_size != self.size:
            raise _refusal(self.path, f"changed from {self.size:,} to {now.st_size:,} bytes while in use")
        if now.st_mtime_ns != self._modified:  # written to in place: trust nothing that was checked before
            self._same(self._file, "was overwritten while in use")
            self._modified = now.st_mtime_ns
            self._checked = bytearray(self.blocks)
        item = self.dtype.itemsize
        for block in range(start * item // BLOCK_BYTES, -(-stop * item // BLOCK_BYTES)):
            if not self._checked[block]:
                begin = HEADER_BYTES + block * BLOCK_BYTES
                end = min(begin + BLOCK_BYTES, HEADER_BYTES + self.count * item)
                with memoryview(self._map) as view:
                    self._check_block(block, view[begin:end])
                self._checked[block] = 1
        return tokens[start:stop]

    def _check_block(self, block: int, data: bytes | memoryview) -> None:
        begin = HEADER_BYTES + block * BLOCK_BYTES
        if hashlib.sha256(data).digest() != self._header.table[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]:
            raise _refusal(self.path, f"is damaged between byte {begin:,} and byte {begin + len(data):,}")
        ids = np.frombuffer(data, self.dtype)
        if int(ids.max()) >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            raise self.bad_token(block * (BLOCK_BYTES // self.dtype.itemsize) + at, int(ids[at]), self.vocab_size)

    def bad_token(self, index: int, token: int, vocab_size: int) -> DataError:
        """The error for a token id that is not below the vocabulary size."""
        return DataError(
            f"{shown(self.path)}: token {index:,} (byte {HEADER_BYTES + index * self.dtype.itemsize:,}) is id {token:,}, "
            f"not below the vocabulary of {vocab_size:,}; tokenize the text again"
        )

    def verify(self) -> None:
        """Compare every block with its digest and every id with the vocabulary size, without a map.

        Raises:
            DataError: the first block that is not what was written, or the first bad id.
        """
        with open_regular(self.path) as file:
            self._same(file, "was replaced since it was opened")
            remaining = self.count * self.dtype.itemsize
            for block in range(self.blocks):
                size = min(BLOCK_BYTES, remaining)
                self._check_block(block, read_exactly(file, HEADER_BYTES + block * BLOCK_BYTES, size, self.path))
                remaining -= size

    def close(self) -> None:
        """Let go of the map; views that are still held keep it alive. The next use maps again."""
        self._tokens = self._map = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def __len__(self) -> int:
        return self.count


class Dataset:
    """A directory of `manifest.json`, `tokenizer.json` and shards that all agree.

    Tokens are checked as they are used, or all at once by `verify`.

    Attributes: `directory`, `manifest`, `vocab_size`, `end_of_text`, `tokenizer_path`, `tokenizer_digest` (hex),
    `train`, `val`.

    Raises:
        DataError: a file is missing, damaged or another than the manifest says.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.manifest: Manifest = read_manifest(self.directory)
        self.vocab_size = self.manifest.vocab_size
        self.end_of_text = self.manifest.end_of_text
        self.tokenizer_path = self.directory / "tokenizer.json"
        self.tokenizer_digest = self.manifest.tokenizer_sha256
        read_tokenizer(self.tokenizer_path, self.tokenizer_digest)
        self.train: list[TokShard] = []
        self.val: list[TokShard] = []
        for entry in self.manifest.shards:
            (self.train if entry.split == "train" else self.val).append(self._open(entry))

    def _open(self, entry: ShardEntry) -> TokShard:
        shard = TokShard(self.directory / entry.name)
        found = ShardEntry(entry.name, entry.split, shard.count, shard.size, shard.digest)
        same_ids = (shard.vocab_size, shard.end_of_text) == (self.vocab_size, self.end_of_text)
        if found != entry or not same_ids or shard.tokenizer_digest != self.tokenizer_digest:
            raise DataError(
                f"{shown(shard.path)} is not the shard that manifest.json lists ({entry.tokens:,} tokens, digest "
                f"{entry.digest[:16]}…; found {shard.count:,}, {shard.digest[:16]}…); restore it or tokenize the text again"
            )
        return shard

    @property
    def train_tokens(self) -> int:
        """Tokens of the training split."""
        return sum(shard.count for shard in self.train)

    @property
    def val_tokens(self) -> int:
        """Tokens of the validation split."""
        return sum(shard.count for shard in self.val)

    def verify(self) -> None:
        """Check every byte of every shard."""
        for shard in [*self.train, *self.val]:
            shard.verify()

    def identity(self) -> dict[str, Any]:
        """What a run records to know its data again: the tokenizer, and order, size and digest of each shard."""
        return {
            "vocab_size": self.vocab_size,
            "tokenizer_sha256": self.tokenizer_digest,
            "shards": [
                {"name": e.name, "tokens": e.tokens, "bytes": e.bytes, "digest": e.digest} for e in self.manifest.shards
            ],
        }

    def difference(self, recorded: dict[str, Any]) -> str | None:
        """How this dataset is not the one that `recorded` (an `identity()`) describes, in words; None if it is."""
        mine = self.identity()
        for key, name in (("vocab_size", "vocabulary size"), ("tokenizer_sha256", "tokenizer")):
            if recorded.get(key) != mine[key]:
                return f"its {name} is {mine[key]}, not {recorded.get(key)}"
        before = recorded.get("shards")
        if not isinstance(before, list):
            return "the record lists no shards"
        for then, now in zip(before, mine["shards"], strict=False):
            if then != now:
                was = then if isinstance(then, dict) else {}
                return (
                    f"{now['name']} ({now['tokens']:,} tokens, digest {now['digest'][:16]}…) was "
                    f"{was.get('name')} ({was.get('tokens')} tokens, digest {str(was.get('digest'))[:16]}…)"
                )
        if len(before) != len(mine["shards"]):
            return f"it has {len(mine['shards'])} shards, not {len(before)}"
        return None
