"""Causal attention with grouped queries on the tensor cores: scores never leave the chip, memory grows with T, not T x T.

Layouts are those of `attention`, the naive twin. Query heads h of the same group, h // (H / G), share a key/value head.
Forward and dq have a block for 64 queries of a head; dkv has one for 64 keys of a key/value head, which adds its group's
query heads in order. So every number has one owner, which adds in an order that follows from the sizes alone.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, require, sizes
from ptxtrain.ptx.attention_spec import HEAD_DIMS, AttentionSpec, dkv_spec, dq_spec, forward_spec


def delta_bytes(*, batch: int, context: int, heads: int) -> int:
    """What `backward` needs beside its results: one f32 for each row of each head, at any T."""
    return 4 * batch * heads * context


def forward(
    rec: Recorder,
    out: Buffer,  # [N, H * C] bf16
    lse: Buffer,  # [B, H, T] f32
    qkv: Buffer,  # [N, (H + 2G) * C] bf16: queries, keys, values, already rotated
    *,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """out = softmax(q k^T / sqrt(C), causal) v; lse = log(sum(exp(scores))) of each row, for the backward pass.

    Raises:
        PtxtrainError: a size that the kernels do not have, or a buffer that is too small.
    """
    op = "flash_attention.forward"
    _check(op, batch, context, heads, kv_heads, head_dim)
    _holds(op, batch * context, heads, kv_heads, head_dim, lse=lse, wide={"qkv": qkv}, narrow={"out": out})
    spec = forward_spec(head_dim)
    _record(rec, "attention_forward", spec, (out, lse, qkv), batch, context, heads, kv_heads, blocks=heads)


def backward(
    rec: Recorder,
    dqkv: Buffer,  # [N, (H + 2G) * C] bf16, wholly written
    dout: Buffer,  # [N, H * C] bf16
    out: Buffer,  # [N, H * C] bf16, of the forward pass
    lse: Buffer,  # [B, H, T] f32, of the forward pass
    qkv: Buffer,  # [N, (H + 2G) * C] bf16
    delta: Buffer,  # [B, H, T] f32, written: rowsum(dout * out)
    *,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """With P = exp(scores - lse), delta = rowsum(dout * out), dS = P * (dout v^T - delta) / sqrt(C):
    dq = dS k, dk = dS^T q, dv = P^T dout; keys and values sum over the query heads of their group.

    Scores are computed again by each of the two kernels, from q and k.

    Raises:
        PtxtrainError: a size that the kernels do not have, or a buffer that is too small.
    """
    op = "flash_attention.backward"
    _check(op, batch, context, heads, kv_heads, head_dim)
    wide, narrow = {"dqkv": dqkv, "qkv": qkv}, {"dout": dout, "out": out}
    _holds(op, batch * context, heads, kv_heads, head_dim, lse=lse, wide=wide, narrow=narrow)
    holds(op, "delta", delta, batch * context * heads, "f32")
    of_dq, of_dkv = (dqkv, delta, dout, out, lse, qkv), (dqkv, dout, lse, delta, qkv)
    _record(rec, "attention_dq", dq_spec(head_dim), of_dq, batch, context, heads, kv_heads, blocks=heads)
    _record(rec, "attention_dkv", dkv_spec(head_dim), of_dkv, batch, context, heads, kv_heads, blocks=kv_heads)


def _check(op: str, batch: int, context: int, heads: int, kv_heads: int, head_dim: int) -> None:
    sizes(op, batch=batch, context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim, rows=batch * context)
    require(op, heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} key/value heads evenly")
    known = ", ".join(map(str, HEAD_DIMS))
    remedy = "use one of them, or the naive kernels (way bf16)"
    require(op, head_dim in HEAD_DIMS, f"head_dim is {head_dim}, the flash kernels have {known}; {remedy}")


def _holds(
    op: str,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    lse: Buffer,
    wide: dict[str, Buffer],
    narrow: dict[str, Buffer],
) -> None:
    """Buffers as wide as qkv, as wide as out, and a number for each row and head."""
    for name, buffer in wide.items():
        holds(op, name, buffer, rows * (heads + 2 * kv_heads) * head_dim, "bf16")
    for name, buffer in narrow.items():
        holds(op, name, buffer, rows * heads * head_dim, "bf16")
    holds(op, "lse", lse, rows * heads, "f32")


def _record(
    rec: Recorder,
    stem: str,
    spec: AttentionSpec,
    buffers: tuple[Buffer, ...],
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    *,
    blocks: int,
) -> None:
    """`blocks`: heads that have blocks of their own."""
    numbers = map(np.uint32, (context, heads, kv_heads))
    rec.launch(rec.ptx(stem, spec=spec), spec.grid(batch, context, blocks), spec.block, *buffers, *numbers)
