"""The sum of two flat f32 buffers: how leaves of a step's gradient meet in the tree."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, sizes
from ptxtrain.ptx.specs import ElementSpec


def into(
    rec: Recorder,
    out: Buffer,  # [count] f32, may be a or b
    a: Buffer,  # [count] f32
    b: Buffer,  # [count] f32
    *,
    count: int,
) -> None:
    """out = a + b."""
    op, spec = "add.into", ElementSpec()
    sizes(op, count=count)
    for name, buffer in (("out", out), ("a", a), ("b", b)):
        holds(op, name, buffer, count, "f32")
    rec.launch(rec.ptx("add_into", spec=spec), spec.grid(count), spec.block, out, a, b, np.uint32(count))
