"""A step on the device's queue: how far it is, how long it will take, and what it waited for the host."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from ptxtrain.engine.contracts import Result, StateCopy
from ptxtrain.engine.device.base import Event
from ptxtrain.engine.feeder import Batch


@dataclass(slots=True)
class Flight:
    """A step between its first micro-batch on the queue and its end."""

    number: int
    batch: Batch  # the device copies from it
    lr: float
    queued: float  # time.monotonic()
    free: Event  # where the device had nothing more to do than this step
    starts: list[Event] = field(default_factory=list)  # in front of each micro-batch
    ends: list[Event] = field(default_factory=list)  # and behind it
    done: int = 0  # micro-batches known to have finished
    update: Event | None = None  # in front of its update, once that is queued
    result: Result | None = None
    end: Event | None = None
    copy: StateCopy | None = None  # of the state behind it, where that is to be saved
    # The loader's places in front of the batch and behind it, taken now: once released, the batch is filled with another step's.
    before: Any = field(init=False)
    after: Any = field(init=False)

    def __post_init__(self) -> None:
        self.before, self.after = self.batch.before, self.batch.after

    def move(self) -> bool:
        """Take in which micro-batches have finished; whether there are new ones."""
        before = self.done
        while self.done < len(self.ends) and self.ends[self.done].done():
            self.done += 1
        return self.done != before

    def remaining(self, began: float, step_seconds: float | None) -> float:
        """Seconds until the step ends, by the steps before it, or by its own micro-batches where there were none.

        `began`: when the step before had ended, time.monotonic().
        """
        if self.done == len(self.ends):
            return 0.0
        elapsed = time.monotonic() - max(self.queued, began)
        if step_seconds is None:
            if not self.done:
                return math.inf
            step_seconds = elapsed / self.done * len(self.ends)
        return min(max(step_seconds - elapsed, 0.0), step_seconds)

    def device_wait(self) -> float:
        """Seconds that the device had nothing to do until the host queued the next part; the step has ended.

        By the device's own clock: from the end of each part to the start of the next.
        """
        assert self.update is not None
        parts = zip([self.free, *self.ends], [*self.starts, self.update], strict=True)
        return sum(max(start.since(end), 0.0) for end, start in parts)
