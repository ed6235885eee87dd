"""`replay` on real runs: every step comes out again, what was changed is named, and the run is left as it was."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Done, metrics, process, ptxtrain

from ptxtrain.engine import numerics, preflight
from ptxtrain.engine.checkpoint import Saver, Snapshot, load
from ptxtrain.engine.ops import adamw
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.rundir import RunDirectory
from ptxtrain.engine.step import TrainStep


def _tree(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_steps_come_out_again_and_nothing_is_written(copy: Path, finished: tuple[Path, Done]) -> None:
    before = _tree(copy)
    newest = ptxtrain("replay", copy)
    assert newest.code == 0, newest.err
    assert newest.out.splitlines() == [
        f"replayed steps 11 to 12 of {copy}: 2 of 2 compared with its metrics, all to the bit",
        "the checkpoint of step 12 holds the same bits",
        f"digest {finished[1].digest}",
    ]
    whole = ptxtrain("replay", copy, "--from", 0, "--to", 12, "--set", "batch.micro_batch=1", "--threads", 1)
    assert whole.code == 0 and "steps 1 to 12" in whole.out and whole.digest == finished[1].digest
    part = ptxtrain("replay", copy, "--from", 5, "--to", 7, "--json")
    report = json.loads(part.out)
    assert (report["first"], report["last"], report["compared"], report["checkpoint"]) == (6, 7, 2, False)
    assert report["digest"] == next(line["digest"] for line in metrics(copy) if line.get("step") == 7)
    assert _tree(copy) == before


def _with_line(run: Path, step: int, **changed: Any) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for i, line in enumerate(lines):
        values = json.loads(line)
        if values.get("step") == step and "loss" in values:
            lines[i] = json.dumps({**values, **changed})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_number_that_the_run_did_not_make_is_named(copy: Path) -> None:
    loss = next(line["loss"] for line in metrics(copy) if line.get("step") == 8)
    wrong = float(np.nextafter(loss, 9))
    _with_line(copy, 8, loss=wrong)
    done = ptxtrain("replay", copy, "--from", 5, "--to", 10)
    assert done.code == 1
    assert (
        f"step 8 did not come out again: loss is {loss!r} ({loss.hex()}) here, {wrong!r} ({wrong.hex()}) in the run"
        in done.line
    )
    assert ptxtrain("replay", copy, "--from", 10, "--to", 12).code == 0


def test_a_device_that_flips_a_bit_is_caught_at_that_step(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one second moment, too small to show in any loss for long: the digest shows it at once."""
    finish = TrainStep.finish

    def flipping(self: TrainStep, step: int, lr: float) -> Any:
        if step == 7:
            word = self.device.read(self.v.view(400, 4), np.uint32, (1,))
            self.device.upload(self.v.view(400, 4), word ^ np.uint32(1))
            self.device.synchronize()
        return finish(self, step, lr)

    monkeypatch.setattr(TrainStep, "finish", flipping)
    done = ptxtrain("replay", copy, "--from", 5, "--to", 12)
    assert done.code == 1 and "step 7 did not come out again: digest is" in done.line


def test_another_optimizer_is_caught_at_the_first_step(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = adamw.update

    def wrong(*args: Any, **values: Any) -> None:
        real(*args, **{**values, "beta2": 0.951})

    monkeypatch.setattr(adamw, "update", wrong)
    assert "step 11 did not come out again: digest is" in ptxtrain("replay", copy).line


def test_a_checkpoint_that_is_not_the_steps_is_told_by_tensor_and_index(copy: Path) -> None:
    """Where the metrics of a step were lost, its checkpoint must do; one number of m in it is made another."""
    lines = [line for line in metrics(copy) if line.get("step") != 12]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "1 of 2 compared" in ptxtrain("replay", copy, "--from", 10, "--to", 12).out
    with RunDirectory.open(copy) as run:
        table = parameter_table(run.config.model)
        there = load(copy, table, step=12)
        m = there.m.copy()
        m[table[1].offset + 3] += 1
        shutil.rmtree(copy / "ckpt/step-00000012")
        saver = Saver(run, table, numerics_id=there.numerics_id, announce=lambda line: None)
        saver.submit(Snapshot(12, there.params, m, there.v, there.position, state=there.state))
        outcome = saver.wait()
        assert outcome is not None and outcome.saved
    done = ptxtrain("replay", copy, "--from", 10, "--to", 12)
    assert done.code == 1 and f"replayed | checkpoint: m.{table[1].name}[0, 3] is " in done.line
    assert f"1 of {3 * len(table)} tensors differ" in done.line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_with_1_and_the_run_as_it_was(copy: Path, number: signal.Signals) -> None:
    """Not 2, which says that something was saved: a replay saves nothing, and has not been passed."""
    before = _tree(copy)
    with process("replay", copy, "--from", 0, "--to", 1_000_000) as running:
        running.until("step 1/")
        running.send(number)
        done = running.wait(20)
    assert done.code == 1 and done.out == "" and done.err.rstrip().endswith("stopped") and "Traceback" not in done.err
    assert _tree(copy) == before


def test_too_little_memory_halves_the_micro_batch(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "missing", lambda config, device: "no" if config.batch.micro_batch > 1 else None)
    done = ptxtrain("replay", copy)
    assert done.code == 0 and "going on with 1, which gives the same bits" in done.err, done.err


def test_what_cannot_be_replayed_is_one_line(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "has no checkpoint of step 7 to start from; it has 5, 10, 12"
        in ptxtrain("replay", copy, "--from", 7, "--to", 9).line
    )
    assert "is not before" in ptxtrain("replay", copy, "--from", 10, "--to", 5).line
    assert "has no line of steps 13 to 14" in ptxtrain("replay", copy, "--from", 12, "--to", 14).line
    assert "would change the" in ptxtrain("replay", copy, "--set", "optimizer.lr=1").line
    monkeypatch.setattr(numerics, "numerics_id", lambda device: "cuda of another kind")
    refused = ptxtrain("replay", copy)
    assert refused.code == 1 and "--accept-kernels --accept-device" in refused.line
