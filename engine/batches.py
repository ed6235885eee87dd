"""Which sequences a step of a run was trained on, without training it.

What a loader reads depends on its position alone. Each checkpoint holds one, and so does each attempt's first line in the
metrics, beside the id of the data in which it counts. Unless the data were changed, the start of the first shard is one too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ptxtrain.data.loader import Loader, Position
from ptxtrain.data.shards import Dataset
from ptxtrain.engine.checkpoint import list_steps, step_name
from ptxtrain.engine.checkpointfiles import read_manifest
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.feeder import I32
from ptxtrain.engine.history import History, read_history
from ptxtrain.engine.rundir import RunInfo, data_id
from ptxtrain.engine.sealed import Damaged


@dataclass(frozen=True, slots=True)
class Sequence:
    """One of a step's sequences. Targets are the tokens one later."""

    index: int  # in the step, 0 … S - 1
    leaf: int
    shard: str  # file name
    token: int  # where it starts in the shard
    tokens: I32  # [T]


def batch_position(info: RunInfo, dataset: Dataset, step: int) -> Position:
    """Where the batch of `step` (from 1) starts in `dataset`.

    Raises:
        PtxtrainError: the run did not read these data at that step, or its metrics cannot be read.
    """
    here = data_id(dataset.identity())
    try:
        history = read_history(info.metrics)
    except Damaged as error:
        raise PtxtrainError(f"{info.path}: {error}") from error
    made = {attempt.begin.get("data", here) for attempt, _ in history.of_step(step)}
    known = _known_positions(info, history, here)
    before = [at for at in known if at < step]
    if not before or (made and here not in made):
        raise PtxtrainError(
            f"{dataset.directory} is not what step {step} of {info.path} was trained on; say with --data DIR where that lies"
        )
    start = max(before)
    loader = _loader(info, dataset, Position(*known[start]))
    skipped = (step - 1 - start) * info.config.batch.sequences % loader.sequences_in_epoch
    return _behind(loader, skipped) if skipped else loader.position


def _known_positions(info: RunInfo, history: History, data: str) -> dict[int, tuple[int, int]]:
    """Steps behind which the place in these data is known."""
    known = {0: (0, 0)} if data == info.data_id else {}
    for attempt in history.attempts:
        place = attempt.begin.get("position")
        if attempt.begin.get("data") != data or not isinstance(place, list):
            continue
        if len(place) == 2 and all(isinstance(number, int) for number in place):
            known[attempt.begin["begins_after"]] = (place[0], place[1])
    for step in list_steps(info.path):
        with contextlib.suppress(Damaged):
            manifest = read_manifest(info.checkpoints / step_name(step), info.run_id, step)
            if manifest.data_id == data:
                known[step] = manifest.position
    return known


def _loader(info: RunInfo, dataset: Dataset, position: Position) -> Loader:
    return Loader(dataset.train, info.config.model.context, info.config.model.vocab_size, position)


def _behind(loader: Loader, sequences: int) -> Position:
    for start, rows in loader.spans(loader.position, sequences):
        last = Position(start.file, start.token + rows * loader.context)
    return next(loader.spans(last, 1))[0]  # in the next shard if that one is used up


def batch(info: RunInfo, dataset: Dataset, step: int) -> Iterator[Sequence]:
    """The sequences of `step` in order.

    Raises:
        PtxtrainError: as `batch_position`.
        DataError: the data are not what they were.
    """
    position = batch_position(info, dataset, step)
    loader = _loader(info, dataset, position)
    size, context = info.config.batch, info.config.model.context
    places = [
        Position(start.file, start.token + row * context)
        for start, rows in loader.spans(position, size.sequences)
        for row in range(rows)
    ]
    tokens, targets = (np.empty((1, context), np.int32) for _ in range(2))
    for index, place in enumerate(places):
        loader.read(1, tokens, targets)
        name = loader.shards[place.file].path.name
        yield Sequence(index, index * size.leaves // size.sequences, name, place.token, tokens[0].copy())
