"""Byte-level BPE: learning a vocabulary, loading `tokenizer.json`, text to ids and back.

Any text goes through, since all 256 bytes are tokens, and what is encoded decodes to the same text. The same text and
size give the same tokenizer, byte for byte, at any number of threads. Tokens that a text spells out ("<|endoftext|>")
are text like any other: only this package puts the end-of-text id between documents.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptxtrain.data.errors import DataError
from ptxtrain.data.files import read_small, shown, signals_held
from ptxtrain.data.manifest import TOKENIZER_LIMIT, read_tokenizer

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import trainers

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>")
LEAST_VOCAB = 257  # all bytes and the end of text
MOST_VOCAB = 1 << 20

# Where text is cut before pairs are merged: the pattern of OpenAI's cl100k, which keeps `.name`, `_name` and `):\n`
# whole and so suits code (6 % fewer tokens than GPT-2's at 32,768 ids), with every run bounded: learning is quadratic
# in the longest piece, and one line of 262,144 equal letters took 68 s; it takes 0.02 s this way.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}{1,64}"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,8}"
    r"|\s{0,64}[\r\n]"
    r"|\s{1,64}(?!\S)"
    r"|\s{1,64}"
)


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _library() -> None:
    """Before the library starts its threads, pass on how many this process may use."""
    if threads := os.environ.get("PTXTRAIN_THREADS"):
        os.environ.setdefault("RAYON_NUM_THREADS", threads)


class StreamDecoder:
    """Turns ids into text one at a time. An unfinished UTF-8 sequence is held back until it ends or cannot."""

    def __init__(self, table: dict[int, bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes: often the token's own, sometimes nothing yet. Unknown ids give U+FFFD."""
        return self._decoder.decode(self._table.get(token, b"\xff"))

    def flush(self) -> str:
        """What was held back, at the end; the decoder then starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Tokenizer:
    """A byte-level BPE tokenizer and the bytes of its file.

    Attributes: `data` (the file), `digest` (its SHA-256 in hex), `vocab_size` (every id is below it), `end_of_text`
    (id).

    Raises:
        DataError: the file is not a byte-level BPE tokenizer with an end-of-text token.
    """

    def __init__(self, data: bytes, name: str) -> None:
        _library()
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_buffer(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library's Rust code is no Exception
            what = str(error).splitlines() or [type(error).__name__]
            raise DataError(f"{name} is not a tokenizer.json: {what[0][:200]}") from error
        self.data = data
        self.digest = hashlib.sha256(data).hexdigest()
        model, decoder = type(self._inner.model).__name__, type(self._inner.decoder).__name__
        if model != "BPE" or decoder != "ByteLevel":
            raise DataError(
                f"{name} is not a byte-level BPE tokenizer (model {model}, decoder {decoder}); use one of the kind of "
                "GPT-2, Llama 3 or Qwen, or let `ptxtrain tokenize` learn one"
            )
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True  # text never becomes a special token
        self._table = self._bytes_of_ids(name)
        self.vocab_size = max(self._table) + 1
        ends = [self._inner.token_to_id(end) for end in END_NAMES]
        found = [end for end in ends if end is not None]
        if not found:
            raise DataError(f"{name} has no {' or '.join(END_NAMES)} token; add one to its added_tokens")
        self.end_of_text: int = found[0]

    def _bytes_of_ids(self, name: str) -> dict[int, bytes]:
        vocab = self._inner.get_vocab(with_added_tokens=True)
        added = self._inner.get_added_tokens_decoder()
        if not vocab or max(vocab.values()) >= MOST_VOCAB:
            raise DataError(
                f"{name} has ids up to {max(vocab.values(), default=-1):,}; at most {MOST_VOCAB:,} are supported"
            )
        byte_of = _byte_of_character()
        table: dict[int, bytes] = {}
        for token, index in vocab.items():
            if index in added:
                table[index] = token.encode("utf-8", "replace")
            elif all(character in byte_of for character in token):
                table[index] = bytes(byte_of[character] for character in token)
            else:
                raise DataError(f"{name} is not byte-level: token {index} is {token[:40]!r}")
        if missing := 256 - sum(character in vocab for character in byte_of):
            raise DataError(f"{name} lacks {missing} of the 256 single-byte tokens, so that text would be lost in it")
        return table

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with nothing put before or after it."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text, on the library's threads. It takes some 32 bytes of memory for each byte of text."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._table.get(int(index), b"\xff") for index in ids).decode("utf-8", "replace")

    def stream(self) -> StreamDecoder:
        """A decoder for ids that come one at a time."""
        return StreamDecoder(self._table)


def load_tokenizer(path: str | os.PathLike[str], digest: str | None = None) -> Tokenizer:
    """Load a `tokenizer.json` of at most 64 MiB.

    Args:
        digest: the SHA-256 in hex that the file must have; then a link is refused as well (it is part of a dataset or a
        run).

    Raises:
        DataError: missing, too large, not what was recorded, or not a byte-level BPE tokenizer.
    """
    path = Path(path)
    data = read_small(path, TOKENIZER_LIMIT, follow_links=True) if digest is None else read_tokenizer(path, digest)
    return Tokenizer(data, shown(path))


def check_vocab_size(vocab_size: int) -> None:
    """Raise DataError for a size that no tokenizer can be learned at."""
    if not LEAST_VOCAB <= vocab_size <= MOST_VOCAB:
        raise DataError(
            f"a vocabulary of {vocab_size:,} is not possible: 256 bytes and the end of text take {LEAST_VOCAB}, "
            f"and {MOST_VOCAB:,} is the most; choose a size between"
        )


def _learn(inner: tokenizers.Tokenizer, trainer: trainers.BpeTrainer, texts: Iterator[str]) -> None:
    """Train in a thread of its own, and let a signal's handler end it at the next text.

    The library keeps the thread that calls it, and reads the iterator from others; were that the main thread, no signal
    would be handled before it is done. Once all texts are read it cannot be stopped: 2 s for 10 MB of text.
    """
    stop, done = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def until_stopped() -> Iterator[str]:
        try:
            for text in texts:
                if stop.is_set():
                    raise InterruptedError
                yield text
        except GeneratorExit:
            raise
        except BaseException as error:  # as it was raised: the library may wrap it
            errors.append(error)
            raise

    def train() -> None:
        try:
            inner.train_from_iterator(until_stopped(), trainer)
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=train, name="learn-vocabulary")
    try:
        with signals_held():
            thread.start()
        # Not join: when a handler raises in it, Python 3.11 takes the thread for ended and no longer waits for it.
        while not done.wait(0.1):
            pass
    finally:
        stop.set()
        if thread.ident is not None:
            done.wait()
    if errors:
        raise errors[0]


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Learn a tokenizer of exactly `vocab_size` ids: the end of text, the 256 bytes, merges by falling frequency.

    Raises:
        DataError: the size is out of range, or the text has too few different words for it.
    """
    check_vocab_size(vocab_size)
    _library()
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    _learn(inner, trainer, texts)
    if (reached := inner.get_vocab_size()) != vocab_size:
        raise DataError(
            f"the text has words for a vocabulary of only {reached:,}, not {vocab_size:,}; "
            f"add text or ask for --vocab-size {reached}"
        )
    return Tokenizer(inner.to_str().encode(), "the tokenizer just learned")
