"""A Llama-style model written from kit calls alone: forward, backward, and AdamW over two parameter groups.

Parameters have the engine's names and layout, so that gradients can be compared number by number. Activations are f32, or with
dtype "bf16" rounded where the engine's way `bf16` rounds: residual stream, norm weights and all gradients of weights stay f32.
What is not a call of the kit is NumPy moving or rounding numbers: reshapes, transposes, casts, slices. The embedding's gather and
scatter are products with one-hot rows, which are exact.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ptxtrain.engine import kit
from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.parameters import matrix_count, parameter_table

Array = npt.NDArray[Any]
IGNORED = -1  # as in the engine's batches


class KitModel:
    """`flat` holds every parameter, `grads` their gradients, both f32 in the engine's layout."""

    def __init__(self, cfg: ModelConfig, flat: Array, dtype: str) -> None:
        self.cfg, self.flat = cfg, flat.copy()
        self.grads, self.m, self.v = (np.zeros_like(flat) for _ in range(3))
        self.kind: Any = np.float32 if dtype == "f32" else ml_dtypes.bfloat16
        self.table = parameter_table(cfg)
        self.split = matrix_count(self.table)
        self.copy = None if dtype == "f32" else self.flat[: self.split].astype(self.kind)
        self.cos, self.sin = kit.rope_tables(cfg.context, cfg.head_dim, base=cfg.rope_base)

    # Parameters and casts

    def tensor(self, flat: Array, name: str) -> Array:
        """A view of one tensor."""
        t = next(t for t in self.table if t.name == name)
        return flat[t.offset : t.offset + t.size].reshape(t.shape)

    def matrix(self, name: str) -> Array:
        """A matrix as the products read it."""
        return self.tensor(self.flat if self.copy is None else self.copy, name)

    def columns(self, name: str, first: int, last: int) -> Array:
        """Neighbouring columns of a matrix, which are its weights for one product."""
        return np.ascontiguousarray(self.matrix(name)[:, first:last])

    def narrow(self, x: Array) -> Array:
        return np.ascontiguousarray(x).astype(self.kind)

    @staticmethod
    def wide(x: Array) -> Array:
        return np.ascontiguousarray(x).astype(np.float32)

    def norm(self, x: Array, name: str) -> tuple[Array, Array]:
        out, rstd = kit.rmsnorm_forward(x, self.tensor(self.flat, name), eps=self.cfg.norm_eps)
        return self.narrow(out), rstd

    def norm_backward(self, x: Array, name: str, dout: Array, rstd: Array) -> Array:
        dgamma = self.tensor(self.grads, name)
        gamma = self.tensor(self.flat, name)
        return kit.rmsnorm_backward(x, gamma, self.wide(dout), rstd, accumulate=True, dgamma=dgamma)[0]

    def add_gradient(self, name: str, x: Array, dout: Array) -> None:
        """The gradient of a matrix: += x^T dout over all rows."""
        kit.gemm(x, dout, layout="tn", beta=1, out=self.tensor(self.grads, name))

    def heads(self, x: Array) -> Array:
        """[B, T, heads * C] -> [B, heads, T, C]"""
        b, t, width = x.shape
        return np.ascontiguousarray(
            x.reshape(b, t, width // self.cfg.head_dim, self.cfg.head_dim).transpose(0, 2, 1, 3)
        )

    def rows(self, x: Array) -> Array:
        """[B, heads, T, C] -> [B, T, heads * C]"""
        b, heads, t, c = x.shape
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(b, t, heads * c)

    # A block

    def block_forward(self, i: int, x: Array) -> tuple[Array, dict[str, Array]]:
        """x + attention(norm(x)), then + mlp(norm(.)); and what the backward pass needs."""
        cfg, name = self.cfg, f"layers.{i}."
        q_end, k_end = cfg.heads * cfg.head_dim, (cfg.heads + cfg.kv_heads) * cfg.head_dim
        keep = {"x": x}
        keep["normed_1"], keep["rstd_1"] = self.norm(x, name + "attention_norm")
        qkv = kit.gemm(keep["normed_1"], self.matrix(name + "qkv"))
        keep["q"] = kit.rope_forward(self.heads(qkv[..., :q_end]), self.cos, self.sin)
        keep["k"] = kit.rope_forward(self.heads(qkv[..., q_end:k_end]), self.cos, self.sin)
        keep["v"] = self.heads(qkv[..., k_end:])
        keep["out"], keep["lse"] = kit.attention_forward(keep["q"], keep["k"], keep["v"])
        keep["rows"] = self.rows(keep["out"])
        middle = keep["middle"] = kit.gemm(keep["rows"], self.matrix(name + "attention_out"), beta=1, out=x.copy())
        keep["normed_2"], keep["rstd_2"] = self.norm(middle, name + "mlp_norm")
        keep["gate"] = kit.gemm(keep["normed_2"], self.columns(name + "gate_up", 0, cfg.mlp_width))
        keep["up"] = kit.gemm(keep["normed_2"], self.columns(name + "gate_up", cfg.mlp_width, 2 * cfg.mlp_width))
        keep["act"] = kit.swiglu_forward(keep["gate"], keep["up"])
        return kit.gemm(keep["act"], self.matrix(name + "mlp_down"), beta=1, out=middle.copy()), keep

    def block_backward(self, i: int, dx: Array, keep: dict[str, Array]) -> Array:
        """From the gradient of what the block leaves to that of what it took; gradients of weights are added."""
        name = f"layers.{i}."
        branch = self.narrow(dx)
        self.add_gradient(name + "mlp_down", keep["act"], branch)
        dact = kit.gemm(branch, self.matrix(name + "mlp_down"), layout="nt")
        dgate, dup = kit.swiglu_backward(keep["gate"], keep["up"], dact)
        dboth = np.concatenate([dgate, dup], -1)
        self.add_gradient(name + "gate_up", keep["normed_2"], dboth)
        dnormed = kit.gemm(dboth, self.matrix(name + "gate_up"), layout="nt")
        dx = dx + self.norm_backward(keep["middle"], name + "mlp_norm", dnormed, keep["rstd_2"])
        branch = self.narrow(dx)
        self.add_gradient(name + "attention_out", keep["rows"], branch)
        dout = self.heads(kit.gemm(branch, self.matrix(name + "attention_out"), layout="nt"))
        dq, dk, dv = kit.attention_backward(keep["q"], keep["k"], keep["v"], keep["out"], dout, keep["lse"])
        dq, dk = (kit.rope_backward(x, self.cos, self.sin) for x in (dq, dk))
        dqkv = np.concatenate([self.rows(x) for x in (dq, dk, dv)], -1)
        self.add_gradient(name + "qkv", keep["normed_1"], dqkv)
        dnormed = kit.gemm(dqkv, self.matrix(name + "qkv"), layout="nt")
        return dx + self.norm_backward(keep["x"], name + "attention_norm", dnormed, keep["rstd_1"])

    # A step

    def gradient(self, tokens: Array, targets: Array) -> float:
        """Add every gradient of the mean loss over the targets that count to `grads`, and return that loss."""
        count = int((targets != IGNORED).sum())
        hot = np.eye(self.cfg.vocab_size, dtype=np.float32)[tokens]
        x = kit.gemm(hot, self.tensor(self.flat, "embedding"))
        kept = []
        for i in range(self.cfg.layers):
            x, keep = self.block_forward(i, x)
            kept.append(keep)
        final, rstd = self.norm(x, "final_norm")
        logits = kit.gemm(final, self.matrix("embedding"), layout="nt")
        loss, _, dlogits = kit.cross_entropy(logits, targets, scale=1 / count, ignore_index=IGNORED, dlogits=logits)
        self.add_gradient("embedding", dlogits, final)
        dx = self.norm_backward(x, "final_norm", kit.gemm(dlogits, self.matrix("embedding")), rstd)
        for i in reversed(range(self.cfg.layers)):
            dx = self.block_backward(i, dx, kept[i])
        kit.gemm(hot, dx, layout="tn", beta=1, out=self.tensor(self.grads, "embedding"))
        return float(loss.sum(dtype=np.float64)) / count

    def update(self, step: int, lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
        """AdamW, one call to each group: matrices, which decay and have copies, and norm weights."""
        b1, b2 = betas
        numbers = {"lr": lr, "bc1": 1 - b1**step, "bc2": 1 - b2**step, "beta1": b1, "beta2": b2, "eps": eps}
        for part, weight_decay, copy in (
            (slice(0, self.split), decay, self.copy),
            (slice(self.split, None), 0.0, None),
        ):
            state = (self.flat[part], self.m[part], self.v[part], self.grads[part])
            kit.adamw_step(*state, **numbers, weight_decay=weight_decay, copy=copy)
        self.grads[:] = 0
