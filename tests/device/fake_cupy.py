"""A fake of exactly the part of CuPy that the CUDA device uses, which runs kernels on the CPU compiler.

It is stricter than a GPU. Everything put on a stream waits until something waits for it, so a missing wait shows as stale
data; launches outside a `with stream:` are refused; arguments must be NumPy scalars of the parameters' widths; what CUDA
forbids during capture fails as it does there; and after an error on the queue every later call fails with it.
`test_cupy_api.py` holds each name and parameter here against the CuPy that is installed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cublas import Cublas

from ptxtrain.engine.device import cuda_errors
from ptxtrain.engine.device.cuda import CudaDevice

ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED, INVALID_VALUE, INVALID_PTX = 700, 900, 1, 218
OPTIN = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin

SCALARS = (
    *(np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
    np.float16,
    np.float32,
    np.float64,
)


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError{status}: the runtime's text for it")


class CUDADriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA_ERROR_{status}: the driver's text for it")


class OutOfMemoryError(MemoryError):
    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class State:
    """What the fake GPU holds: settings that a test may change, and the queue's fate."""

    def __init__(self) -> None:
        self.driver_version = 12040
        self.runtime_version = 12090
        self.cards: list[tuple[str, str]] = [("Fake A100", "80")]
        self.memory = 64 << 20
        self.used = 0
        self.shared_optin = 99 << 10
        self.max_threads = 1024
        self.can_capture = True
        self.load_error: int | None = None
        self.count_error: int | None = None
        self.next_launch_error: int | None = None  # raised when the next queued kernel executes
        self.last_shared = 0  # dynamic shared memory of the last launch
        self.lost: int | None = None
        self.current: list[Stream] = []
        self.device = 0
        self.pool = MemoryPool(self)
        self.log: list[str] = []  # "launch", "graph", "upload", … in the order of the calls

    def check(self) -> None:
        if self.lost is not None:
            raise CUDARuntimeError(self.lost)

    def not_capturing(self) -> None:
        if any(stream.nodes is not None for stream in self.current):
            raise CUDARuntimeError(CAPTURE_UNSUPPORTED)


class FakeCupy:
    """Stands in for the module `cupy`."""

    __version__ = "14.2.0"

    def __init__(self) -> None:
        state = self.state = State()

        def bound(cls: type) -> Callable[..., Any]:
            """`cls` with the state as its first argument, under the signature that CuPy has."""
            return type(cls.__name__, (cls,), {"state": state})

        self.RawModule = bound(RawModule)
        self.get_default_memory_pool = lambda: state.pool
        self.cuda = SimpleNamespace(
            alloc=bound_function(state, alloc),
            MemoryPointer=MemoryPointer,
            UnownedMemory=bound(UnownedMemory),
            alloc_pinned_memory=bound_function(state, alloc_pinned_memory),
            Stream=bound(Stream),
            Event=bound(Event),
            get_elapsed_time=get_elapsed_time,
            Device=bound(Device),
            runtime=Runtime(state),
            cublas=Cublas(state),
        )


