"""LayerNorm over rows of one dtype (Ba, Kiros and Hinton 2016): (x - mean) / sqrt(variance + eps) * weight + bias.

The variance is summed in a second pass from the distances to the mean. The gradients of weight and bias are summed in a
fixed order: `backward` leaves one partial sum per part of 32 rows, `weight_gradient` adds the parts in order.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import add
from ptxtrain.engine.ops.checks import holds, of_kit, sizes
from ptxtrain.ptx.kit_spec import TypedPartSpec, TypedRowSpec


def forward(
    rec: Recorder,
    out: Buffer,  # [N, D] dtype
    mean: Buffer,  # [N] f32
    rstd: Buffer,  # [N] f32
    x: Buffer,  # [N, D] dtype
    weight: Buffer,  # [D] dtype
    bias: Buffer,  # [D] dtype
    *,
    rows: int,
    width: int,
    eps: float,
    dtype: str,
) -> None:
    """out = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps)."""
    op = "layernorm.forward"
    sizes(op, rows=rows, width=width)
    of_kit(op, dtype)
    for name, buffer in (("out", out), ("x", x)):
        holds(op, name, buffer, rows * width, dtype)
    for name, buffer in (("mean", mean), ("rstd", rstd)):
        holds(op, name, buffer, rows, "f32")
    for name, buffer in (("weight", weight), ("bias", bias)):
        holds(op, name, buffer, width, dtype)
    spec = TypedRowSpec(dtype)
    kernel = rec.ptx("layernorm_forward", spec=spec)
    args = (out, mean, rstd, x, weight, bias, np.uint32(rows), np.uint32(width), np.float32(eps))
    rec.launch(kernel, spec.grid(rows), spec.block, *args)


def parts(rows: int) -> int:
    """How many partial sums `backward` writes."""
    return TypedPartSpec().parts(rows)


def backward(
    rec: Recorder,
    dx: Buffer,  # [N, D] dtype
    partial_w: Buffer,  # [parts, D] f32
    partial_b: Buffer,  # [parts, D] f32
    dout: Buffer,  # [N, D] dtype
    x: Buffer,  # [N, D] dtype
    weight: Buffer,  # [D] dtype
    mean: Buffer,  # [N] f32
    rstd: Buffer,  # [N] f32
    *,
    rows: int,
    width: int,
    dtype: str,
) -> None:
    """The gradient of x, and partial sums of those of weight and bias.

    With xhat = (x - mean) * rstd and g = dout * weight: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),
    dweight = sum of dout * xhat, dbias = sum of dout.
    """
    op, spec = "layernorm.backward", TypedPartSpec(dtype)
    sizes(op, rows=rows, width=width)
    of_kit(op, dtype)
    for name, buffer in (("dx", dx), ("dout", dout), ("x", x)):
        holds(op, name, buffer, rows * width, dtype)
    for name, buffer in (("partial_w", partial_w), ("partial_b", partial_b)):
        holds(op, name, buffer, spec.parts(rows) * width, "f32")
    holds(op, "weight", weight, width, dtype)
    for name, buffer in (("mean", mean), ("rstd", rstd)):
        holds(op, name, buffer, rows, "f32")
    kernel = rec.ptx("layernorm_backward", spec=spec)
    args = (dx, partial_w, partial_b, dout, x, weight, mean, rstd, np.uint32(rows), np.uint32(width))
    rec.launch(kernel, spec.grid(rows), spec.block, *args)


def weight_gradient(
    rec: Recorder,
    dweight: Buffer,  # [D] f32
    partial: Buffer,  # [parts, D] f32: partial_w for the weight, partial_b for the bias
    *,
    parts: int,
    width: int,
    accumulate: bool,
) -> None:
    """The parts, added in order to 0 or (`accumulate`) to what dweight holds."""
    add.parts(rec, dweight, partial, parts=parts, count=width, fresh=not accumulate)
