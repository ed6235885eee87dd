"""Reads ahead: while step k runs, a host thread reads and sorts step k + 1 into the other of two batches.

The device copies straight from a batch, so that it is filled again only once `release` says that its step has ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

I32: TypeAlias = npt.NDArray[np.int32]

_PATIENCE = 5.0  # seconds that a read may take to end
_LOOK = 0.1  # seconds between two looks at whether to stop, while a read takes long


class SequenceReader(Protocol):
    """What the feeder asks of the data loader."""

    @property
    def position(self) -> Any:
        """Where the next sequence starts."""

    def read(self, sequences: int, tokens: I32, targets: I32) -> None:
        """Fill tokens and targets [sequences, T] and move on."""


# (tokens [N], V, order [N] out, starts [V + 1] out)
Sort: TypeAlias = Callable[[I32, int, I32, I32], None]


@dataclass(slots=True)
class Batch:
    """A step's input: S sequences of T tokens in M micro-batches of B."""

    tokens: I32  # [S, T]
    targets: I32  # [S, T]
    order: I32  # [M, B * T] rows of each micro-batch sorted by token
    starts: I32  # [M, V + 1] where each token's rows start in `order`
    count: int = 0  # targets that are not ignored
    before: Any = None  # the loader's position in front of it
    after: Any = None  # and behind it

    def micro_batch(self, index: int) -> tuple[I32, I32, I32, I32]:
        """tokens [B, T], targets [B, T], order [B * T], starts [V + 1] of micro-batch `index`."""
        size = len(self.tokens) // len(self.order)
        rows = slice(index * size, (index + 1) * size)
        return self.tokens[rows], self.targets[rows], self.order[index], self.starts[index]


class Feeder:
    """Batches in turn, filled by a thread of its own. `take` and `release` are called by one other thread.

    Args:
        reader: where the sequences come from.
        sort: the counting sort of a micro-batch's rows.
        buffers: the host memory of each batch, as in `Batch`: two, so that one is filled while the device works on the other.
        steps: how many batches will be taken at most; nothing is read past them.
    """

    def __init__(
        self,
        reader: SequenceReader,
        sort: Sort,
        *,
        buffers: Sequence[tuple[I32, I32, I32, I32]],
        steps: int,
    ) -> None:
        assert len(buffers) > 1, "the next batch is taken before this one is released"
        self._reader = reader
        self._sort = sort
        self._steps = steps
        self._free: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        for arrays in buffers:
            self._free.put(Batch(*arrays))
        self._thread = threading.Thread(target=self._work, name="feeder", daemon=True)
        self._thread.start()

    def take(self, stopping: Callable[[], bool] = lambda: False) -> Batch | None:
        """The next step's batch, waiting for it if need be; None once `stopping` says so. Raises what the reader raised."""
        while True:
            try:
                batch = self._full.get(timeout=_LOOK)
            except queue.Empty:
                if stopping():
                    return None
                continue
            if isinstance(batch, BaseException):
                raise batch
            return batch

    def release(self, batch: Batch) -> None:
        """The contents of `batch` are needed no more: it may be filled again."""
        self._free.put(batch)

    def close(self) -> None:
        """End the thread; batches that were read and not taken are dropped. A read that hangs is left to itself."""
        self._steps = 0
        self._free.put(None)
        self._thread.join(_PATIENCE)

    def _work(self) -> None:
        try:
            for _ in range(self._steps):
                batch = self._free.get()
                if batch is None or not self._steps:
                    return
                self._fill(batch)
                self._full.put(batch)
        except BaseException as error:  # handed to the thread that takes, which raises it
            self._full.put(error)

    def _fill(self, batch: Batch) -> None:
        batch.before = self._reader.position
        self._reader.read(len(batch.tokens), batch.tokens, batch.targets)
        batch.after = self._reader.position
        batch.count = int(np.count_nonzero(batch.targets >= 0))
        for index in range(len(batch.order)):
            tokens, _, order, starts = batch.micro_batch(index)
            self._sort(tokens.reshape(-1), len(starts) - 1, order, starts)
