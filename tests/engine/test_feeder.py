"""Reading ahead, and that the device and the host really work at the same time: shown by holding one for the other, not by
clocks.

Where a test says "holds", a thread waits for an event that only the other side sets. Did they work one after the other, the wait
would never end; it gives up after twenty seconds and the test fails.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import modelbench as bench
import numpy as np
import pytest
from fake_training import FakeReader, FakeSaver, Watcher, sort_rows

from ptxtrain.data.errors import DataError
from ptxtrain.engine import feeder as feeder_module
from ptxtrain.engine.checkpoint import Snapshot
from ptxtrain.engine.config import Config
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.feeder import I32, Batch, Feeder
from ptxtrain.engine.progress import Cadence
from ptxtrain.engine.signals import Stop
from ptxtrain.engine.step import StepResult, TrainStep
from ptxtrain.engine.trainer import Trainer

SEQUENCES, CONTEXT, VOCAB = 4, 4, 50
PATIENCE = float(os.environ.get("PTXTRAIN_PATIENCE", "20"))  # seconds


def feeder(reader: FakeReader, steps: int = 5, buffers: int = 2, micro_batches: int = 2) -> Feeder:
    size = SEQUENCES // micro_batches * CONTEXT
    shapes = (SEQUENCES, CONTEXT), (SEQUENCES, CONTEXT), (micro_batches, size), (micro_batches, VOCAB + 1)
    arrays = [tuple(np.empty(shape, np.int32) for shape in shapes) for _ in range(buffers)]
    return Feeder(reader, sort_rows, buffers=arrays, steps=steps)  # type: ignore[arg-type]


@pytest.fixture
def reader() -> FakeReader:
    return FakeReader((0, 0))


def taken(source: Feeder) -> Batch:
    batch = source.take()
    assert batch is not None
    return batch


def test_batches_come_in_order_sorted_and_with_their_places(reader: FakeReader) -> None:
    source, seen = feeder(reader), []
    for _ in range(5):
        batch = taken(source)
        assert batch.count == SEQUENCES * CONTEXT
        for index in range(2):
            tokens, targets, order, starts = batch.micro_batch(index)
            assert tokens.shape == targets.shape == (2, CONTEXT) and (targets[:, :-1] == tokens[:, 1:]).all()
            assert np.array_equal(order, np.argsort(tokens.reshape(-1), kind="stable"))
            assert np.array_equal(np.diff(starts), np.bincount(tokens.reshape(-1), minlength=VOCAB))
        seen.append((batch.before, batch.after))
        source.release(batch)
    source.close()
    size = SEQUENCES * CONTEXT
    assert seen == [((0, k * size), (0, (k + 1) * size)) for k in range(5)]


def test_a_batch_is_left_alone_until_it_is_released(reader: FakeReader) -> None:
    """Both are taken and none is given back: the third read must not begin, however long one waits for it."""
    source = feeder(reader)
    first, second = taken(source), taken(source)
    held = first.tokens.copy(), second.tokens.copy()
    time.sleep(0.05)
    assert reader.position == (0, 2 * SEQUENCES * CONTEXT)
    assert np.array_equal(first.tokens, held[0]) and np.array_equal(second.tokens, held[1])
    source.release(first)
    assert taken(source) is first and not np.array_equal(first.tokens, held[0])
    source.close()


def test_nothing_is_read_past_the_last_step(reader: FakeReader) -> None:
    source = feeder(reader, steps=3)
    for _ in range(3):
        source.release(taken(source))
    source._thread.join(PATIENCE)
    assert not source._thread.is_alive() and reader.position == (0, 3 * SEQUENCES * CONTEXT)
    source.close()


def test_what_the_reader_raises_is_raised_where_the_batch_is_taken() -> None:
    source = feeder(FakeReader((0, 0), bad=SEQUENCES))
    taken(source)
    with pytest.raises(DataError, match="99999"):
        source.take()
    source.close()


def test_a_read_that_hangs_does_not_keep_the_process(reader: FakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device error must end the run at once, whatever the disk does: the thread is left behind."""
    monkeypatch.setattr(feeder_module, "_PATIENCE", 0.05)
    go = threading.Event()
    reader.read = lambda *args: go.wait(PATIENCE)  # type: ignore[method-assign, assignment]
    source = feeder(reader)
    source.close()
    assert source._thread.is_alive() and source._thread.daemon
    go.set()
    source._thread.join(PATIENCE)
    assert not source._thread.is_alive()


