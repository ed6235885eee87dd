"""Runs a part of a run again, in memory alone, and holds every step against what the run wrote down.

Losses, gradient norms and the digest of the state behind each step must come out to the last bit; where they do not, the kernels,
the data, the device or its memory are not what they were. The training loop is the run's own; nothing is saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ptxtrain.data.loader import Loader, Position, sort_rows
from ptxtrain.engine.checkpoint import Snapshot, list_steps, load, step_name
from ptxtrain.engine.checkpointfiles import read_snapshot
from ptxtrain.engine.compare import differences
from ptxtrain.engine.config import Config
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.history import BITS, History, read_history, shown
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.preflight import make_step
from ptxtrain.engine.progress import Cadence, View
from ptxtrain.engine.rundir import RunInfo
from ptxtrain.engine.sealed import Damaged
from ptxtrain.engine.session import untrained
from ptxtrain.engine.signals import Stop
from ptxtrain.engine.trainer import Trainer

if TYPE_CHECKING:
    from ptxtrain.data.shards import Dataset

_ANY_NUMBER = 1 << 30


class Mismatch(PtxtrainError):
    """A step came out otherwise than the run has it."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What agreed."""

    first: int  # step
    last: int
    compared: int  # steps whose line was there to compare with
    digest: str  # of the state behind `last`
    checkpoint: bool  # whether the run's own checkpoint of `last` was there, and has the same bits


class _NoSaves:
    """Takes snapshots and keeps nothing."""

    def submit(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def validated(self, step: int, loss: float) -> None:
        """Nothing."""


def span(info: RunInfo, first: int | None, last: int | None) -> tuple[int, int]:
    """(A, B) to replay from checkpoint A to step B: by default the two newest checkpoints, or from step 0 to the only one.

    Raises:
        PtxtrainError: there is no checkpoint A (0 needs none), or B is not behind it.
    """
    steps = list_steps(info.path)
    if last is None:
        if not steps:
            raise PtxtrainError(f"{info.path} has no checkpoint; say with --to which step to replay to")
        last = steps[-1]
    if first is None:
        first = max((step for step in steps if step < last), default=0)
    if first >= last:
        raise PtxtrainError(f"--from {first} is not before --to {last}; a replay goes forward")
    if first and first not in steps:
        raise PtxtrainError(
            f"{info.path} has no checkpoint of step {first} to start from; it has {', '.join(map(str, steps)) or 'none'}, "
            "and 0 needs none"
        )
    return first, last


def start_of(info: RunInfo, step: int) -> Snapshot:
    """The state to begin with. Raises PtxtrainError where the checkpoint cannot be used."""
    if step == 0:
        return untrained(info.config, info.seed)
    return load(info.path, parameter_table(info.config.model), step=step)


def replay(
    info: RunInfo,
    config: Config,  # the run's own, but for what does not show in the result
    dataset: Dataset,
    device: Device,
    start: Snapshot,
    last: int,
    view: View,
) -> Replayed:
    """Train from `start` to step `last` and compare.

    Raises:
        Mismatch: a step's numbers or the last state are not the run's; it names the first, with both values.
        PtxtrainError: the run wrote nothing down about these steps, or a step ended it then as now.
    """
    history = _history(info)
    if not any(history.expected(step) for step in range(start.step + 1, last + 1)):
        raise PtxtrainError(f"{info.metrics} has no line of steps {start.step + 1} to {last}: nothing to compare with")
    comparer = _Comparer(history, start)
    config, step = make_step(config, device, view.note)
    step.load(start.params, start.m, start.v)
    train = dataclasses.replace(config.train, validate_every=0, sample_every=0, save_every=0, save_minutes=0.0)
    # Where a guard stopped the run, somebody told it to go on.
    train = dataclasses.replace(train, spike="off", skip_nonfinite=_ANY_NUMBER)
    trainer = Trainer(
        dataclasses.replace(config, train=train),
        device,
        step,
        start,
        last=last,
        reader=Loader(dataset.train, config.model.context, config.model.vocab_size, Position(*start.position)),
        sort=sort_rows,
        locate=lambda number, position: f"`ptxtrain inspect-batch {info.path} --step {number}` prints it",
        validation=None,
        sample=lambda stopping: None,
        saves=_NoSaves(),
        metrics=comparer.line,
        cadence=Cadence(),
        stop=Stop(),
        view=view,
    )
    try:
        outcome = trainer.run()
    except BaseException:
        device.interrupt()  # what is queued behind a step that is wrong, or was not waited for
        with contextlib.suppress(PtxtrainError):
            device.synchronize()
        raise
    if outcome.failure is not None:
        raise PtxtrainError(str(outcome.failure))
    end = outcome.snapshot
    return Replayed(start.step + 1, last, comparer.compared, end.digest(), _same_as_checkpoint(info, end))


def _history(info: RunInfo) -> History:
    try:
        return read_history(info.metrics)
    except Damaged as error:
        raise PtxtrainError(f"{info.path}: {error}") from error


class _Comparer:
    """Takes the lines that the training loop would write, in the place of the run's metrics."""

    def __init__(self, history: History, start: Snapshot) -> None:
        self._history = history
        self._before = start.digest()
        self.compared = 0

    def line(self, **values: Any) -> None:
        if "digest" not in values:
            return
        step = values["step"]
        expected = self._history.expected(step, self._before)
        self._before = values["digest"]
        if expected is None:
            return
        self.compared += 1
        for key in BITS:
            if (
                key in expected
                and expected[key] != values[key]
                and not (expected[key] is None and _not_finite(values[key]))
            ):
                raise Mismatch(
                    f"step {step} did not come out again: {key} is {shown(values[key])} here, {shown(expected[key])} in the run"
                )


def _not_finite(value: Any) -> bool:
    """What metrics write as null."""
    return isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))


def _same_as_checkpoint(info: RunInfo, end: Snapshot) -> bool:
    """Whether the run has a checkpoint of that step. Raises Mismatch where it holds another state."""
    if end.step not in list_steps(info.path):
        return False
    table = parameter_table(info.config.model)
    try:
        there = read_snapshot(info.checkpoints / step_name(end.step), table, info.run_id, end.step)
    except Damaged as error:
        raise PtxtrainError(f"{info.path}: {step_name(end.step)} cannot be used: {error}") from error
    if found := differences(table, end, there):
        raise Mismatch(f"step {end.step} did not come out again: replayed | checkpoint: {found[0]}")
    return True


def describe(replayed: Replayed, path: Any) -> list[str]:
    """The result in lines, the digest last."""
    steps = replayed.last - replayed.first + 1
    lines = [
        f"replayed steps {replayed.first} to {replayed.last} of {path}: {replayed.compared} of {steps} compared with its "
        "metrics, all to the bit"
    ]
    if replayed.checkpoint:
        lines.append(f"the checkpoint of step {replayed.last} holds the same bits")
    return [*lines, f"digest {replayed.digest}"]
