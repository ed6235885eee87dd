"""`ptxtrain tokenize` as a user meets it: its two streams, its exit codes, and what it leaves when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ptxtrain.data.shards import Dataset

PTXTRAIN = [sys.executable, "-c", "import sys; from ptxtrain.cli.main import main; sys.exit(main())", "tokenize"]


def tokenize(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    """Run the command; its stdout and stderr."""
    done = subprocess.run([*PTXTRAIN, *map(str, arguments)], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def failure(*arguments: str | Path) -> str:
    """The one line of a command that fails, which has nothing on stdout."""
    out, err = tokenize(*arguments, code=1)
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(30):
        (folder / f"{index}.txt").write_text("".join(f"line {n * index} of file {index}\n" for n in range(50)))
    return folder


def test_makes_a_dataset_and_says_what_it_made(text: Path, tmp_path: Path) -> None:
    (text / "picture.png").write_bytes(b"\x89PNG\0\0")
    out, err = tokenize(text, "--out", tmp_path / "set", "--vocab-size", "300")
    dataset = Dataset(tmp_path / "set")
    dataset.verify()
    assert out.count("\n") == 1
    for part in (str(tmp_path / "set"), f"{dataset.train_tokens:,} training", f"{dataset.val_tokens:,} validation"):
        assert part in out
    assert "vocabulary 300" in out and "30 documents" in out
    assert err == f"note: {text}: 1 binary file skipped\n"  # no bar without a terminal


def test_json_and_every_option(text: Path, tmp_path: Path) -> None:
    tokenize(text, "--out", tmp_path / "first", "--vocab-size", "400")
    out, err = tokenize(
        text / "1.txt",
        text / "2.txt",
        *("--out", tmp_path / "set", "--tokenizer", tmp_path / "first" / "tokenizer.json"),
        *("--val-fraction", "0.3", "--shard-tokens", "1024", "--json"),
    )
    report = json.loads(out)
    dataset = Dataset(tmp_path / "set")
    assert err == ""
    assert report["vocab_size"] == 400 and report["out"] == str(tmp_path / "set")
    assert report["train_tokens"] == dataset.train_tokens and report["val_tokens"] == dataset.val_tokens
    assert report["train_shards"] == len(dataset.train)
    assert report["text_bytes"] == sum((text / f"{n}.txt").stat().st_size for n in (1, 2))
    assert dataset.tokenizer_digest == Dataset(tmp_path / "first").tokenizer_digest


def test_help_has_an_example() -> None:
    out, _ = tokenize("--help")
    assert "  ptxtrain tokenize" in out and "@stdlib" in out


def test_mistakes_are_one_line_and_exit_1(text: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "--out" in failure(text)
    assert "SOURCE" in failure("--out", tmp_path / "o")
    assert "absent" in failure(tmp_path / "absent", "--out", tmp_path / "o")
    assert "not empty" in failure(text, "--out", tmp_path / "full")
    assert "vocabulary of only" in failure(text, "--out", tmp_path / "o", "--vocab-size", "90000")
    assert "257" in failure(text, "--out", tmp_path / "o", "--vocab-size", "-3")
    assert "many" in failure(text, "--out", tmp_path / "o", "--vocab-size", "many")
    assert "no-such-option" in failure(text, "--out", tmp_path / "o", "--no-such-option")
    assert "fraction 2 " in failure(text, "--out", tmp_path / "o", "--val-fraction", "2")
    assert "tokenizer.json" in failure(text, "--out", tmp_path / "o", "--tokenizer", text / "1.txt")
    assert "cannot" in failure(text, "--out", "/proc/nowhere/o")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["full", "text"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("phase", ["reading", "encoding"])
def test_a_signal_leaves_nothing(tmp_path: Path, phase: str, number: int) -> None:
    """The child crawls from the middle of a phase on, and says so; a signal must end it long before it is through."""
    source = tmp_path / "text"
    source.mkdir()
    for index in range(200):
        (source / f"{index}.txt").write_text("".join(f"{n * index} of file {index}\n" for n in range(200)))
    program = (
        "import sys, time\n"
        "from ptxtrain.data import build\n"
        "real = build.build_dataset\n"
        "def stopping(*arguments, progress, **named):\n"
        "    def stop(what, done, total):\n"
        f"        if what == {phase!r} and done > total // 2:\n"
        "            sys.stdout.write('here\\n')\n"
        "            sys.stdout.flush()\n"
        "            time.sleep(0.5)\n"
        "    return real(*arguments, progress=stop, **named)\n"
        "build.build_dataset = stopping\n"
        "from ptxtrain.cli.main import main\n"
        "sys.exit(main())\n"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "tokenize",
        source,
        "--out",
        tmp_path / "deep" / "out",
        "--vocab-size",
        "300",
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    guard = threading.Timer(100, child.kill)
    guard.start()
    assert child.stdout is not None and child.stdout.readline() == "here\n"
    assert [name for name in os.listdir(tmp_path / "deep") if name.startswith(".out.tmp-")]
    begin = time.monotonic()
    child.send_signal(number)
    out, err = child.communicate()
    guard.cancel()
    assert child.returncode == 1 and set(out) <= set("here\n")
    assert time.monotonic() - begin < 20  # of the 50 that the phase still takes
    assert err == f"error: stopped by request; nothing of {tmp_path}/deep/out was left behind\n"
    assert os.listdir(tmp_path) == ["text"]


def test_a_killed_run_is_cleared_away_by_the_next(text: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from ptxtrain.data import build\n"
        "build.manifest_bytes = lambda manifest: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from ptxtrain.cli.main import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", program, "tokenize", text, "--out", tmp_path / "out", "--vocab-size", "300"]
    assert subprocess.run(command, timeout=100).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".out.tmp-")]
    tokenize(text, "--out", tmp_path / "out", "--vocab-size", "300")
    assert sorted(os.listdir(tmp_path)) == ["out", "text"]
