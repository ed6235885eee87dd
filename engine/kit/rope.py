"""Rotary position embedding in Llama's half-rotation form: pairs (k, k + D/2) of a head turn by their position's angle."""

from __future__ import annotations

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit import arrays
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS, fail, number
from ptxtrain.engine.kit.core import Call
from ptxtrain.engine.ops import rope


def rope_tables(
    seq: int,
    head_dim: int,
    *,
    base: float = 10_000.0,
    scaling: float = 1.0,
    start: int = 0,
    like: Array | None = None,
) -> tuple[Array, Array]:
    """The tables of `rope_forward`: cos and sin of position * scaling * base^(-2k / head_dim).

    Computed in float64 and rounded once, so a position of a million costs no digits. Rows are the positions start to
    start + seq - 1: for a sequence that goes on, as in decoding, pass where it does. A scaling below 1 stretches the
    positions that a model was trained on over a longer context (llama.cpp's `rope_freq_scale`; the inverse of the factor of
    linear scaling elsewhere). Turning bf16, f16 and f32 arrays takes the same tables.

    Args:
        seq: S, how many positions.
        head_dim: D, even.
        base: 10,000 in Llama 2, 500,000 in Llama 3.
        scaling: what positions are multiplied by.
        start: the first position.
        like: an array whose kind and place the tables shall have; without it they are NumPy's.

    Returns:
        cos, sin: [S, D/2], f32.

    Raises:
        ContractError: a number outside its range. The array `like` may be f16, bf16 or f32, or anything else.

    >>> cos, sin = kit.rope_tables(3, 4)
    >>> print(cos.round(4), sin.round(4))
    [[ 1.      1.    ]
     [ 0.5403  1.    ]
     [-0.4161  0.9998]] [[0.     0.    ]
     [0.8415 0.01  ]
     [0.9093 0.02  ]]
    """
    op = "rope_tables"
    for name, value, low in (("seq", seq, 1), ("head_dim", head_dim, 2), ("start", start, 0)):
        if not isinstance(value, int) or value < low:
            fail(op, name, f"an integer of at least {low}", repr(value))
    if head_dim % 2:
        fail(op, "head_dim", "an even number", str(head_dim))
    base, scaling = number(op, "base", base, low=0, open_low=True), number(op, "scaling", scaling)
    cos, sin = rope.tables(seq, head_dim, base, scaling, start)
    if like is None:
        return cos, sin
    view = Call(op).look("like", like)
    return arrays.copied(view, cos), arrays.copied(view, sin)


def rope_forward(x: Array, cos: Array, sin: Array) -> Array:
    """Turn queries or keys by their positions, in place.

    x0' = x0 * cos - x1 * sin and x1' = x1 * cos + x0 * sin for the pair (x0, x1) = (x[..., k], x[..., k + D/2]).

    Args:
        x: [..., S, D], such as [B, H, S, D], f16, bf16 or f32, D even; changed in place.
        cos: [S, D/2], f32, from `rope_tables`, as is sin.
        sin: [S, D/2], f32.

    Returns:
        x.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> x = np.array([[1, 0, 0, 0], [1, 0, 0, 0]], np.float32).reshape(1, 1, 2, 4)
    >>> print(kit.rope_forward(x, *kit.rope_tables(2, 4))[0, 0].round(4))
    [[1.     0.     0.     0.    ]
     [0.5403 0.     0.8415 0.    ]]
    """
    return _turn("rope_forward", x, cos, sin, inverse=False)


def rope_backward(dx: Array, cos: Array, sin: Array) -> Array:
    """The gradient of `rope_forward`, in place: the same turn the other way round.

    dx0 = dy0 * cos + dy1 * sin and dx1 = dy1 * cos - dy0 * sin, where dx holds dy at first.

    Args:
        dx: [..., S, D], such as [B, H, S, D], f16, bf16 or f32, D even: the gradient of the turned array; changed in place.
        cos: [S, D/2], f32, from `rope_tables`, as is sin.
        sin: [S, D/2], f32.

    Returns:
        dx.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> x, tables = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4), kit.rope_tables(2, 4)
    >>> print(kit.rope_backward(kit.rope_forward(x.copy(), *tables), *tables).round(4).tolist() == x.tolist())
    True
    """
    return _turn("rope_backward", dx, cos, sin, inverse=True)


def _turn(op: str, x: Array, cos: Array, sin: Array, *, inverse: bool) -> Array:
    call = Call(op)
    x_ = call.state("dx" if inverse else "x", x, ("...", "S", "D"), FLOATS)
    context, head_dim = call.sizes["S"], call.sizes["D"]
    call.require(head_dim > 0 and head_dim % 2 == 0, x_.name, "D to be even", head_dim)
    cos_ = call.input("cos", cos, ("S", head_dim // 2), "f32")
    sin_ = call.input("sin", sin, ("S", head_dim // 2), "f32")

    def record(rec: Recorder) -> None:
        rows = call.sizes.rows * context
        buffers = (x_.buffer, cos_.buffer, sin_.buffer)
        rope.turn(rec, *buffers, rows=rows, context=context, head_dim=head_dim, dtype=x_.dtype, inverse=inverse)

    if x_.count:
        call.run(record)
    return x_.result
