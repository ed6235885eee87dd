"""Every promise of the save protocol on the real modules, then on mutants of one line, each of which must break one.

The checks are `tests/engine/statechecks.py`: a save of a few numbers, traced, cut off, failed and damaged in every place.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import statechecks as checks
from figures import CAUGHT, DISK_ERRORS, DISK_STATES, SIMULATED, TRIED, Figures
from statebench import Modules, mutant
from statechecks import CHECKS, Check

from ptxtrain.engine.errors import PtxtrainError

COUNTED = {"kills": SIMULATED, "power_cut": DISK_STATES, "disk_errors": DISK_ERRORS}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_promise(check: Check, tmp_path: Path, figures: Figures) -> None:
    """The enumerating checks return how many states they looked at."""
    count = check(Modules(), tmp_path / "bench")  # type: ignore[func-returns-value]
    assert count is None or count > 50
    if check.__name__ in COUNTED:
        assert count is not None
        figures.add(COUNTED[check.__name__], count)


class Mutant(NamedTuple):
    """One line of one module changed so that a promise breaks; "" as `new` drops the text."""

    what: str
    stem: str
    old: str
    new: str
    check: Check


DROPPED_SYNC = "                self.write(fd, piece)\n            self.fsync(fd)"
TAKES_ERRORS = "            except Exception as caught:\n                error = _reason(caught)"
REMOVES_FIRST = (
    "        self._attempt += 1\n"
    "        for old in list_steps(self.run.path): self._remove(self._directory / step_name(old), old)\n"
    "        temporary"
)

MUTANTS = (
    Mutant("files not fsynced", "durable", DROPPED_SYNC, DROPPED_SYNC.split("\n")[0], checks.power_cut),
    Mutant("directory not fsynced", "files", "    io.fsync_dir(directory)\n", "", checks.power_cut),
    Mutant(
        "parent not fsynced",
        "checkpoint",
        "            io.fsync_dir(self._directory)\n            verify",
        "            verify",
        checks.power_cut,
    ),
    Mutant(
        "announced before the rename",
        "checkpoint",
        "            io.rename(temporary, target)\n",
        "            self._announce(f'saved step {step}'); io.rename(temporary, target)\n",
        checks.power_cut,
    ),
    Mutant(
        "old steps removed before the save",
        "checkpoint",
        "        self._attempt += 1\n        temporary",
        REMOVES_FIRST,
        checks.power_cut,
    ),
    Mutant(
        "written in place", "checkpoint", 'f".tmp-{step:08d}-{self._attempt}"', "step_name(step)", checks.write_order
    ),
    Mutant("space not reserved", "durable", "            self.allocate(fd, size)\n", "", checks.write_order),
    Mutant(
        "nothing removed after an error",
        "checkpoint",
        "                self._io.remove_tree(temporary)",
        "                pass",
        checks.disk_errors,
    ),
    Mutant(
        "an error of the disk ends training",
        "checkpoint",
        TAKES_ERRORS,
        TAKES_ERRORS.replace("Exception", "ArithmeticError"),
        checks.disk_errors,
    ),
    Mutant(
        "a failed step stays under its name",
        "checkpoint",
        "                self._io.rename(renamed_to, temporary)\n",
        "",
        checks.corrupted_while_written,
    ),
    Mutant(
        "not read back",
        "checkpoint",
        "            verify_files(target, self.table, run_id, step)\n",
        "",
        checks.corrupted_while_written,
    ),
    Mutant(
        "leftovers stay",
        "checkpoint",
        "                run.io.remove_tree(run.info.checkpoints / name)",
        "                pass",
        checks.kills,
    ),
    Mutant("m restored as v", "files", "[snapshot.m, snapshot.v])]", "[snapshot.m, snapshot.m])]", checks.round_trip),
    Mutant(
        "loader off by one",
        "files",
        '_natural(values["position"][1])',
        '_natural(values["position"][1]) + 1',
        checks.round_trip,
    ),
    Mutant("digest not compared", "files", "    if digest.hexdigest() != sha256:", "    if False:", checks.damage),
    Mutant(
        "state's digest not compared",
        "files",
        "    if found != manifest.state_digest:",
        "    if False:",
        checks.corrupted_while_written,
    ),
    Mutant("run not compared", "files", "    if manifest.run_id != run_id:", "    if False:", checks.damage),
    Mutant(
        "more files accepted",
        "files",
        "                if entry.name not in (MODEL, OPTIM, MANIFEST):",
        "                if False:",
        checks.damage,
    ),
    Mutant(
        "links to directories followed",
        "files",
        "    if not is_real_directory(directory):",
        "    if not directory.is_dir():",
        checks.damage,
    ),
    Mutant(
        "refused steps left in place",
        "checkpoint",
        "            if other > snapshot.step or other in refused:",
        "            if False:",
        checks.resume_sets_aside,
    ),
    Mutant(
        "one checkpoint kept",
        "checkpoint",
        "            if good >= self.keep:",
        "            if good >= 1:",
        checks.retention,
    ),
    Mutant("damaged ones counted", "checkpoint", "good += self._sound(step)", "good += 1", checks.retention),
    Mutant("best forgotten", "checkpoint", "if (best and step == best[0]) or", "if", checks.retention),
    Mutant("not a number is best", "checkpoint", " and loss == loss]", "]", checks.retention),
    Mutant("poison counted", "files", "    if not finite:", "    if False:", checks.retention),
    Mutant("what was set aside stays", "checkpoint", "self._remove_asides(step)", "pass", checks.resume_sets_aside),
    Mutant(
        "what was set aside goes too early",
        "checkpoint",
        "            if good == self.keep:\n",
        "            if good == 1:\n",
        checks.resume_sets_aside,
    ),
    Mutant("device not compared", "checkpoint", "        check_device(snapshot)\n", "", checks.poisoned),
    Mutant("poison saved", "checkpoint", "        check_finite(snapshot, self.table)\n", "", checks.poisoned),
    Mutant(
        "another state under a step's name",
        "checkpoint",
        "        if manifest.state_digest != snapshot.digest():",
        "        if False:",
        checks.same_step_twice,
    ),
)


@pytest.mark.parametrize("mutation", MUTANTS, ids=lambda mutation: mutation.what)
def test_mutant_is_caught(mutation: Mutant, tmp_path: Path, figures: Figures) -> None:
    figures.add(TRIED, 1)
    modules = mutant(mutation.stem, mutation.old, mutation.new)
    with pytest.raises((AssertionError, PtxtrainError, OSError)):
        mutation.check(modules, tmp_path / "bench")
    figures.add(CAUGHT, 1)
