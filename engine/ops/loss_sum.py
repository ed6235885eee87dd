"""The sum of a micro-batch's losses: rows of a sequence into one number, then sequence by sequence onto the sum so far."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, sizes
from ptxtrain.ptx.specs import OneBlockSpec


def accumulate(
    rec: Recorder,
    total: Buffer,  # [1] f32, starts at what it holds
    loss: Buffer,  # [sequences, T] f32
    *,
    sequences: int,
    context: int,
) -> None:
    """total += each sequence's sum, in order; a sequence's order depends on T alone."""
    op, spec = "loss_sum.accumulate", OneBlockSpec(warps=8)
    sizes(op, sequences=sequences, context=context)
    holds(op, "total", total, 1, "f32")
    holds(op, "loss", loss, sequences * context, "f32")
    kernel = rec.ptx("loss_sum", spec=spec)
    rec.launch(kernel, (1, 1, 1), spec.block, total, loss, np.uint32(sequences), np.uint32(context))
