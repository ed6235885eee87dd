"""The training loop: keeps the device busy, and can stop at any moment without losing a finished step.

While step k runs, a host thread reads and sorts step k + 1 into the other of two host buffers. Step k's loss and gradient norm
are waited for only once the micro-batches of step k + 1 are queued; only a validation, a sample and a stop make the host wait for
the device. A save does not: the copy of the state is queued behind the update, and the device goes on behind it.

Invariants:
  - A step's update is queued once the step before has been found finite and while its own last micro-batch runs, never
    earlier. So what lies on the queue when a stop drops it is a gradient: weights, m and v are those of a finished step.
  - `position` is the loader's place behind the last finished step; it moves with `done`, and both are what is saved.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxtrain.data.errors import DataError
from ptxtrain.engine import schedule
from ptxtrain.engine.checkpoint import Snapshot
from ptxtrain.engine.config import Config, flops_per_token, tokens_per_step
from ptxtrain.engine.contracts import Outcome, Saves, StateCopy, Step
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.digest import state_digest
from ptxtrain.engine.errors import DeviceError, OutOfMemory, PtxtrainError
from ptxtrain.engine.feeder import I32, Feeder, SequenceReader, Sort
from ptxtrain.engine.flight import Flight
from ptxtrain.engine.guards import Guards
from ptxtrain.engine.progress import Cadence, Meter, View
from ptxtrain.engine.signals import Stop
from ptxtrain.engine.watchdog import Watchdog

__all__ = ["Outcome", "Trainer"]

FINISH_WITHIN = 5.0  # seconds: a stop lets a step that ends sooner than this end
_PACE = 1.0  # seconds: a micro-batch that takes longer is waited for to its end before the update is queued


class _Halt(Exception):
    """A step's numbers end the run. Weights, m and v are those of `Trainer._done`."""

    def __init__(self, failure: PtxtrainError) -> None:
        self.failure = failure


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
        locate: Callable[[int, Any], str],  # a step and the position of its batch, in words: shards and tokens
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
        self._validated_step = start.state.get("validated", 0)
        self._guards = Guards(config.train, start.state)
        self._meter = Meter(tokens_per_step(config), flops_per_token(config.model), last)
        self._micro_batches = config.batch.sequences // config.batch.micro_batch
        self._watch = Watchdog(view.note, config.train.watchdog_seconds)

    def run(self) -> Outcome:
        """Train. Raises DeviceError."""
        with self._watch:
            self._make_up()
            feeder = self._feeder()
            try:
                failure = self._steps(feeder)
            except _Halt as halt:
                failure = halt.failure
                self._device.interrupt()  # the micro-batches of a step that will not be
                self._device.synchronize()
            finally:
                feeder.close()
            return self._end(failure)

    def _end(self, failure: PtxtrainError | DataError | None) -> Outcome:
        """Save what is not saved yet; a run that has reached its last step is validated and shows what it can."""
        sample = None
        finished = self._done >= self._last
        self._stop.describe = lambda: f"step {self._done} is being saved"
        if self._saved is None or self._saved.step != self._done:
            self._save(self._step.begin_snapshot())
        if finished and failure is None and self._done > self._start.step:
            if self._validated_step != self._done:
                self._validate()
            sample = self._draw_sample()
        snapshot = self._saved
        assert snapshot is not None
        return Outcome(snapshot, finished, self._loss, self._validated, sample, failure)

    def _feeder(self) -> Feeder:
        return Feeder(self._reader, self._sort, buffers=self._step.buffers(), steps=self._last - self._done)

    def _steps(self, feeder: Feeder) -> PtxtrainError | DataError | None:
        """Steps until the last, a stop, or input that cannot be used, which is returned."""
        self._stop.describe = lambda: (
            f"step {self._done + 1} ends or is dropped, then step {self._done} is saved"
            if self._done < self._last
            else f"step {self._done} is being saved"
        )
        before: Flight | None = None
        failure: PtxtrainError | DataError | None = None
        self._free = self._device.record()
        for number in range(self._done + 1, self._last + 1):
            if before is not None and (self._stop.requested or self._pauses(before.number)):
                self._settle(before, feeder)
                before = None
                if not self._stop.requested:
                    self._pause()
            if self._stop.requested:
                break
            try:
                flight = self._queue(feeder, number)
            except DeviceError:
                raise
            except (PtxtrainError, DataError) as error:
                failure = error
                break
            if before is not None:
                self._settle(before, feeder)
                before = None
            if flight is None or not self._reach_update(flight):
                self._device.interrupt()
                self._device.synchronize()
                break
            self._update(flight)
            before = flight
        if before is not None:
            self._settle(before, feeder)
            if not self._stop.requested and failure is None and self._pauses(self._done):
                self._pause()
        return failure

    def _queue(self, feeder: Feeder, number: int) -> Flight | None:
        """Put the micro-batches of a step on the queue; None if a stop was asked for before its batch was there."""
        self._watch.at(f"step {number}: its batch is being read")
        batch = feeder.take(lambda: self._stop.requested)
        if batch is None:
            return None
        flight = Flight(number, batch, schedule.learning_rate(number, self._config), time.monotonic(), self._free)
        for index in range(self._micro_batches):
            flight.starts.append(self._device.record())
            if index == 0:
                self._step.begin(batch.count)
            self._step.micro_batch(index, *batch.micro_batch(index))
            flight.ends.append(self._device.record())
        if self._saves_behind(number):
            with contextlib.suppress(OutOfMemory, MemoryError):  # said when the copy is to be made
                self._step.prepare_snapshot()
        return flight

    def _update(self, flight: Flight) -> None:
        """Queue a step's update, and the copy of the state behind it where that is to be saved."""
        flight.update = self._device.record()
        flight.result = self._step.finish(flight.number, flight.lr)
        flight.end = self._free = self._device.record()
        if self._saves_behind(flight.number):
            try:
                flight.copy = self._step.begin_snapshot()
                self._free = self._device.record()
            except (OutOfMemory, MemoryError):
                self._view.note(f"step {flight.number} is not saved: the host has no memory for a copy of the state")
            self._cadence.saved()

    def _saves_behind(self, number: int) -> bool:
        """Whether the state behind this step is to be saved."""
        return self._cadence.due(number) or number == self._last

    def _reach_update(self, flight: Flight) -> bool:
        """Wait until the step's update may be queued. False: a stop was asked for and the step would take too long."""
        gate = self._micro_batches - 1
        seconds = self._meter.step_seconds
        if seconds is not None and seconds / self._micro_batches < _PACE:
            gate -= 1  # queue it while the last micro-batch runs, so that the device finds work when that one ends
        pause = 1e-4
        while True:
            self._move(flight)
            if self._stop.requested and flight.remaining(self._settled, self._meter.step_seconds) > FINISH_WITHIN:
                return False
            if flight.done > gate:
                return True
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)

    def _move(self, flight: Flight) -> None:
        """Take in which micro-batches have finished."""
        moved, total = flight.move(), len(flight.ends)
        what = f"step {flight.number}: {flight.done} of its {total} micro-batches have run"
        if moved:
            self._view.micro_batch(flight.number, flight.done, total)
            self._watch.moved(what, self._meter.median)
        self._watch.at(what)

    def _settle(self, flight: Flight, feeder: Feeder) -> None:
        """Wait for a step whose update is queued, hold its numbers against what is allowed, and count it as done."""
        assert flight.end is not None and flight.result is not None
        pause = 1e-4
        while not flight.end.done():
            self._move(flight)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        self._move(flight)
        loss, grad_norm = flight.result.wait()
        feeder.release(flight.batch)
        now = time.monotonic()
        seconds = now - max(self._settled, flight.queued)
        self._settled = now
        self._watch.moved(f"step {flight.number + 1}", self._meter.median)
        verdict = self._guards.look(loss, grad_norm)
        if verdict.kind == "refuse":
            raise _Halt(self._not_finite(flight, verdict.why))
        self._done, self._position = flight.number, flight.after
        self._state_sum = flight.result.state_sum
        self._report(flight, loss, grad_norm, seconds, skipped=verdict.kind == "skip")
        if verdict.why:
            self._view.note(f"step {flight.number}: {verdict.why}")
        if flight.copy is not None:
            self._save(flight.copy)
        if verdict.kind == "stop":
            raise _Halt(
                PtxtrainError(
                    f"step {flight.number}: {verdict.why}; stopped behind it, as train.spike says. Its batch: "
                    f"{self._locate(flight.number, flight.before)}. Resume goes on; with --step from an older checkpoint"
                )
            )

    def _not_finite(self, flight: Flight, why: str) -> PtxtrainError:
        return PtxtrainError(
            f"step {flight.number}: {why}; stopped before the update, and nothing of this step is kept. Its batch: "
            f"{self._locate(flight.number, flight.before)}. Go on without it by "
            f"--skip-nonfinite {self._guards.skipped + 1}, look at the data, or start another run with a lower optimizer.lr "
            f"(here {flight.lr:g})"
        )

    def _report(self, flight: Flight, loss: float, grad_norm: float, seconds: float, *, skipped: bool) -> None:
        """A line of metrics, and the view. A step that was skipped has no numbers to draw."""
        wait = flight.device_wait()
        report = self._meter.report(flight.number, loss, grad_norm, flight.lr, seconds, wait)
        self._metrics(
            step=report.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=flight.lr,
            digest=state_digest(self._state_sum, self._start.params.size, self._done, _pair(self._position)),
            seconds=round(seconds, 6),
            device_wait=round(wait, 6),
            tokens_per_second=round(report.tokens_per_second, 1),
            tflops=round(report.flops_per_second / 1e12, 6),
            **({"skipped": True} if skipped else {}),
        )
        if not skipped:
            self._loss = loss
            self._view.step(report)

    # What happens between steps, where the host has waited for the device.

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _pauses(self, step: int) -> bool:
        """Whether the host does something behind this step that the device must not go on without."""
        train = self._config.train
        return (
            step == self._last
            or (self._due(train.validate_every, step) and self._validation is not None)
            or self._due(train.sample_every, step)
        )

    def _pause(self) -> None:
        """The step has been saved if that was due: what comes now may be long, and a kill here must not cost the step."""
        train = self._config.train
        if self._due(train.validate_every, self._done):
            self._validate()
        if self._due(train.sample_every, self._done) and self._done != self._last:
            text = self._draw_sample()
            if text is not None:
                self._view.sample(self._done, text)
        self._settled = time.monotonic()
        self._free = self._device.record()

    def _make_up(self) -> None:
        """A checkpoint is older than the validation of its step, and a stop or a kill may have dropped that one."""
        step = self._done
        if step and self._due(self._config.train.validate_every, step) and self._validated_step != step:
            self._validate()

    def _save(self, copy: StateCopy) -> None:
        """Hand the state of step `done` to the writer; waits for a save that is still being written."""
        self._watch.moved(f"step {self._done} is being saved")
        self._view.phase(f"saving step {self._done}")
        params, m, v = copy.wait()
        self._saved = Snapshot(
            step=self._done,
            params=params,
            m=m,
            v=v,
            position=_pair(self._position),
            best_val=self._best,
            elapsed=self._start.elapsed + time.monotonic() - self._began,
            state={**self._start.state, **self._guards.state(), "validated": self._validated_step},
            device_sum=self._state_sum,
        )
        self._saves.submit(self._saved)
        self._view.phase("")
        self._watch.moved(f"step {self._done + 1}", self._meter.median)

    def _validate(self) -> None:
        """The mean loss over the validation sequences, the same ones each time; dropped on a stop."""
        if self._validation is None or self._stop.requested:
            return
        self._view.phase("validating")
        tokens, targets = self._validation
        size = self._config.batch.micro_batch
        losses: list[float] = []
        for start in range(0, len(tokens), size):
            self._watch.moved(f"step {self._done} is being validated")
            part = slice(start, start + size)
            rows = self._step.row_losses(tokens[part], targets[part], lambda: self._stop.requested)
            losses += rows.reshape(-1).tolist()
            if self._stop.requested:
                return
        count = int(np.count_nonzero(targets >= 0))
        self._validated = math.fsum(losses) / count  # exact, so that the micro-batch does not show in it
        self._validated_step = self._done
        if math.isfinite(self._validated) and (self._best is None or self._validated < self._best):
            self._best = self._validated
        self._saves.validated(self._done, self._validated)
        self._metrics(step=self._done, validation_loss=self._validated, validation_tokens=count)
        self._view.validated(self._done, self._validated, count)
        self._view.phase("")
        self._watch.moved(f"step {self._done + 1}", self._meter.median)

    def _draw_sample(self) -> str | None:
        """Text from the model as it is; None once a stop is asked for."""
        if self._stop.requested:
            return None
        self._watch.moved(f"a sample behind step {self._done}")
        self._view.phase("sampling")
        text = None
        try:
            text = self._sample(lambda: self._stop.requested)
        except (
            OutOfMemory,
            MemoryError,
        ) as error:  # what it takes is not in the plan, and a run does not end for want of it
            self._view.note(f"no sample behind step {self._done}: {error}")
        self._view.phase("")
        self._watch.moved(f"step {self._done + 1}", self._meter.median)
        return text


def _pair(position: Any) -> tuple[int, int]:
    """A loader's position as plain numbers."""
    file, token = position if isinstance(position, tuple) else (position.file, position.token)
    return int(file), int(token)
