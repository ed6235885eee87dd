"""The loop: what it queues when, that a stop at any moment costs no bits, and that nothing bad is saved."""

from __future__ import annotations

import math
import re
import time

import pytest
from fake_training import CONTEXT, SEQUENCES, Run, config

from ptxtrain.engine import trainer
from ptxtrain.engine.checkpoint import Snapshot


def _whole(**train: int) -> tuple[str, list[float]]:
    run = Run(cfg=config(**train))
    outcome = run.run()
    assert outcome.finished
    return outcome.snapshot.digest(), [line["loss"] for line in run.metrics]


def test_a_run_reaches_its_last_step_and_saves_it() -> None:
    run = Run()
    outcome = run.run()
    assert outcome.finished and outcome.snapshot.step == 6
    assert outcome.snapshot.position == (0, 6 * SEQUENCES * CONTEXT)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert [saved.step for saved in run.saver.saved] == [6]
    assert [report.lr for report in run.view.reports][:2] == [0.05, 0.1]
    assert outcome.loss == run.metrics[-1]["loss"]


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_the_micro_batch_does_not_show(micro_batch: int) -> None:
    assert _whole(micro_batch=micro_batch) == _whole()


@pytest.mark.parametrize("within", [0.0, 5.0], ids=["dropping", "finishing"])
@pytest.mark.parametrize("at", [(1, 1), (1, 3), (3, 2), (3, 4), (6, 1), (6, 4)])
def test_stop_and_resume_at_any_micro_batch_gives_the_same_bits(
    at: tuple[int, int], within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "FINISH_WITHIN", within)
    digest, losses = _whole()
    first = Run(seconds=0.002)

    def stop_at(step: int, done: int) -> None:
        if (step, done) >= at and not first.stop.requested:
            first.stop.request()

    first.view.on_micro = stop_at
    stopped = first.run()
    # The next step may be on the queue already; where it takes no time it ends too.
    assert at[0] - (within == 0) <= stopped.snapshot.step <= at[0] + 1
    assert first.saver.saved[-1].step == stopped.snapshot.step
    assert first.step.looked_at == stopped.snapshot.step
    second = Run(stopped.snapshot, seconds=0.002)
    outcome = second.run()
    assert outcome.snapshot.digest() == digest
    assert [line["loss"] for line in first.metrics + second.metrics] == losses


def test_a_step_that_would_take_long_is_dropped_between_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "FINISH_WITHIN", 0.05)
    monkeypatch.setattr(trainer, "_PACE", 0.0)
    run = Run(seconds=0.1)
    run.view.on_micro = lambda step, done: run.stop.request() if (step, done) == (2, 1) else None
    start = time.monotonic()
    outcome = run.run()
    assert outcome.snapshot.step == 1 and not outcome.finished
    assert run.device.interrupts == 1
    assert "finish 2" not in run.step.log
    assert time.monotonic() - start < 0.1 * SEQUENCES + 0.1 + 0.25  # a step, a micro-batch and one more


def test_a_stop_saves_the_last_step_even_though_an_earlier_one_is_saved() -> None:
    run = Run(cfg=config(save_every=2), seconds=0.01)
    run.view.on_step = lambda step: run.stop.request() if step == 3 else None
    outcome = run.run()
    assert run.saver.saved[-1] is outcome.snapshot
    assert [saved.step for saved in run.saver.saved] == [2, outcome.snapshot.step]
    assert outcome.snapshot.step in (3, 4)


def test_a_stop_before_the_first_step_saves_step_0() -> None:
    run = Run()
    run.stop.request()
    outcome = run.run()
    assert (outcome.snapshot.step, outcome.snapshot.position) == (0, (0, 0))
    assert [saved.step for saved in run.saver.saved] == [0]
    assert Run(outcome.snapshot).run().snapshot.digest() == _whole()[0]


def test_a_resumed_run_stopped_at_once_saves_nothing_again() -> None:
    first = Run()
    first.view.on_step = lambda step: first.stop.request() if step == 2 else None
    snapshot = first.run().snapshot
    second = Run(snapshot)
    second.stop.request()
    assert second.run().snapshot is snapshot
    assert second.saver.saved == []


@pytest.mark.parametrize("bad", [(1.0, math.inf), (math.inf, math.nan), (math.nan, math.nan), (math.inf, 1.0)])
def test_a_loss_or_norm_that_is_not_finite_ends_the_run_with_the_step_before_saved(bad: tuple[float, float]) -> None:
    run = Run(cfg=config(save_every=2), seconds=0.005)
    run.step.poison[4] = bad
    outcome = run.run()
    assert re.search(r"step 4: .* nothing of this step is kept.*shard.tok, token 48", str(outcome.failure))
    assert "--skip-nonfinite 1" in str(outcome.failure)
    assert not outcome.finished and outcome.snapshot.step == 3
    assert [saved.step for saved in run.saver.saved] == [2, 3]
    assert run.step.log[-1] == "save 3" and "finish 5" not in run.step.log, "step 4's own copy must not be saved"
    assert [line["step"] for line in run.metrics] == [1, 2, 3]
    assert Run(outcome.snapshot).run().snapshot.digest() == _whole()[0]


