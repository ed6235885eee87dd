"""RoPE of the kit against float64, its inverse, its tables at far positions, and decoding from a position on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kitbench import FLOATS, Float, Place, check, normal, twice

from ptxtrain.engine import kit

SHAPES = [(1, 1, 1, 2), (2, 3, 9, 12), (1, 2, 65, 64), (2, 1, 5, 80)]


def turned(x: Float, cos: Float, sin: Float) -> Float:
    half = x.shape[-1] // 2
    x0, x1 = x[..., :half], x[..., half:]
    return np.concatenate([x0 * cos - x1 * sin, x1 * cos + x0 * sin], -1)


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_turns_in_place(place: Place, shape: tuple[int, ...], dtype: str, way: str) -> None:
    x = normal(1, *shape, dtype=dtype)
    cos, sin = kit.rope_tables(shape[2], shape[3])
    sign = 1 if way == "forward" else -1
    function = kit.rope_forward if way == "forward" else kit.rope_backward
    tables = place.put(cos), place.put(sin)

    def call() -> object:
        given = place.put(x, dtype)
        assert function(given, *tables) is given
        return given

    (found,) = twice(place, call)
    exact = turned(x.astype(np.float64), cos.astype(np.float64), sign * sin.astype(np.float64))
    check(f"rope_{way} {shape} {dtype}", found, exact, turned(x, cos, sign * sin), dtype=dtype)


def test_backward_is_the_transpose(place: Place) -> None:
    """(R x) . y = x . (R' y): the slope of the forward pass, which is linear."""
    x, y = normal(1, 2, 3, 7, 10), normal(2, 2, 3, 7, 10)
    tables = [place.put(t) for t in kit.rope_tables(7, 10)]
    ahead = place.get(kit.rope_forward(place.put(x), *tables)).astype(np.float64)
    back = place.get(kit.rope_backward(place.put(y), *tables)).astype(np.float64)
    assert abs((ahead * y).sum() - (x * back).sum()) < 1e-4


def test_position_zero_and_a_million(place: Place) -> None:
    """Position 0 changes no bit; at 10^6 angles are as exact as anywhere: float64, rounded once to f32 after cos and sin."""
    x = normal(1, 1, 1, 1, 64)
    first = place.get(kit.rope_forward(place.put(x), *map(place.put, kit.rope_tables(1, 64))))
    assert first.tobytes() == x.tobytes()
    cos, sin = kit.rope_tables(2, 64, start=1_000_000)
    for row in (0, 1):
        for k in (0, 1, 17, 31):
            angle = (1_000_000 + row) * 10_000.0 ** (-2 * k / 64)
            assert cos[row, k] == np.float32(math.cos(angle)) and sin[row, k] == np.float32(math.sin(angle))
    far = place.get(kit.rope_forward(place.put(x), place.put(cos[:1]), place.put(sin[:1]))).astype(np.float64)
    check("rope at 10^6", far, turned(x.astype(np.float64), *exact_tables(1_000_000, 64)), turned(x, cos[:1], sin[:1]))


def exact_tables(position: int, head_dim: int) -> tuple[Float, Float]:
    angles = np.array([[position * 10_000.0 ** (-2 * k / head_dim) for k in range(head_dim // 2)]])
    return np.cos(angles), np.sin(angles)


def test_base_scaling_and_start() -> None:
    cos, sin = kit.rope_tables(6, 8, base=500_000.0, scaling=0.25, start=4)
    for row in range(6):
        for k in range(4):
            angle = (4 + row) * 0.25 * 500_000.0 ** (-2 * k / 8)
            assert cos[row, k] == np.float32(math.cos(angle)) and sin[row, k] == np.float32(math.sin(angle))
    whole = kit.rope_tables(10, 8, base=500_000.0, scaling=0.25)
    assert whole[0][4:].tobytes() == cos.tobytes() and whole[1][4:].tobytes() == sin.tobytes()
    assert kit.rope_tables(1, 8, like=np.zeros(3, np.int8))[0].dtype == np.float32


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"head_dim": 7}, "rope_tables: head_dim: expected an even number, got 7"),
        ({"seq": 0}, "rope_tables: seq: expected an integer of at least 1, got 0"),
        ({"base": 0.0}, "rope_tables: base: expected a finite number above 0, got 0.0"),
        ({"scaling": math.nan}, "rope_tables: scaling: expected a finite number, got nan"),
        ({"start": -1}, "rope_tables: start: expected an integer of at least 0, got -1"),
    ],
)
def test_tables_are_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(kit.ContractError) as caught:
        kit.rope_tables(**{"seq": 4, "head_dim": 8, **given})  # type: ignore[arg-type]
    assert str(caught.value) == said


def test_in_checked_mode(checked_place: Place) -> None:
    for dtype in FLOATS:
        for shape in ((2, 1, 5, 6), (1, 3, 3, 80)):
            tables = kit.rope_tables(shape[2], shape[3])
            kit.rope_backward(kit.rope_forward(checked_place.put(normal(1, *shape), dtype), *tables), *tables)
