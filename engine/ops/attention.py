"""Causal attention with grouped queries, by the naive reference: the whole score matrix of every head lies in scratch.

Query heads h of the same group, h // (H / G), share a key/value head. The gradients of keys and values have one owner,
which adds its group's query heads in order and, within a head, the queries in order.
"""

from __future__ import annotations

import math

import numpy as np

from ptxtrain.engine.device.base import Buffer, Kernel
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import ITEM_SIZES, even_head, holds, is_bf16, require, sizes
from ptxtrain.ptx.specs import LANES, ceil_div

# As in ptx/reference/attention.cu.
TILE = 32  # queries or keys
WARPS = 4  # each owns 8 rows of a tile
MAX_HEAD_DIM = 128  # CHANNELS: two tiles of f32 must fit 48 KiB of shared memory


def pitch(context: int) -> int:
    """The width of a row of scores: T rounded up to whole tiles."""
    return ceil_div(context, TILE) * TILE


def scratch_bytes(*, batch: int, context: int, heads: int) -> int:
    """What `forward` and `backward` need: two score matrices [B, H, T, pitch] and one number a row, f32."""
    return 4 * batch * heads * context * (2 * pitch(context) + 1)


def forward(
    rec: Recorder,
    out: Buffer,  # [N, H * C] dtype
    lse: Buffer,  # [B, H, T] f32
    qkv: Buffer,  # [N, (H + 2G) * C] dtype: queries, keys, values, already rotated
    scratch: Buffer,  # scratch_bytes(...)
    *,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
) -> None:
    """out = softmax(q k^T / sqrt(C), causal) v; lse = log(sum(exp(scores))) of each row, for the backward pass."""
    op = "attention.forward"
    shape = _Shape(op, batch, context, heads, kv_heads, head_dim, dtype)
    shape.holds(qkv=qkv, out=out, lse=lse, scratch=scratch)
    scores = shape.scores(scratch, 0)
    shape.record_scores(rec, scores, qkv)
    shape.record(rec, "softmax", shape.by_row, (scores, lse), (context, heads))
    shape.record_rows(rec, out, shape.query_width, 0, scores, qkv, shape.first_value)


def backward(
    rec: Recorder,
    dqkv: Buffer,  # [N, (H + 2G) * C] dtype, wholly written
    dout: Buffer,  # [N, H * C] dtype
    out: Buffer,  # [N, H * C] dtype, of the forward pass
    lse: Buffer,  # [B, H, T] f32, of the forward pass
    qkv: Buffer,  # [N, (H + 2G) * C] dtype
    scratch: Buffer,  # scratch_bytes(...)
    *,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
) -> None:
    """With P = exp(scores - lse), delta = rowsum(dout * out), dS = P * (dout v^T - delta) / sqrt(C):
    dq = dS k, dk = dS^T q, dv = P^T dout; keys and values sum over the query heads of their group."""
    op = "attention.backward"
    shape = _Shape(op, batch, context, heads, kv_heads, head_dim, dtype)
    shape.holds(qkv=qkv, out=out, lse=lse, scratch=scratch)
    shape.holds(qkv=dqkv, out=dout, lse=lse, scratch=scratch)
    probabilities, dscores, delta = (shape.scores(scratch, i) for i in range(3))
    shape.record(rec, f"delta_{dtype}", shape.by_row, (delta, dout, out), (context, heads, head_dim))
    shape.record_scores(rec, probabilities, qkv)
    buffers = (probabilities, dscores, dout, qkv, lse, delta)
    numbers = (context, heads, kv_heads, head_dim)
    shape.record(rec, f"dscores_{dtype}", shape.by_tile, buffers, numbers, shape.scale)
    shape.record_rows(rec, dqkv, shape.stride, 0, dscores, qkv, shape.first_key)
    shape.record_columns(rec, dqkv, shape.first_key, dscores, qkv, shape.stride)
    shape.record_columns(rec, dqkv, shape.first_value, probabilities, dout, shape.query_width)


class _Shape:
    """The checked sizes of one call, and the launches that both directions share."""

    def __init__(self, op: str, batch: int, context: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
        sizes(op, batch=batch, context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        require(op, heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} key/value heads evenly")
        even_head(op, head_dim)
        limit = f"head_dim is {head_dim}, the naive kernels allow {MAX_HEAD_DIM}; use more heads of fewer channels"
        require(op, head_dim <= MAX_HEAD_DIM, limit)
        is_bf16(op, dtype)
        self.op, self.dtype = op, dtype
        self.batch, self.context, self.heads, self.kv_heads, self.head_dim = batch, context, heads, kv_heads, head_dim
        self.scale = np.float32(1.0 / math.sqrt(head_dim))
        self.query_width = heads * head_dim
        self.stride = (heads + 2 * kv_heads) * head_dim
        self.first_key = heads * head_dim
        self.first_value = (heads + kv_heads) * head_dim
        self.by_tile = (ceil_div(context, TILE), heads, batch)
        self.by_key_tile = (ceil_div(context, TILE), kv_heads, batch)
        self.by_row = (ceil_div(context, WARPS), heads, batch)

    def holds(self, *, qkv: Buffer, out: Buffer, lse: Buffer, scratch: Buffer) -> None:
        rows = self.batch * self.context
        holds(self.op, "qkv", qkv, rows * self.stride, self.dtype)
        holds(self.op, "out", out, rows * self.query_width, self.dtype)
        holds(self.op, "lse", lse, rows * self.heads, "f32")
        needed = scratch_bytes(batch=self.batch, context=self.context, heads=self.heads)
        holds(self.op, "scratch", scratch, needed // ITEM_SIZES["f32"], "f32")

    def scores(self, scratch: Buffer, index: int) -> Buffer:
        """Score matrix 0 or 1 of the scratch; 2 is the vector after them."""
        rows = self.batch * self.heads * self.context
        matrix = 4 * rows * pitch(self.context)
        return scratch.view(index * matrix, 4 * rows if index == 2 else matrix)

    def record(
        self,
        rec: Recorder,
        part: str,
        grid: tuple[int, int, int],
        buffers: tuple[Buffer, ...],
        numbers: tuple[int, ...],
        *scalars: np.generic,
    ) -> None:
        kernel: Kernel = rec.reference("attention", f"attention_{part}")
        rec.launch(kernel, grid, (LANES, WARPS, 1), *buffers, *map(np.uint32, numbers), *scalars)

    def record_scores(self, rec: Recorder, scores: Buffer, qkv: Buffer) -> None:
        numbers = (self.context, self.heads, self.kv_heads, self.head_dim)
        self.record(rec, f"scores_{self.dtype}", self.by_tile, (scores, qkv), numbers, self.scale)

    def record_rows(
        self, rec: Recorder, out: Buffer, out_stride: int, out_first: int, weights: Buffer, x: Buffer, x_first: int
    ) -> None:
        """out[query] = sum over keys of weights[query][key] * x[key]; x is a key or a value of qkv."""
        numbers = (self.context, self.heads, self.kv_heads, self.head_dim, out_stride, out_first, self.stride, x_first)
        self.record(rec, f"rows_{self.dtype}", self.by_tile, (out, weights, x), numbers)

    def record_columns(
        self, rec: Recorder, out: Buffer, out_first: int, weights: Buffer, x: Buffer, x_stride: int
    ) -> None:
        """out[key] = sum over heads of the group and queries of weights[query][key] * x[query]; out is in dqkv."""
        numbers = (self.context, self.heads, self.kv_heads, self.head_dim, self.stride, out_first, x_stride)
        self.record(rec, f"columns_{self.dtype}", self.by_key_tile, (out, weights, x), numbers)
