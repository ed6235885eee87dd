"""The rest of the world: others in the same directory, streams that nobody reads, clocks that jump. Training goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from figures import FULL, WORLD, Figures, some
from lab import Lab, faults, saved


@pytest.mark.parametrize("command", some(["train", "resume"], 1))
def test_a_second_run_on_the_directory_exits_5_at_once_and_names_the_holder(
    lab: Lab, figures: Figures, command: str
) -> None:
    """While the first is being made, trains or saves; and once it was killed, the run is free."""
    place = "ptxtrain.engine.step:TrainStep.begin"
    run = lab.fresh()
    first = lab.start(*lab.train_argv(run), inject=faults(hold={"where": place, "nth": 4, "seconds": 60}))
    first.until("#at begin")
    start = time.monotonic()
    second = lab.resume(run) if command == "resume" else lab.train(run)
    assert time.monotonic() - start < 10
    if command == "resume":
        assert second.code == 5 and f"is in use by process {first.pid} on " in second.line, second.err
    else:
        assert second.code == 1 and "already holds a run. Go on with it by `ptxtrain resume" in second.line, second.err
    first.send(signal.SIGKILL)
    ended = first.wait()
    lab.survives(run, ended.err)
    figures.add(WORLD, 1)


def test_two_that_make_the_same_run_at_once(lab: Lab, figures: Figures) -> None:
    """One makes it, the other leaves with 5 or, a moment later, is told that there is a run."""
    run = lab.fresh()
    hold = faults(hold_disk={"op": "write", "match": ".tmp-run.json", "seconds": 6.0})
    first = lab.start(*lab.train_argv(run), inject=hold)
    first.until("#at write")
    second = lab.train(run)
    assert second.code == 5 and f"process {first.pid} on " in second.line, second.err
    done = first.wait()
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    figures.add(WORLD, 1)


def _nobody_reads() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    "kind",
    some(["/dev/full", "a closed pipe", "a terminal that hung up"], 2),
    ids=lambda kind: kind.replace("/dev/", ""),
)
def test_streams_that_take_nothing_change_nothing(lab: Lab, figures: Figures, kind: str) -> None:
    """stdout and stderr on a full disk, on a pipe without a reader, on a terminal that is gone."""
    if kind == "/dev/full":
        out, err = os.open(kind, os.O_WRONLY), os.open(kind, os.O_WRONLY)
    elif kind == "a closed pipe":
        out, err = _nobody_reads(), _nobody_reads()
    else:
        master, slave = os.openpty()
        out, err = os.dup(slave), slave
        os.close(master)
    run = lab.fresh()
    done = lab.start(*lab.train_argv(run), streams=(out, err)).wait()
    os.close(out)
    os.close(err)
    assert done.code == 0
    assert lab.check_states(run) == [9, 12]
    lab.check_numbers(run)
    lab.survives(run, "saved step 12\n")
    figures.add(WORLD, 1)


@pytest.mark.skipif(not FULL, reason="a whole process; `make faults` runs it")
def test_streams_that_are_closed_change_nothing(lab: Lab, figures: Figures) -> None:
    """Not even open, as some service managers start programs."""
    run = lab.fresh()
    argv = [sys.executable, "-m", "ptxtrain.cli", *map(str, lab.train_argv(run)), "--device", "cpu", "--threads", "1"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", *argv], timeout=120)
    assert done.returncode == 0
    assert lab.check_states(run) == [9, 12]
    figures.add(WORLD, 1)


@pytest.mark.parametrize("jump", some([-86400.0, 86400.0, -3e9], 1), ids=str)
def test_a_wall_clock_that_jumps_changes_nothing(lab: Lab, figures: Figures, jump: float) -> None:
    """Steps are ordered by number, and time is measured by a clock that only goes forward."""
    run = lab.fresh()
    inject = [*faults(clock={"jump": jump}), *faults(signal_at_step={"step": 5, "number": 15})]
    done = lab.train(run, inject=inject)
    assert done.code == 2, done.err
    for number, step in enumerate(sorted((run / "ckpt").iterdir())):
        os.utime(step, (9e8 - number * 1e6, 9e8 - number * 1e6))  # the newest step is the oldest file
    resumed = lab.resume(run, inject=faults(clock={"jump": -jump}))
    assert (resumed.code, resumed.digest) == (0, lab.reference.digest), resumed.err
    assert saved(resumed.err) == [6, 9, 12]
    lab.check_numbers(run)
    left = [float(value) for value in re.findall(r"(-?\d+)s left", done.err + resumed.err)]
    assert all(0 <= value < 3600 for value in left)
    figures.add(WORLD, 1)


def test_a_run_that_is_moved_and_copied_carries_on(lab: Lab, figures: Figures) -> None:
    """Nothing in it depends on where it lies or what it is called."""
    run, moved = lab.fresh(), lab.fresh()
    done = lab.train(run, inject=faults(signal_at_step={"step": 5, "number": 15}))
    run.rename(moved)
    lab.survives(Path(os.path.relpath(moved)), done.err)
    figures.add(WORLD, 1)
