"""The model in NumPy float64, forward and a backward written by hand, sharing nothing with the engine but the layout of
parameters.

With `bf16=True` it rounds to bf16 at the points where the bf16 way does, and nowhere else: normed inputs, QKV (before
and after RoPE), attention output, gate/up, SwiGLU output, logits, each of their gradients, the residual gradient as a
matmul's operand, and the matrices as matmuls read them. The residual stream and its gradient, norm weights and the
gathered embedding are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.parameters import parameter_table

F64 = npt.NDArray[np.float64]


def to_bf16(x: F64) -> F64:
    """Rounded to f32, as a kernel computes it, then to bf16."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def unpack(flat: npt.NDArray[np.floating], cfg: ModelConfig) -> dict[str, F64]:
    """Tensors by name."""
    return {
        t.name: flat[t.offset : t.offset + t.size].astype(np.float64).reshape(t.shape) for t in parameter_table(cfg)
    }


def rope_angles(cfg: ModelConfig) -> tuple[F64, F64]:
    """cos and sin [T, C/2], rounded to f32 as the engine keeps them."""
    half = cfg.head_dim // 2
    angles = np.arange(cfg.context)[:, None] * cfg.rope_base ** (-2.0 * np.arange(half) / cfg.head_dim)[None, :]
    return np.cos(angles).astype(np.float32).astype(np.float64), np.sin(angles).astype(np.float32).astype(np.float64)


@dataclass
class Result:
    """Losses [B, T] in nats (0 where ignored), their gradient by tensor, and the logits [B, T, V]."""

    losses: F64
    gradients: dict[str, F64]
    logits: F64


