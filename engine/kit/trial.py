"""One small call of each function of the kit, at sizes that are no multiple of anything: what `ptxtrain kernels check` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ptxtrain.engine.kit.arrays import Array, numpy_dtype
from ptxtrain.engine.kit.attention import attention_backward, attention_forward
from ptxtrain.engine.kit.cross_entropy import cross_entropy
from ptxtrain.engine.kit.fused import fused_layernorm_gemv, fused_rmsnorm_gemv
from ptxtrain.engine.kit.gemm import gemm
from ptxtrain.engine.kit.norms import layernorm_backward, layernorm_forward, rmsnorm_backward, rmsnorm_forward
from ptxtrain.engine.kit.optimizer import adamw_step
from ptxtrain.engine.kit.pointwise import swiglu_backward, swiglu_forward
from ptxtrain.engine.kit.rope import rope_backward, rope_forward, rope_tables
from ptxtrain.engine.kit.softmax import softmax_backward, softmax_forward

Trial = tuple[str, Callable[[], object]]


def numbers(dtype: str, *shape: int) -> Array:
    """Numbers of a dtype, the same ones every time.

    Raises:
        ModuleNotFoundError: bf16 without `ml_dtypes`.
    """
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(numpy_dtype(dtype))


def trials(dtype: str) -> Iterator[Trial]:
    """What to run for a dtype, and what to call it."""
    yield "norms", lambda: _norms(dtype)
    yield "rope", lambda: _rope(dtype)
    yield "swiglu", lambda: _swiglu(dtype)
    yield "softmax", lambda: softmax_backward(softmax_forward(numbers(dtype, 5, 135)), numbers(dtype, 5, 135))
    yield "adamw_step", lambda: _adamw(dtype)
    yield "gemm", lambda: _gemm(dtype)
    yield "attention", lambda: _attention(dtype)
    yield "cross_entropy", lambda: _cross_entropy(dtype)
    yield "fused norm and gemv", lambda: _fused(dtype)


def _norms(dtype: str) -> None:
    x, gamma = numbers(dtype, 37, 135), numbers(dtype, 135)
    rmsnorm_backward(x, gamma, x, rmsnorm_forward(x, gamma)[1])
    _, mean, rstd = layernorm_forward(x, gamma, gamma)
    layernorm_backward(x, gamma, x, mean, rstd)


def _rope(dtype: str) -> None:
    x, tables = numbers(dtype, 1, 2, 3, 70), rope_tables(3, 70)
    rope_backward(rope_forward(x, *tables), *tables)


def _swiglu(dtype: str) -> None:
    gate, up = numbers(dtype, 517), numbers(dtype, 517)
    swiglu_backward(gate, up, swiglu_forward(gate, up))


def _adamw(dtype: str) -> None:
    grads, m, v = numbers(dtype, 261), np.zeros(261, np.float32), np.zeros(261, np.float32)
    copy = None if dtype == "f32" else numbers(dtype, 261)
    adamw_step(numbers("f32", 261), m, v, grads, lr=0.1, bc1=0.1, bc2=0.1, copy=copy)
    if dtype == "bf16":
        adamw_step(numbers(dtype, 261), m, v, grads, lr=0.1, bc1=0.1, bc2=0.1, seed=1, step=1)


def _gemm(dtype: str) -> None:
    """Rows that the tensor cores take, and rows that they do not."""
    out = gemm(numbers(dtype, 37, 40), numbers(dtype, 40, 72), bias=numbers("f32", 72))
    gemm(numbers(dtype, 37, 40), numbers(dtype, 40, 72), alpha=0.5, beta=1, out=out)
    gemm(numbers(dtype, 40, 37), numbers(dtype, 33, 40), layout="tt", bias=numbers("f32", 33))


def _attention(dtype: str) -> None:
    """What the flash kernels take, and what they do not."""
    for width, causal in ((32, True), (6, False)):
        q, k, v = (numbers(dtype, 1, heads, 37, width) for heads in (2, 1, 1))
        out, lse = attention_forward(q, k, v, causal=causal)
        attention_backward(q, k, v, out, out, lse, causal=causal)


def _cross_entropy(dtype: str) -> None:
    targets = np.array([0, 134, -100], np.int32)
    cross_entropy(numbers(dtype, 3, 135), targets)
    cross_entropy(numbers(dtype, 3, 135), targets.astype(np.int64), gradient=False)


def _fused(dtype: str) -> None:
    x, gamma = numbers(dtype, 3, 40), numbers(dtype, 40)
    fused_rmsnorm_gemv(x, gamma, numbers(dtype, 40, 37))
    fused_layernorm_gemv(x, gamma, gamma, numbers(dtype, 37, 40), layout="nk")
