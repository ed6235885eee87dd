"""SwiGLU of the kit against float64 NumPy, finite differences, in place, and at extreme gates."""

from __future__ import annotations

import numpy as np
import pytest
from kitbench import FLOATS, Float, Place, check, normal, slope, twice

from ptxtrain.engine import kit

SHAPES = [(1,), (513,), (3, 5, 77), (1024,), (2056,)]  # shorter than a warp's 512 elements, a rest, no rest


def swiglu(gate: Float, up: Float) -> Float:
    return gate / (1 + np.exp(-gate)) * up


def gradient(gate: Float, up: Float, dout: Float) -> tuple[Float, Float]:
    s = 1 / (1 + np.exp(-gate))
    return dout * up * s * (1 + gate * (1 - s)), dout * gate * s


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(place: Place, shape: tuple[int, ...], dtype: str) -> None:
    gate, up, dout = (normal(s, *shape, dtype=dtype, scale=3.0) for s in (1, 2, 3))
    given = [place.put(a, dtype) for a in (gate, up, dout)]
    outs = [place.empty(shape, dtype) for _ in range(3)]
    found = [
        *twice(place, lambda: kit.swiglu_forward(*given[:2], out=outs[0])),
        *twice(place, lambda: kit.swiglu_backward(*given, dgate=outs[1], dup=outs[2])),
    ]
    wide = [a.astype(np.float64) for a in (gate, up, dout)]
    exact, same = (swiglu(*wide[:2]), *gradient(*wide)), (swiglu(gate, up), *gradient(gate, up, dout))
    for name, a, b, c in zip(("out", "dgate", "dup"), found, exact, same, strict=True):
        check(f"swiglu {name} {shape} {dtype}", a, b, c, dtype=dtype)


def test_gradients_are_the_slopes(place: Place) -> None:
    gate, up, dout = (normal(s, 17) for s in (1, 2, 3))

    def loss(gate: Float, up: Float) -> float:
        return float((place.get(kit.swiglu_forward(place.put(gate), place.put(up))).astype(np.float64) * dout).sum())

    dgate, dup = kit.swiglu_backward(*map(place.put, (gate, up, dout)))
    np.testing.assert_allclose(place.get(dgate), slope(lambda a: loss(a, up), gate, 1e-2), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(place.get(dup), slope(lambda a: loss(gate, a), up, 1e-2), rtol=1e-3, atol=1e-3)


def test_extreme_gates(place: Place) -> None:
    """A large gate passes up through, a large negative one nothing, and neither makes a NaN."""
    gate, up = np.array([3e38, 100, -100, -3e38, 0], np.float32), np.full(5, 0.5, np.float32)
    out = place.get(kit.swiglu_forward(place.put(gate), place.put(up)))
    np.testing.assert_allclose(out, [1.5e38, 50, 0, 0, 0], atol=1e-30)
    dgate, dup = kit.swiglu_backward(place.put(gate), place.put(up), place.put(np.ones(5)))
    np.testing.assert_allclose(place.get(dgate), [0.5, 0.5, 0, 0, 0.25], atol=1e-30)
    np.testing.assert_allclose(place.get(dup), [3e38, 100, 0, 0, 0], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", FLOATS)
def test_in_place_and_at_odd_addresses(place: Place, dtype: str) -> None:
    """The same bits when out is an input, and when arrays begin off any 16 bytes."""
    gate, up, dout = (place.put(normal(s, 1024), dtype) for s in (1, 2, 3))
    out = place.get(kit.swiglu_forward(gate, up)).tobytes()
    dgate, dup = (place.get(x).tobytes() for x in kit.swiglu_backward(gate, up, dout))
    odd = []
    for array in (gate, up, dout):
        longer = place.empty((1025,), dtype)
        longer[1:] = array
        odd.append(longer[1:])
    assert place.get(kit.swiglu_forward(*odd[:2])).tobytes() == out
    kit.swiglu_backward(*odd, dgate=odd[1], dup=odd[0])
    assert place.get(odd[1]).tobytes() == dgate and place.get(odd[0]).tobytes() == dup
    assert kit.swiglu_forward(gate, up, out=up) is up and place.get(up).tobytes() == out


def test_in_checked_mode(checked_place: Place) -> None:
    for dtype in FLOATS:
        for count in (5, 512, 1030):
            gate, up = (checked_place.put(normal(s, count), dtype) for s in (1, 2))
            kit.swiglu_backward(gate, up, kit.swiglu_forward(gate, up))
