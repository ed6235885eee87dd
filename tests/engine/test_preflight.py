"""Before step 1: the micro-batch that fits the memory, with the same bits, and the disk that the checkpoints need."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import modelbench as bench
import numpy as np
import pytest
from statebench import make_run

from ptxtrain.engine import preflight
from ptxtrain.engine.checkpoint import checkpoint_bytes
from ptxtrain.engine.config import Config, TrainConfig, load_preset
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.leaves import memory_plan
from ptxtrain.engine.parameters import parameter_table


def small(micro_batch: int = 4) -> Config:
    return bench.config(bench.SHORT, 8, micro_batch, 2)


def needs(micro_batch: int) -> int:
    return sum(memory_plan(small(micro_batch), small().train.way).values())


@pytest.fixture(scope="module")
def one() -> Iterator[CpuDevice]:
    """One for all: it parses the kernels once."""
    opened = CpuDevice()
    yield opened
    opened.close()


@pytest.fixture
def capped(one: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], CpuDevice]:
    """The device with so many bytes to hand out."""

    def with_room(nbytes: int) -> CpuDevice:
        gc.collect()
        monkeypatch.setattr(one, "_limit", nbytes)
        monkeypatch.setattr(one, "_taken", 0)
        return one

    return with_room


@pytest.mark.parametrize(("room", "size"), [(needs(4), 4), (needs(4) - 1, 2), (needs(2) - 1, 1), (needs(1), 1)])
def test_a_micro_batch_that_does_not_fit_is_halved_until_it_does(
    room: int, size: int, capped: Callable[[int], CpuDevice]
) -> None:
    notes: list[str] = []
    config, step = preflight.make_step(small(), capped(room), notes.append)
    assert config.batch.micro_batch == step.micro_size == size
    assert [note.split(" sequences")[0] for note in notes] == [
        f"memory: a micro-batch of {tried}" for tried in (4, 2) if tried > size
    ]
    assert all("the same bits" in note for note in notes)


def test_what_only_allocating_finds_out_halves_too(
    capped: Callable[[int], CpuDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose free memory is in pieces: the plan fits, an allocation does not."""
    device, notes = capped(needs(2)), []
    monkeypatch.setattr(device, "free_memory", lambda: None)
    config, step = preflight.make_step(small(), device, notes.append)
    assert config.batch.micro_batch == step.micro_size == 2
    assert "out of memory" in notes[0] and len(notes) == 1


def test_halving_leaves_the_bits(capped: Callable[[int], CpuDevice]) -> None:
    flat = bench.weights(bench.SHORT)
    zero = np.zeros_like(flat)
    states = []
    for room in (needs(4), needs(1)):
        config, step = preflight.make_step(small(), capped(room), lambda text: None)
        step.load(flat, zero, zero)
        bench.queue(step, *bench.batch(bench.SHORT, 8))
        step.finish(1, 1e-3).wait()
        states.append((config.batch.micro_batch, step.state_sum()))
    assert [size for size, _ in states] == [4, 1]
    assert states[0][1] == states[1][1]


def test_where_nothing_fits_the_bytes_needed_are_named(capped: Callable[[int], CpuDevice]) -> None:
    with pytest.raises(PtxtrainError, match="of one sequence") as caught:
        preflight.make_step(small(), capped(needs(1) - 1), lambda text: None)
    assert f"({needs(1):,} bytes) are needed" in str(caught.value) and caught.value.exit_code == 1
    assert "\n" not in str(caught.value)


def test_the_hosts_memory_counts_too(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "host_free", lambda: 1000)
    assert "are needed on the host and 1000 B are free" in (preflight.missing(small(), device) or "")
    monkeypatch.setattr(preflight, "host_free", lambda: None)
    assert preflight.missing(small(), device) is None


@pytest.mark.parametrize(
    ("train", "last", "count"),
    [
        ({"save_every": 10, "keep": 3}, 1000, 5),  # three, the best one, and one being written
        ({"save_every": 10, "keep": 3}, 15, 3),  # saves of 10 and 15 alone
        ({"save_every": 0, "keep": 3}, 1000, 2),
        ({"save_every": 0, "save_minutes": 10.0, "keep": 3}, 1000, 5),
        ({"save_every": 10, "keep": 3, "keep_every": 100}, 1000, 15),
    ],
)
def test_checkpoints_that_lie_on_the_disk_at_once(train: dict[str, float], last: int, count: int) -> None:
    assert preflight.checkpoints_at_once(TrainConfig(steps=last, **train), last) == count  # type: ignore[arg-type]


def test_a_disk_too_small_stops_a_new_run_and_warns_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_preset("tiny", ["save_every=10", "keep=3"])
    each = checkpoint_bytes(parameter_table(config.model))
    notes: list[str] = []
    with make_run(tmp_path) as run:
        free = 5 * each
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        preflight.check_disk(run, config, 300, notes.append)
        free -= 1
        with pytest.raises(
            PtxtrainError, match=r"5 more checkpoints .* 75\.1 MiB \(.* bytes\), and 75\.1 MiB are free"
        ) as caught:
            preflight.check_disk(run, config, 300, notes.append)
        assert "--set train.keep=2" in str(caught.value) and "\n" not in str(caught.value)
        (run.info.checkpoints / "step-00000010").mkdir(parents=True)
        preflight.check_disk(run, config, 300, notes.append)
        assert notes == [], "one of the five lies there already"
        free = 3 * each
        preflight.check_disk(run, config, 300, notes.append)
        assert len(notes) == 1 and "4 more checkpoints" in notes[0]


def test_the_batch_is_halved_by_what_divides_a_leaf() -> None:
    batch = replace(small().batch, sequences=12, leaves=1, micro_batch=12)
    sizes = []
    while batch is not None:
        sizes.append(batch.micro_batch)
        batch = preflight.halved(batch)
    assert sizes == [12, 6, 3, 1]
