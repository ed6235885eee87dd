"""Attention against float64: grouped queries, the causal mask, and gradients with one owner each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import attention

Float = npt.NDArray[Any]
HEADS = [(4, 2, 12), (3, 1, 32), (6, 2, 64), (2, 2, 80)]


def split(qkv: Float, heads: int, kv_heads: int) -> tuple[Float, Float, Float]:
    """q, k, v [B, H, T, C], keys and values repeated for each query head of their group."""
    x = qkv.transpose(0, 2, 1, 3)
    group = heads // kv_heads
    k, v = x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    return x[:, :heads], k.repeat(group, 1), v.repeat(group, 1)


def forward(qkv: Float, heads: int, kv_heads: int) -> tuple[Float, Float, Float]:
    """out [B, T, H, C], lse [B, H, T], probabilities; qkv [B, T, H + 2G, C]."""
    q, k, v = split(qkv, heads, kv_heads)
    context, kind = qkv.shape[1], qkv.dtype.type
    scores = q @ k.transpose(0, 1, 3, 2) * kind(1 / np.sqrt(qkv.shape[-1]))
    scores = np.where(np.tri(context, dtype=bool), scores, -np.inf).astype(qkv.dtype)
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    return ((e / total) @ v).transpose(0, 2, 1, 3), (top + np.log(total))[..., 0], e / total


def backward(qkv: Float, dout: Float, out: Float, heads: int, kv_heads: int) -> Float:
    """dqkv [B, T, H + 2G, C]; `out` as the forward pass stored it."""
    q, k, v = split(qkv, heads, kv_heads)
    p = forward(qkv, heads, kv_heads)[2]
    d, scale = dout.transpose(0, 2, 1, 3), qkv.dtype.type(1 / np.sqrt(qkv.shape[-1]))
    delta = (d * out.transpose(0, 2, 1, 3)).sum(-1, keepdims=True)
    ds = p * (d @ v.transpose(0, 1, 3, 2) - delta) * scale
    batch, _, context, channels = q.shape
    grouped = (batch, kv_heads, heads // kv_heads, context, channels)
    dk = (ds.transpose(0, 1, 3, 2) @ q).reshape(grouped).sum(2)
    dv = (p.transpose(0, 1, 3, 2) @ d).reshape(grouped).sum(2)
    return np.concatenate([ds @ k, dk, dv], 1).transpose(0, 2, 1, 3)


def attend(device: Device, qkv: Float, dout: Float, heads: int, kv_heads: int, dtype: str) -> dict[str, Float]:
    batch, context, _, head_dim = qkv.shape

    def record(rec: Recorder, b: Bench) -> None:
        sizes: dict[str, Any] = {"batch": batch, "context": context, "heads": heads}
        scratch = b.scratch(attention.scratch_bytes(**sizes))
        sizes |= {"kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
        x, lse = b.put(qkv, dtype), b.empty("lse", (batch, heads, context))
        out = b.empty("out", (batch, context, heads, head_dim), dtype)
        attention.forward(rec, out, lse, x, scratch, **sizes)
        attention.backward(rec, b.empty("dqkv", qkv.shape, dtype), b.put(dout, dtype), out, lse, x, scratch, **sizes)

    return run(device, record)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("context", [1, 9, 65])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_both_directions(device: Device, heads: int, kv_heads: int, head_dim: int, context: int, dtype: str) -> None:
    rng = np.random.default_rng(context)
    qkv = normal(rng, 2, context, heads + 2 * kv_heads, head_dim, dtype=dtype)
    dout = normal(rng, 2, context, heads, head_dim, dtype=dtype)
    found = attend(device, qkv, dout, heads, kv_heads, dtype)
    what = f"attention H {heads} G {kv_heads} C {head_dim} T {context} {dtype}"
    wide = qkv.astype(np.float64)
    exact, same = forward(wide, heads, kv_heads), forward(qkv, heads, kv_heads)
    check(f"{what} out", found["out"], exact[0], same[0], dtype=dtype)
    check(f"{what} lse", found["lse"], exact[1], same[1])
    stored = found["out"]
    dq = backward(wide, dout.astype(np.float64), stored.astype(np.float64), heads, kv_heads)
    # dS = P * (dP - delta) cancels where one key has all the weight; the floor is for that, in units of the largest.
    check(f"{what} dqkv", found["dqkv"], dq, backward(qkv, dout, stored, heads, kv_heads), dtype=dtype, floor=16)


def test_later_keys_do_not_reach_earlier_queries(device: Device) -> None:
    rng = np.random.default_rng(5)
    qkv, dout = normal(rng, 1, 65, 4, 32), normal(rng, 1, 65, 2, 32)
    first = attend(device, qkv, dout, 2, 1, "f32")
    qkv[0, 50:] = 100 * normal(rng, 15, 4, 32)
    second = attend(device, qkv, dout, 2, 1, "f32")
    same_bits("out before the change", second["out"][:, :50], first["out"][:, :50])
    assert (second["out"][:, 50:] != first["out"][:, 50:]).any()


def test_bits_do_not_depend_on_the_batch(device: Device) -> None:
    rng = np.random.default_rng(6)
    qkv, dout = normal(rng, 3, 40, 8, 12, dtype="bf16"), normal(rng, 3, 40, 4, 12, dtype="bf16")
    together = attend(device, qkv, dout, 4, 2, "bf16")
    for i in range(3):
        alone = attend(device, qkv[i : i + 1], dout[i : i + 1], 4, 2, "bf16")
        for name in ("out", "lse", "dqkv"):
            same_bits(f"sequence {i} {name}", alone[name], together[name][i : i + 1])


def test_refusals(device: Device) -> None:
    rec, x = Recorder(device), device.alloc(1 << 20)
    sizes: dict[str, Any] = {"batch": 1, "context": 4, "dtype": "f32"}
    with pytest.raises(PtxtrainError, match="4 query heads cannot share 3 key/value heads"):
        attention.forward(rec, x, x, x, x, **sizes, heads=4, kv_heads=3, head_dim=8)
    with pytest.raises(PtxtrainError, match="head_dim is 130, the naive kernels allow 128"):
        attention.forward(rec, x, x, x, x, **sizes, heads=4, kv_heads=2, head_dim=130)
    with pytest.raises(PtxtrainError, match="head_dim is 9, must be even"):
        attention.backward(rec, x, x, x, x, x, x, **sizes, heads=4, kv_heads=2, head_dim=9)
