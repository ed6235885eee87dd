"""The watchdog: when it speaks, what it names, and that it does so while the trainer hangs."""

from __future__ import annotations

import re
import threading

import pytest
from fake_training import Run, config

from ptxtrain.engine.watchdog import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(seconds: float = 60.0) -> tuple[Watchdog, Clock, list[str]]:
    clock, said = Clock(), []
    return Watchdog(said.append, seconds, clock=clock), clock, said


@pytest.mark.parametrize(
    ("usual", "limit"), [(0.5, 60.0), (6.0, 60.0), (30.0, 300.0), (None, 600.0)], ids=["short", "edge", "long", "none"]
)
def test_it_speaks_after_ten_medians_and_no_less_than_its_seconds(usual: float | None, limit: float) -> None:
    dog, clock, _ = watched()
    dog.moved("step 7", usual)
    clock.now += limit - 0.1
    assert dog.look() is None
    clock.now += 0.2
    assert "nothing has moved for" in (dog.look() or "")


def test_it_speaks_again_only_when_the_wait_has_doubled_and_is_quiet_once_something_moves() -> None:
    dog, clock, _ = watched()
    dog.moved("step 7", 1.0)
    waits = []
    for _ in range(1000):
        clock.now += 1
        if dog.look():
            waits.append(clock.now - 100)
    assert waits == [60, 120, 240, 480, 960]
    dog.moved("step 8", 1.0)
    clock.now += 59
    assert dog.look() is None
    clock.now += 1
    assert dog.look() is not None


def test_it_names_what_goes_on_now_and_how_long_that_usually_takes() -> None:
    dog, clock, _ = watched()
    dog.moved("step 7", 0.25)
    dog.at("step 7: its batch is being read")
    clock.now += 75
    assert dog.look() == (
        "step 7: its batch is being read: nothing has moved for 75 s, and a step usually takes 0.25 s "
        "(Ctrl+C stops; three times: leaves at once)"
    )


def test_zero_seconds_watch_nothing() -> None:
    before = threading.active_count()
    with Watchdog(lambda text: None, 0.0):
        assert threading.active_count() == before


class Gate:
    """Holds a thread until the watchdog has spoken."""

    def __init__(self, run: Run) -> None:
        self.spoken = threading.Event()
        note = run.view.note

        def notice(text: str) -> None:
            note(text)
            if "nothing has moved" in text:
                self.spoken.set()

        run.view.note = notice  # type: ignore[method-assign]
        run.trainer._watch._warn = notice

    def hold(self) -> None:
        assert self.spoken.wait(20), "the watchdog said nothing"


def _hanging() -> Run:
    return Run(cfg=config(steps=4, micro_batch=2, watchdog_seconds=0.05))


def test_a_read_that_hangs_is_told_and_the_run_goes_on_when_it_ends() -> None:
    run = _hanging()
    gate, read, calls = Gate(run), run.reader.read, iter(range(100))

    def hanging(*args: object) -> None:
        if next(calls) == 2:
            gate.hold()
        read(*args)  # type: ignore[arg-type]

    run.reader.read = hanging  # type: ignore[method-assign]
    assert run.run().finished
    (line, *_) = [note for note in run.view.notes if "nothing has moved" in note]
    assert line.startswith("step 3: its batch is being read: ")


def test_a_device_that_hangs_is_told_with_how_far_it_came() -> None:
    run = _hanging()
    gate, queue = Gate(run), run.step.micro_batch

    def hanging(index: int, *args: object) -> None:
        if index == 1 and "finish 1" in run.step.log:
            run.device.put(gate.hold)
        queue(index, *args)  # type: ignore[arg-type]

    run.step.micro_batch = hanging  # type: ignore[method-assign]
    assert run.run().finished
    (line, *_) = [note for note in run.view.notes if "nothing has moved" in note]
    assert re.match(r"step 2: 1 of its 2 micro-batches have run: ", line)


def test_a_save_that_hangs_is_told() -> None:
    run = _hanging()
    gate, submit = Gate(run), run.saver.submit

    def hanging(snapshot: object) -> None:
        gate.hold()
        submit(snapshot)  # type: ignore[arg-type]

    run.saver.submit = hanging  # type: ignore[method-assign]
    assert run.run().finished
    assert any(note.startswith("step 4 is being saved: ") for note in run.view.notes)


def test_a_long_step_whose_micro_batches_end_is_not_taken_for_a_hang() -> None:
    """The first step has no median: its four micro-batches take 0.3 s each, and a second without one would be told."""
    run = Run(cfg=config(steps=1, micro_batch=1, watchdog_seconds=0.1), seconds=0.3)
    run.run()
    assert run.metrics[0]["seconds"] > 1.0
    assert [note for note in run.view.notes if "micro-batches have run" in note] == []


def test_a_run_that_moves_hears_nothing() -> None:
    run = Run(cfg=config(steps=20, watchdog_seconds=5.0))
    run.run()
    assert run.view.notes == []
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
