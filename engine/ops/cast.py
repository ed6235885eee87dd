"""Between f32 and bf16; to bf16 rounds to nearest even."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, sizes, vector
from ptxtrain.ptx.specs import ElementSpec


def to_bf16(
    rec: Recorder,
    out: Buffer,  # [count] bf16
    x: Buffer,  # [count] f32
    *,
    count: int,
) -> None:
    """out = x, rounded to nearest even."""
    op, spec = "cast.to_bf16", ElementSpec(vector=vector(rec, count, out, x))
    sizes(op, count=count)
    holds(op, "out", out, count, "bf16")
    holds(op, "x", x, count, "f32")
    rec.launch(rec.ptx("cast_to_bf16", spec=spec), spec.grid(count), spec.block, out, x, np.uint32(count))


def to_f32(
    rec: Recorder,
    out: Buffer,  # [count] f32
    x: Buffer,  # [count] bf16
    *,
    count: int,
) -> None:
    """out = x, exactly."""
    op, spec = "cast.to_f32", ElementSpec(vector=vector(rec, count, out, x))
    sizes(op, count=count)
    holds(op, "out", out, count, "f32")
    holds(op, "x", x, count, "bf16")
    rec.launch(rec.ptx("cast_to_f32", spec=spec), spec.grid(count), spec.block, out, x, np.uint32(count))
