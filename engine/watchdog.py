"""Says so when nothing moves: a thread that knows what the trainer is doing and how long that usually takes.

It only speaks. A hung read, a device that never ends and a disk that never answers cannot be told from slow ones, so that the run
is left to whoever reads the line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

FACTOR = 10.0  # times the median step


class Watchdog:
    """`moved` is called whenever something has got on; what takes too long until the next call is told to `warn`.

    Too long is `seconds`, and ten times the median of the steps so far; before there is one, ten times `seconds`. It is told
    once, and again each time the wait has doubled. With `seconds` 0 nothing is watched.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: float | None = None,  # between two looks; an eighth of `seconds` if None, five at most
    ) -> None:
        self._warn, self._seconds, self._clock = warn, seconds, clock
        self._pause = min(seconds / 8, 5.0) if pause is None else pause
        self._what, self._usual = "the run", None  # type: tuple[str, float | None]
        self._since = clock()
        self._told = 0.0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def moved(self, what: str, usual: float | None = None) -> None:
        """From here `what` is going on ("step 12 is on the device"); steps usually take `usual` seconds."""
        self._what, self._usual, self._since, self._told = what, usual, self._clock(), 0.0

    def at(self, what: str) -> None:
        """The same wait is now for `what`."""
        self._what = what

    def look(self) -> str | None:
        """The line to say now, if any."""
        waited = self._clock() - self._since
        usual = self._usual
        limit = max(self._seconds, FACTOR * (self._seconds if usual is None else usual))
        if waited < max(limit, 2 * self._told):
            return None
        self._told = waited
        median = "" if usual is None else f", and a step usually takes {usual:.3g} s"
        return f"{self._what}: nothing has moved for {waited:.0f} s{median} (Ctrl+C stops; three times: leaves at once)"

    def _work(self) -> None:
        while not self._end.wait(self._pause):
            line = self.look()
            if line is not None:
                self._warn(line)

    def __enter__(self) -> Watchdog:
        if self._seconds > 0:
            self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
