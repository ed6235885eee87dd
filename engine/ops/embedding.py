"""The embedding table: rows by token, and their gradient with one writer per row of the table.

The host counting-sorts a micro-batch's rows by token, so that the rows of one token lie together and are added in order.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, sizes, vector
from ptxtrain.ptx.specs import CopySpec


def forward(
    rec: Recorder,
    out: Buffer,  # [N, D] f32
    tokens: Buffer,  # [N] i32, each below V
    table: Buffer,  # [V, D] f32
    *,
    rows: int,
    width: int,
    vocab: int,
) -> None:
    """out[n] = table[tokens[n]]."""
    op, spec = "embedding.forward", CopySpec(vector=vector(rec, width, out, table))
    sizes(op, rows=rows, width=width, vocab=vocab)
    holds(op, "out", out, rows * width, "f32")
    holds(op, "tokens", tokens, rows, "i32")
    holds(op, "table", table, vocab * width, "f32")
    kernel = rec.ptx("embedding_forward", spec=spec)
    rec.launch(kernel, spec.grid(rows), spec.block, out, tokens, table, np.uint32(rows), np.uint32(width))


def backward(
    rec: Recorder,
    dtable: Buffer,  # [V, D] f32, starts at what it holds
    dx: Buffer,  # [N, D] f32
    order: Buffer,  # [N] i32: rows sorted by token, stable
    starts: Buffer,  # [V + 1] i32: the rows of token v are order[starts[v]:starts[v + 1]]
    *,
    rows: int,
    width: int,
    vocab: int,
) -> None:
    """dtable[v] += the rows of dx whose token is v, in order."""
    op, spec = "embedding.backward", CopySpec(vector=vector(rec, width, dtable, dx))
    sizes(op, rows=rows, width=width, vocab=vocab)
    holds(op, "dtable", dtable, vocab * width, "f32")
    holds(op, "dx", dx, rows * width, "f32")
    holds(op, "order", order, rows, "i32")
    holds(op, "starts", starts, vocab + 1, "i32")
    kernel = rec.ptx("embedding_backward", spec=spec)
    rec.launch(kernel, spec.grid(vocab), spec.block, dtable, dx, order, starts, np.uint32(width), np.uint32(vocab))
