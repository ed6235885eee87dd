"""`kill -9` of real processes: at each durable call, while resuming, twice in a row, anywhere. Nothing announced is lost."""

from __future__ import annotations

import random
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from figures import FULL, KILLED_ANYWHERE, KILLED_AT_CALLS, KILLED_RESUMING, KILLED_TWICE, Figures, some
from inject import change_file
from lab import Lab, faults

CHUNKS = 8 if FULL else 1
KILLED = -signal.SIGKILL


def chosen(count: int, chunk: int, few: int) -> Iterator[int]:
    """This chunk's part of `count` things: all of them in the full form, else `few` in all, spread out."""
    return iter(some(range(count), few)[chunk::CHUNKS])


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_at_each_durable_call(lab: Lab, figures: Figures, chunk: int) -> None:
    """The process ends just before its n-th call that changes the disk, from making the run to the last removal."""
    assert len(lab.reference.calls) > 100
    killed = 0
    for n in chosen(len(lab.reference.calls), chunk, few=8):
        run = lab.fresh()
        done = lab.train(run, inject=faults(kill_at={"n": n}))
        # Metrics and saves are written by two threads: how many calls there are in all may differ by what came together.
        assert done.code == KILLED or n > len(lab.reference.calls) - 3, done.err
        lab.survives(run, done.err)
        killed += done.code == KILLED
    figures.add(KILLED_AT_CALLS, killed)


def interrupted(lab: Lab) -> Path:
    """A run with everything that a resume clears up: half a save of step 9, and a damaged step 6 to be set aside."""
    run = lab.fresh()
    done = lab.train(run, inject=faults(kill_at={"n": 0, "match": f"rename {run}/ckpt/.tmp-00000009"}))
    assert done.code == KILLED and (run / "ckpt/.tmp-00000009-3/MANIFEST.json").exists(), done.err
    change_file(run / "ckpt/step-00000006/model.safetensors", "flipped", -5)
    return run


def copy(run: Path, lab: Lab) -> Path:
    return Path(shutil.copytree(run, lab.fresh()))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_at_each_durable_call_of_a_resume(lab: Lab, figures: Figures, chunk: int) -> None:
    """A resume that removes leftovers and sets a damaged step aside ends at its n-th call; the next one carries on."""
    template, calls = interrupted(lab), lab.folder / "calls"
    lab.survives(copy(template, lab), "saved step 3\n", inject=faults(count_calls={"out": str(calls)}))
    count = len(calls.read_text().splitlines())
    killed = 0
    for n in chosen(count, chunk, few=3):
        run = copy(template, lab)
        done = lab.resume(run, inject=faults(kill_at={"n": n}))
        assert done.code == KILLED or n > count - 3, done.err
        lab.survives(run, f"saved step 3\n{done.err}")
        killed += done.code == KILLED
    figures.add(KILLED_RESUMING, killed)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_twice_in_a_row(lab: Lab, figures: Figures, chunk: int) -> None:
    """A run ends at a random call, and so does its resume."""
    rng = random.Random(chunk)
    last = next(
        i for i, call in enumerate(lab.reference.calls) if ".tmp-00000012" in call
    )  # a finished run has little to do
    for _ in range(5 if FULL else 1):
        run = lab.fresh()
        first = lab.train(run, inject=faults(kill_at={"n": rng.randrange(20, last)}))
        second = lab.survives(run, first.err, inject=faults(kill_at={"n": rng.randrange(0, 12)}))
        assert (first.code, second.code) == (KILLED, KILLED), second.err
        lab.survives(run, first.err + second.err)
        figures.add(KILLED_TWICE, 1)


def kill_anywhere(lab: Lab, kills: int, seed: int) -> None:
    """`kills` kills at random instants of runs and of the resumes that follow; every run ends as if nothing had been."""
    rng, times = random.Random(seed), []
    for _ in range(3):
        start = time.monotonic()
        assert lab.train(lab.fresh()).code == 0
        times.append(time.monotonic() - start)
    longest, done = 1.05 * statistics.median(times), 0
    while done < kills:
        run, said = lab.fresh(), ""
        for _ in range(rng.choice((1, 1, 2, 3))):
            begun = (run / "run.json").exists()
            child = lab.start(*(["resume", run] if begun else lab.train_argv(run)))
            time.sleep(rng.uniform(0, longest))
            child.send(signal.SIGKILL)
            ended = child.wait()
            said += ended.err
            assert ended.code in (KILLED, 0), ended.err
            done += ended.code == KILLED
        lab.survives(run, said)
        shutil.rmtree(run)


@pytest.mark.parametrize("seed", range(4 if FULL else 1))
def test_at_random_instants(lab: Lab, figures: Figures, seed: int) -> None:
    """Whatever the process was doing: importing, compiling, stepping, validating, saving, removing, exiting."""
    kills = 25 if FULL else 3
    kill_anywhere(lab, kills, seed)
    figures.add(KILLED_ANYWHERE, kills)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 108))
def test_a_thousand_times_at_random_instants(lab: Lab, seed: int) -> None:
    """The same, 1,000 times in all."""
    kill_anywhere(lab, 125, seed)