def open_fake(fake: FakeCupy, index: int | None = None) -> CudaDevice:
    """The CUDA device over this fake."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_errors, "import_cupy", lambda: fake)
        return CudaDevice(index)


def bound_function(state: State, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(size: int) -> Any:
        return function(state, size)

    call.__name__ = function.__name__
    return call


class MemoryPool:
    """`cupy.cuda.MemoryPool`, which here keeps nothing back."""

    def __init__(self, state: State) -> None:
        self._state = state

    def free_bytes(self) -> int:
        return 0

    def used_bytes(self) -> int:
        return self._state.used

    def set_limit(self, size: int | None = None) -> None:
        assert size is not None
        self._state.memory = min(self._state.memory, size)


class Runtime:
    """`cupy.cuda.runtime`."""

    cudaDevAttrMaxSharedMemoryPerBlockOptin = OPTIN

    def __init__(self, state: State) -> None:
        self._state = state

    def driverGetVersion(self) -> int:
        return self._state.driver_version

    def runtimeGetVersion(self) -> int:
        return self._state.runtime_version

    def getDeviceCount(self) -> int:
        if self._state.count_error is not None:
            raise CUDARuntimeError(self._state.count_error)
        return len(self._state.cards)

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": self._state.cards[device][0].encode(), "totalGlobalMem": self._state.memory}

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        assert attrib == OPTIN and 0 <= device < len(self._state.cards)
        return self._state.shared_optin

    def memGetInfo(self) -> tuple[int, int]:
        self._state.check()
        return self._state.memory - self._state.used, self._state.memory


class Device:
    """`cupy.cuda.Device`; a context manager that makes the device current."""

    state: State

    def __init__(self, device: int | None = None) -> None:
        self.id = self.state.device if device is None else device
        if not 0 <= self.id < len(self.state.cards):
            raise CUDARuntimeError(101)

    @property
    def compute_capability(self) -> str:
        return self.state.cards[self.id][1]

    def __enter__(self) -> Device:
        self._before, self.state.device = self.state.device, self.id
        return self

    def __exit__(self, *args: object) -> None:
        self.state.device = self._before


class Memory:
    """One allocation on the "GPU": host memory with CUDA's alignment, filled with noise."""

    def __init__(self, state: State, size: int) -> None:
        self.state, self.size = state, size
        self._bytes = np.full(size + 512, 0xA5, np.uint8)
        self.ptr = -(-self._bytes.ctypes.data // 512) * 512
        state.used += size

    def __del__(self) -> None:
        self.state.used -= self.size


class UnownedMemory:
    """`cupy.cuda.UnownedMemory`: memory that somebody else allocated."""

    state: State

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        assert type(ptr) is int and 0 <= device_id < len(self.state.cards)
        self.ptr, self.size, self._owner = ptr, size, owner


class MemoryPointer:
    """`cupy.cuda.MemoryPointer`: copies go on a stream and must lie within the allocation."""

    def __init__(self, mem: Memory | UnownedMemory, offset: int) -> None:
        assert 0 <= offset <= mem.size, "pointer outside its allocation"
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def _check(self, size: int, stream: Stream | None) -> Stream:
        self.mem.state.check()
        assert type(size) is int and 0 < size <= self.mem.ptr + self.mem.size - self.ptr, "copy outside its allocation"
        assert isinstance(stream, Stream), "a copy on the null stream"
        return stream

    def copy_from_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        assert type(mem) is int
        self._check(size, stream).put("upload", lambda: ctypes.memmove(self.ptr, mem, size))

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream | None = None) -> None:
        src._check(size, stream)
        self._check(size, stream).put("copy", lambda: ctypes.memmove(self.ptr, src.ptr, size))

    def copy_to_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        assert type(mem) is int
        self._check(size, stream).put("download", lambda: ctypes.memmove(mem, self.ptr, size))

    def memset_async(self, value: int, size: int, stream: Stream | None = None) -> None:
        assert 0 <= value <= 255
        self._check(size, stream).put("fill", lambda: ctypes.memset(self.ptr, value, size))


def alloc(state: State, size: int) -> MemoryPointer:
    state.check()
    state.not_capturing()
    assert state.current, "allocated outside a stream: the pool would give the block to work on another one"
    if state.used + size > state.memory:
        raise OutOfMemoryError(size, state.used)
    return MemoryPointer(Memory(state, size), 0)


def alloc_pinned_memory(state: State, size: int) -> memoryview:
    """CuPy returns an object with the buffer protocol, as this has."""
    state.check()
    return memoryview(bytearray(size))


class Stream:
    """`cupy.cuda.Stream`. What is put on it happens when something waits."""

    state: State

    def __init__(self, *, non_blocking: bool) -> None:
        self.state.check()
        assert non_blocking, "a blocking stream waits for the null stream"
        self.queue: list[Callable[[], Any]] = []
        self.ptr = id(self)
        self.executed = 0
        self.times: dict[int, float] = {}  # when so many actions had been done, seconds
        self.nodes: list[Callable[[], Any]] | None = None  # not None: capturing

    def __enter__(self) -> Stream:
        self.state.current.append(self)
        return self

    def __exit__(self, *args: object) -> None:
        assert self.state.current.pop() is self

    def put(self, what: str, action: Callable[[], Any]) -> None:
        self.state.log.append(what)
        (self.queue if self.nodes is None else self.nodes).append(action)

    def execute(self, until: int) -> None:
        """Run the queue up to its `until`-th action; a failure loses the context."""
        self.state.check()
        while self.executed < until:
            action = self.queue[self.executed]
            self.executed += 1
            try:
                action()
            except CUDARuntimeError as error:
                self.state.lost = error.status
                raise
            self.times[self.executed] = time.perf_counter()

    def synchronize(self) -> None:
        if self.nodes is not None:
            raise CUDARuntimeError(CAPTURE_UNSUPPORTED)
        self.execute(len(self.queue))

    def begin_capture(self) -> None:
        self.state.check()
        assert self.nodes is None, "capture within capture"
        if not self.state.can_capture:
            raise CUDARuntimeError(CAPTURE_UNSUPPORTED)
        self.nodes = []

    def end_capture(self) -> Graph:
        assert self.nodes is not None, "end of a capture that never began"
        nodes, self.nodes = self.nodes, None
        return Graph(self.state, nodes)


