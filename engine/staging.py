"""What goes between host and device around a step: pinned memory for its input, and its numbers and copies on their way back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.device.base import Array, Device, Event
from ptxtrain.engine.init import F32
from ptxtrain.engine.model import I32
from ptxtrain.engine.ops import scalars


class StepResult:
    """A step's loss, gradient norm and the sum of the state behind it, on their way back from the device."""

    def __init__(self, event: Event, host: F32, halves: Array, targets: int) -> None:
        self._event, self._host, self._halves, self._targets = event, host, halves, targets
        self._values: tuple[float, float] | None = None
        self._sum = 0

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._values is not None or self._event.done()

    def wait(self) -> tuple[float, float]:
        """The mean loss in nats per target and the global gradient norm before clipping.

        Raises:
            DeviceError: something that was queued failed.
        """
        if self._values is None:
            self._event.wait()
            total, norm = float(self._host[scalars.COUNT]), float(self._host[scalars.GRAD_NORM])
            self._values = (total / self._targets, norm)
            self._sum = joined(self._halves)
        return self._values

    @property
    def state_sum(self) -> int:
        """`engine.digest.state_sum` of weights, m and v behind the step. Waits."""
        self.wait()
        return self._sum


def joined(halves: Array) -> int:
    """The 64 bits of [2] u32, the lower half first."""
    return int(halves[1]) << 32 | int(halves[0])


class StateCopy:
    """Copies of params, m and v, each f32 [parameters], on their way to the host."""

    def __init__(self, event: Event, arrays: tuple[F32, F32, F32]) -> None:
        self._event, self._arrays = event, arrays

    def wait(self) -> tuple[F32, F32, F32]:
        """The arrays, which belong to the caller from here. Raises DeviceError as `StepResult.wait`."""
        self._event.wait()
        return self._arrays


class Staging:
    """Pinned host memory for one step: what goes up and what comes back."""

    def __init__(self, device: Device, micro_batches: int, rows: int, vocab: int) -> None:
        def pinned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
            return device.pinned(4 * int(np.prod(shape))).view(dtype).reshape(shape)

        self.tokens: I32 = pinned((micro_batches, rows), np.int32)
        self.targets: I32 = pinned((micro_batches, rows), np.int32)
        self.order: I32 = pinned((micro_batches, rows), np.int32)
        self.starts: I32 = pinned((micro_batches, vocab + 1), np.int32)
        self.scalars: F32 = pinned((scalars.COUNT,), np.float32)
        self.back: F32 = pinned((scalars.COUNT + 1,), np.float32)  # the scalars, then the sum of the losses
        self.state_sum: Array = pinned((2,), np.uint32)
        self.result: StepResult | None = None

    def rows(self) -> list[int]:
        """The address of each micro-batch's part of each input."""
        return [row.ctypes.data for array in (self.tokens, self.targets, self.order, self.starts) for row in array]
