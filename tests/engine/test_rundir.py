from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from statebench import DISK_FULL, FailAt, Killed, make_run

from ptxtrain.engine.config import load_preset
from ptxtrain.engine.durable import Durable
from ptxtrain.engine.errors import PtxtrainError, RunInUse
from ptxtrain.engine.rundir import RunDirectory, new_run_path, newest_run, read_info, run_and_step

HOLD = """
import sys, time
from pathlib import Path
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.rundir import RunDirectory
try:
    run = RunDirectory.open(Path(sys.argv[1]))
except PtxtrainError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
print("held", flush=True)
time.sleep(60)
"""


def test_what_is_written_once_comes_back(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert sorted(os.listdir(run.path)) == ["ckpt", "run.json", "run.lock", "tokenizer.json"]
    info = read_info(run.path)
    assert info == run.info and info.config == load_preset("tiny") and info.seed == 1
    assert (
        info.data == {"shards": ["a", "b"]}
        and info.numerics_id == "cpu:test"
        and re.fullmatch("[0-9a-f]{32}", info.run_id)
    )
    assert run.info.metrics == run.path / "metrics.jsonl"
    info.check_tokenizer()
    (run.path / "tokenizer.json").write_text("{}")
    with pytest.raises(PtxtrainError, match="not the tokenizer that the run was made with"):
        info.check_tokenizer()
    (run.path / "tokenizer.json").unlink()
    with pytest.raises(PtxtrainError, match="cannot read"):
        info.check_tokenizer()


def test_two_runs_have_two_ids(tmp_path: Path) -> None:
    assert make_run(tmp_path).info.run_id != make_run(tmp_path, name="other").info.run_id


def test_the_second_process_exits_with_5_names_the_first_and_kill_9_frees_the_run(tmp_path: Path) -> None:
    make_run(tmp_path).close()
    path = tmp_path / "run"
    first = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        second = subprocess.run([sys.executable, "-c", HOLD, path], stderr=subprocess.PIPE, text=True, timeout=30)
        assert second.returncode == 5
        assert re.fullmatch(rf"\S+ is in use by process {first.pid} on \S+ since \S+\. Wait .*\n", second.stderr)
        with pytest.raises(RunInUse, match=f"process {first.pid} on"):
            RunDirectory.open(path)
        first.send_signal(signal.SIGKILL)
        first.wait(10)
        with RunDirectory.open(path) as run:
            assert str(os.getpid()) in (run.path / "run.lock").read_text()
    finally:
        first.kill()
        first.wait(10)
        assert first.stdout is not None
        first.stdout.close()


def test_the_lock_ends_with_close_and_the_holder_may_be_unknown(tmp_path: Path) -> None:
    with make_run(tmp_path) as run:
        (run.path / "run.lock").write_bytes(b"\xff")
        with pytest.raises(RunInUse, match="by another process"):
            RunDirectory.open(run.path)
    RunDirectory.open(run.path).close()


def test_a_failed_open_lets_the_lock_go(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.close()
    good = (run.path / "run.json").read_bytes()
    (run.path / "run.json").write_bytes(good[:-5])
    with pytest.raises(PtxtrainError, match="cannot be trusted"):
        RunDirectory.open(run.path)
    (run.path / "run.json").write_bytes(good)
    RunDirectory.open(run.path).close()


def test_create_refuses_a_run_and_suggests_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for held in (True, False):
        with pytest.raises(PtxtrainError, match=f"already holds a run. Go on with it by `ptxtrain resume {run.path}`"):
            make_run(tmp_path)
        if held:
            run.close()


def test_create_refuses_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.doc").write_text("")
    with pytest.raises(PtxtrainError, match="is not empty and is not a run"):
        make_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PtxtrainError, match="is a file"):
        make_run(tmp_path, name="file")
    with pytest.raises(PtxtrainError, match="a folder above it, is a file"):
        make_run(tmp_path, name="file/run")
    with pytest.raises(PtxtrainError, match="cannot read tokenizer"):
        RunDirectory.create(
            tmp_path / "new",
            load_preset("tiny"),
            data_identity={},
            tokenizer_path=tmp_path / "none.json",
            numerics_id="cpu",
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("error", [Killed, DISK_FULL], ids=["killed", "disk full"])
def test_an_unfinished_start_is_no_run_and_can_be_started_again(tmp_path: Path, error) -> None:
    n = 0
    while True:
        io = Durable(fail := FailAt(n, error, forever=True))
        with contextlib.suppress(Killed, PtxtrainError):
            make_run(tmp_path / str(n), io).close()
        if fail.hit is None:
            break
        path = tmp_path / str(n) / "run"
        if not (path / "run.json").exists():
            with pytest.raises(PtxtrainError, match="is not a run directory"):
                RunDirectory.open(path)
            make_run(tmp_path / str(n)).close()
        RunDirectory.open(path).close()
        n += 1
    assert n >= 14


def test_a_start_with_checkpoints_but_no_run_json_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run" / "ckpt" / "step-00000001").mkdir(parents=True)
    with pytest.raises(PtxtrainError, match="is not empty and is not a run"):
        make_run(tmp_path)


def test_run_json_is_refused_when_anything_in_it_changed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    good = (run.path / "run.json").read_bytes()
    for bad in (good.replace(b'"lr": 0.001', b'"lr": 0.002'), good[:-1], b"", b"{}", good.replace(b"\n", b"\n\n", 1)):
        assert bad != good
        (run.path / "run.json").write_bytes(bad)
        with pytest.raises(PtxtrainError, match="cannot be trusted"):
            read_info(run.path)
    (run.path / "run.json").unlink()
    os.mkfifo(run.path / "run.json")
    with pytest.raises(PtxtrainError, match="cannot be read: not a regular file"):
        read_info(run.path)


def test_names_come_from_preset_and_time_and_are_new(tmp_path: Path) -> None:
    first = new_run_path("tiny", tmp_path)
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", first.name)
    first.mkdir()
    second = new_run_path("tiny", tmp_path)
    assert second != first and not second.exists()


def test_the_newest_run_is_the_one_made_last(tmp_path: Path) -> None:
    with pytest.raises(PtxtrainError, match=r"there is no run under .*runs/.*ptxtrain train --preset tiny"):
        newest_run(tmp_path / "runs")
    runs = [make_run(tmp_path / "runs", name=name) for name in ("b", "c", "a")]
    (tmp_path / "runs" / "zzz").mkdir()
    os.utime(runs[0].path)
    assert newest_run(tmp_path / "runs", note=pytest.fail) == runs[2].path
    (runs[2].path / "run.json").write_bytes(json.dumps({}).encode())
    said: list[str] = []
    assert newest_run(tmp_path / "runs", note=said.append) == runs[1].path
    assert len(said) == 1 and said[0].startswith(f"left out: {runs[2].path}: run.json")


def test_run_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    assert run_and_step(run.path) == (run.path, None)
    step = run.path / "ckpt" / "step-00001514"
    assert run_and_step(step) == (run.path, 1514)
    step.mkdir()
    monkeypatch.chdir(step)
    for inside in (".", "../step-00001514", "../../ckpt/step-00001514"):
        assert run_and_step(Path(inside)) == (run.path, 1514)
    for path in (run.path / "ckpt", run.path / "step-00000001", tmp_path / "none"):
        with pytest.raises(PtxtrainError, match="Give a run directory"):
            run_and_step(path)
