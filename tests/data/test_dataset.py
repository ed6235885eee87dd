"""A dataset directory opens only as it was written; what differs is named."""

from __future__ import annotations

import hashlib
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxtrain.data.errors import DataError
from ptxtrain.data.manifest import MANIFEST_LIMIT, read_manifest
from ptxtrain.data.shards import Dataset, write_shard


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        Dataset(path).verify()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sign(fields: dict[str, Any]) -> bytes:
    """A manifest whose digest holds, whatever it says."""
    fields.pop("digest", None)
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(fields | {"digest": hashlib.sha256(plain).hexdigest()}).encode()


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads((path / "manifest.json").read_bytes())
    change(fields)
    (path / "manifest.json").write_bytes(sign(fields))


def test_opens_and_agrees_with_its_manifest(dataset_path: Path) -> None:
    dataset = Dataset(dataset_path)
    dataset.verify()
    assert len(dataset.train) > 2 and len(dataset.val) == 1
    assert dataset.vocab_size == 600
    assert [s.path.name for s in dataset.train] == [f"train-{i:06d}.tok" for i in range(len(dataset.train))]
    assert all(shard.count == 10_000 for shard in dataset.train[:-1])
    assert hashlib.sha256(dataset.tokenizer_path.read_bytes()).hexdigest() == dataset.tokenizer_digest
    assert {shard.tokenizer_digest for shard in dataset.train + dataset.val} == {dataset.tokenizer_digest}


def test_every_changed_byte_of_the_manifest_is_refused_or_harmless(dataset_path: Path) -> None:
    path = dataset_path / "manifest.json"
    data = bytearray(path.read_bytes())
    good = read_manifest(dataset_path)
    harmless = 0
    for at in range(len(data)):
        data[at] ^= 1
        path.write_bytes(data)
        try:
            assert read_manifest(dataset_path) == good  # white space may change
            harmless += 1
        except DataError:
            pass
        data[at] ^= 1
    assert harmless < 20


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train-000001.tok", "val-000000.tok"])
def test_each_file_missing_truncated_linked_or_a_fifo_is_refused(dataset_path: Path, name: str) -> None:
    path = dataset_path / name
    data = path.read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 2):
        path.write_bytes(data[:length])
        assert name in refused(dataset_path)
    path.unlink()
    assert name in refused(dataset_path)
    elsewhere = dataset_path.parent / name
    elsewhere.write_bytes(data)
    path.symlink_to(elsewhere)
    assert "is a link" in refused(dataset_path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refused(dataset_path)


def test_swapped_and_foreign_shards_are_refused(dataset_path: Path) -> None:
    first, second, third = (dataset_path / f"train-{index:06d}.tok" for index in (0, 1, 2))
    os.rename(first, third.with_name("aside"))
    os.rename(second, first)
    os.rename(third.with_name("aside"), second)
    assert "train-000000.tok is not the shard that manifest.json lists" in refused(dataset_path)
    first.unlink()
    write_shard(first, np.zeros(10_000, int), vocab_size=600)
    assert "train-000000.tok is not the shard that manifest.json lists" in refused(dataset_path)


def test_another_tokenizer_is_refused(dataset_path: Path) -> None:
    path = dataset_path / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"BPE", b"bpe"))
    assert "tokenizer.json has the SHA-256" in refused(dataset_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["shards"][0].update(name="../train-000000.tok"),
        lambda f: f["shards"][0].update(name="/etc/passwd"),
        lambda f: f["shards"][0].update(name="train-٠٠٠٠٠٠.tok"),
        lambda f: f["shards"][0].update(split="val"),
        lambda f: f["shards"][0].update(tokens=2**63),
        lambda f: f["shards"][0].update(tokens=-1),
        lambda f: f["shards"][0].update(tokens=True),
        lambda f: f["shards"][0].update(tokens=1.5),
        lambda f: f["shards"][0].update(bytes=None),
        lambda f: f["shards"][0].update(digest="00"),
        lambda f: f["shards"][0].update(digest=None),
        lambda f: f["shards"][0].update(more=1),
        lambda f: f["shards"].append(f["shards"][0] | {"name": "../x.tok", "split": "else"}),
        lambda f: f["shards"].pop(0),
        lambda f: f["shards"].reverse(),
        lambda f: f["shards"].append(f["shards"][0]),
        lambda f: f.update(shards=[]),
        lambda f: f.update(shards={"a": 1}),
        lambda f: f.update(shards=[[]]),
        lambda f: f.update(vocab_size=601),
        lambda f: f.update(vocab_size="600"),
        lambda f: f.update(end_of_text=600),
        lambda f: f.update(end_of_text=1),
        lambda f: f.update(tokenizer_sha256="0" * 64),
        lambda f: f.update(tokenizer_sha256=5),
        lambda f: f.update(sources=5),
        lambda f: f.update(version=2),
        lambda f: f.update(version=10**300),
        lambda f: f.update(format="else"),
        lambda f: f.pop("documents"),
    ],
)
def test_signed_nonsense_is_refused(dataset_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(dataset_path, change)
    assert len(refused(dataset_path)) < 500


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"format": "ptxtrain dataset", "format": "ptxtrain dataset"}',
        b'{"format": NaN}',
        b'{"format": -Infinity}',
        b'{"version": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{}",
        b'{"format": "ptxtrain dataset", "version": 1, "shards": [' + b"[]," * 300_000 + b"[]]}",
        b" " * (MANIFEST_LIMIT + 1),
    ],
)
def test_hostile_json_is_refused_fast_in_little_memory(dataset_path: Path, text: bytes) -> None:
    (dataset_path / "manifest.json").write_bytes(text)
    begin = time.process_time()  # not the clock on the wall: the machine has other work
    refused(dataset_path)
    assert time.process_time() - begin < 1
    tracemalloc.start()
    refused(dataset_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_a_key_that_occurs_twice_is_refused_though_the_digest_holds(dataset_path: Path) -> None:
    path = dataset_path / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"{", b'{"vocab_size": 5, ', 1))
    assert "a key occurs twice" in refused(dataset_path)
    path.write_bytes(data.replace(b'"tokens"', b'"tokens": 5, "tokens"', 1))
    assert "a key occurs twice" in refused(dataset_path)


def test_what_is_no_dataset_says_how_to_make_one(tmp_path: Path) -> None:
    assert "does not exist; make one with `ptxtrain tokenize" in refused(tmp_path / "absent")
    assert "holds no manifest.json; make one" in refused(tmp_path)
    (tmp_path / "file").touch()
    assert "is not a folder" in refused(tmp_path / "file")
    assert "File name too long" in refused(tmp_path / ("x" * 300))


def test_identity_survives_json_and_differences_are_named(dataset_path: Path) -> None:
    dataset = Dataset(dataset_path)
    identity = json.loads(json.dumps(dataset.identity()))
    assert identity == dataset.identity() and dataset.difference(identity) is None
    assert "vocabulary size is 600, not 601" in (dataset.difference(identity | {"vocab_size": 601}) or "")
    assert "tokenizer" in (dataset.difference(identity | {"tokenizer_sha256": "0"}) or "")
    entries = identity["shards"]
    swapped = identity | {"shards": [entries[1], entries[0], *entries[2:]]}
    assert "train-000000.tok" in (dataset.difference(swapped) or "")
    assert "shards, not" in (dataset.difference(identity | {"shards": entries[:-1]}) or "")
    assert dataset.difference(identity | {"shards": [5]}) is not None
    assert dataset.difference({}) is not None
