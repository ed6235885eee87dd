"""Byte-level BPE: any text goes there and back, the size is exact, hostile files are refused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxtrain.data.errors import DataError
from ptxtrain.data.tokenizer import LEAST_VOCAB, Tokenizer, load_tokenizer, train_tokenizer


def text(seed: int = 0, words: int = 4000) -> list[str]:
    source = random.Random(seed)
    known = ["".join(source.choices("abcdefghilmnoprstu", k=source.randint(2, 9))) for _ in range(500)]
    return [" ".join(source.choices(known, k=40)) + "\n" for _ in range(words // 40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter([*text(), "def f(x):\n        return x.name_of\n" * 50, "日本語 🙂 naïve\n" * 20]), 700)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_goes_there_and_back(tokenizer: Tokenizer, given_text: str) -> None:
    ids = tokenizer.encode(given_text)
    assert all(0 <= index < tokenizer.vocab_size for index in ids)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == given_text
    stream = tokenizer.stream()
    assert "".join(stream.push(index) for index in ids) + stream.flush() == given_text
    assert [array.tolist() for array in tokenizer.encode_batch([given_text, "a"])] == [ids, tokenizer.encode("a")]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 800), max_size=30))
def test_streaming_any_ids_equals_decoding_them_at_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = tokenizer.stream()
    assert "".join(stream.push(index) for index in ids) + stream.flush() == tokenizer.decode(ids)


def test_a_stream_holds_back_half_a_character(tokenizer: Tokenizer) -> None:
    bytes_of = {tokenizer._table[index]: index for index in range(tokenizer.vocab_size)}
    stream = tokenizer.stream()
    got = [stream.push(bytes_of[bytes([byte])]) for byte in "é🙂".encode()]
    assert got == ["", "é", "", "", "", "🙂"]
    assert stream.push(bytes_of[b"\xf0"]) == "" and stream.flush() == "�"
    assert stream.push(bytes_of[b"a"]) == "a"
    assert stream.push(10**6) == "�"


def test_special_tokens_in_text_are_text_and_decode_to_their_names(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_text not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([tokenizer.end_of_text]) == "<|endoftext|>"


def test_merges_follow_the_text(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("        return x.name_of")) < len("        return x.name_of") / 2


@pytest.mark.parametrize("size", [LEAST_VOCAB, 258, 300, 1000])
def test_the_size_is_exact(size: int) -> None:
    made = train_tokenizer(iter(text()), size)
    assert made.vocab_size == size and made.end_of_text == 0
    assert sorted(made._table) == list(range(size))


def test_too_little_text_names_the_size_reached_which_then_works() -> None:
    with pytest.raises(
        DataError, match=r"vocabulary of only 2\d\d, not 4,096; add text or ask for --vocab-size"
    ) as error:
        train_tokenizer(iter(["hello world\n"] * 9), 4096)
    reached = int(str(error.value).rsplit(" ", 1)[1])
    assert train_tokenizer(iter(["hello world\n"] * 9), reached).vocab_size == reached


@pytest.mark.parametrize("size", [-1, 0, 256, 1 << 21])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(DataError, match="257"):
        train_tokenizer(iter(text()), size)


def test_the_same_text_gives_the_same_file_at_any_thread_count(tmp_path: Path) -> None:
    program = (
        "import sys, random; from ptxtrain.data.tokenizer import train_tokenizer\n"
        "source = random.Random(5)\n"
        "words = [''.join(source.choices('abcdefgh', k=6)) for _ in range(3000)]\n"
        "texts = [' '.join(source.choices(words, k=200)) for _ in range(100)]\n"
        "print(train_tokenizer(iter(texts), 900).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PTXTRAIN_THREADS": threads, "PYTHONHASHSEED": threads},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for threads in ("1", "2", "3")
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == 64


@pytest.mark.parametrize("long", ["a" * 300_000, " " * 300_000, "-" * 300_000, "\n" * 300_000, "日" * 100_000])
def test_endless_words_are_learned_and_encoded_fast(long: str) -> None:
    begin = time.process_time()
    made = train_tokenizer(iter([long, *text()]), 400)
    assert made.decode(made.encode(long)) == long
    assert time.process_time() - begin < 5  # a minute, were the pieces not bounded


def test_saves_and_loads(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.data)
    loaded = load_tokenizer(path, tokenizer.digest)
    assert (loaded.digest, loaded.vocab_size, loaded.end_of_text) == (tokenizer.digest, 700, 0)
    assert loaded.encode("hello x.name_of") == tokenizer.encode("hello x.name_of")
    (tmp_path / "link").symlink_to(path)
    assert load_tokenizer(tmp_path / "link").digest == tokenizer.digest
    with pytest.raises(DataError, match="is a link"):
        load_tokenizer(tmp_path / "link", tokenizer.digest)
    with pytest.raises(DataError, match="SHA-256"):
        load_tokenizer(path, "0" * 64)


def test_padding_truncation_and_templates_of_a_file_are_not_applied(tokenizer: Tokenizer) -> None:
    fields = json.loads(tokenizer.data)
    fields["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    fields["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    text_of_many = "many words to see that nothing is cut or filled"
    changed = Tokenizer(json.dumps(fields).encode(), "t")
    assert changed.encode(text_of_many) == tokenizer.encode(text_of_many)


def _edited(tokenizer: Tokenizer, change: Any) -> bytes:
    fields = json.loads(tokenizer.data)
    change(fields)
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda f: f.update(decoder=None), "not a byte-level BPE"),
        (lambda f: f.update(decoder={"type": "BPEDecoder", "suffix": ""}), "not a byte-level BPE"),
        (lambda f: f.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "not a byte-level BPE"),
        (lambda f: f["added_tokens"][0].update(content="<x>") or f["model"]["vocab"].pop("<|endoftext|>"), "endoftext"),
        (lambda f: f["model"]["vocab"].update({"日": 700}), "not byte-level"),
        (lambda f: f["model"]["vocab"].update({"zzz": 2**31}), "at most"),
        (lambda f: f["model"]["vocab"].pop("!"), "lacks 1 of the 256"),
        (lambda f: f["model"].update(merges=[["q", "nothere"]]), "not a tokenizer.json"),
        (lambda f: f["model"].update(vocab=5), "not a tokenizer.json"),
        (lambda f: f.clear(), "not a tokenizer.json"),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(tokenizer: Tokenizer, change: Any, what: str) -> None:
    with pytest.raises(DataError, match=what) as error:
        Tokenizer(_edited(tokenizer, change), "the.json")
    assert "\n" not in str(error.value) and str(error.value).startswith("the.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"null", b"5"])
def test_files_that_are_no_tokenizer_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"is not a tokenizer\.json") as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.touch()
    os.truncate(path, 1 << 40)
    begin = time.process_time()
    with pytest.raises(DataError, match="at most 67,108,864 are read"):
        load_tokenizer(path)
    assert time.process_time() - begin < 1
