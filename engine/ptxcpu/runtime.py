"""Running tasks on the host's cores: a list of launches as one native call for each worker thread.

The native `plan` function takes tasks in order. Workers draw ranges of a task's blocks from its counter, go on to the next task
once all its blocks are finished, whoever ran them, and do not come back to Python in between; the GIL is released throughout. So
a worker that the system does not run holds nobody up unless it is in the middle of a block, and one that comes late walks through
what is done. Blocks own what they write, so the bits do not depend on who runs them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ptxtrain.engine.errors import DeviceError, PtxtrainError
from ptxtrain.engine.ptxcpu import jit, traps
from ptxtrain.engine.ptxcpu.lower.runner import ALIGN, CONTROL, FIELDS, SYNC

if TYPE_CHECKING:
    from ptxtrain.engine.ptxcpu.lower.checks import Checked


MOST_BLOCKS = 64  # that a worker takes at a time: between two takes it looks whether it is to stop


class Task(ctypes.Structure):
    """One launch as native code reads it (byte offsets 0, 8, 16, 24, 28, 32, 36, 40, 48)."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("globals", ctypes.c_void_p),
        ("grid_x", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("grid_z", ctypes.c_uint32),
        ("dynamic_shared", ctypes.c_uint32),
        ("blocks", ctypes.c_uint64),
        ("watch", ctypes.c_void_p),  # a `checked.state.Watch` in checked mode
    )


class LaunchFailed(DeviceError):
    """A launch ended with a status other than 0; `index` is its place in the list."""

    def __init__(self, message: str, index: int = 0, status: int = 0) -> None:
        super().__init__(message)
        self.index, self.status = index, status


class _Sync(ctypes.Structure):
    """What workers share; the flags are on cache lines of their own, where `SYNC` says."""

    _fields_ = (
        (
            "counters",
            ctypes.c_void_p,
        ),  # of each task, on a cache line of its own: the next block, and how many are finished
        ("_0", ctypes.c_uint8 * (SYNC["stop"] - 8)),
        ("stop", ctypes.c_uint64),  # set from outside: end between two blocks
        ("_1", ctypes.c_uint8 * (SYNC["failed"] - SYNC["stop"] - 8)),
        ("failed", ctypes.c_uint64),  # the first failing task's number + 1, times 2^32, plus its status
    )


_LINE = 64  # bytes of a task's counters
_STOP, _FAILED = SYNC["stop"], SYNC["failed"]


