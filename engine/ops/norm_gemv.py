"""A few rows times a weight, with the norm of the rows on the way in: what decoding a token is made of.

out = norm(x) @ weight (+ residual) for 1 to 4 rows. The statistics of a row and the product are two passes of one block, and the
normalised row is never written. Its numbers are rounded to the weight's dtype, so they are those that the separate norm stores;
what differs from the separate product is the order of the sums, which knows neither the number of rows nor the grid.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import ITEM_SIZES, holds, require, sizes
from ptxtrain.ptx.gemv_spec import LAYOUTS, MOST_ROWS, NORMS, GemvSpec

DTYPES = ("f32", "bf16", "f16")


def run(
    rec: Recorder,
    out: Buffer,  # [M, N] out_dtype
    x: Buffer,  # [M, K] x_dtype
    gamma: Buffer | None,  # [K] norm_dtype
    beta: Buffer | None,  # [K] norm_dtype, "layer" alone
    weight: Buffer,  # [K, N] dtype, or [N, K] for "nk"
    *,
    rows: int,
    width: int,
    columns: int,
    layout: str,
    eps: float = 0.0,
    norm: str,
    dtype: str,
    out_dtype: str,
    x_dtype: str | None = None,
    norm_dtype: str | None = None,
    residual: Buffer | None = None,  # [M, N] f32, may be out
) -> None:
    """out = norm(x) @ weight (+ residual). `rows` is M (1 to 4), `width` K, `columns` N.

    norm: "rms" x / sqrt(mean(x^2) + eps) * gamma; "layer" (x - mean) / sqrt(mean((x - mean)^2) + eps) * gamma + beta; "none".
    dtype is the weight's; x_dtype and norm_dtype are the same unless given.

    Raises:
        PtxtrainError: more than 4 rows, an unknown word, gamma or beta missing or not wanted, or a buffer that is too small.
    """
    op = "norm_gemv.run"
    sizes(op, rows=rows, width=width, columns=columns)
    require(op, rows <= MOST_ROWS, f"{rows} rows: at most {MOST_ROWS} are fused; use the norm and a matmul for more")
    for name, word, known in (("layout", layout, LAYOUTS), ("norm", norm, NORMS)):
        require(op, word in known, f'{name} is "{word}", must be one of {", ".join(known)}')
    x_dtype, norm_dtype = x_dtype or dtype, norm_dtype or dtype
    for name, word in (("dtype", dtype), ("out_dtype", out_dtype), ("x_dtype", x_dtype), ("norm_dtype", norm_dtype)):
        require(op, word in DTYPES, f'{name} is "{word}", must be one of {", ".join(DTYPES)}')
    for name, buffer, wanted in (("gamma", gamma, norm != "none"), ("beta", beta, norm == "layer")):
        require(op, (buffer is not None) == wanted, f'norm "{norm}" {"needs" if wanted else "takes no"} {name}')
    require(op, norm == "none" or 0 <= eps < float("inf"), f"eps is {eps}, must be a number from 0")
    holds(op, "out", out, rows * columns, out_dtype)
    holds(op, "x", x, rows * width, x_dtype)
    holds(op, "weight", weight, width * columns, dtype)
    for name, buffer in (("gamma", gamma), ("beta", beta)):
        if buffer is not None:
            holds(op, name, buffer, width, norm_dtype)
    if residual is not None:
        holds(op, "residual", residual, rows * columns, "f32")
    spec = GemvSpec(layout, norm, rows, dtype, x_dtype, norm_dtype, out_dtype, residual is not None)
    _record(rec, spec, out, x, gamma, beta, weight, residual, width, columns, eps)


def _record(
    rec: Recorder,
    spec: GemvSpec,
    out: Buffer,
    x: Buffer,
    gamma: Buffer | None,
    beta: Buffer | None,
    weight: Buffer,
    residual: Buffer | None,
    width: int,
    columns: int,
    eps: float,
) -> None:
    null = np.uint64(0)
    buffers = [null if b is None else b for b in (out, x, gamma, beta, weight, residual)]
    vector = _vector(spec, width, columns, *((out, residual) if spec.layout == "kn" else (x, gamma, beta)), weight)
    spec = spec.with_vector(vector)
    numbers = (np.uint32(width), np.uint32(columns), np.float32(eps))
    rec.launch(rec.ptx("norm_gemv", spec=spec), spec.grid(columns), spec.block, *buffers, *numbers)


def _vector(spec: GemvSpec, width: int, columns: int, *buffers: Buffer | None) -> int:
    """2 where a lane can take two neighbours of 16 bits, and of what goes with them, at once; else 1."""
    if ITEM_SIZES[spec.dtype] != 2 or width % 2 or columns % 2:
        return 1
    return 2 if all(b is None or b.ptr % 8 == 0 for b in buffers) else 1
