"""Attention of the kit against float64 NumPy, PyTorch and finite differences: dtypes, head dimensions, masks, edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from kitbench import FLOATS, HALF, Float, Place, normal, slope, twice

from ptxtrain.engine import kit

# B, H, G, S, D: flash and dense, groups, odd lengths
SHAPES = [(2, 4, 2, 37, 32), (1, 3, 1, 19, 6), (1, 2, 2, 1, 5)]


def attention(q: Float, k: Float, v: Float, dout: Float, causal: bool) -> tuple[Float, ...]:
    """out, lse, dq, dk, dv in float64."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    (b, g, s, d), group = k.shape, q.shape[1] // k.shape[1]
    wide_k, wide_v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ wide_k.swapaxes(-1, -2) / math.sqrt(d)
    if causal:
        scores = np.where(np.tri(s, dtype=bool), scores, -np.inf)
    lse = scores.max(-1) + np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1))
    p = np.exp(scores - lse[..., None])
    out = p @ wide_v
    ds = p * (dout @ wide_v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True)) / math.sqrt(d)
    dk, dv = (x.reshape(b, g, group, s, d).sum(2) for x in (ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout))
    return out, lse, ds @ wide_k, dk, dv


def inputs(b: int, h: int, g: int, s: int, d: int, dtype: str) -> list[Float]:
    """q, k, v, dout."""
    return [normal(i, b, heads, s, d, dtype=dtype) for i, heads in enumerate((h, g, g, h))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(place: Place, shape: tuple[int, ...], dtype: str, causal: bool) -> None:
    """Both directions, within 4 roundings of the dtype (f32: 16) by the size of each result's largest number."""
    given = inputs(*shape, dtype)
    q, k, v, dout = (place.put(x, dtype) for x in given)
    b, h, g, s, d = shape
    queries, keys = (b, h, s, d), (b, g, s, d)
    out, lse = place.empty(queries, dtype), place.empty((b, h, s))
    found = twice(place, lambda: kit.attention_forward(q, k, v, causal=causal, out=out, lse=lse))
    gradients = {"dq": place.empty(queries, dtype), "dk": place.empty(keys, dtype), "dv": place.empty(keys, dtype)}
    found += twice(place, lambda: kit.attention_backward(q, k, v, out, dout, lse, causal=causal, **gradients))
    names = ("out", "lse", *gradients)
    for name, x, exact in zip(names, found, attention(*given, causal), strict=True):
        unit = 16 * 2.0**-22 if dtype == "f32" or name == "lse" else 4 * HALF[dtype]
        error = np.abs(x - exact).max()
        assert error <= unit * max(np.abs(exact).max(), 0.01), (name, error)


def test_the_gradients_are_slopes(place: Place) -> None:
    given = inputs(1, 2, 1, 4, 3, "f32")
    dout = given.pop()
    q, k, v = (place.put(x) for x in given)
    out, lse = kit.attention_forward(q, k, v)
    found = kit.attention_backward(q, k, v, out, place.put(dout), lse)
    for i, gradient in enumerate(found):

        def loss(x: Float, i: int = i) -> float:
            moved = [place.put(x if j == i else given[j]) for j in range(3)]
            return float((place.get(kit.attention_forward(*moved)[0]).astype(np.float64) * dout).sum())

        np.testing.assert_allclose(place.get(gradient), slope(loss, given[i], 1e-2), atol=2e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_against_pytorch(causal: bool) -> None:
    """scaled_dot_product_attention and its autograd, on tensors that are not copied."""
    torch = pytest.importorskip("torch")
    q, k, v, dout = (torch.from_numpy(x) for x in inputs(2, 4, 2, 21, 16, "f32"))
    out, lse = kit.attention_forward(q, k, v, causal=causal)
    found = kit.attention_backward(q, k, v, out, dout, lse, causal=causal)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal)
    wanted.backward(dout)
    torch.testing.assert_close(out, wanted.detach(), rtol=1e-5, atol=1e-5)
    for gradient, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "width"), [("f32", 8), ("f16", 32), ("bf16", 32)])
