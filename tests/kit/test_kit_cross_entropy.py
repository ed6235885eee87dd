"""Cross-entropy of the kit against float64 NumPy, PyTorch and finite differences; ignored rows, -inf, huge logits, contract."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from kitbench import DTYPES, FLOATS, Float, Place, check, normal, rounded, slope, twice

from ptxtrain.engine import kit

SHAPES = [(1, 1), (5, 33), (3, 1000), (2, 4099)]


def whole(place: Place, x: Any) -> Any:
    """Targets where the place has its memory, in their own dtype."""
    if place.kind == "cpu":
        return x
    import cupy

    return cupy.asarray(x)


def formula(
    logits: Float, targets: Float, z_loss: float, scale: float, ignored: int = -100
) -> tuple[Float, Float, Float]:
    """loss, lse, dlogits in the precision of the logits."""
    kind = logits.dtype.type
    top = logits.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True, dtype=kind)))[:, 0]
    counts = targets != ignored
    hot = np.eye(logits.shape[1], dtype=kind)[np.where(counts, targets, 0)]
    loss = lse - (logits * hot).sum(-1) + kind(z_loss) * lse**2
    p = np.exp(logits - lse[:, None]) * (1 + kind(2 * z_loss) * lse[:, None])
    return np.where(counts, loss, 0), lse, np.where(counts[:, None], (p - hot) * kind(scale), 0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_against_float64(place: Place, rows: int, vocab: int, dtype: str, index: type) -> None:
    """Loss, lse and gradient, with a row that is ignored, apart from the logits and in their place."""
    logits = normal(rows, rows, vocab, dtype=dtype, scale=3)
    targets = np.random.default_rng(vocab).integers(0, vocab, rows)
    targets[rows // 2 :: 3] = -100
    given = place.put(logits, dtype)
    hot = whole(place, targets.astype(index))
    made = [place.empty((rows,)), place.empty((rows,)), place.empty((rows, vocab), dtype)]
    options = {"z_loss": 1e-3, "scale": 0.25}
    names = dict(zip(("loss", "lse", "dlogits"), made, strict=True))
    found = twice(place, lambda: kit.cross_entropy(given, hot, **options, **names))
    exact, same = (formula(logits.astype(kind), targets, 1e-3, 0.25) for kind in (np.float64, np.float32))
    for name, x, wide, narrow in zip(names, found, exact, same, strict=True):
        of = dtype if name == "dlogits" else "f32"
        check(f"cross_entropy {name} {rows} x {vocab} {dtype}", x, wide, narrow, dtype=of, floor=16)
    place_of = place.put(logits, dtype)
    assert kit.cross_entropy(place_of, hot, **options, dlogits=place_of)[2] is place_of
    assert place.get(place_of).tobytes() == place.get(made[2]).tobytes()
    loss, _, nothing = kit.cross_entropy(given, hot, z_loss=1e-3, gradient=False)
    assert nothing is None and place.get(loss).tobytes() == place.get(made[0]).tobytes()


def test_the_gradient_is_the_slope(place: Place) -> None:
    logits, targets = normal(1, 3, 7), whole(place, np.array([2, -100, 6], np.int32))

    def loss(x: Float) -> float:
        found = kit.cross_entropy(place.put(x), targets, z_loss=0.1, gradient=False)[0]
        return float(place.get(found).astype(np.float64).sum())

    found = kit.cross_entropy(place.put(logits), targets, z_loss=0.1)[2]
    np.testing.assert_allclose(place.get(found), slope(loss, logits, 1e-2), atol=2e-4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_edges(place: Place, dtype: str) -> None:
    """-inf has probability 0, a row of it loss inf and a gradient of -1; huge and equal logits are no NaN."""
    inf = np.inf
    rows = [[-inf, 1, 2, -inf], [-inf] * 4, [60000, 60000, 0, -60000], [5] * 4, [-inf, 0, 0, 0]]
    logits, targets = np.array(rows).astype(DTYPES[dtype]), whole(place, np.array([1, 3, 0, 2, 0], np.int32))
    loss, lse, dlogits = (place.get(x) for x in kit.cross_entropy(place.put(logits, dtype), targets))
    e = np.exp(1.0)
    np.testing.assert_allclose(loss, [np.log(1 + e), inf, np.log(2), np.log(4), inf], rtol=1e-3)
    assert lse[1] == -inf and np.isfinite(lse[[0, 2, 3, 4]]).all()
    p = 1 / (1 + e)
    wanted = [
        [0, p - 1, 1 - p, 0],
        [0, 0, 0, -1],
        [-0.5, 0.5, 0, 0],
        [0.25, 0.25, -0.75, 0.25],
        [-1, 1 / 3, 1 / 3, 1 / 3],
    ]
    np.testing.assert_allclose(dlogits.astype(np.float32), wanted, atol=4e-3)
    bad = logits.copy()
    bad[0, 2] = np.nan
    assert np.isnan(place.get(kit.cross_entropy(place.put(bad, dtype), targets)[0])[0])


def test_any_number_can_be_the_ignored_one(place: Place) -> None:
    """A class of its own (2), whose rows are 0, while its column still counts for the others."""
    logits, targets = normal(5, 4, 6), np.array([2, 0, 5, 2], np.int32)
    found = kit.cross_entropy(place.put(logits), whole(place, targets), ignore_index=2)
    for x, exact in zip(found, formula(logits.astype(np.float64), targets, 0.0, 1.0, 2), strict=True):
        np.testing.assert_allclose(place.get(x), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", [-1, 6, 2**40 + 1])
def test_a_target_that_is_none_is_never_silent(place: Place, monkeypatch: pytest.MonkeyPatch, target: int) -> None:
    """Where targets are not looked at beforehand, as on a GPU: the row is NaN, and nothing else is touched."""
    monkeypatch.setattr(sys.modules["ptxtrain.engine.kit.cross_entropy"], "_check_targets", lambda *_: None)
    targets = whole(place, np.array([1, target, 5], np.int64))
    loss, lse, dlogits = (place.get(x) for x in kit.cross_entropy(place.put(normal(5, 3, 6)), targets))
    assert np.isnan(loss).tolist() == [False, True, False] and np.isfinite(lse).all()
    assert np.isnan(dlogits[1]).all() and np.isfinite(dlogits[[0, 2]]).all()


def test_against_pytorch() -> None:
    """cross_entropy of PyTorch with its own ignored index and int64 targets."""
    torch = pytest.importorskip("torch")
    logits, targets = torch.randn(9, 50), torch.randint(0, 50, (9,))
    targets[3] = -100
    loss, _, dlogits = kit.cross_entropy(logits, targets, scale=1 / 8)
    leaf = logits.clone().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(leaf, targets)
    wanted.backward()
    torch.testing.assert_close(loss.sum() / 8, wanted.detach())
    torch.testing.assert_close(dlogits, leaf.grad)


def test_contract() -> None:
    logits, targets = np.zeros((3, 5), np.float32), np.array([0, 4, -100], np.int32)
    with pytest.raises(kit.ContractError, match="targets: expected 0 to 4, or -100 to ignore a row, got 5 in row 1"):
        kit.cross_entropy(logits, np.array([0, 5, 1], np.int64))
    with pytest.raises(kit.ContractError, match="targets: expected 0 to 4, or 2 to ignore a row, got -100 in row 2"):
        kit.cross_entropy(logits, targets, ignore_index=2)
    with pytest.raises(kit.ContractError, match="targets: expected dtype i32 or i64, got f32"):
        kit.cross_entropy(logits, np.zeros(3, np.float32))
    with pytest.raises(kit.ContractError, match=r"targets: expected shape \(\.\.\.,\) = \(3,\), got \(4,\)"):
        kit.cross_entropy(logits, np.zeros(4, np.int32))
    with pytest.raises(kit.ContractError, match="dlogits: expected None without gradient, got an array"):
        kit.cross_entropy(logits, targets, gradient=False, dlogits=logits)
    with pytest.raises(kit.ContractError, match="z_loss: expected a finite number of at least 0, got -1"):
        kit.cross_entropy(logits, targets, z_loss=-1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_checked(checked_place: Place, dtype: str) -> None:
    given = checked_place.put(rounded(normal(1, 3, 300), dtype), dtype)
    kit.cross_entropy(given, np.array([0, 299, -100], np.int32), dlogits=given)
