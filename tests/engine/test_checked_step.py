"""Whole steps in checked mode: every kernel that ships is clean, and leaves the bits that it leaves unchecked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import modelbench as bench
import numpy as np
import pytest

from ptxtrain.engine import gradcheck
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.step import TrainStep

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:7"])
@pytest.mark.parametrize("way", ["f32", "bf16", "fast"])
def test_a_step_is_clean_in_every_order(way: str, schedule: str, checked_device: CpuDevice) -> None:
    model = bench.fit(bench.LONG if schedule == "forward" else bench.SHORT, way)
    tokens, targets = bench.batch(model, 4)
    flat = bench.weights(model)
    config = bench.config(model, 4, 2, 2)
    checked_device.reorder(schedule)
    try:
        checked = bench.one_step(checked_device, config, way, flat, tokens, targets)
    finally:
        checked_device.reorder("forward")
    plain = bench.one_step(CpuDevice(checked=False), config, way, flat, tokens, targets)
    assert plain.loss == checked.loss and plain.grad_norm == checked.grad_norm
    assert plain.gradient.tobytes() == checked.gradient.tobytes()
    assert plain.params.tobytes() == checked.params.tobytes()


@pytest.mark.parametrize("way", ["f32", "fast"])
def test_evaluation_and_sampling_are_clean(way: str, checked_device: CpuDevice) -> None:
    model = bench.fit(bench.SHORT, way)
    tokens, targets = bench.batch(model, 2)
    results = []
    devices: tuple[Device, ...] = (CpuDevice(checked=False), checked_device)
    for device in devices:
        step = TrainStep(bench.config(model, 2, 2, 1), device, way=way)
        bench.load(step, bench.weights(model))
        results.append((step.evaluate(tokens, targets), step.logits(tokens[:1, :5]).tobytes()))
    assert results[0] == results[1]


def test_the_gradient_check_passes_checked(checked_device: CpuDevice) -> None:
    assert gradcheck.run(checked_device).to_json() == gradcheck.run(CpuDevice(checked=False)).to_json()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["1", "reverse", "random:3"])
def test_every_op_test_passes_checked(order: str) -> None:
    """All shapes of all ops, against float64 too. Edited kernels are left out: what they do wrong is found, as it should be."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/ops", "-m", "not slow", "-k", "not mutants and not cuda"],
        cwd=ROOT, env={**os.environ, "PTXTRAIN_CHECKED": order}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert np.char.find(done.stdout, " passed") > 0
