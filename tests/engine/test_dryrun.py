"""What a dry run says: that each figure is what a run then takes, and that the time follows from what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import modelbench as bench
import numpy as np
import pytest
from statebench import make_run

from ptxtrain.engine import dryrun
from ptxtrain.engine.checkpoint import Saver, Snapshot, step_name
from ptxtrain.engine.config import Config, load_preset
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import OutOfMemory
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.step import TrainStep


def small(**train: object) -> Config:
    base = bench.config(bench.SHORT, 8, 2, 2)
    return replace(base, train=replace(base.train, way="f32", **train))  # type: ignore[arg-type]


def test_the_dev_preset_is_what_the_design_says() -> None:
    needs = dryrun.describe(load_preset("dev"))
    assert needs["parameters"] == 22_025_088
    assert needs["tokens_per_step"] == 131_072 and needs["tokens"] == 7630 * 131_072
    assert needs["flops_per_token"] == 6 * 22_025_088 + 6 * 6 * 6 * 64 * 512
    assert needs["flops"] == needs["flops_per_token"] * needs["tokens"]
    assert needs["memory"]["weights"] == 4 * 22_025_088 and needs["memory"]["optimizer"] == 8 * 22_025_088
    assert needs["memory"]["logits"] == 8 * 512 * 32768 * 2, "eight sequences at a time, below 256 MiB"
    assert needs["memory"]["leaves"] == 4 * (4 * (22_025_088 + 1) + 32768 * 384), "log2(8) + 1 gradients"


def test_memory_is_what_a_step_takes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    alloc: Callable[[int], object] = device.alloc

    def counted(nbytes: int) -> object:
        nonlocal taken
        taken += nbytes
        return alloc(nbytes)

    monkeypatch.setattr(device, "alloc", counted)
    TrainStep(small(), device)
    memory = dryrun.describe(small())["memory"]
    assert memory["total"] == taken == sum(size for kind, size in memory.items() if kind != "total")


def test_a_checkpoint_takes_the_bytes_that_were_said(tmp_path: Path) -> None:
    config = small()
    table = parameter_table(config.model)
    zero = np.zeros(dryrun.describe(config)["parameters"], np.float32)
    with make_run(tmp_path) as run:
        saver = Saver(run, table, announce=lambda text: None)
        saver.submit(Snapshot(1, zero, zero, zero, (0, 0)))
        saver.wait()
        files = [path.stat().st_size for path in (run.info.checkpoints / step_name(1)).iterdir()]
    said = dryrun.describe(config)["checkpoint_bytes"]
    assert said - 4096 <= sum(files) <= said, "the manifest is counted as 4 KiB"


def test_warm_up_is_told_in_steps_however_it_was_given() -> None:
    assert dryrun.describe(load_preset("tiny"))["warmup_steps"] == 20
    assert dryrun.describe(load_preset("tiny", ["warmup_steps=0", "warmup_tokens=100000"]))["warmup_steps"] == 25


def test_the_time_is_reckoned_from_what_was_measured(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of two take 20 ms each here and the update 5: four of them and one update make a step."""
    finish, micro_batch = TrainStep.finish, TrainStep.micro_batch
    if device.kind != "cpu":
        pytest.skip("work is put on the CPU device's queue by hand")

    def slower(self: TrainStep, *args: object) -> None:
        device._put(lambda: time.sleep(0.02))  # type: ignore[attr-defined]
        micro_batch(self, *args)  # type: ignore[arg-type]

    def slow(self: TrainStep, *args: object) -> object:
        device._put(lambda: time.sleep(0.005))  # type: ignore[attr-defined]
        return finish(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainStep, "micro_batch", slower)
    monkeypatch.setattr(TrainStep, "finish", slow)
    found = dryrun.estimate(small(steps=50), device)
    assert found.sequences == 2 and found.micro_batch_seconds >= 0.02 and found.update_seconds >= 0.005
    assert found.step_seconds == pytest.approx(4 * found.micro_batch_seconds + found.update_seconds)
    assert found.seconds == pytest.approx(50 * found.step_seconds)
    assert found.tokens_per_second == pytest.approx(8 * 11 / found.step_seconds)
    assert found.device == device.name


def test_a_cpu_measures_fewer_sequences_where_they_take_long(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.kind != "cpu":
        pytest.skip("a GPU measures a whole micro-batch")
    assert dryrun._measured_sequences(load_preset("tiny"), device) == 8
    monkeypatch.setattr(device, "threads", 2)
    assert dryrun._measured_sequences(load_preset("dev"), device) == 2, "of 32; 71 GFLOP a sequence"
    monkeypatch.setattr(device, "threads", 1000)
    assert dryrun._measured_sequences(load_preset("dev"), device) == 32


def test_memory_that_is_short_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, open_device_for_test: Callable[[str], Device]
) -> None:
    monkeypatch.setenv("PTXTRAIN_MEMORY_LIMIT", "10K")
    with pytest.raises(OutOfMemory):
        dryrun.estimate(small(), open_device_for_test("cpu"))
