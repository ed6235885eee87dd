"""The fused norm and product of the kit: float64, the separate path, the same bits every time, and the contract."""

from __future__ import annotations

import numpy as np
import pytest
from kitbench import FLOATS, HALF, Float, Place, normal, twice

from ptxtrain.engine import kit

SHAPES = [(1, 5, 3), (2, 96, 65), (3, 130, 40), (4, 384, 72)]


def call(place: Place, norm: str, layout: str, dtype: str, m: int, k: int, n: int) -> tuple[Float, Float, Float]:
    """The fused result, that of the norm and then gemm, and float64's."""
    x, gamma, beta, w = (normal(i, *shape, dtype=dtype) for i, shape in enumerate([(m, k), (k,), (k,), (k, n)]))
    x_, gamma_, beta_ = (place.put(a, dtype) for a in (x, gamma, beta))
    weight = place.put(w if layout == "kn" else w.T, dtype)
    out = place.empty((m, n), dtype)
    wide = x.astype(np.float64)
    if norm == "rms":
        (found,) = twice(place, lambda: kit.fused_rmsnorm_gemv(x_, gamma_, weight, layout=layout, out=out))
        normed = kit.rmsnorm_forward(x_, gamma_)[0]
        exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * gamma
    else:
        (found,) = twice(place, lambda: kit.fused_layernorm_gemv(x_, gamma_, beta_, weight, layout=layout, out=out))
        normed = kit.layernorm_forward(x_, gamma_, beta_)[0]
        exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * gamma + beta
    separate = place.get(kit.gemm(normed, weight, layout="nn" if layout == "kn" else "nt")).astype(np.float32)
    return found, separate, exact @ w


def relative_rms(a: Float, b: Float) -> float:
    return float(np.sqrt(((a - b) ** 2).mean() / (b.astype(np.float64) ** 2).mean()))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_against_float64_and_the_separate_path(place: Place, norm: str, layout: str, dtype: str) -> None:
    """Within 5e-3 of the separate path, and far closer, since both round the normalised numbers; a few roundings of float64."""
    for m, k, n in SHAPES:
        found, separate, exact = call(place, norm, layout, dtype, m, k, n)
        assert relative_rms(found, separate) <= min(5e-3, 2 * HALF[dtype] + 1e-6), (m, k, n)
        assert relative_rms(found, exact) <= 4 * HALF[dtype] + 1e-6, (m, k, n)


def test_zero_rows(place: Place) -> None:
    """A row of zeros is a row of zeros; of LayerNorm, beta @ weight."""
    x, ones, weight = (place.put(np.full(s, v)) for s, v in (((2, 8), 0), ((8,), 1), ((8, 5), 2)))
    assert not place.get(kit.fused_rmsnorm_gemv(x, ones, weight)).any()
    assert (place.get(kit.fused_layernorm_gemv(x, ones, ones, weight)) == 16).all()


def test_contract(place: Place) -> None:
    x, gamma, weight = place.put(np.ones((5, 8))), place.put(np.ones(8)), place.put(np.ones((8, 3)))
    for function, given in ((kit.fused_rmsnorm_gemv, (gamma,)), (kit.fused_layernorm_gemv, (gamma, gamma))):
        name = function.__name__
        with pytest.raises(kit.ContractError, match=rf"{name}: x: expected at most 4 rows \(for more, .*\), got 5"):
            function(x, *given, weight)
        with pytest.raises(kit.ContractError, match=r"weight: expected shape \(N, K\) = \(\?, 8\), got \(8, 3\)"):
            function(x[:4], *given, weight, layout="nk")
        with pytest.raises(kit.ContractError, match='layout: expected "kn" or "nk", got \'mn\''):
            function(x[:4], *given, weight, layout="mn")
        with pytest.raises(kit.ContractError, match="eps: expected a finite number of at least 0, got -1"):
            function(x[:4], *given, weight, eps=-1)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_checked(checked_place: Place, norm: str) -> None:
    for layout in ("kn", "nk"):
        call(checked_place, norm, layout, "f16", 3, 70, 33)
