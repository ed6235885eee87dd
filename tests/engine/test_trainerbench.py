"""What the training loop costs, and that the bench that says so measures what it says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import modelbench as bench
import pytest

from ptxtrain.engine import trainerbench
from ptxtrain.engine.config import load_preset
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.step import TrainStep
from ptxtrain.engine.trainerbench import TrainerTimes


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    opened = CpuDevice()
    yield opened
    opened.close()


def _measured(device: CpuDevice, steps: int = 7) -> TrainerTimes:
    config = bench.config(bench.SHORT, 4, 2, 1)
    config = replace(config, train=replace(config.train, way="f32"))
    return trainerbench.measure(device, config, steps=steps, save_every=3)


def test_the_parts_of_a_step_are_told_apart(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten milliseconds put between the kernels show as no kernel and not as a wait for the host; put into the copy, in the copy
    and in what a save adds."""
    plain = _measured(device)
    assert plain.kernels is not None and 0 < plain.kernels < plain.step
    assert plain.saves == 3, "of steps 3, 6 and 9, which is the last"
    begin, snapshot = TrainStep.begin, TrainStep.begin_snapshot

    def slower(self: TrainStep, targets: int) -> None:
        device._put(lambda: time.sleep(0.01))
        begin(self, targets)

    def longer(self: TrainStep) -> object:
        device._put(lambda: time.sleep(0.03))
        return snapshot(self)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "begin", slower)
        patch.setattr(TrainStep, "begin_snapshot", longer)
        slow = _measured(device)
    assert slow.kernels is not None and slow.step - slow.kernels > 0.01
    assert slow.device_wait < 0.01
    assert slow.snapshot > 0.03 and slow.save_stall is not None and slow.save_stall > 0.025


def test_the_report_has_every_figure(device: CpuDevice) -> None:
    report = _measured(device).to_json()
    assert {"step_ms", "kernels_ms", "device_wait_ms", "snapshot_ms", "save_stall_ms", "overhead"} <= set(report)
    assert 0 < report["overhead"] < 1 and report["threads"] == device.threads


@pytest.mark.slow
def test_what_is_no_kernel_is_below_three_percent_of_a_step_of_tiny(device: CpuDevice) -> None:
    """The best of three: whoever shares the machine makes it worse, never better."""
    shares = [trainerbench.measure(device, load_preset("tiny"), steps=12).overhead or 1.0 for _ in range(3)]
    assert min(shares) < 0.03, shares
