"""What `train` and `resume` share: find the data, open the device, hold the run, watch it, print how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptxtrain.cli.display import LiveView, make_view, size
from ptxtrain.cli.main import say, silence_stdout
from ptxtrain.engine import rundir
from ptxtrain.engine.config import Config, from_dict, parse_override, to_dict
from ptxtrain.engine.errors import PtxtrainError, StoppedSaved
from ptxtrain.engine.signals import Stop, StopRequested

if TYPE_CHECKING:
    from ptxtrain.data.shards import Dataset
    from ptxtrain.engine.checkpoint import Snapshot
    from ptxtrain.engine.device.base import Device
    from ptxtrain.engine.rundir import RunDirectory
    from ptxtrain.engine.trainer import Outcome

# Keys that a resumed run may change: none of them shows in weights, m, v or losses.
FREE = (
    *("batch.micro_batch", "train.validate_every", "train.validate_sequences", "train.sample_every"),
    *("train.sample_tokens", "train.save_every", "train.save_minutes", "train.keep", "train.keep_every"),
    *("train.spike", "train.spike_window", "train.spike_sigma", "train.watchdog_seconds", "train.skip_nonfinite"),
)


def start_run(
    config: Config,
    data: Path | None,
    path: Path | None,
    *,
    wanted: str | None,
    threads: int | None,
    checked: bool | None = None,
) -> None:
    """Make a run and train it. Raises PtxtrainError and its kin."""
    from ptxtrain.engine.numerics import numerics_id
    from ptxtrain.engine.session import untrained

    path = path or rundir.new_run_path(config.name)
    rundir.refuse_existing(path)  # before minutes go into data or kernels
    stop = Stop()
    with stop.handlers(), _as_error(PtxtrainError("stopped; the run was not begun")):
        with stop.raising():
            dataset, config = find_dataset(config, data)
            device = open_and_say(wanted, threads, checked)
            numerics = numerics_id(device)
            run = rundir.RunDirectory.create(
                path,
                config,
                data_identity=dataset.identity(),
                tokenizer_path=dataset.tokenizer_path,
                numerics_id=numerics,
            )
        with run:
            start = untrained(config, run.info.seed)
            _train(run, config, dataset, device, start, config.train.steps, numerics, stop, new=True)


def resume_run(
    path: Path | None,
    *,
    step: int | None,
    steps: int | None,
    data: Path | None,
    overrides: Sequence[str],
    accept: Collection[str],
    wanted: str | None,
    threads: int | None,
) -> None:
    """Carry on a run. Nothing in it is touched before everything that could refuse has been looked at. Raises PtxtrainError
    and its kin."""
    from ptxtrain.engine import identity, session
    from ptxtrain.engine.checkpoint import NoCheckpoint, clear_leftovers, list_steps, load_and_refused, make_ready
    from ptxtrain.engine.numerics import numerics_id
    from ptxtrain.engine.parameters import parameter_table

    path = path or rundir.newest_run(note=say)
    stop = Stop()
    unchanged = StoppedSaved(f"stopped; the run is as it was. Go on with: {rundir.resume_command(path, steps, data)}")
    with stop.handlers(), _as_error(unchanged), rundir.RunDirectory.open(path) as run:
        with stop.raising():
            config = changed(run.config, overrides)
            try:
                if step == 0 and 0 not in list_steps(path):
                    raise NoCheckpoint
                start, refused = load_and_refused(path, parameter_table(config.model), step=step, note=say)
            except NoCheckpoint:
                if step:
                    raise
                say(f"{path} {'' if step == 0 else 'has no checkpoint: it '}starts again from step 0")
                start, refused = session.untrained(config, run.info.seed), set()
            last = steps if steps is not None else config.train.steps
            if start.step >= last:
                clear_leftovers(run, say)
                _finished(path, start, last, steps is not None)
                return
            dataset = run_dataset(config, data)
            device = open_and_say(wanted, threads)
            numerics = numerics_id(device)
            accepted = identity.refuse(path, identity.changes(start, run.info, dataset, numerics), accept)
            for change in accepted:
                say(f"accepted: {change.text}")
            session.mend_tokenizer(run, dataset, say)
            if any(change.what == "data" for change in accepted):
                start.position = identity.start_position(start, run.info, dataset)
                say(f"going on at {dataset.train[start.position[0]].path}, token {start.position[1]:,}")
            make_ready(run, start, refused, note=say)
        say(f"resuming {path} behind step {start.step}")
        names = [change.what for change in accepted]
        _train(run, config, dataset, device, start, last, numerics, stop, names)


def changed(config: Config, overrides: Sequence[str]) -> Config:
    """The run's config with settings that do not show in its result."""
    values = to_dict(config)
    for text in overrides:
        section, key, value = parse_override(text)
        if f"{section}.{key}" not in FREE and values[section][key] != value:
            remedy = f"--steps {value} goes on to another last step" if key == "steps" else "Start another run for it"
            raise PtxtrainError(
                f"--set {text}: the run has {section}.{key} = {values[section][key]}, and changing it would change the "
                f"result; resume may change {', '.join(FREE)}. {remedy}"
            )
        values[section][key] = value
    return from_dict(values, "the run's configuration")


