"""safetensors bytes for a table of f32 tensors, written from flat buffers and read back strictly.

    u64 little-endian   n, the header's length
    n bytes             JSON: name -> {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, padded with spaces
    the data            the tensors one after another, no holes, in the table's order

The data starts at a multiple of 64 bytes. safetensors has no checksum and accepts duplicate keys, so a reader here wants
exactly the header that the table implies; the digest in the checkpoint's manifest covers every byte.
Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ptxtrain.engine.sealed import Damaged, strict_json

_ALIGN = 64
_SLACK = 1 << 16  # bytes that a header may be longer than ours: another order, other spaces, metadata


class TensorPlace(Protocol):
    """Where one tensor lies in a flat f32 buffer; `engine.parameters.Tensor` is one."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...  # in elements


class Place(NamedTuple):
    """A TensorPlace by itself."""

    name: str
    shape: tuple[int, ...]
    offset: int


class Layout:
    """The bytes of a file that holds one flat buffer per prefix, each laid out by `table`.

    The table must fill its buffer from 0 without holes; that is asserted.
    """

    def __init__(self, table: Sequence[TensorPlace], prefixes: Sequence[str] = ("",)) -> None:
        self.numbers = count_numbers(table)  # in one flat buffer
        self.data_bytes = 4 * self.numbers * len(prefixes)
        self.entries: dict[str, dict[str, Any]] = {}
        for index, prefix in enumerate(prefixes):
            for place in table:
                begin = 4 * (index * self.numbers + place.offset)
                end = begin + 4 * math.prod(place.shape)
                entry = {"dtype": "F32", "shape": list(place.shape), "data_offsets": [begin, end]}
                self.entries[prefix + place.name] = entry
        assert len(self.entries) == len(table) * len(prefixes), "two tensors have one name"
        text = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        self.header = len(text).to_bytes(8, "little") + text
        self.header_limit = len(text) + _SLACK

    @property
    def file_bytes(self) -> int:
        """Bytes of the file that is written."""
        return len(self.header) + self.data_bytes

    def header_bytes(self, first: bytes, file_bytes: int, name: str) -> int:
        """The header's length by the file's first 8 bytes. Raises Damaged unless header and data fill the file exactly."""
        length = int.from_bytes(first, "little")
        if len(first) != 8 or length > self.header_limit or 8 + length + self.data_bytes != file_bytes:
            raise Damaged(f"{name} says that its header has {length:,} bytes, which does not fit this model's tensors")
        return length

    def check_header(self, text: bytes, name: str) -> None:
        """Raises Damaged unless names, shapes, types and offsets are exactly those of the table."""
        found = strict_json(text, f"the header of {name}")
        extra = found.pop("__metadata__", {})
        if not isinstance(extra, dict) or not all(isinstance(value, str) for value in extra.values()):
            raise Damaged(f"the header of {name} has metadata that is not text")
        for tensor in [*self.entries, *found]:
            # Compared as text: in Python 1 == 1.0 == True, in a header they are not the same.
            if json.dumps(found.get(tensor), sort_keys=True) != json.dumps(self.entries.get(tensor), sort_keys=True):
                what = (
                    "is missing"
                    if tensor not in found
                    else "is not of this model"
                    if tensor not in self.entries
                    else ""
                )
                raise Damaged(f"{name}: tensor {tensor[:60]!r} {what or 'has another shape, type or place'}")


def count_numbers(table: Sequence[TensorPlace]) -> int:
    """Elements of the flat buffer that the table describes; holes and overlaps are an assertion error."""
    at = 0
    for place in sorted(table, key=lambda place: place.offset):
        assert place.offset == at, f"{place.name} starts at {place.offset}, not at {at}"
        at += math.prod(place.shape)
    return at
