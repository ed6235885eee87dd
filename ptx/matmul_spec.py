"""The Spec of `matmul.ptx`: tiles, warps, stages, and where each operand's numbers lie in shared memory.

`ptx/banks.py` counts shared-memory bank conflicts from the address functions here; `CHOICES` and `CPU_CHOICES` are the tables
that pick a Spec from a product's shape, with their reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxtrain.ptx.gemm_spec import Epilogue

LANES = 32
CHUNK = 8  # elements of one 16-byte copy
PAD = 16  # bytes that shift each row of a tile by four banks: eight rows of a matrix touch all 32 banks once


@dataclass(frozen=True, slots=True)
class Tile:
    """One operand's tile in shared memory.

    `k_rows`: its rows are k steps and it is read transposed (`ldmatrix.trans`); otherwise its rows are the rows of A, or
    the columns of B, and run along k.
    """

    outer: int  # rows of A or columns of B in the tile
    block_k: int
    k_rows: bool
    pad: int = PAD  # bytes behind each row

    @property
    def rows(self) -> int:
        return self.block_k if self.k_rows else self.outer

    @property
    def columns(self) -> int:
        return self.outer if self.k_rows else self.block_k

    @property
    def row_bytes(self) -> int:
        return 2 * self.columns + self.pad

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def chunks_per_row(self) -> int:
        return self.columns // CHUNK

    def copies(self, threads: int) -> int:
        """Copies of 16 bytes that each thread makes for one tile."""
        return self.rows * self.chunks_per_row // threads

    def row_step(self, threads: int) -> int:
        """Rows between two copies of a thread."""
        return threads // self.chunks_per_row

    def offset(self, outer: int, k: int) -> int:
        """The byte of element (outer, k)."""
        row, column = (k, outer) if self.k_rows else (outer, k)
        return row * self.row_bytes + 2 * column


@dataclass(frozen=True, slots=True)
class MatmulSpec:
    """One kernel of `matmul.ptx`.

    Layouts: the first letter is a's, [M, K] for "n" and [K, M] for "t"; the second b's, [K, N] for "n" and [N, K] for "t".
    `epilogue`: the sums are scaled, and out, residual and bias have its dtypes; without one out is f32 or bf16, as a flag says,
    and the sums may start at the residual.
    """

    layout: str = "nn"
    dtype: str = "bf16"  # or "f16"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    warps_m: int = 2
    warps_n: int = 2
    stages: int = 3
    epilogue: Epilogue | None = None
    pad: int = PAD  # bytes behind each row of a tile

    @property
    def outs(self) -> tuple[str, ...]:
        """The dtypes that out may have."""
        return ("f32", "bf16") if self.epilogue is None else (self.epilogue.out,)

    @property
    def threads(self) -> int:
        return LANES * self.warps_m * self.warps_n

    @property
    def block(self) -> tuple[int, int, int]:
        return (self.threads, 1, 1)

    @property
    def warp_m(self) -> int:
        return self.block_m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.block_n // self.warps_n

    @property
    def mi(self) -> int:
        """16-row steps of a warp."""
        return self.warp_m // 16

    @property
    def ni(self) -> int:
        """8-column steps of a warp."""
        return self.warp_n // 8

    @property
    def ki(self) -> int:
        """16-deep steps of a tile."""
        return self.block_k // 16

    @property
    def a(self) -> Tile:
        return Tile(self.block_m, self.block_k, self.layout[0] == "t", self.pad)

    @property
    def b(self) -> Tile:
        return Tile(self.block_n, self.block_k, self.layout[1] == "n", self.pad)

    @property
    def stage_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes

    def grid(self, m: int, n: int, parts: int = 1) -> tuple[int, int, int]:
        return (-(-n // self.block_n), -(-m // self.block_m), parts)

    # Where a lane's ldmatrix row starts, in bytes within the operand's tile, for the warp's first 16 x 16 piece.

    def a_lane(self, lane: int) -> int:
        """Matrices of ldmatrix.x4: (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15)."""
        matrix, row = divmod(lane, 8)
        if self.a.k_rows:
            return self.a.offset(8 * (matrix % 2), row + 8 * (matrix // 2))
        return self.a.offset(row + 8 * (matrix % 2), 8 * (matrix // 2))

    def b_lane(self, lane: int) -> int:
        """Two column steps: (n 0-7, k 0-7), (n 0-7, k 8-15), (n 8-15, k 0-7), (n 8-15, k 8-15)."""
        matrix, row = divmod(lane, 8)
        if self.b.k_rows:
            return self.b.offset(8 * (matrix // 2), row + 8 * (matrix % 2))
        return self.b.offset(row + 8 * (matrix // 2), 8 * (matrix % 2))

    def a_step(self, mi: int, ki: int) -> int:
        """From the first 16 x 16 piece to another."""
        return self.a.offset(16 * mi, 16 * ki)

    def b_step(self, pair: int, ki: int) -> int:
        return self.b.offset(16 * pair, 16 * ki)


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the table: tiles for products that have so many times the blocks that fill the device, and why."""

    block_m: int
    block_n: int
    warps_n: int
    fills: int
    reason: str
    block_k: int = 32
    stages: int = 3
    warps_m: int = 2
    pad: int = PAD

    def spec(self, layout: str, dtype: str, epilogue: Epilogue | None = None) -> MatmulSpec:
        sizes = (self.block_m, self.block_n, self.block_k, self.warps_m, self.warps_n, self.stages)
        return MatmulSpec(layout, dtype, *sizes, epilogue, self.pad)


