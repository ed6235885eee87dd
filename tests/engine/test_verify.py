"""What `verify` finds wrong with a run's files, each thing by itself, and what it lets pass."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statebench import TABLE

from ptxtrain.data.loader import Loader, position_after
from ptxtrain.data.shards import TokShard, write_shard
from ptxtrain.engine import verify as module
from ptxtrain.engine.checkpoint import Saver, Snapshot
from ptxtrain.engine.config import load_preset
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.metrics import Metrics
from ptxtrain.engine.rundir import RunDirectory, read_info
from ptxtrain.engine.sealed import seal
from ptxtrain.engine.verify import FAIL, NOTE, OK, kind_of, verify

NUMBERS = 36
PLACES = {1: (0, 4096), 2: (0, 8192), 3: (1, 3072)}  # 16 sequences of 256 a step; the first shard holds 36


def state(step: int) -> Snapshot:
    rng = np.random.default_rng(step)
    params, m, v = (rng.standard_normal(NUMBERS).astype(np.float32) for _ in range(3))
    return Snapshot(step, params, m, np.abs(v), PLACES[step])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps with a checkpoint each, on a model of three small tensors."""
    monkeypatch.setattr(module, "parameter_table", lambda model: TABLE)
    (tmp_path / "tokenizer.json").write_text("{}")
    shards = [
        {"name": f"train-{i:06d}.tok", "tokens": n, "bytes": 1, "digest": "x"} for i, n in enumerate((9300, 8000))
    ]
    held = RunDirectory.create(
        tmp_path / "run",
        load_preset("tiny"),
        data_identity={"vocab_size": 4096, "tokenizer_sha256": "t", "shards": shards},
        tokenizer_path=tmp_path / "tokenizer.json",
        numerics_id="cpu:test",
    )
    with held, Metrics(held.info.metrics, pytest.fail) as metrics:
        saver = Saver(held, TABLE, announce=lambda line: None)
        metrics.log(begins_after=0, digest="d0", numerics="cpu:test", data=held.info.data_id, accepted=[])
        for step in (1, 2, 3):
            metrics.log(step=step, loss=8.0 / step, grad_norm=1.0, lr=1e-3, digest=state(step).digest())
            saver.submit(state(step))
            saver.wait()
    return held.path


def failures(path: Path) -> list[str]:
    return [f"{finding.what}: {finding.text}" for finding in verify(path) if finding.state == FAIL]


