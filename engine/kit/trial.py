"""One small call of each function of the kit, at sizes that are no multiple of anything: what `ptxtrain kernels check` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ptxtrain.engine.kit.arrays import Array, numpy_dtype
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
