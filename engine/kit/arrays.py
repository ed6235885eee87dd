"""The arrays that the kit takes, looked at without a copy, and new ones of the same kind.

NumPy (bf16 is the dtype of `ml_dtypes`), CuPy, and whatever else has DLPack: PyTorch tensors, JAX arrays, … Memory is
reached by its address; a DLPack capsule is read, not consumed, and kept as long as the view of it is. No library is imported
that the caller has not imported already.

Source: the DLPack ABI, version 0.8 (`DLManagedTensor`), and "Python Specification for DLPack".
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ptxtrain.engine.kit.contracts import fail

# What may be passed: anything that `view` can read. There is no common type.
Array = Any

_NUMPY = {
    np.dtype(np.float16): "f16",
    np.dtype(np.float32): "f32",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
}
_HOST_DEVICES, _GPU_DEVICES = (1, 3), (2, 13)  # kDLCPU, kDLCUDAHost; kDLCUDA, kDLCUDAManaged
_DLPACK = {(2, 16): "f16", (2, 32): "f32", (4, 16): "bf16", (0, 32): "i32", (0, 64): "i64"}  # (code, bits)
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class View(NamedTuple):  # a frozen dataclass takes a microsecond longer to make
    """An array's memory. `gpu` is the card's number, None on the host; `owner` keeps the memory; `strides` count elements,
    None when the array is C-contiguous."""

    kind: str  # "numpy", "cupy", "torch" or "other"
    ptr: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None
    writable: bool
    gpu: int | None
    owner: object
    source: Array

    @property
    def where(self) -> str:
        return "the host" if self.gpu is None else f"GPU {self.gpu}"


def view(op: str, name: str, array: Array, stream_of: Callable[[int], int]) -> View:
    """Look at an array.

    Args:
        op: the function that was given it, for errors.
        name: the argument's name.
        array: NumPy, CuPy, or anything with `__dlpack__`.
        stream_of: the CUDA stream that will read the memory of a GPU: work on it waits for what the producer has queued.

    Raises:
        ContractError: it is no array, not in the memory of a CPU or an NVIDIA GPU, or its library does not hand it out.
    """
    if isinstance(array, np.ndarray):
        return _numpy(array)
    if _module(array) == "cupy" and hasattr(array, "__cuda_array_interface__"):
        return _cupy(array)
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(array, torch.Tensor)
    if not hasattr(array, "__dlpack__"):
        fail(op, name, "an array (NumPy, CuPy, or one with DLPack such as a PyTorch tensor)", f"{type(array).__name__}")
    try:
        tensor = array.detach() if is_torch else array
        device, index = (int(n) for n in tensor.__dlpack_device__())
        if device not in (*_HOST_DEVICES, *_GPU_DEVICES):
            fail(op, name, "memory of the host or of an NVIDIA GPU", f"DLPack device {device}")
        on_gpu = device in _GPU_DEVICES
        capsule = tensor.__dlpack__(stream=stream_of(index)) if on_gpu else tensor.__dlpack__()
    except (BufferError, RuntimeError, TypeError) as error:
        fail(op, name, "an array that DLPack can hand out", f"{type(array).__name__}: {error}")
    kind = "torch" if is_torch else "other"
    return _dlpack(op, name, array, capsule, kind, index if on_gpu else None)


def _module(array: Array) -> str:
    return type(array).__module__.partition(".")[0]


def _dtype(dtype: Any) -> str:
    """Our name of a NumPy dtype, or NumPy's where we have none."""
    return _NUMPY.get(dtype) or ("bf16" if dtype.name == "bfloat16" else str(dtype))


def _numpy(array: Any) -> View:
    flags = array.flags
    strides = None if flags.c_contiguous else tuple(s // max(array.itemsize, 1) for s in array.strides)
    ptr = array.__array_interface__["data"][0]
    return View("numpy", ptr, array.shape, _dtype(array.dtype), strides, flags.writeable, None, array, array)


def _cupy(array: Any) -> View:
    # What is queued on the caller's stream comes first; the kit's own stream does not wait for others.
    sys.modules["cupy"].cuda.get_current_stream().synchronize()
    strides = None if array.flags.c_contiguous else tuple(s // max(array.itemsize, 1) for s in array.strides)
    return View(
        "cupy", int(array.data.ptr), array.shape, _dtype(array.dtype), strides, True, int(array.device.id), array, array
    )


class _DLTensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _dlpack(op: str, name: str, array: Array, capsule: object, kind: str, gpu: int | None) -> View:
    try:
        address = _pointer(capsule, b"dltensor")
    except ValueError as error:
        fail(op, name, 'a DLPack capsule called "dltensor"', str(error))
    tensor = _DLTensor.from_address(address)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    if strides is not None and (0 in shape or is_contiguous(shape, strides)):
        strides = None
    known = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    dtype = known or f"{_CODES.get(tensor.code, 'dtype ')}{tensor.bits}"
    # DLPack before 1.0 has no flag for memory that may not be written: producers refuse to hand it out.
    return View(
        kind, (tensor.data or 0) + tensor.byte_offset, shape, dtype, strides, True, gpu, (capsule, array), array
    )


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie one after the other in C order; strides of axes of size 1 say nothing."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def numpy_dtype(dtype: str) -> Any:
    """The NumPy dtype of one of ours.

    Raises:
        ModuleNotFoundError: bf16 without `ml_dtypes`.
    """
    if dtype == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return next(known for known, ours in _NUMPY.items() if ours == dtype)


def empty(op: str, name: str, like: View, shape: tuple[int, ...], dtype: str) -> Array:
    """A new array of the kind and at the place of `like`; its contents are undefined.

    For a kind that is neither NumPy, CuPy nor PyTorch it is NumPy's or CuPy's, and `returned` makes the caller's of it.
    """
    if like.kind == "torch":
        torch = sys.modules["torch"]
        names = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "i32": "int32", "i64": "int64"}
        return torch.empty(shape, dtype=getattr(torch, names[dtype]), device=like.source.device)
    try:
        kind = like.source.dtype if like.kind == "numpy" and like.dtype == dtype else numpy_dtype(dtype)
    except ModuleNotFoundError:
        fail(op, name, "the package ml_dtypes, which gives NumPy bf16 (pip install ml_dtypes)", "no such package")
    if like.gpu is None:
        return np.empty(shape, kind)
    import cupy

    with cupy.cuda.Device(like.gpu):
        return cupy.empty(shape, kind)


def copied(like: View, host: Any) -> Array:
    """A NumPy array's numbers as an array of the kind and at the place of `like`."""
    if like.kind == "torch":
        return sys.modules["torch"].from_numpy(host).to(like.source.device)
    if like.gpu is None:
        return returned(like, host)
    import cupy

    with cupy.cuda.Device(like.gpu):
        return returned(like, cupy.asarray(host))


def returned(like: View, array: Array) -> Array:
    """What `empty` made, as an array of the library that `like` is from, where that is known to import it."""
    if like.kind != "other":
        return array
    space = like.source.__array_namespace__() if hasattr(like.source, "__array_namespace__") else None
    take = getattr(space, "from_dlpack", None)
    try:
        return array if take is None else take(array)
    except (BufferError, RuntimeError, TypeError):  # bf16 from NumPy, which does not export it
        return array
