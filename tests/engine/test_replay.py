"""Which steps a replay takes, and what it holds each of them against: the line made from the same state."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxtrain.engine import replay as module
from ptxtrain.engine.checkpoint import Snapshot
from ptxtrain.engine.config import load_preset
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.history import read_history
from ptxtrain.engine.metrics import Metrics
from ptxtrain.engine.replay import Mismatch, Replayed, describe, span, start_of
from ptxtrain.engine.rundir import RunInfo


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    return RunInfo(tmp_path, "0" * 32, "0", "", load_preset("tiny"), 3, {}, "", "cpu")


def with_steps(info: RunInfo, *steps: int) -> RunInfo:
    for step in steps:
        (info.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    return info


@pytest.mark.parametrize(
    ("steps", "asked", "found"),
    [
        ((5, 10, 12), (None, None), (10, 12)),
        ((5,), (None, None), (0, 5)),
        ((5, 10, 12), (None, 8), (5, 8)),
        ((5, 10, 12), (None, 5), (0, 5)),
        ((5, 10, 12), (5, None), (5, 12)),
        ((), (None, 3), (0, 3)),
        ((5, 10), (0, 99), (0, 99)),
    ],
)
def test_from_the_newest_checkpoint_before_the_last_step(
    info: RunInfo, steps: tuple[int, ...], asked: tuple[int | None, int | None], found: tuple[int, int]
) -> None:
    assert span(with_steps(info, *steps), *asked) == found


@pytest.mark.parametrize(
    ("steps", "asked", "says"),
    [
        ((), (None, None), "say with --to"),
        ((5, 10), (7, 9), "no checkpoint of step 7 to start from; it has 5, 10, and 0 needs none"),
        ((5, 10), (10, 10), "--from 10 is not before --to 10"),
        ((), (4, 9), "it has none"),
    ],
)
def test_what_cannot_be_replayed(
    info: RunInfo, steps: tuple[int, ...], asked: tuple[int | None, int | None], says: str
) -> None:
    with pytest.raises(PtxtrainError, match=says):
        span(with_steps(info, *steps), *asked)


def test_step_0_is_made_from_the_seed(info: RunInfo) -> None:
    first, again = start_of(info, 0), start_of(info, 0)
    other = start_of(dataclasses.replace(info, seed=4), 0)
    assert (first.step, first.position) == (0, (0, 0)) and not first.m.any()
    assert first.digest() == again.digest() != other.digest()


def lines(info: RunInfo, attempt_of: dict[int, list[dict[str, Any]]]) -> module._Comparer:
    """A comparer that starts at a state of step 0 with digest "s", on metrics of these attempts."""
    for values in attempt_of.values():
        with Metrics(info.metrics, pytest.fail) as metrics:
            for line in values:
                metrics.log(**line)
    start = Snapshot(0, *(np.zeros(3, np.float32) for _ in range(3)), position=(0, 0))
    comparer = module._Comparer(read_history(info.metrics), start)
    comparer._before = "s"
    return comparer


def step(number: int, digest: str, loss: float = 2.0) -> dict[str, Any]:
    return {"step": number, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "digest": digest}


def test_each_number_counts_and_the_first_that_differs_is_named(info: RunInfo) -> None:
    comparer = lines(info, {1: [{"begins_after": 0, "digest": "s"}, step(1, "a"), step(2, "b")]})
    comparer.line(**step(1, "a"), seconds=3.0)
    comparer.line(step=1, validation_loss=3.0)
    assert comparer.compared == 1
    with pytest.raises(Mismatch, match=r"step 2 .*: loss is 2.0000000000000004 \(0x1.0000000000001p\+1\) here, 2.0 "):
        comparer.line(**step(2, "b", loss=math.nextafter(2, 3)))
    with pytest.raises(Mismatch, match=r"step 2 .*: digest is c here, b in the run"):
        comparer.line(**step(2, "c"))


def test_a_loss_that_was_not_finite_stands_in_the_metrics_as_null(info: RunInfo) -> None:
    comparer = lines(info, {1: [{"begins_after": 0, "digest": "s"}, step(1, "a", loss=math.nan)]})
    comparer.line(**step(1, "a", loss=math.inf))
    with pytest.raises(Mismatch, match=r"loss is 2.0 .* None in the run"):
        comparer.line(**step(1, "a"))


def test_of_two_attempts_the_one_from_the_same_state(info: RunInfo) -> None:
    """The newer one went on with other data that its user accepted: a replay of the older one is no mismatch."""
    first = [{"begins_after": 0, "digest": "s"}, step(1, "a"), step(2, "b")]
    comparer = lines(info, {1: first, 2: [{"begins_after": 1, "digest": "x"}, step(2, "y")]})
    comparer.line(**step(1, "a"))
    comparer.line(**step(2, "b"))
    comparer.line(**step(3, "z"))
    assert comparer.compared == 2, "nothing was written down about step 3"
    comparer._before = "x"
    comparer.line(**step(2, "y"))
    assert comparer.compared == 3


def test_the_result_in_words() -> None:
    assert describe(Replayed(3, 6, 2, "d" * 16, False), "runs/a") == [
        "replayed steps 3 to 6 of runs/a: 2 of 4 compared with its metrics, all to the bit",
        f"digest {'d' * 16}",
    ]
    assert describe(Replayed(3, 6, 4, "d" * 16, True), "runs/a")[1] == "the checkpoint of step 6 holds the same bits"
