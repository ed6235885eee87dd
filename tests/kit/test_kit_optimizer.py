"""AdamW of the kit against float64, at its edges, and its rounding by chance against Philox in NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kitbench import FLOATS, Float, Place, check, normal, rounded

from ptxtrain.engine import kit, philox
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.ops import adamw

NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def corrections(step: int) -> dict[str, float]:
    return {"bc1": 1 - 0.9**step, "bc2": 1 - 0.95**step}


def formula(x: Float, m: Float, v: Float, grads: Float, step: int, scale: float = 1.0) -> tuple[Float, Float, Float]:
    """One update in the precision of x, from the numbers as f32."""
    kind = x.dtype.type
    lr, beta1, beta2, eps, decay = (kind(np.float32(n)) for n in NUMBERS.values())
    bc1, bc2 = (kind(np.float32(n)) for n in corrections(step).values())
    g = grads.astype(x.dtype) * kind(np.float32(scale))
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return x - lr * ((m / bc1) / (np.sqrt(v / bc2) + eps) + decay * x), m, v


def state(count: int, grads_dtype: str = "f32") -> tuple[Float, Float, Float, Float]:
    x, m, grads = normal(1, count), normal(2, count, scale=0.1), normal(3, count, dtype=grads_dtype)
    return x, m, np.abs(normal(4, count, scale=0.1)), grads


@pytest.mark.parametrize("copy", [None, "f16", "bf16"])
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 97, 1000])
def test_step(place: Place, count: int, dtype: str, step: int, copy: str | None) -> None:
    x, m, v, grads = state(count, dtype)
    found = []
    for _ in range(2):
        given = [place.put(a) for a in (x, m, v)]
        kept = None if copy is None else place.empty((count,), copy)
        results = kit.adamw_step(
            *given, place.put(grads, dtype), **NUMBERS, **corrections(step), grad_scale=0.25, copy=kept
        )
        assert all(a is b for a, b in zip(results, given, strict=True))
        found.append([place.get(a) for a in given])
    assert [a.tobytes() for a in found[0]] == [a.tobytes() for a in found[1]]
    exact = formula(*(a.astype(np.float64) for a in (x, m, v, grads)), step, 0.25)
    same = formula(x, m, v, grads, step, 0.25)
    for name, a, b, c in zip(("params", "m", "v"), found[0], exact, same, strict=True):
        check(f"adamw_step {name} {count} {dtype} step {step}", a, b, c)
    if copy is not None:
        assert place.get(kept).astype(np.float32).tobytes() == rounded(found[0][0], copy).tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_gradients_at_the_first_step(place: Place, dtype: str) -> None:
    """No NaN from 0 / (0 + eps): only the decay acts, and without it nothing changes."""
    x = normal(1, 70)
    for decay in (0.0, 0.1):
        given = [place.put(x), place.put(np.zeros(70)), place.put(np.zeros(70))]
        kit.adamw_step(*given, place.put(np.zeros(70), dtype), lr=1e-2, weight_decay=decay, **corrections(1))
        np.testing.assert_allclose(place.get(given[0]), x * (1 - 1e-2 * decay), rtol=1e-6)
        assert not place.get(given[1]).any() and not place.get(given[2]).any()


def test_the_first_step_moves_by_the_learning_rate(place: Place) -> None:
    """m / bc1 is g and sqrt(v / bc2) its size, whatever that is: 1e-12 or 1e12."""
    grads = np.array([1e-12, -1e-3, 1.0, -1e12], np.float32)
    given = [place.put(np.zeros(4)) for _ in range(3)]
    kit.adamw_step(*given, place.put(grads), lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-30, **corrections(1))
    np.testing.assert_allclose(place.get(given[0]), -1e-2 * np.sign(grads), rtol=1e-5)


def stochastic(x: Float, seed: int, step: int, stream: int) -> Float:
    """f32 rounded to bf16 by chance: of each 256 elements, the i-th has half i / 32 of counter i % 32 of Philox."""
    chances = np.empty(x.size, np.uint64)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    for i in range(x.size):
        words = philox.philox4x32([i // 256 * 32 + i % 32, stream, step, philox.ROUNDING], key)
        chances[i] = words[i % 256 // 64] >> (16 * (i // 32 % 2)) & 0xFFFF
    assert np.array_equal(chances, adamw.chance(seed, step, stream, x.size))
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64) + chances
    return (bits >> np.uint64(16)).astype(np.uint16).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 97, 1000])
def test_bf16_weights_are_rounded_by_philox(place: Place, count: int, dtype: str) -> None:
    """To the last bit: the f32 update of the same weights, then the generator's own bits."""
    x, m, v, grads = state(count, dtype)
    x = rounded(x, "bf16")
    seed, step, stream = (7 << 40) + 5, 3, 2
    given = [place.put(x, "bf16"), place.put(m), place.put(v)]
    exact = [place.put(a) for a in (x, m, v)]
    last = place.put(grads, dtype)
    kit.adamw_step(*given, last, **NUMBERS, **corrections(step), seed=seed, step=step, stream=stream)
    kit.adamw_step(*exact, last, **NUMBERS, **corrections(step))
    assert place.get(given[0]).tobytes() == stochastic(place.get(exact[0]), seed, step, stream).tobytes()
    for a, b in zip(given[1:], exact[1:], strict=True):
        assert place.get(a).tobytes() == place.get(b).tobytes()