class Graph:
    """`cupy.cuda.Graph`: the captured actions, with their arguments by value."""

    def __init__(self, state: State, nodes: list[Callable[[], Any]]) -> None:
        self._state, self._nodes = state, nodes

    def launch(self, stream: Stream | None = None) -> None:
        self._state.check()
        assert isinstance(stream, Stream) and stream.nodes is None
        self._state.log.append("graph")
        stream.queue.extend(self._nodes)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """In milliseconds; CUDA refuses events that have not happened."""
    assert start_event.done and end_event.done
    start, end = (event._stream.times[event._position] for event in (start_event, end_event))
    return (end - start) * 1e3


class Event:
    """`cupy.cuda.Event`."""

    state: State

    def __init__(self, *, block: bool, disable_timing: bool) -> None:
        self.state.check()
        assert not disable_timing, "its time is asked for"
        self._stream: Stream | None = None
        self._position = 0

    def record(self, stream: Stream | None = None) -> None:
        self.state.check()
        assert isinstance(stream, Stream), "an event on the null stream"
        self._stream, self._position = stream, len(stream.queue)
        stream.times.setdefault(self._position, time.perf_counter())  # kept where nothing before it is left to do

    @property
    def done(self) -> bool:
        """Each look finds one more piece of work done: whoever asks again and again comes to the end, and not at once."""
        self.state.check()
        if self._stream is None or self._stream.executed >= self._position:
            return True
        self._stream.execute(self._stream.executed + 1)
        return self._stream.executed >= self._position

    def synchronize(self) -> None:
        self.state.not_capturing()
        if self._stream is not None:
            self._stream.execute(self._position)


class RawModule:
    """`cupy.RawModule` for a PTX file."""

    state: State

    def __init__(self, *, path: str) -> None:
        assert type(path) is str and path.endswith(".ptx"), "CuPy takes the path as a str"
        self._path = path
        self._module: Any = None  # loaded with the first function, as in CuPy

    def get_function(self, name: str) -> RawKernel:
        from ptxtrain.engine.ptxcpu import load

        if self.state.load_error is not None:
            raise CUDADriverError(self.state.load_error)
        self._module = self._module or load(Path(self._path))
        return RawKernel(self.state, self._module, name)


class RawKernel:
    """`cupy.RawKernel`: checks what CUDA would, or would not, and executes on the CPU compiler."""

    def __init__(self, state: State, module: Any, name: str) -> None:
        self._state, self._name, self._module = state, name, module
        tree = module.tree
        function = tree.entry(name)
        self._widths = [(param.name, param.nbytes) for param in function.params]
        variables = [*function.variables.values(), *tree.variables.values()]
        self.shared_size_bytes = sum(v.nbytes for v in variables if v.space == "shared")
        self.max_threads_per_block = state.max_threads
        self._dynamic = (48 << 10) - self.shared_size_bytes

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._dynamic

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, bytes: int) -> None:
        if bytes + self.shared_size_bytes > self._state.shared_optin:
            raise CUDADriverError(INVALID_VALUE)
        self._dynamic = bytes

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        state = self._state
        state.check()
        assert type(grid) is tuple and type(block) is tuple and type(args) is tuple, "CuPy takes tuples"
        assert state.current, "launched outside `with stream:`, so on the null stream"
        assert len(args) == len(self._widths), f"{self._name}: {len(args)} arguments for {len(self._widths)}"
        for arg, (name, width) in zip(args, self._widths, strict=True):
            assert type(arg) in SCALARS, f"{self._name}: {name} is a {type(arg).__name__}, not a NumPy scalar"
            assert arg.itemsize == width, f"{self._name}: {name} has {width} bytes, got {arg.dtype}"
        if shared_mem > self._dynamic or np.prod(block) > self.max_threads_per_block:
            raise CUDADriverError(INVALID_VALUE)
        state.last_shared = shared_mem
        error, state.next_launch_error = state.next_launch_error, None

        def execute() -> None:
            if error is not None:
                raise CUDARuntimeError(error)
            self._module.launch(self._name, grid=grid, block=block, args=list(args), shared=shared_mem)

        state.current[-1].put("launch", execute)
