"""Text to a dataset directory: learn a vocabulary, choose the validation split, write shards. All of it, or nothing.

The text is read as a stream three times (is it text, what is in it, its tokens), so that memory does not grow with it.
The result depends on the text, the names of the files within their sources and the arguments, not on the machine, its
threads or where the files lie.

Files are written in an order mixed by a hash of their names: the loader reads in order, and neighbours in a folder are
alike. A document goes to the validation split when the hash of its text falls below the fraction asked for, so that
copies of a document are never on both sides.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxtrain.data.corpora import SEPARATOR, STDLIB, Piece, Source, TextFile, pieces, read_sources
from ptxtrain.data.errors import DataError
from ptxtrain.data.files import check_free, new_directory, shown, write_file
from ptxtrain.data.manifest import MAX_SHARDS, SPLITS, Manifest, ShardEntry, manifest_bytes, shard_name
from ptxtrain.data.shards import Dataset, ShardWriter
from ptxtrain.data.tokenizer import Tokenizer, check_vocab_size, load_tokenizer, train_tokenizer

DEFAULT_VOCAB = 4096
DEFAULT_VAL_FRACTION = 0.03
DEFAULT_SHARD_TOKENS = 1 << 26
LEAST_SHARD_TOKENS = 1024

PIECE_CHARACTERS = 1 << 18  # a longer document is cut, to bound memory and to spread the split
SAMPLE_BYTES = 32 << 20  # the vocabulary is learned on this much text, chosen by hash; more does not change it visibly
BATCH_CHARACTERS = 1 << 20  # encoded at once

Progress = Callable[[str, int, int], None]  # what is being done, bytes of text done, bytes in all
Note = Callable[[str], None]


def _nothing(*_: object) -> None:
    pass


@dataclass(slots=True)
class _Corpus:
    """All files in the order in which they are written."""

    sources: list[Source]
    files: list[TextFile]
    bytes: int
    piece_limit: int

    def pieces(self, what: str, progress: Progress) -> Iterator[Piece]:
        before, told = 0, 0
        progress(what, 0, self.bytes)
        for file in self.files:
            inside = 0  # characters, near enough to bytes within a file
            for piece in pieces(file, self.piece_limit):
                yield piece
                inside += len(piece.text)
                done = before + min(inside, file.size)
                if done - told >= self.bytes // 500:
                    told = done
                    progress(what, done, self.bytes)
            before += file.size
        progress(what, self.bytes, self.bytes)


def _gather(names: Sequence[str], note: Note) -> _Corpus:
    sources = read_sources(names)
    keyed = []
    for index, source in enumerate(sources):
        for file in source.files:
            keyed.append((hashlib.sha256(b"%d/" % index + os.fsencode(file.name)).digest(), file))
        for kind, count in sorted(source.skipped.items()):
            if count:
                note(f"{shown(source.name)}: {count:,} {kind if count > 1 else kind.removesuffix('s')} skipped")
    keyed.sort(key=lambda pair: pair[0])
    total = sum(source.bytes for source in sources)
    # A small text still falls into some fifty pieces to split between training and validation.
    limit = min(PIECE_CHARACTERS, max(len(SEPARATOR), total // 50))
    return _Corpus(sources, [file for _, file in keyed], total, limit)


def _hashes(text: str) -> tuple[int, int, bytes]:
    """Two 64-bit numbers, for the split and for the sample, and the digest they are part of."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"), digest


@dataclass(slots=True)
class _Split:
    """Which pieces are for validation. Made by looking at all pieces once, so that neither side stays empty."""

    fraction: float
    pieces: int = 0
    documents: int = 0
    least: int = 1 << 64
    greatest: int = -1
    digest: Any = field(default_factory=hashlib.sha256)  # of all pieces in order: has the text changed since?

    def look(self, piece: Piece) -> tuple[int, int]:
        """Take note of a piece; its two hashes."""
        split, sample, digest = _hashes(piece.text)
        self.pieces += 1
        self.documents += piece.is_last
        self.least, self.greatest = min(self.least, split), max(self.greatest, split)
        self.digest.update(digest)
        return split, sample

    @property
    def threshold(self) -> int:
        """Hashes below it are validation, at least one of them and not all."""
        return min(max(int(self.fraction * 2**64), self.least + 1), self.greatest)

    def choose(self, index: int, split: int) -> str:
        """The split of piece number `index` with the hash `split`."""
        if self.least == self.greatest:  # one text over and over: nothing but the number tells pieces apart
            return "val" if index % max(2, round(1 / self.fraction)) == 0 else "train"
        return "val" if split < self.threshold else "train"


