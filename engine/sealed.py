"""Small JSON files that carry their own digest, read strictly: no duplicate keys, no NaN, no changed byte.

`digest` is the SHA-256 of the object without it, in canonical form (sorted keys, no spaces, ASCII).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

from ptxtrain.engine.durable import read_regular


class Damaged(Exception):
    """A file that is not what was written; the message names the file and what is wrong."""


def seal(values: dict[str, Any]) -> bytes:
    """`values` with their digest as indented JSON bytes. Numbers must be finite."""
    assert "digest" not in values
    return (json.dumps({**values, "digest": _digest(values)}, indent=1, allow_nan=False) + "\n").encode("ascii")


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The values that `seal` wrote. Raises Damaged on anything else; memory is a small multiple of `data`."""
    values = strict_json(data, name)
    values.pop("digest", None)
    try:
        unchanged = data == seal(values)  # byte for byte, its digest included
    except (ValueError, RecursionError):  # 1e999, nesting that can be read but not written
        unchanged = False
    if not unchanged:
        raise Damaged(f"{name} was changed after it was written (its digest differs)")
    return values


def read_sealed(path: Path, limit: int) -> dict[str, Any]:
    """Reads and unseals a file of at most `limit` bytes. Raises Damaged; FileNotFoundError or NotADirectoryError where
    there is none."""
    try:
        data = read_regular(path, limit)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from error
    return unseal(data, path.name)


def strict_json(data: bytes, name: str) -> dict[str, Any]:
    """One JSON object. Raises Damaged on bad syntax, a duplicate key, NaN, infinity, or nesting too deep to parse."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) != len(items):
            raise ValueError("a key appears twice")
        return values

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    try:
        values = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not valid: {str(error)[:80]}") from error
    if not isinstance(values, dict):
        raise Damaged(f"{name} is not valid: not a JSON object")
    return values


def _digest(values: dict[str, Any]) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