class Float64Model:
    """One model's weights; call it on a batch."""

    def __init__(self, flat: npt.NDArray[np.floating], cfg: ModelConfig, *, bf16: bool = False) -> None:
        self.cfg = cfg
        self.w = unpack(flat, cfg)
        self.round: Callable[[F64], F64] = to_bf16 if bf16 else (lambda x: x)
        self.matrix = {name: self.round(w) if w.ndim == 2 else w for name, w in self.w.items()}
        self.cos, self.sin = rope_angles(cfg)

    # Parts. Activations are [B, T, …].

    def norm(self, x: F64, weight: F64) -> tuple[F64, F64]:
        rstd = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + self.cfg.norm_eps)
        return self.round(x * rstd * weight), rstd

    @staticmethod
    def norm_backward(dy: F64, x: F64, rstd: F64, weight: F64) -> tuple[F64, F64]:
        """d_x, d_weight"""
        xhat = x * rstd
        scaled = dy * weight
        d_x = rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdims=True))
        return d_x, (dy * xhat).sum((0, 1))

    def rotate(self, x: F64, sign: float) -> F64:
        """x [B, T, heads, C], pairs (k, k + C/2) turned by sign * angle[t, k]."""
        half = self.cfg.head_dim // 2
        a, b = x[..., :half], x[..., half:]
        cos, sin = self.cos[:, None, :], sign * self.sin[:, None, :]
        return self.round(np.concatenate([a * cos - b * sin, a * sin + b * cos], -1))

    def split(self, qkv: F64) -> tuple[F64, F64, F64]:
        """q [B, T, H, C], k and v [B, T, G, C]"""
        h, g, c = self.cfg.heads, self.cfg.kv_heads, self.cfg.head_dim
        parts = qkv.reshape(*qkv.shape[:2], h + 2 * g, c)
        return parts[:, :, :h], parts[:, :, h : h + g], parts[:, :, h + g :]

    def probabilities(self, q: F64, k: F64) -> F64:
        """softmax over the keys up to the query, [B, H, T, T]; query head h reads key head h // (H / G)"""
        group = self.cfg.heads // self.cfg.kv_heads
        scores = np.einsum("bthc,bshc->bhts", q, np.repeat(k, group, 2)) / np.sqrt(self.cfg.head_dim)
        t = scores.shape[-1]
        scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def attention_backward(self, dy: F64, y: F64, q: F64, k: F64, v: F64) -> F64:
        """d_qkv [B, T, (H + 2G) C] before the inverse rotation"""
        h, g, c = self.cfg.heads, self.cfg.kv_heads, self.cfg.head_dim
        b, t = dy.shape[:2]
        p = self.probabilities(q, k)
        dy, y = dy.reshape(b, t, h, c), y.reshape(b, t, h, c)
        vs, ks = np.repeat(v, h // g, 2), np.repeat(k, h // g, 2)
        dp = np.einsum("bthc,bshc->bhts", dy, vs)
        delta = (dy * y).sum(-1).transpose(0, 2, 1)[..., None]
        ds = p * (dp - delta) / np.sqrt(c)
        dq = np.einsum("bhts,bshc->bthc", ds, ks)
        dk = np.einsum("bhts,bthc->bshc", ds, q).reshape(b, t, g, h // g, c).sum(3)
        dv = np.einsum("bhts,bthc->bshc", p, dy).reshape(b, t, g, h // g, c).sum(3)
        return np.concatenate([dq.reshape(b, t, -1), dk.reshape(b, t, -1), dv.reshape(b, t, -1)], -1)

    def rotate_qk(self, qkv: F64, sign: float) -> F64:
        q, k, v = self.split(qkv)
        return np.concatenate([self.rotate(q, sign), self.rotate(k, sign), v], 2).reshape(qkv.shape)

    # The whole.

    def __call__(
        self,
        tokens: npt.NDArray[np.int32],  # [B, T]
        targets: npt.NDArray[np.int32],  # [B, T], below 0: ignored
        scale: float | None = None,  # of the losses in the gradient; 1 / targets by default
    ) -> Result:
        cfg, r, w, m = self.cfg, self.round, self.w, self.matrix
        kept = targets >= 0
        scale = 1.0 / kept.sum() if scale is None else scale
        x = w["embedding"][tokens]
        saved = []
        for i in range(cfg.layers):
            n = f"layers.{i}."
            x0 = x
            n1, r1 = self.norm(x0, w[n + "attention_norm"])
            qkv = self.rotate_qk(r(n1 @ m[n + "qkv"]), 1.0)
            q, k, v = self.split(qkv)
            p = self.probabilities(q, k)
            y = np.einsum("bhts,bshc->bthc", p, np.repeat(v, cfg.heads // cfg.kv_heads, 2))
            y = r(y.reshape(*tokens.shape, -1))
            mid = x0 + y @ m[n + "attention_out"]
            n2, r2 = self.norm(mid, w[n + "mlp_norm"])
            gu = r(n2 @ m[n + "gate_up"])
            gate, up = gu[..., : cfg.mlp_width], gu[..., cfg.mlp_width :]
            act = r(gate / (1.0 + np.exp(-gate)) * up)
            x = mid + act @ m[n + "mlp_down"]
            saved.append((x0, n1, r1, q, k, v, y, mid, n2, r2, gate, up, act))
        final, rf = self.norm(x, w["final_norm"])
        logits = r(final @ m["embedding"].T)
        top = logits.max(-1, keepdims=True)
        lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
        chosen = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)
        losses = np.where(kept, (lse - chosen)[..., 0], 0.0)

        g: dict[str, F64] = {}
        onehot = np.zeros_like(logits)
        np.put_along_axis(onehot, np.maximum(targets, 0)[..., None], 1.0, -1)
        d_logits = r(np.where(kept[..., None], (np.exp(logits - lse) - onehot) * scale, 0.0))
        head = np.einsum("btv,btd->vd", d_logits, final)
        d_x, g["final_norm"] = self.norm_backward(r(d_logits @ m["embedding"]), x, rf, w["final_norm"])
        for i in reversed(range(cfg.layers)):
            n = f"layers.{i}."
            x0, n1, r1, q, k, v, y, mid, n2, r2, gate, up, act = saved[i]
            branch = r(d_x)
            g[n + "mlp_down"] = np.einsum("bti,btj->ij", act, branch)
            d_act = r(branch @ m[n + "mlp_down"].T)
            sig = 1.0 / (1.0 + np.exp(-gate))
            d_gu = r(np.concatenate([d_act * up * sig * (1.0 + gate * (1.0 - sig)), d_act * gate * sig], -1))
            g[n + "gate_up"] = np.einsum("bti,btj->ij", n2, d_gu)
            d, g[n + "mlp_norm"] = self.norm_backward(r(d_gu @ m[n + "gate_up"].T), mid, r2, w[n + "mlp_norm"])
            d_x = d_x + d
            branch = r(d_x)
            g[n + "attention_out"] = np.einsum("bti,btj->ij", y, branch)
            d_y = r(branch @ m[n + "attention_out"].T)
            d_qkv = self.rotate_qk(r(self.attention_backward(d_y, y, q, k, v)), -1.0)
            g[n + "qkv"] = np.einsum("bti,btj->ij", n1, d_qkv)
            d, g[n + "attention_norm"] = self.norm_backward(r(d_qkv @ m[n + "qkv"].T), x0, r1, w[n + "attention_norm"])
            d_x = d_x + d
        gathered = np.zeros_like(head)
        np.add.at(gathered, tokens.reshape(-1), d_x.reshape(-1, cfg.width))
        g["embedding"] = head + gathered
        return Result(losses, g, logits)