def _learn(corpus: _Corpus, split: _Split, vocab_size: int, progress: Progress) -> Tokenizer:
    """Look at all pieces and learn a vocabulary from a sample of the training split."""
    kept = min(1.0, SAMPLE_BYTES / corpus.bytes) * 2**64
    held_out = int(split.fraction * 2**64)

    def texts() -> Iterator[str]:
        for piece in corpus.pieces("reading", progress):
            first, second = split.look(piece)
            if second <= kept and (first >= held_out or first == split.least == split.greatest):
                yield piece.text
        _require_two(split)
        progress("learning the vocabulary", 0, 0)

    return train_tokenizer(texts(), vocab_size)


def _require_two(split: _Split) -> None:
    if split.pieces < 2:
        raise DataError(
            f"there is too little text to split into training and validation ({split.pieces} piece of at least "
            f"{len(SEPARATOR)} characters); add text"
        )


class _SplitWriter:
    """Writes one split into shards of at most `shard_tokens`; a document may run on into the next shard."""

    def __init__(self, directory: Path, split: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self.directory, self.split, self.tokenizer, self.shard_tokens = directory, split, tokenizer, shard_tokens
        self.entries: list[ShardEntry] = []
        self._writer: ShardWriter | None = None

    def append(self, ids: NDArray[Any]) -> None:
        while len(ids):
            if self._writer is None:
                if len(self.entries) == MAX_SHARDS // 2:
                    raise DataError(
                        f"the {self.split} split needs more than {MAX_SHARDS // 2:,} shards of {self.shard_tokens:,} tokens; "
                        "ask for larger ones with --shard-tokens"
                    )
                self._writer = ShardWriter(
                    self.directory / shard_name(self.split, len(self.entries)),
                    vocab_size=self.tokenizer.vocab_size,
                    end_of_text=self.tokenizer.end_of_text,
                    tokenizer_digest=bytes.fromhex(self.tokenizer.digest),
                )
            room = self.shard_tokens - self._writer.count
            self._writer.append(ids[:room])
            ids = ids[room:]
            if self._writer.count == self.shard_tokens:
                self.finish()

    def finish(self) -> None:
        if (writer := self._writer) is not None:
            digest = writer.finish()
            size = writer.path.stat().st_size
            self.entries.append(ShardEntry(writer.path.name, self.split, writer.count, size, digest))
            self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _encode(
    corpus: _Corpus, split: _Split, tokenizer: Tokenizer, writers: dict[str, _SplitWriter], progress: Progress
) -> None:
    """Encode all pieces and write them.

    The end-of-text id follows each document, and each part of one whose next part is in the other split.
    """
    end = np.array([tokenizer.end_of_text])
    again = _Split(split.fraction)
    open_split: str | None = None  # where a document has begun and not ended
    batch: list[tuple[str, Piece]] = []
    held = 0

    def write() -> None:
        nonlocal open_split, held
        for (name, piece), ids in zip(batch, tokenizer.encode_batch([p.text for _, p in batch]), strict=True):
            if open_split not in (None, name):
                writers[open_split].append(end)
            writers[name].append(ids)
            if piece.is_last:
                writers[name].append(end)
            open_split = None if piece.is_last else name
        batch.clear()
        held = 0

    for index, piece in enumerate(corpus.pieces("encoding", progress)):
        batch.append((split.choose(index, again.look(piece)[0]), piece))
        held += len(piece.text)
        if held >= BATCH_CHARACTERS:
            write()
    write()
    if again.digest.digest() != split.digest.digest():
        raise DataError("the text changed while it was being tokenized; run again")


def build_dataset(
    sources: Sequence[str],
    out_dir: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    val_fraction: float = DEFAULT_VAL_FRACTION,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Dataset:
    """Tokenise `sources` (text files, folders, `@stdlib`) into the new directory `out_dir`.

    Args:
        vocab_size: learn a tokenizer of exactly this size; 4,096 if neither this nor `tokenizer` is given.
        tokenizer: a `tokenizer.json` to use instead.
        val_fraction: of the documents, above 0 and at most 0.5.
        progress: called with what is being done, bytes done and bytes in all.
        note: called with a line on what was skipped.

    Raises:
        DataError: bad arguments, sources or tokenizer, a target that is taken, a full disk. Nothing of the target
            exists then; the same holds when a signal handler raises.
    """
    progress, note = progress or _nothing, note or _nothing
    if vocab_size is not None and tokenizer is not None:
        raise DataError("--vocab-size and --tokenizer exclude each other: a given tokenizer has its own size; drop one")
    if not 0 < val_fraction <= 0.5:
        raise DataError(
            f"the validation fraction {val_fraction:g} is not above 0 and at most 0.5; {DEFAULT_VAL_FRACTION} is usual"
        )
    if not LEAST_SHARD_TOKENS <= shard_tokens <= 1 << 34:
        raise DataError(f"{shard_tokens:,} tokens a shard are not from {LEAST_SHARD_TOKENS:,} to {1 << 34:,}")
    if vocab_size is not None:
        check_vocab_size(vocab_size)
    check_free(Path(out_dir), "the dataset")
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    with new_directory(Path(out_dir), "the dataset") as directory, contextlib.ExitStack() as cleanup:
        progress("looking for text", 0, 0)
        corpus = _gather(sources, note)
        split = _Split(val_fraction)
        if given is None:
            given = _learn(corpus, split, vocab_size or DEFAULT_VOCAB, progress)
        else:
            for piece in corpus.pieces("reading", progress):
                split.look(piece)
            _require_two(split)
        write_file(directory / "tokenizer.json", given.data)
        writers = {name: _SplitWriter(directory, name, given, shard_tokens) for name in SPLITS}
        for writer in writers.values():
            cleanup.callback(writer.close)
        _encode(corpus, split, given, writers, progress)
        for writer in writers.values():
            writer.finish()
        manifest = Manifest(
            vocab_size=given.vocab_size,
            end_of_text=given.end_of_text,
            tokenizer_sha256=given.digest,
            documents=split.documents,
            text_bytes=corpus.bytes,
            sources=tuple(
                {
                    "source": shown(source.name),
                    "files": len(source.files),
                    "bytes": source.bytes,
                    "skipped": {kind: count for kind, count in sorted(source.skipped.items()) if count},
                }
                for source in corpus.sources
            ),
            shards=tuple(entry for name in SPLITS for entry in writers[name].entries),
        )
        write_file(directory / "manifest.json", manifest_bytes(manifest))
        Dataset(directory)  # what is about to get its name must open
    return Dataset(out_dir)


def sample_dataset_path(vocab_size: int) -> Path:
    """Where the sample corpus at a vocabulary is kept: `datasets/stdlib-v4096` in the working directory."""
    return Path("datasets") / f"stdlib-v{vocab_size}"


def ensure_sample_dataset(
    vocab_size: int,
    path: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Dataset:
    """The sample corpus `@stdlib` at `vocab_size`: opened if it is at `path` (or `sample_dataset_path`), else built.

    Two processes may call this at once: both build, one directory gets the name, and both use that one.

    Raises:
        DataError: what is there is damaged or of another vocabulary, or it cannot be built.
    """
    path = sample_dataset_path(vocab_size) if path is None else Path(path)
    if not os.path.exists(path / "manifest.json"):
        try:
            build_dataset([STDLIB], path, vocab_size=vocab_size, progress=progress, note=note)
        except DataError:
            if not os.path.exists(path / "manifest.json"):
                raise
    dataset = Dataset(path)
    if dataset.vocab_size != vocab_size:
        raise DataError(
            f"{shown(path)} has a vocabulary of {dataset.vocab_size:,}, not {vocab_size:,}; remove it to have it made again"
        )
    return dataset
