"""The training loop: keeps the device busy, and can stop at any moment without losing a finished step.

While step k runs, a host thread reads and sorts step k + 1. Step k's loss and gradient norm are waited for only once the
micro-batches of step k + 1 are queued; only a save, a validation, a sample and a stop make the host wait for the device.

Invariants:
  - A step's update is queued once the step before has been found finite and while its own last micro-batch runs, never
    earlier. So what lies on the queue when a stop drops it is a gradient: weights, m and v are those of a finished step.
  - `position` is the loader's place behind the last finished step; it moves with `done`, and both are what is saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ptxtrain.data.errors import DataError
from ptxtrain.engine import schedule
from ptxtrain.engine.checkpoint import Snapshot
from ptxtrain.engine.config import Config, flops_per_token, tokens_per_step
from ptxtrain.engine.device.base import Device, Event
from ptxtrain.engine.digest import state_digest
from ptxtrain.engine.errors import DeviceError, PtxtrainError
from ptxtrain.engine.feeder import I32, Feeder, SequenceReader, Sort
from ptxtrain.engine.progress import Cadence, Meter, View
from ptxtrain.engine.signals import Stop

FINISH_WITHIN = 5.0  # seconds: a stop lets a step that ends sooner than this end
_PACE = 1.0  # seconds: a micro-batch that takes longer is waited for to its end before the update is queued


class _NotFinite(PtxtrainError):
    """A gradient norm that is not finite. The device has left weights, m and v alone: they are the step before's."""


class Result(Protocol):
    """Step k's numbers on their way back."""

    def wait(self) -> tuple[float, float]:
        """(mean loss in nats, gradient norm before clipping)."""

    @property
    def state_sum(self) -> int:
        """Of weights, m and v behind the step, as the device has them."""


class Step(Protocol):
    """What the loop asks of `engine.step.TrainStep`."""

    def begin(self, targets: int) -> None:
        """Start a step of so many targets."""

    def micro_batch(self, index: int, tokens: I32, targets: I32, order: I32, starts: I32) -> None:
        """Queue forward and backward of the next micro-batch."""

    def finish(self, step: int, lr: float) -> Result:
        """Queue the update and the copies back."""

    def row_losses(self, tokens: I32, targets: I32) -> npt.NDArray[np.float32]:
        """The loss of each row of at most B sequences, f32 [b, T]; waits."""

    def snapshot(self) -> tuple[Any, Any, Any]:
        """Copies of params, m, v, flat f32; waits."""


class Saves(Protocol):
    """Where snapshots go."""

    def submit(self, snapshot: Snapshot) -> None:
        """Hand a snapshot to the writer."""

    def validated(self, step: int, loss: float) -> None:
        """Take note of a validation loss."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a run stands when its loop has ended."""

    snapshot: Snapshot  # the newest state, handed to the writer
    finished: bool  # the last step asked for was reached
    loss: float | None  # of the last step that this process finished
    validation: float | None  # of the last validation by this process
    sample: str | None  # of a finished run
    failure: PtxtrainError | DataError | None = (
        None  # the input ended the run; the state is that of the last finished step
    )


@dataclass(slots=True)
class _Flight:
    """A step on the queue."""

    number: int
    before: Any  # the loader's position in front of its batch
    after: Any  # and behind it
    lr: float
    queued: float  # time.monotonic()
    host_wait: float
    events: list[Event]  # behind each micro-batch
    done: int = 0  # micro-batches known to have finished
    result: Result | None = None  # once its update is queued
    end: Event | None = None


