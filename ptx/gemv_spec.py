"""The Specs of `norm_gemv.ptx`: which rows, dtypes and layout a product of a few rows with a weight has, and its tiles.

How many rows a launch has (1 to 4), and how many rows of the weight a warp takes at a time, show in no bit: each output is one
sum whose order follows from the layout, the sizes and `vector` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LANES = 32
MOST_ROWS = 4
ITEM = {"f32": 4, "bf16": 2, "f16": 2}  # dtype -> bytes
NORMS = ("rms", "layer", "none")
LAYOUTS = ("kn", "nk")


@dataclass(frozen=True, slots=True)
class GemvSpec:
    """One kernel of the family.

    `layout` "kn": lanes run along the outputs, warps share the steps of k, and add up in shared memory. "nk": lanes run along
    k, a warp has its own outputs.
    """

    layout: str = "kn"
    norm: str = "rms"  # "rms", "layer" or "none"
    rows: int = 1  # M
    dtype: str = "bf16"  # of the weight; normalised numbers are rounded to it
    x_dtype: str = "f32"
    norm_dtype: str = "f32"  # of gamma and beta
    out_dtype: str = "bf16"
    residual: bool = False  # an f32 residual is added before the store
    vector: int = 2  # neighbouring numbers of the weight that a lane takes: 2 of 16 bits are one access of 4 bytes

    def with_vector(self, vector: int) -> GemvSpec:
        """The same with another `vector`."""
        return replace(self, vector=vector)

    @property
    def warps(self) -> int:
        """Of a block; row m's statistics are warp m's, so at least MOST_ROWS."""
        return 8 if self.layout == "kn" else 4

    @property
    def unroll(self) -> int:
        """kn: steps of k whose loads are in flight; nk: rows of the weight.

        For 3 or 4 rows fewer, or sums would spill on a CPU: with 8 steps 5.9 GB/s a core of weights read, with 4 7.0.
        """
        return 4 if self.layout == "kn" and self.rows > 2 else 8

    @property
    def group(self) -> int:
        """nk: rows of the weight that a warp takes at a time, a power of two.

        Each shares the work of normalising x. On a CPU 8 are faster than 4 and 2 even at M 4, where sums spill: 4.1 GB/s a core
        of weights read, 3.1 and 2.8.
        """
        return 8

    @property
    def tile(self) -> int:
        """Outputs of a block."""
        return LANES * self.vector if self.layout == "kn" else self.warps * self.group

    @property
    def block(self) -> tuple[int, int, int]:
        return (LANES, self.warps, 1)

    def grid(self, columns: int) -> tuple[int, int, int]:
        """For N outputs a row."""
        return (-(-columns // self.tile), 1, 1)

    @property
    def item(self) -> int:
        """Bytes of a number of the weight."""
        return ITEM[self.dtype]

    @property
    def x_item(self) -> int:
        return ITEM[self.x_dtype]

    @property
    def norm_item(self) -> int:
        return ITEM[self.norm_dtype]

    @property
    def out_item(self) -> int:
        return ITEM[self.out_dtype]

    @property
    def has_norm(self) -> bool:
        return self.norm != "none"

    @property
    def statistics_bytes(self) -> int:
        """Shared memory for a mean and an rstd (f32) of each row."""
        return 8 * self.rows if self.has_norm else 0

    @property
    def sums_bytes(self) -> int:
        """Shared memory for the sums of each warp: kn alone, where warps share k."""
        return 4 * LANES * self.vector * self.rows * self.warps if self.layout == "kn" else 0

    def sum_at(self, warp: int, row: int, element: int) -> int:
        """The byte in the sums of lane 0's `element`-th output, as `warp` has it."""
        return 4 * LANES * (self.vector * (self.rows * warp + row) + element)

    @property
    def folds(self) -> list[tuple[int, list[tuple[int, int | None]]]]:
        """nk: how a warp's sums of `group` outputs meet: (distance of the lanes, pairs of registers that become one).

        A lane keeps the first of a pair where its bit `distance` is 0. Once one register is left, lane l holds output
        l / (32 / group), and plain steps of a butterfly follow.
        """
        return folds(self.group)


def folds(count: int) -> list[tuple[int, list[tuple[int, int | None]]]]:
    """The steps by which `count` registers (a power of two, at most 32) are summed over the lanes of a warp."""
    steps: list[tuple[int, list[tuple[int, int | None]]]] = []
    distance = LANES // 2
    while distance:
        half = count // 2
        steps.append((distance, [(i, i + half) for i in range(half)] if half else [(0, None)]))
        count, distance = max(half, 1), distance // 2
    return steps


# What decoding a model with bf16 weights launches, by one row and by four, and the training kit in f16.
SHOWN = (
    *(GemvSpec("kn", "rms", rows) for rows in (1, MOST_ROWS)),
    *(GemvSpec("kn", "none", rows, x_dtype="bf16", out_dtype="f32", residual=True) for rows in (1, MOST_ROWS)),
    *(GemvSpec("nk", "rms", rows, out_dtype="f32") for rows in (1, MOST_ROWS)),
    *(GemvSpec(layout, "layer", MOST_ROWS, "f16", "f16", "f16", "f16") for layout in LAYOUTS),
    *(GemvSpec(layout, "rms", MOST_ROWS, "f32", "f32", "f32", "f32", vector=1) for layout in LAYOUTS),
)
