"""Checkpoints in use: real sizes, other readers, notes and errors that a user sees, saving beside other work."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from statebench import TABLE, Bench, make_run, prepare_resume, same, snapshot

from ptxtrain.engine import stepdirs
from ptxtrain.engine.checkpoint import (
    NoCheckpoint,
    Saver,
    Snapshot,
    checkpoint_bytes,
    list_steps,
    load,
    make_ready,
)
from ptxtrain.engine.config import load_preset
from ptxtrain.engine.durable import Call, Durable
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.tensorfile import Layout, Place, count_numbers


def test_tiny_model_round_trip_is_bit_exact_and_other_tools_read_it(tmp_path: Path) -> None:
    table = parameter_table(load_preset("tiny").model)
    count = count_numbers(table)
    rng = np.random.default_rng(0)
    params, m, v = (rng.integers(0, 0x7F800000, count, np.uint32).view(np.float32) for _ in range(3))
    saved = Snapshot(1514, params, m, v, position=(3, 123_456_789_012), best_val=0.1, elapsed=1e9 / 7)
    run = make_run(tmp_path)
    said: list[str] = []
    saver = Saver(run, table, announce=said.append)
    saver.submit(saved)
    outcome = saver.wait()
    assert outcome is not None and outcome.saved and said == ["saved step 1514"] and saver.last_saved == 1514
    assert same(load(run.path, table), saved) and load(run.path, table).digest() == saved.digest()
    folder = run.path / "ckpt" / "step-00001514"
    weights, moments = load_file(folder / "model.safetensors"), load_file(folder / "optim.safetensors")
    assert len(weights) == len(table) and len(moments) == 2 * len(table)
    for place in table:
        part = slice(place.offset, place.offset + place.size)
        assert weights[place.name].shape == place.shape
        assert weights[place.name].tobytes() == params[part].tobytes()
        assert moments[f"m.{place.name}"].tobytes() == m[part].tobytes()
        assert moments[f"v.{place.name}"].tobytes() == v[part].tobytes()
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size <= checkpoint_bytes(table) <= size + 4096
    header = Layout(table).header
    assert len(header) % 64 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8


def test_load_takes_a_run_a_checkpoint_and_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    assert bench.save(1) and bench.save(2)
    one = bench.path / "ckpt" / "step-00000001"
    assert (
        load(bench.path, TABLE).step == 2 and load(one, TABLE).step == 1 and load(bench.path, TABLE, step=1).step == 1
    )
    assert load(one, TABLE, step=1).step == 1
    monkeypatch.chdir(bench.path / "ckpt")
    assert load(Path("step-00000001"), TABLE).step == 1
    for path, step, message in (
        (one, 2, "is step 1, and step 2 was asked for"),
        (bench.path, 3, "has no checkpoint of step 3; it has 1, 2"),
        (tmp_path / "none", None, "does not exist"),
        (tmp_path, None, "is neither a run nor a checkpoint in a run"),
    ):
        with pytest.raises(PtxtrainError, match=message):
            load(path, TABLE, step=step)


def test_loading_needs_no_lock_and_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)  # holds the lock
    assert bench.save(1) and bench.save(2)
    (bench.path / "ckpt" / "step-00000002" / "MANIFEST.json").write_bytes(b"")
    before = sorted(str(path) for path in bench.path.rglob("*"))
    assert bench.load().step == 1
    assert sorted(str(path) for path in bench.path.rglob("*")) == before


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for call in (lambda: load(run.path, TABLE), lambda: prepare_resume(run)):
        with pytest.raises(NoCheckpoint, match="ended before its first save"):
            call()


def test_a_disk_that_does_not_answer_is_no_run_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a resume would begin at step 0 and set every checkpoint aside."""
    bench = Bench(tmp_path)
    assert bench.save(1)

    def failing(path: object) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(stepdirs.os, "listdir", failing)
        with pytest.raises(
            PtxtrainError, match=r"cannot read .*ckpt: Input/output error; nothing was changed"
        ) as caught:
            load(bench.path, TABLE)
        assert not isinstance(caught.value, NoCheckpoint)
        with pytest.raises((PtxtrainError, OSError), match="Input/output error"):
            prepare_resume(bench.run)
    assert list_steps(bench.path) == [1] and load(bench.path, TABLE).step == 1


