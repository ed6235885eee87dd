"""The Specs of `attention_decode.ptx` and `kv_append.ptx`: one query a sequence over a cache of keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

LANES = 32
LOG2_E = 1.4426950408889634
ITEM = {"f32": 4, "bf16": 2, "f16": 2}  # dtype -> bytes
MOST_CHANNELS = 256


class Node(NamedTuple):
    """A step of the sums of 32 scores: the products of key `a` (distance 0), or the fold of scores a and b."""

    a: int
    b: int
    distance: int


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """One block to a query head of a sequence; a warp takes every WARPS-th tile of 32 keys, lane l key l of the tile."""

    head_dim: int = 64
    dtype: str = "bf16"
    warps: int = 8

    @property
    def block(self) -> tuple[int, int, int]:
        return (LANES, self.warps, 1)

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return ITEM[self.dtype]

    @property
    def vector(self) -> int:
        """Neighbouring channels of a lane: two of 16 bits are one access (heads have an even number of channels)."""
        return 2 if self.item == 2 else 1

    @property
    def chunks(self) -> int:
        """Accesses of a warp that make a row of C channels."""
        return -(-self.head_dim // (LANES * self.vector))

    @property
    def is_whole(self) -> bool:
        """Whether every lane has a channel in every chunk."""
        return self.head_dim % (LANES * self.vector) == 0

    @property
    def elements(self) -> int:
        """Channels of a lane."""
        return self.chunks * self.vector

    @property
    def row_bytes(self) -> int:
        return self.item * self.head_dim

    @property
    def scale(self) -> float:
        """Of a score, for powers of two instead of e."""
        return LOG2_E / math.sqrt(self.head_dim)

    @property
    def tile(self) -> int:
        """Keys of a warp's tile."""
        return LANES

    @property
    def order(self) -> list[Node]:
        """How the 32 scores of a tile come to their lanes, with at most six registers in use: a tree, depth first.

        Scores i and i + 16 are folded at distance 16, what is left of i and i + 8 at distance 8, and so on; lane l ends
        with score l, summed over the lanes in the order of a butterfly.
        """
        nodes: list[Node] = []

        def visit(i: int, left: int) -> None:
            if left == LANES:
                nodes.append(Node(i, i, 0))
                return
            visit(i, 2 * left)
            visit(i + left, 2 * left)
            nodes.append(Node(i, i + left, left))

        visit(0, 1)
        return nodes

    @property
    def statistics_bytes(self) -> int:
        """Shared memory for the largest score and the sum of a warp."""
        return 8 * self.warps

    @property
    def sums_bytes(self) -> int:
        """Shared memory for a warp's weighted values."""
        return 4 * LANES * self.elements * self.warps

    def sum_at(self, warp: int, element: int) -> int:
        """The byte of lane 0's `element`."""
        return 4 * LANES * (self.elements * warp + element)


@dataclass(frozen=True, slots=True)
class AppendSpec:
    """One warp to a head of a row; lane l takes pairs l, l + 32, …"""

    dtype: str = "bf16"
    warps: int = 4

    @property
    def block(self) -> tuple[int, int, int]:
        return (LANES, self.warps, 1)

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return ITEM[self.dtype]

    def grid(self, heads: int, rows: int) -> tuple[int, int, int]:
        """For all heads of all rows: queries, keys and values. Rows come first, where a grid may be longer than 65,535."""
        return (rows, -(-heads // self.warps), 1)


SHOWN_HEADS = (32, 64, 128)  # of the table of resources
