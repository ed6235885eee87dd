"""Softmax over the last axis of an array of f16, bf16 or f32; everything between load and store is f32."""

from __future__ import annotations

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS
from ptxtrain.engine.kit.core import Call
from ptxtrain.engine.ops import softmax


def softmax_forward(x: Array, *, out: Array | None = None) -> Array:
    """Softmax: out = exp(x - max) / sum of exp(x - max), max and sum over the last axis.

    Where x is minus infinity out is 0, also in a row that is nothing else (a fully masked one), which therefore sums to 0. A
    NaN or plus infinity makes its whole row NaN.

    Args:
        x: [..., D], f16, bf16 or f32.
        out: [..., D], of the dtype of x; may be x.

    Returns:
        out: what was passed in, or a new array of the kind of x.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> print(kit.softmax_forward(np.array([[0, np.log(3), -np.inf]], np.float32)).round(4))
    [[0.25 0.75 0.  ]]
    """
    call = Call("softmax_forward")
    x_ = call.input("x", x, ("...", "D"), FLOATS)
    out_ = call.output("out", out, ("...", "D"), x_.dtype, shares=("x",))

    def record(rec: Recorder) -> None:
        rows, width = call.sizes.rows, call.sizes["D"]
        softmax.forward(rec, out_.buffer, x_.buffer, rows=rows, width=width, dtype=x_.dtype)

    if x_.count:
        call.run(record)
    return out_.result


def softmax_backward(out: Array, dout: Array, *, dx: Array | None = None) -> Array:
    """The gradient of `softmax_forward`: dx = out * (dout - sum of out * dout), the sum over the last axis.

    Args:
        out: [..., D], f16, bf16 or f32: the result of the forward pass.
        dout: [..., D], of the dtype of out: its gradient.
        dx: [..., D], of the dtype of out; may be dout or out.

    Returns:
        dx: what was passed in, or a new array of the kind of out.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> print(kit.softmax_backward(np.array([[0.25, 0.75]], np.float32), np.array([[1, 0]], np.float32)))
    [[ 0.1875 -0.1875]]
    """
    call = Call("softmax_backward")
    out_ = call.input("out", out, ("...", "D"), FLOATS)
    dout_ = call.input("dout", dout, ("...", "D"), out_.dtype)
    dx_ = call.output("dx", dx, ("...", "D"), out_.dtype, shares=("out", "dout"))

    def record(rec: Recorder) -> None:
        sizes = {"rows": call.sizes.rows, "width": call.sizes["D"]}
        softmax.backward(rec, dx_.buffer, out_.buffer, dout_.buffer, **sizes, dtype=out_.dtype)

    if out_.count:
        call.run(record)
    return dx_.result
