"""`metrics.jsonl`: one JSON object a line, appended while training, never a reason to stop it.

Lines carry the `attempt` that wrote them (1 for the first process of a run, 2 after its first resume, …), so that steps
repeated after a crash stay side by side. An attempt's first line says after which step it began, with that state's digest and
what its bits depend on. A line is appended by one write and is whole or absent: what a full disk let through of it is cut off
again. Nothing here is fsynced.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ptxtrain.engine.durable import DISK, Durable, read_regular


class Metrics:
    """The run's metrics file, open for appending. `warn` gets one line when a line is lost for the first time."""

    def __init__(self, path: Path, warn: Callable[[str], None], io: Durable = DISK) -> None:
        """Opens or makes the file and cuts a torn last line off. A file that cannot be used warns and takes no lines."""
        self.path, self.attempt = path, 1
        self._warn, self._io, self._fd = warn, io, -1
        self._warned = False
        try:
            self.attempt = 1 + max((_attempt(line) for line in read_metrics(path)), default=0)
            self._fd = io.append(path)
            self._repair()
        except OSError as error:
            self._lost(error)

    def log(self, **values: Any) -> None:
        """Appends one line `{"attempt": …, **values}`; a number that is not finite becomes null. Never raises OSError."""
        if self._fd < 0:
            return
        line = json.dumps({"attempt": self.attempt, **{key: _finite(value) for key, value in values.items()}})
        start = -1
        try:
            start = os.fstat(self._fd).st_size
            self._io.write(self._fd, (line + "\n").encode())
        except OSError as error:
            self._lost(error)
            with contextlib.suppress(OSError):
                if start >= 0 and os.fstat(self._fd).st_size > start:
                    self._io.truncate(self._fd, start)

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._io.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _repair(self) -> None:
        size = end = os.fstat(self._fd).st_size
        while end > 0:
            start = max(0, end - 4096)
            os.lseek(self._fd, start, os.SEEK_SET)
            newline = os.read(self._fd, end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            self._io.truncate(self._fd, end)

    def _lost(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"cannot write {self.path}: {error.strerror}. Training goes on; metrics lines may be missing.")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line, in the order written; lines that are no JSON object are left out. No file: no lines."""
    try:
        text = read_regular(path, 1 << 40)
    except FileNotFoundError:
        return []
    lines = []
    for raw in text.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(raw)
            if isinstance(line, dict):
                lines.append(line)
    return lines


def _attempt(line: dict[str, Any]) -> int:
    attempt = line.get("attempt", 0)
    return attempt if isinstance(attempt, int) else 0


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