def test_a_stop_ends_the_wait_for_a_read_that_hangs(reader: FakeReader) -> None:
    go, read = threading.Event(), reader.read

    def hanging(*args: object) -> None:
        go.wait(PATIENCE)
        read(*args)  # type: ignore[arg-type]

    reader.read = hanging  # type: ignore[method-assign]
    source = feeder(reader)
    assert source.take(lambda: True) is None
    go.set()
    source.close()


# On the real device, with the real step.


class Signals:
    """One event for each step, made when it is first named."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, int], threading.Event] = {}
        self._guard = threading.Lock()
        self.missed: list[tuple[str, int]] = []

    def _of(self, what: str, step: int) -> threading.Event:
        with self._guard:
            return self._events.setdefault((what, step), threading.Event())

    def set(self, what: str, step: int) -> None:
        self._of(what, step).set()

    def wait(self, what: str, step: int) -> None:
        if not self._of(what, step).wait(PATIENCE):
            self.missed.append((what, step))
            raise AssertionError(f"step {step} was never {what}")


class Reader:
    """Random sequences; `hold` is called with the step whose batch is about to be read."""

    def __init__(self, model: object, hold: Callable[[int], None], end: Callable[[int], None]) -> None:
        self.model, self.hold, self.end = model, hold, end
        self.steps = 0
        self.position = (0, 0)

    def read(self, sequences: int, tokens: I32, targets: I32) -> None:
        step = self.steps + 1
        self.hold(step)
        tokens[:], targets[:] = bench.batch(self.model, sequences, seed=step)  # type: ignore[arg-type]
        self.steps, self.position = step, (0, step)
        self.end(step)


class Watched(CpuDevice):
    """Counts how often the host waits for everything, and lets a test put something on the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def synchronize(self) -> None:
        self.waits.append("synchronize")
        super().synchronize()

    def hold(self, action: Callable[[], None]) -> None:
        self._put(action)


@pytest.fixture(scope="module")
def device() -> Iterator[Watched]:
    """One for all: it parses the kernels once."""
    opened = Watched()
    yield opened
    opened.close()


class Training:
    """A Trainer on real kernels, two micro-batches a step; its hooks are called from the thread that does the thing."""

    def __init__(self, device: Watched, *, steps: int = 5, **train: object) -> None:
        self.device, self.signals = device, Signals()
        base = bench.config(bench.SHORT, 4, 2, 1)
        values = {"steps": steps, "validate_every": 0, "sample_every": 0, "save_every": 0, "way": "f32", **train}
        self.config: Config = replace(base, train=replace(base.train, **values))  # type: ignore[arg-type]
        flat = bench.weights(bench.SHORT)
        zero = np.zeros_like(flat)
        self.start = Snapshot(0, flat, zero, zero, (0, 0))
        self.step = TrainStep(self.config, device)
        self.step.load(flat, zero, zero)
        self.reader = Reader(bench.SHORT, lambda step: None, lambda step: None)
        self.view, self.saver, self.stop = Watcher(), FakeSaver(), Stop()
        self.metrics: list[dict[str, float]] = []
        tokens, targets = bench.batch(bench.SHORT, 3, seed=99)
        self.validation = (tokens, targets) if train.get("validate_every") else None

    def run(self) -> str:
        trainer = Trainer(
            self.config,
            self.device,
            self.step,
            self.start,
            last=self.config.train.steps,
            reader=self.reader,
            sort=sort_rows,
            locate=lambda step, position: str(position),
            validation=self.validation,
            sample=lambda stopping: None,
            saves=self.saver,
            metrics=lambda **line: self.metrics.append(line),
            cadence=Cadence(self.config.train.save_every),
            stop=self.stop,
            view=self.view,
        )
        self.device.waits.clear()
        return trainer.run().snapshot.digest()


def test_the_host_reads_the_next_batch_while_the_device_works_on_this_one(device: Watched) -> None:
    """Each holds for the other: step k does not end on the device before k + 1 is read, and that read does not begin before
    the device has begun step k."""
    run, steps = Training(device), 5
    plain = Training(device).run()
    signals, queue = run.signals, run.step.micro_batch
    run.reader.hold = lambda step: signals.wait("begun", step - 1) if step > 2 else None
    run.reader.end = lambda step: signals.set("read", step)
    current = iter(range(1, steps + 1))

    def holding(index: int, *arrays: I32) -> None:
        if index == 0:
            step = next(current)

            def hold() -> None:
                signals.set("begun", step)
                if step < steps:
                    signals.wait("read", step + 1)

            device.hold(hold)
        queue(index, *arrays)

    run.step.micro_batch = holding  # type: ignore[method-assign]
    assert run.run() == plain
    assert signals.missed == [] and run.reader.steps == steps


