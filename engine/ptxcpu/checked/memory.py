"""The allocation table: every range that a kernel may touch, with its exact extent and its shadow.

Shadow memory of a byte: one byte that says whether it was written, four of records of its word (16 bytes each), and 16 of
its own records, which take no space until threads touch a word in parts.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.errors import DeviceError
from ptxtrain.engine.ptxcpu.checked import state

Words = npt.NDArray[np.uint64]
REMEMBERED = 64  # freed allocations that a message can name


@dataclass(slots=True)
class Shadow:
    """What is known of each byte of a range."""

    init: npt.NDArray[np.uint8]
    writers: Words
    readers: Words
    byte_writers: Words
    byte_readers: Words

    @classmethod
    def of(cls, start: int, nbytes: int, written: bool) -> Shadow:
        """A new shadow of the bytes [start, start + nbytes)."""
        words = ((start + nbytes + 3) >> 2) - (start >> 2) + 1
        try:
            init = np.ones(nbytes + 1, np.uint8) if written else np.zeros(nbytes + 1, np.uint8)
            return cls(init, *(np.zeros(n, np.uint64) for n in (words, words, 4 * words, 4 * words)))
        except MemoryError as error:
            raise DeviceError(
                f"the host has no memory left for the shadow of {nbytes:,} bytes; checked runs need about six times the "
                "memory of others"
            ) from error

    def forget(self) -> None:
        """Drop who touched what; what was written stays."""
        for name in ("writers", "readers", "byte_writers", "byte_readers"):
            setattr(self, name, np.zeros(getattr(self, name).size, np.uint64))


@dataclass(slots=True)
class Region:
    """One allocation."""

    start: int
    nbytes: int
    name: str
    flags: int
    shadow: Shadow

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def row(self) -> tuple[int, ...]:
        """The `Entry`, its pointers biased."""
        first_word, first_byte = self.start >> 2, self.start & ~3
        s = self.shadow
        return (
            *(self.start, self.end, self.flags, s.init.ctypes.data - self.start),
            *(s.writers.ctypes.data - 8 * first_word, s.readers.ctypes.data - 8 * first_word),
            *(s.byte_writers.ctypes.data - 8 * first_byte, s.byte_readers.ctypes.data - 8 * first_byte),
        )


@dataclass
class Table:
    """The regions by address. Changes are taken over by `native`, which runs between launches.

    `remove` may be called by the garbage collector at any time, so it only puts the address down for later.
    """

    regions: dict[int, Region] = field(default_factory=dict)
    freed: list[tuple[int, int, str]] = field(default_factory=list)  # start, bytes, name; the newest last

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._gone: deque[int] = deque()
        self._starts: list[int] | None = None
        self._rows: Words | None = None

    def add(
        self, start: int, nbytes: int, name: str, *, written: bool, writable: bool = True, const: bool = False
    ) -> None:
        """Let kernels touch [start, start + nbytes)."""
        flags = (state.WRITABLE if writable else 0) | (state.IS_CONST if const else 0)
        region = Region(start, nbytes, name, flags, Shadow.of(start, nbytes, written))
        with self._lock:
            self._settle()
            self.regions[start] = region
            self._starts = self._rows = None

    def remove(self, start: int) -> None:
        """The memory at `start` is free again."""
        self._gone.append(start)

    def _settle(self) -> None:
        while self._gone:
            start = self._gone.popleft()
            region = self.regions.pop(start, None)
            if region is not None:
                self.freed = [*self.freed[1 - REMEMBERED :], (start, region.nbytes, region.name)]
                self._starts = self._rows = None

    def _sorted(self) -> list[int]:
        self._settle()
        if self._starts is None:
            self._starts = sorted(self.regions)
        return self._starts

    def native(self) -> Words:
        """The entries as native code reads them, [regions, 8]; they must live as long as a launch that reads them."""
        with self._lock:
            self._settle()
            if self._rows is None:
                regions = [self.regions[s] for s in self._sorted()]
                rows = [[value % (1 << 64) for value in r.row()] for r in regions if r.nbytes]
                self._rows = np.array(rows, np.uint64).reshape(-1, 8)
            return self._rows

    def find(self, address: int) -> Region | None:
        """The region that holds a byte."""
        with self._lock:
            starts = self._sorted()
            i = bisect.bisect_right(starts, address) - 1
            region = self.regions[starts[i]] if i >= 0 else None
            return region if region is not None and address < region.end else None

    def nearest(self, address: int) -> Region | None:
        """The region whose edge is nearest to a byte outside of all."""
        with self._lock:
            starts = self._sorted()
            i = bisect.bisect_right(starts, address)
            near = [self.regions[s] for s in starts[max(i - 1, 0) : i + 1]]
            return min(near, key=lambda r: min(abs(address - r.start), abs(address - r.end)), default=None)

    def mark_written(self, address: int, nbytes: int) -> None:
        """The host has written these bytes."""
        region = self.find(address)
        if region is not None:
            first = address - region.start
            region.shadow.init[first : first + nbytes] = state.WRITTEN

    def forget(self) -> None:
        """Drop who touched what, in every region."""
        with self._lock:
            self._settle()
            for region in self.regions.values():
                region.shadow.forget()
            self._starts = self._rows = None