def test_a_sound_run_passes_and_is_left_as_it_was(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = list(verify(run))
    assert [(f.what, f.state) for f in found] == [
        ("run.json", OK), ("tokenizer", OK), ("data", NOTE), *((f"step {n}", OK) for n in (1, 2, 3)), ("resume", NOTE),
        ("metrics", OK),
    ]  # fmt: skip
    assert f"digest {state(2).digest()}, " in found[4].text and "behind step 3" in found[6].text
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    one = list(verify(run / "ckpt/step-00000002"))
    assert [(f.what, f.state) for f in one] == [("run.json", OK), ("step 2", OK)]


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def reseal(step: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((step / "MANIFEST.json").read_bytes())
    del values["digest"]
    change(values)
    (step / "MANIFEST.json").write_bytes(seal(values))


def poison(step: Path) -> None:
    data = bytearray((step / "model.safetensors").read_bytes())
    data[-4:] = b"\0\0\xc0\x7f"
    (step / "model.safetensors").write_bytes(data)
    sha = hashlib.sha256(data).hexdigest()
    reseal(step, lambda values: values["files"]["model.safetensors"].__setitem__("sha256", sha))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def replace(step: Path, other: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(other, step)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda run: flip(run / "ckpt/step-00000002/model.safetensors"), "step 2: step-00000002: model.safetensors is"),
    "moments": (lambda run: flip(run / "ckpt/step-00000002/optim.safetensors"), "step 2: step-00000002: optim.safetensors is"),
    "manifest": (lambda run: flip(run / "ckpt/step-00000002/MANIFEST.json", 30), "step 2: step-00000002: MANIFEST.json"),
    "a file too many": (lambda run: (run / "ckpt/step-00000002/x").touch(), "which is not one of its files"),
    "a file too few": (lambda run: (run / "ckpt/step-00000002/optim.safetensors").unlink(), "optim.safetensors is missing"),
    "a NaN": (lambda run: poison(run / "ckpt/step-00000002"), "holds a number that is not finite"),
    "another place": (
        lambda run: reseal(run / "ckpt/step-00000003", lambda v: v.update(position=[1, 3328])),
        "step 3: step-00000003: its state has digest",
    ),
    "another step's": (
        lambda run: replace(run / "ckpt/step-00000003", run / "ckpt/step-00000002"),
        "step 3: step-00000003: MANIFEST.json is that of step 2",
    ),
    "run.json": (lambda run: flip(run / "run.json", 40), "run.json: "),
    "tokenizer": (lambda run: (run / "tokenizer.json").write_text("[]"), "tokenizer: "),
    "a step's digest": (
        lambda run: edit(run / "metrics.jsonl", state(2).digest(), "0" * 16),
        "its state has digest " + state(2).digest() + ", metrics.jsonl says 0000000000000000",
    ),
    "ckpt gone": (lambda run: shutil.rmtree(run / "ckpt"), "ckpt: "),
    "a link for ckpt": (
        lambda run: (shutil.move(run / "ckpt", run / "elsewhere"), (run / "ckpt").symlink_to(run / "elsewhere")),
        "is no directory of the run's own",
    ),
    "a line": (lambda run: edit(run / "metrics.jsonl", '"step": 2', '"step" 2'), "metrics: line 3 is not a line of metrics"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_named(what: str, run: Path) -> None:
    damage, says = DAMAGE[what]
    damage(run)
    found = failures(run)
    assert len(found) == 1 and says in found[0], found


def test_what_resume_would_do_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        (run / f"ckpt/step-0000000{step}/MANIFEST.json").write_text("{}")
    assert "would refuse: no checkpoint is sound" in next(f.text for f in verify(run) if f.what == "resume")
    for step in (1, 2, 3):
        shutil.rmtree(run / f"ckpt/step-0000000{step}")
    assert "would begin at step 0" in next(f.text for f in verify(run) if f.what == "resume")

    def failing(path: Path) -> list[int]:
        raise PtxtrainError("cannot read ckpt")

    monkeypatch.setattr(module, "list_steps", failing)
    assert failures(run) == ["ckpt: cannot read ckpt"]


def test_a_place_that_the_steps_do_not_lead_to_is_found(run: Path) -> None:
    """Even if everything about the checkpoint agrees with itself: the data were never changed, so its place follows."""
    wrong = state(3)
    wrong.position = (1, 3328)
    shutil.rmtree(run / "ckpt/step-00000003")
    with RunDirectory.open(run) as held:
        saver = Saver(held, TABLE, announce=lambda line: None)
        saver.submit(wrong)
        saver.wait()
    edit(run / "metrics.jsonl", state(3).digest(), wrong.digest())
    assert failures(run) == [
        "step 3: step-00000003: its place in the data is shard 1, token 3,328; 3 steps lead to shard 1, token 3,072"
    ]


def test_lost_lines_leftovers_and_foreign_names_are_notes(run: Path) -> None:
    for name in (".tmp-00000004-1", ".gone-00000001-2", ".aside-step-00000009-1", "holiday"):
        (run / "ckpt" / name).mkdir()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], lines[1], lines[3]]))
    found = list(verify(run))
    assert [f.state for f in found].count(FAIL) == 0
    notes = " ".join(f.text for f in found if f.state == NOTE)
    for part in (
        ".tmp-00000004-1 is being written",
        ".gone-",
        ".aside-step-00000009-1 was set aside",
        "holiday is not of",
    ):
        assert part in notes
    assert "attempt 1 has no line of step 2" in notes
    assert "metrics.jsonl has no line of that step" in next(f.text for f in found if f.what == "step 2")


def test_what_retention_removes_meanwhile_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.verify_files

    def removing(directory: Path, *rest: Any) -> Any:
        if directory.name.endswith("1"):
            shutil.rmtree(directory)
        return real(directory, *rest)

    monkeypatch.setattr(module, "verify_files", removing)
    assert failures(run) == [] and "step 1" not in [f.what for f in verify(run)]


def test_kinds(run: Path, tmp_path: Path) -> None:
    assert kind_of(run) == "run" and kind_of(run / "ckpt/step-00000001") == "checkpoint"
    for path, says in (
        (tmp_path, "is neither a run"),
        (tmp_path / "none", "does not exist"),
        (run / "ckpt/step-00000009", "does not exist"),
        (run / "ckpt", "is neither"),
    ):
        with pytest.raises(PtxtrainError, match=says):
            kind_of(path)
    assert read_info(run).data_id


def test_the_place_after_so_many_sequences_is_where_a_loader_stands(tmp_path: Path) -> None:
    counts = (50, 3, 17, 16, 33)  # the second and the fourth hold no sequence of 16
    for index, count in enumerate(counts):
        write_shard(tmp_path / f"{index}.tok", np.arange(count) % 7, vocab_size=7)
    loader = Loader([TokShard(tmp_path / f"{index}.tok") for index in range(5)], 16, 7)
    tokens, targets = np.empty((1, 16), np.int32), np.empty((1, 16), np.int32)
    for sequences in range(20):
        assert position_after(counts, 16, sequences) == loader.position, sequences
        loader.read(1, tokens, targets)
