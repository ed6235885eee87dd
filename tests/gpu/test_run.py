"""The script for a GPU: its stages run on the fake CuPy, a stage that fails is told and the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run

BENCH = {
    "device": "Card",
    "rows": [
        {
            **{"group": "products", "case": "nn 4 x 4 x 4 -> f32", "ours": 300.0, "peer": 600.0, "peer_name": "cuBLAS"},
            **{"unit": "TFLOP/s", "ratio": 0.5},
        },
        {
            **{"group": "attention", "case": "forward", "ours": 5.0, "peer": None, "peer_name": "sdpa"},
            **{"unit": "TFLOP/s", "ratio": None},
        },
    ],
    "step": {"preset": "dev", "tokens_per_second": 400_000, "tflops": 55.6},
    "notes": ["PyTorch is not installed"],
}


def printing(text: str, code: int = 0) -> list[str]:
    return ["-c", f"import sys; print({text!r}); sys.exit({code})"]


def stage(name: str, text: str, code: int = 0, seconds: int = 20) -> run.Stage:
    read = run.tests_read if name == "tests" else json.loads
    return run.Stage(name, printing(text, code), seconds, read)


def test_a_failed_stage_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        stage("tests", "1 failed, 7 passed, 3 skipped in 2.1s", code=1),
        stage("gradcheck", "not json"),
        run.Stage("hangs", ["-c", "import time; time.sleep(60)"], 1, json.loads),
        stage("bench", json.dumps(BENCH)),
    ]
    monkeypatch.setattr(run, "stages", lambda fake: found)
    out = tmp_path / "report.json"
    assert run.main(["--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert {name: part["ok"] for name, part in report["stages"].items()} == {
        "tests": False,
        "gradcheck": False,
        "hangs": False,
        "bench": True,
    }
    text = capsys.readouterr().out
    assert "7 passed" in text and "1 failed" in text and "stopped after 1 s" in text
    for line in ("0.50x cuBLAS", "315,000     43.9", "381,000", "400,000     55.6", "note: PyTorch is not installed"):
        assert line in text, line


def test_a_run_in_which_every_test_was_skipped_fails() -> None:
    """A GPU that cannot be opened skips all tests; that must not read as a pass."""
    result = run.run_stage(stage("tests", "1200 skipped, 3000 deselected in 5.0s"))
    assert not result["ok"] and "no test has passed" in result["unread"]


@pytest.mark.parametrize("name", ["tests", "bench", "peer"])
def test_the_stages_run_on_the_fake(name: str, tmp_path: Path) -> None:
    """The processes that a GPU will run, over the fake; the two gradient checks are among the slow tests."""
    out = tmp_path / "report.json"
    code = run.main(["--fake", "--only", name, "--out", str(out)])
    part = json.loads(out.read_text())["stages"][name]
    assert code == 0 and part["ok"], part.get("errors")
    if name == "tests":
        assert part["result"]["passed"] > 10 and "failed" not in part["result"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradcheck", "gradcheck --fast"])
def test_the_gradient_checks_run_on_the_fake(name: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert run.main(["--fake", "--only", name, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["stages"][name]["result"]["passed"]
