"""Matrix products in the three layouts that training needs: the naive reference, and the tensor cores (way "fast").

Naive: every output is one chain of f32 fused multiply-adds in ascending k, from zero or (`accumulate`) from the sum so far,
so that its bits depend neither on the tile nor on how k was cut into calls.

Fast: the same, but k goes in steps of 16 whose inner order is the tensor core's own. Sequences are padded with zeros to whole
steps, so the bits depend neither on the tile nor on how many sequences a call has. Gradients of small weights have too few
tiles to fill a GPU: they take each part of a sequence from zero and add the parts in order.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import add
from ptxtrain.engine.ops.checks import ITEM_SIZES, holds, is_bf16, require, sizes, whole_sequences
from ptxtrain.ptx import matmul_spec
from ptxtrain.ptx.matmul_spec import MatmulSpec, Table
from ptxtrain.ptx.specs import LANES, ceil_div

# As in ptx/reference/matmul.cu.
WARPS = 16
TILE_M = 8 * WARPS
TILE_N = LANES

ALIGNED = 8  # elements of a 16-byte copy: what row strides must be multiples of
PARTIAL_CAP = 64 << 20  # bytes of partial products that are alive at once


def run(
    rec: Recorder,
    out: Buffer,  # [M, N] out_dtype
    a: Buffer,  # [M, K] dtype, or [K, M] for "tn"
    b: Buffer,  # [K, N] dtype, or [N, K] for "nt"
    *,
    m: int,
    n: int,
    k: int,
    layout: str,
    dtype: str,
    out_dtype: str,
    residual: Buffer | None = None,  # [M, N] f32, may be out
    accumulate: bool = False,
    way: str | None = None,
    bias: Buffer | None = None,  # [N] f32, fast only
    strides: tuple[int, int, int] | None = None,  # of rows of out (and residual), a, b in elements, fast only
    segment: int | None = None,
    spec: MatmulSpec | None = None,
) -> None:
    """out = a @ b (+ bias) (+ residual), or out = out + a @ b in one chain with `accumulate` (f32 out).

    Layouts: "nn" a @ b, "nt" a @ b^T, "tn" a^T @ b. `way`: "fast" for the tensor cores (dtype bf16 or f16), else the naive
    kernel. `segment`, fast: k is a whole number of segments, each padded to steps of 16; by default k itself. `spec`, fast:
    instead of the table's choice.

    Raises:
        PtxtrainError: a buffer is too small, a flag does not go with the others, or (fast) a row stride is no multiple of 8.
    """
    if way == "fast":
        spec = spec or matmul_spec.choose(layout, dtype, m, n, table=table(rec))
        require(
            "matmul.run", spec.layout == layout and spec.dtype == dtype, f"the spec is for {spec.layout} {spec.dtype}"
        )
        product = _Fast(m, n, k, layout, dtype, strides, segment or k)
        product.check(out, a, b, out_dtype, residual, bias, accumulate)
        product.record(rec, spec, out, a, b, out if accumulate else residual, bias, out_dtype, accumulate)
        return
    op = "matmul.run"
    sizes(op, m=m, n=n, k=k)
    require(op, layout in ("nn", "nt", "tn"), f'layout is "{layout}", must be "nn", "nt" or "tn"')
    is_bf16(op, dtype)
    bf16 = is_bf16(op, out_dtype)
    require(op, not (accumulate and out_dtype != "f32"), "only an f32 out can be accumulated into")
    require(op, bias is None and strides is None, "bias and row strides need the fast way")
    holds(op, "out", out, m * n, out_dtype)
    holds(op, "a", a, m * k, dtype)
    holds(op, "b", b, k * n, dtype)
    if residual is not None:
        holds(op, "residual", residual, m * n, "f32")
    kernel = rec.reference("matmul", f"matmul_{layout}_{dtype}")
    grid = (ceil_div(n, TILE_N), ceil_div(m, TILE_M), 1)
    r = np.uint64(0) if residual is None else residual
    flags = (bf16, np.uint32(accumulate), np.uint32(residual is not None))
    rec.launch(kernel, grid, (LANES, WARPS, 1), out, a, b, r, np.uint32(m), np.uint32(n), np.uint32(k), *flags)


def gradient(
    rec: Recorder,
    out: Buffer,  # [M, N] f32, starts at what it holds
    a: Buffer,  # [rows, M] dtype
    b: Buffer,  # [rows, N] dtype
    partial: Buffer | None,  # partial_bytes(...), fast only
    *,
    m: int,
    n: int,
    rows: int,
    context: int,
    dtype: str,
    way: str | None = None,
    spec: MatmulSpec | None = None,
) -> None:
    """The gradient of a weight [M, N]: out += a^T b, sequence by sequence, in the order that DESIGN's *Order of sums* gives.

    Naive, and fast for large weights: one chain from what out holds. Fast for small ones: `matmul_spec.gradient_part` rows
    of a sequence make a partial product from zero, and the parts are added to out in order.
    """
    op = "matmul.gradient"
    sizes(op, m=m, n=n, rows=rows, context=context)
    whole_sequences(op, rows, context)
    part = matmul_spec.gradient_part(m, n, context) if way == "fast" else 0
    if not part:
        run(
            rec, out, a, b, m=m, n=n, k=rows, layout="tn", dtype=dtype, out_dtype="f32", accumulate=True, way=way,
            segment=context, spec=spec,
        )  # fmt: skip
        return
    product = _Fast(m, n, rows, "tn", dtype, None, context)
    product.check(out, a, b, "f32", None, None, accumulate=False)
    per_sequence = ceil_div(context, part)
    together = _sequences_together(m, n, rows // context, per_sequence)
    require(op, partial is not None, "the parts of a small weight's gradient need memory")
    assert partial is not None
    holds(op, "partial", partial, together * per_sequence * m * n, "f32")
    item = ITEM_SIZES[dtype]
    for first in range(0, rows // context, together):
        sequences = min(together, rows // context - first)
        start, length = first * context, sequences * context
        x = a.view(start * m * item, length * m * item)
        y = b.view(start * n * item, length * n * item)
        parts = sequences * per_sequence
        chosen = spec or matmul_spec.choose("tn", dtype, m, n, parts, table(rec))
        _Fast(m, n, length, "tn", dtype, None, context).record(
            rec, chosen, partial, x, y, None, None, "f32", False, part=part, parts=parts
        )
        add.parts(rec, out, partial, parts=parts, count=m * n)


def partial_bytes(m: int, n: int, *, sequences: int, context: int) -> int:
    """The memory that `gradient` needs for a micro-batch, way fast; 0 for weights that go in one chain."""
    part = matmul_spec.gradient_part(m, n, context)
    if not part:
        return 0
    per_sequence = ceil_div(context, part)
    return 4 * m * n * per_sequence * _sequences_together(m, n, sequences, per_sequence)


def obstacle(**strides: int) -> str | None:
    """Why the tensor cores' kernel does not take rows of these lengths, or None if it does."""
    for name, stride in strides.items():
        if stride % ALIGNED:
            return f"rows of {name} = {stride} numbers are no multiple of {ALIGNED}, which 16-byte copies need"
    return None


