"""`verify` on runs, checkpoints and datasets that the other commands made: one line each, exit code 1 when something is off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs import Done, metrics, ptxtrain


def test_a_run_a_checkpoint_and_a_dataset_pass(finished: tuple[Path, Done], dataset: Path) -> None:
    run, done = finished
    whole = ptxtrain("verify", run)
    assert whole.code == 0, whole.err
    assert f"digest {done.digest}, " in whole.out and "2 shards by their headers" in whole.out
    assert "12 steps, 1 attempt" in whole.out and whole.out.rstrip().endswith(f"verified {run}: 7 checks passed")
    one = ptxtrain("verify", run / "ckpt/step-00000010")
    assert one.code == 0 and "step 10" in one.out and "step 12" not in one.out
    data = ptxtrain("verify", dataset)
    assert data.code == 0 and "train-000000.tok" in data.out and "tokens in" in data.out


def test_a_run_that_was_stopped_and_resumed_passes_and_a_changed_number_does_not(copy: Path) -> None:
    assert ptxtrain("resume", copy, "--step", 5, "--threads", 1, "--set", "batch.micro_batch=4").code == 0
    done = ptxtrain("verify", copy)
    assert done.code == 0, done.err
    assert "7 steps were made again, with the same bits" in done.out
    assert ".aside-step-00000012-1 was set aside by resume" in done.out
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(metrics(copy)) if line["attempt"] == 2 and line.get("step") == 8)
    line = json.loads(lines[at])
    line["grad_norm"] *= 1 + 2**-23
    lines[at] = json.dumps(line) + "\n"
    (copy / "metrics.jsonl").write_text("".join(lines))
    done = ptxtrain("verify", copy)
    assert done.code == 1 and "1 of 7 checks failed; the first: metrics: step 8: grad_norm is" in done.line


def test_json_has_every_finding(copy: Path) -> None:
    (copy / "ckpt/step-00000010/optim.safetensors").write_bytes(b"")
    done = ptxtrain("verify", copy, "--json")
    report = json.loads(done.out)
    assert done.code == 1 and report["kind"] == "run" and not report["passed"]
    failed = [finding for finding in report["findings"] if finding["state"] == "FAIL"]
    assert [finding["what"] for finding in failed] == ["step 10"] and "has 0 bytes" in failed[0]["text"]


@pytest.mark.parametrize("where", ["header", "tokens", "table", "grown"])
def test_a_damaged_shard_is_found(where: str, dataset: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dataset, tmp_path / "data"))
    shard = copy / "train-000000.tok"
    data = bytearray(shard.read_bytes())
    if where == "grown":
        data += b"\0"
    else:
        data[{"header": 20, "tokens": 300, "table": -3}[where]] ^= 1
    shard.write_bytes(data)
    done = ptxtrain("verify", copy)
    assert done.code == 1 and "train-000000.tok" in done.line
    if where == "tokens":
        assert "is damaged between byte 128 and byte" in done.line and "val-000000.tok" in done.out, (
            "the others are checked too"
        )


def test_a_changed_tokenizer_of_a_dataset_is_found(dataset: Path, tmp_path: Path) -> None:
    tokenizer = Path(shutil.copytree(dataset, tmp_path / "data")) / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    done = ptxtrain("verify", tmp_path / "data")
    assert done.code == 1 and "tokenizer.json has the SHA-256" in done.line


def test_data_that_are_no_longer_the_runs_are_found(preset: Path, dataset: Path, tmp_path: Path) -> None:
    here = Path(shutil.copytree(dataset, tmp_path / "data"))
    assert ptxtrain("train", "--preset", preset, "--data", here, "--run", tmp_path / "run", "--steps", 1).code == 0
    assert ptxtrain("verify", tmp_path / "run").code == 0
    shutil.rmtree(here)
    assert "verify them where they lie now" in ptxtrain("verify", tmp_path / "run").out
    assert ptxtrain("tokenize", Path(json.__file__).parent, "--out", here, "--vocab-size", 300).code == 0
    done = ptxtrain("verify", tmp_path / "run")
    assert done.code == 1 and "is not what the run was trained on" in done.line


def test_what_is_none_of_them_is_one_line(tmp_path: Path) -> None:
    assert "does not exist" in ptxtrain("verify", tmp_path / "nowhere").line
    assert "is neither a run, a checkpoint in a run, nor a dataset" in ptxtrain("verify", tmp_path).line
