"""The commands on a real terminal: a pseudo-terminal that is typed at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Done, ptxtrain

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on Windows")


def _on_terminal(argv: list[object], then: Callable[[str, int], None]) -> Done:
    """Run the command on a terminal of 100 columns; `then` sees all the text so far, and may write to the terminal."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "ptxtrain.cli", *map(str, argv)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "TERM": "xterm-256color"},
    ) as process:
        os.close(theirs)
        text, end = "", time.monotonic() + 120
        try:
            while time.monotonic() < end:
                text += os.read(ours, 65536).decode("utf-8", "replace")
                then(text, ours)
        except OSError:  # the other end is closed: the command has ended
            pass
        finally:
            os.close(ours)
            if time.monotonic() >= end:
                process.kill()
        try:
            code = process.wait(60)
        finally:
            process.kill()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")
    return Done(code, plain, text)


def test_the_live_panel_and_ctrl_c(preset: Path, dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    typed = []

    def interrupt(text: str, terminal: int) -> None:
        if re.search(r"step [1-9]\d* of 100000", text) and not typed:
            typed.append(os.write(terminal, b"\x03"))

    argv = ["train", "--preset", preset, "--data", dataset, "--run", run, "--steps", 100_000]
    done = _on_terminal(argv, interrupt)
    assert done.code == 2, done.out[-2000:]
    for part in (
        "tokens/s",
        "TFLOP/s",
        "grad norm",
        "left",
        "micro-batch",
        "SIGINT: stopping",
        "is saved. Go on with:",
    ):
        assert part in done.out, part
    assert done.err.rstrip().endswith(f"ptxtrain resume {run}")
    assert done.err.rindex("\x1b[?25h") > done.err.rindex("\x1b[?25l"), "the cursor is shown again"
    assert re.search(r"^digest [0-9a-f]{16}$", done.out, re.MULTILINE)


def test_a_terminal_that_is_closed_is_a_stop_that_saves(preset: Path, dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def close(text: str, terminal: int) -> None:
        if re.search(r"step [1-9]\d* of 100000", text):
            raise OSError

    argv = ["train", "--preset", preset, "--data", dataset, "--run", run, "--steps", 100_000, "--save-every", "100000"]
    assert _on_terminal(argv, close).code == 2
    assert len(list((run / "ckpt").iterdir())) == 1
    assert ptxtrain("resume", run, "--steps", 1).code == 1, "it stands past step 1"
