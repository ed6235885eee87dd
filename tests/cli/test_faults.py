"""What goes wrong during a run: its exit code, its one line, and that the last good step is there to resume from."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import metrics, process, ptxtrain

from ptxtrain.engine import session
from ptxtrain.engine.config import load_preset
from ptxtrain.engine.durable import DISK, Call
from ptxtrain.engine.errors import DeviceError
from ptxtrain.engine.leaves import memory_plan
from ptxtrain.engine.step import TrainStep

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are sent with kill")


def _steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "ckpt").iterdir())


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_gradient_that_is_not_finite_ends_the_run_with_the_step_before_saved(
    value: float, preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["train", "--preset", preset, "--data", dataset]
    whole = ptxtrain(*argv, "--run", tmp_path / "whole")
    finish, bad = TrainStep.finish, np.full(1, value, np.float32)

    def poisoning(self: TrainStep, step: int, lr: float) -> Any:
        if step == 8:
            self.device.upload(self._stack[0].flat.buffer.view(400, 4), bad)
        return finish(self, step, lr)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "finish", poisoning)
        done = ptxtrain(*argv, "--run", run)
    assert done.code == 1
    assert "step 8: the loss is" in done.line and "step 7 is the newest saved" in done.line
    # 7 steps of 8 sequences of 16 tokens lie before it.
    assert f"8 sequences of 16 from token 896 of {dataset}/train-000000.tok" in done.line
    assert f"`ptxtrain inspect-batch {run} --step 8`" in done.line
    assert ptxtrain("resume", run).digest == whole.digest


def test_steps_that_are_not_finite_may_be_skipped_and_the_bits_survive_a_resume(
    preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, bad = TrainStep.finish, np.full(1, math.inf, np.float32)

    def poisoning(self: TrainStep, step: int, lr: float) -> Any:
        if step == 8:  # the loss alone: every gradient is finite
            self.device.upload(self._stack[0].loss, bad)
        return finish(self, step, lr)

    monkeypatch.setattr(TrainStep, "finish", poisoning)
    argv = ["train", "--preset", preset, "--data", dataset]
    whole = ptxtrain(*argv, "--run", tmp_path / "whole", "--skip-nonfinite", 1)
    assert whole.code == 0, whole.err
    assert "step 8: the loss is inf and the gradient norm " in whole.err and "(1 of 1 such steps)" in whole.err
    (line,) = [line for line in metrics(tmp_path / "whole") if line.get("skipped")]
    assert line["step"] == 8 and line["loss"] is None
    run = tmp_path / "run"
    stopped = ptxtrain(*argv, "--run", run)
    assert stopped.code == 1 and "Go on without it by --skip-nonfinite 1" in stopped.line
    resumed = ptxtrain("resume", run, "--skip-nonfinite", 1)
    assert (resumed.code, resumed.digest) == (0, whole.digest)
    again = ptxtrain("resume", shutil.copytree(tmp_path / "whole", tmp_path / "again"), "--step", 10)
    assert (again.code, again.digest) == (0, whole.digest)


@posix
def test_memory_that_is_short_halves_the_micro_batch_and_the_bits_stay(
    preset: Path, dataset: Path, tmp_path: Path
) -> None:
    argv = ["train", "--preset", preset, "--data", dataset]
    whole = ptxtrain(*argv, "--run", tmp_path / "whole")
    needs = {size: _memory(preset, size) for size in (2, 1)}
    assert needs[1] < needs[2]
    with process(*argv, "--run", tmp_path / "run", PTXTRAIN_MEMORY_LIMIT=str(needs[2] - 1)) as child:
        done = child.wait()
    assert (done.code, done.digest) == (0, whole.digest)
    assert "a micro-batch of 2 sequences does not fit" in done.err and "going on with 1" in done.err
    with process(*argv, "--run", tmp_path / "none", PTXTRAIN_MEMORY_LIMIT=str(needs[1] - 1)) as child:
        done = child.wait()
    assert done.code == 1 and f"({needs[1]:,} bytes) are needed" in done.line
    assert not (tmp_path / "none").exists(), "nothing is left of a run that could not begin"


def _memory(preset: Path, micro_batch: int) -> int:
    config = load_preset(str(preset), [f"micro_batch={micro_batch}"])
    return sum(memory_plan(config, config.train.way).values())


def test_a_disk_too_small_is_one_line_before_anything_is_made(
    preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 16))
    done = ptxtrain("train", "--preset", preset, "--data", dataset, "--run", run)
    assert done.code == 1 and "not enough disk" in done.line and "64.0 KiB are free" in done.line
    assert not run.exists()


def test_poisoned_weights_are_never_saved(
    preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = session.initial_weights

    def poisoned(*args: Any) -> np.ndarray:
        weights = made(*args)
        weights[3] = math.nan
        return weights

    monkeypatch.setattr(session, "initial_weights", poisoned)
    run = tmp_path / "run"
    done = ptxtrain("train", "--preset", preset, "--data", dataset, "--run", run)
    assert done.code == 3
    assert done.line.startswith("error: step 1: the loss is nan")
    assert "step 0 could not be saved: embedding[3] of step 0 is nan; nothing has been saved yet" in done.line
    assert _steps(run) == []


def test_a_device_that_fails_is_exit_4_and_the_last_save_carries_on(
    preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["train", "--preset", preset, "--data", dataset]
    whole = ptxtrain(*argv, "--run", tmp_path / "whole")
    finish = TrainStep.finish

    def failing(self: TrainStep, step: int, lr: float) -> Any:
        if step == 8:
            raise DeviceError("an illegal memory access was encountered")
        return finish(self, step, lr)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "finish", failing)
        done = ptxtrain(*argv, "--run", run)
    assert done.code == 4
    assert done.line.startswith("error: an illegal memory access was encountered; step 5 is the newest saved")
    resumed = ptxtrain("resume", run)
    assert (resumed.code, resumed.digest) == (0, whole.digest)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_save_that_fails_is_a_warning_and_the_last_one_exit_3(
    number: int, preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["train", "--preset", preset, "--data", dataset]
    whole = ptxtrain(*argv, "--run", tmp_path / "whole")

    def refuse(steps: tuple[int, ...]) -> Any:
        def hook(call: Call) -> int | None:
            if call.op == "write" and any(f".tmp-{step:08d}" in str(call.path) for step in steps):
                raise OSError(number, os.strerror(number), str(call.path))
            return None

        return hook

    monkeypatch.setattr(DISK, "hook", refuse((5,)))
    periodic = ptxtrain(*argv, "--run", tmp_path / "periodic")
    assert (periodic.code, periodic.digest) == (0, whole.digest)
    assert "step 5 was not saved" in periodic.err

    monkeypatch.setattr(DISK, "hook", refuse((12,)))
    run = tmp_path / "run"
    last = ptxtrain(*argv, "--run", run)
    assert last.code == 3
    assert "step 12 could not be saved" in last.line and "step 10 is the newest saved" in last.line
    monkeypatch.setattr(DISK, "hook", None)
    resumed = ptxtrain("resume", run)
    assert (resumed.code, resumed.digest) == (0, whole.digest)


def test_shards_that_change_stop_the_run_with_the_step_before_saved(
    preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ptxtrain.data.errors import DataError
    from ptxtrain.data.loader import Loader

    read, reads = Loader.read, iter(range(1000))

    def failing(self: Loader, sequences: int, *arrays: Any) -> None:
        if sequences == 8 and next(reads) == 6:
            raise DataError("train-000000.tok changed while in use")
        read(self, sequences, *arrays)

    argv = ["train", "--preset", preset, "--data", dataset]
    whole = ptxtrain(*argv, "--run", tmp_path / "whole")
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "read", failing)
        done = ptxtrain(*argv, "--run", run)
    assert done.code == 1
    assert done.line.startswith("error: train-000000.tok changed while in use; step 6 is the newest saved")
    assert ptxtrain("resume", run).digest == whole.digest


@posix
def test_streams_that_nobody_reads_change_nothing(preset: Path, dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["train", "--preset", preset, "--data", dataset, "--run", run]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "ptxtrain.cli", *map(str, argv)], stdout=writing, stderr=writing, timeout=120
    )
    os.close(writing)
    assert done.returncode == 0
    assert "step-00000012" in _steps(run)


@posix
def test_three_signals_leave_at_once_with_3(preset: Path, dataset: Path, tmp_path: Path) -> None:
    """A step that never ends: the device's thread is held in it by a stopped clock, so to say."""
    run = tmp_path / "run"
    hang = "import time; from ptxtrain.engine import step as s; s.TrainStep.snapshot = lambda self: time.sleep(600)"
    code = f"{hang}\nimport sys; from ptxtrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    argv = ["train", "--preset", preset, "--data", dataset, "--run", run]
    with process(*argv, launcher=("-c", code)) as child:
        child.until("step 1/12")
        child.send(signal.SIGINT)
        child.until("SIGINT: stopping")
        child.send(signal.SIGINT)
        child.until("once more leaves at once")
        child.send(signal.SIGTERM)
        done = child.wait(20)
    assert done.code == 3
    assert "SIGTERM, the third signal: left at once; nothing has been saved yet" in done.err


