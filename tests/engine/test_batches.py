"""A step's sequences are those that the loader reads, across shards and epochs, and only of the data it was trained on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxtrain.data.loader import Loader
from ptxtrain.data.shards import TokShard, write_shard
from ptxtrain.engine.batches import batch, batch_position
from ptxtrain.engine.config import load_preset
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.metrics import Metrics
from ptxtrain.engine.rundir import RunDirectory, RunInfo, data_id

SEQUENCES, CONTEXT = 4, 8


@dataclasses.dataclass
class Data:
    """As much of a dataset as is looked at."""

    directory: Path
    train: list[TokShard]

    def identity(self) -> dict[str, Any]:
        return {"shards": [{"name": shard.path.name, "digest": shard.digest} for shard in self.train]}


def made(folder: Path, *counts: int) -> Data:
    folder.mkdir()
    for index, count in enumerate(counts):
        write_shard(folder / f"train-{index:06d}.tok", (np.arange(count) * 7 + index) % 50, vocab_size=50)
    return Data(folder, [TokShard(folder / f"train-{index:06d}.tok") for index in range(len(counts))])


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return made(tmp_path / "data", 60, 5, 43, 90)  # 7, none, 5 and 11 sequences


@pytest.fixture
def info(data: Data, tmp_path: Path) -> RunInfo:
    config = load_preset("tiny")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, context=CONTEXT, vocab_size=50),
        batch=dataclasses.replace(config.batch, sequences=SEQUENCES, micro_batch=2, leaves=2),
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    with RunDirectory.create(
        tmp_path / "run",
        config,
        data_identity=data.identity(),
        tokenizer_path=tmp_path / "tokenizer.json",
        numerics_id="cpu",
    ) as run:
        return run.info


def test_sequences_are_what_the_loader_reads(info: RunInfo, data: Data) -> None:
    loader = Loader(data.train, CONTEXT, 50)
    tokens, targets = (np.empty((SEQUENCES, CONTEXT), np.int32) for _ in range(2))
    again = 23 * 10**15 + 1  # 23 sequences an epoch
    assert batch_position(info, data, again) == batch_position(info, data, 1)  # type: ignore[arg-type]
    for step in range(1, 15):
        where = loader.position
        loader.read(SEQUENCES, tokens, targets)
        assert batch_position(info, data, step) == where  # type: ignore[arg-type]
        found = list(batch(info, data, step))  # type: ignore[arg-type]
        assert [one.tokens.tolist() for one in found] == tokens.tolist()
        assert [one.leaf for one in found] == [0, 0, 1, 1] and [one.index for one in found] == [0, 1, 2, 3]
        for one in found:
            index = int(one.shard[6:12])
            assert data.train[index].read(one.token, one.token + CONTEXT).tolist() == one.tokens.tolist()


def test_other_data_than_the_steps_are_refused_and_accepted_ones_found(
    info: RunInfo, data: Data, tmp_path: Path
) -> None:
    other = made(tmp_path / "other", 77)
    with pytest.raises(PtxtrainError, match=r"is not what step 3 of .*run was trained on"):
        batch_position(info, other, 3)  # type: ignore[arg-type]
    with Metrics(info.metrics, pytest.fail) as metrics:
        metrics.log(begins_after=0, data=info.data_id, position=[0, 0])
        for step in (1, 2, 3):
            metrics.log(step=step, loss=1.0)
    with Metrics(info.metrics, pytest.fail) as metrics:
        metrics.log(begins_after=3, data=data_id(other.identity()), position=[0, 16], accepted=["data"])
        for step in (4, 5):
            metrics.log(step=step, loss=1.0)
    place = batch_position(info, other, 5)  # type: ignore[arg-type]
    assert (place.file, place.token) == (0, 16 + SEQUENCES * CONTEXT)
    assert batch_position(info, data, 3).token == 8  # type: ignore[arg-type]
    for wrong, step in ((data, 4), (other, 2)):
        with pytest.raises(PtxtrainError, match="was trained on"):
            batch_position(info, wrong, step)  # type: ignore[arg-type]
    info.metrics.write_text(json.dumps({"attempt": 1}))
    (info.path / "metrics.jsonl").unlink()
    (info.path / "metrics.jsonl").symlink_to("run.json")
    with pytest.raises(PtxtrainError, match=r"metrics\.jsonl cannot be read"):
        batch_position(info, data, 1)  # type: ignore[arg-type]
