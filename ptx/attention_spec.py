"""The Specs of `attention_forward.ptx`, `attention_dq.ptx` and `attention_dkv.ptx`: flash attention's tiles and addresses.

A block of four warps keeps 64 rows of one head (queries, or keys for dkv), 16 to a warp, and walks the rows of the other
side in tiles that stream through shared memory in two stages. Shared-memory patterns are functions here, so that
`ptx/banks.py` can count their bank conflicts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LANES = 32
WARPS = 4
THREADS = LANES * WARPS
STEP = 16  # rows of a warp, and the depth of one mma
KEPT = STEP * WARPS  # rows that a block keeps
CHUNK = 8  # bf16 in one copy of 16 bytes
PAD = (
    16  # bytes behind each row: rows start an odd number of 16-byte units apart, so eight of them touch every bank once
)
STAGES = 2
HEAD_DIMS = (32, 64, 128)
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Rows:
    """A tile in shared memory: rows of one head's C channels, bf16, each padded to C + 8."""

    rows: int
    head_dim: int

    @property
    def row_bytes(self) -> int:
        return 2 * self.head_dim + PAD

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def offset(self, row: int, channel: int) -> int:
        """The byte of an element."""
        return row * self.row_bytes + 2 * channel

    # Copies: a thread brings 16 bytes of a row in each pass; passes are ROWS_PER_PASS rows apart.

    @property
    def chunks(self) -> int:
        """Copies that make a row."""
        return self.head_dim // CHUNK

    @property
    def rows_per_pass(self) -> int:
        return THREADS // self.chunks

    @property
    def passes(self) -> int:
        return self.rows // self.rows_per_pass

    @property
    def is_spread(self) -> bool:
        """Whether eight lanes bring two rows. Those are then four rows apart, where they share no bank."""
        return self.chunks < CHUNK

    def copied(self, thread: int) -> tuple[int, int]:
        """The row and the first channel that a thread brings in the first pass."""
        row, chunk = divmod(thread, self.chunks)
        if self.is_spread:
            row = row // 8 * 8 + row % 2 * 4 + row % 8 // 2
        return row, CHUNK * chunk

    def copy_to(self, thread: int) -> int:
        """The byte that a thread's first copy goes to."""
        return self.offset(*self.copied(thread))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What the three kernels share. `walked`: rows of a tile that is walked over.

    `apart`: q, k, v and out are arrays [B, heads, T, C], as the kit has them, and may hold anything: a row whose scores are all
    -inf gives 0, and maxima are subtracted before scores are scaled, so that no score is too large. Otherwise they are columns
    of rows [B * T, E], and scores are scaled and shifted in one fma.
    """

    head_dim: int = 64
    walked: int = 64
    dtype: str = "bf16"  # or "f16"
    apart: bool = False
    causal: bool = True  # a query sees the keys up to its own

    @property
    def block(self) -> tuple[int, int, int]:
        return (THREADS, 1, 1)

    def grid(self, batch: int, context: int, heads: int) -> tuple[int, int, int]:
        """`heads`: query heads, or key/value heads for dkv."""
        return (-(-context // KEPT), heads, batch)

    @property
    def sources(self) -> tuple[str, ...]:
        """The kernels' inputs q, k and v."""
        return ("q", "k", "v") if self.apart else ("qkv",)

    @property
    def kept_tile(self) -> Rows:
        return Rows(KEPT, self.head_dim)

    @property
    def tile(self) -> Rows:
        return Rows(self.walked, self.head_dim)

    @property
    def stage_bytes(self) -> int:
        """Two tiles: keys and values, or queries and output gradients."""
        return 2 * self.tile.nbytes

    @property
    def shared_bytes(self) -> int:
        return STAGES * self.stage_bytes

    @property
    def depth(self) -> int:
        """k16 steps over a head's channels."""
        return self.head_dim // STEP

    @property
    def columns(self) -> int:
        """8-channel tiles of a head."""
        return self.head_dim // 8

    @property
    def steps(self) -> int:
        """k16 steps over a walked tile's rows."""
        return self.walked // STEP

    @property
    def blocks_per_sm(self) -> int:
        """Blocks of a multiprocessor that registers must be left for; 0: as many as the assembler sees fit.

        Given where it would otherwise aim at one more and spill.
        """
        return 0

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def log2_scale(self) -> float:
        """From q . k to log2 units."""
        return LOG2_E / math.sqrt(self.head_dim)

    # Where a lane's ldmatrix.x4 row starts, in bytes within its tile, for the first 16 x 16 piece.

    @staticmethod
    def row_of(index: int) -> int:
        """The tile's row that is row `index` of an 8 x 8 matrix."""
        return index

    def a_lane(self, lane: int) -> int:
        """A (kept rows): matrices (rows 0-7, channels 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)."""
        matrix, row = divmod(lane, 8)
        return self.tile.offset(row + 8 * (matrix % 2), 8 * (matrix // 2))

    def b_lane(self, lane: int) -> int:
        """B for products over channels: (rows 0-7, channels 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15)."""
        matrix, row = divmod(lane, 8)
        return self.tile.offset(self.row_of(row) + 8 * (matrix // 2), 8 * (matrix % 2))

    def t_lane(self, lane: int) -> int:
        """B for products over rows, by .trans: (rows 0-7, channels 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)."""
        matrix, row = divmod(lane, 8)
        return self.tile.offset(self.row_of(row) + 8 * (matrix % 2), 8 * (matrix // 2))

    def piece(self, row_step: int, channel_step: int) -> int:
        """From the first 16 x 16 piece to another."""
        return self.tile.offset(STEP * row_step, STEP * channel_step)


@dataclass(frozen=True, slots=True)
class ForwardSpec(AttentionSpec):
    """`attention_forward.ptx`. Queries wait in the second stage until they are fragments."""

    @property
    def mma(self) -> int:
        """Of a warp and a whole tile of keys."""
        return 2 * self.steps * self.depth + self.steps * self.columns

    @property
    def ldmatrix(self) -> int:
        return self.steps * self.depth + self.steps * self.columns // 2


@dataclass(frozen=True, slots=True)
class DqSpec(AttentionSpec):
    """`attention_dq.ptx`. Output and its gradient lie over both stages until they are fragments; then the queries lie in
    the second."""

    @property
    def blocks_per_sm(self) -> int:
        return 3 - self.apart if self.head_dim == 64 else 0

    @property
    def out_at(self) -> int:
        """Where the forward pass's output lies in the beginning, behind its gradient."""
        return self.kept_tile.nbytes

    @property
    def mma(self) -> int:
        """Of a warp and a whole tile of keys."""
        return 4 * self.steps * self.depth + self.steps * self.columns

    @property
    def ldmatrix(self) -> int:
        return 2 * self.steps * self.depth + self.steps * self.columns // 2


@dataclass(frozen=True, slots=True)
class DkvSpec(AttentionSpec):
    """`attention_dkv.ptx`. Keys and values lie over both stages until they are fragments.

    Row 2 t + i of an 8 x 8 matrix is query t + 4 i, so that a lane's two columns of a tile are queries t and t + 4: those
    are where one ldmatrix brings f32 numbers 0-3 and 4-7 to, if all its rows are the same 16 bytes.
    """

    @staticmethod
    def row_of(index: int) -> int:
        return index // 2 + 4 * (index % 2)

    @property
    def blocks_per_sm(self) -> int:
        if self.apart:
            return {32: 3, 64: 2}.get(self.head_dim, 0)
        return 4 if self.head_dim == 32 else 0

    @property
    def value_at(self) -> int:
        """Where the values lie in the beginning, behind the keys."""
        return self.kept_tile.nbytes

    @property
    def lse_at(self) -> int:
        """Within a stage: the log-sum-exp of its queries."""
        return 2 * self.tile.nbytes

    @property
    def delta_at(self) -> int:
        return self.lse_at + 4 * self.walked

    @property
    def stage_bytes(self) -> int:
        """Two tiles, and two numbers for each query."""
        return self.delta_at + 4 * self.walked

    @property
    def parked(self) -> tuple[str, ...]:
        """Numbers of each thread that wait in shared memory for the next copy: as many as the assembler needs not to spill."""
        if not self.apart or self.head_dim < 128:
            return ()
        return ("own", "number", "to0_rows", "at") if self.causal else ("own", "number")

    @property
    def parked_at(self) -> int:
        """Behind the stages."""
        return STAGES * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.parked_at + 4 * len(self.parked) * THREADS

    @property
    def number_warps(self) -> int:
        """Warps that bring one of the two numbers."""
        return self.walked // LANES

    def number_lane(self, lane: int) -> int:
        """A lane's row of the ldmatrix.x4 that brings 16 queries' numbers, within them."""
        return 16 * (lane // 8)

    @property
    def mma(self) -> int:
        """Of a warp and a whole tile of queries."""
        return 4 * self.steps * self.depth + 2 * self.steps * self.columns

    @property
    def ldmatrix(self) -> int:
        return 2 * self.steps * self.depth + self.steps * self.columns + 2 * self.steps


def walked_rows(head_dim: int) -> int:
    """Rows of a walked tile: 64, or 32 at head_dim 128, where two blocks then fit the shared memory of an 8.6 or 8.9."""
    return 64 if head_dim <= 64 else 32


def forward_spec(head_dim: int, **form: Any) -> ForwardSpec:
    """`form`: dtype, apart, causal."""
    return ForwardSpec(head_dim, walked_rows(head_dim), **form)


def dq_spec(head_dim: int, **form: Any) -> DqSpec:
    """`form`: dtype, apart, causal."""
    return DqSpec(head_dim, walked_rows(head_dim), **form)


def dkv_spec(head_dim: int, **form: Any) -> DkvSpec:
    """`form`: dtype, apart, causal."""
    return DkvSpec(head_dim, walked_rows(head_dim), **form)