def test_edges(place: Place, dtype: str, width: int) -> None:
    """Rows of -inf give 0, equal keys the mean, scores of 10^8 the value of the largest; nowhere NaN."""
    q, k, v, dout = inputs(1, 2, 1, 9, width, dtype)
    q[..., 0] = 1
    masked = k.copy()
    masked[0, 0, :2, 0] = -np.inf
    out, lse = (place.get(x) for x in kit.attention_forward(*(place.put(x, dtype) for x in (q, masked, v))))
    assert not out[0, :, :2].astype(np.float32).any() and (lse[0, :, :2] == -np.inf).all()
    assert np.isfinite(out.astype(np.float32)).all() and np.isfinite(lse[0, :, 2:]).all()

    equal = np.repeat(k[:, :, :1], 9, 2)
    out, _ = (place.get(x) for x in kit.attention_forward(*(place.put(x, dtype) for x in (q, equal, v)), causal=False))
    np.testing.assert_allclose(
        out[0, 0].astype(np.float32), np.repeat(v[0, 0].mean(0)[None], 9, 0), atol=4 * HALF[dtype] + 1e-6
    )

    large = [place.put(x, dtype) for x in (q * 8192, k * 8192, v)]
    out, lse = kit.attention_forward(*large)
    gradients = kit.attention_backward(*large, out, place.put(dout, dtype), lse)
    wanted = attention(*(place.get(x).astype(np.float64) for x in large), dout, True)[0]
    np.testing.assert_allclose(place.get(out).astype(np.float64), wanted, atol=4 * HALF[dtype] + 1e-6)
    assert all(np.isfinite(place.get(x).astype(np.float32)).all() for x in gradients)


@pytest.mark.parametrize(("dtype", "width"), [("f32", 8), ("f16", 32)])
def test_no_probability_is_above_one(place: Place, dtype: str, width: int) -> None:
    """With an lse that is far too low each P is 1, not e^1000: dv sums the rows of dout that see its key."""
    q, k, v, dout = (place.put(x, dtype) for x in inputs(1, 1, 1, 9, width, dtype))
    out, lse = kit.attention_forward(q, k, v)
    found = [place.get(x).astype(np.float64) for x in kit.attention_backward(q, k, v, out, dout, lse - 1000)]
    assert all(np.isfinite(x).all() for x in found)
    seen = place.get(dout).astype(np.float64)[:, :, ::-1].cumsum(2)[:, :, ::-1]
    np.testing.assert_allclose(found[2], seen, atol=8 * HALF[dtype] + 1e-5)


def test_scratch_does_not_show(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score matrices of one key/value head at a time give the bits of all at once."""
    q, k, v, dout = (place.put(x) for x in inputs(2, 4, 2, 11, 6, "f32"))

    def run() -> list[bytes]:
        out, lse = kit.attention_forward(q, k, v)
        results = (out, lse, *kit.attention_backward(q, k, v, out, dout, lse))
        return [place.get(x).tobytes() for x in results]

    whole = run()
    monkeypatch.setattr("ptxtrain.engine.kit.attention.SCRATCH", 1)
    assert run() == whole


def test_contract(place: Place) -> None:
    q, k = place.put(np.ones((1, 4, 3, 8))), place.put(np.ones((1, 3, 3, 8)))
    with pytest.raises(kit.ContractError, match="k: expected a number of heads that divides the 4 of q, got 3"):
        kit.attention_forward(q, k, k)
    with pytest.raises(
        kit.ContractError, match=r"v: expected shape \(B, G, S, D\) = \(1, 3, 3, 8\), got \(1, 4, 3, 8\)"
    ):
        kit.attention_forward(q, k, q)
    none: Any = place.put(np.ones((1, 4, 0, 8)))
    assert kit.attention_forward(none, none, none)[0].shape == (1, 4, 0, 8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [True, False])
def test_checked(checked_place: Place, dtype: str, causal: bool) -> None:
    q, k, v, dout = (checked_place.put(x, dtype) for x in inputs(1, 2, 1, 33, 32, dtype))
    out, lse = kit.attention_forward(q, k, v, causal=causal)
    kit.attention_backward(q, k, v, out, dout, lse, causal=causal)