def test_a_steps_numbers_are_waited_for_only_once_the_next_step_is_queued(device: Watched) -> None:
    """The device does not come to the end of step k before step k + 1 is queued. Did the host first wait for step k's loss, it
    would wait for ever."""
    run, steps = Training(device), 5
    signals, queue, finish = run.signals, run.step.micro_batch, run.step.finish
    order: list[str] = []
    current = iter(range(1, steps + 1))

    def queueing(index: int, *arrays: I32) -> None:
        queue(index, *arrays)
        if index == 1:
            step = next(current)
            order.append(f"queue {step}")
            signals.set("queued", step)

    def finishing(step: int, lr: float) -> StepResult:
        if step < steps:
            device.hold(lambda: signals.wait("queued", step + 1))
        return finish(step, lr)

    run.step.micro_batch, run.step.finish = queueing, finishing  # type: ignore[method-assign]
    run.view.on_step = lambda step: order.append(f"settle {step}")
    run.run()
    assert signals.missed == []
    assert order == [
        "queue 1",
        *(entry for k in range(1, steps) for entry in (f"queue {k + 1}", f"settle {k}")),
        "settle 5",
    ]


@pytest.mark.parametrize(("train", "waits"), [({}, 0), ({"save_every": 2}, 0), ({"validate_every": 2}, 2 * 2 + 2)])
def test_only_a_validation_makes_the_host_wait_for_the_device(
    train: dict[str, int], waits: int, device: Watched
) -> None:
    """A validation of three sequences is two runs of two; there are two in five steps, and the last one at the end."""
    run = Training(device, **train)
    run.run()
    # Each run waits for itself and then for its losses.
    assert device.waits.count("synchronize") == 2 * waits


def test_a_stop_interrupts_a_validation_on_the_device(device: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds within a forward pass until the stop has dropped it: had the host waited for its end, it never came."""
    run, dropped = Training(device, validate_every=2), threading.Event()
    losses, interrupt = run.step.row_losses, device.interrupt

    def validating(*args: object) -> object:
        run.stop.request()
        device.hold(lambda: run.signals.wait("dropped", 2))
        return losses(*args)  # type: ignore[arg-type]

    def interrupting() -> None:
        interrupt()
        dropped.set()
        run.signals.set("dropped", 2)

    run.stop.announce = lambda text: None
    run.step.row_losses = validating  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(device, "interrupt", interrupting)
    run.run()
    assert dropped.is_set() and run.signals.missed == []
    assert [line["step"] for line in run.metrics] == [1, 2] and run.saver.losses == []
    assert [saved.step for saved in run.saver.saved] == [2]


def test_the_device_copies_straight_from_the_feeders_memory(device: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sources = Training(device), set()
    upload = device.upload

    def seen(dst: object, src: np.ndarray) -> None:
        sources.add(src.ctypes.data)
        upload(dst, src)  # type: ignore[arg-type]

    monkeypatch.setattr(device, "upload", seen)
    run.run()
    pinned = {row.ctypes.data for arrays in run.step.buffers() for a in arrays[2:] for row in a}
    assert len(pinned) == 8 and pinned <= sources


def test_what_the_device_waited_for_the_host_is_measured_by_its_own_clock(device: Watched) -> None:
    """A batch that is read only once the device has ended the step before, and then takes 20 ms, shows in that step; one that
    the device holds for does not."""
    slow, busy = Training(device), Training(device)
    finish, queue = slow.step.finish, busy.step.micro_batch

    def finishing(step: int, lr: float) -> StepResult:
        result = finish(step, lr)
        device.hold(lambda: slow.signals.set("ended", step))
        return result

    def reading(step: int) -> None:
        if step > 1:
            slow.signals.wait("ended", step - 1)
        time.sleep(0.02)

    slow.step.finish, slow.reader.hold = finishing, reading  # type: ignore[method-assign]
    slow.run()
    busy.reader.end = lambda step: busy.signals.set("read", step)
    current = iter(range(1, 6))

    def holding(index: int, *arrays: I32) -> None:
        if index == 0 and (step := next(current)) < 5:
            device.hold(lambda: busy.signals.wait("read", step + 1))
        queue(index, *arrays)

    busy.step.micro_batch = holding  # type: ignore[method-assign]
    busy.run()
    waited = [[line["device_wait"] for line in run.metrics] for run in (slow, busy)]
    assert all(wait >= 0.02 for wait in waited[0]), waited
    assert sorted(waited[1])[2] < 0.015, waited  # five steps; other programs may take the processor away in one of them
