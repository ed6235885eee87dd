"""Scaled dot-product attention of q, k and v, each [B, heads, S, D], with grouped key/value heads.

f16 and bf16 go to the flash kernels where D is 32, 64 or 128 and arrays are aligned to 16 bytes: scores stay on the chip.
Everything else, f32 above all, goes through score matrices in scratch, some key/value heads at a time.
"""

from __future__ import annotations

from typing import Any

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS
from ptxtrain.engine.kit.core import Argument, Call
from ptxtrain.engine.ops import dense_attention, flash_attention
from ptxtrain.engine.ops.checks import ITEM_SIZES

SCRATCH = 256 << 20  # bytes of score matrices that are alive at once, where one key/value head's do not need more


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Array, Array]:
    """Attention: out = softmax(q k^T / sqrt(D)) v, and lse = log(sum(exp(scores))) of each row for the backward pass.

    Query head h takes key/value head h // (H / G). Scores, maxima and sums are f32; scores of -inf count nothing, and a row of
    nothing else has out 0 and lse -inf. The flash kernels round probabilities to the dtype before they meet v, as in
    FlashAttention-2 (Dao 2023).

    Args:
        q: [B, H, S, D], f16, bf16 or f32.
        k: [B, G, S, D], of the dtype of q; G divides H.
        v: [B, G, S, D], as well.
        causal: whether a query sees only the keys up to its own.
        out: [B, H, S, D], of the dtype of q.
        lse: [B, H, S], f32, natural logarithm.

    Returns:
        out, lse: what was passed in, or new arrays of the kind of q.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> q = np.zeros((1, 1, 3, 2), np.float32)
    >>> v = np.array([[[[1, 0], [3, 0], [5, 3]]]], np.float32)
    >>> out, lse = kit.attention_forward(q, q, v)
    >>> print(out[0, 0], lse.round(4))
    [[1. 0.]
     [2. 0.]
     [3. 1.]] [[[0.     0.6931 1.0986]]]
    """
    call = Call("attention_forward")
    q_, k_, v_ = _inputs(call, q, k, v)
    out_ = call.output("out", out, ("B", "H", "S", "D"), q_.dtype)
    lse_ = call.output("lse", lse, ("B", "H", "S"), "f32")

    def record(rec: Recorder) -> None:
        buffers = (out_.buffer, q_.buffer, k_.buffer, v_.buffer)
        if flash_attention.obstacle(q_.dtype, call.sizes["D"], *buffers) is None:
            flash_attention.forward_apart(
                rec, out_.buffer, lse_.buffer, *buffers[1:], **_sizes(call), dtype=q_.dtype, causal=bool(causal)
            )
            return
        for part, scores in _parts(call, (out_, lse_, q_, k_, v_), backward=False):
            given = (*part.buffers, scores[0])
            dense_attention.forward(rec, *given, **part.sizes, dtype=q_.dtype, causal=bool(causal))

    if q_.count:
        call.run(record)
    return out_.result, lse_.result


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    *,
    causal: bool = True,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of `attention_forward`.

    With P = exp(scores - lse), delta = rowsum(dout * out), dS = P * (dout v^T - delta) / sqrt(D): dq = dS k, dk = dS^T q,
    dv = P^T dout; keys and values sum over the query heads of their group, in order. Scores are computed again. P is at most 1,
    and 0 where lse is -inf; scores of which an f32 lse cannot tell the last digits (beyond 10^5, where several are nearly the
    largest) have P only so closely.

    Args:
        q: [B, H, S, D], f16, bf16 or f32, as it was given to the forward pass.
        k: [B, G, S, D], as well.
        v: [B, G, S, D], as well.
        out: [B, H, S, D], of the dtype of q, from the forward pass.
        dout: [B, H, S, D], of the dtype of q: the gradient of out.
        lse: [B, H, S], f32, from the forward pass.
        causal: as in the forward pass.
        dq: [B, H, S, D], of the dtype of q.
        dk: [B, G, S, D], as well.
        dv: [B, G, S, D], as well.

    Returns:
        dq, dk, dv: what was passed in, or new arrays of the kind of q.

    Raises:
        ContractError: a shape, dtype, layout or place that does not fit.

    >>> q = np.zeros((1, 1, 2, 2), np.float32)
    >>> v, dout = np.array([[[[1, 0], [3, 0]]]], np.float32), np.array([[[[1, 0], [1, 0]]]], np.float32)
    >>> out, lse = kit.attention_forward(q, q, v)
    >>> dq, dk, dv = kit.attention_backward(q, q, v, out, dout, lse)
    >>> print(dv[0, 0].round(4))
    [[1.5 0. ]
     [0.5 0. ]]
    """
    call = Call("attention_backward")
    q_, k_, v_ = _inputs(call, q, k, v)
    out_ = call.input("out", out, ("B", "H", "S", "D"), q_.dtype)
    dout_ = call.input("dout", dout, ("B", "H", "S", "D"), q_.dtype)
    lse_ = call.input("lse", lse, ("B", "H", "S"), "f32")
    dq_ = call.output("dq", dq, ("B", "H", "S", "D"), q_.dtype)
    dk_ = call.output("dk", dk, ("B", "G", "S", "D"), q_.dtype)
    dv_ = call.output("dv", dv, ("B", "G", "S", "D"), q_.dtype)

    def record(rec: Recorder) -> None:
        gradients = (dq_.buffer, dk_.buffer, dv_.buffer)
        rows, inputs = (dout_.buffer, out_.buffer), (q_.buffer, k_.buffer, v_.buffer)
        if flash_attention.obstacle(q_.dtype, call.sizes["D"], *gradients, *rows, *inputs) is None:
            delta = call.scratch(4 * lse_.count)
            flash_attention.backward_apart(
                rec, *gradients, *rows, lse_.buffer, *inputs, delta, **_sizes(call), dtype=q_.dtype, causal=bool(causal)
            )
            return
        arguments = (dq_, dk_, dv_, lse_, dout_, out_, q_, k_, v_)
        for part, scores in _parts(call, arguments, backward=True):
            given = (*part.buffers[:3], *scores, *part.buffers[3:])
            dense_attention.backward(rec, *given, **part.sizes, dtype=q_.dtype, causal=bool(causal))

    if q_.count:
        call.run(record)
    return dq_.result, dk_.result, dv_.result


def _inputs(call: Call, q: Array, k: Array, v: Array) -> tuple[Argument, Argument, Argument]:
    q_ = call.input("q", q, ("B", "H", "S", "D"), FLOATS)
    k_ = call.input("k", k, ("B", "G", "S", "D"), q_.dtype)
    v_ = call.input("v", v, ("B", "G", "S", "D"), q_.dtype)
    heads, kv_heads = call.sizes["H"], call.sizes["G"]
    even = kv_heads > 0 and heads % kv_heads == 0
    call.require(even, "k", f"a number of heads that divides the {heads} of q", f"{kv_heads}")
    call.require(call.sizes["D"] > 0, "q", "at least one channel", f"{call.sizes['D']}")
    return q_, k_, v_


def _sizes(call: Call) -> dict[str, Any]:
    names = {"batch": "B", "context": "S", "heads": "H", "kv_heads": "G", "head_dim": "D"}
    return {name: call.sizes[letter] for name, letter in names.items()}


class _Part:
    """Some key/value heads with their query heads: heads lie one after the other, so they are a batch of their own."""

    def __init__(self, call: Call, arguments: tuple[Argument, ...], first: int, count: int) -> None:
        all_heads, group = call.sizes["B"] * call.sizes["G"], call.sizes["H"] // call.sizes["G"]
        each = [(a, a.count // all_heads * ITEM_SIZES[a.dtype]) for a in arguments]
        self.buffers = tuple(a.buffer.view(first * size, count * size) for a, size in each)
        self.sizes: dict[str, Any] = {**_sizes(call), "batch": count, "heads": group, "kv_heads": 1}


def _parts(call: Call, arguments: tuple[Argument, ...], *, backward: bool) -> Any:
    """Parts that go through the same scratch one after the other, and it: one score matrix to each query head, or two."""
    all_heads, group = call.sizes["B"] * call.sizes["G"], call.sizes["H"] // call.sizes["G"]
    one = 4 * group * call.sizes["S"] ** 2
    matrices = 2 if backward else 1
    together = min(all_heads, max(1, min(SCRATCH // (one * matrices), 65_535 // group)))  # a grid's third axis
    scores = [call.scratch(together * one) for _ in range(matrices)]
    for first in range(0, all_heads, together):
        yield _Part(call, arguments, first, min(together, all_heads - first)), scores