def test_every_step_refused_names_the_newest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.save(1) and bench.save(2)
    for step in (1, 2):
        shutil.rmtree(bench.path / "ckpt" / f"step-0000000{step}")
        (bench.path / "ckpt" / f"step-0000000{step}").mkdir()
    with pytest.raises(
        PtxtrainError, match=r"step-00000002 cannot be used \(and none of 1 older ones\): .* is missing"
    ):
        bench.load()


def test_another_models_table_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.save(1)
    wider = (*TABLE[:2], Place("final_norm", (5,), 32))
    renamed = (*TABLE[:2], Place("norm", (4,), 32))
    reshaped = (Place("embedding", (4, 5), 0), *TABLE[1:])
    for table, message in (
        (wider, "does not fit this model's tensors"),
        (renamed, "'norm' is missing"),
        (reshaped, "another shape"),
    ):
        with pytest.raises(PtxtrainError, match=message):
            load(bench.path, table)


def test_a_link_in_place_of_ckpt_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "outside" / ".tmp-00000001-1").mkdir(parents=True)
    (run.path / "ckpt").rmdir()
    (run.path / "ckpt").symlink_to(tmp_path / "outside")
    for call in (lambda: Saver(run, TABLE), lambda: make_ready(run, snapshot(1), ())):
        with pytest.raises(PtxtrainError, match="a directory of the run's own"):
            call()
    assert (tmp_path / "outside" / ".tmp-00000001-1").exists()


def test_the_save_runs_beside_the_caller_and_one_waits_for_another(tmp_path: Path) -> None:
    go, started = threading.Event(), threading.Event()

    def hook(call: Call) -> None:
        if call.op == "fsync":
            started.set()
            assert go.wait(10)

    run = make_run(tmp_path)
    run.io.hook = hook
    said: list[str] = []
    saver = Saver(run, TABLE, announce=said.append)
    assert saver.wait() is None and not saver.busy
    saver.submit(snapshot(1))
    assert started.wait(10) and saver.busy and said == []  # submit has come back, nothing is announced
    second = threading.Thread(target=saver.submit, args=(snapshot(2),))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    go.set()
    second.join(10)
    outcome = saver.wait()
    assert outcome is not None and outcome.step == 2 and said == ["saved step 1", "saved step 2"]


def test_a_closed_pipe_does_not_make_a_save_fail(tmp_path: Path) -> None:
    def broken(line: str) -> None:
        raise BrokenPipeError

    saver = Saver(make_run(tmp_path), TABLE, announce=broken, warn=broken)
    for step in (1, 2, 3, 4, 5):
        saver.submit(snapshot(step))
    outcome = saver.wait()
    assert outcome is not None and outcome.saved and saver.last_saved == 5


def test_a_state_that_json_cannot_hold_is_not_saved(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.save(1) and not bench.save(2, state={"loss": float("nan")}) and bench.load().step == 1
    assert bench.leftovers() == [] and "step 2 was not saved" in bench.warned[0]


def test_steps_are_ordered_by_number_and_other_names_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name in (
        "step-00000010",
        "step-100000000",
        "step-00000009",
        "step-9",
        "step-000000011",
        "xstep-00000001",
        ".tmp",
    ):
        (run.path / "ckpt" / name).mkdir()
    assert list_steps(run.path) == [9, 10, 100_000_000] and list_steps(tmp_path / "none") == []


def test_cleaning_that_fails_is_said_and_stops_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.path / "ckpt" / ".tmp-00000001-1").mkdir()

    def hook(call: Call) -> None:
        raise PermissionError(13, "Permission denied")

    run.io.hook = hook
    warned: list[str] = []
    Saver(run, TABLE, warn=warned.append)
    assert len(warned) == 1 and "could not remove" in warned[0]


