"""RMSNorm over the rows of the residual stream (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight.

The gradient of the weight is summed in a fixed order: `backward` leaves one partial sum per part (a block of rows that
never crosses a sequence), `weight_gradient` adds the parts in order to what is there.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import add
from ptxtrain.engine.ops.checks import ITEM_SIZES, holds, is_bf16, of_kit, sizes, streams, whole_sequences
from ptxtrain.ptx.specs import NormBackwardSpec, NormSpec


def forward(
    rec: Recorder,
    out: Buffer,  # [N, D] dtype
    rstd: Buffer,  # [N] f32
    x: Buffer,  # [N, D] f32, dtype when uniform
    weight: Buffer,  # [D] f32, dtype when uniform
    *,
    rows: int,
    width: int,
    eps: float,
    dtype: str,
    uniform: bool = False,
) -> None:
    """out = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps). `uniform`, as in the kit: everything but rstd is of dtype."""
    op = "rmsnorm.forward"
    sizes(op, rows=rows, width=width)
    source, flag = _dtypes(op, dtype, uniform)
    holds(op, "out", out, rows * width, dtype)
    holds(op, "rstd", rstd, rows, "f32")
    holds(op, "x", x, rows * width, source)
    holds(op, "weight", weight, width, source)
    spec = NormSpec(stream=streams(rows * width * ITEM_SIZES[dtype]), dtype=dtype if uniform else "")
    kernel = rec.ptx("rmsnorm_forward", spec=spec)
    args = (out, rstd, x, weight, np.uint32(rows), np.uint32(width), np.float32(eps))
    rec.launch(kernel, spec.grid(rows), spec.block, *args, *flag)


def _dtypes(op: str, dtype: str, uniform: bool) -> tuple[str, tuple[np.uint32, ...]]:
    """The dtype of x and weight, and the kernels' flag for that of out, which uniform ones do not have."""
    if uniform:
        of_kit(op, dtype)
        return dtype, ()
    return "f32", (is_bf16(op, dtype),)


def parts(rows: int, context: int) -> int:
    """How many partial sums `backward` writes for `rows` rows of sequences of `context`."""
    return rows // context * NormBackwardSpec().parts_per_sequence(context)


def backward(
    rec: Recorder,
    dx: Buffer,  # [N, D] f32, dtype when uniform
    partial: Buffer,  # [parts, D] f32
    dout: Buffer,  # [N, D] dtype
    x: Buffer,  # [N, D] f32, dtype when uniform
    weight: Buffer,  # [D] f32, dtype when uniform
    rstd: Buffer,  # [N] f32
    *,
    rows: int,
    width: int,
    context: int,
    dtype: str,
    accumulate: bool,
    uniform: bool = False,
) -> None:
    """The gradient of x, written or (`accumulate`, not when uniform) added to dx, and partial sums of the weight's gradient.

    With xhat = x * rstd and g = dout * weight: dx = rstd * (g - xhat * mean(g * xhat)), dweight = sum of dout * xhat.
    """
    op, spec = "rmsnorm.backward", NormBackwardSpec(dtype=dtype if uniform else "")
    sizes(op, rows=rows, width=width, context=context)
    whole_sequences(op, rows, context)
    source, flag = _dtypes(op, dtype, uniform)
    assert not (uniform and accumulate), "uniform gradients are written"
    count = parts(rows, context)
    for name, buffer in (("dx", dx), ("x", x)):
        holds(op, name, buffer, rows * width, source)
    holds(op, "partial", partial, count * width, "f32")
    holds(op, "dout", dout, rows * width, dtype)
    holds(op, "weight", weight, width, source)
    holds(op, "rstd", rstd, rows, "f32")
    kernel = rec.ptx("rmsnorm_backward", spec=spec)
    flags = () if uniform else (*flag, np.uint32(accumulate))
    args = (dx, partial, dout, x, weight, rstd, np.uint32(width), np.uint32(context))
    rec.launch(kernel, (count, 1, 1), spec.block, *args, *flags)


def weight_gradient(
    rec: Recorder,
    dweight: Buffer,  # [D] f32, starts at what it holds
    partial: Buffer,  # [parts, D] f32
    *,
    parts: int,
    width: int,
    fresh: bool = False,
) -> None:
    """dweight += the parts, in order; or dweight = their sum when `fresh`."""
    op = "rmsnorm.weight_gradient"
    sizes(op, parts=parts, width=width)
    holds(op, "dweight", dweight, width, "f32")
    holds(op, "partial", partial, parts * width, "f32")
    add.parts(rec, dweight, partial, parts=parts, count=width, fresh=fresh)
