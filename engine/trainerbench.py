"""What the training loop itself costs: the time of a step that is no kernel, and what a save adds to it.

The real loop and the real writer of checkpoints, on random tokens. On the CPU device the kernels are timed around the native
calls, on the device's own thread; all else (copies, fills, Python between launches, waits for the host) is what is left of the
time from one step's end to the next. A GPU's kernels are not timed apart; there the wait for the host and the copy can be told.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ptxtrain.data.loader import sort_rows
from ptxtrain.engine import init
from ptxtrain.engine.checkpoint import Saver, Snapshot
from ptxtrain.engine.config import Config, ModelConfig
from ptxtrain.engine.device.base import Device, Event
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.feeder import I32
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.progress import Cadence, View
from ptxtrain.engine.rundir import RunDirectory
from ptxtrain.engine.signals import Stop
from ptxtrain.engine.staging import StateCopy, StepResult
from ptxtrain.engine.step import TrainStep
from ptxtrain.engine.trainer import Trainer

WARM = 2  # steps that do not count


@dataclass(frozen=True, slots=True)
class TrainerTimes:
    """Seconds a step, medians. `kernels` is None on a device whose kernels the host cannot time."""

    preset: str
    way: str
    threads: int | None
    steps: int
    step: float
    kernels: float | None
    device_wait: float  # the device had nothing to do until the host queued more
    trainer_cpu: float  # processor time of the loop's own thread
    reader_cpu: float  # and of the one that reads and sorts
    snapshot: float  # the device's, for copying the state to the host
    save_stall: float | None  # what more of a step is no kernel when a save is written during it
    saves: int

    @property
    def overhead(self) -> float | None:
        """The share of a step that is no kernel."""
        return None if self.kernels is None else 1.0 - self.kernels / self.step

    def to_json(self) -> dict[str, Any]:
        """The report as `ptxtrain bench --trainer … --json` prints it, in milliseconds."""
        names = ("step", "kernels", "device_wait", "trainer_cpu", "reader_cpu", "snapshot", "save_stall")
        values = {name: getattr(self, name) for name in names}
        times = {f"{name}_ms": None if value is None else round(1e3 * value, 4) for name, value in values.items()}
        overhead = None if self.overhead is None else round(self.overhead, 5)
        facts = {"preset": self.preset, "way": self.way, "threads": self.threads, "steps": self.steps}
        return {**facts, **times, "overhead": overhead, "saves": self.saves}


class _Reader:
    """Random tokens, and the processor time that making and sorting a step's took."""

    def __init__(self, model: ModelConfig) -> None:
        self._vocab = model.vocab_size
        self._rng = np.random.default_rng(0)
        self.position = (0, 0)
        self.cpu: list[float] = []

    def read(self, sequences: int, tokens: I32, targets: I32) -> None:
        began = time.thread_time()
        text = self._rng.integers(0, self._vocab, (sequences, tokens.shape[1] + 1), np.int32)
        tokens[:], targets[:] = text[:, :-1], text[:, 1:]
        self.position = (0, self.position[1] + tokens.size)
        self.cpu.append(time.thread_time() - began)

    def sort(self, tokens: I32, vocab: int, order: I32, starts: I32) -> None:
        began = time.thread_time()
        sort_rows(tokens, vocab, order, starts)
        self.cpu[-1] += time.thread_time() - began


