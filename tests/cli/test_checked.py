"""`--checked` and `$PTXTRAIN_CHECKED` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ptxtrain.cli", *arguments], env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_cuda_cannot_be_checked() -> None:
    done = run("gradcheck", "--checked", "--device", "cuda")
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.strip().splitlines()) == 1
    assert "the checked mode runs on the CPU device alone: use --device cpu" in done.stderr


def test_info_names_the_mode() -> None:
    lines = json.loads(run("info", "--json", PTXTRAIN_CHECKED="reverse").stdout)
    assert "checked, reverse order" in json.dumps(lines)


@pytest.mark.parametrize("command", ["train", "gradcheck"])
def test_the_option_is_explained(command: str) -> None:
    text = " ".join(run(command, "--help").stdout.split())
    assert "--checked" in text and "$PTXTRAIN_CHECKED" in text and "exit code 1" in text


@pytest.mark.slow
def test_training_checked_ends_in_the_same_bits(tmp_path: Path) -> None:
    digests = []
    for name, extra in (("plain", ()), ("checked", ("--checked",))):
        done = run("train", "--preset", "tiny", "--steps", "1", "--run", str(tmp_path / name), "--set", "train.validate_every=0",
                   "--device", "cpu", *extra)  # fmt: skip
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.strip().splitlines()[-1])
    assert digests[0].startswith("digest ") and digests[0] == digests[1]
