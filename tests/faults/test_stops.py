"""Real signals to real processes in every phase, once, twice and three times: saved and resumable, said, or left at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from figures import FULL, KILLED_ANYWHERE, LONG_STEP, SIGNALS, Figures, some
from lab import Child, Fault, Lab, faults, saved

SIGNALS_SENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Phase(NamedTuple):
    """A place in a run where the process lingers until it is signalled."""

    what: str
    fault: str
    where: dict[str, object]
    at: str  # what the child says when it is there
    saved: int  # the step that a stop there leaves as the newest, or the one behind it; -1: no run is begun
    meanwhile: int = 0  # steps that may go on at the same time


def _held(place: str, nth: int = 0) -> tuple[str, dict[str, object], str]:
    return "hold", {"where": place, "nth": nth}, f"#at {place.rpartition('.')[2].rpartition(':')[2]}"


def _on_disk(op: str, match: str) -> tuple[str, dict[str, object], str]:
    return "hold_disk", {"op": op, "match": match}, f"#at {op}"


# Until there is a state to be saved, a stop ends everything at once.
AT_ONCE = (
    Phase("loading", *_held("ptxtrain.data.shards:Dataset.__init__"), -1),
    Phase("opening the device", *_held("ptxtrain.engine.device.cpu:CpuDevice.__init__"), -1),
    Phase("making the run", *_on_disk("write", ".tmp-run.json"), -1),
    Phase("compiling", *_held("ptxtrain.engine.step:TrainStep.__init__"), 0),
    Phase("loading the weights", *_held("ptxtrain.engine.step:TrainStep.load"), 0),
)
# From there on it waits for what is going on.
LATER = (
    Phase("before step 1", *_held("ptxtrain.engine.step:TrainStep.begin"), 0),
    Phase("in step 5", *_held("ptxtrain.engine.step:TrainStep.micro_batch", 4 * 4 + 2), 4),
    Phase("updating", *_held("ptxtrain.engine.step:TrainStep.finish", 4), 4),
    Phase("validating", *_held("ptxtrain.engine.step:TrainStep.row_losses", 2), 6),
    Phase("sampling", *_held("ptxtrain.engine.step:TrainStep.decoder"), 6),
    Phase("copying for a save", *_held("ptxtrain.engine.step:TrainStep.begin_snapshot"), 3),
    Phase("saving", *_on_disk("write", ".tmp-00000006"), 6, 3),
    Phase("renaming", *_on_disk("rename", ".tmp-00000006"), 6, 3),
    Phase("removing", *_on_disk("rename", "step-00000003"), 12),  # the last steps go on meanwhile
    Phase("saving the last step", *_on_disk("fsync", ".tmp-00000012"), 12),
)


def lingering(phase: Phase, seconds: float) -> list[Fault]:
    return [(phase.fault, {**phase.where, "seconds": seconds})]


def one_of_three(phases: tuple[Phase, ...], few: int, every: bool = False) -> list[object]:
    """Each phase with one of the signals in turn, or with every one; `few` of the phases in the short form."""
    sent = [(phase, SIGNALS_SENT[i % 3]) for i, phase in enumerate(phases)]
    if every and FULL:
        sent = [(phase, number) for phase in phases for number in SIGNALS_SENT]
    return [pytest.param(*pair, id=f"{pair[0].what}-{pair[1].name}") for pair in some(sent, few)]


def reach(lab: Lab, run: Path, phase: Phase, seconds: float) -> Child:
    child = lab.start(*lab.train_argv(run), inject=lingering(phase, seconds))
    child.until(phase.at)
    return child


@pytest.mark.parametrize(("phase", "number"), one_of_three(AT_ONCE, 3, every=True))
def test_before_there_is_a_state_one_signal_ends_it_at_once(
    lab: Lab, figures: Figures, phase: Phase, number: signal.Signals
) -> None:
    """No run is left where none was begun (exit 1: nothing to resume); else step 0 is saved (exit 2)."""
    run = lab.fresh()
    child = reach(lab, run, phase, 60)
    start = time.monotonic()
    child.send(number)
    done = child.wait(20)
    assert time.monotonic() - start < 10
    if phase.saved < 0:
        assert (done.code, done.out) == (1, "") and done.line == "error: stopped; the run was not begun", done.err
        assert not (run / "run.json").exists()
    else:
        assert done.code == 2 and saved(done.err) == [0] and "step 0 of 12" in done.out, done.err
        assert done.err.rstrip().endswith(f"Go on with: ptxtrain resume {run}")
    lab.survives(run, done.err)
    figures.add(SIGNALS, 1)


@pytest.mark.parametrize(("phase", "number"), one_of_three(LATER, 5, every=True))
def test_one_signal_saves_and_exits_with_2(lab: Lab, figures: Figures, phase: Phase, number: signal.Signals) -> None:
    """What had begun ends, or is dropped, the newest state is saved, and the last line is the command that goes on."""
    run = lab.fresh()
    child = reach(lab, run, phase, 1.0)
    child.send(number)
    done = child.wait(20)
    assert f"{number.name}: stopping; " in done.err
    figures.add(SIGNALS, 1)
    newest = max(saved(done.err))
    if phase.saved == 12:
        assert (done.code, newest, done.digest) == (0, 12, lab.reference.digest), done.err
        return
    assert done.code == 2, done.err
    assert phase.saved <= newest <= phase.saved + 1 + phase.meanwhile, done.err
    assert f"stopped; step {newest} is saved." in done.err, done.err
    assert done.err.rstrip().endswith(f"Go on with: ptxtrain resume {run}")
    lab.survives(run, done.err)


@pytest.mark.parametrize(("phase", "number"), one_of_three(LATER, 1))
def test_two_signals_say_what_is_waited_for(lab: Lab, figures: Figures, phase: Phase, number: signal.Signals) -> None:
    run = lab.fresh()
    child = reach(lab, run, phase, 3.0)
    child.send(number)
    child.until(f"{number.name}: stopping; ")
    child.send(signal.SIGTERM)
    line = child.until("once more leaves at once")
    assert "is saved" in line or "is being saved" in line, line
    assert "step 13" not in line, line
    done = child.wait(20)
    assert done.code == (0 if phase.saved == 12 else 2), done.err
    lab.survives(run, done.err)
    figures.add(SIGNALS, 2)


@pytest.mark.parametrize(("phase", "number"), one_of_three(LATER, 2))
def test_three_signals_leave_at_once_with_3(lab: Lab, figures: Figures, phase: Phase, number: signal.Signals) -> None:
    """Whatever is going on is not waited for; the line names the last good step, and that is what a resume starts from."""
    run = lab.fresh()
    child = reach(lab, run, phase, 60)
    child.send(number)
    child.until(f"{number.name}: stopping; ")
    child.send(signal.SIGTERM)
    child.until("once more leaves at once")
    start = time.monotonic()
    child.send(number)
    done = child.wait(20)
    assert done.code == 3 and time.monotonic() - start < 5, done.err
    newest = max(saved(done.err), default=0)
    good = f"step {newest} is the newest saved" if newest else "nothing has been saved yet"
    assert f"{number.name}, the third signal: left at once; {good}" in done.err
    lab.survives(run, done.err)
    figures.add(SIGNALS, 3)


@pytest.mark.parametrize("number", some(SIGNALS_SENT, 1), ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("read_snapshot", {"where": "ptxtrain.engine.checkpoint:read_snapshot"}),
        ("__init__", {"where": "ptxtrain.data.shards:Dataset.__init__"}),
    ],
    ids=["loading the checkpoint", "loading the data"],
)
def test_a_resume_that_has_not_begun_leaves_the_run_as_it_was(
    lab: Lab, figures: Figures, number: signal.Signals, place: str, where: dict[str, object]
) -> None:
    run = lab.fresh()
    stopped = lab.train(run, inject=faults(signal_at_step={"step": 5, "number": 15}))
    before = sorted(path.name for path in (run / "ckpt").iterdir())
    child = lab.start("resume", run, inject=faults(hold={**where, "seconds": 60}))
    child.until(f"#at {place}")
    child.send(number)
    done = child.wait(20)
    assert done.code == 2 and "the run is as it was. Go on with: ptxtrain resume" in done.err, done.err
    assert sorted(path.name for path in (run / "ckpt").iterdir()) == before
    lab.survives(run, stopped.err)
    figures.add(SIGNALS, 1)


FIRST_USE = ("_gather", "_learn", "_encode", "manifest_bytes")


@pytest.mark.parametrize("number", [*SIGNALS_SENT, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("place", FIRST_USE)
def test_while_the_data_is_tokenised_on_first_use(
    lab: Lab, figures: Figures, place: str, number: signal.Signals
) -> None:
    """Nothing half-written stays; after a kill the next start clears it away; either way the same command works."""
    if not FULL and (place, number) not in (("_learn", signal.SIGTERM), ("_encode", signal.SIGKILL)):
        pytest.skip("`make faults` sends each")
    where, run = lab.folder / "work", lab.folder / "work/run"
    where.mkdir()
    argv = ["train", "--preset", lab.preset, "--run", run]
    corpus: list[Fault] = faults(small_corpus={"path": str(lab.dataset.parent / "text")})
    hold = faults(hold={"where": f"ptxtrain.data.build:{place}", "seconds": 60})
    child = lab.start(*argv, inject=corpus + hold, cwd=where)
    child.until(f"#at {place}")
    child.send(number)
    done = child.wait(20)
    if number == signal.SIGKILL:
        assert done.code == -signal.SIGKILL
    else:
        assert done.code == 1 and done.line == "error: stopped; the run was not begun", done.err
        assert not (where / "datasets").exists() or not os.listdir(where / "datasets")
    assert not run.exists()
    again = lab.run(*argv, inject=corpus, cwd=where)
    assert again.code == 0 and os.listdir(where / "datasets") == ["stdlib-v300"], again.err
    figures.add(SIGNALS if number != signal.SIGKILL else KILLED_ANYWHERE, 1)


LONG = """
[model]
vocab_size = 300
context = 256
layers = 4
width = 256
heads = 4
kv_heads = 2
head_dim = 64
mlp_width = 768
[batch]
sequences = 256
micro_batch = 64
leaves = 2
[optimizer]
lr = 1e-3
[train]
steps = 3
validate_every = 0
way = "f32"
"""


@pytest.mark.skipif(not FULL, reason="half a minute; `make faults` runs it")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_long_step_is_not_waited_for(lab: Lab, figures: Figures, tmp_path: Path, number: signal.Signals) -> None:
    """In a step of half a minute or more, of four launches-full of seconds each: saved and gone within ten seconds."""
    (tmp_path / "long.toml").write_text(LONG)
    run = tmp_path / "run"
    argv = ["train", "--preset", tmp_path / "long.toml", "--data", lab.dataset, "--run", run]
    child = lab.start(*argv, inject=faults(hold={"where": "ptxtrain.engine.step:TrainStep.begin", "seconds": 0.0}))
    child.until("#at begin", 300)
    time.sleep(3.0)
    start = time.monotonic()
    child.send(number)
    done = child.wait(60)
    took = time.monotonic() - start
    assert done.code == 2 and saved(done.err) == [0], done.err
    assert took < 10, took
    assert child.cpu_seconds < 30, "the step was waited for"
    figures.add(LONG_STEP, round(took, 2))
    figures.add(SIGNALS, 1)


if sys.platform == "win32":
    pytest.skip("signals are sent with kill", allow_module_level=True)
