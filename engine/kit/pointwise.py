"""SwiGLU on arrays of f16, bf16 or f32, element by element; everything between load and store is f32."""

from __future__ import annotations

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS
from ptxtrain.engine.kit.core import Call
from ptxtrain.engine.ops import swiglu


def swiglu_forward(gate: Array, up: Array, *, out: Array | None = None) -> Array:
    """SwiGLU (Shazeer 2020): out = silu(gate) * up, silu(g) = g / (1 + exp(-g)).

    Args:
        gate: [...], any shape, f16, bf16 or f32.
        up: [...], of the shape and dtype of gate.
        out: [...], of the shape and dtype of gate; may be gate or up.

    Returns:
        out: what was passed in, or a new array of the kind of gate.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> print(kit.swiglu_forward(np.array([0, 1, -1], np.float32), np.array([5, 2, 2], np.float32)).round(4))
    [ 0.      1.4621 -0.5379]
    """
    call = Call("swiglu_forward")
    gate_ = call.input("gate", gate, ("...",), FLOATS)
    up_ = call.input("up", up, ("...",), gate_.dtype)
    out_ = call.output("out", out, ("...",), gate_.dtype, shares=("gate", "up"))

    def record(rec: Recorder) -> None:
        buffers = (out_.buffer, gate_.buffer, up_.buffer)
        swiglu.flat_forward(rec, *buffers, count=gate_.count, dtype=gate_.dtype)

    if gate_.count:
        call.run(record)
    return out_.result


def swiglu_backward(
    gate: Array,
    up: Array,
    dout: Array,
    *,
    dgate: Array | None = None,
    dup: Array | None = None,
) -> tuple[Array, Array]:
    """The gradients of `swiglu_forward`.

    With s = 1 / (1 + exp(-gate)): dgate = dout * up * s * (1 + gate * (1 - s)), dup = dout * gate * s.

    Args:
        gate: [...], any shape, f16, bf16 or f32, as it was given to the forward pass.
        up: [...], as well, of the shape and dtype of gate.
        dout: [...], of the shape and dtype of gate: the gradient of out.
        dgate: [...], of the shape and dtype of gate; may be gate, up or dout.
        dup: [...], as well, but not the same as dgate.

    Returns:
        dgate, dup: what was passed in, or new arrays of the kind of gate.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> gate, up, dout = (np.array(x, np.float32) for x in ([0, 1], [2, 2], [1, 1]))
    >>> dgate, dup = kit.swiglu_backward(gate, up, dout)
    >>> print(dgate.round(4), dup.round(4))
    [1.     1.8553] [0.     0.7311]
    """
    call = Call("swiglu_backward")
    gate_ = call.input("gate", gate, ("...",), FLOATS)
    up_ = call.input("up", up, ("...",), gate_.dtype)
    dout_ = call.input("dout", dout, ("...",), gate_.dtype)
    inputs = ("gate", "up", "dout")
    dgate_ = call.output("dgate", dgate, ("...",), gate_.dtype, shares=inputs)
    dup_ = call.output("dup", dup, ("...",), gate_.dtype, shares=inputs)

    def record(rec: Recorder) -> None:
        buffers = (dgate_.buffer, dup_.buffer, dout_.buffer, gate_.buffer, up_.buffer)
        swiglu.flat_backward(rec, *buffers, count=gate_.count, dtype=gate_.dtype)

    if gate_.count:
        call.run(record)
    return dgate_.result, dup_.result