class _Watched(TrainStep):
    """A step that notes, on the CPU device's own thread, when each one ended and how long kernels had run until then."""

    def __init__(self, config: Config, device: Device) -> None:
        super().__init__(config, device)
        self.kernels = 0.0
        self.ends: list[tuple[float, float]] = []  # perf_counter, kernels
        self.copies: list[tuple[Event, Event]] = []
        if isinstance(device, CpuDevice):
            self._time(device)

    def _time(self, device: CpuDevice) -> None:
        run = device._run

        def timed(*args: Any, **options: Any) -> None:
            began = time.perf_counter()
            run(*args, **options)
            self.kernels += time.perf_counter() - began

        device._run = timed  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave the device as it was."""
        vars(self.device).pop("_run", None)

    def finish(self, step: int, lr: float) -> StepResult:
        result = super().finish(step, lr)
        if isinstance(self.device, CpuDevice):
            self.device._put(lambda: self.ends.append((time.perf_counter(), self.kernels)))
        return result

    def begin_snapshot(self) -> StateCopy:
        before = self.device.record()
        copy = super().begin_snapshot()
        self.copies.append((before, self.device.record()))
        return copy


class _Log:
    """What the loop says of each step."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.cpu: list[float] = []  # the loop's processor time so far

    def __call__(self, **line: Any) -> None:
        self.lines.append(line)
        self.cpu.append(time.thread_time())


def measure(device: Device, config: Config, steps: int = 24, save_every: int = 6) -> TrainerTimes:
    """Train for so many steps, saving now and then into a directory that is removed again."""
    train = replace(config.train, steps=WARM + steps, validate_every=0, sample_every=0, save_every=save_every, keep=2)
    config = replace(config, train=train)
    step, reader, log = _Watched(config, device), _Reader(config.model), _Log()
    try:
        _train(config, device, step, reader, log, WARM + steps)
    finally:
        step.close()
    return _summary(config, device, step, steps, reader, log)


def _train(config: Config, device: Device, step: _Watched, reader: _Reader, log: _Log, last: int) -> None:
    """The real loop from fresh weights, and the real writer."""
    weights = init.initial_weights(config.model, config.train.seed)
    zero = np.zeros_like(weights)
    step.load(weights, zero, zero)
    with tempfile.TemporaryDirectory(prefix="ptxtrain-bench-") as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        tokenizer.write_text("{}")
        with RunDirectory.create(
            Path(folder) / "run", config, data_identity={}, tokenizer_path=tokenizer, numerics_id="bench"
        ) as run:
            saver = Saver(run, parameter_table(config.model), keep=2, announce=lambda _: None, warn=lambda _: None)
            Trainer(
                config,
                device,
                step,
                Snapshot(0, weights, zero, zero, (0, 0)),
                last=last,
                reader=reader,
                sort=reader.sort,
                locate=lambda number, position: "random tokens",
                validation=None,
                sample=lambda stopping: None,
                saves=saver,
                metrics=log,
                cadence=Cadence(config.train.save_every),
                stop=Stop(),
                view=View(),
            ).run()
            saver.wait()


def _summary(config: Config, device: Device, step: _Watched, steps: int, reader: _Reader, log: _Log) -> TrainerTimes:
    seconds = [line["seconds"] for line in log.lines[WARM:]]
    kernels = stall = None
    if isinstance(device, CpuDevice):
        walls, worked = zip(*step.ends, strict=True)
        seconds, kernels_of = _gaps(walls)[WARM - 1 :], _gaps(worked)[WARM - 1 :]
        kernels = statistics.fmean(kernels_of)
        # The copy behind step k is on the queue before step k + 1: it counts to that one, as does the writing.
        others = [wall - work for wall, work in zip(seconds, kernels_of, strict=True)]
        saved = [(WARM + i) % config.train.save_every == 0 for i in range(len(others))]
        within, without = ([o for o, s in zip(others, saved, strict=True) if s is which] for which in (True, False))
        if within and without:
            stall = statistics.median(within) - statistics.median(without)
    return TrainerTimes(
        preset=config.name,
        way=step.way,
        threads=device.threads if isinstance(device, CpuDevice) else None,
        steps=steps,
        step=statistics.fmean(seconds),
        kernels=kernels,
        device_wait=statistics.median(line["device_wait"] for line in log.lines[WARM:]),
        trainer_cpu=statistics.median(_gaps(log.cpu)[WARM - 1 :]),
        reader_cpu=statistics.median(reader.cpu[WARM:]),
        snapshot=statistics.median(after.since(before) for before, after in step.copies),
        save_stall=stall,
        saves=len(step.copies),
    )


def _gaps(values: Sequence[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(values)]
