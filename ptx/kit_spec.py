"""The Specs of the kit's own kernels: rows and flat arrays of one dtype each."""

from __future__ import annotations

import struct
from dataclasses import dataclass

LANES = 32
LOG2_E = 1.4426950408889634
ITEM_SIZES = {"f16": 2, "bf16": 2, "f32": 4}


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class TypedRowSpec:
    """One warp to a row of numbers of `dtype`; `unroll` loads of each array are in flight before a lane adds them, in order."""

    dtype: str = "f32"
    warps: int = 4
    unroll: int = 4

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return ITEM_SIZES[self.dtype]

    @property
    def log2_e_low(self) -> float:
        """What log2(e) has beyond its f32."""
        return LOG2_E - float(struct.unpack("<f", struct.pack("<f", LOG2_E))[0])

    @property
    def block(self) -> tuple[int, int, int]:
        return (LANES, self.warps, 1)

    def grid(self, rows: int) -> tuple[int, int, int]:
        return (_blocks(rows, self.warps), 1, 1)


@dataclass(frozen=True, slots=True)
class TypedPartSpec(TypedRowSpec):
    """One block to a part: `part_rows` rows, fewer in the last, whose weight gradients are summed in order."""

    warps: int = 8
    part_rows: int = 32

    def grid(self, rows: int) -> tuple[int, int, int]:
        return (self.parts(rows), 1, 1)

    def parts(self, rows: int) -> int:
        """How many parts `rows` rows fall into."""
        return _blocks(rows, self.part_rows)
