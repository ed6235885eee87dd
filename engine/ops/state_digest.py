"""The integer sums that a state's digest is made of: over the bits of weights, m and v, each element with its place.

`engine.digest.state_sum` is the same in NumPy; a host's copy of a state is held against the device's with the two.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import holds, sizes
from ptxtrain.ptx.specs import DigestSpec


def scratch(count: int) -> int:
    """Bytes that `compute` needs for its partial sums."""
    return 4 * 2 * DigestSpec().pairs(count)


def compute(
    rec: Recorder,
    total: Buffer,  # [2] u32: lo, hi
    partial: Buffer,  # scratch(count) bytes
    params: Buffer,  # [count] f32, as are m and v
    m: Buffer,
    v: Buffer,
    *,
    count: int,
) -> None:
    """total = the two sums of `engine.digest.state_sum(params, m, v)`, its lower and its upper half."""
    op, spec = "state_digest.compute", DigestSpec()
    sizes(op, count=count)
    holds(op, "total", total, 2, "i32")
    holds(op, "partial", partial, 2 * spec.pairs(count), "i32")
    for name, buffer in (("params", params), ("m", m), ("v", v)):
        holds(op, name, buffer, count, "f32")
    kernel = rec.ptx("state_digest_partial", spec=spec)
    sized = (np.uint32(count), np.uint32(spec.part(count)))
    rec.launch(kernel, spec.grid(count), spec.block, partial, params, m, v, *sized)
    kernel = rec.ptx("state_digest_finish", spec=spec)
    rec.launch(kernel, (1, 1, 1), spec.finish_block, total, partial, np.uint32(spec.pairs(count)))
