"""What lies on the device's queue at any moment may be dropped: it never holds an update too early."""

from __future__ import annotations

import time

import fake_training as fake
import pytest

from ptxtrain.engine import feeder, trainer


def test_the_update_of_a_step_of_many_short_micro_batches_is_not_queued_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop in such a step drops it, though each of its micro-batches is short: only the last one runs beside the update."""
    monkeypatch.setattr(trainer, "FINISH_WITHIN", 0.1)
    run = fake.Run(cfg=fake.config(steps=4), seconds=0.15)  # four micro-batches a step

    def stop(step: int, done: int) -> None:
        if (step, done) == (3, 1):
            run.stop.request()

    run.view.on_micro = stop
    outcome = run.run()
    assert (outcome.snapshot.step, outcome.finished) == (2, False)
    assert run.step.log.count("finish 3") == 0


@pytest.mark.parametrize("bad", [3, 4])
def test_no_update_is_queued_behind_one_that_was_not_looked_at(bad: int) -> None:
    """A step whose numbers are none is found before the next one's update is on the queue: the state is the step's before it."""
    whole = fake.Run(cfg=fake.config(steps=6, save_every=1))
    whole.run()
    good = whole.saver.saved[bad - 2]
    assert good.step == bad - 1
    run = fake.Run(cfg=fake.config(steps=6), seconds=0.01)
    run.step.poison[bad] = (float("nan"), float("nan"))
    outcome = run.run()
    assert outcome.failure is not None and outcome.snapshot.step == bad - 1
    assert outcome.snapshot.params.tobytes() == good.params.tobytes()
    assert f"finish {bad + 1}" not in run.step.log


def test_a_steps_place_in_the_data_is_its_own_though_its_batch_is_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feeder may be as quick as it likes: what is saved, and named in an error, is where the step itself ended and began."""
    release = feeder.Feeder.release

    def released_and_filled_again(self: feeder.Feeder, batch: feeder.Batch) -> None:
        release(self, batch)
        time.sleep(0.05)

    monkeypatch.setattr(feeder.Feeder, "release", released_and_filled_again)
    run = fake.Run(cfg=fake.config(steps=6, save_every=1))
    run.step.poison[6] = (float("nan"), float("nan"))
    outcome = run.run()
    tokens = fake.SEQUENCES * fake.CONTEXT
    assert [one.position for one in run.saver.saved] == [(0, tokens * one.step) for one in run.saver.saved]
    assert outcome.failure is not None and f"token {5 * tokens}" in str(outcome.failure)
