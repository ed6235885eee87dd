"""AdamW against float64 over several steps, with and without decay and bf16 copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, normal, rounded, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import adamw, scalars

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8
Float = npt.NDArray[Any]


def numbers(step: int) -> Float:
    out = np.full(scalars.COUNT, np.nan, np.float32)
    out[scalars.LR], out[scalars.CLIP] = 1e-2, 0.25
    out[scalars.BIAS1], out[scalars.BIAS2] = 1 - BETA1**step, 1 - BETA2**step
    return out


def formula(x: Float, m: Float, v: Float, grads: Float, table: Float, decay: float) -> tuple[Float, Float, Float]:
    """One update, in the precision of x, from the numbers that the kernel is given."""
    kind = x.dtype.type
    beta1, beta2, eps, rate = (kind(np.float32(n)) for n in (BETA1, BETA2, EPS, decay))
    lr, bias1, bias2, clip = (kind(table[i]) for i in (scalars.LR, scalars.BIAS1, scalars.BIAS2, scalars.CLIP))
    g = grads * clip
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return x - lr * ((m / bias1) / (np.sqrt(v / bias2) + eps) + rate * x), m, v


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("count", [1, 97, 1000])
def test_update(device: Device, count: int, decay: float, step: int) -> None:
    rng = np.random.default_rng(count)
    x, m, grads = normal(rng, count), normal(rng, count, scale=0.1), normal(rng, count)
    v = np.abs(normal(rng, count, scale=0.1))
    table = numbers(step)

    def record(rec: Recorder, b: Bench) -> None:
        state = (b.put(x, name="x"), b.put(m, name="m"), b.put(v, name="v"))
        copy = b.empty("copy", (count,), "bf16")
        constants = {"beta1": BETA1, "beta2": BETA2, "eps": EPS, "decay": decay}
        adamw.update(rec, *state, copy, b.put(grads), b.put(table), count=count, **constants)

    found = run(device, record)
    wide = [a.astype(np.float64) for a in (x, m, v, grads)]
    exact, same = formula(*wide, table, decay), formula(x, m, v, grads, table, decay)
    for name, truth, own in zip("xmv", exact, same, strict=True):
        check(f"adamw.update {name} count {count} decay {decay} step {step}", found[name], truth, own)
    same_bits("adamw.update copy", found["copy"], rounded(found["x"], "bf16"))


def test_without_a_copy(device: Device) -> None:
    x = normal(np.random.default_rng(1), 300)

    def record(rec: Recorder, b: Bench) -> None:
        zeros = np.zeros(300)
        state = (b.put(x, name="x"), b.put(zeros, name="m"), b.put(zeros, name="v"))
        constants = {"beta1": BETA1, "beta2": BETA2, "eps": EPS, "decay": 0.5}
        adamw.update(rec, *state, None, b.put(zeros), b.put(numbers(1)), count=300, **constants)

    found = run(device, record)  # no gradient: only the decay acts
    check("decay alone", found["x"], x.astype(np.float64) * (1 - np.float32(1e-2) * 0.5), x * np.float32(0.995))
    assert not found["m"].any() and not found["v"].any()


def test_a_bad_norm_changes_nothing(device: Device) -> None:
    """A clip factor of NaN: weights, m, v and the copies keep their bits, whatever the gradient is."""
    rng = np.random.default_rng(2)
    x, m, v, copy = (normal(rng, 300, dtype="bf16") for _ in range(4))
    grads = normal(rng, 300)
    grads[7], grads[8] = np.inf, np.nan
    table = numbers(1)
    table[scalars.CLIP] = np.nan

    def record(rec: Recorder, b: Bench) -> None:
        state = (b.put(x, name="x"), b.put(m, name="m"), b.put(v, name="v"), b.put(copy, "bf16", "copy"))
        constants = {"beta1": BETA1, "beta2": BETA2, "eps": EPS, "decay": 0.1}
        adamw.update(rec, *state, b.put(grads), b.put(table), count=300, **constants)

    found = run(device, record)
    for name, before in (("x", x), ("m", m), ("v", v), ("copy", copy)):
        same_bits(f"adamw.update {name}", found[name], before)
