"""Softmax over the rows of a matrix of one dtype: exp(x - max) / sum, and its gradient."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, of_kit, sizes
from ptxtrain.ptx.kit_spec import TypedRowSpec


def forward(
    rec: Recorder,
    out: Buffer,  # [N, D] dtype, may be x
    x: Buffer,  # [N, D] dtype
    *,
    rows: int,
    width: int,
    dtype: str,
) -> None:
    """out = exp(x - max) / sum of exp(x - max) over each row; 0 where x is minus infinity, also where the whole row is."""
    op, spec = "softmax.forward", TypedRowSpec(dtype)
    sizes(op, rows=rows, width=width)
    of_kit(op, dtype)
    for name, buffer in (("out", out), ("x", x)):
        holds(op, name, buffer, rows * width, dtype)
    kernel = rec.ptx("softmax_forward", spec=spec)
    rec.launch(kernel, spec.grid(rows), spec.block, out, x, np.uint32(rows), np.uint32(width))


def backward(
    rec: Recorder,
    dx: Buffer,  # [N, D] dtype, may be dout or out
    out: Buffer,  # [N, D] dtype
    dout: Buffer,  # [N, D] dtype
    *,
    rows: int,
    width: int,
    dtype: str,
) -> None:
    """dx = out * (dout - sum over the row of out * dout)."""
    op, spec = "softmax.backward", TypedRowSpec(dtype)
    sizes(op, rows=rows, width=width)
    of_kit(op, dtype)
    for name, buffer in (("dx", dx), ("out", out), ("dout", dout)):
        holds(op, name, buffer, rows * width, dtype)
    kernel = rec.ptx("softmax_backward", spec=spec)
    rec.launch(kernel, spec.grid(rows), spec.block, dx, out, dout, np.uint32(rows), np.uint32(width))
