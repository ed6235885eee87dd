"""Attention of q, k, v apart, any dtype and head dimension: the score matrices lie in scratch, products are `gemm.batched`.

The kit's path for what the flash kernels do not take, f32 above all. Query heads h of the same group, h // (H / G), share a
key/value head: their rows lie one after the other, so that a group's gradients of keys and values are one product whose k
goes through its query heads in order and, within a head, through the queries in order.
"""

from __future__ import annotations

import math

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import gemm
from ptxtrain.engine.ops.checks import holds, require, sizes
from ptxtrain.ptx.kit_spec import TypedRowSpec


def scratch_bytes(*, batch: int, heads: int, context: int, backward: bool) -> int:
    """Score matrices [B, H, T, T] in f32: one for `forward`, two for `backward`."""
    return 4 * batch * heads * context**2 * (2 if backward else 1)


def forward(
    rec: Recorder,
    out: Buffer,  # [B, H, T, C] dtype
    lse: Buffer,  # [B, H, T] f32
    q: Buffer,  # [B, H, T, C] dtype
    k: Buffer,  # [B, G, T, C] dtype
    v: Buffer,  # [B, G, T, C] dtype
    scores: Buffer,  # scratch_bytes(..., backward=False)
    *,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    causal: bool,
) -> None:
    """out = softmax(q k^T / sqrt(C)) v; lse = log(sum(exp(scores))) of each row. A row whose scores are all -inf gives 0.

    Raises:
        PtxtrainError: a buffer is too small, or the scores of a head are more than 2^32.
    """
    op = "dense_attention.forward"
    _check(op, batch, context, heads, kv_heads, head_dim)
    for name, buffer, of in (("out", out, heads), ("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        holds(op, name, buffer, batch * of * context * head_dim, dtype)
    holds(op, "lse", lse, batch * heads * context, "f32")
    _record_scores(rec, scores, q, k, batch, context, heads, kv_heads, head_dim, dtype)
    spec, rows = TypedRowSpec(), batch * heads * context
    numbers = map(np.uint32, (rows, context, context, causal))
    rec.launch(rec.ptx("dense_attention_softmax", spec=spec), spec.grid(rows), spec.block, lse, scores, *numbers)
    gemm.batched(
        rec, out, scores, v, batch=batch * heads, group=heads // kv_heads, m=context, n=head_dim, k=context,
        strides=(head_dim, context, head_dim), layout="nn", a_dtype="f32", b_dtype=dtype, out_dtype=dtype,
    )  # fmt: skip


def backward(
    rec: Recorder,
    dq: Buffer,  # [B, H, T, C] dtype
    dk: Buffer,  # [B, G, T, C] dtype
    dv: Buffer,  # [B, G, T, C] dtype
    scores: Buffer,  # half of scratch_bytes(..., backward=True)
    dscores: Buffer,  # the other half
    lse: Buffer,  # [B, H, T] f32, of the forward pass
    dout: Buffer,  # [B, H, T, C] dtype
    out: Buffer,  # [B, H, T, C] dtype, of the forward pass
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
    """With P = exp(scores - lse), delta = rowsum(dout * out), dS = P * (dout v^T - delta) / sqrt(C):
    dq = dS k, dk = dS^T q, dv = P^T dout; keys and values sum over the query heads of their group.

    Raises:
        PtxtrainError: a buffer is too small, or the scores of a group are more than 2^32.
    """
    op = "dense_attention.backward"
    _check(op, batch, context, heads, kv_heads, head_dim)
    for name, buffer in {"dq": dq, "dout": dout, "out": out, "q": q}.items():
        holds(op, name, buffer, batch * heads * context * head_dim, dtype)
    for name, buffer in {"dk": dk, "dv": dv, "k": k, "v": v}.items():
        holds(op, name, buffer, batch * kv_heads * context * head_dim, dtype)
    holds(op, "lse", lse, batch * heads * context, "f32")
    group, scale = heads // kv_heads, 1 / math.sqrt(head_dim)
    _record_scores(rec, scores, q, k, batch, context, heads, kv_heads, head_dim, dtype)
    gemm.batched(
        rec, dscores, dout, v, batch=batch * heads, group=group, m=context, n=context, k=head_dim,
        strides=(context, head_dim, head_dim), layout="nt", a_dtype=dtype, b_dtype=dtype, out_dtype="f32",
    )  # fmt: skip
    spec, rows = TypedRowSpec(dtype), batch * heads * context
    numbers = map(np.uint32, (rows, context, context, head_dim, causal))
    kernel = rec.ptx("dense_attention_gradient", spec=spec)
    rec.launch(kernel, spec.grid(rows), spec.block, scores, dscores, lse, dout, out, *numbers)
    gemm.batched(
        rec, dq, dscores, k, batch=batch * heads, group=group, m=context, n=head_dim, k=context,
        strides=(head_dim, context, head_dim), layout="nn", a_dtype="f32", b_dtype=dtype, out_dtype=dtype, alpha=scale,
    )  # fmt: skip
    for gradient, weights, x, alpha in ((dk, dscores, q, scale), (dv, scores, dout, 1.0)):
        gemm.batched(
            rec, gradient, weights, x, batch=batch * kv_heads, group=1, m=context, n=head_dim, k=group * context,
            strides=(head_dim, context, head_dim), layout="tn", a_dtype="f32", b_dtype=dtype, out_dtype=dtype,
            alpha=alpha,
        )  # fmt: skip


def _record_scores(
    rec: Recorder,
    scores: Buffer,
    q: Buffer,
    k: Buffer,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
) -> None:
    gemm.batched(
        rec, scores, q, k, batch=batch * heads, group=heads // kv_heads, m=context, n=context, k=head_dim,
        strides=(context, head_dim, head_dim), layout="nt", a_dtype=dtype, b_dtype=dtype, out_dtype="f32",
        alpha=1 / math.sqrt(head_dim),
    )  # fmt: skip


def _check(op: str, batch: int, context: int, heads: int, kv_heads: int, head_dim: int) -> None:
    sizes(op, batch=batch, context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    sizes(op, rows=batch * heads * context)
    require(op, heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} key/value heads evenly")