def test_chance_is_fair_and_another_one_each_time(place: Place) -> None:
    """Updates of a hundredth of a rounding add up, which to the nearest they never would."""
    count, steps = 4096, 50
    ulp = 2.0**-7
    given = [place.put(np.ones(count), "bf16"), place.put(np.zeros(count)), place.put(np.zeros(count))]
    seen = []
    for step in range(1, steps + 1):
        kit.adamw_step(
            *given, place.put(-np.ones(count)), lr=ulp / 100, bc1=1.0, bc2=1.0, beta1=0.0, beta2=0.0, seed=1, step=step
        )
        seen.append(place.get(given[0]).tobytes())
    moved = (place.get(given[0]).astype(np.float64) - 1).mean() / ulp
    assert abs(moved - steps / 100) < 6 * np.sqrt(steps / 100 / count), moved
    assert len(set(seen)) == steps
    other = [place.put(np.ones(count), "bf16"), place.put(np.zeros(count)), place.put(np.zeros(count))]
    numbers: dict[str, Any] = {"lr": ulp / 2, "bc1": 1.0, "bc2": 1.0, "beta1": 0.0, "beta2": 0.0}
    results = set()
    for kind in (
        {"seed": 1, "step": 1},
        {"seed": 2, "step": 1},
        {"seed": 1, "step": 2},
        {"seed": 1, "step": 1, "stream": 1},
    ):
        again = place.put(np.ones(count), "bf16")
        kit.adamw_step(again, other[1], other[2], place.put(-np.ones(count)), **numbers, **kind)
        results.add(place.get(again).tobytes())
    assert len(results) == 4


def test_a_nan_stays_one_in_bf16(place: Place) -> None:
    """Its bits are not added to, which could make a number of it."""
    zeros = [place.put(np.zeros(4)) for _ in range(3)]
    bits = np.full(4, 0xFFFF, np.uint16).view(ml_dtypes.bfloat16)
    x_ = place.put(bits, "bf16")
    kit.adamw_step(x_, *zeros, lr=0.0, bc1=1.0, bc2=1.0, seed=1, step=1)
    assert np.isnan(place.get(x_).astype(np.float64)).all()
    all_ones = np.full(4, 0x7FFFFFFF, np.uint32).view(np.float32)  # what a GPU's arithmetic makes: one more would be -0
    x_ = place.put(np.ones(4), "bf16")
    kit.adamw_step(x_, place.put(all_ones), *zeros[1:], lr=1.0, bc1=1.0, bc2=1.0, seed=1, step=1)
    assert np.isnan(place.get(x_).astype(np.float64)).all()
    x_ = place.put([np.nan, -0.0, 1.0, -3e38], "bf16")
    kit.adamw_step(x_, *zeros, lr=0.0, bc1=1.0, bc2=1.0, seed=1, step=1)
    assert place.get(x_)[1:].tobytes() == rounded_bf16([-0.0, 1.0, -3e38]) and np.isnan(float(place.get(x_)[0]))