def test_a_copy_that_is_not_what_the_device_held_is_not_saved(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    sound = snapshot(1)
    assert bench.save(1, device_sum=sound.sum())
    assert not bench.save(2, device_sum=sound.sum()) and bench.load().step == 1
    assert "step 2 was not saved: its bits on the host have the sum" in bench.warned[0]


def test_set_aside_steps_go_when_the_run_has_passed_them(tmp_path: Path) -> None:
    """Not before three sound later steps stand; a link in their place is removed itself; other names stay."""
    bench = Bench(tmp_path)
    for step in (1, 2, 3):
        assert bench.save(step)
    prepare_resume(bench.run, step=1, note=bench.warned.append)
    ckpt, elsewhere = bench.path / "ckpt", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    (ckpt / ".aside-step-00000001-9").symlink_to(elsewhere)
    (ckpt / ".aside-mine").mkdir()

    def aside() -> list[str]:
        return sorted(path.name for path in ckpt.iterdir() if path.name.startswith(".aside"))

    both = [".aside-step-00000002-1", ".aside-step-00000003-1"]
    assert bench.save(2) and bench.save(3) and aside() == [".aside-mine", ".aside-step-00000001-9", *both]
    assert bench.save(4) and aside() == [".aside-mine", *both]  # 2, 3, 4 stand: step 1 itself has gone as well
    assert bench.save(5) and aside() == [".aside-mine", both[1]]
    assert bench.save(6) and aside() == [".aside-mine"]
    assert (elsewhere / "kept").exists() and bench.warned == [f"set {name[7:-2]} aside as {name}." for name in both]


def test_digest_depends_on_every_part() -> None:
    s = snapshot(3)
    whole = s.digest()
    assert len(whole) == 16 and int(whole, 16) >= 0
    flipped = s.m.copy()
    flipped.view(np.uint32)[-1] ^= 1
    others = [
        Snapshot(3, s.params, flipped, s.v, s.position),
        Snapshot(3, s.m, s.params, s.v, s.position),
        Snapshot(3, s.params, s.v, s.m, s.position),
        Snapshot(4, s.params, s.m, s.v, s.position),
        Snapshot(3, s.params, s.m, s.v, (s.position[0] + 1, s.position[1])),
        Snapshot(3, s.params, s.m, s.v, (s.position[0], s.position[1] + 1)),
        Snapshot(3, s.params[:-1], s.m[:-1], s.v[:-1], s.position),
    ]
    assert len({whole, *(other.digest() for other in others)}) == 8


def test_digest_is_the_same_in_every_release() -> None:
    ramp = np.arange(5, dtype=np.float32)
    assert Snapshot(30, ramp, -ramp, ramp / 3, (1, 2)).digest() == "8e94025d4cf7eb0c"


def test_tables_with_holes_or_equal_names_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        Layout((Place("a", (2,), 0), Place("b", (2,), 3)))
    with pytest.raises(AssertionError):
        Layout((Place("a", (2,), 0), Place("a", (2,), 2)))


def test_hook_sees_every_call_that_changes_the_run(tmp_path: Path) -> None:
    """With a hook that refuses everything, the directory stays as it was."""
    run = make_run(tmp_path)
    before = sorted(str(path) for path in run.path.rglob("*"))

    def hook(call: Call) -> None:
        raise OSError(30, "Read-only file system")

    run.io = Durable(hook)
    saver = Saver(run, TABLE, announce=lambda line: None, warn=lambda line: None)
    saver.submit(snapshot(1))
    outcome = saver.wait()
    assert outcome is not None and not outcome.saved and outcome.error is not None and "Read-only" in outcome.error
    assert sorted(str(path) for path in run.path.rglob("*")) == before
