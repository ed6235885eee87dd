"""A process's part of a run: the trainer with its data, its writer of checkpoints and its signals, and what its end means.

`train` and `resume` differ in the state that they start from; everything else is here.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxtrain.data.errors import DataError
from ptxtrain.data.loader import Loader, Position, ValidationReader, sort_rows
from ptxtrain.engine.checkpoint import Saver, Snapshot
from ptxtrain.engine.config import Config
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.durable import read_regular
from ptxtrain.engine.errors import DeviceError, PtxtrainError, StoppedSaved, StoppedUnsaved
from ptxtrain.engine.feeder import I32
from ptxtrain.engine.generate import generate
from ptxtrain.engine.init import initial_weights
from ptxtrain.engine.metrics import Metrics, read_metrics
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.preflight import check_disk, make_step
from ptxtrain.engine.progress import Cadence, View
from ptxtrain.engine.rundir import TOKENIZER_LIMIT, RunDirectory, data_id, resume_command
from ptxtrain.engine.sampler import Sampling
from ptxtrain.engine.signals import Stop, StopRequested
from ptxtrain.engine.step import TrainStep
from ptxtrain.engine.trainer import Outcome, Trainer

_NOW_AND_THEN = 3.0  # seconds between two lines about what takes long

if TYPE_CHECKING:
    from ptxtrain.data.shards import Dataset, TokShard


def untrained(config: Config, seed: int) -> Snapshot:
    """The state of step 0, made on the host."""
    weights = initial_weights(config.model, seed)
    return Snapshot(0, weights, np.zeros_like(weights), np.zeros_like(weights), position=(0, 0))


def train(
    run: RunDirectory,
    config: Config,  # the run's own, but for what does not show in the result
    dataset: Dataset,
    device: Device,
    start: Snapshot,
    *,
    last: int,  # the step to end at
    numerics: str,
    decode: Callable[[Sequence[int]], str],
    stop: Stop,
    view: View,
    accepted: Sequence[str] = (),  # differences from what `start` was made with, by the names of `identity.KINDS`
    new: bool = False,  # the run was made just now, and goes again if it cannot begin
) -> Outcome:
    """Train from `start` to step `last`, and wait until the newest state is on disk.

    A stop by request returns an outcome that is not finished. Raises StoppedUnsaved where the newest state could not be saved,
    DeviceError, and PtxtrainError on data or numbers that cannot be used; each says which step is safe.
    """
    data = data_id(dataset.identity())
    resume = go_on(run, dataset, last)
    with Metrics(run.info.metrics, warn=view.note) as metrics:
        metrics.log(
            begins_after=start.step,
            digest=start.digest(),
            position=list(start.position),
            numerics=numerics,
            data=data,
            accepted=list(accepted),
        )
        saver = Saver(
            run,
            parameter_table(config.model),
            keep=config.train.keep,
            keep_every=config.train.keep_every,
            numerics_id=numerics,
            data_id=data,
            announce=view.note,
            warn=view.note,
        )
        stop.last_good = lambda: _newest(saver, start, resume)
        view.history(_losses(run, start.step))
        try:
            with stop.raising():
                config, loader, validation, step = _ready(run, config, dataset, device, start, last, view)
        except StopRequested:
            stop.describe = lambda: f"step {start.step} is being saved"
            saver.submit(start)
            return _ended(Outcome(start, False, None, None, None), saver, start, resume)
        except (PtxtrainError, DataError):
            if new:
                metrics.close()
                _discard(run)
            raise
        trainer = Trainer(
            config,
            device,
            step,
            start,
            last=last,
            reader=loader,
            sort=sort_rows,
            locate=lambda number, position: _batch(loader, run, dataset, number, position),
            validation=validation,
            sample=lambda stopping: _sample(step, config, dataset.end_of_text, decode, run.info.seed, stopping),
            saves=saver,
            metrics=metrics.log,
            cadence=Cadence(config.train.save_every, 60 * config.train.save_minutes),
            stop=stop,
            view=view,
        )
        try:
            outcome = trainer.run()
        except PtxtrainError as error:
            saver.wait()  # a snapshot is host memory: a device's failure does not touch it
            raise type(error)(f"{str(error).rstrip('.')}; {_newest(saver, start, resume)}") from error
        return _ended(outcome, saver, start, resume)


def _ready(
    run: RunDirectory, config: Config, dataset: Dataset, device: Device, start: Snapshot, last: int, view: View
) -> tuple[Config, Loader, tuple[I32, I32] | None, TrainStep]:
    """Everything that a step needs, cheap things first: data that cannot be used is found before kernels are compiled.

    The config comes back with a smaller micro-batch where its own does not fit the memory.
    """
    model = config.model
    check_disk(run, config, last, view.note)
    loader = Loader(dataset.train, model.context, model.vocab_size, Position(*start.position))
    validation = _validation(dataset.val, config, view)
    view.phase("making the kernels ready")
    device.progress = _compiled(view)
    config, step = make_step(config, device, view.note)
    for note in step.ways.notes:
        view.note(note)
    step.load(start.params, start.m, start.v)
    if (found := step.state_sum()) != start.sum():
        raise DeviceError(
            f"the device does not hold step {start.step} as it was sent: its bits have the sum {found:016x}, not "
            f"{start.sum():016x}; its memory, the bus or its driver is faulty"
        )
    view.phase("")
    return config, loader, validation, step


def _compiled(view: View) -> Callable[[int, int], None]:
    """Says now and then how many kernels have been compiled."""
    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > _NOW_AND_THEN:
            said = time.monotonic()
            view.phase(f"making the kernels ready: {done} of {total} large ones compiled")

    return progress


def _batch(loader: Loader, run: RunDirectory, dataset: Dataset, step: int, position: Position) -> str:
    """A step's batch in words: its sequences, where they lie, and the command that prints them."""
    parts = [
        f"{rows} sequence{'s' if rows > 1 else ''} of {loader.context} from token {start.token:,} of "
        f"{loader.shards[start.file].path}"
        for start, rows in loader.spans(position, run.config.batch.sequences)
    ]
    words = ["ptxtrain", "inspect-batch", str(run.path), "--step", str(step)]
    if (elsewhere := _elsewhere(run, dataset)) is not None:
        words += ["--data", str(elsewhere)]
    return f"{' and '.join(parts)}; `{shlex.join(words)}` prints them"


