"""RoPE against float64, its inverse, and its tables against `math`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import rope

SHAPES = [(4, 2, 12), (3, 1, 32), (6, 2, 64), (2, 2, 80)]


def turned(qkv: npt.NDArray[Any], cos: npt.NDArray[Any], sin: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """qkv [B, T, heads, C] with its first `heads` heads turned."""
    half = qkv.shape[-1] // 2
    out = qkv.copy()
    x0, x1 = qkv[:, :, :heads, :half], qkv[:, :, :heads, half:]
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    out[:, :, :heads, :half] = x0 * c - x1 * s
    out[:, :, :heads, half:] = x1 * c + x0 * s
    return out


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("context", [1, 9, 65])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_apply(
    device: Device, heads: int, kv_heads: int, head_dim: int, context: int, dtype: str, inverse: bool
) -> None:
    batch = 2
    shape = (batch, context, heads + 2 * kv_heads, head_dim)
    qkv = normal(np.random.default_rng(context), *shape, dtype=dtype)
    cos, sin = rope.tables(context, head_dim, 10_000.0)

    def record(rec: Recorder, b: Bench) -> None:
        buffers = (b.put(qkv, dtype, name="qkv"), b.put(cos), b.put(sin))
        sizes = {"context": context, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        rope.apply(rec, *buffers, rows=batch * context, **sizes, dtype=dtype, inverse=inverse)

    found = run(device, record)["qkv"]
    sign = -1 if inverse else 1
    exact = turned(qkv.astype(np.float64), cos.astype(np.float64), sign * sin.astype(np.float64), heads + kv_heads)
    what = f"rope.apply H {heads} G {kv_heads} C {head_dim} T {context} {dtype} inverse {inverse}"
    check(what, found, exact, turned(qkv, cos, sign * sin, heads + kv_heads), dtype=dtype)
    same_bits(f"{what} values", found[:, :, heads + kv_heads :], qkv[:, :, heads + kv_heads :])


def test_tables_are_float64_math_rounded_once() -> None:
    cos, sin = rope.tables(300, 12, 10_000.0)
    assert cos.shape == sin.shape == (300, 6) and cos.dtype == np.float32
    for position, pair in ((0, 0), (1, 0), (299, 0), (123, 5)):
        angle = position * 10_000.0 ** (-2 * pair / 12)
        assert cos[position, pair] == np.float32(math.cos(angle)) and sin[position, pair] == np.float32(math.sin(angle))


def test_odd_head_is_refused() -> None:
    with pytest.raises(PtxtrainError, match="head_dim is 7, must be even"):
        rope.tables(4, 7, 10_000.0)
