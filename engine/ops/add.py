"""Sums of flat f32 buffers: two, as leaves of a step's gradient meet in the tree, or the parts of a weight's gradient."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, sizes, vector
from ptxtrain.ptx.specs import ElementSpec, PartsSpec


def into(
    rec: Recorder,
    out: Buffer,  # [count] f32, may be a or b
    a: Buffer,  # [count] f32
    b: Buffer,  # [count] f32
    *,
    count: int,
) -> None:
    """out = a + b."""
    op, spec = "add.into", ElementSpec(vector=vector(rec, count, out, a, b))
    sizes(op, count=count)
    for name, buffer in (("out", out), ("a", a), ("b", b)):
        holds(op, name, buffer, count, "f32")
    rec.launch(rec.ptx("add_into", spec=spec), spec.grid(count), spec.block, out, a, b, np.uint32(count))


def parts(
    rec: Recorder,
    out: Buffer,  # [count] f32, starts at what it holds, or at 0 when fresh
    partial: Buffer,  # [parts, count] f32
    *,
    parts: int,
    count: int,
    fresh: bool = False,
) -> None:
    """out += the parts, in order; or out = their sum when `fresh`."""
    op, spec = "add.parts", PartsSpec(vector=vector(rec, count, out, partial), fresh=fresh)
    sizes(op, parts=parts, count=count)
    holds(op, "out", out, count, "f32")
    holds(op, "partial", partial, parts * count, "f32")
    kernel = rec.ptx("add_parts", spec=spec)
    rec.launch(kernel, spec.grid(count), spec.block, out, partial, np.uint32(parts), np.uint32(count))
