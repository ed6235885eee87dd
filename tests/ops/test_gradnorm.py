"""The gradient's norm and the clip factor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from opbench import Bench, normal, run

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import gradnorm, scalars

ELEMENTS = 2048  # of a part


def compute(device: Device, grads: np.ndarray, clip: float, loss: float = 1.0) -> np.ndarray:
    count = len(grads)

    def record(rec: Recorder, b: Bench) -> None:
        numbers = b.put(np.full(scalars.COUNT, 7.0), name="scalars")
        partial = b.empty("partial", (gradnorm.parts(count),))
        gradnorm.compute(rec, numbers, partial, b.put(grads), b.put(np.full(1, loss)), count=count, clip=clip)

    found = run(device, record)
    with np.errstate(over="ignore"):
        assert np.isfinite(found["partial"]).all() == np.isfinite(grads * grads).all()
    return found["scalars"]


@pytest.mark.parametrize("count", [1, 31, ELEMENTS, ELEMENTS + 1, 40 * ELEMENTS + 5])
def test_norm_and_clip(device: Device, count: int) -> None:
    grads = normal(np.random.default_rng(count), count)
    exact = math.sqrt((grads.astype(np.float64) ** 2).sum())
    out = compute(device, grads, 0.5)
    # Chains of 64 and of ceil(parts / 32) squares, then two butterflies of 5: the square root halves the relative error.
    assert abs(out[scalars.GRAD_NORM] - exact) <= (64 + 2 + 10) / 2 * 2.0**-24 * exact
    assert out[scalars.CLIP] == min(np.float32(1), np.float32(0.5) / out[scalars.GRAD_NORM])
    kept = [i for i in range(scalars.COUNT) if i not in (scalars.GRAD_NORM, scalars.CLIP)]
    assert (out[kept] == 7).all()


def test_clip_leaves_small_gradients_alone(device: Device) -> None:
    grads = np.array([3.0, 4.0], np.float32)
    assert compute(device, grads, 6.0)[[scalars.GRAD_NORM, scalars.CLIP]].tolist() == [5.0, 1.0]
    assert compute(device, grads, 2.5)[[scalars.GRAD_NORM, scalars.CLIP]].tolist() == [5.0, 0.5]
    assert compute(device, grads, 0.0)[[scalars.GRAD_NORM, scalars.CLIP]].tolist() == [5.0, 1.0]
    assert compute(device, np.zeros(5, np.float32), 1.0)[[scalars.GRAD_NORM, scalars.CLIP]].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e19])
def test_bad_gradients_show_in_the_norm(device: Device, bad: float, clip: float) -> None:
    """3e19 is finite, its square is not: such a norm would clip everything to 0."""
    grads = np.ones(5000, np.float32)
    grads[4321] = bad
    out = compute(device, grads, clip)
    assert not np.isfinite(out[scalars.GRAD_NORM]) and np.isnan(out[scalars.CLIP])


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_loss_stops_the_update_though_every_gradient_is_finite(device: Device, bad: float, clip: float) -> None:
    """A target whose probability has underflowed to 0: its loss is infinite, its gradient is -1."""
    out = compute(device, np.ones(5000, np.float32), clip, bad)
    assert out[scalars.GRAD_NORM] == np.float32(np.sqrt(5000)) and np.isnan(out[scalars.CLIP])
    assert np.isfinite(compute(device, np.ones(5000, np.float32), clip, -3e38)[scalars.CLIP])
