"""An array that has DLPack and nothing else: what a library that the kit does not know hands out."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU, CUDA, PINNED, ROCM, MANAGED = 1, 2, 3, 10, 13
CODES = {"f": 2, "i": 0, "u": 1, "c": 5}


class Tensor(ctypes.Structure):
    """`DLManagedTensor`."""

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
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


class Exported:
    """A NumPy array's memory behind `__dlpack__` alone.

    Args:
        array: whose memory it is.
        device: what DLPack calls its place; the memory is the host's whatever this says.
        with_strides: whether strides are given for an array in C order too.
        byte_offset: of the memory behind `data`.
        fleeting: whether the memory is gone, which shows as its being NaN, when the capsule is let go of.
    """

    def __init__(
        self, array: Any, device: int = CPU, *, with_strides: bool = True, byte_offset: int = 0, fleeting: bool = False
    ) -> None:
        self.fleeting = fleeting
        self.array, self.device, self.with_strides, self.byte_offset = array, device, with_strides, byte_offset
        self.streams: list[int | None] = []  # that were asked for
        self.alive = 0  # capsules that nobody has let go of
        self._keep: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        array = self.array
        n = array.ndim
        shape = (ctypes.c_int64 * n)(*array.shape)
        strides = (ctypes.c_int64 * n)(*(s // array.itemsize for s in array.strides))
        code = 4 if array.dtype.name == "bfloat16" else CODES[array.dtype.kind]
        deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(0)
        tensor = Tensor(
            *(array.ctypes.data - self.byte_offset, self.device, 0, n, code, 8 * array.itemsize, 1, shape),
            *(strides if self.with_strides else None, self.byte_offset, None, deleter),
        )
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def destroyed(_capsule: int) -> None:
            self.alive -= 1
            if self.fleeting:
                array.fill(np.nan)

        self._keep += [shape, strides, tensor, destroyed]
        self.alive += 1
        return new(ctypes.addressof(tensor), b"dltensor", ctypes.cast(destroyed, ctypes.c_void_p))


class Namespaced(Exported):
    """One of a library that follows the array API standard and takes arrays back."""

    def __array_namespace__(self) -> Any:
        class Library:
            @staticmethod
            def from_dlpack(array: Any) -> Namespaced:
                return Namespaced(np.from_dlpack(array))

        return Library
