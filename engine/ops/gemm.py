"""The kit's matrix product: all four layouts, a scale, a bias and a residual, results in f32, f16 or bf16.

f16 and bf16 operands go to the tensor cores (`matmul.ptx`) where rows allow copies of 16 bytes, everything else to `gemm.ptx`,
f32 multiply-adds that take any stride and alignment. Both add each output in ascending k from zero, the tensor cores in steps
of 16, and round once, so that no bit depends on the device's number of threads, on the tile or on a batch.
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import matmul
from ptxtrain.engine.ops.checks import holds, require, sizes
from ptxtrain.ptx import gemm_spec, matmul_spec
from ptxtrain.ptx.gemm_spec import Epilogue

LAYOUTS = ("nn", "nt", "tn", "tt")
DTYPES = ("f32", "f16", "bf16")


def run(
    rec: Recorder,
    out: Buffer,  # [M, N] out_dtype
    a: Buffer,  # [M, K] dtype, or [K, M] for "tn" and "tt"
    b: Buffer,  # [K, N] dtype, or [N, K] for "nt" and "tt"
    residual: Buffer | None = None,  # [M, N] out_dtype, may be out
    bias: Buffer | None = None,  # [N] bias_dtype
    *,
    m: int,
    n: int,
    k: int,
    layout: str,
    dtype: str,
    out_dtype: str,
    alpha: float = 1.0,
    bias_dtype: str = "f32",
    way: str | None = None,
) -> None:
    """out = alpha * (a @ b) + bias + residual, the sums in f32, rounded once.

    `way`: "fast" for the tensor cores, "f32" for multiply-adds; None takes the tensor cores where `obstacle` finds nothing.

    Raises:
        PtxtrainError: a buffer is too small, a dtype or layout is unknown, or (fast) there is an obstacle.
    """
    op = "gemm.run"
    sizes(op, m=m, n=n, k=k)
    require(op, layout in LAYOUTS, f'layout is "{layout}", must be one of {", ".join(LAYOUTS)}')
    for name, value in (("dtype", dtype), ("out_dtype", out_dtype), ("bias_dtype", bias_dtype)):
        require(op, value in DTYPES, f'{name} is "{value}", must be one of {", ".join(DTYPES)}')
    for name, buffer, count, of in (("out", out, m * n, out_dtype), ("a", a, m * k, dtype), ("b", b, k * n, dtype)):
        holds(op, name, buffer, count, of)
    if residual is not None:
        holds(op, "residual", residual, m * n, out_dtype)
    if bias is not None:
        holds(op, "bias", bias, n, bias_dtype)
    lda, ldb = (m if layout[0] == "t" else k), (k if layout[1] == "t" else n)
    why = obstacle(out, a, b, residual, dtype=dtype, n=n, lda=lda, ldb=ldb)
    epilogue, null = Epilogue(out_dtype, bias_dtype), np.uint64(0)
    buffers = (out, a, b, null if residual is None else residual, null if bias is None else bias)
    if way == "fast" or (way is None and why is None):
        require(op, why is None, f"the tensor cores do not take this: {why}")
        spec = matmul_spec.choose(layout, dtype, m, n, table=matmul.table(rec), epilogue=epilogue)
        numbers = map(np.uint32, (m, n, k, lda, ldb, n, k, 0, out_dtype != "f32"))
        kernel = rec.ptx("matmul", spec=spec)
        shared = spec.shared_bytes
        rec.launch(
            kernel, spec.grid(m, n), spec.block, *buffers, *numbers, np.float32(alpha), np.uint32(0), shared=shared
        )
        return
    plain = gemm_spec.choose(layout, dtype, dtype, epilogue, gpu=rec.device.kind != "cpu")
    numbers = map(np.uint32, (m, n, k, lda, ldb, n, 0, 0, 0, 1))
    rec.launch(rec.ptx("gemm", spec=plain), plain.grid(m, n), plain.block, *buffers, *numbers, np.float32(alpha))


def batched(
    rec: Recorder,
    out: Buffer,  # [batch, M, ldo] out_dtype, the first N of each row
    a: Buffer,  # [batch, M, lda] a_dtype, or [batch, K, lda] for "tn"
    b: Buffer,  # [batch / group, K, ldb] b_dtype, or [batch / group, N, ldb] for "nt"
    *,
    batch: int,
    group: int,
    m: int,
    n: int,
    k: int,
    strides: tuple[int, int, int],  # of rows of out, a, b in elements
    layout: str,
    a_dtype: str,
    b_dtype: str,
    out_dtype: str,
    alpha: float = 1.0,
) -> None:
    """out[z] = alpha * (a[z] @ b[z / group]) for each product of a batch, in f32 multiply-adds.

    Raises:
        PtxtrainError: a buffer is too small.
    """
    op = "gemm.batched"
    sizes(op, batch=batch, group=group, m=m, n=n, k=k)
    ldo, lda, ldb = strides
    a_rows, b_rows = (k if layout[0] == "t" else m), (n if layout[1] == "t" else k)
    require(op, max(m * ldo, a_rows * lda, b_rows * ldb) < 2**32, "a matrix has more than 2^32 numbers")
    holds(op, "out", out, batch * m * ldo, out_dtype)
    holds(op, "a", a, batch * a_rows * lda, a_dtype)
    holds(op, "b", b, batch // group * b_rows * ldb, b_dtype)
    spec = gemm_spec.choose(layout, a_dtype, b_dtype, Epilogue(out_dtype), gpu=rec.device.kind != "cpu")
    null = np.uint64(0)
    numbers = map(np.uint32, (m, n, k, lda, ldb, ldo, a_rows * lda, b_rows * ldb, m * ldo, group))
    rec.launch(
        rec.ptx("gemm", spec=spec), spec.grid(m, n, batch), spec.block, out, a, b, null, null, *numbers,
        np.float32(alpha),
    )  # fmt: skip


def obstacle(
    out: Buffer, a: Buffer, b: Buffer, residual: Buffer | None, *, dtype: str, n: int, lda: int, ldb: int
) -> str | None:
    """Why the tensor cores do not take a product, or None if they do."""
    if dtype == "f32":
        return "f32 has no tensor core that keeps its 24 bits"
    if why := matmul.obstacle(out=n, a=lda, b=ldb):
        return why
    for name, buffer in (("out", out), ("a", a), ("b", b), ("residual", residual)):
        if buffer is not None and buffer.ptr % 16:
            return f"{name} is not aligned to 16 bytes"
    return None
