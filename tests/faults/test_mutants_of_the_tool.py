"""The tests are tested: one line of the tool is changed so that a promise breaks, and a scenario, or a test file, must fail.

Thirty more, of the save protocol alone, are in `test_save_protocol.py`.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest
import scenarios as on
from figures import CAUGHT, FULL, TRIED, Figures
from lab import Child, Lab
from scenarios import SCENARIOS, Scenario

ROOT = Path(__file__).parents[2]
SECONDS = 60  # what a mutant may take; one that hangs is caught by that


class Mutant(NamedTuple):
    """`old`, which must be there exactly once in `module`, becomes `new`."""

    what: str
    module: str
    old: str
    new: str
    caught_by: Scenario | str  # a scenario, or what to hand to pytest


TRAINER, FEEDER, STEP = "ptxtrain.engine.trainer", "ptxtrain.engine.feeder", "ptxtrain.engine.step"
SESSION, SIGNALS = "ptxtrain.engine.session", "ptxtrain.engine.signals"
LOADER, SHARDS, RUNDIR = "ptxtrain.data.loader", "ptxtrain.data.shards", "ptxtrain.engine.rundir"
LOOK = """            if before is not None:
                self._settle(before, feeder)
                before = None
            if flight is None"""
UPDATE = """            self._update(flight)
            before = flight
"""
COPY = """        flight.result = self._step.finish(flight.number, flight.lr)
        flight.end = self._free = self._device.record()
        if self._saves_behind(flight.number):
            try:
                flight.copy = self._step.begin_snapshot()
"""
BODY = """            if flight is None or not self._reach_update(flight):
                self._device.interrupt()
                self._device.synchronize()
                break
