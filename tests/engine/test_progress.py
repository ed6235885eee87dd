"""Rates, the bounded curve and when to save."""

from __future__ import annotations

import time

import pytest

from ptxtrain.engine.progress import Cadence, Curve, Meter, draw_curve


def test_rates_and_time_left() -> None:
    meter = Meter(tokens=1000, flops_token=10, steps=10)
    assert meter.step_seconds is None
    meter.report(1, 5.0, 1.0, 0.1, 0.5, 0.0)
    report = meter.report(2, 4.0, 1.0, 0.1, 1.5, 0.2)
    assert meter.step_seconds == 1.0
    assert (report.tokens_per_second, report.flops_per_second, report.eta) == (1000, 10_000, 8.0)
    assert (report.seconds, report.device_wait) == (1.5, 0.2)


def test_a_slow_first_step_does_not_spoil_the_rate() -> None:
    meter = Meter(tokens=1000, flops_token=1, steps=10)
    meter.report(1, 5.0, 1.0, 0.1, 60.0, 0.0)
    assert meter.report(2, 5.0, 1.0, 0.1, 1.0, 0.0).tokens_per_second == 1000


def test_the_window_forgets() -> None:
    meter = Meter(tokens=1, flops_token=1, steps=100, window=3)
    for step, seconds in enumerate([9.0, 8.0, 7.0, 1.0, 1.0, 1.0], 1):
        meter.report(step, 5.0, 1.0, 0.1, seconds, 0.0)
    assert meter.step_seconds == 1.0


@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000, 12_345])
def test_the_curve_keeps_few_points_and_their_mean(count: int) -> None:
    curve = Curve(limit=64)
    for i in range(count):
        curve.add(float(i))
    points = curve.points(40)
    assert len(points) <= 40
    assert points == sorted(points)
    assert points[0] <= count / 20 + 1
    assert points[-1] >= count - 1 - count / 20 - 1
    if count <= 40:
        assert points == [float(i) for i in range(count)]


def test_the_curve_is_drawn_from_bottom_to_top() -> None:
    assert draw_curve([0, 1, 2], rows=2) == [" ▁█", "▁█" + "█"]
    assert draw_curve([3, 3], rows=2) == ["  ", "▁▁"]
    assert draw_curve([], rows=3) == ["", "", ""]


def test_saving_by_steps_and_by_the_clock() -> None:
    steps = Cadence(steps=10)
    assert [step for step in range(1, 31) if steps.due(step)] == [10, 20, 30]
    clock = Cadence(seconds=0.05)
    assert not clock.due(1)
    time.sleep(0.06)
    assert clock.due(2)
    clock.saved()
    assert not clock.due(3)
    assert not any(Cadence().due(step) for step in range(1, 100))
