"""Stopping by request: SIGINT, SIGTERM and SIGHUP become a flag that the trainer looks at between launches.

The first signal asks for a stop that loses nothing. The second says what is being waited for. The third leaves at once with
exit code 3. While nothing needs saving (`raising`), the first one raises `StopRequested` instead, so that loading and
compiling end at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ptxtrain.engine.errors import StoppedUnsaved

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class StopRequested(BaseException):
    """Raised in `Stop.raising` only. Not an Exception, so that no handler of ordinary errors swallows it."""


class Stop:
    """A request to stop, and the signal handlers that make it.

    `describe` says what is going on ("step 12 is being saved") and `last_good` which state is safe; both are read inside a
    signal handler, so they must only read plain attributes. `announce` shows a line, and must take no lock.
    """

    def __init__(self) -> None:
        self.count = 0
        self.signal_name = ""
        self.describe: Callable[[], str] = lambda: "finishing"
        self.last_good: Callable[[], str] = lambda: "nothing has been saved yet"
        self.announce: Callable[[str], None] = lambda text: _write(f"\n{text}\n")
        self._raising = False

    @property
    def requested(self) -> bool:
        """Whether a stop has been asked for."""
        return self.count > 0

    def request(self, name: str = "SIGINT") -> None:
        """What a signal does; tests and other callers may use it too."""
        self.count += 1
        self.signal_name = name
        if self.count >= 3:
            self._leave()
        if self._raising:
            raise StopRequested
        if self.count == 1:
            text = f"{name}: stopping; {self.describe()} (three times: leave at once)"
        else:
            text = f"{name}: {self.describe()}; once more leaves at once, and then {self.last_good()}"
        # RuntimeError: the signal came in the middle of a write to the same stream.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self.announce(text)

    def _leave(self) -> None:
        # Nothing may be waited for here, no lock, no buffer: the process may be stuck in any of them.
        show_cursor = "\x1b[?25h" if _is_terminal() else ""
        _write(f"{show_cursor}\n{self.signal_name}, the third signal: left at once; {self.last_good()}\n")
        os._exit(StoppedUnsaved.exit_code)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within it a signal raises `StopRequested` at once; so does entering and leaving it once one has come."""
        if self.requested:
            raise StopRequested
        self._raising = True
        try:
            yield
        finally:
            self._raising = False
        if self.requested:  # the exception was raised where Python ignores exceptions (a finaliser, a C callback)
            raise StopRequested

    @contextlib.contextmanager
    def handlers(self) -> Iterator[Stop]:
        """Handle the signals within it. A hangup that is ignored at the start (`nohup`) stays ignored.

        SIGINT does not: shells start background jobs of scripts with it ignored, and whoever sends one there means it.
        """
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for name in _NAMES:
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number is None or (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                    continue
                before[number] = signal.signal(number, self._handle)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)


def _write(text: str) -> None:
    """To stderr past Python's buffers and locks; a terminal that has gone away is ignored."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode())


def _is_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return sys.stderr.isatty()
    return False