class Trainer:
    """One process's part of a run: from `start` to step `last`, or to a stop."""

    def __init__(
        self,
        config: Config,
        device: Device,
        step: Step,  # holds the state of `start`
        start: Snapshot,
        *,
        last: int,
        reader: SequenceReader,  # at start.position
        sort: Sort,
        locate: Callable[[Any], str],  # a position in words, for errors: shard and offset
        validation: tuple[I32, I32] | None,  # tokens and targets [n, T]
        sample: Callable[[Callable[[], bool]], str | None],  # text, or None once its argument says to stop
        saves: Saves,
        metrics: Callable[..., None],  # one line: metrics(step=1, loss=2.0)
        cadence: Cadence,
        stop: Stop,
        view: View,
    ) -> None:
        self._config, self._device, self._step, self._last = config, device, step, last
        self._reader, self._sort, self._locate = reader, sort, locate
        self._validation, self._sample = validation, sample
        self._saves, self._metrics, self._cadence = saves, metrics, cadence
        self._stop, self._view = stop, view
        self._start = start
        self._began = time.monotonic()
        self._settled = self._began  # when the device was last known to go on to the next step
        self._done = start.step
        self._position = start.position
        self._best = start.best_val
        self._saved: Snapshot | None = start if start.step else None
        self._state_sum = start.sum()
        self._loss: float | None = None
        self._validated: float | None = None
        tokens = tokens_per_step(config)
        self._meter = Meter(tokens, flops_per_token(config.model), last)
        self._micro_batches = config.batch.sequences // config.batch.micro_batch

    def run(self) -> Outcome:
        """Train. Raises DeviceError, and PtxtrainError on a loss that is not finite while the gradient is."""
        sample = None
        feeder = self._feeder()
        try:
            failure = self._steps(feeder)
        except _NotFinite as error:
            failure = error
            self._device.interrupt()  # the micro-batches of a step that will not be
            self._device.synchronize()
        finally:
            feeder.close()
        finished = self._done >= self._last
        self._stop.describe = lambda: f"step {self._done} is being saved"
        if self._saved is None or self._saved.step != self._done:
            self._save()
        if finished and failure is None and self._done > self._start.step:
            if not self._due(self._config.train.validate_every, self._done):
                self._validate()
            sample = self._draw_sample()
        snapshot = self._saved
        assert snapshot is not None
        return Outcome(snapshot, finished, self._loss, self._validated, sample, failure)

    def _feeder(self) -> Feeder:
        model, batch = self._config.model, self._config.batch
        return Feeder(
            self._reader,
            self._sort,
            sequences=batch.sequences,
            micro_batch=batch.micro_batch,
            context=model.context,
            vocab=model.vocab_size,
            steps=self._last - self._done,
        )

    def _steps(self, feeder: Feeder) -> PtxtrainError | DataError | None:
        """Steps until the last, a stop, or input that cannot be used, which is returned."""
        self._stop.describe = lambda: f"step {self._done + 1} ends or is dropped, then step {self._done} is saved"
        before: _Flight | None = None
        failure: PtxtrainError | DataError | None = None
        for number in range(self._done + 1, self._last + 1):
            if before is not None and (self._stop.requested or self._edge_due(before.number)):
                self._settle(before)
                before = None
                if not self._stop.requested:
                    self._edge()
            if self._stop.requested:
                break
            try:
                flight = self._queue(feeder, number, before)
            except DeviceError:
                raise
            except (PtxtrainError, DataError) as error:
                failure = error
                break
            if before is not None:
                self._settle(before)
                before = None
            if not self._reach_update(flight):
                self._device.interrupt()
                self._device.synchronize()
                break
            flight.result = self._step.finish(number, flight.lr)
            flight.end = self._device.record()
            before = flight
        if before is not None:
            self._settle(before)
            if not self._stop.requested and failure is None and self._edge_due(self._done):
                self._edge()
        return failure

    def _queue(self, feeder: Feeder, number: int, before: _Flight | None) -> _Flight:
        """Put the micro-batches of a step on the queue."""
        asked = time.monotonic()
        batch = feeder.take()
        queued = time.monotonic()
        idle = before is None or (before.end is not None and before.end.done())
        events = []
        self._step.begin(batch.count)
        for index in range(self._micro_batches):
            self._step.micro_batch(index, *batch.micro_batch(index))
            events.append(self._device.record())
        before_it, behind_it = batch.before, batch.after
        feeder.release(batch)  # the step has copied it
        lr = schedule.learning_rate(number, self._config)
        return _Flight(number, before_it, behind_it, lr, queued, queued - asked if idle else 0.0, events)

    def _reach_update(self, flight: _Flight) -> bool:
        """Wait until the step's update may be queued. False: a stop was asked for and the step would take too long."""
        gate = self._micro_batches - 1
        seconds = self._meter.step_seconds
        if seconds is not None and seconds / self._micro_batches < _PACE:
            gate -= 1  # queue it while the last micro-batch runs, so that the device finds work when that one ends
        pause = 1e-4
        while True:
            self._move(flight)
            if self._stop.requested and self._remaining(flight) > FINISH_WITHIN:
                return False
            if flight.done > gate:
                return True
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)

    def _move(self, flight: _Flight) -> None:
        """Take in which micro-batches have finished."""
        done = flight.done
        while done < len(flight.events) and flight.events[done].done():
            done += 1
        if done != flight.done:
            flight.done = done
            self._view.micro_batch(flight.number, done, len(flight.events))

    def _remaining(self, flight: _Flight) -> float:
        """Seconds until the step ends, by the steps so far, or by its own micro-batches where there were none."""
        left = len(flight.events) - flight.done
        elapsed = time.monotonic() - max(flight.queued, self._settled)
        if (seconds := self._meter.step_seconds) is None:
            if not flight.done:
                return math.inf
            seconds = elapsed / flight.done * len(flight.events)
        return min(max(seconds - elapsed, 0.0), seconds) if left else 0.0

    def _settle(self, flight: _Flight) -> None:
        """Wait for a step whose update is queued, hold its numbers against what is allowed, and count it as done."""
        assert flight.end is not None and flight.result is not None
        pause = 1e-4
        while not flight.end.done():
            self._move(flight)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        self._move(flight)
        loss, grad_norm = flight.result.wait()
        now = time.monotonic()
        seconds = now - max(self._settled, flight.queued)
        self._settled = now
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            kind = PtxtrainError if math.isfinite(grad_norm) else _NotFinite
            raise kind(
                f"step {flight.number}: the loss is {loss:g} and the gradient norm {grad_norm:g}; stopped, and nothing of "
                f"this step is kept. Its batch starts at {self._locate(flight.before)}; lower optimizer.lr (now {flight.lr:g}) "
                "or look at the data"
            )
        self._done, self._position, self._loss = flight.number, flight.after, loss
        self._state_sum = flight.result.state_sum
        report = self._meter.report(flight.number, loss, grad_norm, flight.lr, seconds, flight.host_wait)
        self._metrics(
            step=report.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=flight.lr,
            digest=state_digest(self._state_sum, self._start.params.size, self._done, _pair(self._position)),
            seconds=round(seconds, 6),
            host_wait=round(flight.host_wait, 6),
            tokens_per_second=round(report.tokens_per_second, 1),
            tflops=round(report.flops_per_second / 1e12, 6),
        )
        self._view.step(report)

    # What happens between steps, where the host has waited for the device.

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _edge_due(self, step: int) -> bool:
        train = self._config.train
        return (
            self._cadence.due(step)
            or step == self._last
            or (self._due(train.validate_every, step) and self._validation is not None)
            or self._due(train.sample_every, step)
        )

    def _edge(self) -> None:
        """Save first: what comes after may be long, and a kill there must not cost the step."""
        train = self._config.train
        if self._cadence.due(self._done) or self._done == self._last:
            self._save()
        if self._due(train.validate_every, self._done):
            self._validate()
        if self._due(train.sample_every, self._done) and self._done != self._last:
            text = self._draw_sample()
            if text is not None:
                self._view.sample(self._done, text)
        self._settled = time.monotonic()

    def _save(self) -> None:
        self._view.phase(f"saving step {self._done}")
        params, m, v = self._step.snapshot()
        self._saved = Snapshot(
            step=self._done,
            params=params,
            m=m,
            v=v,
            position=_pair(self._position),
            best_val=self._best,
            elapsed=self._start.elapsed + time.monotonic() - self._began,
            device_sum=self._state_sum,
        )
        self._saves.submit(self._saved)
        self._cadence.saved()
        self._view.phase("")

    def _validate(self) -> None:
        """The mean loss over the validation sequences, the same ones each time; dropped on a stop."""
        if self._validation is None or self._stop.requested:
            return
        self._view.phase("validating")
        tokens, targets = self._validation
        size = self._config.batch.micro_batch
        losses: list[float] = []
        for start in range(0, len(tokens), size):
            part = slice(start, start + size)
            losses += self._step.row_losses(tokens[part], targets[part]).reshape(-1).tolist()
            if self._stop.requested:
                return
        count = int(np.count_nonzero(targets >= 0))
        self._validated = math.fsum(losses) / count  # exact, so that the micro-batch does not show in it
        if math.isfinite(self._validated) and (self._best is None or self._validated < self._best):
            self._best = self._validated
        self._saves.validated(self._done, self._validated)
        self._metrics(step=self._done, validation_loss=self._validated, validation_tokens=count)
        self._view.validated(self._done, self._validated, count)
        self._view.phase("")

    def _draw_sample(self) -> str | None:
        """Text from the model as it is; None once a stop is asked for."""
        if self._stop.requested:
            return None
        self._view.phase("sampling")
        text = self._sample(lambda: self._stop.requested)
        self._view.phase("")
        return text


def _pair(position: Any) -> tuple[int, int]:
    """A loader's position as plain numbers."""
    file, token = position if isinstance(position, tuple) else (position.file, position.token)
    return int(file), int(token)
