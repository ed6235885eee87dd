"""Compiles large kernels in several processes at once, into the cache that they all share.

LLVM's Python binding holds one lock for a whole process, so threads would take turns. This module run as a program is a helper:
it reads a kernel a line, compiles it, and answers with a line. What a helper does not do, for whatever reason, is compiled where
it is needed, as if there had been none.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptxtrain.engine.device.base import Dim3, Launch
from ptxtrain.engine.ptxcpu.module import LoadedModule, load

LARGE = 40_000  # characters of PTX; such kernels take seconds, and a helper takes half of one to start
MOST = 4  # processes


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel for blocks of one shape."""

    module: LoadedModule
    entry: str
    block: Dim3

    @property
    def size(self) -> int:
        return len(self.module.tree.text)

    def line(self) -> str:
        """What a helper reads."""
        return json.dumps({"path": str(self.module.tree.path), "entry": self.entry, "block": self.block}) + "\n"


def large_jobs(launches: Sequence[Launch]) -> list[Job]:
    """What these launches need compiled and is worth a helper's while, largest first."""
    found: dict[tuple[int, str, Dim3], Job] = {}
    for launch in launches:
        job = Job(launch.kernel.handle, launch.kernel.name, launch.block)
        if job.size >= LARGE and not job.module.is_cached(job.entry, job.block):
            found.setdefault((id(job.module), job.entry, job.block), job)
    return sorted(found.values(), key=lambda job: -job.size)


def build(jobs: Sequence[Job], processes: int, progress: Callable[[int, int], None] | None = None) -> int:
    """Compile all of them in so many processes, this one among them; how many the helpers did.

    `progress` is told how many of how many are done. Raises what compiling raises; helpers end with this call, however it ends.
    """
    work, done, by_helpers = deque(jobs), 0, 0
    guard = threading.Lock()

    def report() -> None:
        nonlocal done
        with guard:
            done += 1
            if progress is not None:
                progress(done, len(jobs))

    def feed(helper: subprocess.Popen[str]) -> None:
        nonlocal by_helpers
        assert helper.stdin is not None and helper.stdout is not None
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has gone, or there is no work left
            while True:
                job = work.popleft()
                try:
                    helper.stdin.write(job.line())
                    helper.stdin.flush()
                    answer = helper.stdout.readline()
                except (OSError, ValueError):
                    answer = ""
                if answer != "done\n":
                    work.append(job)
                    return
                with guard:
                    by_helpers += 1
                report()

    helpers = _start(min(processes, MOST, len(jobs)) - 1)
    threads = [threading.Thread(target=feed, args=(helper,), daemon=True) for helper in helpers]
    try:
        for thread in threads:
            thread.start()
        _work_off(work, report)
        for thread in threads:
            thread.join()
        _work_off(work, report)  # what a helper gave back
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()
            for stream in (helper.stdin, helper.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
    return by_helpers


def _work_off(work: deque[Job], report: Callable[[], None]) -> None:
    while True:
        try:
            job = work.popleft()
        except IndexError:
            return
        job.module.ready(job.entry, job.block)
        report()


def _start(count: int) -> list[subprocess.Popen[str]]:
    """Helpers in a session of their own, so that Ctrl+C is this process's to handle; as many as can be had."""
    helpers: list[subprocess.Popen[str]] = []
    with contextlib.suppress(OSError):
        for _ in range(count):
            helpers.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=os.name == "posix",
                )
            )
    return helpers


def main() -> None:
    """A helper, until nobody has work for it any more."""
    for line in sys.stdin:
        job = json.loads(line)
        try:
            load(Path(job["path"]), checked=False).ready(job["entry"], tuple(job["block"]))
            answer = "done"
        except Exception:  # whoever gave the job makes the same mistake, and says so
            answer = "failed"
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
