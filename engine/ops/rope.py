"""Rotary position embedding (Su et al. 2021) in Llama's half-rotation form: pairs (k, k + C/2) turn by position / base^(2k/C)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import even_head, holds, is_half, sizes, whole_sequences
from ptxtrain.ptx.specs import RopeSpec


def tables(
    context: int, head_dim: int, base: float, scaling: float = 1.0, start: int = 0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(cos, sin) of the positions [start, start + T) and every pair, [T, C/2] f32; angles are position * scaling * base^(-2k/C).

    Computed by float64 `math` and rounded once: NumPy's transcendentals change bits with the SIMD level.
    """
    even_head("rope.tables", head_dim)
    rates = [math.pow(base, -2.0 * k / head_dim) for k in range(head_dim // 2)]
    positions = [position * scaling for position in range(start, start + context)]
    angles = [[position * rate for rate in rates] for position in positions]
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
    sizes("rope.apply", heads=heads, kv_heads=kv_heads)
    stride = (heads + 2 * kv_heads) * head_dim
    _turn(rec, "rope.apply", qkv, cos, sin, rows, context, heads + kv_heads, head_dim, stride, dtype, inverse)


def turn(
    rec: Recorder,
    x: Buffer,  # [N, C] dtype, changed in place
    cos: Buffer,  # [T, C/2] f32
    sin: Buffer,  # [T, C/2] f32
    *,
    rows: int,
    context: int,
    head_dim: int,
    dtype: str,
    inverse: bool = False,
) -> None:
    """As `apply`, for rows of one head each, as in [B, H, T, C]: row n is at position n % T."""
    _turn(rec, "rope.turn", x, cos, sin, rows, context, 1, head_dim, head_dim, dtype, inverse)


def _turn(
    rec: Recorder,
    op: str,
    qkv: Buffer,
    cos: Buffer,
    sin: Buffer,
    rows: int,
    context: int,
    heads: int,
    head_dim: int,
    stride: int,
    dtype: str,
    inverse: bool,
) -> None:
    sizes(op, rows=rows, context=context, head_dim=head_dim)
    whole_sequences(op, rows, context)
    even_head(op, head_dim)
    half, flag = is_half(op, dtype)
    spec = RopeSpec(half=half)
    holds(op, "qkv", qkv, rows * stride, dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        holds(op, name, table, context * head_dim // 2, "f32")
    kernel = rec.ptx("rope", spec=spec)
    numbers = (np.uint32(n) for n in (rows, context, heads, head_dim, stride))
    rec.launch(kernel, spec.grid(rows), spec.block, qkv, cos, sin, *numbers, flag, np.uint32(inverse))
