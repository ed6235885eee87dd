"""Attention and cross-entropy in float64 NumPy: what the check of the fast kernels calls exact."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F64: TypeAlias = npt.NDArray[np.float64]


def attention_exact(
    qkv: F64,  # [B, T, H + 2G, C]
    dout: F64,  # [B, T, H, C]
    heads: int,
    kv_heads: int,
) -> tuple[F64, F64, F64]:
    """out [B, T, H, C], lse [B, H, T] and dqkv [B, T, H + 2G, C] of causal attention; query head h reads head h // (H / G)."""
    group = heads // kv_heads
    q, k, v = (x.transpose(0, 2, 1, 3) for x in np.split(qkv, [heads, heads + kv_heads], axis=2))
    d = dout.transpose(0, 2, 1, 3)
    shared_k, shared_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = 1.0 / np.sqrt(qkv.shape[-1])
    scores = q @ shared_k.transpose(0, 1, 3, 2) * scale
    scores = np.where(np.tri(qkv.shape[1], dtype=bool), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    total = np.exp(scores - top).sum(-1, keepdims=True)
    lse = top + np.log(total)
    p = np.exp(scores - lse)
    out = p @ shared_v
    dp = d @ shared_v.transpose(0, 1, 3, 2)
    ds = p * (dp - (d * out).sum(-1, keepdims=True)) * scale
    shape = (qkv.shape[0], kv_heads, group, *q.shape[2:])
    dk = (ds.transpose(0, 1, 3, 2) @ q).reshape(shape).sum(2)
    dv = (p.transpose(0, 1, 3, 2) @ d).reshape(shape).sum(2)
    dqkv = np.concatenate([ds @ shared_k, dk, dv], axis=1).transpose(0, 2, 1, 3)
    return out.transpose(0, 2, 1, 3), lse[..., 0], dqkv


def cross_entropy_exact(
    logits: F64,  # [N, V]
    targets: npt.NDArray[np.int32],  # [N], below 0: ignored
    scale: float,
    z_loss: float,
) -> tuple[F64, F64, F64]:
    """loss [N], lse [N] and the gradient [N, V] by the logits, times scale."""
    top = logits.max(-1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    kept, rows = targets >= 0, np.arange(len(targets))
    loss = np.where(kept, lse - logits[rows, np.maximum(targets, 0)] + z_loss * lse * lse, 0.0)
    gradient = np.exp(logits - lse[:, None]) * (1.0 + 2.0 * z_loss * lse)[:, None]
    gradient[rows[kept], targets[kept]] -= 1.0
    gradient[~kept] = 0.0
    return loss, lse, gradient * scale
