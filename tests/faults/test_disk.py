"""A disk that fails under a whole run: a save that cannot be made is a warning, the last one exit 3, and `resume` carries on."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from figures import DISK_ERRORS_RUN, FULL, Figures, some
from lab import Lab, faults, saved

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES")
SAVING = ("mkdir", "create", "allocate", "write", "fsync", "rename", "fsync_dir")
EACH = list(itertools.product(SAVING, ERRORS)) if FULL else list(zip(SAVING, ERRORS * 2, strict=False))[::2]
MAKING = ("mkdir", "create", "write", "fsync", "rename", "fsync_dir")


@pytest.mark.parametrize(("op", "error"), EACH)
def test_a_periodic_save_that_fails_is_a_warning(lab: Lab, figures: Figures, op: str, error: str) -> None:
    """Training goes on to the same bits, what was saved before stays, the next save is made, nothing is left over."""
    run = lab.fresh()
    where = f"{run}/ckpt " if op == "fsync_dir" else ".tmp-00000006"
    # The parent's fsync is that of step 6's rename: the second of the run's that is not retention's.
    broken = faults(fail={"op": op, "error": error, "match": where, "times": 1})
    done = lab.train(run, inject=broken)
    lost = 3 if op == "fsync_dir" else 6
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    assert f"step {lost} was not saved: " in done.err and lost not in saved(done.err), done.err
    assert saved(done.err) == [step for step in (3, 6, 9, 12) if step != lost]
    assert lab.check_states(run)[-1] == 12 and not list((run / "ckpt").glob(".tmp*"))
    figures.add(DISK_ERRORS_RUN, 1)


@pytest.mark.parametrize(("op", "error"), some(EACH, 2))
def test_a_last_save_that_fails_is_exit_3(lab: Lab, figures: Figures, op: str, error: str) -> None:
    """The line names the last good step, which is still there, and `resume` ends with the same bits."""
    run = lab.fresh()
    where = ".tmp-00000012" if op != "fsync_dir" else f"{run}/ckpt/.tmp-00000012"
    done = lab.train(run, inject=faults(fail={"op": op, "error": error, "match": where}))
    assert done.code == 3, done.err
    assert "step 12 could not be saved" in done.line and "step 9 is the newest saved" in done.line
    assert saved(done.err) == [3, 6, 9] and lab.check_states(run)[-1] == 9
    lab.survives(run, done.err)
    figures.add(DISK_ERRORS_RUN, 1)


@pytest.mark.parametrize("op", some(["rename", "unlink", "rmdir"], 1))
def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(lab: Lab, figures: Figures, op: str) -> None:
    run = lab.fresh()
    where = f"{run}/ckpt/step-00000003 " if op == "rename" else ".gone-00000003"
    done = lab.train(run, inject=faults(fail={"op": op, "error": "EIO", "match": where}))
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    assert "could not remove old checkpoints" in done.err and saved(done.err) == [3, 6, 9, 12]
    lab.survives(run, done.err)
    figures.add(DISK_ERRORS_RUN, 1)


@pytest.mark.parametrize("op", some(["append", "write"], 1))
def test_metrics_that_cannot_be_written_stop_nothing(lab: Lab, figures: Figures, op: str) -> None:
    """A full disk under the log: one warning, the same bits, whole lines only, and the next start goes on with it."""
    run = lab.fresh()
    done = lab.train(run, inject=faults(fail={"op": op, "error": "ENOSPC", "match": "metrics.jsonl"}))
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    assert done.err.count("Training goes on; metrics lines may be missing") == 1
    lab.survives(run, done.err)
    figures.add(DISK_ERRORS_RUN, 1)


@pytest.mark.parametrize(("op", "error"), some(zip(MAKING, ERRORS * 2, strict=False), 2))
def test_a_run_that_cannot_be_made_is_one_line_and_its_place_can_be_used(
    lab: Lab, figures: Figures, op: str, error: str
) -> None:
    run = lab.fresh()
    where = str(run) if op in ("mkdir", "fsync_dir") else ".tmp-run.json"
    done = lab.train(run, inject=faults(fail={"op": op, "error": error, "match": where}))
    assert done.code == 1 and done.out == "", done.err
    assert "cannot make the run directory" in done.line
    lab.survives(run, done.err)
    figures.add(DISK_ERRORS_RUN, 1)


@pytest.mark.parametrize("most", some([1, 1000], 1))
def test_short_writes_lose_nothing(lab: Lab, figures: Figures, most: int) -> None:
    """The system may write less than it was given, for its own reasons."""
    run = lab.fresh()
    extra = () if most > 1 else ("--save-every", "0")  # some hundred thousand calls a save
    done = lab.train(run, *extra, inject=faults(short_writes={"most": most}))
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    lab.survives(run, done.err)
    figures.add(DISK_ERRORS_RUN, 1)


@pytest.mark.parametrize("share", some([0.1, 0.9, 1.5, 1.9], 2))
def test_files_that_may_not_grow(lab: Lab, figures: Figures, share: float) -> None:
    """RLIMIT_FSIZE in the midst of the weights or of the optimizer's state: the system cuts the write short, then refuses."""
    run, size = lab.fresh(), 4 * lab.parameters
    done = lab.train(run, inject=faults(file_size_limit={"size": int(share * size)}))
    assert done.code == 3 and "File too large" in done.line, done.err
    assert "nothing has been saved yet" in done.line and saved(done.err) == []
    assert "step 3 was not saved: File too large" in done.err
    assert not list((run / "ckpt").iterdir())
    lab.survives(run, done.err)
    figures.add(DISK_ERRORS_RUN, 1)


@pytest.mark.skipif(not FULL, reason="two whole processes; `make faults` runs it")
def test_a_real_file_system_that_fills_up(lab: Lab, figures: Figures, tmp_path: Path) -> None:
    """A small tmpfs of a user namespace: two checkpoints fit and a third does not; once it is larger, `resume` carries on.

    The look at the free space before step 1 is left out, as if another had filled the disk meanwhile.
    """
    made = subprocess.run(["unshare", "-Urm", "true"], capture_output=True) if shutil.which("unshare") else None
    if made is None or made.returncode:
        pytest.skip("no user namespaces here")
    run, room = tmp_path / "disk" / "run", int(2.6 * 12 * lab.parameters / 1024) + 60
    blind = "import sys; from ptxtrain.cli.main import main; from ptxtrain.engine import session as s; "
    blind += "s.check_disk = lambda *ignored: None; sys.exit(main())"
    script = f"""
        mkdir {tmp_path}/disk && mount -t tmpfs -o size={room}k none {tmp_path}/disk || exit 99
        train() {{ {sys.executable} -c '{blind}' "$@"; }}
        train {" ".join(map(str, lab.train_argv(run)))} --device cpu --threads 1
        echo "code $?" >&2
        mount -o remount,size=10m {tmp_path}/disk
        train resume {run} --device cpu --threads 1
        echo "code $?" >&2
    """
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    if done.returncode == 99:
        pytest.skip("no tmpfs in a user namespace here")
    assert "code 3\n" in done.stderr and "No space left on device" in done.stderr, done.stderr
    assert "step 9 was not saved" in done.stderr and "step 6 is the newest saved" in done.stderr, done.stderr
    assert done.stderr.endswith("code 0\n") and done.stdout.splitlines()[-1] == f"digest {lab.reference.digest}"
    figures.add(DISK_ERRORS_RUN, 1)
