"""The device protocol: memory, kernels, launches, plans and events on one queue.

A device is a queue. `upload`, `download`, `fill`, `launch` and `run` are put on it in order and return at once; `Event.wait`
and `synchronize` wait for it. Host arrays given to `upload` and `download` must live, and not be written, until then.
A failure on the queue is raised as `DeviceError` by the next call that waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.errors import PtxtrainError

Array: TypeAlias = npt.NDArray[Any]
Dim3: TypeAlias = tuple[int, int, int]

ALIGNMENT = 256  # bytes; what cudaMalloc gives, and more than any vector access needs


@dataclass(frozen=True, slots=True)
class Buffer:
    """A range of device memory. `owner` keeps the allocation alive; views share it."""

    ptr: int
    nbytes: int
    owner: object

    def view(self, offset: int, nbytes: int) -> Buffer:
        """The bytes [offset, offset + nbytes) of this buffer."""
        assert offset >= 0 and nbytes >= 0 and offset + nbytes <= self.nbytes, (offset, nbytes, self.nbytes)
        return Buffer(self.ptr + offset, nbytes, self.owner)


Arg: TypeAlias = "Buffer | np.generic"


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a kernel as its PTX declares it, e.g. `Param("p_out", "u64", 8)`."""

    name: str
    type: str
    size: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded entry point. `handle` is the device's own object."""

    name: str
    params: tuple[Param, ...]
    path: Path
    handle: Any


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything it is launched with. `shared` is dynamic shared memory in bytes."""

    kernel: Kernel
    grid: Dim3
    block: Dim3
    args: tuple[Arg, ...]
    shared: int = 0


class Event(ABC):
    """A point in the queue."""

    @abstractmethod
    def done(self) -> bool:
        """Whether everything queued before it has finished."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until everything queued before it has finished. Raises `DeviceError` if any of it failed."""

    @abstractmethod
    def since(self, earlier: Event) -> float:
        """Seconds from `earlier`, of the same device, to this one, as the device passed them; both are `done`."""


class Plan(ABC):
    """A list of launches made ready once, to be run many times with `Device.run`."""

    launches: tuple[Launch, ...]


