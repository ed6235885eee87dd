"""The guards: what they say to a step's numbers, that a resumed run hears the same, and what the loop does about it."""

from __future__ import annotations

import json
import math

import modelbench as bench
import numpy as np
import pytest
from fake_training import CONTEXT, SEQUENCES, Run, config
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxtrain.engine.config import TrainConfig
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.guards import Guards
from ptxtrain.engine.step import TrainStep


def rules(**values: object) -> TrainConfig:
    return TrainConfig(steps=100, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("numbers", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_numbers_that_are_not_finite_are_refused_unless_some_may_be_skipped(numbers: tuple[float, float]) -> None:
    assert Guards(rules(), {}).look(*numbers).kind == "refuse"
    two = Guards(rules(skip_nonfinite=2), {})
    kinds = [two.look(*pair).kind for pair in (numbers, (1.0, 1.0), numbers, (1.0, 1.0), numbers)]
    assert kinds == ["skip", "fine", "skip", "fine", "refuse"]
    assert "2 such steps have been skipped already" in two.look(*numbers).why


def test_a_spike_is_told_from_the_losses_before_it() -> None:
    guards = Guards(rules(spike="stop", spike_window=8, spike_sigma=4.0), {})
    for loss in (2.0, 2.2, 2.0, 2.2, 2.0, 2.2, 2.0, 2.2):  # mean 2.1, standard deviation 0.1
        assert guards.look(loss, 1.0).kind == "fine"
    assert guards.look(2.499, 1.0).kind == "fine"
    verdict = Guards(rules(spike="stop", spike_window=8, spike_sigma=4.0), guards.state()).look(9.0, 1.0)
    assert verdict.kind == "stop" and "the loss 9.0000 is" in verdict.why and "of the 8 steps before it" in verdict.why


def test_a_spike_needs_half_a_window_and_a_least_spread_and_falls_never_count() -> None:
    guards = Guards(rules(spike="warn", spike_window=8, spike_sigma=4.0), {})
    assert [guards.look(loss, 1.0).kind for loss in (1.0, 9.0, 1.0, 1.0)] == ["fine"] * 4, "half a window is 4"
    assert guards.look(99.0, 1.0).kind == "warn"
    flat = Guards(rules(spike="warn", spike_window=8, spike_sigma=4.0), {"losses": [1.0] * 8})
    assert flat.look(1.0 + 4 * 0.01, 1.0).kind == "fine"
    assert flat.look(1.2, 1.0).kind == "warn"
    assert Guards(rules(spike="stop", spike_window=8), {"losses": [5.0] * 8}).look(0.1, 1.0).kind == "fine"
    assert Guards(rules(spike="off", spike_window=8), {"losses": [1.0] * 8}).look(50.0, 1.0).kind == "fine"


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.floats(0, 20), st.sampled_from([math.nan, math.inf])), max_size=60),
    st.integers(0, 60),
    st.integers(8, 20),
    st.integers(0, 3),
)
def test_a_resumed_run_judges_as_one_that_never_stopped(
    losses: list[float], cut: int, window: int, allowed: int
) -> None:
    train = rules(spike="warn", spike_window=window, spike_sigma=3.0, skip_nonfinite=allowed)
    whole, first = Guards(train, {}), Guards(train, {})
    said = [whole.look(loss, 1.0) for loss in losses]
    before = [first.look(loss, 1.0) for loss in losses[:cut]]
    second = Guards(train, json.loads(json.dumps(first.state(), allow_nan=False)))
    assert before + [second.look(loss, 1.0) for loss in losses[cut:]] == said
    assert second.state() == whole.state() and len(whole.state()["losses"]) <= window


@pytest.mark.parametrize("state", [{}, {"losses": "x", "skipped": "y"}, {"losses": [None, math.nan, 1], "skipped": -3}])
def test_a_state_that_holds_something_else_is_a_new_one(state: dict[str, object]) -> None:
    assert Guards(rules(), state).state()["skipped"] == 0


def test_the_device_leaves_the_weights_alone_when_only_the_loss_is_infinite(device: Device) -> None:
    """Every gradient is finite; the loss alone, poisoned behind the last micro-batch, must stop the update."""
    step = TrainStep(bench.config(bench.SHORT, 2, 1, 1), device, way="f32")
    flat = bench.weights(bench.SHORT)
    zero = np.zeros_like(flat)
    step.load(flat, zero, zero)
    bench.queue(step, *bench.batch(bench.SHORT, 2))
    bad = np.full(1, math.inf, np.float32)
    device.upload(step._stack[0].loss, bad)
    loss, norm = step.finish(1, 1e-3).wait()
    assert loss == math.inf and math.isfinite(norm)
    assert all(np.array_equal(got, was) for got, was in zip(step.snapshot(), (flat, zero, zero), strict=True))


