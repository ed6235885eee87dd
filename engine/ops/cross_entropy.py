"""Cross-entropy of softmax(logits) against a target token, row by row; a negative target is ignored.

The forward pass keeps each row's log-sum-exp, so that the backward pass recomputes the probabilities in place.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import scalars as scalar_table
from ptxtrain.engine.ops.checks import holds, is_bf16, sizes
from ptxtrain.ptx.specs import RowSpec


def forward(
    rec: Recorder,
    loss: Buffer,  # [N] f32
    lse: Buffer,  # [N] f32
    logits: Buffer,  # [N, V] dtype
    targets: Buffer,  # [N] i32, each below V
    *,
    rows: int,
    vocab: int,
    dtype: str,
) -> None:
    """loss = lse - logits[target] in nats (0 where target < 0), lse = log(sum(exp(logits)))."""
    op, spec = "cross_entropy.forward", RowSpec()
    sizes(op, rows=rows, vocab=vocab)
    bf16 = is_bf16(op, dtype)
    holds(op, "loss", loss, rows, "f32")
    holds(op, "lse", lse, rows, "f32")
    holds(op, "logits", logits, rows * vocab, dtype)
    holds(op, "targets", targets, rows, "i32")
    kernel = rec.ptx("cross_entropy_forward", spec=spec)
    args = (loss, lse, logits, targets, np.uint32(rows), np.uint32(vocab), bf16)
    rec.launch(kernel, spec.grid(rows), spec.block, *args)


def backward(
    rec: Recorder,
    logits: Buffer,  # [N, V] dtype, become their gradient
    lse: Buffer,  # [N] f32
    targets: Buffer,  # [N] i32
    scalars: Buffer,  # [scalars.COUNT] f32
    *,
    rows: int,
    vocab: int,
    dtype: str,
) -> None:
    """logits = (exp(logits - lse) - onehot(target)) * scalars[GRAD_SCALE], 0 where target < 0; in place."""
    op, spec = "cross_entropy.backward", RowSpec()
    sizes(op, rows=rows, vocab=vocab)
    bf16 = is_bf16(op, dtype)
    holds(op, "logits", logits, rows * vocab, dtype)
    holds(op, "lse", lse, rows, "f32")
    holds(op, "targets", targets, rows, "i32")
    holds(op, "scalars", scalars, scalar_table.COUNT, "f32")
    kernel = rec.ptx("cross_entropy_backward", spec=spec)
    args = (logits, lse, targets, scalars, np.uint32(rows), np.uint32(vocab), bf16)
    rec.launch(kernel, spec.grid(rows), spec.block, *args)
