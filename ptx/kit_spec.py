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
class AdamSpec:
    """One thread to `vector` neighbouring elements; 4 of f32 are one access of 16 bytes. With bf16 master weights to 8
    elements, 32 apart: as many as the random bits of one counter serve.

    grads, master, copy: the dtypes of the gradient, of the master weights (f32, or bf16 rounded by chance) and of their
    copy. `direct`: the numbers of a step are parameters, not in the trainer's buffer.
    """

    threads: int = 256
    vector: int = 1
    grads: str = "f32"
    master: str = "f32"
    copy: str = "bf16"
    direct: bool = False

    @property
    def spread(self) -> bool:
        """Whether a thread's elements lie 32 apart."""
        return self.master == "bf16"

    @property
    def elements(self) -> int:
        """Of a thread."""
        return 8 if self.spread else self.vector

    # Philox4x32-10
    @property
    def rounds(self) -> int:
        return 10

    @property
    def multipliers(self) -> tuple[str, str]:
        return "0xD2511F53", "0xCD9E8D57"

    @property
    def weyl(self) -> tuple[str, str]:
        """What the keys grow by from round to round."""
        return "0x9E3779B9", "0xBB67AE85"

    @property
    def block(self) -> tuple[int, int, int]:
        return (self.threads, 1, 1)

    @property
    def pairs(self) -> int:
        """Registers of two numbers of two bytes that the elements fill; for a single one it is not used."""
        return max(1, self.vector // 2)

    def item(self, dtype: str) -> int:
        return ITEM_SIZES[dtype]

    def grid(self, count: int) -> tuple[int, int, int]:
        return (_blocks(count, self.threads * self.elements), 1, 1)


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


@dataclass(frozen=True, slots=True)
class LossSpec:
    """One block to a row of logits of `dtype`; `unroll` columns of a thread are in flight, `threads` apart."""

    dtype: str = "f32"
    target: str = "i32"  # or i64
    threads: int = 256
    unroll: int = 4

    @property
    def item(self) -> int:
        """Bytes of a logit."""
        return ITEM_SIZES[self.dtype]

    @property
    def target_item(self) -> int:
        return 8 if self.target == "i64" else 4

    @property
    def warps(self) -> int:
        return self.threads // LANES

    @property
    def block(self) -> tuple[int, int, int]:
        return (self.threads, 1, 1)
