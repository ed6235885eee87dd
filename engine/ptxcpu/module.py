"""Loaded PTX modules: entries compiled for the block shapes they are launched with, arguments packed, launches run."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.ptxcpu import jit, traps
from ptxtrain.engine.ptxcpu.checked.memory import Table
from ptxtrain.engine.ptxcpu.checked.sanitizer import Sanitizer
from ptxtrain.engine.ptxcpu.checked.schedule import Schedule, wanted
from ptxtrain.engine.ptxcpu.inline import function_address, trap_messages
from ptxtrain.engine.ptxcpu.lower.checks import GAP
from ptxtrain.engine.ptxcpu.lower.function import RUN, lower_entry
from ptxtrain.engine.ptxcpu.lower.layouts import layout_globals, layout_params
from ptxtrain.engine.ptxcpu.lower.runner import ALIGN, CONTROL
from ptxtrain.engine.ptxcpu.parser import parse
from ptxtrain.engine.ptxcpu.runtime import LaunchFailed, Memory, Pool, Ready, Task, default_threads
from ptxtrain.engine.ptxcpu.tree import Function, Instruction, Module, PtxError, Span, Variable

Dim3 = tuple[int, int, int]
MAX_THREADS = 1024  # of a block
MAX_SHARED = 227 << 10  # bytes; what the largest GPUs allow a block


@cache
def shared_pool(threads: int) -> Pool:
    """One pool for each number of threads, for the life of the process."""
    return Pool(threads)


class LoadedModule:
    """A PTX file on the CPU. Module-scope variables live as long as it does.

    With a `schedule` its kernels are compiled for the checked mode.
    """

    def __init__(self, tree: Module, schedule: Schedule | None = None) -> None:
        self.tree, self.schedule = tree, schedule
        self.gap = 0 if schedule is None else GAP
        self._ready: dict[tuple[str, Dim3], Ready] = {}
        self._lock = threading.Lock()
        self._globals = self._place_globals()
        self._register_messages()

    def _register_messages(self) -> None:
        """What kernels may end with: cached code has the numbers alone."""
        for message in trap_messages(self.tree).values():
            traps.status_of(message)
        for function in self.tree.functions.values():
            for item in function.body:
                if isinstance(item, Instruction) and item.opcode in ("bar", "barrier"):
                    traps.status_of(traps.apart(f"{self.tree.path.name}:{item.span.line}"))

    def _place_globals(self) -> Memory:
        offsets, size = layout_globals(self.tree, next(iter(self.tree.functions.values())), self.gap)
        memory = Memory(max(size, 1))
        ctypes.memset(memory.address, 0, memory.nbytes)
        owners = (self.tree.variables, *(f.variables for f in self.tree.functions.values()))
        variables: dict[str, Variable] = {n: v for owner in owners for n, v in owner.items()}
        for name, offset in offsets.items():
            variable = variables[name]
            if variable.init is not None:
                ctypes.memmove(memory.address + offset, variable.init, len(variable.init))
            for at, symbol in variable.relocations:
                if symbol.name in self.tree.functions:
                    value = function_address(self.tree, symbol.name)
                elif symbol.name in offsets:
                    value = memory.address + offsets[symbol.name] + symbol.offset
                else:
                    raise PtxError(f"the address of {symbol.name} is not known here", self.tree.path, variable.span)
                ctypes.memmove(memory.address + offset + at, value.to_bytes(8, "little"), 8)
        return memory

    @property
    def globals_address(self) -> int:
        return self._globals.address

    def register(self, table: Table) -> None:
        """Let kernels touch the module's variables."""
        functions = self.tree.functions.values()
        offsets, _ = layout_globals(self.tree, next(iter(functions)), self.gap)
        for owner in (self.tree.variables, *(f.variables for f in functions)):
            for name, variable in owner.items():
                if name in offsets:
                    start, const = self.globals_address + offsets[name], variable.space == "const"
                    table.add(start, variable.nbytes, name, written=True, writable=not const, const=const)

    def ready(self, entry: str, block: Dim3) -> Ready:
        """`entry` compiled for blocks of this shape."""
        with self._lock:
            found = self._ready.get((entry, block))
            if found is None:
                found = self._ready[entry, block] = self._compile(self.tree.entry(entry), block)
            return found

    def _parts(self, entry: str, block: Dim3) -> tuple[str, ...]:
        return "ptx", self.tree.text, entry, str(block)

    def is_cached(self, entry: str, block: Dim3) -> bool:
        """Whether `ready` has nothing to compile. In checked mode nothing is kept and nothing shared."""
        return self.schedule is not None or (entry, block) in self._ready or jit.is_cached(self._parts(entry, block))

    def _compile(self, function: Function, block: Dim3) -> Ready:
        if function.reqntid is not None and function.reqntid != block:
            raise PtxtrainError(f"{function.name} requires blocks of {function.reqntid}, got {block}")
        if min(block) < 1 or block[0] * block[1] * block[2] > MAX_THREADS:
            raise PtxtrainError(f"{function.name}: block {block} is outside 1 to {MAX_THREADS} threads")
        checked = None
        if self.schedule is not None:
            lowered = lower_entry(self.tree, function, block, checked=True)
            native, checked = jit.load(lowered.ir, (RUN,)), lowered.checked
            warps, static, local = lowered.warps, lowered.shared, lowered.local
        else:

            def make() -> tuple[str, jit.Facts]:
                lowered = lower_entry(self.tree, function, block)
                return lowered.ir, (lowered.warps, lowered.shared, lowered.local)

            parts = self._parts(function.name, block)
            native, (warps, static, local) = jit.load_keyed(parts, (RUN,), make)
        frame = (native.frame_bytes + ALIGN - 1) // ALIGN * ALIGN
        shared = (static + ALIGN - 1) // ALIGN * ALIGN
        workspace = CONTROL + shared + ALIGN + warps * (local + frame)
        return Ready(function.name, native.addresses[RUN], workspace, native, checked)

    def ir(self, entry: str, block: Dim3) -> str:
        """The LLVM IR of an entry, before optimisation."""
        return lower_entry(self.tree, self.tree.entry(entry), block, checked=self.schedule is not None).ir

    def launch(
        self,
        entry: str,
        *,
        grid: Dim3,
        block: Dim3,
        args: Sequence[Any],
        shared: int = 0,
        threads: int | None = None,
    ) -> None:
        """Run `entry` and wait. Arrays among `args` are passed as pointers to their own memory and changed in place.

        Raises:
            PtxtrainError: arguments that do not fit the signature, or an instruction that is not known.
            DeviceError: the kernel trapped or deadlocked.
            CheckError: a check of the checked mode failed; one thread runs then, and `threads` is not looked at.
        """
        function = self.tree.entry(entry)
        packed = pack_args(function, [pointer_of(a) for a in args])
        ready = self.ready(entry, block)
        tasks = (Task * 1)(make_task(ready, packed, self.globals_address, grid, shared))
        if self.schedule is not None:
            self._launch_checked(ready, tasks, grid, shared, args)
            return
        _run_interruptibly(shared_pool(threads or default_threads()), tasks, entry, ready.workspace + shared)

    def _launch_checked(
        self, ready: Ready, tasks: ctypes.Array[Task], grid: Dim3, shared: int, args: Sequence[Any]
    ) -> None:
        assert ready.checked is not None
        sanitizer = Sanitizer(self.schedule)
        self.register(sanitizer.table)
        params = self.tree.entry(ready.name).params
        named = [(a, p.name) for a, p in zip(args, params, strict=True) if isinstance(a, np.ndarray)]
        for start, nbytes, name, writable in merged(named):
            sanitizer.table.add(start, nbytes, name, written=True, writable=writable)
        pointers = [(a.ctypes.data, name) for a, name in named]
        launched = sanitizer.watch(ready.name, self.tree.path, ready.checked, grid, shared, pointers)
        tasks[0].watch = launched.address
        sanitizer.prepare((launched,))
        try:
            _run_interruptibly(shared_pool(1), tasks, ready.name, ready.workspace + shared)
        except LaunchFailed as failed:
            error = sanitizer.error(launched, failed.status)
            if error is None:
                raise
            raise error from None


