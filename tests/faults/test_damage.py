"""Checkpoints of a real run that are not what was written: refused, and an older good one is used, with a line naming both."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from figures import DAMAGED, FULL, WATCHED, Figures, some
from inject import change_file
from lab import Lab, faults, saved

from ptxtrain.engine.checkpoint import load
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.rundir import read_info

FILES = ("model.safetensors", "optim.safetensors", "MANIFEST.json")


@pytest.fixture
def run(lab: Lab) -> Path:
    """A run that stopped behind step 9, with steps 6 and 9 in place."""
    made = lab.fresh()
    done = lab.train(made, inject=faults(fail={"op": "", "error": "EIO", "match": ".tmp-00000012"}))
    assert done.code == 3 and lab.check_states(made) == [6, 9], done.err
    return made


def refused(lab: Lab, run: Path, what: str) -> None:
    """Step 9 is not taken: step 6 is, to the last bit, and one line names both. Asked for by number it is an error."""
    said: list[str] = []
    table = parameter_table(read_info(run).config.model)
    found = load(run, table, note=said.append)
    assert (found.step, found.digest()) == (6, lab.reference.states[6]), what
    assert (
        len(said) == 1 and "step-00000009 cannot be used: " in said[0] and "using step-00000006 instead" in said[0]
    ), what
    with pytest.raises(PtxtrainError, match="step-00000009"):
        load(run, table, step=9)


def test_every_way_to_hurt_a_file(lab: Lab, run: Path, figures: Figures) -> None:
    """Cut at each edge and at random, grown, emptied, bits flipped anywhere, taken from another step, gone, linked, a fifo."""
    newest, rng, count = run / "ckpt/step-00000009", random.Random(5), 0
    for name in FILES:
        path, data = newest / name, (newest / name).read_bytes()
        edges = [0, 1, 7, 8, 9, len(data) // 2, len(data) - 1]
        if name != "MANIFEST.json":
            header = 8 + int.from_bytes(data[:8], "little")
            edges += [header - 1, header, header + 1, header + 4 * lab.parameters - 1]
        for cut in sorted({min(edge, len(data) - 1) for edge in edges} | {rng.randrange(len(data)) for _ in range(5)}):
            path.write_bytes(data[:cut])
            refused(lab, run, f"{name} cut to {cut}")
            count += 1
        for _ in range(400 if FULL else 25):
            bit = rng.randrange(8 * len(data))
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            refused(lab, run, f"bit {bit} of {name}")
            count += 1
        path.write_bytes(data + b"\0")
        refused(lab, run, f"{name} grown")
        path.write_bytes((run / "ckpt/step-00000006" / name).read_bytes())
        refused(lab, run, f"{name} of step 6")
        path.unlink()
        refused(lab, run, f"no {name}")
        (lab.folder / "elsewhere").write_bytes(data)
        path.symlink_to(lab.folder / "elsewhere")
        refused(lab, run, f"{name} a link")
        path.unlink()
        os.link(lab.folder / "elsewhere", path)  # another name of the same bytes is no harm
        assert load(run, parameter_table(read_info(run).config.model)).step == 9
        path.unlink()
        os.mkfifo(path)
        refused(lab, run, f"{name} a fifo")
        path.unlink()
        path.write_bytes(data)
        count += 5
    (newest / "more.safetensors").write_bytes(b"")
    refused(lab, run, "a file too many")
    (newest / "more.safetensors").unlink()
    figures.add(DAMAGED, count + 1)
    lab.survives(run, "saved step 9\n")


def test_checkpoints_of_another_run_are_refused(lab: Lab, run: Path, figures: Figures) -> None:
    """The same config, data and step, the very same bits: but not this run's, so nothing says where they came from."""
    other = lab.fresh()
    assert lab.train(other).code == 0
    for names in (FILES, FILES[:2], FILES[2:]):
        shutil.rmtree(run / "ckpt/step-00000009")
        shutil.copytree(other / "ckpt/step-00000009", run / "ckpt/step-00000009")
        for name in set(FILES) - set(names):
            (run / "ckpt/step-00000009" / name).unlink()
        refused(lab, run, f"{names} of another run")
        figures.add(DAMAGED, 1)
    shutil.rmtree(run / "ckpt/step-00000009")
    shutil.copytree(run / "ckpt/step-00000006", run / "ckpt/step-00000009")
    refused(lab, run, "step 6 under the name of step 9")
    figures.add(DAMAGED, 1)
    lab.survives(run, "saved step 6\n")


@pytest.mark.parametrize("name", some(FILES, 1))
def test_a_damaged_newest_step_is_saved_again_under_its_name(lab: Lab, run: Path, figures: Figures, name: str) -> None:
    """Resume from the step before, then save at that very step: works, and nothing has to be repaired by hand."""
    change_file(run / "ckpt/step-00000009" / name, "flipped", 40)
    done = lab.survives(run, "saved step 6\n")
    assert "step-00000009 cannot be used" in done.err and "using step-00000006 instead" in done.err
    assert saved(done.err) == [9, 12] and lab.check_states(run) == [9, 12]
    figures.add(DAMAGED, 1)


def test_when_every_step_is_damaged_one_line_says_so(lab: Lab, run: Path, figures: Figures) -> None:
    for step in ("step-00000006", "step-00000009"):
        change_file(run / "ckpt" / step / "optim.safetensors", "truncated", -1)
    done = lab.resume(run)
    assert done.code == 1 and "cannot be used (and none of 1 older ones)" in done.line
    figures.add(DAMAGED, 2)


PICKLE = b"cos\nsystem\n(S'touch /tmp/never'\ntR."
HOSTILE: dict[str, Any] = {
    "a pickle for the weights": lambda run: (run / "ckpt/step-00000009/model.safetensors").write_bytes(PICKLE),
    "modules that would be imported": lambda run: [
        (run / folder / name).write_text("raise SystemExit('code of the run was executed')")
        for folder in (".", "ckpt", "ckpt/step-00000009")
        for name in ("numpy.py", "conftest.py", "sitecustomize.py", "ptxtrain.py", "json.py")
    ],
    "a link out of the run": lambda run: (
        shutil.move(run / "ckpt/step-00000006", run.parent / "outside"),
        (run / "ckpt/step-00000006").symlink_to(run.parent / "outside"),
    ),
    "a link for the leftovers": lambda run: (run / "ckpt/.tmp-00000011-1").symlink_to(run.parent),
    "names that point elsewhere": lambda run: [
        (run / "ckpt" / name).mkdir() for name in ("step-99999999", "step-0000001 ", ".gone-00000001-1", "step-..")
    ],
    "metrics of deep nesting": lambda run: (run / "metrics.jsonl").write_bytes(b"[" * 200_000 + b"\n"),
    "metrics that are no text": lambda run: (run / "metrics.jsonl").write_bytes(bytes(range(256)) * 300),
    "a fifo for the metrics": lambda run: ((run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")),
}


@pytest.mark.parametrize("what", some(HOSTILE, 3))
def test_nothing_in_a_run_directory_is_executed(lab: Lab, run: Path, figures: Figures, what: str) -> None:
    """Python's audit hooks see no code loaded from the run, no process started, no file written outside of the run."""
    HOSTILE[what](run)
    cache = os.environ["PTXTRAIN_CACHE"]
    allowed = [str(run), cache, "/dev/null", str(lab.server.folder)]
    done = lab.resume(run, inject=faults(watch={"allowed": allowed, "hostile": str(run)}), cwd=run)
    assert "#did" not in done.err, done.err
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    figures.add(WATCHED, 1)
