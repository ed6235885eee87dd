"""`diff` of real runs: equal ones, ones with another setting, and damage."""

from __future__ import annotations

import json
from pathlib import Path

from runs import Done, ptxtrain


def test_a_resumed_run_is_equal_to_the_undisturbed_one(copy: Path, finished: tuple[Path, Done]) -> None:
    assert ptxtrain("resume", copy, "--step", 5, "--set", "batch.micro_batch=1").code == 0
    done = ptxtrain("diff", finished[0], copy)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "metrics of steps 1 to 12: the same", "checkpoints of steps 5, 10, 12: the same bits",
    ]  # fmt: skip
    one = ptxtrain("diff", copy / "ckpt/step-00000012", finished[0])
    assert one.code == 0 and finished[1].digest in one.out


def test_another_setting_is_named_with_the_first_step_and_number(
    preset: Path, dataset: Path, finished: tuple[Path, Done], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = ["train", "--preset", preset, "--data", dataset, "--run", run, "--set", "optimizer.weight_decay=0.2"]
    assert ptxtrain(*argv).code == 0
    done = ptxtrain("diff", finished[0], run)
    assert done.code == 1
    assert "config: optimizer.weight_decay is 0.1 | 0.2" in done.out
    assert "differ first in step 1: digest is" in done.line, "the loss of step 1 is not touched by its own update"
    assert "checkpoint, step 5: embedding[0, 0] is " in done.out
    report = json.loads(ptxtrain("diff", finished[0], run, "--json").out)
    assert report["equal"] is False and report["first"].startswith("step 1: digest is")
    steps = ptxtrain("diff", run / "ckpt/step-00000005", run / "ckpt/step-00000010")
    assert steps.code == 1 and "steps 5 | 10: embedding[0, 0] is " in steps.line


def test_models_and_paths_that_do_not_compare_are_one_line(
    preset: Path, dataset: Path, finished: tuple[Path, Done], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = ["train", "--preset", preset, "--data", dataset, "--run", run, "--set", "model.mlp_width=48", "--steps", 1]
    assert ptxtrain(*argv).code == 0
    assert "the models have tensors of other shapes" in ptxtrain("diff", finished[0], run).line
    assert "does not exist" in ptxtrain("diff", finished[0], tmp_path / "nowhere").line
