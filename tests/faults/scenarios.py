"""What must hold in one run with one fault, as functions of a lab: `test_mutants_of_the_tool.py` runs each on the tool as it is,
and on a tool with one line changed, which one of them must not let pass. Each raises AssertionError."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from inject import change_file
from lab import Lab, faults, saved

from ptxtrain.data.shards import HEADER_BYTES

Scenario = Callable[[Lab], None]
STOP_IN_5 = faults(signal_at_step={"step": 5, "number": int(signal.SIGTERM)})


def undisturbed(lab: Lab) -> None:
    """The bits of the reference, every state that was saved, and nothing said that is not so."""
    run = lab.fresh()
    done = lab.train(run)
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    assert saved(done.err) == [3, 6, 9, 12] and lab.check_states(run) == [9, 12], done.err
    lab.check_numbers(run)


def stop_and_resume(lab: Lab) -> None:
    """Stopped in step 5, resumed with another micro-batch and more threads."""
    run = lab.fresh()
    done = lab.train(run, inject=STOP_IN_5)
    assert done.code == 2 and max(saved(done.err)) in (4, 5), done.err
    lab.survives(run, done.err, "--set", "batch.micro_batch=4", "--threads", 2)


def stop_while_compiling(lab: Lab) -> None:
    """Step 0 is saved."""
    run = lab.fresh()
    held = {"where": "ptxtrain.engine.step:TrainStep.load", "seconds": 30}
    child = lab.start(*lab.train_argv(run), inject=faults(hold=held))
    child.until("#at load")
    child.send(signal.SIGINT)
    done = child.wait(15)
    assert done.code == 2 and saved(done.err) == [0], done.err
    lab.survives(run, done.err)


def leave_at_once(lab: Lab) -> None:
    """Three signals during a save."""
    run = lab.fresh()
    child = lab.start(
        *lab.train_argv(run), inject=faults(hold_disk={"op": "fsync", "match": ".tmp-00000006", "seconds": 20})
    )
    child.until("#at fsync")
    child.send(signal.SIGINT)
    child.until("SIGINT: stopping; ")
    child.send(signal.SIGINT)
    child.until("once more leaves at once")
    child.send(signal.SIGINT)
    done = child.wait(5)
    assert done.code == 3 and "step 3 is the newest saved" in done.err, done.err
    lab.survives(run, done.err)


def killed_in_a_save(lab: Lab) -> None:
    run = lab.fresh()
    done = lab.train(run, inject=faults(kill_at={"n": 0, "match": f"rename {run}/ckpt/.tmp-00000009"}))
    assert done.code == -signal.SIGKILL, done.err
    lab.survives(run, done.err)


def poisoned_gradient(lab: Lab) -> None:
    run = lab.fresh()
    done = lab.train(run, inject=faults(poison={"step": 8}))
    assert done.code == 1 and "step 7 is the newest saved" in done.line, done.err
    assert lab.check_states(run)[-1] == 7
    lab.survives(run, done.err)


def poisoned_weight(lab: Lab) -> None:
    """In the update of step 8, so that the device takes it for that step's state."""
    run = lab.fresh()
    done = lab.train(run, inject=faults(poison={"step": 8, "what": "params"}))
    assert done.code == 3 and lab.check_states(run)[-1] == 6 and max(saved(done.err)) == 6, done.err
    (run / "metrics.jsonl").unlink()  # it has the digest of a state that never should have been
    lab.survives(run, done.err)


def failed_device(lab: Lab) -> None:
    """While step 6 is still being written."""
    run = lab.fresh()
    slow = faults(hold_disk={"op": "write", "match": ".tmp-00000006", "seconds": 0.7})
    done = lab.train(run, inject=[*slow, *faults(device_error={"step": 8})])
    assert done.code == 4 and "step 6 is the newest saved" in done.line and saved(done.err) == [3, 6], done.err
    assert "#read after failure" not in done.err
    lab.survives(run, done.err)


def full_disk(lab: Lab) -> None:
    """Under the last save."""
    run = lab.fresh()
    done = lab.train(run, inject=faults(fail={"op": "write", "error": "ENOSPC", "match": ".tmp-00000012"}))
    assert done.code == 3 and "step 9 is the newest saved" in done.line, done.err
    lab.survives(run, done.err)


def full_log(lab: Lab) -> None:
    run = lab.fresh()
    done = lab.train(run, inject=faults(fail={"op": "write", "error": "ENOSPC", "match": "metrics.jsonl"}))
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err


def damaged_newest(lab: Lab) -> None:
    run = lab.fresh()
    assert lab.train(run, inject=STOP_IN_5).code == 2
    change_file(max((run / "ckpt").iterdir()) / "optim.safetensors", "flipped", -3)
    done = lab.survives(run, "saved step 3\n")
    assert "cannot be used" in done.err


def second_holder(lab: Lab) -> None:
    run = lab.fresh()
    held = {"where": "ptxtrain.engine.step:TrainStep.begin", "nth": 3, "seconds": 30}
    first = lab.start(*lab.train_argv(run), inject=faults(hold=held))
    first.until("#at begin")
    second = lab.resume(run)
    first.send(signal.SIGKILL)
    first.wait()
    assert second.code == 5 and f"process {first.pid}" in second.line, second.err


def _own_data(lab: Lab) -> Path:
    own = lab.folder / f"data-{lab.fresh().name}"
    shutil.copytree(lab.dataset, own)
    lab.dataset = own
    return own / "train-000001.tok"


def shard_flipped_between_runs(lab: Lab) -> None:
    run, shard = lab.fresh(), _own_data(lab)
    assert lab.train(run, inject=STOP_IN_5).code == 2
    change_file(shard, "flipped", HEADER_BYTES + 300)
    done = lab.resume(run)
    assert done.code == 1 and shard.name in done.line, done.err


def shard_changed_during_a_run(lab: Lab) -> None:
    for edit, at in (("flipped", HEADER_BYTES + 790), ("truncated", -200)):
        run, shard = lab.fresh(), _own_data(lab)
        done = lab.train(run, inject=faults(edit_at_read={"nth": 5, "path": str(shard), "edit": edit, "at": at}))
        assert done.code == 1 and shard.name in done.line, done.err


def other_data(lab: Lab) -> None:
    """A dataset that is sound in itself, but another: its first two shards have changed places."""
    from lab import write_manifest

    run, shard = lab.fresh(), _own_data(lab)
    assert lab.train(run, inject=STOP_IN_5).code == 2
    spare = shard.with_name("spare")
    first = shard.with_name("train-000000.tok")
    first.rename(spare)
    shard.rename(first)
    spare.rename(shard)
    write_manifest(shard.parent)
    done = lab.resume(run)
    assert done.code == 1 and "--accept-data" in done.line, done.err


SCENARIOS: tuple[Scenario, ...] = (
    undisturbed,
    stop_and_resume,
    stop_while_compiling,
    leave_at_once,
    killed_in_a_save,
    poisoned_gradient,
    poisoned_weight,
    failed_device,
    full_disk,
    full_log,
    damaged_newest,
    second_holder,
    shard_flipped_between_runs,
    shard_changed_during_a_run,
    other_data,
)
