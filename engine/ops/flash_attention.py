"""Causal attention with grouped queries on the tensor cores: scores never leave the chip, memory grows with T, not T x T.

Layouts are those of `attention`, the naive twin; the functions called `apart` take the kit's arrays, one for each of q, k
and v. Query heads h of the same group, h // (H / G), share a key/value head. Forward and dq have a block for 64 queries of a
head; dkv has one for 64 keys of a key/value head, which adds its group's query heads in order. So every number has one
owner, which adds in an order that follows from the sizes alone.
"""

from __future__ import annotations

from typing import Any

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


def forward_apart(
    rec: Recorder,
    out: Buffer,  # [B, H, T, C] dtype
    lse: Buffer,  # [B, H, T] f32
    q: Buffer,  # [B, H, T, C] dtype
    k: Buffer,  # [B, G, T, C] dtype
    v: Buffer,  # [B, G, T, C] dtype
    *,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    causal: bool,
) -> None:
    """`forward` of arrays apart, f16 or bf16, causal or not; a row whose scores are all -inf gives 0.

    Raises:
        PtxtrainError: a size that the kernels do not have, a buffer that is too small or not aligned to 16 bytes.
    """
    op = "flash_attention.forward_apart"
    _check(op, batch, context, heads, kv_heads, head_dim)
    _holds_apart(op, batch, context, heads, kv_heads, head_dim, dtype, {"out": out, "q": q}, {"k": k, "v": v}, [lse])
    spec = forward_spec(head_dim, dtype=dtype, apart=True, causal=causal)
    _record(rec, "attention_forward", spec, (out, lse, q, k, v), batch, context, heads, kv_heads, blocks=heads)


def backward_apart(
    rec: Recorder,
    dq: Buffer,  # [B, H, T, C] dtype
    dk: Buffer,  # [B, G, T, C] dtype
    dv: Buffer,  # [B, G, T, C] dtype
    dout: Buffer,  # [B, H, T, C] dtype
    out: Buffer,  # [B, H, T, C] dtype, of the forward pass
    lse: Buffer,  # [B, H, T] f32, of the forward pass
    q: Buffer,  # [B, H, T, C] dtype
    k: Buffer,  # [B, G, T, C] dtype
    v: Buffer,  # [B, G, T, C] dtype
    delta: Buffer,  # [B, H, T] f32, written: rowsum(dout * out)
    *,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    causal: bool,
) -> None:
    """`backward` of arrays apart.

    Raises:
        PtxtrainError: as for `forward_apart`.
    """
    op = "flash_attention.backward_apart"
    _check(op, batch, context, heads, kv_heads, head_dim)
    wide, narrow = {"dq": dq, "dout": dout, "out": out, "q": q}, {"dk": dk, "dv": dv, "k": k, "v": v}
    _holds_apart(op, batch, context, heads, kv_heads, head_dim, dtype, wide, narrow, [lse, delta])
    form: dict[str, Any] = {"dtype": dtype, "apart": True, "causal": causal}
    of_dq, of_dkv = (dq, delta, dout, out, lse, q, k, v), (dk, dv, dout, lse, delta, q, k, v)
    _record(rec, "attention_dq", dq_spec(head_dim, **form), of_dq, batch, context, heads, kv_heads, blocks=heads)
    _record(rec, "attention_dkv", dkv_spec(head_dim, **form), of_dkv, batch, context, heads, kv_heads, blocks=kv_heads)


def obstacle(dtype: str, head_dim: int, *buffers: Buffer) -> str | None:
    """Why the kernels do not take arrays apart, or None if they do."""
    if dtype == "f32":
        return "f32 has no tensor core that keeps its 24 bits"
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, the flash kernels have {', '.join(map(str, HEAD_DIMS))}"
    if any(buffer.ptr % 16 for buffer in buffers):
        return "an array is not aligned to 16 bytes"
    return None


def _holds_apart(
    op: str,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    wide: dict[str, Buffer],
    narrow: dict[str, Buffer],
    numbers: list[Buffer],
) -> None:
    """Arrays of all query heads, of all key/value heads, and numbers for each row."""
    why = obstacle(dtype, head_dim, *wide.values(), *narrow.values())
    require(op, why is None, f"{why}")
    sizes(op, rows=batch * heads * context)
    for of, arrays in ((heads, wide), (kv_heads, narrow)):
        for name, buffer in arrays.items():
            holds(op, name, buffer, batch * of * context * head_dim, dtype)
    for name, buffer in zip(("lse", "delta"), numbers, strict=False):
        holds(op, name, buffer, batch * heads * context, "f32")


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
