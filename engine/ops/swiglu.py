"""SwiGLU (Shazeer 2020): silu(gate) * up, silu(g) = g / (1 + exp(-g)); gate and up are the halves of one row,
or flat arrays of their own."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops.checks import ITEM_SIZES, holds, is_half, sizes, streams
from ptxtrain.ptx.specs import LANES, ActivationSpec, ceil_div

CHUNK = 8  # numbers of two bytes in a 16-byte access
FULL = 0.8  # of a warp's lanes that must have a chunk: at F 384 a quarter would idle, and took 10 % longer on a CPU
FLAT = 512  # elements of a flat array that a warp takes, two rounds of its lanes


def _spec(width: int, dtype: str, *buffers: Buffer, stream: bool = False) -> ActivationSpec:
    """16 bytes a lane where rows are whole chunks and fill warps; no sums, so it shows in no bit."""
    chunks = width // CHUNK
    fills = chunks >= FULL * LANES * ceil_div(max(chunks, 1), LANES)
    aligned = width % CHUNK == 0 and all(b.ptr % 16 == 0 for b in buffers)
    half = "f16" if dtype == "f16" else "bf16"
    return ActivationSpec(wide=dtype != "f32" and aligned and fills, stream=stream, half=half)


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
    _, flag = is_half(op, dtype)
    size = ITEM_SIZES[dtype]
    holds(op, "out", out, rows * width, dtype)
    holds(op, "gate_up", gate_up, 2 * rows * width, dtype)
    spec = _spec(width, dtype, out, gate_up, stream=streams(rows * width * size))
    kernel = rec.ptx("swiglu_forward", spec=spec)
    numbers = (np.uint32(n) for n in (rows, width, 2 * width))
    rec.launch(kernel, spec.grid(rows), spec.block, out, *_halves(gate_up, width * size), *numbers, flag)


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
    _, flag = is_half(op, dtype)
    size = ITEM_SIZES[dtype]
    holds(op, "dgate_up", dgate_up, 2 * rows * width, dtype)
    holds(op, "dout", dout, rows * width, dtype)
    holds(op, "gate_up", gate_up, 2 * rows * width, dtype)
    kernel = rec.ptx("swiglu_backward", spec=spec)
    numbers = (np.uint32(n) for n in (rows, width, 2 * width))
    buffers = (*_halves(dgate_up, width * size), dout, *_halves(gate_up, width * size))
    rec.launch(kernel, spec.grid(rows), spec.block, *buffers, *numbers, flag)


def _halves(gate_up: Buffer, nbytes: int) -> tuple[Buffer, Buffer]:
    """From the first gate on and from the first up on; rows lie 2F apart."""
    return gate_up, gate_up.view(nbytes, gate_up.nbytes - nbytes)


def flat_forward(
    rec: Recorder,
    out: Buffer,  # [count] dtype, may be gate or up
    gate: Buffer,  # [count] dtype
    up: Buffer,  # [count] dtype
    *,
    count: int,
    dtype: str,
) -> None:
    """out = silu(gate) * up, of arrays of their own."""
    op = "swiglu.flat_forward"
    for name, buffer in (("out", out), ("gate", gate), ("up", up)):
        holds(op, name, buffer, count, dtype)
    _flat(rec, op, "swiglu_forward", (out, gate, up), count, dtype, stream=streams(count * ITEM_SIZES[dtype]))


def flat_backward(
    rec: Recorder,
    dgate: Buffer,  # [count] dtype, may be dout, gate or up
    dup: Buffer,  # [count] dtype, as well
    dout: Buffer,  # [count] dtype
    gate: Buffer,  # [count] dtype
    up: Buffer,  # [count] dtype
    *,
    count: int,
    dtype: str,
) -> None:
    """As `backward`, of arrays of their own."""
    op = "swiglu.flat_backward"
    for name, buffer in (("dgate", dgate), ("dup", dup), ("dout", dout), ("gate", gate), ("up", up)):
        holds(op, name, buffer, count, dtype)
    _flat(rec, op, "swiglu_backward", (dgate, dup, dout, gate, up), count, dtype)


def _flat(
    rec: Recorder, op: str, stem: str, buffers: tuple[Buffer, ...], count: int, dtype: str, *, stream: bool = False
) -> None:
    """Rows of `FLAT` elements, and one launch more for what is left over."""
    sizes(op, count=count)
    _, flag = is_half(op, dtype)
    rows, rest = divmod(count, FLAT)
    for first, row_count, width in ((0, rows, FLAT), (rows * FLAT, 1, rest)):
        if row_count and width:
            start = first * ITEM_SIZES[dtype]
            parts = [b.view(start, b.nbytes - start) for b in buffers]
            spec = _spec(width, dtype, *parts, stream=stream)
            numbers = (np.uint32(n) for n in (row_count, width, width))
            rec.launch(rec.ptx(stem, spec=spec), spec.grid(row_count), spec.block, *parts, *numbers, flag)
