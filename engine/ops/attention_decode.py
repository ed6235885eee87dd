"""Attention of one new query for each sequence over a cache of keys and values, with grouped queries.

A head's keys are split over the warps of a block in tiles of 32, and the parts are put together in order: bits follow from the
position alone, neither from the number of sequences nor from what lies behind the position.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, require, sizes
from ptxtrain.ptx.decode_spec import ITEM, MOST_CHANNELS, DecodeSpec


def run(
    rec: Recorder,
    out: Buffer,  # [B, H * C] dtype
    qkv: Buffer,  # [B, (H + 2G) * C] dtype: the queries, already turned, are read
    keys: Buffer,  # [B, G, T, C] dtype
    values: Buffer,  # [B, G, T, C] dtype
    positions: Buffer,  # [B] i32
    *,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
) -> None:
    """out = softmax(q k^T / sqrt(C)) v over keys 0 to positions[b], the query's own included.

    Raises:
        PtxtrainError: heads that are no whole groups, an unknown size or dtype, or a buffer that is too small.
    """
    op = "attention_decode.run"
    sizes(op, batch=batch, context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    require(op, heads % kv_heads == 0, f"{heads} query heads do not share {kv_heads} key heads evenly")
    wanted = f"must be even, 2 to {MOST_CHANNELS}"
    require(op, head_dim % 2 == 0 and head_dim <= MOST_CHANNELS, f"head_dim is {head_dim}, {wanted}")
    require(op, dtype in ITEM, f'dtype is "{dtype}", must be one of {", ".join(ITEM)}')
    holds(op, "out", out, batch * heads * head_dim, dtype)
    holds(op, "qkv", qkv, batch * (heads + 2 * kv_heads) * head_dim, dtype)
    for name, cache in (("keys", keys), ("values", values)):
        holds(op, name, cache, batch * kv_heads * context * head_dim, dtype)
    holds(op, "positions", positions, batch, "i32")
    for name, buffer in (("out", out), ("qkv", qkv), ("keys", keys), ("values", values)):
        require(op, buffer.ptr % 4 == 0, f"{name} is not aligned to 4 bytes")
    spec = DecodeSpec(head_dim, dtype)
    numbers = map(np.uint32, (context, heads, kv_heads))
    kernel = rec.ptx("attention_decode", spec=spec)
    rec.launch(kernel, (heads, batch, 1), spec.block, out, qkv, keys, values, positions, *numbers)
