"""The CPU device: the same PTX, compiled by `ptxcpu`, on the host's cores.

One thread takes what is queued, in order; a plan is one native call that runs its launches without coming back to Python.
"""

from __future__ import annotations

import ctypes
import math
import platform
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.device.base import (
    ALIGNMENT,
    Array,
    Buffer,
    Device,
    Event,
    Kernel,
    Launch,
    Param,
    Plan,
    check_launch,
)
from ptxtrain.engine.device.prebuild import build, large_jobs
from ptxtrain.engine.errors import DeviceError, OutOfMemory, PtxtrainError
from ptxtrain.engine.memory import host_free, limit
from ptxtrain.engine.ptxcpu.checked.sanitizer import Launched, Sanitizer
from ptxtrain.engine.ptxcpu.checked.schedule import Schedule, wanted
from ptxtrain.engine.ptxcpu.module import LoadedModule, load, make_task, pack_args
from ptxtrain.engine.ptxcpu.runtime import LaunchFailed, Pool, Task, default_threads

SMALL = 1 << 18  # bytes of all arguments: about what one core gets through while a hand-over to another takes place
MARGIN = 64 << 10  # bytes around an allocation in checked mode, so that its neighbours are not hit by a near miss


class _CpuPlan(Plan):
    """Launches as an array of native tasks, with their argument buffers and code kept alive."""

    def __init__(
        self, launches: Sequence[Launch], sanitizer: Sanitizer | None = None, *, is_checked: bool = False
    ) -> None:
        self.launches = tuple(launches)
        self.watched: list[Launched] = []
        self.workspace = 0
        self.nbytes = sum(a.nbytes for launch in launches for a in launch.args if isinstance(a, Buffer))
        self.names = [launch.kernel.name for launch in launches]
        self._keep: list[object] = []
        self.tasks = (Task * len(launches))()
        for i, launch in enumerate(launches):
            if not is_checked:
                check_launch(launch)
            module: LoadedModule = launch.kernel.handle
            function = module.tree.entry(launch.kernel.name)
            args = [np.uint64(a.ptr) if isinstance(a, Buffer) else a for a in launch.args]
            packed: npt.NDArray[np.uint8] = pack_args(function, args)
            ready = module.ready(launch.kernel.name, launch.block)
            self.tasks[i] = make_task(ready, packed, module.globals_address, launch.grid, launch.shared)
            self.workspace = max(self.workspace, ready.workspace + launch.shared)
            self._keep += [packed, ready]
            if sanitizer is not None:
                assert ready.checked is not None
                params = zip(launch.args, launch.kernel.params, strict=True)
                pointers = [(a.ptr, p.name) for a, p in params if isinstance(a, Buffer)]
                watched = sanitizer.watch(
                    *(ready.name, launch.kernel.path, ready.checked, launch.grid, launch.shared, pointers)
                )
                self.tasks[i].watch = watched.address
                self.watched.append(watched)


