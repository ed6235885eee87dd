"""A power cut after each call of a whole run: every state that the disk may be left in loads right, or is no run yet."""

from __future__ import annotations

import contextlib
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from figures import DISK_STATES, DISK_STATES_RESUMED, FULL, Figures
from lab import Lab, faults
from statebench import PowerCut

from ptxtrain.engine.checkpoint import NoCheckpoint, load
from ptxtrain.engine.durable import Call
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.rundir import read_info, refuse_existing


def events(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file, contextlib.suppress(EOFError):
        while True:
            yield pickle.load(file)


def traced(lab: Lab, *before: tuple[str, dict[str, Any]]) -> tuple[Path, Path]:
    """A folder in which a run was made, as it was before, and the run's trace."""
    disk, trace = lab.folder / "disk", lab.folder / "trace"
    disk.mkdir()
    done = lab.train(disk / "run", inject=[*before, *faults(trace={"out": str(trace)})])
    assert done.code == 0, done.err
    shutil.rmtree(disk / "run")
    return disk, trace


def check_state(lab: Lab, run: Path, announced: int) -> None:
    """What the next start finds: every announced step or a later one, with its own bits; or room for a run."""
    if not (run / "run.json").exists():
        assert announced < 0, f"no run.json, and step {announced} was announced"
        refuse_existing(run)
        return
    table = parameter_table(read_info(run).config.model)
    try:
        found = load(run, table, note=lambda line: None)
    except NoCheckpoint:
        assert announced < 0, f"no checkpoint, and step {announced} was announced"
        return
    assert found.step >= announced, (found.step, announced)
    assert found.digest() == lab.reference.states[found.step], found.step


@pytest.mark.parametrize("seed", range(4 if FULL else 1))
def test_after_each_call_of_a_run(lab: Lab, figures: Figures, seed: int) -> None:
    """Unsynced bytes absent, zero, partial or there, unsynced names in any subset; some of the states are trained to the end."""
    disk, trace = traced(lab)
    model, rng, announced, states, resumed = PowerCut(disk), random.Random(seed), -1, 0, 0
    every = 53 if FULL else 120
    for op, path, target, data, size in events(trace):
        if op == "announced":
            announced = int(path)
        else:
            moved = Path(target) if target else None
            model.feed(Call(op, Path(path), moved, None if data is None else memoryview(data), size))
        for keep in (0.0, 0.5, 0.9, 1.0) if FULL else (0.0, 0.7):
            place = lab.folder / f"cut-{states}"
            model.state(place, rng, keep)
            check_state(lab, place / "run", announced)
            states += 1
            if states % every == every - 1:
                lab.survives(place / "run", f"saved step {announced}\n" if announced >= 0 else "")
                resumed += 1
            shutil.rmtree(place)
    assert announced == 12 and states > 200
    figures.add(DISK_STATES, states)
    figures.add(DISK_STATES_RESUMED, resumed)
