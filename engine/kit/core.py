"""How a kit function runs: arrays held against its contract, put where they belong, kernels recorded and run, results given back.

A function of the kit is a contract and a recording of launches:

    def scaled(x, gamma, *, out=None):
        call = Call("scaled")
        x_ = call.input("x", x, ("...", "D"), FLOATS)             # binds D, the leading axes and the place
        gamma_ = call.input("gamma", gamma, ("D",), x_.dtype)     # held against them
        out_ = call.output("out", out, x_.shape, x_.dtype)        # the caller's, or a new one of the kind of x

        def record(rec: Recorder) -> None:
            ops.scaled.forward(rec, out_.buffer, x_.buffer, gamma_.buffer, rows=call.sizes.rows, width=call.sizes["D"])

        call.run(record)                                          # returns when the results are there
        return out_.result

`input` arrays are read, `output` arrays written, `state` arrays both. Letters of axes, dtypes and places are held against
each other in the order of the calls, so the first array decides. `buffer` may be used within `record` alone, and
`call.scratch(nbytes)` gives memory for as long as the call runs. Kernels take sizes of at least 1: with an axis of 0 a
function does not call `run`.

Where it runs: arrays of the host on the CPU device, arrays of a GPU on that GPU, and `PTXTRAIN_DEVICE=cpu` takes the CPU device
for those as well: they are copied to the host and the results back. With `PTXTRAIN_DEVICE=cuda` an array of the host is
an error. All arrays of a call lie in one place. Calls return when their results are there; on a GPU they wait for what the
caller's current stream has been given.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.device.choice import VARIABLE, open_device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit import arrays
from ptxtrain.engine.kit.arrays import Array, View
from ptxtrain.engine.kit.contracts import Axes, Sizes, bind, fail, one_of
from ptxtrain.engine.ops.checks import ITEM_SIZES

_lock = threading.Lock()
_devices: dict[int | None, Device] = {}
_chosen: ContextVar[Device | None] = ContextVar("ptxtrain_kit_device", default=None)


def device_of(gpu: int | None) -> Device:
    """The device that runs calls on arrays of a GPU, or (None) of the host; opened once."""
    chosen = _chosen.get()
    if chosen is not None and _gpu_of(chosen) == gpu:
        return chosen
    with _lock:
        if gpu not in _devices:
            _devices[gpu] = open_device("cpu")[0] if gpu is None else _open_cuda(gpu)
        return _devices[gpu]


def _gpu_of(device: Device) -> int | None:
    """The card that a device is; None for the CPU device."""
    return None if device.kind == "cpu" else int(device.card.index)  # type: ignore[attr-defined]


def _open_cuda(gpu: int) -> Device:
    from ptxtrain.engine.device.cuda import CudaDevice

    return CudaDevice(gpu)


@contextlib.contextmanager
def on(device: Device) -> Iterator[None]:
    """Run the calls within on this device: a `CpuDevice` takes those on arrays of the host, a `CudaDevice` those on its GPU's.

    It holds for the thread that it is used in. For another number of threads, or for the checked mode:
    `with kit.on(CpuDevice(checked=True)): ...`.
    """
    token = _chosen.set(device)
    try:
        yield
    finally:
        _chosen.reset(token)


class Argument:
    """An array of a call, held against its contract."""

    def __init__(self, name: str, view: View, *, read: bool, write: bool, made: bool = False) -> None:
        self.name, self.view, self.read, self.write, self.made = name, view, read, write, made
        self.shape, self.dtype, self.count = view.shape, view.dtype, math.prod(view.shape)
        self.nbytes = self.count * ITEM_SIZES[view.dtype]
        self.shares: tuple[str, ...] = ()
        self._buffer: Buffer | None = None
        self._like = view

    @property
    def buffer(self) -> Buffer:
        """The memory, while the call runs."""
        assert self._buffer is not None, f"{self.name} has a buffer within Call.run alone"
        return self._buffer

    @property
    def result(self) -> Array:
        """What the function returns for it: the array that was passed in, or the new one."""
        return arrays.returned(self._like, self.view.source) if self.made else self.view.source


class Call:
    """One call of the kit function `op`; see the module's text."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes = Sizes()
        self.arguments: list[Argument] = []
        self._device: Device | None = None
        self._forced = False

    # What the caller passed

    def input(self, name: str, array: Array, axes: Axes, dtypes: str | tuple[str, ...]) -> Argument:
        """An array that is read. `axes` are letters and numbers, `...` may stand first; see `contracts.bind`.

        Raises:
            ContractError: as every method here.
        """
        return self._take(name, array, axes, dtypes, read=True, write=False)

    def state(self, name: str, array: Array, axes: Axes, dtypes: str | tuple[str, ...]) -> Argument:
        """An array that is read and changed in place."""
        return self._take(name, array, axes, dtypes, read=True, write=True)

    def output(
        self, name: str, array: Array | None, shape: Axes, dtype: str | tuple[str, ...], *, shares: tuple[str, ...] = ()
    ) -> Argument:
        """An array that is written: the caller's, or for None a new one of the first array's kind.

        Args:
            shape: its axes; a new one needs numbers, or letters that are known.
            dtype: several for one that the caller may choose by what is passed; a new one has the first.
            shares: arguments whose memory it may be, so that the function works in place.
        """
        if array is not None:
            found = self._take(name, array, shape, dtype, read=False, write=True)
        else:
            assert self.arguments, "an output stands behind the inputs, whose kind it has"
            like = self.arguments[0].view
            sizes = tuple(
                n
                for a in shape
                for n in ((self.sizes.lead or ()) if a == "..." else (a if isinstance(a, int) else self.sizes[a],))
            )
            made = arrays.empty(self.op, name, like, sizes, dtype if isinstance(dtype, str) else dtype[0])
            found = Argument(name, arrays.view(self.op, name, made, self._stream), read=False, write=True, made=True)
            found._like = like
            self.arguments.append(found)
        found.shares = shares
        return found

    def look(self, name: str, array: Array) -> View:
        """An array whose kind and place alone matter."""
        return arrays.view(self.op, name, array, self._stream)

    def require(self, holds: bool, name: str, expected: str, got: object) -> None:
        """The rest of a contract: `call.require(m <= 4, "x", "at most 4 rows", m)`."""
        if not holds:
            fail(self.op, name, expected, str(got))

    def _take(
        self, name: str, array: Array, axes: Axes, dtypes: str | tuple[str, ...], *, read: bool, write: bool
    ) -> Argument:
        op = self.op
        view = arrays.view(op, name, array, self._stream)
        self._place(name, view)
        allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
        if view.dtype not in allowed:
            fail(op, name, f"dtype {one_of(allowed)}", view.dtype)
        bind(op, name, view.shape, axes, self.sizes)
        if view.strides is not None:
            fail(op, name, "a C-contiguous array", f"strides {view.strides} for shape {view.shape}")
        if view.ptr % ITEM_SIZES[view.dtype]:
            fail(op, name, f"numbers at multiples of their {ITEM_SIZES[view.dtype]} bytes", f"address {view.ptr:#x}")
        if write and not view.writable:
            fail(op, name, "an array that may be written", "a read-only one")
        found = Argument(name, view, read=read, write=write)
        self.arguments.append(found)
        return found

    # Where it runs

    def _stream(self, gpu: int) -> int:
        """The stream that reads a GPU's memory: 1 is the legacy default one, which copies to the host wait for."""
        return 1 if _cpu_is_forced() else device_of(gpu).stream

    def _place(self, name: str, view: View) -> None:
        if self.arguments:
            first = self.arguments[0]
            if first.view.gpu != view.gpu:
                fail(self.op, name, f"an array on {first.view.where}, where {first.name} is", f"one on {view.where}")
            return
        wanted = os.environ.get(VARIABLE) or "auto"
        if wanted == "cuda" and view.gpu is None:
            fail(self.op, name, f"an array on a GPU, since ${VARIABLE} is cuda", "one on the host")
        self._forced = view.gpu is not None and _cpu_is_forced()
        self._device = device_of(None if self._forced else view.gpu)

    @property
    def device(self) -> Device:
        """Where the call runs. Known once it has an array."""
        assert self._device is not None, "a call has no device before its first array"
        return self._device

    # Running

    def run(self, record: Callable[[Recorder], None]) -> None:
        """Record launches and run them; returns when the results are there.

        Raises:
            ContractError: an output shares memory with an argument that it may not share it with.
            PtxtrainError: an op refuses its sizes.
            DeviceError: the device failed.
        """
        self._check_overlaps()
        device = self.device
        hosts = {a.name: _to_host(a) for a in self.arguments} if self._forced else {}
        adopted = self._adopt(device, hosts)
        try:
            rec = Recorder(device)
            record(rec)
            device.execute(rec.take())
        finally:
            for buffer in adopted:
                device.release(buffer)
            for argument in self.arguments:
                argument._buffer = None
        for argument in self.arguments:
            if self._forced and argument.write:
                _to_gpu(argument, hosts[argument.name])

    def scratch(self, nbytes: int) -> Buffer:
        """Uninitialised device memory for this call."""
        return self.device.alloc(nbytes)

    def _check_overlaps(self) -> None:
        for a in self.arguments:
            if not a.write or not a.nbytes or a.made:
                continue
            for b in self.arguments:
                if (
                    b is a
                    or not b.nbytes
                    or not (a.view.ptr < b.view.ptr + b.nbytes and b.view.ptr < a.view.ptr + a.nbytes)
                ):
                    continue
                in_place = a.view.ptr == b.view.ptr and a.nbytes == b.nbytes
                if not (in_place and (b.name in a.shares or a.name in b.shares)):
                    may = f" (it may be {one_of(a.shares)} itself)" if a.shares else ""
                    fail(self.op, a.name, f"memory of its own{may}", f"memory that {b.name} has too")

    def _adopt(self, device: Device, hosts: dict[str, npt.NDArray[np.uint8]]) -> list[Buffer]:
        """Give every argument its buffer, in the host's copy where it has one. Arguments that share memory are views of one."""
        placed = []
        for a in self.arguments:
            host = hosts.get(a.name)
            placed.append((a.view.ptr if host is None else int(host.ctypes.data), a, host))
        placed.sort(key=lambda p: p[0])
        adopted: list[Buffer] = []
        i = 0
        while i < len(placed):
            first, end, j = placed[i][0], placed[i][0] + placed[i][1].nbytes, i + 1
            while j < len(placed) and placed[j][0] < end:
                end = max(end, placed[j][0] + placed[j][1].nbytes)
                j += 1
            group = placed[i:j]
            whole = device.adopt(first, end - first, group, written=any(a.read for _, a, _ in group))
            adopted.append(whole)
            for ptr, a, _ in group:
                a._buffer = whole.view(ptr - first, a.nbytes)
            i = j
        return adopted


def _cpu_is_forced() -> bool:
    return os.environ.get(VARIABLE) == "cpu"


def _to_host(argument: Argument) -> npt.NDArray[np.uint8]:
    """A copy of a GPU's array on the host; of one that is only written, memory for it."""
    host = np.empty(argument.nbytes, np.uint8)
    if argument.read and argument.nbytes:
        _copy(argument, int(host.ctypes.data), argument.view.ptr, to_host=True)
    return host


def _to_gpu(argument: Argument, host: npt.NDArray[np.uint8]) -> None:
    if argument.nbytes:
        _copy(argument, argument.view.ptr, int(host.ctypes.data), to_host=False)


def _copy(argument: Argument, dst: int, src: int, *, to_host: bool) -> None:
    from ptxtrain.engine.device.cuda_errors import explain, import_cupy

    cuda: Any = import_cupy().cuda
    kind = cuda.runtime.memcpyDeviceToHost if to_host else cuda.runtime.memcpyHostToDevice
    try:
        with cuda.Device(argument.view.gpu):
            cuda.runtime.memcpy(dst, src, argument.nbytes, kind)
    except Exception as error:
        raise explain(error, f"copying {argument.name} between the GPU and the host") from error
