"""A device that is a queue on a thread, and a step on it whose arithmetic is three lines: the trainer's tests train with them.

The step holds the trainer to its contract: micro-batches in order, and no update before the last one's result was looked at.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptxtrain.data.errors import DataError
from ptxtrain.engine.checkpoint import Snapshot
from ptxtrain.engine.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from ptxtrain.engine.digest import state_sum
from ptxtrain.engine.feeder import I32
from ptxtrain.engine.progress import Cadence, StepReport, View
from ptxtrain.engine.signals import Stop
from ptxtrain.engine.trainer import Outcome, Trainer

WEIGHTS = 8
VOCAB, CONTEXT, SEQUENCES = 50, 4, 4


def config(micro_batch: int = 1, **train: Any) -> Config:
    """A config of `SEQUENCES` sequences a step."""
    values: dict[str, Any] = {"steps": 6, "validate_every": 0, "sample_every": 0, "save_every": 0, **train}
    return Config(
        name="fake",
        model=ModelConfig(VOCAB, CONTEXT, 1, 2, 1, 1, 2, 2),
        batch=BatchConfig(SEQUENCES, micro_batch, 1),
        optimizer=OptimizerConfig(lr=0.1, warmup_steps=2),
        train=TrainConfig(**values),
        data=DataConfig(),
    )


class FakeEvent:
    def __init__(self) -> None:
        self.flag = threading.Event()
        self.at = 0.0

    def since(self, earlier: FakeEvent) -> float:
        assert self.done() and earlier.done()
        return self.at - earlier.at

    def done(self) -> bool:
        return self.flag.is_set()

    def wait(self) -> None:
        assert self.flag.wait(30)


class FakeDevice:
    """Runs what is queued on a thread of its own; `interrupt` drops what has not begun."""

    kind, name = "fake", "a fake device"

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._age = 0
        self.interrupts = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            age, work = item
            if age == self._age or getattr(work, "always", False):
                work()

    def put(self, work: Callable[[], None]) -> None:
        self._queue.put((self._age, work))

    def record(self) -> FakeEvent:
        event = FakeEvent()

        def reach() -> None:
            event.at = time.perf_counter()
            event.flag.set()

        reach.always = True  # type: ignore[attr-defined]
        self.put(reach)
        return event

    def synchronize(self) -> None:
        self.record().wait()

    def interrupt(self) -> None:
        self.interrupts += 1
        self._age += 1

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class FakeResult:
    def __init__(self, step: FakeStep, number: int, event: FakeEvent) -> None:
        self._step, self._number, self._event = step, number, event

    def wait(self) -> tuple[float, float]:
        self._event.wait()
        self._step.looked_at = self._number
        return self._step.numbers[self._number]

    @property
    def state_sum(self) -> int:
        self.wait()
        return self._step.sums[self._number]


class FakeCopy:
    """Of the state behind what is queued so far."""

    def __init__(self, step: FakeStep) -> None:
        step.device.put(lambda: setattr(self, "arrays", (step.params.copy(), step.m.copy(), step.v.copy())))
        self._event = step.device.record()
        self.arrays: tuple[np.ndarray, np.ndarray, np.ndarray]

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._event.wait()
        return self.arrays


class FakeStep:
    """weights -= lr * mean of a hash of the tokens; m and v follow. Sequences are added one by one, so B does not show."""

    def __init__(self, device: FakeDevice, micro_batches: int, start: Snapshot, seconds: float = 0.0) -> None:
        self.device, self.seconds = device, seconds
        self.micro_batches = micro_batches
        self.params, self.m, self.v = start.params.copy(), start.m.copy(), start.v.copy()
        self.gradient = np.zeros(WEIGHTS, np.float32)
        self.numbers: dict[int, tuple[float, float]] = {}
        self.sums: dict[int, int] = {}
        self.poison: dict[int, tuple[float, float]] = {}
        self.looked_at = start.step
        self.queued = self.prepared = 0
        self.log: list[str] = []
        self.validating: Callable[[], None] = lambda: None

    def buffers(self) -> list[tuple[I32, I32, I32, I32]]:
        """Arrays full of nonsense, which is what the device would read that came too early or too late."""
        size = SEQUENCES // self.micro_batches * CONTEXT
        shapes = (SEQUENCES, CONTEXT), (SEQUENCES, CONTEXT), (self.micro_batches, size), (self.micro_batches, VOCAB + 1)
        return [tuple(np.full(shape, -7, np.int32) for shape in shapes) for _ in range(2)]  # type: ignore[misc]

    def begin(self, targets: int) -> None:
        assert targets == SEQUENCES * CONTEXT
        self.queued = 0
        self.device.put(lambda: self.gradient.fill(0))

    def micro_batch(self, index: int, tokens: I32, targets: I32, order: I32, starts: I32) -> None:
        assert index == self.queued
        self.queued += 1
        assert np.array_equal(np.diff(starts), np.bincount(tokens.reshape(-1), minlength=VOCAB))

        def work() -> None:
            time.sleep(self.seconds)
            for row in tokens:  # only now, as a GPU's copy would
                self.gradient[:] += np.cos(np.arange(WEIGHTS, dtype=np.float32) * row.sum()) / SEQUENCES

        self.device.put(work)

    def finish(self, step: int, lr: float) -> FakeResult:
        assert self.queued == self.micro_batches
        assert self.looked_at == step - 1, "an update was queued before the step before it was looked at"
        self.log.append(f"finish {step}")

        def work() -> None:
            loss, norm = self.poison.get(
                step, (float(abs(self.params).sum()), float(np.sqrt((self.gradient**2).sum())))
            )
            self.numbers[step] = (loss, norm)
            if np.isfinite(loss) and np.isfinite(norm):  # as the kernel has it
                self.m[:] = 0.9 * self.m + self.gradient
                self.v[:] = self.v + self.gradient**2
                self.params[:] -= np.float32(lr) * self.m
            self.sums[step] = state_sum(self.params, self.m, self.v)

        self.device.put(work)
        return FakeResult(self, step, self.device.record())

    def row_losses(self, tokens: I32, targets: I32, stopping: Callable[[], bool]) -> np.ndarray:
        self.log.append(f"validate {len(tokens)}")
        self.device.synchronize()
        self.validating()
        return np.where(targets >= 0, np.float32(2.0), np.float32(0.0))

    def prepare_snapshot(self) -> None:
        assert self.queued == self.micro_batches, "the device has nothing to do meanwhile"
        self.prepared += 1

    def begin_snapshot(self) -> FakeCopy:
        return FakeCopy(self)


class FakeReader:
    """Endless sequences that follow from their number alone; `slow` seconds a read."""

    def __init__(self, position: tuple[int, int], slow: float = 0.0, bad: int | None = None) -> None:
        self.position, self.slow, self.bad = position, slow, bad

    def read(self, sequences: int, tokens: I32, targets: I32) -> None:
        time.sleep(self.slow)
        for i in range(sequences):
            number = self.position[1] // CONTEXT
            if number == self.bad:
                raise DataError(f"token 99999 at {number * CONTEXT} is not below {VOCAB}")
            text = (np.arange(CONTEXT + 1) + number * CONTEXT) * 7 % VOCAB
            tokens[i], targets[i] = text[:-1], text[1:]
            self.position = (0, (number + 1) * CONTEXT)


def sort_rows(tokens: I32, vocab: int, order: I32, starts: I32) -> None:
    order[:] = np.argsort(tokens, kind="stable")
    starts[0] = 0
    starts[1:] = np.cumsum(np.bincount(tokens, minlength=vocab))


class FakeSaver:
    def __init__(self) -> None:
        self.saved: list[Snapshot] = []
        self.losses: list[tuple[int, float]] = []
        self.log: list[str] = []

    def submit(self, snapshot: Snapshot) -> None:
        self.saved.append(snapshot)
        self.log.append(f"save {snapshot.step}")

    def validated(self, step: int, loss: float) -> None:
        self.losses.append((step, loss))


class Watcher(View):
    """Keeps the reports and calls `on_step` and `on_micro` as they come."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.micro: list[tuple[int, int, int]] = []
        self.samples: list[tuple[int, str]] = []
        self.validations: list[tuple[int, float, int]] = []
        self.notes: list[str] = []
        self.on_step: Callable[[int], None] = lambda step: None
        self.on_micro: Callable[[int, int], None] = lambda step, done: None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def micro_batch(self, step: int, done: int, total: int) -> None:
        self.micro.append((step, done, total))
        self.on_micro(step, done)

    def step(self, report: StepReport) -> None:
        self.reports.append(report)
        self.on_step(report.step)

    def validated(self, step: int, loss: float, tokens: int) -> None:
        self.validations.append((step, loss, tokens))

    def sample(self, step: int, text: str) -> None:
        self.samples.append((step, text))


