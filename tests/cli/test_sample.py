"""`sample` on the real kernels: texts by seed, several at once, stop strings, JSON, prompts from stdin, and what misuse says."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import Done, ptxtrain

TOKENS = 40  # more than the model's context of 16: texts overflow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, preset: Path, dataset: Path) -> tuple[Path, Done]:
    """A run of two steps, and what training it printed: weights that are almost random, so that every token is likely."""
    path = tmp_path_factory.mktemp("sample") / "run"
    done = ptxtrain("train", "--preset", preset, "--data", dataset, "--run", path, "--steps", 2)
    assert done.code == 0, done.err
    return path, done


@pytest.fixture(scope="module")
def run(trained: tuple[Path, Done]) -> Path:
    return trained[0]


def sample(run: Path, *argv: object) -> Done:
    return ptxtrain("sample", "--ckpt", run, *argv)


def texts(done: Done) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["samples"]
    return found


def test_the_prompt_the_text_and_nothing_else_is_on_stdout(run: Path) -> None:
    """stdout is the text alone; which step, the rule at an overflow (once) and the speed are on stderr."""
    done = sample(run, "--prompt", "def ", "--tokens", TOKENS, "--seed", 3)
    found = texts(sample(run, "--prompt", "def ", "--tokens", TOKENS, "--seed", 3, "--json"))[0]
    assert done.code == 0 and done.out == "def " + found["text"] + "\n"
    lines = done.err.splitlines()
    assert lines[0].startswith("step 2 of ") and lines[-1].startswith(f"{TOKENS} tokens, ")
    assert sum("going on from its last 8, here and later" in line for line in lines) == 1


def test_training_draws_the_text_that_sample_prints(trained: tuple[Path, Done]) -> None:
    """The sample at a run's end is that of its checkpoint: the same weights, seed and kernels."""
    run, done = trained
    text = sample(run, "--tokens", 4).out.rstrip("\n")
    assert f"sample:\n{text}" in done.out


def test_a_text_is_of_its_seed_and_number(run: Path) -> None:
    """Text n does not depend on how many are drawn, across batches of four; each is another, and another seed gives others."""
    argv = ("--prompt", "x", "--tokens", TOKENS, "--temperature", 1, "--top-k", 0, "--json")
    five = texts(sample(run, *argv, "--samples", 5))
    assert texts(sample(run, *argv, "--samples", 2)) == five[:2]
    assert texts(sample(run, *argv)) == five[:1]
    assert len({text["text"] for text in five}) == 5
    assert texts(sample(run, *argv, "--seed", 2)) != five[:1]
    plain = sample(run, *argv[:-1], "--samples", 2)
    expected = [f"--- sample {i} of 2\nx{five[i - 1]['text']}\n" for i in (1, 2)]
    assert plain.out == "".join(expected)


def test_a_stop_string_ends_the_text_before_it(run: Path) -> None:
    """A letter from the middle of the text: it and what follows are gone, and the report says why."""
    argv = ("--prompt", "x", "--tokens", TOKENS, "--json", "--temperature", 1)
    whole = texts(sample(run, *argv))[0]
    assert whole["ended"] == "length" and len(whole["tokens"]) == TOKENS
    stop = whole["text"][len(whole["text"]) // 2]
    cut = texts(sample(run, *argv, "--stop", "never in it", "--stop", stop))[0]
    assert cut["ended"] == "stop" and cut["text"] == whole["text"].partition(stop)[0]
    assert whole["tokens"][: len(cut["tokens"])] == cut["tokens"]


def test_the_report_has_what_was_asked(run: Path) -> None:
    """Step, prompt and settings beside the texts."""
    argv = ("--tokens", 3, "--min-p", 0.1, "--repetition-penalty", 1.2, "--top-p", 0.9, "--temperature", 0.7)
    report = json.loads(sample(run, *argv, "--json").out)
    assert report["step"] == 2 and report["prompt"] is None and report["tokens_per_second"] > 0
    assert report["sampling"] == {
        "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", ""], "the prompt is empty; leave --prompt out"),
        (["--prompt", "x " * 500], "and the model reads at most 16; leave out at least"),
        (["--temperature", -1], "temperature -1 is outside 0 to 100"),
        (["--temperature", "nan"], "temperature nan is outside"),
        (["--top-k", -1], "top-k -1 is negative"),
        (["--top-p", 0], "top-p 0 is outside"),
        (["--top-p", "nan"], "top-p nan is outside"),
        (["--min-p", 2], "min-p 2 is outside 0 to 1"),
        (["--repetition-penalty", 0], "repetition penalty 0 is outside"),
        (["--stop", ""], "an empty --stop"),
        (["--samples", 0], "--samples"),
        (["--tokens", 0], "--tokens"),
        (["--interactive", "--json"], "does not go with --json"),
        (["--interactive", "--samples", 2], "does not go with --samples"),
    ],
)
def test_misuse_is_one_line(run: Path, argv: list[object], message: str) -> None:
    """What, where, the limit; nothing on stdout before it."""
    done = sample(run, *argv)
    assert done.code == 1 and message in done.line and done.out == ""


def test_a_missing_checkpoint_is_one_line(run: Path, tmp_path: Path) -> None:
    """No such run, and a run without checkpoints."""
    assert "does not exist" in sample(tmp_path / "nowhere").line
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "ckpt")
    (tmp_path / "copy" / "ckpt").mkdir()
    assert "no checkpoint" in sample(tmp_path / "copy").line


def test_a_prompt_that_is_not_utf_8(run: Path) -> None:
    """Bytes of the command line that are no text become U+FFFD."""
    done = sample(run, "--prompt", "a\udcff", "--tokens", 1)
    assert done.code == 0 and done.out.startswith("a\ufffd")


def chat(run: Path, monkeypatch: pytest.MonkeyPatch, said: str, *argv: object) -> Done:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    return sample(run, "--interactive", "--tokens", 6, *argv)


def test_each_line_goes_on_with_the_text(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a line depends on the lines before it, empty lines are passed over, and the end of stdin ends it well."""
    one = chat(run, monkeypatch, "ab\n")
    two = chat(run, monkeypatch, "ab\n\n  \ncd\n")
    other = chat(run, monkeypatch, "xy\ncd\n")
    assert (one.code, two.code, other.code) == (0, 0, 0)
    assert two.out.startswith(one.out) and len(two.out) > len(one.out)
    assert other.out != two.out
    assert chat(run, monkeypatch, "").out == ""


def test_a_line_that_is_too_long_goes_on_from_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of a full context, for what is typed too."""
    done = chat(run, monkeypatch, "word " * 400 + "\nab\n", "--prompt", "to begin")
    assert done.code == 0 and done.out.count("\n") >= 2
    assert sum("going on from its last 8" in line for line in done.err.splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(run: Path) -> None:
    """On a terminal: an answer of a million tokens is broken off, the next one comes, and the end is no error."""
    ours, theirs = os.openpty()
    argv = [sys.executable, "-m", "ptxtrain.cli", "sample", "--ckpt", str(run), "--interactive", "--tokens", "1000000"]
    process = subprocess.Popen(
        [*argv, "--top-k", "0", "--temperature", "1"],
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    os.close(theirs)
    try:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(2):
            os.write(ours, b"ab\n")
            assert process.stdout.read(50)
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        while process.poll() is None:
            os.write(ours, b"\x04")  # Ctrl+D
            time.sleep(0.2)
            os.read(process.stdout.fileno(), 1 << 20)
        assert process.returncode == 0 and b"Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait(30)
        os.close(ours)
