"""What the training loop asks of those it works with: a step and its results, a saver; and how it says that a run ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxtrain.data.errors import DataError
from ptxtrain.engine.checkpoint import Snapshot
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.feeder import I32

F32: TypeAlias = npt.NDArray[np.float32]


class Result(Protocol):
    """Step k's numbers on their way back."""

    def wait(self) -> tuple[float, float]:
        """(mean loss in nats, gradient norm before clipping)."""

    @property
    def state_sum(self) -> int:
        """Of weights, m and v behind the step, as the device has them."""


class StateCopy(Protocol):
    """A copy of the state on its way to the host."""

    def wait(self) -> tuple[F32, F32, F32]:
        """params, m, v, flat; nobody changes them any more."""


class Step(Protocol):
    """What the loop asks of `engine.step.TrainStep`."""

    def buffers(self) -> list[tuple[I32, I32, I32, I32]]:
        """Two sets of host arrays that copy to the device without staging: tokens and targets [S, T], order [M, N],
        starts [M, V + 1]. What `micro_batch` is given of them must stay as it is until the step has ended."""

    def begin(self, targets: int) -> None:
        """Start a step of so many targets."""

    def micro_batch(self, index: int, tokens: I32, targets: I32, order: I32, starts: I32) -> None:
        """Queue forward and backward of the next micro-batch."""

    def finish(self, step: int, lr: float) -> Result:
        """Queue the update and the copies back. A loss or norm that is not finite leaves params, m and v alone."""

    def row_losses(self, tokens: I32, targets: I32, stopping: Callable[[], bool]) -> F32:
        """The loss of each row of at most B sequences, f32 [b, T]; waits, unless `stopping` says so: then it may be [0, T]."""

    def prepare_snapshot(self) -> None:
        """Take the memory for the next copy of the state, while the device has other things to do."""

    def begin_snapshot(self) -> StateCopy:
        """Queue copies of params, m and v as they are behind everything queued so far."""


class Saves(Protocol):
    """Where snapshots go."""

    def submit(self, snapshot: Snapshot) -> None:
        """Hand a snapshot to the writer."""

    def validated(self, step: int, loss: float) -> None:
        """Take note of a validation loss."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a run stands when its loop has ended."""

    snapshot: Snapshot  # the newest state, handed to the writer
    finished: bool  # the last step asked for was reached
    loss: float | None  # of the last step that this process finished
    validation: float | None  # of the last validation by this process
    sample: str | None  # of a finished run
    failure: PtxtrainError | DataError | None = None  # what ended the run; the state is that of the last finished step
