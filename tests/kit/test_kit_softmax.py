"""Softmax of the kit against float64 NumPy, finite differences, and the edges of its domain."""

from __future__ import annotations

import numpy as np
import pytest
from kitbench import FLOATS, Float, Place, check, normal, rounded, slope, twice

from ptxtrain.engine import kit

SHAPES = [(1, 1), (7, 33), (65, 97), (3, 300), (40, 128)]


def softmax(x: Float) -> Float:
    """The formula in the precision of x."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True, dtype=x.dtype)


def gradient(out: Float, dout: Float) -> Float:
    return out * (dout - (out * dout).sum(-1, keepdims=True, dtype=out.dtype))


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_forward(place: Place, rows: int, width: int, dtype: str, scale: float) -> None:
    x = normal(rows, rows, width, dtype=dtype, scale=scale)
    given, out = place.put(x, dtype), place.empty((rows, width), dtype)
    (found,) = twice(place, lambda: kit.softmax_forward(given, out=out))
    check(f"softmax_forward {rows} x {width} {dtype}", found, softmax(x.astype(np.float64)), softmax(x), dtype=dtype)


def test_small_results_keep_their_digits_in_f32(place: Place) -> None:
    """Of exp(-80) too: the rounding of 80 * log2(e) is put back, which would cost 80 roundings."""
    x = np.array([[0.0, -1.0, -20.3, -50.7, -80.1]], np.float32)
    found = place.get(kit.softmax_forward(place.put(x)))
    np.testing.assert_allclose(found, softmax(x.astype(np.float64)), rtol=9e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_backward(place: Place, rows: int, width: int, dtype: str) -> None:
    out, dout = rounded(softmax(normal(1, rows, width)), dtype), normal(2, rows, width, dtype=dtype)
    given = [place.put(a, dtype) for a in (out, dout)]
    dx = place.empty((rows, width), dtype)
    (found,) = twice(place, lambda: kit.softmax_backward(*given, dx=dx))
    exact = gradient(out.astype(np.float64), dout.astype(np.float64))
    check(f"softmax_backward {rows} x {width} {dtype}", found, exact, gradient(out, dout), dtype=dtype)


def test_the_gradient_is_the_slope(place: Place) -> None:
    x, dout = normal(1, 2, 9), normal(2, 2, 9)

    def loss(x: Float) -> float:
        return float((place.get(kit.softmax_forward(place.put(x))).astype(np.float64) * dout).sum())

    found = kit.softmax_backward(kit.softmax_forward(place.put(x)), place.put(dout))
    np.testing.assert_allclose(place.get(found), slope(loss, x, 1e-2), atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_masked_and_very_large_scores(place: Place, dtype: str) -> None:
    """Equal rows are uniform; minus infinity weighs nothing, also where there is nothing else; no score is too large."""
    top = {"f16": 65504.0, "bf16": 3e38, "f32": 3e38}[dtype]
    x = np.zeros((7, 70))
    x[1] = top
    x[2] = -top
    x[3], x[3, 5] = -top, top
    x[4] = -np.inf
    x[5], x[5, 66:] = -np.inf, 1.0
    x[6, ::2] = -np.inf
    found = place.get(kit.softmax_forward(place.put(x, dtype))).astype(np.float64)
    expected = np.full((7, 70), 1 / 70)
    expected[3], expected[3, 5] = 0, 1
    expected[4] = 0
    expected[5], expected[5, 66:] = 0, 0.25
    expected[6, ::2], expected[6, 1::2] = 0, 1 / 35
    np.testing.assert_allclose(found, expected, rtol=2.0**-8 if dtype == "bf16" else 2.0**-11)
    assert (found[4] == 0).all() and (found[5, :66] == 0).all()
    dx = kit.softmax_backward(place.put(found, dtype), place.put(np.ones((7, 70)), dtype))
    assert np.isfinite(place.get(dx).astype(np.float32)).all() and not place.get(dx)[4].astype(np.float32).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_stays_in_its_row(place: Place, bad: float) -> None:
    x = np.zeros((3, 40), np.float32)
    x[1, 33] = bad
    found = place.get(kit.softmax_forward(place.put(x)))
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


def test_in_place(place: Place) -> None:
    x, dout = normal(1, 5, 40), normal(2, 5, 40)
    out = place.get(kit.softmax_forward(place.put(x)))
    both = place.put(x)
    assert kit.softmax_forward(both, out=both) is both
    assert place.get(both).tobytes() == out.tobytes()
    dx = place.get(kit.softmax_backward(place.put(out), place.put(dout)))
    into = place.put(dout)
    kit.softmax_backward(place.put(out), into, dx=into)
    assert place.get(into).tobytes() == dx.tobytes()


def test_in_checked_mode(checked_place: Place) -> None:
    for dtype in FLOATS:
        for rows, width in ((3, 33), (6, 130)):
            x = checked_place.put(normal(1, rows, width), dtype)
            kit.softmax_backward(kit.softmax_forward(x), x)
