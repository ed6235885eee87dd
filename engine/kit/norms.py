"""RMSNorm and LayerNorm over the last axis of an array, with what their backward passes need.

All arrays of numbers have one dtype, f16, bf16 or f32; statistics and the gradients of the weights are f32. Everything
between load and store is f32. The gradients of the weights are summed in a fixed order: in parts of 32 rows, then the
parts in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS, number
from ptxtrain.engine.kit.core import Argument, Call
from ptxtrain.engine.ops import layernorm, rmsnorm


def rmsnorm_forward(
    x: Array,
    gamma: Array,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    rstd: Array | None = None,
) -> tuple[Array, Array]:
    """RMSNorm (Zhang and Sennrich 2019): out = x * rstd * gamma, rstd = 1 / sqrt(mean(x^2) + eps) of each row.

    Args:
        x: [..., D], f16, bf16 or f32.
        gamma: [D], of the dtype of x.
        eps: at least 0; with 0 a row of zeros is NaN.
        out: [..., D], of the dtype of x; may be x.
        rstd: [...], f32.

    Returns:
        out, rstd: what was passed in, or new arrays of the kind of x.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> out, rstd = kit.rmsnorm_forward(np.array([[3, 4]], np.float32), np.ones(2, np.float32), eps=0)
    >>> print(out.round(4), rstd.round(4))
    [[0.8485 1.1314]] [0.2828]
    """
    call = Call("rmsnorm_forward")
    x_ = call.input("x", x, ("...", "D"), FLOATS)
    gamma_ = call.input("gamma", gamma, ("D",), x_.dtype)
    eps = number(call.op, "eps", eps, low=0)
    out_ = call.output("out", out, ("...", "D"), x_.dtype, shares=("x",))
    rstd_ = call.output("rstd", rstd, ("...",), "f32")
    _has_columns(call)

    def record(rec: Recorder) -> None:
        rows, width = call.sizes.rows, call.sizes["D"]
        buffers = (out_.buffer, rstd_.buffer, x_.buffer, gamma_.buffer)
        rmsnorm.forward(rec, *buffers, rows=rows, width=width, eps=eps, dtype=x_.dtype, uniform=True)

    if call.sizes.rows:
        call.run(record)
    return out_.result, rstd_.result


def rmsnorm_backward(
    x: Array,
    gamma: Array,
    dout: Array,
    rstd: Array,
    *,
    accumulate: bool = False,
    dx: Array | None = None,
    dgamma: Array | None = None,
) -> tuple[Array, Array]:
    """The gradients of `rmsnorm_forward`.

    With xhat = x * rstd and g = dout * gamma, the mean over a row's columns, the sum over all rows:
    dx = rstd * (g - xhat * mean(g * xhat)), dgamma = sum(dout * xhat).

    Args:
        x: [..., D], f16, bf16 or f32, as it was given to the forward pass.
        gamma: [D], of the dtype of x.
        dout: [..., D], of the dtype of x: the gradient of out.
        rstd: [...], f32, from the forward pass.
        accumulate: add to what dgamma holds; it must then be passed in.
        dx: [..., D], of the dtype of x.
        dgamma: [D], f32.

    Returns:
        dx, dgamma: what was passed in, or new arrays of the kind of x.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> x, gamma, dout = np.array([[3, 4]], np.float32), np.ones(2, np.float32), np.array([[1, 0]], np.float32)
    >>> _, rstd = kit.rmsnorm_forward(x, gamma, eps=0)
    >>> dx, dgamma = kit.rmsnorm_backward(x, gamma, dout, rstd)
    >>> print(dx.round(4), dgamma.round(4))
    [[ 0.181  -0.1358]] [0.8485 0.    ]
    """
    call = Call("rmsnorm_backward")
    x_ = call.input("x", x, ("...", "D"), FLOATS)
    gamma_ = call.input("gamma", gamma, ("D",), x_.dtype)
    dout_ = call.input("dout", dout, ("...", "D"), x_.dtype)
    rstd_ = call.input("rstd", rstd, ("...",), "f32")
    dx_ = call.output("dx", dx, ("...", "D"), x_.dtype)
    dgamma_ = _sum_of(call, "dgamma", dgamma, accumulate)
    _has_columns(call)
    rows, width = call.sizes.rows, call.sizes["D"]

    def record(rec: Recorder) -> None:
        parts = rmsnorm.parts(rows, rows)
        partial = call.scratch(4 * parts * width)
        buffers = (dx_.buffer, partial, dout_.buffer, x_.buffer, gamma_.buffer, rstd_.buffer)
        kind: dict[str, Any] = {"dtype": x_.dtype, "accumulate": False, "uniform": True}
        rmsnorm.backward(rec, *buffers, rows=rows, width=width, context=rows, **kind)
        rmsnorm.weight_gradient(rec, dgamma_.buffer, partial, parts=parts, width=width, fresh=not accumulate)

    _run_or_clear(call, record, (dgamma_,), accumulate)
    return dx_.result, dgamma_.result


def layernorm_forward(
    x: Array,
    gamma: Array,
    beta: Array,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    mean: Array | None = None,
    rstd: Array | None = None,
) -> tuple[Array, Array, Array]:
    """LayerNorm (Ba, Kiros and Hinton 2016): out = (x - mean) * rstd * gamma + beta.

    mean and rstd = 1 / sqrt(variance + eps) are of each row; the variance is that of the row, summed from the distances to
    the mean in a second pass, so that a large mean costs no digits.

    Args:
        x: [..., D], f16, bf16 or f32.
        gamma: [D], of the dtype of x.
        beta: [D], of the dtype of x.
        eps: at least 0; with 0 a row of equal numbers is NaN.
        out: [..., D], of the dtype of x; may be x.
        mean: [...], f32.
        rstd: [...], f32.

    Returns:
        out, mean, rstd: what was passed in, or new arrays of the kind of x.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> x = np.array([[1, 2, 3, 6]], np.float32)
    >>> out, mean, rstd = kit.layernorm_forward(x, np.ones(4, np.float32), np.zeros(4, np.float32), eps=0)
    >>> print(out.round(3), mean, rstd.round(4))
    [[-1.069 -0.535  0.     1.604]] [3.] [0.5345]
    """
    call = Call("layernorm_forward")
    x_ = call.input("x", x, ("...", "D"), FLOATS)
    gamma_ = call.input("gamma", gamma, ("D",), x_.dtype)
    beta_ = call.input("beta", beta, ("D",), x_.dtype)
    eps = number(call.op, "eps", eps, low=0)
    out_ = call.output("out", out, ("...", "D"), x_.dtype, shares=("x",))
    mean_ = call.output("mean", mean, ("...",), "f32")
    rstd_ = call.output("rstd", rstd, ("...",), "f32")
    _has_columns(call)

    def record(rec: Recorder) -> None:
        buffers = (out_.buffer, mean_.buffer, rstd_.buffer, x_.buffer, gamma_.buffer, beta_.buffer)
        layernorm.forward(rec, *buffers, rows=call.sizes.rows, width=call.sizes["D"], eps=eps, dtype=x_.dtype)

    if call.sizes.rows:
        call.run(record)
    return out_.result, mean_.result, rstd_.result


def layernorm_backward(
    x: Array,
    gamma: Array,
    dout: Array,
    mean: Array,
    rstd: Array,
    *,
    accumulate: bool = False,
    dx: Array | None = None,
    dgamma: Array | None = None,
    dbeta: Array | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of `layernorm_forward`.

    With xhat = (x - mean) * rstd and g = dout * gamma, means and sums over a row's columns or over all rows:
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), dgamma = sum(dout * xhat), dbeta = sum(dout).

    Args:
        x: [..., D], f16, bf16 or f32, as it was given to the forward pass.
        gamma: [D], of the dtype of x.
        dout: [..., D], of the dtype of x: the gradient of out.
        mean: [...], f32, from the forward pass.
        rstd: [...], f32, as well.
        accumulate: add to what dgamma and dbeta hold; both must then be passed in.
        dx: [..., D], of the dtype of x.
        dgamma: [D], f32.
        dbeta: [D], f32.

    Returns:
        dx, dgamma, dbeta: what was passed in, or new arrays of the kind of x.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> x, dout = np.array([[1, 2, 3, 6]], np.float32), np.array([[1, 0, 0, 0]], np.float32)
    >>> gamma = np.ones(4, np.float32)
    >>> _, mean, rstd = kit.layernorm_forward(x, gamma, np.zeros(4, np.float32), eps=0)
    >>> dx, dgamma, dbeta = kit.layernorm_backward(x, gamma, dout, mean, rstd)
    >>> print(dx.round(3), dgamma.round(3), dbeta)
    [[ 0.248 -0.21  -0.134  0.095]] [-1.069  0.     0.     0.   ] [1. 0. 0. 0.]
    """
    call = Call("layernorm_backward")
    x_ = call.input("x", x, ("...", "D"), FLOATS)
    gamma_ = call.input("gamma", gamma, ("D",), x_.dtype)
    dout_ = call.input("dout", dout, ("...", "D"), x_.dtype)
    mean_ = call.input("mean", mean, ("...",), "f32")
    rstd_ = call.input("rstd", rstd, ("...",), "f32")
    dx_ = call.output("dx", dx, ("...", "D"), x_.dtype)
    dgamma_ = _sum_of(call, "dgamma", dgamma, accumulate)
    dbeta_ = _sum_of(call, "dbeta", dbeta, accumulate)
    _has_columns(call)
    rows, width = call.sizes.rows, call.sizes["D"]

    def record(rec: Recorder) -> None:
        parts = layernorm.parts(rows)
        partial_w, partial_b = (call.scratch(4 * parts * width) for _ in range(2))
        buffers = (dx_.buffer, partial_w, partial_b, dout_.buffer, x_.buffer, gamma_.buffer, mean_.buffer, rstd_.buffer)
        layernorm.backward(rec, *buffers, rows=rows, width=width, dtype=x_.dtype)
        for out, partial in ((dgamma_, partial_w), (dbeta_, partial_b)):
            layernorm.weight_gradient(rec, out.buffer, partial, parts=parts, width=width, accumulate=accumulate)

    _run_or_clear(call, record, (dgamma_, dbeta_), accumulate)
    return dx_.result, dgamma_.result, dbeta_.result


def _has_columns(call: Call) -> None:
    call.require(call.sizes["D"] > 0, "x", "at least one column", f"{call.sizes['D']}")


def _sum_of(call: Call, name: str, array: Array | None, accumulate: bool) -> Argument:
    """The gradient of a weight: [D] f32, added to what it holds or not."""
    if not accumulate:
        return call.output(name, array, ("D",), "f32")
    call.require(array is not None, name, "an array to add to, with accumulate", "none")
    return call.state(name, array, ("D",), "f32")


def _run_or_clear(call: Call, record: Callable[[Recorder], None], sums: Sequence[Argument], accumulate: bool) -> None:
    """Run a backward pass. Without rows there is nothing to launch, and sums over rows are 0."""
    if call.sizes.rows:
        call.run(record)
    elif not accumulate:

        def clear(rec: Recorder) -> None:
            for argument in sums:
                rec.device.fill(argument.buffer, 0)

        call.run(clear)
