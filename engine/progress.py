"""What the trainer tells whoever watches: the events, and the rates and the curve made of them.

A `View` draws; the one here draws nothing. Nothing a view does may end a run: the trainer's views swallow a terminal that
has gone away.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

FLOPS_FORMULA = "6 x parameters + 6·L·H·C·T per token"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step. Rates are over the last few steps, times in seconds."""

    step: int
    steps: int
    loss: float  # mean over the step's targets, nats
    grad_norm: float  # before clipping
    lr: float
    tokens_per_second: float
    flops_per_second: float
    seconds: float  # this step
    device_wait: float  # of which the device had nothing to do until the host queued more
    eta: float  # until the last step


class View:
    """Shows a run. Every method may be left as it is."""

    def note(self, text: str) -> None:
        """One line that stays: a choice with its reason, a save, a warning."""

    def phase(self, text: str) -> None:
        """What goes on from here: "compiling kernels", "validating"; empty when steps run again."""

    def micro_batch(self, step: int, done: int, total: int) -> None:
        """`done` of the `total` micro-batches of `step` have finished."""

    def step(self, report: StepReport) -> None:
        """A step has finished."""

    def validated(self, step: int, loss: float, tokens: int) -> None:
        """The validation loss after `step`, in nats, over `tokens` targets."""

    def sample(self, step: int, text: str) -> None:
        """Text generated after `step`."""

    def history(self, losses: Sequence[float]) -> None:
        """Losses of the steps before a resumed one, for the curve."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Meter:
    """Rates over the last `window` steps; time that is not steps (validating, saving) is left out by the caller."""

    def __init__(self, tokens: int, flops_token: int, steps: int, window: int = 20) -> None:
        self._tokens = tokens  # in a step
        self._flops_token = flops_token
        self._steps = steps
        self._window = window
        self._seconds: list[float] = []

    @property
    def step_seconds(self) -> float | None:
        """The mean length of the last few steps; None before the first has finished."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None

    @property
    def median(self) -> float | None:
        """The median of the same, which one slow step does not move."""
        return statistics.median(self._seconds) if self._seconds else None

    def report(
        self, step: int, loss: float, grad_norm: float, lr: float, seconds: float, device_wait: float
    ) -> StepReport:
        """Take a finished step in."""
        if len(self._seconds) == 1 and self._seconds[0] > 2 * seconds:
            self._seconds.clear()  # the first step also warms caches up; it would spoil the estimate for long
        self._seconds.append(max(seconds, 1e-9))
        del self._seconds[: -self._window]
        mean = sum(self._seconds) / len(self._seconds)
        rate = self._tokens / mean
        return StepReport(
            step=step,
            steps=self._steps,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_second=rate,
            flops_per_second=rate * self._flops_token,
            seconds=seconds,
            device_wait=device_wait,
            eta=(self._steps - step) * mean,
        )


class Curve:
    """A bounded history of losses: past `limit` points, neighbours are merged into their mean and each point spans more."""

    def __init__(self, limit: int = 256) -> None:
        assert limit >= 2 and limit % 2 == 0
        self._limit = limit
        self._span = 1
        self._points: list[float] = []
        self._open: list[float] = []

    def add(self, loss: float) -> None:
        """One more loss."""
        self._open.append(loss)
        if len(self._open) < self._span:
            return
        self._points.append(sum(self._open) / len(self._open))
        self._open.clear()
        if len(self._points) == self._limit:
            self._points = [(a + b) / 2 for a, b in zip(self._points[::2], self._points[1::2], strict=True)]
            self._span *= 2

    def points(self, count: int) -> list[float]:
        """At most `count` points, oldest first, each the mean of an equal share of the history."""
        still_open = list(self._open)  # a display's thread reads while the trainer's adds
        points = self._points + ([sum(still_open) / len(still_open)] if still_open else [])
        if len(points) <= count:
            return points
        edges = [i * len(points) // count for i in range(count + 1)]
        return [sum(points[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


_BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_curve(points: Sequence[float], rows: int) -> list[str]:
    """The points as `rows` lines of block characters, one column a point, scaled between their least and greatest."""
    if not points:
        return [""] * rows
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    levels = [1 + round((value - low) / span * (8 * rows - 1)) for value in points]
    return ["".join(_BLOCKS[min(max(level - 8 * row, 0), 8)] for level in levels) for row in reversed(range(rows))]


class Cadence:
    """When to save: every so many steps, or every so many seconds, or never but at the end."""

    def __init__(self, steps: int = 0, seconds: float = 0.0) -> None:
        self.steps = steps
        self.seconds = seconds
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether to save after `step`."""
        if self.steps and step % self.steps == 0:
            return True
        return bool(self.seconds) and time.monotonic() - self._last >= self.seconds

    def saved(self) -> None:
        """Count the time from here."""
        self._last = time.monotonic()
