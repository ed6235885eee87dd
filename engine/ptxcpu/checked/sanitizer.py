"""The checked mode as the device and the modules use it: a table of memory, launches to watch, findings to raise."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.ptxcpu import traps
from ptxtrain.engine.ptxcpu.checked import native, state
from ptxtrain.engine.ptxcpu.checked.memory import Table
from ptxtrain.engine.ptxcpu.checked.report import CheckError, Scene, deadlock, describe
from ptxtrain.engine.ptxcpu.checked.schedule import Schedule
from ptxtrain.engine.ptxcpu.lower.checks import Checked

ROUNDS = (
    1 << 26
)  # of one warp's loops between two starts of a block: no kernel of ours comes near, a hung one gets there

_NAMES = ("init", "writers", "readers", "byte_writers", "byte_readers")


@dataclass(slots=True)
class Launched:
    """A launch that is watched. `keep` holds what the `Watch` points to."""

    kernel: str
    path: Path
    checked: Checked
    grid: tuple[int, int, int]
    dynamic: int
    arguments: list[tuple[int, str]]  # pointers and the names of their parameters
    watch: state.Watch
    keep: list[object] = field(default_factory=list)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.watch)


class Sanitizer:
    """Checks the launches of one worker thread; see the package's text.

    Args:
        schedule: the order of blocks and warps.
        rounds: loop rounds of a warp in one block after which a kernel counts as hung.
    """

    def __init__(self, schedule: Schedule | None = None, *, rounds: int = ROUNDS) -> None:
        self.schedule = schedule or Schedule()
        self.table = Table()
        self._native, addresses = native.functions()
        self._checker = state.Checker()
        self._checker.functions[:] = list(addresses)
        self._checker.limit = rounds
        self._checker.clock = 1
        self._queue = np.zeros(state.QUEUE * ctypes.sizeof(state.Copy), np.uint8)  # takes memory as it is used
        self._checker.queue = self._queue.ctypes.data
        for name, flag in (("shared", state.IS_SHARED), ("local", state.IS_LOCAL)):
            getattr(self._checker, name).flags = flag | state.WRITABLE
        self._shadow: list[npt.NDArray[np.generic]] = []
        self._shadow_bytes = 0
        self._rows: npt.NDArray[np.uint64] | None = None

    def watch(
        self,
        kernel: str,
        path: Path,
        checked: Checked,
        grid: tuple[int, int, int],
        dynamic: int,
        arguments: Sequence[tuple[int, str]],
    ) -> Launched:
        """Make a launch ready to be watched; `dynamic` is its dynamic shared memory in bytes."""
        blocks = grid[0] * grid[1] * grid[2]
        shared = [(start, end) for start, end, _ in checked.shared]
        if dynamic:
            shared.append((checked.shared_bytes, checked.shared_bytes + dynamic))
        shared_at = np.array(shared, np.uint64).reshape(-1, 2)
        local_at = np.array([(start, end) for start, end, _ in checked.local], np.uint64).reshape(-1, 2)
        salt = sum(kernel.encode())
        block_order, warp_order = self.schedule.order(blocks, salt), self.schedule.order(checked.warps, salt + 1)
        watch = state.Watch(
            checker=ctypes.addressof(self._checker),
            blocks=blocks,
            block_factor=block_order[0],
            block_offset=block_order[1],
            warp_factor=warp_order[0],
            warp_offset=warp_order[1],
            warp_stir=1 if self.schedule.kind == "random" else 0,
            warps=checked.warps,
            threads=checked.threads,
            local_bytes=checked.local_bytes,
            shared_ranges=len(shared_at),
            local_ranges=len(local_at),
            shared_at=shared_at.ctypes.data,
            local_at=local_at.ctypes.data,
        )
        return Launched(kernel, path, checked, grid, dynamic, list(arguments), watch, [shared_at, local_at, self])

    def prepare(self, launches: Sequence[Launched]) -> None:
        """Before native code runs: the table as it is now, shadow for the shared memory that is needed."""
        checker = self._checker
        checker.finding.kind = 0
        if checker.epoch + len(launches) > state.LAST_EPOCH:
            self.table.forget()
            checker.epoch = 0
        self._rows = self.table.native()
        checker.table, checker.entries = self._rows.ctypes.data, len(self._rows)
        need = max((x.checked.shared_bytes + x.dynamic for x in launches), default=0)
        if need > self._shadow_bytes or not self._shadow:
            self._shadow_bytes = need = (need + 4095) // 4096 * 4096
            words = need // 4 + 2
            self._shadow = [np.zeros(need + 8, np.uint8)]
            self._shadow += [np.zeros(n, np.uint64) for n in (words, words, 4 * words, 4 * words)]
            checker.shadow[:] = [a.ctypes.data for a in self._shadow]

    def error(self, launch: Launched, status: int) -> CheckError | None:
        """What a launch that ended with this status raises; None: nothing that the checks know of."""
        if status & 15 == traps.FOUND:
            return describe(self._checker.finding, self._scene(launch))
        if status & 15 == traps.DEADLOCK:
            return deadlock(list(self._checker.at), self._scene(launch))
        return None

    def _scene(self, launch: Launched) -> Scene:
        return Scene(
            *(launch.kernel, launch.path, launch.checked, launch.grid),
            *(launch.dynamic, launch.arguments, self.table),
        )