def find_dataset(config: Config, data: Path | None) -> tuple[Dataset, Config]:
    """The dataset to train on, and the config that names it by its full path.

    `data` if given, else the preset's own if it is there, else the sample corpus, made on first use. Raises PtxtrainError on
    one that is missing or has another vocabulary than the model.
    """
    from ptxtrain.data.build import ensure_sample_dataset
    from ptxtrain.data.shards import Dataset

    vocab = config.model.vocab_size
    if data is not None:
        dataset = Dataset(data)
    elif config.data.path and Path(config.data.path).is_dir():
        dataset = Dataset(Path(config.data.path))
        say(f"data: {config.data.path}, the preset's own dataset")
    else:
        where = f"{config.data.path} is not there" if config.data.path else "no --data was given"
        say(f"DATA: {where}: training on the SAMPLE CORPUS @stdlib, this Python's own sources, at vocabulary {vocab:,}")
        dataset = ensure_sample_dataset(vocab, progress=_phases(), note=say)
    if dataset.vocab_size != vocab:
        raise PtxtrainError(
            f"wrong vocabulary: {dataset.directory} has {dataset.vocab_size:,} tokens and the model {vocab:,}. Tokenise the text "
            f"with --vocab-size {vocab}, or train with --set model.vocab_size={dataset.vocab_size}"
        )
    where = str(Path(dataset.directory).resolve())
    return dataset, dataclasses.replace(config, data=dataclasses.replace(config.data, path=where))


def _phases() -> Callable[[str, int, int], None]:
    """Says each new phase of the tokenising once."""
    said = ""

    def progress(what: str, _done: int, total: int) -> None:
        nonlocal said
        if what != said:
            said = what
            say(f"{what}, {size(total)} …" if total else f"{what} …")

    return progress


def run_dataset(config: Config, data: Path | None) -> Dataset:
    """What lies where the run's dataset lay, or at `data`. Raises PtxtrainError where nothing does."""
    from ptxtrain.data.shards import Dataset

    place = data or Path(config.data.path)
    if not place.is_dir():
        raise PtxtrainError(f"the run's dataset is not at {place}; say where it is now with --data DIR")
    return Dataset(place)


def open_and_say(wanted: str | None, threads: int | None, checked: bool | None = None) -> Device:
    """The device that is wanted, named with its reason on stderr."""
    from ptxtrain.engine.device.choice import open_device

    device, choice = open_device(wanted, threads, checked)
    say(f"device: {device.name} ({choice})")
    return device


def _train(
    run: RunDirectory,
    config: Config,
    dataset: Dataset,
    device: Device,
    start: Snapshot,
    last: int,
    numerics: str,
    stop: Stop,
    accepted: Sequence[str] = (),
    new: bool = False,
) -> None:
    from ptxtrain.data.tokenizer import load_tokenizer
    from ptxtrain.engine import session

    tokenizer = load_tokenizer(run.info.tokenizer, run.info.tokenizer_sha256)
    view = make_view(str(run.path), start.step, last)
    if isinstance(view, LiveView):
        stop.announce = view.notice
    try:
        outcome = session.train(
            run,
            config,
            dataset,
            device,
            start,
            last=last,
            numerics=numerics,
            decode=tokenizer.decode,
            stop=stop,
            view=view,
            accepted=accepted,
            new=new,
        )
    finally:
        view.close()
    _print_results(run.path, outcome, last)
    if not outcome.finished:
        raise session.stopped(outcome, session.go_on(run, dataset, last))


def _print_results(path: Path, outcome: Outcome, last: int) -> None:
    """On stdout, the digest last. A reader that has gone changes nothing: the state is saved."""
    lines = [f"run {path}", f"step {outcome.snapshot.step} of {last}"]
    if outcome.loss is not None:
        lines.append(f"loss {outcome.loss:.6f}")
    if outcome.validation is not None:
        lines.append(f"validation loss {outcome.validation:.6f}")
    if outcome.sample is not None:
        lines.append(f"sample:\n{outcome.sample}")
    lines.append(f"digest {outcome.snapshot.digest()}")
    try:
        click.echo("\n".join(lines))
        sys.stdout.flush()
    except (OSError, ValueError):
        silence_stdout()


def _finished(path: Path, start: Snapshot, last: int, asked: bool) -> None:
    if asked and start.step > last:
        raise PtxtrainError(f"{path} stands at step {start.step}, past --steps {last}; give it a later step")
    say(f"{path} has finished its {last} steps; `{rundir.resume_command(path)} --steps N` takes it further")
    click.echo(f"digest {start.digest()}")


@contextlib.contextmanager
def _as_error(error: PtxtrainError) -> Iterator[None]:
    """A stop while nothing needs saving. Before there is a run it is no exit code 2, which promises something to resume."""
    try:
        yield
    except StopRequested:
        raise error from None