# In the loop.

BAD = (math.inf, math.nan)


def _poisoned(start: Run | None = None, *, at: tuple[int, ...] = (4,), last: int | None = None, **train: object) -> Run:
    run = Run(None if start is None else start.saver.saved[-1], cfg=config(steps=8, **train), last=last)
    run.step.poison.update(dict.fromkeys(at, BAD))
    return run


def test_a_skipped_step_has_no_update_and_everything_else() -> None:
    run = _poisoned(skip_nonfinite=1)
    outcome = run.run()
    assert outcome.finished and outcome.failure is None
    assert [line["step"] for line in run.metrics] == list(range(1, 9))
    assert [line["step"] for line in run.metrics if line.get("skipped")] == [4]
    assert [report.step for report in run.view.reports] == [1, 2, 3, 5, 6, 7, 8]
    assert [note for note in run.view.notes if "step 4: the loss is inf" in note and "1 of 1" in note]
    assert outcome.snapshot.position == (0, 8 * SEQUENCES * CONTEXT), "the loader goes on"
    third, fourth = run.metrics[2], run.metrics[3]
    assert third["digest"] != fourth["digest"], "the place in the data is in it"
    assert outcome.snapshot.state["skipped"] == 1


@pytest.mark.parametrize("stop_behind", [2, 3, 4, 5])
def test_skipping_is_exact_across_a_resume(stop_behind: int) -> None:
    whole = _poisoned(skip_nonfinite=1)
    digest = whole.run().snapshot.digest()
    first = _poisoned(last=stop_behind, skip_nonfinite=1)
    first.run()
    second = _poisoned(first, skip_nonfinite=1)
    assert second.run().snapshot.digest() == digest
    lines = [(line["step"], line["digest"]) for line in first.metrics + second.metrics]
    assert lines == [(line["step"], line["digest"]) for line in whole.metrics]


def test_no_more_steps_are_skipped_than_allowed_resumed_or_not() -> None:
    run = _poisoned(at=(2, 5), skip_nonfinite=1)
    outcome = run.run()
    assert outcome.snapshot.step == 4 and "1 such steps have been skipped already" in str(outcome.failure)
    assert "--skip-nonfinite 2" in str(outcome.failure)
    first = _poisoned(at=(2,), last=3, skip_nonfinite=1)
    first.run()
    assert _poisoned(first, at=(5,), skip_nonfinite=1).run().snapshot.step == 4
    assert _poisoned(first, at=(5,), skip_nonfinite=2).run().finished


def _spiking(start: Run | None = None, *, last: int | None = None, **train: object) -> Run:
    """Step 12's loss is 50 and its norm 1; the state is what the losses before it made it."""
    run = Run(
        None if start is None else start.saver.saved[-1],
        cfg=config(steps=16, spike_window=8, spike_sigma=20.0, **train),
        last=last,
    )
    run.step.poison[12] = (50.0, 1.0)
    return run


def test_a_spike_is_said_or_stops_the_run_behind_its_step() -> None:
    quiet, warned, stopped = _spiking(), _spiking(spike="warn"), _spiking(spike="stop")
    digest = quiet.run().snapshot.digest()
    assert quiet.view.notes == []
    assert warned.run().snapshot.digest() == digest
    assert len(warned.view.notes) == 1 and warned.view.notes[0].startswith("step 12: the loss 50.0000 is ")
    outcome = stopped.run()
    assert outcome.snapshot.step == 12 and not outcome.finished and "train.spike" in str(outcome.failure)
    assert [saved.step for saved in stopped.saver.saved] == [12]
    assert _spiking(stopped, spike="stop").run().snapshot.digest() == digest, "resuming goes on behind it"


@pytest.mark.parametrize("stop_behind", [3, 10, 11])
def test_a_resumed_run_sees_the_spike_against_the_same_window(stop_behind: int) -> None:
    whole = _spiking(spike="warn")
    whole.run()
    first = _spiking(spike="warn", last=stop_behind)
    first.run()
    second = _spiking(first, spike="warn")
    second.run()
    assert second.view.notes == whole.view.notes and len(whole.view.notes) == 1
