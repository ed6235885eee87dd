"""Running tasks on the host's cores: a list of launches as one native call for each worker thread.

The native `plan` function takes tasks in order. Workers draw ranges of blocks from a shared counter, meet at a barrier
after each task and go on to the next without coming back to Python; the GIL is released throughout. Blocks own what they
write, so the bits do not depend on who runs them.
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
    """What workers share: each field on a cache line of its own."""

    _fields_ = (
        ("next_block", ctypes.c_uint64),
        ("_0", ctypes.c_uint8 * 56),
        ("arrived", ctypes.c_uint64),
        ("_1", ctypes.c_uint8 * 56),
        ("generation", ctypes.c_uint64),
        ("_2", ctypes.c_uint8 * 56),
        ("stop", ctypes.c_uint64),  # set from outside: end between two blocks
        ("_3", ctypes.c_uint8 * 56),
        ("failed", ctypes.c_uint64),  # the first failing task's number + 1, times 2^32, plus its status
        ("done", ctypes.c_uint64),  # tasks finished
    )


_NEXT, _ARRIVED, _GENERATION, _DONE = 0, 64, 128, 264
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
  %next.p = getelementptr i8, ptr %sync, i64 {_NEXT}
  %arrived.p = getelementptr i8, ptr %sync, i64 {_ARRIVED}
  %generation.p = getelementptr i8, ptr %sync, i64 {_GENERATION}
  %stop.p = getelementptr i8, ptr %sync, i64 {_STOP}
  %failed.p = getelementptr i8, ptr %sync, i64 {_FAILED}
  %done.p = getelementptr i8, ptr %sync, i64 {_DONE}
  %shares = mul i64 %workers, 8
  %sync.p = getelementptr i8, ptr %ws, i64 {FIELDS["sync"]}
  store ptr %sync, ptr %sync.p
  br label %tasks.loop
tasks.loop:
  %t = phi i64 [0, %entry], [%t.next, %task.end]
  %more = icmp ult i64 %t, %count
  br i1 %more, label %task, label %out
task:
  %task.p = getelementptr i8, ptr %tasks, i64 {0}
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
  br i1 %is.stopped, label %meet, label %draw.next
draw.next:
  %first = atomicrmw add ptr %next.p, i64 %grain monotonic
  %left = icmp ult i64 %first, %blocks
  br i1 %left, label %go, label %meet
go:
  %end = add i64 %first, %grain
  %last = call i64 @llvm.umin.i64(i64 %end, i64 %blocks)
  %status = call i32 %run(ptr %one, i64 %first, i64 %last, ptr %ws)
  %bad = icmp ne i32 %status, 0
  br i1 %bad, label %fail, label %draw
fail:
  %number = add i64 %t, 1
  %high = shl i64 %number, 32
  %status64 = zext i32 %status to i64
  %code = or i64 %high, %status64
  %set = cmpxchg ptr %failed.p, i64 0, i64 %code monotonic monotonic
  br label %meet
meet:
  %generation = load atomic i64, ptr %generation.p acquire, align 8
  %before = atomicrmw add ptr %arrived.p, i64 1 acq_rel
  %here = add i64 %before, 1
  %is.last = icmp eq i64 %here, %workers
  br i1 %is.last, label %open, label %wait
open:
  store i64 0, ptr %next.p
  store i64 0, ptr %arrived.p
  ; Only the last to come looks at the flags, so that all workers see the same answer.
  %stop = load atomic i64, ptr %stop.p monotonic, align 8
  %failed = load atomic i64, ptr %failed.p monotonic, align 8
  %either = or i64 %stop, %failed
  %is.over = icmp ne i64 %either, 0
  %finished = add i64 %t, 1
  %done.now = select i1 %is.over, i64 %t, i64 %finished
  store i64 %done.now, ptr %done.p
  %up = add i64 %generation, 2
  %over.bit = zext i1 %is.over to i64
  %value.0 = and i64 %up, -2
  %value = or i64 %value.0, %over.bit
  store atomic i64 %value, ptr %generation.p release, align 8
  br label %task.end.check
wait:
  %spins = phi i64 [0, %meet], [%spins.next, %wait.more]
  %seen = load atomic i64, ptr %generation.p acquire, align 8
  %changed = icmp ne i64 %seen, %generation
  br i1 %changed, label %task.end.check, label %wait.on
wait.on:
  {pause}
  %spins.next = add i64 %spins, 1
  %long = icmp ugt i64 %spins.next, 4000
  br i1 %long, label %wait.yield, label %wait.more
wait.yield:
  {"%y = call i32 @sched_yield()" if yields else ""}
  br label %wait.more
wait.more:
  br label %wait
task.end.check:
  %now = phi i64 [%value, %open], [%seen, %wait]
  %over = and i64 %now, 1
  %ends = icmp ne i64 %over, 0
  br i1 %ends, label %out, label %task.end
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
        self._go = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._back = threading.Semaphore(0)
        self._job: tuple[int, int, int] | None = None
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, args=(i,), name=f"ptxcpu-{i}", daemon=True) for i in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    def _work(self, index: int) -> None:
        while True:
            self._go[index - 1].acquire()
            job = self._job
            if job is None:
                return
            tasks, count, workers = job
            _plan_function()(tasks, count, self._sync.address, workers, self._workspaces[index].address)
            self._back.release()

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
            sync = self._shared
            sync.next_block = sync.arrived = sync.generation = sync.failed = sync.done = 0
            # A task list that gives one worker all the work is not worth waking the others for.
            workers = self.threads if not alone and any(t.blocks > 1 for t in tasks) else 1
            address = ctypes.addressof(tasks)
            self._job = (address, count, workers)
            for semaphore in self._go[: workers - 1]:
                semaphore.release()
            function(address, count, self._sync.address, workers, self._workspaces[0].address)
            for _ in range(workers - 1):
                self._back.acquire()
            done, failed = int(sync.done), int(sync.failed)
        if failed:
            index = (failed >> 32) - 1
            status = failed & 0xFFFFFFFF
            raise LaunchFailed(traps.describe(names[index], status), index, status)
        return done

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
        with self._lock:
            self._job = None
            for semaphore in self._go:
                semaphore.release()
        for worker in self._workers:
            worker.join()
