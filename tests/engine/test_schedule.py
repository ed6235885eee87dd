from __future__ import annotations

import math
from itertools import pairwise

import pytest

from ptxtrain.engine.config import OptimizerConfig
from ptxtrain.engine.schedule import bias_corrections, lr


def curve(steps: int, **values: object) -> list[float]:
    optimizer = OptimizerConfig(**{"lr": 2e-3, "warmup_steps": 10, **values})  # type: ignore[arg-type]
    return [lr(step, optimizer, steps) for step in range(1, steps + 1)]


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    for schedule in ("cosine", "linear", "constant", "wsd"):
        rates = curve(100, schedule=schedule)
        assert rates[:10] == [2e-3 * step / 10 for step in range(1, 11)]
        assert max(rates) == rates[9] == 2e-3


def test_cosine_ends_at_the_ratio_and_is_half_way_in_the_middle() -> None:
    rates = curve(110, schedule="cosine")
    assert rates[-1] == pytest.approx(2e-4, rel=1e-12)
    assert rates[10 + 50 - 1] == pytest.approx((2e-3 + 2e-4) / 2, rel=1e-12)
    assert rates[10 + 25 - 1] == pytest.approx(2e-3 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), rel=1e-12)
    assert all(a > b for a, b in pairwise(rates[9:]))


def test_linear_falls_by_equal_amounts() -> None:
    rates = curve(110, schedule="linear", min_lr_ratio=0.0)
    falls = [a - b for a, b in pairwise(rates[9:])]
    assert falls == pytest.approx([2e-5] * 100, rel=1e-9) and rates[-1] == pytest.approx(0.0, abs=1e-18)


def test_constant_stays() -> None:
    assert set(curve(50, schedule="constant")[9:]) == {2e-3}


def test_wsd_is_stable_then_decays_over_its_last_part() -> None:
    rates = curve(100, schedule="wsd", decay_ratio=0.2)
    assert set(rates[9:80]) == {2e-3}
    assert rates[80] == pytest.approx(2e-3 * (1 - 0.9 / 20)) and rates[-1] == pytest.approx(2e-4)


def test_wsd_without_decay_is_constant() -> None:
    assert set(curve(100, schedule="wsd", decay_ratio=0.0)[9:]) == {2e-3}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_run_shorter_than_its_warm_up_and_steps_past_the_end(schedule: str) -> None:
    assert curve(5, schedule=schedule) == [2e-3 * step / 10 for step in range(1, 6)]
    optimizer = OptimizerConfig(lr=2e-3, warmup_steps=10, schedule=schedule)
    assert lr(11, optimizer, 10) == lr(1000, optimizer, 10) == pytest.approx(2e-4)


def test_bias_corrections() -> None:
    optimizer = OptimizerConfig(lr=1e-3, beta1=0.9, beta2=0.95)
    assert bias_corrections(1, optimizer) == (1 - 0.9, 1 - 0.95)
    first, second = bias_corrections(3, optimizer)
    assert first == pytest.approx(0.271) and second == pytest.approx(1 - 0.857375)
    assert bias_corrections(10_000, optimizer) == (1.0, 1.0)


def test_steps_count_from_one() -> None:
    optimizer = OptimizerConfig(lr=1e-3)
    with pytest.raises(ValueError, match="count from 1"):
        lr(0, optimizer, 10)
    with pytest.raises(ValueError, match="count from 1"):
        bias_corrections(0, optimizer)
