"""Rotary position embedding (Su et al. 2021) in Llama's half-rotation form: pairs (k, k + C/2) turn by position / base^(2k/C)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import even_head, holds, is_bf16, sizes, whole_sequences
from ptxtrain.ptx.specs import RowSpec


def tables(context: int, head_dim: int, base: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(cos, sin) of every position and pair, [T, C/2] f32.

    Computed by float64 `math` and rounded once: NumPy's transcendentals change bits with the SIMD level.
    """
    even_head("rope.tables", head_dim)
    rates = [math.pow(base, -2.0 * k / head_dim) for k in range(head_dim // 2)]
    angles = [[position * rate for rate in rates] for position in range(context)]
    cos = np.array([[math.cos(angle) for angle in row] for row in angles], np.float32)
    sin = np.array([[math.sin(angle) for angle in row] for row in angles], np.float32)
    return cos, sin


def apply(
    rec: Recorder,
    qkv: Buffer,  # [N, (H + 2G) * C] dtype, changed in place
    cos: Buffer,  # [T, C/2] f32
    sin: Buffer,  # [T, C/2] f32
    *,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    inverse: bool = False,
) -> None:
    """Turn queries and keys (the first H + G heads) by their position in the sequence; `inverse` turns back.

    The inverse is the transpose, so it is the backward pass as well.
    """
    op, spec = "rope.apply", RowSpec()
    sizes(op, rows=rows, context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    whole_sequences(op, rows, context)
    even_head(op, head_dim)
    bf16 = is_bf16(op, dtype)
    stride = (heads + 2 * kv_heads) * head_dim
    holds(op, "qkv", qkv, rows * stride, dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        holds(op, name, table, context * head_dim // 2, "f32")
    kernel = rec.ptx("rope", spec=spec)
    numbers = (np.uint32(n) for n in (rows, context, heads + kv_heads, head_dim, stride))
    rec.launch(kernel, spec.grid(rows), spec.block, qkv, cos, sin, *numbers, bf16, np.uint32(inverse))
