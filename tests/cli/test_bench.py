"""`ptxtrain bench`: what is asked for wrongly is one line; the report of a step is on stdout."""

from __future__ import annotations

import json

import pytest

from ptxtrain.cli import main as edge


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--cpu-device", "--device", "cuda"], "contradict each other"),
        (["--cpu-device", "--set", "layers=1"], "--set is for the preset of --step"),
        (["--cpu-device", "--step", "huge"], "unknown preset 'huge'"),
    ],
)
def test_contradictions_are_told_before_anything_is_measured(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert edge.main(["bench", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and line in err and "measuring" not in err


def test_a_missing_gpu_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ptxtrain.engine.device import cuda_errors

    def none() -> None:
        raise cuda_errors.no_driver()

    monkeypatch.setattr(cuda_errors, "import_cupy", none)
    assert edge.main(["bench", "--device", "cuda"]) == 4
    assert "no NVIDIA driver found" in capsys.readouterr().err


def test_the_step_is_part_of_the_cpu_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ptxtrain.engine import bench

    monkeypatch.setattr(bench, "measure", lambda threads, progress: bench.CpuBench(threads=threads))
    settings = ("layers=1", "context=32", "vocab_size=256", "sequences=2", "micro_batch=1")
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert edge.main(["bench", "--cpu-device", "--threads", "1", "--step", "tiny", *overrides, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["threads"] == 1 and report["step"]["tokens"] == 64 and report["step"]["kernels"]
