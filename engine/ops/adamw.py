"""AdamW (Loshchilov and Hutter 2019) over a range of the flat parameters: decoupled weight decay, f32 master weights."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import scalars as scalar_table
from ptxtrain.engine.ops.checks import holds, sizes, vector
from ptxtrain.ptx.specs import ElementSpec


def update(
    rec: Recorder,
    params: Buffer,  # [count] f32
    m: Buffer,  # [count] f32
    v: Buffer,  # [count] f32
    copy: Buffer | None,  # [count] bf16: the weights as the matmuls read them
    grads: Buffer,  # [count] f32
    scalars: Buffer,  # [scalars.COUNT] f32: LR, BIAS1, BIAS2, CLIP are read
    *,
    count: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """With g = grads * CLIP: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
    params -= LR * ((m / BIAS1) / (sqrt(v / BIAS2) + eps) + decay * params). With a CLIP of NaN nothing changes."""
    op = "adamw.update"
    sizes(op, count=count)
    for name, buffer in (("params", params), ("m", m), ("v", v), ("grads", grads)):
        holds(op, name, buffer, count, "f32")
    if copy is not None:
        holds(op, "copy", copy, count, "bf16")
    holds(op, "scalars", scalars, scalar_table.COUNT, "f32")
    spec = ElementSpec(vector=vector(rec, count, params, m, v, copy, grads))
    target = np.uint64(0) if copy is None else copy
    kernel = rec.ptx("adamw_update", spec=spec)
    numbers = (np.float32(x) for x in (beta1, beta2, eps, decay))
    flag = np.uint32(copy is not None)
    rec.launch(
        kernel, spec.grid(count), spec.block, params, m, v, target, grads, scalars, np.uint32(count), *numbers, flag
    )
