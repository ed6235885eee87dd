"""The global norm of the flat gradient: sums of squares over fixed parts, then one sum of the parts in a fixed order."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import scalars as scalar_table
from ptxtrain.engine.ops.checks import holds, require, sizes
from ptxtrain.ptx.specs import NormPartSpec, OneBlockSpec


def parts(count: int) -> int:
    """How many partial sums `compute` needs room for."""
    return NormPartSpec().parts(count)


def compute(
    rec: Recorder,
    scalars: Buffer,  # [scalars.COUNT] f32
    partial: Buffer,  # [parts(count)] f32
    grads: Buffer,  # [count] f32
    loss: Buffer,  # [1] f32
    *,
    count: int,
    clip: float,
) -> None:
    """scalars[GRAD_NORM] = sqrt(sum(grads^2)); scalars[CLIP] = min(1, clip / norm), or 1 when clip is 0.

    A norm or a loss that is not finite makes scalars[CLIP] NaN, which `adamw.update` takes as "change nothing"."""
    op, first, last = "gradnorm.compute", NormPartSpec(), OneBlockSpec(warps=1)
    sizes(op, count=count)
    require(op, clip >= 0, f"clip is {clip}, must not be negative")
    holds(op, "scalars", scalars, scalar_table.COUNT, "f32")
    holds(op, "partial", partial, parts(count), "f32")
    holds(op, "grads", grads, count, "f32")
    holds(op, "loss", loss, 1, "f32")
    rec.launch(
        rec.ptx("gradnorm_partial", spec=first), first.grid(count), first.block, partial, grads, np.uint32(count)
    )
    kernel = rec.ptx("gradnorm_finish", spec=last)
    rec.launch(kernel, (1, 1, 1), last.block, scalars, partial, loss, np.uint32(parts(count)), np.float32(clip))
