"""New rows into the cache of keys and values, with RoPE on the way: queries are turned in place, keys where they are stored."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import even_head, holds, require, sizes
from ptxtrain.ptx.decode_spec import ITEM, AppendSpec


def run(
    rec: Recorder,
    qkv: Buffer,  # [rows, (H + 2G) * C] dtype, its queries changed in place
    keys: Buffer,  # [B, G, T, C] dtype
    values: Buffer,  # [B, G, T, C] dtype
    cos: Buffer,  # [T, C/2] f32
    sin: Buffer,  # [T, C/2] f32
    positions: Buffer,  # [rows] i32
    *,
    rows: int,
    per_sequence: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    turn: bool = True,
) -> None:
    """Row r belongs to sequence r / per_sequence and goes to its place positions[r] (one at or past T goes nowhere).

    The arithmetic is that of `rope.apply`. `turn=False`: the rows are turned already; keys and values are copied.

    Raises:
        PtxtrainError: rows that are no whole sequences, an odd head, or a buffer that is too small.
    """
    op = "kv_append.run"
    sizes(op, rows=rows, per_sequence=per_sequence, context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    require(op, rows % per_sequence == 0, f"{rows} rows are not whole sequences of {per_sequence}")
    even_head(op, head_dim)
    require(op, dtype in ITEM, f'dtype is "{dtype}", must be one of {", ".join(ITEM)}')
    all_heads, spec = heads + 2 * kv_heads, AppendSpec(dtype)
    cache = rows // per_sequence * kv_heads * context * head_dim
    holds(op, "qkv", qkv, rows * all_heads * head_dim, dtype)
    holds(op, "keys", keys, cache, dtype)
    holds(op, "values", values, cache, dtype)
    holds(op, "cos", cos, context * head_dim // 2, "f32")
    holds(op, "sin", sin, context * head_dim // 2, "f32")
    holds(op, "positions", positions, rows, "i32")
    numbers = map(np.uint32, (context, heads, kv_heads, head_dim, per_sequence, turn))
    kernel = rec.ptx("kv_append", spec=spec)
    rec.launch(kernel, spec.grid(all_heads, rows), spec.block, qkv, keys, values, cos, sin, positions, *numbers)