def fresh() -> Snapshot:
    weights = np.linspace(-1, 1, WEIGHTS, dtype=np.float32)
    return Snapshot(0, weights, np.zeros_like(weights), np.zeros_like(weights), (0, 0))


class Run:
    """Everything around one Trainer, made anew for each attempt."""

    def __init__(
        self,
        start: Snapshot | None = None,
        cfg: Config | None = None,
        *,
        seconds: float = 0.0,
        slow: float = 0.0,
        bad: int | None = None,
        validation: int = 0,
        sample: Sequence[str] = (),
        last: int | None = None,
    ) -> None:
        self.config = cfg or config()
        self.start = start or fresh()
        self.device = FakeDevice()
        micro_batches = SEQUENCES // self.config.batch.micro_batch
        self.step = FakeStep(self.device, micro_batches, self.start, seconds)
        self.reader = FakeReader(self.start.position, slow, bad)
        self.saver, self.view, self.stop = FakeSaver(), Watcher(), Stop()
        self.saver.log = self.step.log
        self.stop.announce = lambda text: None
        self.metrics: list[dict[str, Any]] = []
        tokens = np.zeros((validation, CONTEXT), np.int32)
        words = list(sample)
        self.trainer = Trainer(
            self.config,
            self.device,  # type: ignore[arg-type]
            self.step,
            self.start,
            last=last or self.config.train.steps,
            reader=self.reader,
            sort=sort_rows,
            locate=lambda step, position: f"{Path('shard.tok')}, token {position[1]}",
            validation=(tokens, tokens.copy()) if validation else None,
            sample=lambda stopping: None if stopping() else (words.pop(0) if words else "text"),
            saves=self.saver,
            metrics=lambda **line: self.metrics.append(line),
            cadence=Cadence(self.config.train.save_every, 60 * self.config.train.save_minutes),
            stop=self.stop,
            view=self.view,
        )

    def run(self) -> Outcome:
        try:
            return self.trainer.run()
        finally:
            self.device.close()