def merged(arrays: Sequence[tuple[npt.NDArray[Any], str]]) -> list[tuple[int, int, str, bool]]:
    """Start, bytes, name and whether it may be written of each range that arrays cover; overlapping ones are one range."""
    found: list[tuple[int, int, str, bool]] = []
    for array, name in sorted(arrays, key=lambda a: a[0].ctypes.data):
        start, writable = array.ctypes.data, bool(array.flags.writeable)
        if found and start < found[-1][0] + found[-1][1]:
            first, size, names, before = found.pop()
            end = max(first + size, start + array.nbytes)
            names = names if name in names.split(" and ") else f"{names} and {name}"
            found.append((first, end - first, names, writable or before))
        else:
            found.append((start, array.nbytes, name, writable))
    return found


def _run_interruptibly(pool: Pool, tasks: ctypes.Array[Task], entry: str, workspace: int) -> None:
    """Run tasks on other threads, so that Ctrl+C is seen while they run: native code does not look for it."""
    if threading.current_thread() is not threading.main_thread():
        pool.run(tasks, (entry,), workspace)
        return
    failures: list[BaseException] = []
    # Not Thread.join: once interrupted, it takes the thread for ended, and the arguments would be freed under running code.
    done = threading.Event()

    def work() -> None:
        try:
            pool.run(tasks, (entry,), workspace)
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="ptxcpu-launch").start()
    interrupt: BaseException | None = None
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:
            interrupt = error
            pool.stop()
    if interrupt is not None:
        pool.resume()
        raise interrupt
    if failures:
        raise failures[0]


