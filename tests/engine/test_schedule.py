from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxtrain.engine.config import OptimizerConfig, load_preset
from ptxtrain.engine.schedule import learning_rate, lr, warmup_steps

TOKENS = 4096  # in a step


def curve(steps: int, **values: object) -> list[float]:
    optimizer = OptimizerConfig(**{"lr": 2e-3, "warmup_steps": 10, **values})  # type: ignore[arg-type]
    return [lr(step, optimizer, steps, TOKENS) for step in range(1, steps + 1)]


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
    assert lr(11, optimizer, 10, TOKENS) == lr(1000, optimizer, 10, TOKENS) == pytest.approx(2e-4)


def test_warm_up_in_tokens_is_as_many_whole_steps_as_hold_them() -> None:
    assert curve(100, warmup_steps=0, warmup_tokens=10 * TOKENS) == curve(100)
    assert curve(100, warmup_steps=0, warmup_tokens=9 * TOKENS + 1) == curve(100)
    assert warmup_steps(OptimizerConfig(lr=1.0), TOKENS) == 0
    tiny = load_preset("tiny", ["warmup_steps=0", "warmup_tokens=40960"])
    assert [learning_rate(step, tiny) for step in (1, 10, 11)] == [1e-4, 1e-3, lr(11, tiny.optimizer, 300, 4096)]


@settings(deadline=None)
@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    st.integers(1, 10**6),
    st.integers(0, 2000),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 2 * 10**6),
)
def test_a_rate_depends_on_the_step_alone_and_stays_between_its_ends(
    schedule: str, steps: int, warmup: int, ratio: float, decay: float, step: int
) -> None:
    optimizer = OptimizerConfig(3e-4, schedule, warmup, min_lr_ratio=ratio, decay_ratio=decay)
    rate = lr(step, optimizer, steps, TOKENS)
    assert rate == lr(step, optimizer, steps, TOKENS) and isinstance(rate, float)
    low = 0.0 if step <= warmup else 3e-4 * ratio * (1 - 1e-12) - 1e-18  # 1 - (1 - r) rounds
    assert low <= rate <= 3e-4 * (1 + 1e-12)
    if step > warmup and step > 1:
        before = lr(step - 1, optimizer, steps, TOKENS)
        assert rate <= before * (1 + 1e-12) or step - 1 < warmup


def test_steps_count_from_one() -> None:
    optimizer = OptimizerConfig(lr=1e-3)
    with pytest.raises(ValueError, match="count from 1"):
        lr(0, optimizer, 10, TOKENS)
