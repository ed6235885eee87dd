"""The Spec of `gemm.ptx`, the f32 product that takes any layout, stride and dtype, and what a product does at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

LANES = 32
ITEM_SIZES = {"f32": 4, "f16": 2, "bf16": 2}
QUAD = 4  # k that are taken at a time: 16 bytes of a row of a


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What becomes of the sums: out = alpha * sum + bias + residual, in f32, rounded once to the dtype of out."""

    out: str = "f32"  # f32, f16 or bf16; the residual's dtype too
    bias: str = "f32"

    @property
    def out_size(self) -> int:
        return ITEM_SIZES[self.out]

    @property
    def bias_size(self) -> int:
        return ITEM_SIZES[self.bias]


@dataclass(frozen=True, slots=True)
class Staged:
    """One operand's tile in shared memory, f32, and how a block brings it: a warp takes a source row, its lanes the columns.

    `k_rows`: source rows are k steps; otherwise they are the rows of A, or the columns of B. `turned`: the tile lies the
    other way round, so its rows are padded by a number: lanes that store a column touch every bank once.
    """

    outer: int
    block_k: int
    k_rows: bool
    turned: bool
    dtype: str
    warps: int

    @property
    def size(self) -> int:
        """Bytes of a number in memory."""
        return ITEM_SIZES[self.dtype]

    @property
    def source_rows(self) -> int:
        return self.block_k if self.k_rows else self.outer

    @property
    def source_columns(self) -> int:
        return self.outer if self.k_rows else self.block_k

    @property
    def passes(self) -> int:
        return self.source_rows // self.warps

    @property
    def groups(self) -> int:
        """Of 32 columns."""
        return self.source_columns // LANES

    @property
    def row_bytes(self) -> int:
        return 4 * (self.source_rows + 1 if self.turned else self.source_columns)

    @property
    def nbytes(self) -> int:
        return self.row_bytes * (self.source_columns if self.turned else self.source_rows)

    @property
    def row_step(self) -> int:
        """Bytes between neighbouring source rows in the tile."""
        return 4 if self.turned else self.row_bytes

    @property
    def column_step(self) -> int:
        """Bytes between neighbouring source columns in the tile."""
        return self.row_bytes if self.turned else 4

    def at(self, row: int, column: int) -> int:
        """The byte of a source row and column in the tile."""
        return row * self.row_step + column * self.column_step


@dataclass(frozen=True, slots=True)
class GemmSpec:
    """Layouts: the first letter is a's, [M, K] for "n" and [K, M] for "t", the second b's, [K, N] for "n" and [N, K] for "t".

    A warp has `rows` rows, a lane every 32nd of the tile's columns. All shapes add each output in the same order.
    """

    layout: str = "nn"
    a_dtype: str = "f32"
    b_dtype: str = "f32"
    epilogue: Epilogue = field(default_factory=Epilogue)
    warps: int = 8
    rows: int = 8  # of a warp, whole quads
    columns: int = 4  # of a lane
    block_k: int = 32

    @property
    def block(self) -> tuple[int, int, int]:
        return (LANES, self.warps, 1)

    @property
    def threads(self) -> int:
        return LANES * self.warps

    @property
    def block_m(self) -> int:
        return self.warps * self.rows

    @property
    def block_n(self) -> int:
        return LANES * self.columns

    @property
    def a(self) -> Staged:
        return Staged(self.block_m, self.block_k, self.layout[0] == "t", False, self.a_dtype, self.warps)

    @property
    def b(self) -> Staged:
        k_rows = self.layout[1] == "n"
        return Staged(self.block_n, self.block_k, k_rows, not k_rows, self.b_dtype, self.warps)

    @property
    def blocks_per_sm(self) -> int:
        """Blocks of a multiprocessor that registers must be left for; asked for more, the assembler spills."""
        return 512 // self.threads

    @property
    def shared_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def grid(self, m: int, n: int, batch: int = 1) -> tuple[int, int, int]:
        return (-(-n // self.block_n), -(-m // self.block_m), batch)


def choose(layout: str, a_dtype: str, b_dtype: str, epilogue: Epilogue, *, gpu: bool) -> GemmSpec:
    """The Spec for a device; which shows in no bit.

    A GPU wants few shared loads for each multiplication: 4 columns a lane. The CPU device wants a warp's sums in its
    registers, 8 x 1, and few barriers.
    """
    if gpu:
        return GemmSpec(layout, a_dtype, b_dtype, epilogue)
    return GemmSpec(layout, a_dtype, b_dtype, epilogue, warps=16, columns=1, block_k=64)
