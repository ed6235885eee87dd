"""The kit's matrix product, with what stands around it in a model: a scale, a bias, the sum so far."""

from __future__ import annotations

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS, Axes, number, one_of
from ptxtrain.engine.kit.core import Call
from ptxtrain.engine.ops import gemm as ops

# Axes of a, b and out. The rows of activations may have any leading axes, in place of M or of K.
_AXES: dict[str, tuple[Axes, Axes, Axes]] = {
    "nn": (("...", "K"), ("K", "N"), ("...", "N")),
    "nt": (("...", "K"), ("N", "K"), ("...", "N")),
    "tn": (("...", "M"), ("...", "N"), ("M", "N")),
    "tt": (("K", "M"), ("N", "K"), ("M", "N")),
}


def gemm(
    a: Array,
    b: Array,
    *,
    layout: str = "nn",
    alpha: float = 1.0,
    beta: int = 0,
    bias: Array | None = None,
    out_dtype: str | None = None,
    out: Array | None = None,
) -> Array:
    """out = alpha * (op(a) @ op(b)) + bias + beta * out, the sums in f32, rounded once to the dtype of out.

    The letters of the layout say which operand is stored transposed. "nn" and "nt" are a layer's product with its weight,
    "nt" and "nn" the gradient of its input, "tn" that of its weight, with beta 1 added to what is there; beta 1 with "nn" is
    the residual add.

    f16 and bf16 go to the tensor cores where rows are multiples of 8 numbers and arrays aligned to 16 bytes, all else, f32 above
    all, to f32 multiply-adds. Both add each output in ascending k, whatever the tile.

    Args:
        a: [..., K], f16, bf16 or f32; [..., M] for "tn", [K, M] for "tt".
        b: [K, N], of the dtype of a; [N, K] for "nt" and "tt", [..., N] with the leading axes of a for "tn".
        layout: "nn", "nt", "tn" or "tt".
        alpha: a factor of the product.
        beta: 0, or 1 to add to what out holds; it must then be passed in.
        bias: [N], f16, bf16 or f32; added to every row.
        out_dtype: of a new out, "f16", "bf16" or "f32"; None for that of a.
        out: [..., N], [M, N] for "tn" and "tt"; f16, bf16 or f32.

    Returns:
        out: what was passed in, or a new array of the kind of a.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> a, b = np.array([[1, 2], [3, 4]], np.float32), np.array([[1, 0], [1, 1]], np.float32)
    >>> print(kit.gemm(a, b, bias=np.array([0.5, 0], np.float32)))
    [[3.5 2. ]
     [7.5 4. ]]
    >>> out = np.ones((2, 2), np.float32)
    >>> print(kit.gemm(a, b, layout="tn", alpha=2, beta=1, out=out))
    [[ 9.  7.]
     [13.  9.]]
    """
    call = Call("gemm")
    if layout not in _AXES:
        call.require(False, "layout", one_of([f'"{name}"' for name in _AXES]), f"{layout!r}")
    axes = _AXES[layout]
    a_ = call.input("a", a, axes[0], FLOATS)
    b_ = call.input("b", b, axes[1], a_.dtype)
    alpha = number(call.op, "alpha", alpha)
    call.require(beta in (0, 1), "beta", "0 or 1", f"{beta!r}")
    bias_ = None if bias is None else call.input("bias", bias, ("N",), FLOATS)
    if beta:
        call.require(out is not None, "out", "an array to add to, with beta 1", "none")
        out_ = call.state("out", out, axes[2], FLOATS)
    else:
        wanted = a_.dtype if out_dtype is None else out_dtype
        call.require(wanted in FLOATS, "out_dtype", one_of(FLOATS), f"{out_dtype!r}")
        out_ = call.output("out", out, axes[2], wanted if out is None else FLOATS)
    given = out_dtype in (None, out_.dtype)
    call.require(given, "out", f"dtype {out_dtype}, as out_dtype says", out_.dtype)
    rows, n = call.sizes.rows, call.sizes["N"]
    m = call.sizes["M"] if layout[0] == "t" else rows
    k = rows if layout == "tn" else call.sizes["K"]
    call.require(k > 0, "a", "at least one number to each sum", f"shape {a_.shape}")

    def record(rec: Recorder) -> None:
        ops.run(
            rec, out_.buffer, a_.buffer, b_.buffer, out_.buffer if beta else None, bias_.buffer if bias_ else None,
            m=m, n=n, k=k, layout=layout, dtype=a_.dtype, out_dtype=out_.dtype, alpha=alpha,
            bias_dtype=bias_.dtype if bias_ else "f32",
        )  # fmt: skip

    if m and n:
        call.run(record)
    return out_.result