def _sequences_together(m: int, n: int, sequences: int, per_sequence: int) -> int:
    """How many sequences' parts are in memory at once; which shows in no bit."""
    return max(1, min(sequences, PARTIAL_CAP // (4 * m * n * per_sequence)))


def table(rec: Recorder) -> Table:
    """The tiles to choose from on the recorder's device."""
    return matmul_spec.CPU if rec.device.kind == "cpu" else matmul_spec.GPU


class _Fast:
    """The checked sizes of one product on the tensor cores, and its launch."""

    def __init__(
        self, m: int, n: int, k: int, layout: str, dtype: str, strides: tuple[int, int, int] | None, segment: int
    ) -> None:
        op = "matmul.run"
        sizes(op, m=m, n=n, k=k, segment=segment)
        require(op, layout in ("nn", "nt", "tn"), f'layout is "{layout}", must be "nn", "nt" or "tn"')
        require(op, dtype in ("bf16", "f16"), f'dtype is "{dtype}", the tensor cores take "bf16" or "f16"')
        require(op, k % segment == 0, f"k = {k} is no whole number of segments of {segment}")
        # Along rows, a segment's start would have to be aligned too; only weight gradients have segments, and they are tn.
        require(op, segment == k or layout == "tn", 'segments need layout "tn"')
        self.m, self.n, self.k, self.layout, self.dtype, self.segment = m, n, k, layout, dtype, segment
        self.a_shape = (k, m) if layout == "tn" else (m, k)
        self.b_shape = (n, k) if layout == "nt" else (k, n)
        least = (n, self.a_shape[1], self.b_shape[1])
        self.ldo, self.lda, self.ldb = strides or least
        for name, stride, width in zip(("out", "a", "b"), (self.ldo, self.lda, self.ldb), least, strict=True):
            require(op, stride >= width, f"rows of {name} are {stride} apart, they have {width} numbers")
        why = obstacle(out=self.ldo, a=self.lda, b=self.ldb)
        require(op, why is None, f'{why}; pad them, or take the way "bf16"')

    def check(
        self,
        out: Buffer,
        a: Buffer,
        b: Buffer,
        out_dtype: str,
        residual: Buffer | None,
        bias: Buffer | None,
        accumulate: bool,
    ) -> None:
        """Hold the buffers against the sizes; a last row need not be padded."""
        op = "matmul.run"
        is_bf16(op, out_dtype)
        require(op, not (accumulate and out_dtype != "f32"), "only an f32 out can be accumulated into")
        require(op, not (accumulate and residual is not None), "with accumulate the sums start at out: no residual")
        holds(op, "out", out, (self.m - 1) * self.ldo + self.n, out_dtype)
        for name, buffer, (rows, width), stride in (("a", a, self.a_shape, self.lda), ("b", b, self.b_shape, self.ldb)):
            holds(op, name, buffer, (rows - 1) * stride + width, self.dtype)
            require(op, buffer.ptr % 16 == 0, f"{name} is not aligned to 16 bytes")
        if residual is not None:
            holds(op, "residual", residual, (self.m - 1) * self.ldo + self.n, "f32")
        if bias is not None:
            holds(op, "bias", bias, self.n, "f32")

    def record(
        self,
        rec: Recorder,
        spec: MatmulSpec,
        out: Buffer,
        a: Buffer,
        b: Buffer,
        residual: Buffer | None,
        bias: Buffer | None,
        out_dtype: str,
        accumulate: bool,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        numbers = (self.m, self.n, self.k, self.lda, self.ldb, self.ldo, self.segment, part)
        null = np.uint64(0)
        rec.launch(
            rec.ptx("matmul", spec=spec), spec.grid(self.m, self.n, parts), spec.block,
            out, a, b, null if residual is None else residual, null if bias is None else bias,
            *map(np.uint32, numbers), np.uint32(out_dtype == "bf16"), np.uint32(accumulate), shared=spec.shared_bytes,
        )  # fmt: skip
