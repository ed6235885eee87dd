"""A model, a dataset and a command line small enough that whole runs take seconds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ptxtrain.cli.main import main

VOCAB = 300
PRESET = f"""
[model]
vocab_size = {VOCAB}
context = 16
layers = 1
width = 32
heads = 2
kv_heads = 1
head_dim = 16
mlp_width = 32

[batch]
sequences = 8
micro_batch = 2
leaves = 2

[optimizer]
lr = 3e-3
warmup_steps = 5

[train]
steps = 12
validate_every = 6
validate_sequences = 4
sample_every = 6
sample_tokens = 4
save_every = 5
"""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def digest(self) -> str:
        """The last line of stdout."""
        name, _, digest = self.out.rstrip().rpartition("\n")[2].partition(" ")
        assert name == "digest" and len(digest) == 16 and int(digest, 16) >= 0, self.err
        return digest

    @property
    def line(self) -> str:
        """The error's one line: nothing else is on stderr but what stands before it."""
        lines = self.err.splitlines()
        assert sum(line.startswith("error:") for line in lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[-1]


def ptxtrain(*argv: object) -> Done:
    """The command in this process, with stdout and stderr caught."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in argv])
    return Done(code, out.getvalue(), err.getvalue())


def make_dataset(folder: Path, vocab: int = VOCAB) -> Path:
    """A dataset of two standard library modules."""
    text, out = folder / "text", folder / f"data-{vocab}"
    text.mkdir(exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("this.py", "bisect.py", "heapq.py", "textwrap.py"):
        shutil.copy(library / name, text / name)
    done = ptxtrain("tokenize", text, "--out", out, "--vocab-size", vocab)
    assert done.code == 0, done.err
    return out


class Process:
    """The command in a process of its own, to be signalled."""

    def __init__(self, *argv: object, launcher: tuple[str, ...] = ("-m", "ptxtrain.cli"), **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *launcher, *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._err: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._err.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def until(self, text: str, seconds: float = 120) -> str:
        """Wait for a line on stderr with `text` in it."""
        end = time.monotonic() + seconds
        while True:
            line = self._lines.get(timeout=max(end - time.monotonic(), 0.01))
            assert line is not None, f"it ended without {text!r}: {''.join(self._err)}"
            if text in line:
                return line

    def send(self, number: int = signal.SIGINT) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 120) -> Done:
        assert self._process.stdout is not None
        out = self._process.stdout.read()
        code = self._process.wait(seconds)
        return Done(code, out, "".join(self._err))


@contextlib.contextmanager
def process(*argv: object, launcher: tuple[str, ...] = ("-m", "ptxtrain.cli"), **environment: str) -> Iterator[Process]:
    """A `Process` that does not outlive the block."""
    running = Process(*argv, launcher=launcher, **environment)
    try:
        yield running
    finally:
        running._process.kill()
        running._process.wait(30)


def metrics(run: Path) -> list[dict[str, float]]:
    """The run's metrics lines."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