def mend_tokenizer(run: RunDirectory, dataset: Dataset, note: Callable[[str], None]) -> None:
    """Takes the dataset's tokenizer.json for the run's own where that is missing or damaged and its digest is the same.

    Raises PtxtrainError where it is another, or where it cannot be written.
    """
    try:
        run.info.check_tokenizer()
    except PtxtrainError as error:
        if dataset.tokenizer_digest != run.info.tokenizer_sha256:
            raise
        try:
            run.io.write_once(run.info.tokenizer, read_regular(Path(dataset.tokenizer_path), TOKENIZER_LIMIT))
        except OSError as failed:
            raise PtxtrainError(f"{error} It could not be done here: {failed.strerror}") from failed
        run.info.check_tokenizer()
        note(f"{run.info.tokenizer} was missing or damaged; copied again from {dataset.directory}")


def go_on(run: RunDirectory, dataset: Dataset, last: int) -> str:
    """The command that goes on to step `last` with these data, wherever the run ends."""
    return resume_command(run.path, last if last != run.config.train.steps else None, _elsewhere(run, dataset))


def _elsewhere(run: RunDirectory, dataset: Dataset) -> Path | None:
    """Where the data lie, if not where the run has them."""
    place = Path(dataset.directory)
    return None if str(place.resolve()) == run.config.data.path else place


def _newest(saver: Saver, start: Snapshot, resume: str) -> str:
    """Which state is safe, in words."""
    step = saver.last_saved if saver.last_saved is not None else (start.step or None)
    if step is None:
        return "nothing has been saved yet"
    return f"step {step} is the newest saved; go on with `{resume}`"


def stopped(outcome: Outcome, resume: str) -> StoppedSaved:
    """What a stop by request says. `resume` is the command that goes on."""
    return StoppedSaved(f"stopped; step {outcome.snapshot.step} is saved. Go on with: {resume}")


def _ended(outcome: Outcome, saver: Saver, start: Snapshot, resume: str) -> Outcome:
    """Wait for the last save. What the data did wrong is raised once the state before it is safe."""
    save = saver.wait()
    if save is not None and not save.saved:
        why = f"{str(outcome.failure).rstrip('.')}; " if outcome.failure is not None else ""
        raise StoppedUnsaved(f"{why}step {save.step} could not be saved: {save.error}; {_newest(saver, start, resume)}")
    if outcome.failure is not None:
        raise PtxtrainError(f"{str(outcome.failure).rstrip('.')}; {_newest(saver, start, resume)}") from outcome.failure
    return outcome


def _discard(run: RunDirectory) -> None:
    """A run that could not begin leaves nothing: `--run` may name its place again, and `resume` does not find it."""
    for name in ("run.json", "tokenizer.json", "metrics.jsonl", "run.lock"):
        with contextlib.suppress(OSError):
            run.io.unlink(run.path / name)
    with contextlib.suppress(OSError):
        run.io.rmdir(run.info.checkpoints)
        run.io.rmdir(run.path)


def _sample(
    step: TrainStep,
    config: Config,
    end_of_text: int,
    decode: Callable[[Sequence[int]], str],
    seed: int,
    stopping: Callable[[], bool],
) -> str | None:
    """A document from its start; None if a stop is asked for meanwhile."""
    tokens: list[int] = []
    for picked in generate(
        step.decoder(),
        [end_of_text],
        tokens=config.train.sample_tokens,
        sampling=Sampling(seed=seed),
        end=end_of_text,
    ):
        if stopping():
            return None
        if picked.token != end_of_text:
            tokens.append(picked.token)
    return decode(tokens)


def _losses(run: RunDirectory, upto: int) -> list[float]:
    """The losses of steps 1 to `upto`; of a step that two attempts ran, the later one's."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):  # no regular file, no permission: as `Metrics` has said, and no reason to stop
        lines = read_metrics(run.info.metrics)
    found = {
        line["step"]: line["loss"]
        for line in lines
        if isinstance(line.get("step"), int) and isinstance(line.get("loss"), float) and line["step"] <= upto
    }
    return [found[step] for step in sorted(found)]


def _validation(shards: Sequence[TokShard], config: Config, view: View) -> tuple[I32, I32] | None:
    """The validation sequences, tokens and targets [n, T]; None where the split holds none."""
    try:
        reader = ValidationReader(
            shards, config.model.context, config.model.vocab_size, config.train.validate_sequences
        )
    except DataError as error:
        view.note(f"no validation: {error}")
        return None
    tokens, targets = (np.empty((reader.count, config.model.context), np.int32) for _ in range(2))
    reader.read(0, tokens, targets)
    return tokens, targets
