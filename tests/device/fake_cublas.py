"""`cupy.cuda.cublas` on the CPU, as far as products of brain floats need it; columns first, like the real one."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fake_cupy import State


class Cublas:
    """Its functions and constants. A product is computed when the stream gets to it."""

    CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
    CUBLAS_POINTER_MODE_HOST = 0
    CUBLAS_COMPUTE_32F = 68
    CUBLAS_GEMM_DEFAULT = -1

    def __init__(self, state: State) -> None:
        self._state = state
        self._streams: dict[int, int] = {}
        self._modes: dict[int, int] = {}

    def create(self) -> int:
        handle = 1 + max(self._streams, default=0)
        self._streams[handle] = 0
        return handle

    def setStream(self, handle: int, stream: int) -> None:
        assert handle in self._streams and type(stream) is int
        self._streams[handle] = stream

    def setPointerMode(self, handle: int, mode: int) -> None:
        assert handle in self._streams and type(mode) is int
        self._modes[handle] = mode

    def destroy(self, handle: int) -> None:
        del self._streams[handle]

    def gemmEx(
        self,
        handle: int,
        transa: int,
        transb: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        A: int,
        Atype: int,
        lda: int,
        B: int,
        Btype: int,
        ldb: int,
        beta: int,
        C: int,
        Ctype: int,
        ldc: int,
        computeType: int,
        algo: int,
    ) -> None:
        numbers = (transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, computeType, algo)
        assert all(type(number) is int for number in numbers), "CuPy takes Python ints here"
        stream = self._state.current[-1]
        assert self._streams[handle] == stream.ptr, "cuBLAS works on another stream"
        assert self._modes[handle] == self.CUBLAS_POINTER_MODE_HOST and (Atype, Btype, computeType) == (14, 14, 68)
        one, zero = (ctypes.cast(p, ctypes.POINTER(ctypes.c_float))[0] for p in (alpha, beta))
        assert (one, zero) == (1.0, 0.0)
        rows_a, rows_b = (m if transa == 0 else k), (k if transb == 0 else n)
        assert lda >= rows_a and ldb >= rows_b and ldc >= m, "a leading dimension is too small"

        def bf16(address: int, columns: int, ld: int) -> np.ndarray[Any, Any]:
            bits = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16)), (columns, ld))
            return (bits.astype(np.uint32) << 16).view(np.float32).T  # [ld, columns], as cuBLAS sees it

        def execute() -> None:
            a = bf16(A, k if transa == 0 else m, lda)[:rows_a]
            b = bf16(B, n if transb == 0 else k, ldb)[:rows_b]
            product = ((a if transa == 0 else a.T) @ (b if transb == 0 else b.T)).T  # [n, m]
            if Ctype == 0:
                np.ctypeslib.as_array(ctypes.cast(C, ctypes.POINTER(ctypes.c_float)), (n, ldc))[:, :m] = product
            else:
                assert Ctype == 14
                bits = np.ascontiguousarray(product, np.float32).view(np.uint32) >> 16
                np.ctypeslib.as_array(ctypes.cast(C, ctypes.POINTER(ctypes.c_uint16)), (n, ldc))[:, :m] = bits

        stream.put("gemm", execute)