"""

MUTANTS = (
    # What is saved with a step, and when.
    Mutant(
        "the position in front of the batch is saved",
        TRAINER,
        "flight.number, flight.after",
        "flight.number, flight.before",
        on.stop_and_resume,
    ),
    Mutant(
        "the position that is read ahead to is saved",
        TRAINER,
        "            position=_pair(self._position),",
        "            position=_pair(self._reader.position),",
        on.undisturbed,
    ),
    Mutant(
        "the position is taken from a batch that was given back",
        TRAINER,
        "flight.number, flight.after",
        "flight.number, flight.batch.after",
        "tests/faults/test_queue.py",
    ),
    Mutant(
        "a batch's place is taken before it is read",
        FEEDER,
        "batch.after = self._reader.position",
        "batch.after = batch.before",
        on.stop_and_resume,
    ),
    Mutant(
        "the update is queued before the step before is looked at",
        TRAINER,
        f"{LOOK[: LOOK.rindex('            if')]}{BODY}{UPDATE}",
        f"{BODY}            self._update(flight)\n{LOOK[: LOOK.rindex('            if')]}            before = flight\n",
        "tests/engine/test_trainer.py",
    ),
    Mutant(
        "the update is queued with its micro-batches",
        TRAINER,
        "            gate -= 1",
        "            gate -= 1000",
        "tests/faults/test_queue.py",
    ),
    Mutant(
        "the snapshot is taken in front of the update",
        TRAINER,
        COPY,
        f"        early = self._step.begin_snapshot()\n{COPY}".replace(
            "flight.copy = self._step.begin_snapshot()", "flight.copy = early"
        ),
        on.undisturbed,
    ),
    Mutant(
        "the snapshot is taken behind the next step",
        TRAINER,
        "            self._save(flight.copy)\n",
        "            self._step.finish(flight.number + 1, flight.lr); self._save(self._step.begin_snapshot())\n",
        on.undisturbed,
    ),
    Mutant(
        "a stop does not save the newest step",
        TRAINER,
        "        if self._saved is None or self._saved.step != self._done:",
        "        if self._saved is None:",
        on.stop_and_resume,
    ),
    Mutant(
        "what the guards remember is not saved",
        TRAINER,
        "**self._guards.state(), ",
        "",
        "tests/engine/test_guards.py",
    ),
    Mutant(
        "a stop before step 1 saves nothing",
        SESSION,
        "            saver.submit(start)\n",
        "",
        on.stop_while_compiling,
    ),
    # What a resume starts from.
    Mutant(
        "v is not restored",
        STEP,
        "(self.v, v)):\n            assert",
        "(self.v, 0 * v)):\n            assert",
        on.stop_and_resume,
    ),
    Mutant(
        "the bf16 copies are not made anew",
        STEP,
        "            self.device.run(self._copy_plan)\n        self.device.synchronize()",
        "            pass\n        self.device.synchronize()",
        on.stop_and_resume,
    ),
    Mutant("the loader starts over", SESSION, "Position(*start.position)", "Position(0, 0)", on.stop_and_resume),
    Mutant(
        "the loader is a token late",
        SESSION,
        "Position(*start.position)",
        "Position(start.position[0], start.position[1] + 1)",
        on.stop_and_resume,
    ),
    Mutant(
        "the schedule starts over",
        TRAINER,
        "schedule.learning_rate(number, ",
        "schedule.learning_rate(number - self._start.step, ",
        on.stop_and_resume,
    ),
    Mutant(
        "AdamW's t starts over",
        TRAINER,
        "self._step.finish(flight.number, ",
        "self._step.finish(flight.number - self._start.step, ",
        on.stop_and_resume,
    ),
    Mutant(
        "other data is taken",
        "ptxtrain.engine.identity",
        "and data_id(dataset.identity()) !=",
        "and False and data_id(dataset.identity()) !=",
        on.other_data,
    ),
    # The arithmetic of a step.
    Mutant("AdamW's t is off by one", STEP, "opt.beta2**step", "opt.beta2**(step + 1)", on.undisturbed),
    Mutant(
        "the rate is that of the next step",
        TRAINER,
        "schedule.learning_rate(number, ",
        "schedule.learning_rate(number + 1, ",
        on.undisturbed,
    ),
    Mutant(
        "the loader moves on by a token more",
        LOADER,
        "start.token + rows * self.context)",
        "start.token + rows * self.context + 1)",
        on.undisturbed,
    ),
    Mutant(
        "the device's copy of m is saved as v",
        STEP,
        "(m, self.m), (v, self.v)):\n            device.download",
        "(m, self.m), (v, self.m)):\n            device.download",
        on.undisturbed,
    ),
    # Numbers that are none.
    Mutant(
        "a step that is not finite counts", TRAINER, 'if verdict.kind == "refuse":', "if False:", on.poisoned_gradient
    ),
    Mutant(
        "only the norm is looked at",
        "ptxtrain.engine.guards",
        "if not (math.isfinite(loss) and math.isfinite(grad_norm)):",
        "if not math.isfinite(grad_norm):",
        "tests/engine/test_guards.py",
    ),
    # Endings.
    Mutant(
        "a last save that failed is passed over",
        SESSION,
        "    if save is not None and not save.saved:",
        "    if False:",
        on.full_disk,
    ),
    Mutant(
        "a failed device drops the snapshot",
        SESSION,
        "            saver.wait()  # a snapshot is host memory",
        "            pass  # a snapshot is host memory",
        on.failed_device,
    ),
    Mutant(
        "a failed device is asked once more",
        SESSION,
        "            saver.wait()  # a snapshot",
        "            step.snapshot(); saver.wait()  # a snapshot",
        on.failed_device,
    ),
    Mutant(
        "the third signal waits", SIGNALS, "        if self.count >= 3:", "        if self.count > 3:", on.leave_at_once
    ),
    Mutant(
        "a full log ends the run",
        "ptxtrain.engine.metrics",
        "        except OSError as error:\n            self._lost(error)\n            with",
        "        except ArithmeticError as error:\n            self._lost(error)\n            with",
        on.full_log,
    ),
    Mutant(
        "the lock is not taken",
        RUNDIR,
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        pass",
        on.second_holder,
    ),
    Mutant(
        "the run is begun by its run.json",
        RUNDIR,
        '            io.write_once(path / "tokenizer.json", tokenizer)\n',
        "",
        "tests/engine/test_rundir.py",
    ),
    # Data that is not what was written.
    Mutant(
        "blocks are not compared with their digests",
        SHARDS,
        "        if hashlib.sha256(data).digest() != self._header.table",
        "        if False and hashlib.sha256(data).digest() != self._header.table",
        on.shard_flipped_between_runs,
    ),
    Mutant(
        "a shard that is written to is trusted",
        SHARDS,
        "        if now.st_mtime_ns != self._modified:",
        "        if False:",
        on.shard_changed_during_a_run,
    ),
    Mutant(
        "a checkpoint's digest is not compared",
        "ptxtrain.engine.checkpointfiles",
        "    if digest.hexdigest() != sha256:",
        "    if False:",
        "tests/faults/test_save_protocol.py::test_promise[damage]",
    ),
    Mutant(
        "a manifest's digest is not compared",
        "ptxtrain.engine.sealed",
        "        unchanged = data == seal(values)",
        "        unchanged = True",
        "tests/faults/test_save_protocol.py::test_promise[damage]",
    ),
    Mutant(
        "what a killed save left is not removed",
        "ptxtrain.engine.checkpoint",
        "                run.io.remove_tree(run.info.checkpoints / name)",
        "                pass",
        on.killed_in_a_save,
    ),
)
# Those that are easiest to let pass.
FEW = (
    "the position that is read ahead to is saved",
    "the update is queued before the step before is looked at",
    "the snapshot is taken in front of the update",
    "v is not restored",
    "AdamW's t starts over",
)


@pytest.mark.parametrize("scenario", SCENARIOS if FULL else SCENARIOS[:2], ids=lambda scenario: scenario.__name__)
def test_scenario(lab: Lab, scenario: Scenario) -> None:
    """Each holds for the tool as it is: else it would catch everything."""
    scenario(lab)


@pytest.mark.parametrize(
    "mutant", [mutant for mutant in MUTANTS if FULL or mutant.what in FEW], ids=lambda mutant: mutant.what
)
def test_mutant_is_caught(lab: Lab, figures: Figures, mutant: Mutant) -> None:
    """Within its time: what hangs is caught by that."""
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is in {mutant.module} {source.count(mutant.old)} times"
    ast.parse(source.replace(mutant.old, mutant.new))
    figures.add(TRIED, 1)
    line = (mutant.module, mutant.old, mutant.new)
    if isinstance(mutant.caught_by, str):
        done = Child(lab.server, mutate=[line], tests=[mutant.caught_by], cwd=ROOT).wait(SECONDS)
        assert done.code == 1, done.out[-3000:]  # pytest's "tests failed"; 2 and more: they could not be run
    else:
        lab.mutate = (line,)
        with pytest.raises(AssertionError) as caught:
            mutant.caught_by(lab)
        assert "mutant: " not in str(caught.value)
    figures.add(CAUGHT, 1)