class _CpuEvent(Event):
    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        self._reached = threading.Event()
        self._at = math.nan  # time.perf_counter()

    def reach(self) -> None:
        self._at = time.perf_counter()
        self._reached.set()

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CpuEvent) and self.done() and earlier.done()
        return self._at - earlier._at

    def done(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        self._reached.wait()
        self._device.raise_failure()


class CpuDevice(Device):
    """See `base.Device`.

    Args:
        threads: None for `$PTXTRAIN_THREADS`, else all cores that the process may use.
        checked: run kernels in the checked mode (`ptxcpu.checked`), on one thread, so that what it finds comes in a fixed
            order; None leaves it to `$PTXTRAIN_CHECKED`. A finding is raised as `CheckError` by the next call that waits.
        schedule: the order of blocks and warps in checked mode: forward, reverse, random or random:SEED.
    """

    kind = "cpu"

    def __init__(self, threads: int | None = None, *, checked: bool | None = None, schedule: str | None = None) -> None:
        self.schedule = wanted(checked, schedule)
        self._sanitizer = None if self.schedule is None else Sanitizer(self.schedule)
        self.threads = 1 if self._sanitizer else threads or default_threads()
        self.name = f"{processor_name()}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        if self._sanitizer:
            order = "" if self.schedule == Schedule() else f", {self.schedule} order"
            self.name += f", checked{order}"
        self._pool = Pool(self.threads)
        self._queue: queue.SimpleQueue[Callable[[], None] | _CpuEvent | None] = queue.SimpleQueue()
        self._putting = threading.RLock()  # a signal's handler may come in between
        self._queued = self._served = 0
        self._limit, self._taken = limit(), 0  # bytes
        self._failure: BaseException | None = None
        self._dropping = False
        self._modules: dict[Path, LoadedModule] = {}
        self._kernels: dict[tuple[Path, str], Kernel] = {}
        self._worker = threading.Thread(target=self._serve, name="ptxtrain-cpu-queue", daemon=True)
        self._worker.start()

    # The queue

    def _serve(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, _CpuEvent):
                self._served += 1
                item.reach()
                continue
            try:
                if not self._dropping and self._failure is None:
                    item()
            except BaseException as error:
                self._failure = error
            del item  # and with it the buffers that it used
            self._served += 1

    def _put(self, item: Callable[[], None] | _CpuEvent) -> None:
        with self._putting:
            self._queued += 1
            self._queue.put(item)

    def raise_failure(self) -> None:
        """Raise what failed on the queue, once."""
        error, self._failure = self._failure, None
        if error is None:
            return
        if isinstance(error, PtxtrainError):
            raise error
        raise DeviceError(f"the CPU device failed: {error}") from error

    def record(self) -> Event:
        event = _CpuEvent(self)
        self._put(event)
        return event

    def synchronize(self) -> None:
        event = _CpuEvent(self)
        self._put(event)
        try:
            event.wait()
        finally:
            self._dropping = False
            self._pool.resume()

    def interrupt(self) -> None:
        self._dropping = True
        self._pool.stop()

    def close(self) -> None:
        """End the device's threads; what is queued is finished first."""
        self._queue.put(None)
        self._worker.join()
        self._pool.close()

    # Memory

    def free_memory(self) -> int | None:
        free = host_free()
        left = None if self._limit is None else self._limit - self._taken
        return min((size for size in (free, left) if size is not None), default=None)

    def alloc(self, nbytes: int) -> Buffer:
        if self._limit is not None and self._taken + nbytes > self._limit:
            raise OutOfMemory(
                f"out of memory: {nbytes:,} bytes wanted, {self._limit - self._taken:,} left of PTXTRAIN_MEMORY_LIMIT"
            )
        buffer = self._alloc(nbytes)
        if self._limit is not None:
            self._taken += nbytes
            weakref.finalize(buffer.owner, self._give_back, nbytes)
        return buffer

    def _give_back(self, nbytes: int) -> None:
        self._taken -= nbytes

    def _alloc(self, nbytes: int) -> Buffer:
        if self._sanitizer is None:
            owner = _host_bytes(nbytes)
            return Buffer(owner.ctypes.data, nbytes, owner)
        owner = _host_bytes(nbytes, margin=MARGIN)
        address, table = owner.ctypes.data, self._sanitizer.table
        table.add(address, nbytes, "", written=False)
        weakref.finalize(owner, table.remove, address)
        return Buffer(address, nbytes, owner)

    def adopt(self, ptr: int, nbytes: int, owner: object, *, written: bool) -> Buffer:
        if self._sanitizer is not None:
            self._sanitizer.table.add(ptr, nbytes, "", written=written)
        return Buffer(ptr, nbytes, owner)

    def release(self, buffer: Buffer) -> None:
        if self._sanitizer is not None:
            self._sanitizer.table.remove(buffer.ptr)

    def pinned(self, nbytes: int) -> Array:
        return _host_bytes(nbytes)

    def upload(self, dst: Buffer, src: Array) -> None:
        _check_copy(dst, src)
        address, size = src.ctypes.data, src.nbytes
        self._put(lambda: _copy(dst.ptr, address, size, (src, dst)))
        self._mark_written(dst, size)

    def download(self, dst: Array, src: Buffer) -> None:
        _check_copy(src, dst)
        if not dst.flags.writeable:
            raise PtxtrainError("download needs a writable array")
        address, size = dst.ctypes.data, dst.nbytes
        self._put(lambda: _copy(address, src.ptr, size, (src, dst)))

    def fill(self, dst: Buffer, byte: int) -> None:
        self._put(lambda: _set(dst, byte))
        self._mark_written(dst, dst.nbytes)

    def _mark_written(self, dst: Buffer, nbytes: int) -> None:
        """Queue telling the checks that the host has written the start of `dst`."""
        if self._sanitizer is not None:
            table = self._sanitizer.table
            self._put(lambda: table.mark_written(dst.ptr, nbytes))

    # Kernels

    def load(self, path: Path, entry: str) -> Kernel:
        found = self._kernels.get((path, entry))
        if found is None:
            module = self._modules.get(path)
            if module is None:
                checked, order = self.schedule is not None, str(self.schedule) if self.schedule else None
                module = self._modules[path] = load(path, checked=checked, schedule=order)
                if self._sanitizer is not None:
                    module.register(self._sanitizer.table)
            function = module.tree.entry(entry)
            params = tuple(Param(p.name, p.type, p.nbytes) for p in function.params)
            found = self._kernels[path, entry] = Kernel(entry, params, path, module)
        return found

    def plan(self, launches: Sequence[Launch]) -> Plan:
        if self.threads > 1 and len(jobs := large_jobs(launches)) > 1:
            build(jobs, self.threads, self.progress)
        return _CpuPlan(launches, self._sanitizer)

    def run(self, plan: Plan) -> None:
        assert isinstance(plan, _CpuPlan)
        self._put(lambda: self._run(plan))

    def execute(self, launches: Sequence[Launch]) -> None:
        """As the base has it, in the caller's own thread when nothing is queued: a hand-over costs more than a small kernel.

        Python's main thread runs none but small ones so, alone, since signals may raise an exception there at any time.
        """
        plan = _CpuPlan(launches, self._sanitizer, is_checked=True)
        alone = threading.current_thread() is threading.main_thread()
        if not alone or plan.nbytes <= SMALL:
            with self._putting:
                idle = self._served == self._queued and not self._dropping and self._failure is None
                if idle:
                    try:
                        self._run(plan, alone=alone)
                    except Exception as error:
                        self._failure = error
            if idle:
                self.raise_failure()
                return
        self.run(plan)
        self.synchronize()

    def reorder(self, schedule: str) -> None:
        """Give plans made from now on another order of blocks and warps. Only for a device in checked mode."""
        assert self._sanitizer is not None, "this device is not in checked mode"
        self.schedule = self._sanitizer.schedule = Schedule.parse(schedule)

    def _run(self, plan: _CpuPlan, *, alone: bool = False) -> None:
        if self._sanitizer is None:
            self._pool.run(plan.tasks, plan.names, plan.workspace, alone=alone)
            return
        self._sanitizer.prepare(plan.watched)
        try:
            self._pool.run(plan.tasks, plan.names, plan.workspace)
        except LaunchFailed as failed:
            error = self._sanitizer.error(plan.watched[failed.index], failed.status)
            if error is None:
                raise
            raise error from None

    def launch(self, launch: Launch) -> None:
        self.run(self.plan((launch,)))

    def numerics_id(self) -> str:
        """All arithmetic is IEEE's or our own functions', the same everywhere, but for tensor-core products (`lower/mma.py`)."""
        from ptxtrain.engine.ptxcpu.jit import GENERATOR, bf16_products

        return f"cpu ptxcpu-{GENERATOR} {bf16_products()}"


def _host_bytes(nbytes: int, margin: int = 0) -> npt.NDArray[np.uint8]:
    """Uninitialised bytes at a multiple of ALIGNMENT, with `margin` unused ones on both sides."""
    try:
        raw = np.empty(nbytes + ALIGNMENT + 2 * margin, np.uint8)
    except MemoryError as error:
        raise OutOfMemory(f"the host has no {nbytes:,} bytes of memory left; use a smaller micro-batch") from error
    start = margin + -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def _check_copy(buffer: Buffer, array: Array) -> None:
    if not array.flags.c_contiguous:
        raise PtxtrainError("copies take C-contiguous arrays")
    if array.nbytes > buffer.nbytes:
        raise PtxtrainError(f"a copy of {array.nbytes:,} bytes does not fit a buffer of {buffer.nbytes:,}")


def _copy(dst: int, src: int, size: int, keep: Any) -> None:
    ctypes.memmove(dst, src, size)
    del keep


def _set(dst: Buffer, byte: int) -> None:
    ctypes.memset(dst.ptr, byte, dst.nbytes)


@cache
def processor_name() -> str:
    """The processor's name as the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
