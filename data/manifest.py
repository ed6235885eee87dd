"""`manifest.json` of a dataset directory: what the directory holds, under a digest of its own.

Nothing in it is believed before it is checked: names match a fixed pattern (nothing outside the directory can be
named), the order of the shards is that of their numbers, and the digest covers every field, so that an entry cannot be
changed, moved or left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptxtrain.data.errors import DataError
from ptxtrain.data.files import parse_json, read_small, shown

FORMAT = "ptxtrain dataset"
VERSION = 1
MANIFEST_LIMIT = 1 << 20  # parsed JSON takes up to some twenty times its size
MAX_SHARDS = 4000  # what the limit holds with room to spare
TOKENIZER_LIMIT = 64 << 20
SPLITS = ("train", "val")
_NAME = re.compile(r"(train|val)-([0-9]{6})\.tok", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard as the manifest lists it; `digest` is the shard's header digest, which stands for all its bytes."""

    name: str
    split: str
    tokens: int
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A dataset's contents. `sources` is for people: where the text came from and what was left out."""

    vocab_size: int
    end_of_text: int
    tokenizer_sha256: str
    documents: int
    text_bytes: int
    sources: tuple[dict[str, Any], ...]
    shards: tuple[ShardEntry, ...]


def shard_name(split: str, index: int) -> str:
    """`train-000000.tok`."""
    return f"{split}-{index:06d}.tok"


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's contents, with its digest."""
    fields = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    fields["digest"] = hashlib.sha256(_canonical(json.loads(json.dumps(fields)))).hexdigest()
    return (json.dumps(fields, indent=2) + "\n").encode()


def _number(value: Any, lowest: int, highest: int) -> int:
    if type(value) is not int or not lowest <= value <= highest:
        raise ValueError(f"{str(value)[:40]} is not a whole number from {lowest} to {highest}")
    return value


def _entry(item: Any) -> ShardEntry:
    if not isinstance(item, dict) or set(item) != {"name", "split", "tokens", "bytes", "digest"}:
        raise ValueError("a shard's entry lacks a field or has one too many")
    name = _NAME.fullmatch(item["name"]) if isinstance(item["name"], str) else None
    if name is None or name[1] != item["split"]:
        raise ValueError(f"{str(item['name'])[:80]!r} is not a shard's name")
    if not isinstance(item["digest"], str) or not _HEX.fullmatch(item["digest"]):
        raise ValueError(f"the digest of {item['name']} is not 64 hex digits")
    tokens, size = _number(item["tokens"], 1, 1 << 36), _number(item["bytes"], 1, 1 << 40)
    return ShardEntry(item["name"], item["split"], tokens, size, item["digest"])


def _manifest(fields: Any) -> Manifest:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f'"format" is not "{FORMAT}"')
    if fields.get("version") != VERSION:
        raise ValueError(f"its version is {str(fields.get('version'))[:20]}, this ptxtrain reads {VERSION}")
    digest = fields.pop("digest", None)
    if digest != hashlib.sha256(_canonical(fields)).hexdigest():
        raise ValueError("it does not match its digest")
    shards = fields.get("shards")
    if not isinstance(shards, list):
        raise ValueError('"shards" is not a list')
    entries = tuple(_entry(item) for item in shards)
    for split in SPLITS:
        names = [entry.name for entry in entries if entry.split == split]
        if names != [shard_name(split, index) for index in range(len(names))]:
            raise ValueError(f"the {split} shards are not numbered in order from 0")
    if not any(entry.split == "train" for entry in entries):
        raise ValueError("it lists no training shard")
    sources, tokenizer = fields.get("sources"), fields.get("tokenizer_sha256")
    if not isinstance(sources, list) or not isinstance(tokenizer, str) or not _HEX.fullmatch(tokenizer):
        raise ValueError('"sources" or "tokenizer_sha256" is malformed')
    vocab_size = _number(fields.get("vocab_size"), 1, 1 << 31)
    return Manifest(
        vocab_size,
        _number(fields.get("end_of_text"), 0, vocab_size - 1),
        tokenizer,
        _number(fields.get("documents"), 1, 1 << 62),
        _number(fields.get("text_bytes"), 1, 1 << 62),
        tuple(sources),
        entries,
    )


def _no_dataset(directory: Path, what: str) -> DataError:
    return DataError(
        f"{shown(directory)} is not a dataset: it {what}; make one with `ptxtrain tokenize SOURCE --out DIR`"
    )


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a dataset directory, checked.

    Raises:
        DataError: no such dataset, or a manifest that is not what was written.
    """
    path = directory / "manifest.json"
    try:
        os.lstat(path)
    except NotADirectoryError:
        raise _no_dataset(directory, "is not a folder") from None
    except FileNotFoundError:
        what = "holds no manifest.json" if os.path.isdir(directory) else "does not exist"
        raise _no_dataset(directory, what) from None
    except OSError:
        pass  # reading it says why
    data = read_small(path, MANIFEST_LIMIT)
    try:
        return _manifest(parse_json(data, path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown(path)} is damaged: {error}; restore it or tokenize the text again") from error


def read_tokenizer(path: Path, digest: str) -> bytes:
    """The bytes of a dataset's or a run's `tokenizer.json`, which must have the SHA-256 `digest`."""
    data = read_small(path, TOKENIZER_LIMIT)
    if (found := hashlib.sha256(data).hexdigest()) != digest:
        raise DataError(
            f"{shown(path)} has the SHA-256 {found[:16]}…, not {digest[:16]}… as recorded; restore it or tokenize the text again"
        )
    return data
