"""The CUDA device, over CuPy: one non-blocking stream, PTX through `RawModule`, plans as captured CUDA graphs.

Two things are CUDA's own. Work that the GPU has been given cannot be taken back, so `interrupt` drops only kernels
queued after it (copies still happen, so that a read is never stale memory of the host's), and `synchronize` waits for the
rest; that is short, at most the launches of a step. And an error shows at the
next call that waits, without the kernel's name; after most of them the context is lost, and every later call raises the
same `DeviceError`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptxtrain.engine import memory
from ptxtrain.engine.device import cuda_errors as errors
from ptxtrain.engine.device.base import (
    Arg,
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
from ptxtrain.engine.device.cuda_errors import MINIMUM_CAPABILITY, NoCuda, Version, explain
from ptxtrain.engine.errors import DeviceError, OutOfMemory, PtxtrainError
from ptxtrain.engine.ptxcpu.tree import Module

# Not CuPy's or the driver's doing: our own refusals, and our own mistakes, which are to be seen as such.
_OWN = (PtxtrainError, AssertionError, AttributeError, ImportError, NameError, TypeError)


@dataclass(frozen=True)
class Card:
    """A GPU that the driver shows. `memory` is in bytes."""

    index: int
    name: str
    capability: Version
    memory: int


def cards(cupy: Any) -> list[Card]:
    """Every GPU, in CUDA's order.

    Raises:
        NoCuda: no driver, a broken one, one that is too old for CuPy, or no GPU.
    """
    runtime = cupy.cuda.runtime
    driver = errors.split_version(runtime.driverGetVersion())
    if driver == (0, 0):
        raise errors.no_driver()
    built = errors.split_version(runtime.runtimeGetVersion())
    if driver[0] < built[0]:
        raise errors.too_old(driver, built)
    try:
        found = []
        for index in range(runtime.getDeviceCount()):
            properties = runtime.getDeviceProperties(index)
            name = properties["name"]
            capability = cupy.cuda.Device(index).compute_capability  # "80", "120"
            found.append(
                Card(
                    index,
                    name.decode(errors="replace") if isinstance(name, bytes) else str(name),
                    (int(capability[:-1]), int(capability[-1])),
                    int(properties["totalGlobalMem"]),
                )
            )
    except Exception as error:
        raise NoCuda(*errors.describe(error, "looking for GPUs")) from error
    if not found:
        raise NoCuda(
            "the NVIDIA driver sees no GPU", "check `nvidia-smi` and $CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return found


class CudaEvent(Event):
    """A CUDA event; waiting blocks the thread rather than spinning, a core is worth more than the delay."""

    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device, self._event = device, event

    def done(self) -> bool:
        with self._device.calling("asking whether the GPU is done"):
            return bool(self._event.done)

    def wait(self) -> None:
        with self._device.calling("waiting for the GPU"):
            self._event.synchronize()

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return self._device.seconds_between(earlier._event, self._event)


class CudaPlan(Plan):
    """`graph` is None when the plan is empty or capture was refused; then `calls` are made one by one."""

    def __init__(self, launches: tuple[Launch, ...], graph: Any | None) -> None:
        self.launches = launches
        self.graph = graph


class CudaDevice(Device):
    """See `base.Device` and the module's text.

    Args:
        index: the card, as the driver counts (after `CUDA_VISIBLE_DEVICES`); None takes the first that is good enough.

    Raises:
        DeviceError: CuPy, driver or card are missing, broken, too old or too weak; the line says which.
    """

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        self._cupy = errors.import_cupy()
        runtime = self._cupy.cuda.runtime
        found = cards(self._cupy)
        if index is not None and not 0 <= index < len(found):
            raise DeviceError(f"there is no GPU {index}: the driver shows {len(found)}, counted from 0")
        wanted = found if index is None else [found[index]]
        self.card = next((card for card in wanted if card.capability >= MINIMUM_CAPABILITY), wanted[0])
        if self.card.capability < MINIMUM_CAPABILITY:
            raise errors.too_weak(self.card.name, self.card.capability)
        self.name = self.card.name
        self.driver = errors.split_version(runtime.driverGetVersion())
        self.runtime = errors.split_version(runtime.runtimeGetVersion())
        self._files: dict[Path, tuple[Module, Any]] = {}
        self._kernels: dict[tuple[Path, str], Kernel] = {}
        self._lost: str | None = None  # the error that the context was lost with
        self._dropping = False
        self._last = "nothing"  # the last kernel queued, for messages
        self._capture_refused = False
        try:
            self._device = self._cupy.cuda.Device(self.card.index)
            with self._device:
                self._stream = self._cupy.cuda.Stream(non_blocking=True)
                if (cap := memory.limit()) is not None:
                    self._cupy.get_default_memory_pool().set_limit(size=cap)
                limit = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, self.card.index)
                self._shared_limit = int(limit)
        except Exception as error:
            raise explain(error, f"opening {self.card.name}") from error

    @contextlib.contextmanager
    def calling(self, doing: str) -> Iterator[None]:
        """Make CuPy calls on this device's stream; what they raise becomes a `DeviceError` that says `doing` what."""
        if self._lost is not None:
            raise DeviceError(self._lost)
        try:
            with self._device, self._stream:
                yield
        except _OWN:
            raise
        except Exception as error:
            failure = explain(error, doing)
            if errors.is_sticky(error):
                self._lost = f"{failure} [last kernel queued: {self._last}]"
                raise DeviceError(self._lost) from error
            raise failure from error

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """Between two of CuPy's events that have happened."""
        with self.calling("asking the GPU for times"):
            return float(self._cupy.cuda.get_elapsed_time(earlier, later)) / 1000

    def free_memory(self) -> int | None:
        pool = self._cupy.get_default_memory_pool()
        with self.calling("asking how much memory is free"):
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            free += pool.free_bytes()
        cap = memory.limit()
        return int(free if cap is None else min(free, cap - pool.used_bytes()))

    def alloc(self, nbytes: int) -> Buffer:
        with self.calling("allocating"):
            try:
                memory = self._cupy.cuda.alloc(max(nbytes, 1))
            except Exception as error:
                if not errors.is_out_of_memory(error):
                    raise
                free, total = self._cupy.cuda.runtime.memGetInfo()
                raise OutOfMemory(
                    f"out of memory on {self.name}: {_mib(nbytes)} wanted, {_mib(free)} free of {_mib(total)}; "
                    "use a smaller micro_batch, or free memory that other programs hold (`nvidia-smi`)"
                ) from error
        return Buffer(int(memory.ptr), nbytes, memory)

    @property
    def stream(self) -> int:
        return int(self._stream.ptr)

    def adopt(self, ptr: int, nbytes: int, owner: object, *, written: bool) -> Buffer:
        memory = self._cupy.cuda.UnownedMemory(ptr, nbytes, owner, self.card.index)
        return Buffer(ptr, nbytes, self._cupy.cuda.MemoryPointer(memory, 0))

    def pinned(self, nbytes: int) -> Array:
        if nbytes == 0:
            return np.empty(0, np.uint8)
        with self.calling(f"allocating {_mib(nbytes)} of pinned host memory"):
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
            return np.frombuffer(memory, np.uint8, nbytes)  # keeps `memory` alive

    def upload(self, dst: Buffer, src: Array) -> None:
        _check_copy("upload", src, dst)
        if src.nbytes:
            with self.calling("copying to the GPU"):
                _pointer(dst).copy_from_host_async(src.ctypes.data, src.nbytes, stream=self._stream)

    def download(self, dst: Array, src: Buffer) -> None:
        _check_copy("download", dst, src)
        if not dst.flags.writeable:
            raise PtxtrainError("download needs an array that can be written")
        if dst.nbytes:
            with self.calling("copying from the GPU"):
                _pointer(src).copy_to_host_async(dst.ctypes.data, dst.nbytes, stream=self._stream)

    def fill(self, dst: Buffer, byte: int) -> None:
        if not 0 <= byte <= 255:
            raise PtxtrainError(f"fill sets bytes to 0 … 255, not {byte}")
        if dst.nbytes:
            with self.calling("filling memory"):
                _pointer(dst).memset_async(byte, dst.nbytes, stream=self._stream)

    def copy(self, dst: Buffer, src: Buffer, nbytes: int) -> None:
        """Queue a copy of the first `nbytes` of `src` to the start of `dst`, within the GPU's memory."""
        assert 0 < nbytes <= min(dst.nbytes, src.nbytes), (nbytes, dst.nbytes, src.nbytes)
        with self.calling("copying within the GPU"):
            _pointer(dst).copy_from_device_async(_pointer(src), nbytes, stream=self._stream)

    def cublas(self) -> Any:
        """CuPy's functions of cuBLAS.

        Raises:
            ImportError: the library is not installed.
        """
        return self._cupy.cuda.cublas

    def load(self, path: Path, entry: str) -> Kernel:
        path = Path(path).resolve()
        if (path, entry) not in self._kernels:
            self._kernels[path, entry] = self._load(path, entry)
        return self._kernels[path, entry]

    def _file(self, path: Path) -> tuple[Module, Any]:
        """A file's syntax tree and CuPy module, each made once: one file may have many entries."""
        from ptxtrain.engine.ptxcpu.parser import parse_file

        found = self._files.get(path)
        if found is None:
            tree = parse_file(path)
            needed = errors.cuda_of_ptx(tree.version)
            if self.driver < needed:
                raise DeviceError(
                    "NVIDIA driver too old for the PTX: {} is PTX {}.{}, from CUDA {}.{}, and the driver supports CUDA "
                    "{}.{}; update the driver ({})".format(
                        path, *tree.version, *needed, *self.driver, errors.DRIVERS_URL
                    )
                )
            target = int("".join(c for c in tree.target if c.isdigit()) or 0)
            if target > 10 * self.card.capability[0] + self.card.capability[1]:
                raise DeviceError(f"{path} is written for {tree.target}; {self.name} is {self._sm()}")
            found = self._files[path] = tree, self._cupy.RawModule(path=str(path))
        return found

    def _load(self, path: Path, entry: str) -> Kernel:
        from ptxtrain.engine.device.jit_log import jit_log

        tree, module = self._file(path)
        function = tree.entry(entry)
        with self.calling(f"loading {path}"):
            try:
                handle = module.get_function(entry)
                threads = handle.max_threads_per_block  # the module is loaded here, not at the first launch
            except Exception as error:
                if log := jit_log(path):
                    raise DeviceError(f"{path} cannot be loaded: {log} [{errors.first_line(error)}]") from error
                raise
        params = tuple(Param(p.name, p.type, p.nbytes) for p in function.params)
        return Kernel(entry, params, path, _Loaded(handle, int(threads), int(handle.shared_size_bytes)))

    def launch(self, launch: Launch) -> None:
        self._check(launch)
        if not self._dropping:
            with self.calling(f"launching {launch.kernel.name}"):
                self._queue(launch)

    def plan(self, launches: Sequence[Launch]) -> Plan:
        launches = tuple(launches)
        for launch in launches:
            self._check(launch)
        graph = None
        if launches and not self._capture_refused:
            with self.calling(f"capturing {len(launches)} launches into a graph"):
                graph = self._capture(launches)
        return CudaPlan(launches, graph)

    def run(self, plan: Plan) -> None:
        assert isinstance(plan, CudaPlan), plan
        if not plan.launches or self._dropping:
            return
        with self.calling(f"running a plan of {len(plan.launches)} launches"):
            if plan.graph is None:
                for launch in plan.launches:
                    self._queue(launch)
            else:
                plan.graph.launch(stream=self._stream)
                self._last = f"a plan that ends with {plan.launches[-1].kernel.name}"

    def record(self) -> Event:
        with self.calling("recording an event"):
            event = self._cupy.cuda.Event(block=True, disable_timing=False)
            event.record(self._stream)
        return CudaEvent(self, event)

    def synchronize(self) -> None:
        self._dropping = False
        with self.calling("waiting for the GPU"):
            self._stream.synchronize()

    def interrupt(self) -> None:
        """Drop the kernels queued from now until `synchronize`; the GPU finishes what it has. Safe in a signal handler."""
        self._dropping = True

    def numerics_id(self) -> str:
        # The driver's assembler turns PTX into machine code; other than that only the chip's generation can show in the bits.
        return "cuda {} ({}), driver for CUDA {}.{}".format(self.name, self._sm(), *self.driver)

    def _sm(self) -> str:
        return f"sm_{self.card.capability[0]}{self.card.capability[1]}"

    def _check(self, launch: Launch) -> None:
        """`check_launch`, and what this card and the kernel's registers allow."""
        check_launch(launch)
        kernel, loaded = launch.kernel, launch.kernel.handle
        assert isinstance(loaded, _Loaded), f"{kernel.name} was not loaded by this device"
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        if threads > loaded.max_threads:
            raise PtxtrainError(
                f"{kernel.name}: a block of {threads} threads; its registers allow {loaded.max_threads} on {self.name}"
            )
        if launch.shared + loaded.static_shared > self._shared_limit:
            raise PtxtrainError(
                f"{kernel.name} needs {(launch.shared + loaded.static_shared) / 1024:g} KiB of shared memory per block; "
                f"{self.name} allows {self._shared_limit / 1024:g} KiB. Use a smaller tile or head_dim."
            )
        if launch.shared > loaded.dynamic_shared:
            # Up to 48 KiB need no leave; above that the kernel's limit must be raised once.
            with self.calling(f"preparing {kernel.name}"):
                if launch.shared > loaded.function.max_dynamic_shared_size_bytes:
                    loaded.function.max_dynamic_shared_size_bytes = launch.shared
            loaded.dynamic_shared = launch.shared

    def _queue(self, launch: Launch) -> None:
        self._last = launch.kernel.name
        launch.kernel.handle.function(
            launch.grid, launch.block, tuple(_packed(arg) for arg in launch.args), shared_mem=launch.shared
        )

    def _capture(self, launches: tuple[Launch, ...]) -> Any | None:
        """A graph of `launches`, or None, with a note, where capture is refused."""
        try:
            self._stream.begin_capture()
            try:
                for launch in launches:
                    self._queue(launch)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._stream.end_capture()  # the stream must leave capture; the first error is the one to tell
                raise
            return self._stream.end_capture()
        except Exception as error:
            if not errors.is_capture_refused(error):
                raise
            self._capture_refused = True
            print(
                f"note: {self.name} refuses CUDA graphs ({errors.first_line(error)}): kernels are launched one by one, "
                "with the same results, more slowly",
                file=sys.stderr,
            )
            return None


@dataclass
class _Loaded:
    """A CuPy kernel with its limits. `dynamic_shared` is the largest size that it has been prepared for."""

    function: Any
    max_threads: int
    static_shared: int
    dynamic_shared: int = 0


def _packed(arg: Arg) -> np.generic:
    return np.uint64(arg.ptr) if isinstance(arg, Buffer) else arg


def _pointer(buffer: Buffer) -> Any:
    """CuPy's pointer to the start of a buffer or view."""
    owner: Any = buffer.owner
    return owner + (buffer.ptr - int(owner.ptr))


def _check_copy(verb: str, host: Array, buffer: Buffer) -> None:
    if not host.flags.c_contiguous:
        raise PtxtrainError(f"{verb} needs a C-contiguous array, got strides {host.strides}")
    if host.nbytes > buffer.nbytes:
        raise PtxtrainError(f"{verb} of {host.nbytes} bytes does not fit a buffer of {buffer.nbytes}")


def _mib(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):,.1f} MiB"