def _plan_ir() -> str:
    """`void @plan(tasks, count, sync, workers, workspace)`, run by every worker."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        declare, pause = "declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"
    elif platform.machine().lower() in ("aarch64", "arm64"):
        declare, pause = "declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"
    else:
        declare, pause = "", ""
    yields = os.name == "posix"
    return f"""
{declare}
{"declare i32 @sched_yield()" if yields else ""}
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.umin.i64(i64, i64)
define void @plan(ptr %tasks, i64 %count, ptr %sync, i64 %workers, ptr %ws) {{
entry:
  %counters = load ptr, ptr %sync
  %stop.p = getelementptr i8, ptr %sync, i64 {_STOP}
  %failed.p = getelementptr i8, ptr %sync, i64 {_FAILED}
  %shares = mul i64 %workers, 8
  %sync.p = getelementptr i8, ptr %ws, i64 {FIELDS["sync"]}
  store ptr %sync, ptr %sync.p
  br label %tasks.loop
tasks.loop:
  %t = phi i64 [0, %entry], [%t.next, %task.end]
  %more = icmp ult i64 %t, %count
  br i1 %more, label %task, label %out
task:
  %counter = mul i64 %t, {_LINE}
  %next.p = getelementptr i8, ptr %counters, i64 %counter
  %finished.p = getelementptr i8, ptr %next.p, i64 8
  %at = mul i64 %t, {ctypes.sizeof(Task)}
  %one = getelementptr i8, ptr %tasks, i64 %at
  %run = load ptr, ptr %one
  %blocks.p = getelementptr i8, ptr %one, i64 40
  %blocks = load i64, ptr %blocks.p
  %share = udiv i64 %blocks, %shares
  %some = call i64 @llvm.umax.i64(i64 %share, i64 1)
  %grain = call i64 @llvm.umin.i64(i64 %some, i64 {MOST_BLOCKS})
  br label %draw
draw:
  %stop.now = load atomic i64, ptr %stop.p monotonic, align 8
  %is.stopped = icmp ne i64 %stop.now, 0
  br i1 %is.stopped, label %out, label %draw.next
draw.next:
  %first = atomicrmw add ptr %next.p, i64 %grain monotonic
  %left = icmp ult i64 %first, %blocks
  br i1 %left, label %go, label %wait
go:
  %end = add i64 %first, %grain
  %last = call i64 @llvm.umin.i64(i64 %end, i64 %blocks)
  %status = call i32 %run(ptr %one, i64 %first, i64 %last, ptr %ws)
  %bad = icmp ne i32 %status, 0
  br i1 %bad, label %fail, label %ran
ran:
  ; What these blocks wrote is there for whoever sees them counted.
  %size = sub i64 %last, %first
  %counted = atomicrmw add ptr %finished.p, i64 %size acq_rel
  br label %draw
fail:
  %number = add i64 %t, 1
  %high = shl i64 %number, 32
  %status64 = zext i32 %status to i64
  %code = or i64 %high, %status64
  %set = cmpxchg ptr %failed.p, i64 0, i64 %code monotonic monotonic
  br label %out
wait:
  %spins = phi i64 [0, %draw.next], [%spins.next, %wait.more]
  %finished = load atomic i64, ptr %finished.p acquire, align 8
  %all = icmp eq i64 %finished, %blocks
  br i1 %all, label %task.end, label %wait.on
wait.on:
  %stop = load atomic i64, ptr %stop.p monotonic, align 8
  %failed = load atomic i64, ptr %failed.p monotonic, align 8
  %either = or i64 %stop, %failed
  %is.over = icmp ne i64 %either, 0
  br i1 %is.over, label %out, label %wait.pause
wait.pause:
  {pause}
  %spins.next = add i64 %spins, 1
  %long = icmp ugt i64 %spins.next, 4000
  br i1 %long, label %wait.yield, label %wait.more
wait.yield:
  {"%y = call i32 @sched_yield()" if yields else ""}
  br label %wait.more
wait.more:
  br label %wait
task.end:
  %t.next = add i64 %t, 1
  br label %tasks.loop
out:
  ret void
}}
"""


@cache
def _plan_native() -> jit.Native:
    return jit.load(_plan_ir(), ("plan",))


@cache
def _plan_function() -> Callable[[int, int, int, int, int], None]:
    """`plan(tasks, count, sync, workers, workspace)` as a call that releases the GIL."""
    prototype = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p
    )
    return prototype(_plan_native().addresses["plan"])


class Memory:
    """Aligned, page-touched-on-use host memory; `address` is a multiple of ALIGN."""

    def __init__(self, nbytes: int) -> None:
        try:
            self._raw = (ctypes.c_uint8 * (nbytes + ALIGN))()
        except (MemoryError, OverflowError, ValueError) as error:
            raise DeviceError(f"the host has no {nbytes:,} bytes of memory left") from error
        start = ctypes.addressof(self._raw)
        self.address = (start + ALIGN - 1) // ALIGN * ALIGN
        self.nbytes = nbytes


@dataclass(frozen=True, slots=True)
class Ready:
    """A compiled kernel as the runtime needs it."""

    name: str
    run: int  # address
    workspace: int  # bytes for one worker, dynamic shared memory aside
    keep: object
    checked: Checked | None = None


def default_threads() -> int:
    """`$PTXTRAIN_THREADS`, else the cores that this process may use."""
    text = os.environ.get("PTXTRAIN_THREADS")
    if text:
        if not text.isdigit() or not 1 <= int(text) <= 1024:
            raise PtxtrainError(f"PTXTRAIN_THREADS is {text!r}; it takes a number from 1 to 1024")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Pool:
    """Worker threads that run task lists. One list runs at a time; the caller is one of the workers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lock = threading.Lock()
        self._workspaces: list[Memory] = [Memory(CONTROL) for _ in range(threads)]
        self._sync = Memory(ctypes.sizeof(_Sync))
        self._shared = _Sync.from_address(self._sync.address)
        self._counters = Memory(_LINE)
        self._go = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._turn = threading.Condition()  # guards what follows
        self._job: tuple[int, int, int] | None = None  # open to workers that come
        self._inside = 0  # workers, beside the caller, that have come and not gone
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, args=(i,), name=f"ptxcpu-{i}", daemon=True) for i in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    def _work(self, index: int) -> None:
        while True:
            self._go[index - 1].acquire()
            with self._turn:
                if self._closed:
                    return
                if self._job is None:
                    continue  # the list was finished before this worker woke up
                tasks, count, workers = self._job
                self._inside += 1
            _plan_function()(tasks, count, self._sync.address, workers, self._workspaces[index].address)
            with self._turn:
                self._inside -= 1
                self._turn.notify_all()

    def run(self, tasks: ctypes.Array[Task], names: Sequence[str], workspace: int, *, alone: bool = False) -> int:
        """Run tasks in order and return how many are known to be finished; fewer than all after `stop`.

        With `alone` the caller does all of it. Python's main thread must ask for that: an exception that a signal raises while
        others work would let go of memory that they use.

        Raises:
            DeviceError: a kernel trapped or its warps wait for each other; later tasks have not run.
        """
        count = len(tasks)
        if not count:
            return 0
        with self._lock:
            function = _plan_function()
            for i, memory in enumerate(self._workspaces):
                if memory.nbytes < workspace:
                    self._workspaces[i] = Memory(workspace)
            if self._counters.nbytes < _LINE * count:
                self._counters = Memory(_LINE * count)
            ctypes.memset(self._counters.address, 0, _LINE * count)
            sync = self._shared
            sync.counters, sync.failed = self._counters.address, 0
            # A task list that gives one worker all the work is not worth waking the others for.
            workers = self.threads if not alone and any(t.blocks > 1 for t in tasks) else 1
            address = ctypes.addressof(tasks)
            if workers > 1:
                with self._turn:
                    self._job = (address, count, workers)
                for semaphore in self._go[: workers - 1]:
                    semaphore.release()
            function(address, count, self._sync.address, workers, self._workspaces[0].address)
            if workers > 1:
                with self._turn:
                    self._job = None
                    while self._inside:
                        self._turn.wait()
            failed = int(sync.failed)
            done = self._finished(tasks) if failed or sync.stop else count
        if failed:
            index = (failed >> 32) - 1
            status = failed & 0xFFFFFFFF
            raise LaunchFailed(traps.describe(names[index], status), index, status)
        return done

    def _finished(self, tasks: ctypes.Array[Task]) -> int:
        """How many tasks at the start of the list have all their blocks done."""
        counters = (ctypes.c_uint64 * (len(tasks) * _LINE // 8)).from_address(self._counters.address)
        for i, task in enumerate(tasks):
            if counters[i * _LINE // 8 + 1] != task.blocks:
                return i
        return len(tasks)

    def stop(self) -> None:
        """Have the running task list end with the blocks it is at, and later ones at once, until `resume`."""
        self._shared.stop = 1

    def resume(self) -> None:
        """Take `stop` back."""
        self._shared.stop = 0

    def close(self) -> None:
        """End the worker threads."""
        if self._closed:
            return
        self._closed = True
        with self._lock, self._turn:
            for semaphore in self._go:
                semaphore.release()
        for worker in self._workers:
            worker.join()
