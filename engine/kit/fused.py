"""A norm and the product behind it in one kernel, for the few rows of a decode step: the normalised row is never written.

Each block computes the statistics of its rows and then multiplies; for many rows that would be done too often, so the
kernels take at most 4. Nothing is kept for a backward pass: for training use the norm and `gemm`.
"""

from __future__ import annotations

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS, number
from ptxtrain.engine.kit.core import Call
from ptxtrain.engine.ops import norm_gemv
from ptxtrain.ptx.gemv_spec import MOST_ROWS


def fused_rmsnorm_gemv(
    x: Array,
    gamma: Array,
    weight: Array,
    *,
    layout: str = "kn",
    eps: float = 1e-5,
    out: Array | None = None,
) -> Array:
    """out = rmsnorm(x) @ weight for up to 4 rows: x * rstd * gamma, rounded to the dtype as `rmsnorm_forward` does, sums in f32.

    Args:
        x: [M, K], f16, bf16 or f32; M at most 4.
        gamma: [K], of the dtype of x.
        weight: [K, N], of the dtype of x; [N, K] for "nk", as a tied embedding has it.
        layout: "kn" or "nk".
        eps: at least 0.
        out: [M, N], of the dtype of x.

    Returns:
        out: what was passed in, or a new array of the kind of x.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit, or more than 4 rows.

    >>> x, weight = np.array([[3, 4]], np.float32), np.array([[1, 0, 1], [0, 1, 1]], np.float32)
    >>> print(kit.fused_rmsnorm_gemv(x, np.ones(2, np.float32), weight, eps=0).round(4))
    [[0.8485 1.1314 1.9799]]
    """
    return _run("fused_rmsnorm_gemv", "rms", x, gamma, None, weight, layout, eps, out)


def fused_layernorm_gemv(
    x: Array,
    gamma: Array,
    beta: Array,
    weight: Array,
    *,
    layout: str = "kn",
    eps: float = 1e-5,
    out: Array | None = None,
) -> Array:
    """out = layernorm(x) @ weight for up to 4 rows: (x - mean) * rstd * gamma + beta, rounded to the dtype, sums in f32.

    Args:
        x: [M, K], f16, bf16 or f32; M at most 4.
        gamma: [K], of the dtype of x.
        beta: [K], of the dtype of x.
        weight: [K, N], of the dtype of x; [N, K] for "nk".
        layout: "kn" or "nk".
        eps: at least 0.
        out: [M, N], of the dtype of x.

    Returns:
        out: what was passed in, or a new array of the kind of x.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit, or more than 4 rows.

    >>> x, weight = np.array([[1, 3]], np.float32), np.array([[1, 0, 1], [0, 1, 1]], np.float32)
    >>> print(kit.fused_layernorm_gemv(x, np.ones(2, np.float32), np.ones(2, np.float32), weight, eps=0).round(4))
    [[0. 2. 2.]]
    """
    return _run("fused_layernorm_gemv", "layer", x, gamma, beta, weight, layout, eps, out)


def _run(
    op: str,
    norm: str,
    x: Array,
    gamma: Array,
    beta: Array | None,
    weight: Array,
    layout: str,
    eps: float,
    out: Array | None,
) -> Array:
    call = Call(op)
    x_ = call.input("x", x, ("M", "K"), FLOATS)
    gamma_ = call.input("gamma", gamma, ("K",), x_.dtype)
    beta_ = None if norm == "rms" else call.input("beta", beta, ("K",), x_.dtype)
    call.require(layout in ("kn", "nk"), "layout", '"kn" or "nk"', f"{layout!r}")
    weight_ = call.input("weight", weight, ("K", "N") if layout == "kn" else ("N", "K"), x_.dtype)
    eps = number(op, "eps", eps, low=0)
    out_ = call.output("out", out, ("M", "N"), x_.dtype)
    rows, width, columns = (call.sizes[letter] for letter in ("M", "K", "N"))
    remedy = f"at most {MOST_ROWS} rows (for more, the norm and gemm)"
    call.require(rows <= MOST_ROWS, "x", remedy, f"{rows}")
    call.require(width > 0, "x", "at least one column", f"{width}")

    def record(rec: Recorder) -> None:
        beta_buffer = beta_.buffer if beta_ else None
        norm_gemv.run(
            rec, out_.buffer, x_.buffer, gamma_.buffer, beta_buffer, weight_.buffer, rows=rows, width=width,
            columns=columns, layout=layout, eps=eps, norm=norm, dtype=x_.dtype, out_dtype=x_.dtype,
        )  # fmt: skip

    if rows and columns:
        call.run(record)
    return out_.result
