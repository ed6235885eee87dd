"""gemm of the kit against float64 NumPy and PyTorch: layouts, dtypes, leading axes, alpha, beta, bias, and its contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kitbench import DTYPES, FLOATS, HALF, Float, Place, normal, slope, twice

from ptxtrain.engine import kit

LAYOUTS = ("nn", "nt", "tn", "tt")
SHAPES = [(7, 5, 3), (33, 72, 40), (1, 1, 1)]  # the second is one that tensor cores take


def stored(a: Float, b: Float, layout: str) -> tuple[Float, Float]:
    """a [M, K] and b [K, N] as the layout keeps them."""
    return (a.T if layout[0] == "t" else a), (b.T if layout[1] == "t" else b)


def hold(what: str, found: Float, exact: Float, size: Float, k: int, dtype: str) -> None:
    """Within the f32 rounding of k additions of numbers whose absolute sum is `size`, and one rounding of the result."""
    allowed = (k + 4) * 2.0**-24 * size + (HALF[dtype] + 2.0**-23) * np.abs(exact)
    wrong = ~(np.abs(found.astype(np.float64) - exact) <= allowed)
    assert not wrong.any(), f"{what}: {found[wrong][:3]} for {exact[wrong][:3]}"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_against_float64(place: Place, m: int, n: int, k: int, layout: str, dtype: str) -> None:
    """alpha * (a @ b) + bias, then beta 1 on top of it."""
    a, b, bias = normal(m, m, k, dtype=dtype), normal(n, k, n, dtype=dtype), normal(3, n)
    x, y = (place.put(part, dtype) for part in stored(a, b, layout))
    out = place.empty((m, n), dtype)
    (found,) = twice(place, lambda: kit.gemm(x, y, layout=layout, alpha=0.5, bias=place.put(bias), out=out))
    product, size = 0.5 * (a.astype(np.float64) @ b), np.abs(a).astype(np.float64) @ np.abs(b)
    hold(f"{layout} {dtype}", found, product + bias, size + np.abs(bias), k, dtype)
    total = place.get(kit.gemm(x, y, layout=layout, beta=1, out=out)).astype(np.float32)
    hold(f"{layout} {dtype} beta", total, found + 2 * product, size + np.abs(found), k, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_leading_axes_and_a_layer(place: Place, dtype: str) -> None:
    """[B, S, K] activations: forward, the gradient of the input, and that of the weight, summed over all rows into f32."""
    x, w, dout = (normal(i, *shape, dtype=dtype) for i, shape in enumerate([(2, 3, 8), (8, 16), (2, 3, 16)]))
    x_, w_, dout_ = (place.put(a, dtype) for a in (x, w, dout))
    out, dx = kit.gemm(x_, w_), kit.gemm(dout_, w_, layout="nt")
    dw = kit.gemm(x_, dout_, layout="tn", out_dtype="f32")
    assert (out.shape, dx.shape, dw.shape) == ((2, 3, 16), (2, 3, 8), (8, 16)) and dw.dtype == np.float32
    wanted = (x @ w, dout @ w.T, np.einsum("bsk,bsn->kn", x, dout))
    for found, exact in zip((out, dx, dw), wanted, strict=True):
        np.testing.assert_allclose(place.get(found).astype(np.float32), exact, rtol=2 * HALF[dtype] + 1e-5, atol=1e-5)


def test_the_gradients_are_slopes(place: Place) -> None:
    a, b, dout = normal(1, 3, 4), normal(2, 4, 5), normal(3, 3, 5)

    def loss(a: Float, b: Float) -> float:
        return float((place.get(kit.gemm(place.put(a), place.put(b))).astype(np.float64) * dout).sum())

    da = place.get(kit.gemm(place.put(dout), place.put(b), layout="nt"))
    db = place.get(kit.gemm(place.put(a), place.put(dout), layout="tn"))
    np.testing.assert_allclose(da, slope(lambda x: loss(x, b), a, 1e-2), atol=1e-4)
    np.testing.assert_allclose(db, slope(lambda x: loss(a, x), b, 1e-2), atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_against_pytorch(dtype: str) -> None:
    """Tensors go in and come out without a copy, and the numbers are PyTorch's."""
    torch = pytest.importorskip("torch")
    kind = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    a, b, bias = (torch.randn(*shape).to(kind) for shape in ((17, 24), (32, 24), (32,)))
    found = kit.gemm(a, b, layout="nt", bias=bias)
    wanted = torch.nn.functional.linear(a.double(), b.double(), bias.double())
    assert isinstance(found, torch.Tensor) and found.dtype == kind
    torch.testing.assert_close(found.double(), wanted, rtol=2 * HALF[dtype] + 1e-5, atol=1e-4)


def test_contract(place: Place) -> None:
    a, b = place.put(np.ones((3, 5))), place.put(np.ones((5, 4)))

    def refused(said: str, **changed: Any) -> None:
        with pytest.raises(kit.ContractError, match=f"^gemm: {said}"):
            kit.gemm(**{"a": a, "b": b, **changed})

    refused(r'layout: expected "nn", "nt", "tn" or "tt", got \'xx\'', layout="xx")
    refused("beta: expected 0 or 1, got 0.5", beta=0.5, out=place.put(np.ones((3, 4))))
    refused("out: expected an array to add to, with beta 1, got none", beta=1)
    refused("alpha: expected a finite number, got inf", alpha=np.inf)
    refused(r"b: expected shape \(N, K\) = \(\?, 5\), got \(5, 4\)", layout="nt")
    refused("out_dtype: expected f16, bf16 or f32, got 'f64'", out_dtype="f64")
    refused("out: expected dtype f16, as out_dtype says, got f32", out_dtype="f16", out=place.put(np.ones((3, 4))))
    empty = place.put(np.ones((3, 0)))
    refused(r"a: expected at least one number to each sum, got shape \(3, 0\)", a=empty, b=place.put(np.ones((0, 4))))


def test_no_rows(place: Place) -> None:
    """Nothing to compute is nothing computed."""
    assert kit.gemm(place.put(np.ones((0, 5))), place.put(np.ones((5, 4)))).shape == (0, 4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_checked(checked_place: Place, dtype: str) -> None:
    a, b = (checked_place.put(normal(i, *s), dtype) for i, s in enumerate(((9, 16), (16, 24))))
    kit.gemm(a, b, bias=checked_place.put(np.ones(24), dtype), out=np.empty((9, 24), DTYPES[dtype]))
