"""Matrix products in the three layouts that training needs, by the naive reference.

Every output is one chain of f32 fused multiply-adds in ascending k, from zero or (`accumulate`) from the sum so far, so
that its bits depend neither on the tile nor on how k was cut into calls.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, is_bf16, require, sizes
from ptxtrain.ptx.specs import LANES, ceil_div

# As in ptx/reference/matmul.cu.
WARPS = 16
TILE_M = 8 * WARPS
TILE_N = LANES


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
) -> None:
    """out = a @ b (+ residual), or out = out + a @ b in one chain with `accumulate` (f32 out).

    Layouts: "nn" a @ b, "nt" a @ b^T, "tn" a^T @ b.
    """
    op = "matmul.run"
    sizes(op, m=m, n=n, k=k)
    require(op, layout in ("nn", "nt", "tn"), f'layout is "{layout}", must be "nn", "nt" or "tn"')
    is_bf16(op, dtype)
    bf16 = is_bf16(op, out_dtype)
    require(op, not (accumulate and out_dtype != "f32"), "only an f32 out can be accumulated into")
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