def rounded_bf16(x: list[float]) -> bytes:
    return np.array(x, ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_four_elements_a_thread_change_no_bit(place: Place, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU takes where it can, and the CPU device never: 16 bytes of f32 at a time."""
    x, m, v, grads = state(1028, dtype)
    found = []
    for width in (1, 4):
        monkeypatch.setattr(adamw, "vector", lambda *_, width=width: width)
        given = [place.put(x), place.put(m), place.put(v)]
        copies = [place.empty((1028,), copy) for copy in ("f16", "bf16")]
        for copy in copies:
            kit.adamw_step(*given, place.put(grads, dtype), **NUMBERS, **corrections(1), copy=copy)
        found.append([place.get(a).tobytes() for a in (*given, *copies)])
    assert found[0] == found[1]


def test_the_same_bits_at_any_number_of_threads() -> None:
    x, m, v, grads = state(3000)
    found = []
    for threads in (1, 3):
        device = CpuDevice(threads=threads)
        weights = x.astype(ml_dtypes.bfloat16)
        with kit.on(device):
            kit.adamw_step(weights, m.copy(), v.copy(), grads, **NUMBERS, **corrections(2), seed=1, step=2)
        device.close()
        found.append(weights.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bc1": 0.0}, "bc1: expected a finite number above 0 and at most 1, got 0.0"),
        ({"bc2": 1.5}, "bc2: expected a finite number above 0 and at most 1, got 1.5"),
        ({"eps": 0.0}, "eps: expected a finite number above 0, got 0.0"),
        ({"eps": 1e-60}, "eps: expected a number that f32 holds, got 1e-60"),
        ({"lr": float("nan")}, "lr: expected a finite number, got nan"),
        ({"weight_decay": -0.1}, "weight_decay: expected a finite number of at least 0, got -0.1"),
        ({"beta1": 1.1}, "beta1: expected a finite number of at least 0 and at most 1, got 1.1"),
    ],
)
def test_numbers_are_refused(changed: dict[str, float], said: str) -> None:
    x, m, v, grads = state(5)
    with pytest.raises(kit.ContractError) as caught:
        kit.adamw_step(x, m, v, grads, **{**NUMBERS, **corrections(1), **changed})  # type: ignore[arg-type]
    assert str(caught.value) == f"adamw_step: {said}"


def test_bf16_weights_need_a_seed_and_no_copy() -> None:
    x, m, v, grads = state(5)
    weights, copy = x.astype(ml_dtypes.bfloat16), x.astype(np.float16)
    numbers: dict[str, Any] = {"lr": 0.1, "bc1": 1.0, "bc2": 1.0}
    with pytest.raises(kit.ContractError, match=r"seed: expected an integer from 0 to 2\^64 - 1, .* got None"):
        kit.adamw_step(weights, m, v, grads, **numbers)
    with pytest.raises(kit.ContractError, match="copy: expected none beside bf16 params"):
        kit.adamw_step(weights, m, v, grads, **numbers, copy=copy, seed=1, step=1)
    with pytest.raises(kit.ContractError, match="params: expected dtype f32 or bf16, got f16"):
        kit.adamw_step(copy, m, v, grads, **numbers)


def test_in_checked_mode(checked_place: Place) -> None:
    for dtype in FLOATS:
        for count in (5, 300):
            x, m, v, grads = state(count, dtype)
            given = [checked_place.put(a) for a in (x, m, v)]
            copy, last = checked_place.empty((count,), "f16"), checked_place.put(grads, dtype)
            kit.adamw_step(*given, last, **NUMBERS, **corrections(1), copy=copy)
            given[0] = checked_place.put(x, "bf16")
            kit.adamw_step(*given, last, **NUMBERS, **corrections(1), seed=1, step=1)
