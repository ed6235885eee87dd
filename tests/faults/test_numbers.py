"""Numbers that are none, a device that fails or is full: stopped before anything bad is saved, or the same bits all the same."""

from __future__ import annotations

import json
import math
import re

import pytest
from figures import NUMBERS, REPEATS, WORLD, Figures, some
from lab import Lab, faults, saved

from ptxtrain.engine.checkpoint import list_steps, load
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.rundir import read_info


@pytest.mark.parametrize("value", some([math.nan, math.inf, -math.inf], 1), ids=str)
@pytest.mark.parametrize("step", some([1, 4, 7, 12], 1))
def test_a_poisoned_gradient_stops_before_the_update(lab: Lab, figures: Figures, step: int, value: float) -> None:
    """Step, shard and offset are named, the step before is saved, and a resume that meets no poison ends as it should."""
    run = lab.fresh()
    done = lab.train(run, inject=faults(poison={"step": step, "value": value}))
    assert done.code == 1 and done.line.startswith(f"error: step {step}: the loss is"), done.err
    sequence = (step - 1) * 8  # the first of the batch; 24 lie in the first shard, 25 in the second, none in the third
    file, first = (0, 0) if sequence < 24 else (1, 24) if sequence < 49 else (3, 49) if sequence < 82 else (0, 82)
    assert re.search(rf"from token {16 * (sequence - first):,} of \S*train-{file:06d}.tok", done.line), done.line
    assert f"step {step - 1} is the newest saved" in done.line or step == 1
    assert lab.check_states(run)[-1] == step - 1
    lab.survives(run, done.err)
    figures.add(NUMBERS, 1)


@pytest.mark.parametrize("what", some(["params", "m", "v"], 1))
@pytest.mark.parametrize("value", some([math.nan, math.inf], 1), ids=str)
def test_poison_in_the_devices_memory_is_never_saved(lab: Lab, figures: Figures, what: str, value: float) -> None:
    """A bit flipped where the state lies: that state is not what training made, so it is not saved, and an older one is kept."""
    run = lab.fresh()
    done = lab.train(run, inject=faults(poison={"step": 8, "what": what, "value": value}))
    assert done.code in (1, 3), done.err
    newest = max(saved(done.err))
    assert newest in (6, 7) and lab.check_states(run)[-1] == newest, done.err
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        assert "loss" not in values or values["step"] <= newest + 2 or what == "v", "nor are many steps made on it"
    (run / "metrics.jsonl").unlink()  # steps on poison have other numbers, as `verify` would find
    lab.survives(run, done.err)
    figures.add(NUMBERS, 1)


def test_a_poisoned_weight_at_a_steps_start(lab: Lab, figures: Figures) -> None:
    run = lab.fresh()
    done = lab.train(run, inject=faults(poison_before={"step": 8}))
    assert done.code == 3 and "step 8: the loss is nan" in done.line and "step 6 is the newest saved" in done.line, (
        done.err
    )
    lab.survives(run, done.err)
    figures.add(NUMBERS, 1)


def test_an_absurd_learning_rate_ends_the_run_with_finite_checkpoints(lab: Lab, figures: Figures) -> None:
    """No config may ask for it; were it to come about, the step that meets its weights stops, and none that is not finite
    is saved."""
    refused = lab.train(lab.fresh(), "--set", "optimizer.lr=1e38")
    assert refused.code == 1 and "optimizer.lr" in refused.line and "out of range" in refused.line, refused.err
    run = lab.fresh()
    done = lab.train(run, inject=faults(absurd_lr={"step": 5, "lr": 1e38}))
    assert done.code == 1 and re.search(r"step 6: the loss is \S+ and the gradient norm nan", done.line), done.err
    table = parameter_table(read_info(run).config.model)
    assert [load(run, table, step=step).step for step in list_steps(run)][:1] == [
        3
    ]  # each is finite, or would be refused
    again = lab.resume(run)
    assert again.code == 1 and "the loss is" in again.line, again.err
    figures.add(NUMBERS, 2)


@pytest.mark.parametrize("step", some([1, 2, 8, 12], 1))
def test_a_failed_device_is_exit_4_and_a_finished_snapshot_is_still_written(
    lab: Lab, figures: Figures, step: int
) -> None:
    """Nothing is read from the device any more; what had been copied from it is written to the end and announced."""
    run = lab.fresh()
    slow = faults(hold_disk={"op": "write", "match": ".tmp-00000006", "seconds": 1.0})
    done = lab.train(run, inject=[*slow, *faults(device_error={"step": step})])
    assert done.code == 4 and "an illegal memory access was encountered" in done.line, done.err
    newest = 3 * ((step - 1) // 3)
    assert "#read after failure" not in done.err and max(saved(done.err), default=0) == newest, done.err
    says = f"step {newest} is the newest saved" if newest else "nothing has been saved yet"
    assert says in done.line
    lab.survives(run, done.err)
    figures.add(WORLD, 1)


def needs(lab: Lab, micro_batch: int) -> int:
    """Bytes of device memory that a run takes."""
    argv = [
        "train",
        "--preset",
        lab.preset,
        "--dry-run",
        "--no-measure",
        "--json",
        "--set",
        f"batch.micro_batch={micro_batch}",
    ]
    return int(json.loads(lab.run(*argv).out)["memory"]["total"])


def test_too_little_memory_halves_the_micro_batch_with_the_same_bits(lab: Lab, figures: Figures) -> None:
    """It says so, at the start and at a resume; too little for a single sequence is one line before anything is made."""
    four, two, one = (needs(lab, size) for size in (4, 2, 1))
    assert one < two < four
    for limit, size in some([(two, 2), (one, 1)], 1):
        run = lab.fresh()
        room = {"PTXTRAIN_MEMORY_LIMIT": str(limit + 2000)}  # none for samples, which are left out
        stop = faults(signal_at_step={"step": 7, "number": 15})
        done = lab.train(run, "--set", "batch.micro_batch=4", environment=room, inject=stop)
        assert done.code == 2 and f"going on with {size}, which gives the same bits" in done.err, done.err
        assert "no sample behind step 6: out of memory" in done.err
        resumed = lab.resume(run, environment=room)
        assert (resumed.code, resumed.digest) == (0, lab.reference.digest), resumed.err
        assert f"going on with {size}" in resumed.err
        lab.check_numbers(run)
        figures.add(REPEATS, 1)
    run = lab.fresh()
    done = lab.train(run, environment={"PTXTRAIN_MEMORY_LIMIT": "100K"})
    assert done.code == 1 and f"({one:,} bytes) are needed" in done.line and not run.exists(), done.err
    figures.add(WORLD, 3)


@pytest.mark.parametrize("threads", some([2, 3], 1))
@pytest.mark.parametrize("micro_batch", some([1, 2, 4], 1))
def test_the_same_bits_at_any_micro_batch_and_number_of_threads(
    lab: Lab, figures: Figures, micro_batch: int, threads: int
) -> None:
    run = lab.fresh()
    done = lab.train(run, "--set", f"batch.micro_batch={micro_batch}", "--threads", threads)
    assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    lab.check_numbers(run)
    figures.add(REPEATS, 1)
