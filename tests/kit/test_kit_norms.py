"""LayerNorm and RMSNorm of the kit against float64 NumPy, finite differences, and the edges of their domains."""

from __future__ import annotations

import numpy as np
import pytest
from kitbench import FLOATS, Float, Place, check, normal, slope, twice

from ptxtrain.engine import kit

EPS = 1e-5
SHAPES = [(1, 1), (7, 33), (65, 97), (3, 300), (40, 128)]


def layernorm(x: Float, gamma: Float, beta: Float, eps: float = EPS) -> tuple[Float, Float, Float]:
    """The formula in the precision of x."""
    mean = x.mean(-1, dtype=x.dtype)
    away = x - mean[..., None]
    rstd = 1 / np.sqrt((away * away).mean(-1, dtype=x.dtype) + x.dtype.type(eps))
    return away * rstd[..., None] * gamma + beta, mean, rstd


def layernorm_gradient(x: Float, gamma: Float, dout: Float, mean: Float, rstd: Float) -> tuple[Float, Float, Float]:
    xhat = (x - mean[..., None]) * rstd[..., None]
    g = dout * gamma
    inner = g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True)
    return rstd[..., None] * inner, (dout * xhat).sum(0), dout.sum(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_layernorm_forward(place: Place, rows: int, width: int, dtype: str) -> None:
    x, gamma, beta = normal(1, rows, width, dtype=dtype), normal(2, width, dtype=dtype), normal(3, width, dtype=dtype)
    given = [place.put(a, dtype) for a in (x, gamma, beta)]
    outs = {"out": place.empty((rows, width), dtype), "mean": place.empty((rows,)), "rstd": place.empty((rows,))}
    found = twice(place, lambda: kit.layernorm_forward(*given, eps=EPS, **outs))
    exact = layernorm(*(a.astype(np.float64) for a in (x, gamma, beta)))
    same = layernorm(x, gamma, beta)
    what = f"layernorm_forward {rows} x {width} {dtype}"
    for name, a, b, c in zip(("out", "mean", "rstd"), found, exact, same, strict=True):
        check(f"{what} {name}", a, b, c, dtype=dtype if name == "out" else "f32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_layernorm_backward(place: Place, rows: int, width: int, dtype: str) -> None:
    x, gamma, dout = (normal(s, *n, dtype=dtype) for s, n in ((1, (rows, width)), (2, (width,)), (3, (rows, width))))
    _, mean, rstd = layernorm(x, gamma, gamma)
    given = [place.put(a, dtype) for a in (x, gamma, dout)] + [place.put(mean), place.put(rstd)]
    outs = {"dx": place.empty((rows, width), dtype), "dgamma": place.empty((width,)), "dbeta": place.empty((width,))}
    found = twice(place, lambda: kit.layernorm_backward(*given, **outs))
    exact = layernorm_gradient(*(a.astype(np.float64) for a in (x, gamma, dout, mean, rstd)))
    same = layernorm_gradient(x, gamma, dout, mean, rstd)
    what = f"layernorm_backward {rows} x {width} {dtype}"
    for name, a, b, c in zip(("dx", "dgamma", "dbeta"), found, exact, same, strict=True):
        check(f"{what} {name}", a, b, c, dtype=dtype if name == "dx" else "f32")


def test_layernorm_gradients_are_the_slopes(place: Place) -> None:
    """Of the sum of out * dout, by finite differences of the kit's own forward pass in f32."""
    x, gamma, beta, dout = normal(1, 3, 9), normal(2, 9), normal(3, 9), normal(4, 3, 9)

    def loss(x: Float, gamma: Float, beta: Float) -> float:
        out = place.get(kit.layernorm_forward(place.put(x), place.put(gamma), place.put(beta), eps=EPS)[0])
        return float((out.astype(np.float64) * dout).sum())

    _, mean, rstd = kit.layernorm_forward(*map(place.put, (x, gamma, beta)), eps=EPS)
    found = kit.layernorm_backward(*map(place.put, (x, gamma, dout)), mean, rstd)
    slopes = (
        slope(lambda a: loss(a, gamma, beta), x, 1e-2),
        slope(lambda a: loss(x, a, beta), gamma, 1e-2),
        slope(lambda a: loss(x, gamma, a), beta, 1e-2),
    )
    for name, a, b in zip(("dx", "dgamma", "dbeta"), found, slopes, strict=True):
        np.testing.assert_allclose(place.get(a), b, rtol=2e-3, atol=2e-3, err_msg=name)


def rmsnorm(x: Float, gamma: Float, eps: float = EPS) -> tuple[Float, Float]:
    rstd = 1 / np.sqrt((x * x).mean(-1, dtype=x.dtype) + x.dtype.type(eps))
    return x * rstd[..., None] * gamma, rstd


def rmsnorm_gradient(x: Float, gamma: Float, dout: Float, rstd: Float) -> tuple[Float, Float]:
    xhat = x * rstd[..., None]
    g = dout * gamma
    return rstd[..., None] * (g - xhat * (g * xhat).mean(-1, keepdims=True)), (dout * xhat).sum(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rmsnorm_forward(place: Place, rows: int, width: int, dtype: str) -> None:
    x, gamma = normal(1, rows, width, dtype=dtype), normal(2, width, dtype=dtype)
    given = [place.put(a, dtype) for a in (x, gamma)]
    outs = {"out": place.empty((rows, width), dtype), "rstd": place.empty((rows,))}
    found = twice(place, lambda: kit.rmsnorm_forward(*given, eps=EPS, **outs))
    exact, same = rmsnorm(x.astype(np.float64), gamma.astype(np.float64)), rmsnorm(x, gamma)
    what = f"rmsnorm_forward {rows} x {width} {dtype}"
    for name, a, b, c in zip(("out", "rstd"), found, exact, same, strict=True):
        check(f"{what} {name}", a, b, c, dtype=dtype if name == "out" else "f32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rmsnorm_backward(place: Place, rows: int, width: int, dtype: str) -> None:
    x, gamma, dout = (normal(s, *n, dtype=dtype) for s, n in ((1, (rows, width)), (2, (width,)), (3, (rows, width))))
    rstd = rmsnorm(x, gamma)[1]
    given = [*(place.put(a, dtype) for a in (x, gamma, dout)), place.put(rstd)]
    outs = {"dx": place.empty((rows, width), dtype), "dgamma": place.empty((width,))}
    found = twice(place, lambda: kit.rmsnorm_backward(*given, **outs))
    exact = rmsnorm_gradient(*(a.astype(np.float64) for a in (x, gamma, dout, rstd)))
    same = rmsnorm_gradient(x, gamma, dout, rstd)
    what = f"rmsnorm_backward {rows} x {width} {dtype}"
    for name, a, b, c in zip(("dx", "dgamma"), found, exact, same, strict=True):
        check(f"{what} {name}", a, b, c, dtype=dtype if name == "dx" else "f32")


def test_rmsnorm_gradients_are_the_slopes(place: Place) -> None:
    """Of the sum of out * dout, by finite differences of the kit's own forward pass in f32."""
    x, gamma, dout = normal(1, 3, 9), normal(2, 9), normal(4, 3, 9)

    def loss(x: Float, gamma: Float) -> float:
        out = place.get(kit.rmsnorm_forward(place.put(x), place.put(gamma), eps=EPS)[0])
        return float((out.astype(np.float64) * dout).sum())

    rstd = kit.rmsnorm_forward(*map(place.put, (x, gamma)), eps=EPS)[1]
    dx, dgamma = kit.rmsnorm_backward(*map(place.put, (x, gamma, dout)), rstd)
    np.testing.assert_allclose(place.get(dx), slope(lambda a: loss(a, gamma), x, 1e-2), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(place.get(dgamma), slope(lambda a: loss(x, a), gamma, 1e-2), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rmsnorm_of_zero_rows(place: Place, dtype: str) -> None:
    """No NaN: out and the gradient of gamma are 0, rstd 1 / sqrt(eps); a zero row among others leaves those alone."""
    x = normal(1, 4, 45, dtype=dtype)
    x[1] = x[3] = 0
    gamma, dout = np.full(45, 2.0), normal(2, 4, 45, dtype=dtype)
    given = [place.put(a, dtype) for a in (x, gamma)]
    out, rstd = kit.rmsnorm_forward(*given, eps=1e-4)
    dx, dgamma = kit.rmsnorm_backward(*given, place.put(dout, dtype), rstd)
    alone = kit.rmsnorm_forward(place.put(x[:1], dtype), given[1], eps=1e-4)[0]
    assert not place.get(out)[1::2].astype(np.float32).any() and np.isfinite(place.get(dgamma)).all()
    assert place.get(out)[:1].tobytes() == place.get(alone).tobytes()
    np.testing.assert_allclose(place.get(rstd)[1::2], 100, rtol=1e-5)
    np.testing.assert_allclose(
        place.get(dx)[1::2].astype(np.float64), 200 * dout[1::2].astype(np.float64), rtol=2.0**-8
    )


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_weight_gradients_accumulate(place: Place, norm: str) -> None:
    """Two calls that add are the sum of two that do not; and memory to add to must be passed in."""
    gamma, calls = place.put(np.ones(33)), []
    for seed in (1, 2):
        x, dout = place.put(normal(seed, 40, 33)), place.put(normal(seed + 2, 40, 33))
        if norm == "rms":
            calls.append((kit.rmsnorm_backward, (x, gamma, dout, kit.rmsnorm_forward(x, gamma)[1]), ("dgamma",)))
        else:
            statistics = kit.layernorm_forward(x, gamma, gamma)[1:]
            calls.append((kit.layernorm_backward, (x, gamma, dout, *statistics), ("dgamma", "dbeta")))
    names = calls[0][2]
    sums = {name: place.put(np.zeros(33)) for name in names}
    parts = [function(*given)[1:] for function, given, _ in calls]
    for function, given, _ in calls:
        function(*given, accumulate=True, **sums)
    for i, name in enumerate(names):
        expected = place.get(parts[0][i]) + place.get(parts[1][i])
        np.testing.assert_allclose(place.get(sums[name]), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(kit.ContractError, match="dgamma: expected an array to add to, with accumulate, got none"):
        calls[0][0](*calls[0][1], accumulate=True)


def test_norms_in_checked_mode(checked_place: Place) -> None:
    """Nothing is read that nobody wrote, and nothing touched past a row's end or by two threads at once."""
    for dtype in FLOATS:
        for rows, width in ((3, 33), (34, 130)):
            x, dout = (checked_place.put(normal(s, rows, width), dtype) for s in (1, 2))
            gamma = checked_place.put(np.ones(width), dtype)
            kit.rmsnorm_backward(x, gamma, dout, kit.rmsnorm_forward(x, gamma)[1])
            _, mean, rstd = kit.layernorm_forward(x, gamma, gamma)
            kit.layernorm_backward(x, gamma, dout, mean, rstd)


def test_a_large_mean_costs_layernorm_no_digits(place: Place) -> None:
    """The mean of the squares minus the square of the mean would lose the variance altogether here."""
    x = (1e4 + normal(5, 6, 257)).astype(np.float32)
    one, zero = np.ones(257, np.float32), np.zeros(257, np.float32)
    out, _, rstd = kit.layernorm_forward(*map(place.put, (x, one, zero)), eps=0.0)
    exact, _, exact_rstd = layernorm(x.astype(np.float64), one.astype(np.float64), zero.astype(np.float64), 0.0)
    np.testing.assert_allclose(place.get(rstd), exact_rstd, rtol=1e-5)
    np.testing.assert_allclose(place.get(out), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layernorm_of_equal_and_zero_rows(place: Place, dtype: str) -> None:
    """Nothing to scale: out is beta, rstd 1 / sqrt(eps), and the gradient of x is 0 for a uniform one of out."""
    x = np.array([[0.0], [3.5], [-7.0]]) * np.ones((1, 45))
    gamma, beta, dout = np.full(45, 2.0), np.linspace(-1, 1, 45).astype(np.float16), np.ones((3, 45))
    given = [place.put(a, dtype) for a in (x, gamma, beta)]
    out, mean, rstd = kit.layernorm_forward(*given, eps=EPS)
    assert place.get(out).tobytes() == np.tile(place.get(given[2]), (3, 1)).tobytes()
    np.testing.assert_array_equal(place.get(mean), x[:, 0].astype(np.float32))
    np.testing.assert_allclose(place.get(rstd), 1 / np.sqrt(EPS), rtol=1e-6)
    dx, dgamma, dbeta = kit.layernorm_backward(given[0], given[1], place.put(dout, dtype), mean, rstd)
    assert not place.get(dx).astype(np.float32).any() and not place.get(dgamma).any()
    np.testing.assert_array_equal(place.get(dbeta), 3.0)