# The first row is taken whose grid has enough blocks and whose tiles stand over by at most an eighth of the columns and by no
# half of a tile's rows. All rows add each output's products in the same order (one chain of k16 steps), so the choice never
# shows in the bits.
CHOICES: tuple[Choice, ...] = (
    Choice(128, 256, 4, 2, "a quarter less from L2 than 128 x 128, and eight warps where only one block fits (Ada)"),
    Choice(128, 128, 2, 1, "most arithmetic for each byte copied with two blocks on a multiprocessor"),
    Choice(128, 64, 2, 1, "half the columns where 128 x 128 tiles would leave multiprocessors idle"),
    Choice(64, 64, 2, 0, "small products: as many blocks as there can be"),
)
# One warp waits for nobody at barriers, and its code is half as long to compile as that of warps that take turns. A CPU has no
# latency to hide by a third stage and no banks: without padding rows are whole cache lines, and a store across two costs twice.
CPU_CHOICES: tuple[Choice, ...] = (
    Choice(64, 64, 1, 0, "sums of 16 KB and two stages of 8, which the first cache of 48 KB holds", 32, 2, 1, 0),
)


@dataclass(frozen=True, slots=True)
class Table:
    """Tiles to choose from, and how many blocks keep the device busy."""

    rows: tuple[Choice, ...]
    fill: int

    @property
    def last(self) -> Choice:
        """What is taken where no other row fits."""
        return self.rows[-1]


GPU = Table(CHOICES, 96)  # blocks that fill the smaller GPUs we aim at
CPU = Table(CPU_CHOICES, 1)


def choose(
    layout: str,
    dtype: str,
    m: int,
    n: int,
    parts: int = 1,
    table: Table = GPU,
    epilogue: Epilogue | None = None,
) -> MatmulSpec:
    """The Spec for a product of this shape, of which `parts` are made at once."""
    for row in table.rows[:-1]:
        spec = row.spec(layout, dtype, epilogue)
        gx, gy, gz = spec.grid(m, n, parts)
        if gx * gy * gz >= row.fills * table.fill and 8 * gx * row.block_n <= 9 * n and 2 * m > row.block_m:
            return spec
    return table.last.spec(layout, dtype, epilogue)


# Which form a weight's gradient takes is part of its definition (other bits), so it follows from the weight's shape and T
# alone: neither the device nor the number of rows may count. Of 64 x 64 tiles, 128 fill a large GPU about once.
CHAIN_TILES = 128
PART_ROWS = (
    512  # rows of a part, at most: a partial product costs as much to write and add as 30 to 60 rows to multiply
)
STEP = 16  # k of one mma


def gradient_part(m: int, n: int, context: int) -> int:
    """Rows of a part of the gradient of a weight [m, n], a whole number of k16 steps; 0: one chain over all sequences.

    A sequence falls into as few parts as PART_ROWS allows, of one size but for the last.
    """
    if -(-m // 64) * -(-n // 64) >= CHAIN_TILES:
        return 0
    pieces = -(-context // PART_ROWS)
    rows = -(-context // pieces)
    return -(-rows // STEP) * STEP