def test_a_device_that_does_not_hold_what_it_was_sent_is_exit_4(
    preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that loses a bit of an upload is found before the first step, and the checkpoint is as it was."""
    run, load = tmp_path / "run", TrainStep.load
    assert ptxtrain("train", "--preset", preset, "--data", dataset, "--run", run).code == 0

    def losing(self: TrainStep, params: np.ndarray, m: np.ndarray, v: np.ndarray) -> None:
        bad = m.copy()
        bad.view(np.uint32)[77] ^= np.uint32(1 << 20)
        load(self, params, bad, v)

    monkeypatch.setattr(TrainStep, "load", losing)
    done = ptxtrain("resume", run, "--steps", 14)
    assert done.code == 4 and "the device does not hold step 12 as it was sent" in done.line
    monkeypatch.undo()
    assert ptxtrain("resume", run, "--steps", 14).code == 0


def test_a_copy_that_differs_from_the_device_is_not_saved(
    preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit lost on the way back from the device: the save is refused, the older ones and the run go on."""
    from ptxtrain.engine.step import StateCopy

    whole = ptxtrain("train", "--preset", preset, "--data", dataset, "--run", tmp_path / "whole")
    wait, copies = StateCopy.wait, iter(range(100))

    def losing(self: StateCopy) -> Any:
        params, m, v = wait(self)
        if next(copies) == 1:
            v.view(np.uint32)[5] ^= np.uint32(1)
        return params, m, v

    monkeypatch.setattr(StateCopy, "wait", losing)
    run = tmp_path / "run"
    done = ptxtrain("train", "--preset", preset, "--data", dataset, "--run", run)
    assert (done.code, done.digest) == (0, whole.digest)
    assert "step 10 was not saved: its bits on the host have the sum" in done.err
    assert _steps(run) == ["step-00000005", "step-00000012"]