def test_input_that_cannot_be_used_ends_the_run_with_the_last_step_saved() -> None:
    run = Run(bad=3 * SEQUENCES + 1)
    outcome = run.run()
    assert "99999" in str(outcome.failure) and not outcome.finished
    assert outcome.snapshot.step == 3
    assert [saved.step for saved in run.saver.saved] == [3]
    assert (
        outcome.snapshot.digest() == Run(cfg=config(steps=6, micro_batch=1), bad=3 * SEQUENCES).run().snapshot.digest()
    )


def test_saves_come_before_validations_and_samples() -> None:
    run = Run(cfg=config(save_every=2, validate_every=2, sample_every=2), validation=3, sample=["a", "b", "c"])
    outcome = run.run()
    edges = [line for line in run.step.log if not line.startswith("finish")]
    assert edges == [entry for k in (2, 4, 6) for entry in (f"save {k}", *["validate 1"] * 3)]
    assert run.view.samples == [(2, "a"), (4, "b")] and outcome.sample == "c"
    assert run.view.validations == [(k, 2.0, 12) for k in (2, 4, 6)]
    assert run.saver.losses == [(2, 2.0), (4, 2.0), (6, 2.0)]
    assert run.saver.saved[-1].best_val == 2.0


def test_validation_takes_uneven_rests_and_a_stop_drops_it() -> None:
    run = Run(cfg=config(micro_batch=2, validate_every=3), validation=5)
    run.step.validating = lambda: run.stop.request() if run.step.log.count("validate 2") == 2 else None
    outcome = run.run()
    assert [line for line in run.step.log if line.startswith("validate")] == ["validate 2", "validate 2"]
    assert outcome.snapshot.step == 3 and outcome.validation is None
    assert Run(outcome.snapshot, cfg=config(micro_batch=2, validate_every=3), validation=5).run().snapshot.step == 6


def test_a_validation_that_a_stop_dropped_is_made_up_by_resume() -> None:
    """Losses, digests and the best validation of every checkpoint are those of a run that never stopped."""
    train = {"validate_every": 2, "save_every": 2}
    whole = Run(cfg=config(**train), validation=3)
    whole.run()
    first = Run(cfg=config(**train), validation=3)
    first.step.validating = lambda: first.stop.request() if first.step.log.count("validate 1") == 5 else None
    assert first.run().snapshot.step == 4, "stopped within the second validation"
    second = Run(first.saver.saved[-1], cfg=config(**train), validation=3)
    second.run()
    assert second.step.log[:4] == ["validate 1"] * 3 + ["finish 5"], "before the next step"
    assert first.saver.losses + second.saver.losses == whole.saver.losses == [(2, 2.0), (4, 2.0), (6, 2.0)]
    states = [(saved.step, saved.best_val, saved.state) for saved in first.saver.saved + second.saver.saved]
    assert states == [(saved.step, saved.best_val, saved.state) for saved in whole.saver.saved]


def test_a_validation_that_was_done_is_not_repeated_where_the_checkpoint_knows() -> None:
    first = Run(cfg=config(validate_every=2), validation=1, last=2)
    first.run()
    first.saver.saved[-1].state["validated"] = 2  # as in a state that a stop saved behind its validation
    second = Run(first.saver.saved[-1], cfg=config(validate_every=2), validation=1)
    second.run()
    assert second.saver.losses == [(4, 2.0), (6, 2.0)]


def test_the_next_step_is_queued_before_a_save_is_handed_over() -> None:
    """The copy lies behind the update, so that neither host nor device stands still; what is saved is that step's."""
    run = Run(cfg=config(save_every=2, steps=6))
    order: list[str] = []
    begin, submit = run.step.begin, run.saver.submit

    def queueing(targets: int) -> None:
        order.append("queue")
        begin(targets)

    def saving(snapshot: Snapshot) -> None:
        order.append(f"save {snapshot.step}")
        submit(snapshot)

    run.step.begin, run.saver.submit = queueing, saving  # type: ignore[method-assign]
    run.run()
    assert order == ["queue", "queue", "queue", "save 2", "queue", "queue", "save 4", "queue", "save 6"]
    assert run.step.prepared == 3, "the memory for each copy is taken while the device works"
    for saved in run.saver.saved:
        assert saved.digest() == run.metrics[saved.step - 1]["digest"]
        assert saved.sum() == saved.device_sum


def test_waiting_for_the_host_is_reported() -> None:
    run = Run(cfg=config(steps=4, micro_batch=4), seconds=0.0, slow=0.03)
    run.run()
    assert all(line["device_wait"] > 0.01 for line in run.metrics)


def test_progress_moves_within_a_step() -> None:
    run = Run(cfg=config(steps=2), seconds=0.03)
    run.run()
    assert [entry for entry in run.view.micro if entry[0] == 1] == [(1, k, SEQUENCES) for k in (1, 2, 3, 4)]


def test_saves_follow_the_clock() -> None:
    run = Run(cfg=config(steps=10, micro_batch=4, save_minutes=0.1 / 60), seconds=0.03)
    run.run()
    assert 2 <= len(run.saver.saved) <= 5