def pointer_of(argument: Any) -> np.generic:
    """A NumPy scalar as it is, an array as the address of its memory."""
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise PtxtrainError("arrays given to a kernel must be C-contiguous; use numpy.ascontiguousarray")
        return np.uint64(argument.ctypes.data)
    if isinstance(argument, np.generic):
        return argument
    raise PtxtrainError(
        f"a kernel takes arrays and NumPy scalars, got a Python {type(argument).__name__} (its width would be a guess)"
    )


def pack_args(function: Function, args: Sequence[np.generic]) -> npt.NDArray[np.uint8]:
    """The argument buffer: each value at its parameter's offset."""
    offsets, size = layout_params(function)
    if len(args) != len(function.params):
        names = ", ".join(p.name for p in function.params)
        raise PtxtrainError(f"{function.name} takes {len(function.params)} arguments ({names}), got {len(args)}")
    buffer = np.zeros(max(size, 1), np.uint8)
    memory = buffer.data
    for param, value in zip(function.params, args, strict=True):
        data = value.tobytes()
        if len(data) != param.nbytes:
            raise PtxtrainError(
                f"{function.name}: parameter {param.name} is .{param.type} ({param.nbytes} bytes), got "
                f"numpy.{value.dtype} ({len(data)} bytes)"
            )
        start = offsets[param.name]
        memory[start : start + len(data)] = data
    return buffer


def make_task(ready: Ready, packed: npt.NDArray[np.uint8], globals_: int, grid: Dim3, shared: int) -> Task:
    """A launch as native code reads it; `packed` must live as long as the task."""
    if not 0 <= shared <= MAX_SHARED:
        raise PtxtrainError(f"{ready.name}: {shared:,} bytes of dynamic shared memory; a block may have {MAX_SHARED:,}")
    blocks = grid[0] * grid[1] * grid[2]
    if min(grid) < 1 or blocks >= 1 << 62:
        raise PtxtrainError(f"{ready.name}: grid {grid} must be at least 1 in each direction")
    return Task(ready.run, packed.ctypes.data, globals_, *grid, shared, blocks)


def load(source: Path | str, *, checked: bool | None = None, schedule: str | None = None) -> LoadedModule:
    """Load a PTX file, given by its path or (a string with a line break) its text.

    Args:
        source: a path or the text.
        checked: compile for the checked mode; None leaves it to `$PTXTRAIN_CHECKED`.
        schedule: the order of blocks and warps in checked mode: forward, reverse, random or random:SEED.

    Raises:
        PtxError: the text is malformed: file, line, column.
        PtxtrainError: the file cannot be read.
    """
    order = wanted(checked, schedule)
    if isinstance(source, str) and "\n" in source:
        return LoadedModule(_with_entry(parse(source, Path("<text>"))), order)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PtxtrainError(f"cannot read {path}: {error}") from error
    return LoadedModule(_with_entry(parse(text, path)), order)


def _with_entry(tree: Module) -> Module:
    if not any(f.is_entry for f in tree.functions.values()):
        raise PtxError("there is no .entry in this file", tree.path, Span(1, 1))
    return tree
