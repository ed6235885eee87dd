"""SwiGLU (Shazeer 2020): silu(gate) * up, silu(g) = g / (1 + exp(-g)); gate and up are the halves of one row."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import ITEM_SIZES, holds, is_bf16, sizes, streams
from ptxtrain.ptx.specs import LANES, ActivationSpec, ceil_div

CHUNK = 8  # bf16 of a 16-byte access
FULL = 0.8  # of a warp's lanes that must have a chunk: at F 384 a quarter would idle, and took 10 % longer on a CPU


def _spec(width: int, dtype: str, *buffers: Buffer, stream: bool = False) -> ActivationSpec:
    """16 bytes a lane where rows are whole chunks and fill warps; no sums, so it shows in no bit."""
    chunks = width // CHUNK
    fills = chunks >= FULL * LANES * ceil_div(max(chunks, 1), LANES)
    aligned = width % CHUNK == 0 and all(b.ptr % 16 == 0 for b in buffers)
    return ActivationSpec(wide=dtype == "bf16" and aligned and fills, stream=stream)


def forward(
    rec: Recorder,
    out: Buffer,  # [N, F] dtype
    gate_up: Buffer,  # [N, 2F] dtype, gate first
    *,
    rows: int,
    width: int,
    dtype: str,
) -> None:
    """out = silu(gate) * up. `width` is F."""
    op = "swiglu.forward"
    sizes(op, rows=rows, width=width)
    bf16 = is_bf16(op, dtype)
    holds(op, "out", out, rows * width, dtype)
    holds(op, "gate_up", gate_up, 2 * rows * width, dtype)
    spec = _spec(width, dtype, out, gate_up, stream=streams(rows * width * ITEM_SIZES[dtype]))
    kernel = rec.ptx("swiglu_forward", spec=spec)
    rec.launch(kernel, spec.grid(rows), spec.block, out, gate_up, np.uint32(rows), np.uint32(width), bf16)


def backward(
    rec: Recorder,
    dgate_up: Buffer,  # [N, 2F] dtype
    dout: Buffer,  # [N, F] dtype
    gate_up: Buffer,  # [N, 2F] dtype
    *,
    rows: int,
    width: int,
    dtype: str,
) -> None:
    """With s = sigmoid(gate): dgate = dout * up * s * (1 + gate * (1 - s)), dup = dout * gate * s."""
    op, spec = "swiglu.backward", _spec(width, dtype, dgate_up, dout, gate_up)
    sizes(op, rows=rows, width=width)
    bf16 = is_bf16(op, dtype)
    holds(op, "dgate_up", dgate_up, 2 * rows * width, dtype)
    holds(op, "dout", dout, rows * width, dtype)
    holds(op, "gate_up", gate_up, 2 * rows * width, dtype)
    kernel = rec.ptx("swiglu_backward", spec=spec)
    rec.launch(kernel, spec.grid(rows), spec.block, dgate_up, dout, gate_up, np.uint32(rows), np.uint32(width), bf16)