class Device(ABC):
    """See the module's text. One per process and kind is enough."""

    kind: str  # "cpu" or "cuda"
    name: str  # what to print: the card's or the processor's name
    progress: Callable[[int, int], None] | None = None  # told how many of how many large kernels have been compiled

    @abstractmethod
    def alloc(self, nbytes: int) -> Buffer:
        """New memory aligned to `ALIGNMENT`; its contents are undefined. Raises `OutOfMemory`."""

    def free_memory(self) -> int | None:
        """Bytes that can still be allocated, `$PTXTRAIN_MEMORY_LIMIT` considered; None where that cannot be told."""
        return None

    @abstractmethod
    def pinned(self, nbytes: int) -> Array:
        """A uint8 host array [nbytes] that copies without staging."""

    @abstractmethod
    def upload(self, dst: Buffer, src: Array) -> None:
        """Queue a copy of `src` (C-contiguous) to the start of `dst`."""

    @abstractmethod
    def download(self, dst: Array, src: Buffer) -> None:
        """Queue a copy of the first `dst.nbytes` bytes of `src` to `dst` (C-contiguous)."""

    @abstractmethod
    def fill(self, dst: Buffer, byte: int) -> None:
        """Queue setting every byte of `dst`."""

    @abstractmethod
    def load(self, path: Path, entry: str) -> Kernel:
        """The kernel `entry` of a PTX file; the same (path, entry) gives the same object."""

    @abstractmethod
    def launch(self, launch: Launch) -> None:
        """Queue one launch. For loops use a plan."""

    @abstractmethod
    def plan(self, launches: Sequence[Launch]) -> Plan:
        """Check and compile launches for replay."""

    @abstractmethod
    def run(self, plan: Plan) -> None:
        """Queue a plan."""

    @abstractmethod
    def record(self) -> Event:
        """A point after everything queued so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything queued. Raises `DeviceError` if any of it failed."""

    @abstractmethod
    def interrupt(self) -> None:
        """Drop what is queued and, where the device can, stop between two launches. Ends at the next `synchronize`.

        What the dropped launches would have written is undefined afterwards.
        """

    @abstractmethod
    def numerics_id(self) -> str:
        """What this device's bits may depend on beside the kernels' text, as one line."""

    @property
    def stream(self) -> int:
        """The queue as other CUDA libraries know it, for `__dlpack__(stream=…)`; 0 where there is none."""
        return 0

    def adopt(self, ptr: int, nbytes: int, owner: object, *, written: bool) -> Buffer:
        """A buffer of memory that somebody else allocated, on this device; `owner` keeps it alive.

        `written`: whether it has contents that kernels may read. `release` the buffer when it is no longer used.
        """
        return Buffer(ptr, nbytes, owner)

    def release(self, buffer: Buffer) -> None:  # noqa: B027, most devices have nothing to end
        """End what `adopt` began."""

    def execute(self, launches: Sequence[Launch]) -> None:
        """Run launches that a `Recorder` has checked, after everything queued so far, and wait.

        Raises as `launch` and `synchronize`.
        """
        for launch in launches:
            self.launch(launch)
        self.synchronize()

    def read(self, src: Buffer, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        """Download into a new array and wait."""
        out = np.empty(shape, dtype)
        self.download(out, src)
        self.synchronize()
        return out

    def write(self, src: Array) -> Buffer:
        """A new buffer with a copy of `src`; waits, so that `src` may go."""
        src = np.ascontiguousarray(src)
        out = self.alloc(max(src.nbytes, 1))
        self.upload(out, src)
        self.synchronize()
        return out


# PTX parameter types -> the kinds of NumPy scalar they take.
_KINDS = {"f": "f", "u": "iu", "s": "iu", "b": "iuf"}


def check_args(kernel: Kernel, args: Sequence[Arg]) -> None:
    """Hold arguments against the parsed signature: their number, and each one's width and kind.

    A Python int would be widened to 64 bits by CuPy and shift all that follows it, so only NumPy scalars are let in.
    """
    if len(args) != len(kernel.params):
        names = ", ".join(p.name for p in kernel.params)
        raise PtxtrainError(f"{kernel.name} takes {len(kernel.params)} arguments ({names}), got {len(args)}")
    for arg, param in zip(args, kernel.params, strict=True):
        if isinstance(arg, Buffer):
            ok = param.size == 8 and param.type[0] in "ub"
        elif isinstance(arg, np.generic):
            ok = arg.dtype.itemsize == param.size and arg.dtype.kind in _KINDS[param.type[0]]
        else:
            ok = False
        if not ok:
            raise PtxtrainError(f"{kernel.name}: parameter {param.name} is .{param.type}, got {_described(arg)}")


def _described(arg: object) -> str:
    """What an argument that does not fit is; not made for those that do, since that takes longer than the check."""
    if isinstance(arg, Buffer):
        return "a buffer"
    if isinstance(arg, np.generic):
        return f"numpy.{arg.dtype}"
    return f"a Python {type(arg).__name__} (pass a NumPy scalar of the parameter's width)"


def check_launch(launch: Launch) -> None:
    """`check_args`, and that grid and block are within what CUDA allows."""
    check_args(launch.kernel, launch.args)
    gx, gy, gz = launch.grid
    bx, by, bz = launch.block
    if not (1 <= gx < 2**31 and 1 <= gy < 65536 and 1 <= gz < 65536):
        raise PtxtrainError(f"{launch.kernel.name}: grid {launch.grid} is outside 1..2^31-1 x 1..65535 x 1..65535")
    if min(bx, by, bz) < 1 or bx * by * bz > 1024 or bz > 64:
        raise PtxtrainError(f"{launch.kernel.name}: block {launch.block} is outside 1..1024 threads")
