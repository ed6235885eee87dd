"""The model: a pre-norm decoder with grouped-query attention, SwiGLU and a tied embedding, as lists of kernel launches.

All memory is taken when the model is made. The residual stream and its gradient stay f32; what lies between is f32 in
the way `f32` and bf16 in the ways `bf16` and `fast`. Gradients accumulate (+=) for parameters and are overwritten (=) for
activations. Each row of an activation is a function of its own sequence, and each gradient of a weight takes the rows
in order, starting at the sum so far: so the bits of both are the same whatever the number of sequences in a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.activations import activation_bytes, head_sequences
from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import (
    attention,
    cast,
    cross_entropy,
    embedding,
    flash_attention,
    loss_sum,
    matmul,
    rmsnorm,
    rope,
    swiglu,
)
from ptxtrain.engine.parameters import Flat, Tensor, parameter_count, parameter_table
from ptxtrain.engine.ways import resolve

I32: TypeAlias = npt.NDArray[np.int32]

__all__ = ["Flat", "Gradient", "Model", "Tensor", "Weights", "parameter_count", "parameter_table"]


@dataclass(frozen=True, slots=True)
class Weights:
    """What the kernels read: f32 for the embedding's gather and the norms; in the way's own dtype for the matmuls."""

    f32: Flat
    matrices: Flat  # the same buffer as `f32`, or the bf16 copies


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a backward pass adds to, all f32 and zeroed by the caller."""

    flat: Flat  # [parameters]
    gather: Buffer  # [V, D] the embedding gradient through the gather; joins flat["embedding"] at the leaf's end
    loss: Buffer  # [1] sum of the losses


class Model:
    """One micro-batch's activations and the launches over them.

    `record_…` put launches on a Recorder; the caller makes plans of them. Inputs lie in the buffers "tokens" and
    "targets" (i32 [B, T], a target below 0 is ignored), and for the backward "order" (i32 [N]) and "starts" (i32 [V +
    1]): the rows sorted by token, stable.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        device: Device,
        weights: Weights,
        *,
        micro_batch: int,
        way: str,
        backward: bool = True,
        z_loss: float = 0.0,
    ) -> None:
        """Take the memory. `backward=False`: for inference, one layer's buffers serve all. `z_loss` acts in training alone.

        Raises:
            PtxtrainError: the way is unknown, or asks for a kernel that does not take the model's shape.
        """
        self.cfg, self.weights, self.micro_batch, self.ways = cfg, weights, micro_batch, resolve(cfg, way)
        self.rows = micro_batch * cfg.context
        sizes = activation_bytes(cfg, micro_batch, self.ways, backward=backward)
        self.buffers: dict[str, Buffer] = {name: device.alloc(size) for name, size in sizes.items()}
        cos, sin = rope.tables(cfg.context, cfg.head_dim, cfg.rope_base)
        device.upload(self.buffers["cos"], cos)
        device.upload(self.buffers["sin"], sin)
        device.synchronize()
        self._backward, self.z_loss = backward, z_loss

    def __getitem__(self, name: str) -> Buffer:
        return self.buffers[name]

    def _layer(self, i: int) -> Callable[[str], Buffer]:
        prefix = f"layers.{i if self._backward else 0}."
        return lambda name: self.buffers[prefix + name]

    def _after(self, i: int) -> Buffer:
        """The residual stream that layer i leaves. Without backward there is one, which the layers overwrite in turn."""
        if i + 1 == self.cfg.layers:
            return self["x"]
        return self._layer(i + 1)("x")

    def record_forward(self, rec: Recorder, turned: Callable[[int, Buffer], None] | None = None) -> None:
        """tokens -> "final" [N, D], the normed output of the last layer.

        `turned(layer, qkv)` may record what is to be done with each layer's queries, keys and values once they are turned.
        """
        cfg, rows, dtype, f32 = self.cfg, self.rows, self.ways.dtype, self.weights.f32
        x, table = self._layer(0)("x"), f32["embedding"]
        embedding.forward(rec, x, self["tokens"], table, rows=rows, width=cfg.width, vocab=cfg.vocab_size)
        for i in range(cfg.layers):
            self._record_attention_forward(rec, i, turned)
            self._record_mlp_forward(rec, i)
        rmsnorm.forward(
            rec,
            self["final"],
            self["rstd"],
            self["x"],
            f32["final_norm"],
            rows=rows,
            width=cfg.width,
            eps=cfg.norm_eps,
            dtype=dtype,
        )

    def _record_attention_forward(
        self, rec: Recorder, i: int, turned: Callable[[int, Buffer], None] | None = None
    ) -> None:
        """middle = x + attention(rope(norm(x) Wqkv)) Wout"""
        cfg, rows, dtype, at = self.cfg, self.rows, self.ways.dtype, self._layer(i)
        heads_width = cfg.heads * cfg.head_dim
        qkv_width = heads_width + 2 * cfg.kv_heads * cfg.head_dim
        rmsnorm.forward(
            rec,
            at("normed_1"),
            at("rstd_1"),
            at("x"),
            self.weights.f32[f"layers.{i}.attention_norm"],
            rows=rows,
            width=cfg.width,
            eps=cfg.norm_eps,
            dtype=dtype,
        )
        self._matmul(rec, at("qkv"), at("normed_1"), f"layers.{i}.qkv", m=rows, n=qkv_width, k=cfg.width, layout="nn")
        self._rope(rec, at("qkv"))
        if turned is not None:
            turned(i, at("qkv"))
        out, lse, qkv = at("attention"), at("attention_lse"), at("qkv")
        if self.ways.attention == "fast":
            flash_attention.forward(rec, out, lse, qkv, **self._attention_shape())
        else:
            attention.forward(rec, out, lse, qkv, self["scratch"], **self._attention_shape(), dtype=dtype)
        self._matmul(
            rec,
            at("middle"),
            at("attention"),
            f"layers.{i}.attention_out",
            m=rows,
            n=cfg.width,
            k=heads_width,
            layout="nn",
            residual=at("x"),
        )

    def _record_mlp_forward(self, rec: Recorder, i: int) -> None:
        """next x = middle + swiglu(norm(middle) Wgate_up) Wdown"""
        cfg, rows, dtype, at = self.cfg, self.rows, self.ways.dtype, self._layer(i)
        rmsnorm.forward(
            rec,
            at("normed_2"),
            at("rstd_2"),
            at("middle"),
            self.weights.f32[f"layers.{i}.mlp_norm"],
            rows=rows,
            width=cfg.width,
            eps=cfg.norm_eps,
            dtype=dtype,
        )
        self._matmul(
            rec,
            at("gate_up"),
            at("normed_2"),
            f"layers.{i}.gate_up",
            m=rows,
            n=2 * cfg.mlp_width,
            k=cfg.width,
            layout="nn",
        )
        swiglu.forward(rec, at("mlp"), at("gate_up"), rows=rows, width=cfg.mlp_width, dtype=dtype)
        self._matmul(
            rec,
            self._after(i),
            at("mlp"),
            f"layers.{i}.mlp_down",
            m=rows,
            n=cfg.width,
            k=cfg.mlp_width,
            layout="nn",
            residual=at("middle"),
        )

    def record_head(
        self,
        rec: Recorder,
        loss: Buffer,  # [1] f32, starts at what it holds
        gradient: Gradient | None = None,
        scalars: Buffer | None = None,  # with `gradient`: scalars[GRAD_SCALE] multiplies the logits' gradient
    ) -> None:
        """final, targets -> the loss of each row and their sum; with `gradient` also "d_normed", the gradient of final,
        and the output layer's part of the embedding's gradient. In chunks of whole sequences, which changes no bits."""
        cfg, item = self.cfg, self.ways.item
        step = head_sequences(cfg, self.micro_batch, item)
        for first in range(0, self.micro_batch, step):
            rows = min(step, self.micro_batch - first) * cfg.context
            start = first * cfg.context

            def part(name: str, per_row: int, start: int = start, rows: int = rows) -> Buffer:
                return self[name].view(start * per_row, rows * per_row)

            final, targets, lse = part("final", cfg.width * item), part("targets", 4), part("lse", 4)
            logits = self["logits"].view(0, rows * cfg.vocab_size * item)
            self._matmul(rec, logits, final, "embedding", m=rows, n=cfg.vocab_size, k=cfg.width, layout="nt")
            self._record_loss(
                rec, part("loss", 4), lse, logits, targets, scalars if gradient is not None else None, rows=rows
            )
            if gradient is None:
                continue
            self._weight_gradient(rec, gradient, "embedding", logits, final, m=cfg.vocab_size, n=cfg.width, rows=rows)
            d_final = part("d_normed", cfg.width * item)
            self._matmul(rec, d_final, logits, "embedding", m=rows, n=cfg.width, k=cfg.vocab_size, layout="nn")
        loss_sum.accumulate(rec, loss, self["loss"], sequences=self.micro_batch, context=cfg.context)

    def _record_loss(
        self,
        rec: Recorder,
        loss: Buffer,
        lse: Buffer,
        logits: Buffer,
        targets: Buffer,
        scalars: Buffer | None,
        *,
        rows: int,
    ) -> None:
        """The losses of rows of logits; with `scalars` the logits become their gradient, which z-loss is part of."""
        vocab, dtype = self.cfg.vocab_size, self.ways.dtype
        z_loss = 0.0 if scalars is None else self.z_loss
        if self.ways.cross_entropy == "fast":
            cross_entropy.fused(rec, loss, lse, logits, targets, scalars, rows=rows, vocab=vocab, z_loss=z_loss)
            return
        cross_entropy.forward(rec, loss, lse, logits, targets, rows=rows, vocab=vocab, dtype=dtype, z_loss=z_loss)
        if scalars is not None:
            cross_entropy.backward(
                rec, logits, lse, targets, scalars, rows=rows, vocab=vocab, dtype=dtype, z_loss=z_loss
            )

    def record_backward(self, rec: Recorder, gradient: Gradient) -> None:
        """From "d_normed", which `record_head` leaves, through every layer to the embedding."""
        cfg = self.cfg
        self._norm_backward(rec, gradient, "final_norm", self["x"], self["rstd"], accumulate=False)
        for i in reversed(range(cfg.layers)):
            self._record_mlp_backward(rec, gradient, i)
            self._record_attention_backward(rec, gradient, i)
        embedding.backward(
            rec,
            gradient.gather,
            self["d_x"],
            self["order"],
            self["starts"],
            rows=self.rows,
            width=cfg.width,
            vocab=cfg.vocab_size,
        )

    def _record_mlp_backward(self, rec: Recorder, gradient: Gradient, i: int) -> None:
        cfg, rows, dtype, at, name = self.cfg, self.rows, self.ways.dtype, self._layer(i), f"layers.{i}."
        width, mlp = cfg.width, cfg.mlp_width
        d_branch = self._branch_gradient(rec)
        self._weight_gradient(rec, gradient, name + "mlp_down", at("mlp"), d_branch, m=mlp, n=width, rows=rows)
        self._matmul(rec, self["d_mlp"], d_branch, name + "mlp_down", m=rows, n=mlp, k=width, layout="nt")
        swiglu.backward(rec, self["d_gate_up"], self["d_mlp"], at("gate_up"), rows=rows, width=mlp, dtype=dtype)
        d_gate_up = self["d_gate_up"]
        self._weight_gradient(rec, gradient, name + "gate_up", at("normed_2"), d_gate_up, m=width, n=2 * mlp, rows=rows)
        self._matmul(rec, self["d_normed"], d_gate_up, name + "gate_up", m=rows, n=width, k=2 * mlp, layout="nt")
        self._norm_backward(rec, gradient, name + "mlp_norm", at("middle"), at("rstd_2"), accumulate=True)

    def _record_attention_backward(self, rec: Recorder, gradient: Gradient, i: int) -> None:
        cfg, rows, dtype, at, name = self.cfg, self.rows, self.ways.dtype, self._layer(i), f"layers.{i}."
        width, heads_width = cfg.width, cfg.heads * cfg.head_dim
        qkv_width = heads_width + 2 * cfg.kv_heads * cfg.head_dim
        d_branch, d_qkv = self._branch_gradient(rec), self["d_qkv"]
        self._weight_gradient(
            rec, gradient, name + "attention_out", at("attention"), d_branch, m=heads_width, n=width, rows=rows
        )
        d_out = self["d_attention"]
        self._matmul(rec, d_out, d_branch, name + "attention_out", m=rows, n=heads_width, k=width, layout="nt")
        out, lse, qkv, scratch = at("attention"), at("attention_lse"), at("qkv"), self["scratch"]
        if self.ways.attention == "fast":
            flash_attention.backward(rec, d_qkv, d_out, out, lse, qkv, scratch, **self._attention_shape())
        else:
            attention.backward(rec, d_qkv, d_out, out, lse, qkv, scratch, **self._attention_shape(), dtype=dtype)
        self._rope(rec, d_qkv, inverse=True)
        self._weight_gradient(rec, gradient, name + "qkv", at("normed_1"), d_qkv, m=width, n=qkv_width, rows=rows)
        self._matmul(rec, self["d_normed"], d_qkv, name + "qkv", m=rows, n=width, k=qkv_width, layout="nt")
        self._norm_backward(rec, gradient, name + "attention_norm", at("x"), at("rstd_1"), accumulate=True)

    def _attention_shape(self) -> dict[str, int]:
        cfg = self.cfg
        return {
            "batch": self.micro_batch,
            "context": cfg.context,
            "heads": cfg.heads,
            "kv_heads": cfg.kv_heads,
            "head_dim": cfg.head_dim,
        }

    def _branch_gradient(self, rec: Recorder) -> Buffer:
        """The residual gradient as a matmul's operand: itself, or rounded to bf16."""
        if self.ways.base == "f32":
            return self["d_x"]
        cast.to_bf16(rec, self["d_branch"], self["d_x"], count=self.rows * self.cfg.width)
        return self["d_branch"]

    def _norm_backward(
        self,
        rec: Recorder,
        gradient: Gradient,
        weight: str,
        x: Buffer,
        rstd: Buffer,
        *,
        accumulate: bool,
    ) -> None:
        """ "d_normed" -> "d_x" (+= or =) and the gradient of the norm's weight."""
        cfg, rows = self.cfg, self.rows
        rmsnorm.backward(
            rec,
            self["d_x"],
            self["norm_partial"],
            self["d_normed"],
            x,
            self.weights.f32[weight],
            rstd,
            rows=rows,
            width=cfg.width,
            context=cfg.context,
            dtype=self.ways.dtype,
            accumulate=accumulate,
        )
        parts = rmsnorm.parts(rows, cfg.context)
        rmsnorm.weight_gradient(rec, gradient.flat[weight], self["norm_partial"], parts=parts, width=cfg.width)

    def _matmul(
        self,
        rec: Recorder,
        out: Buffer,
        a: Buffer,
        weight: str,
        *,
        m: int,
        n: int,
        k: int,
        layout: str,
        residual: Buffer | None = None,
    ) -> None:
        """out = a @ weight, with its rows or columns summed over; in the way's dtype, or f32 where a residual is added."""
        matmul.run(
            rec,
            out,
            a,
            self.weights.matrices[weight],
            m=m,
            n=n,
            k=k,
            layout=layout,
            dtype=self.ways.dtype,
            out_dtype=self.ways.dtype if residual is None else "f32",
            residual=residual,
            way=self.ways.matmul,
        )

    def _weight_gradient(
        self,
        rec: Recorder,
        gradient: Gradient,
        weight: str,
        a: Buffer,
        b: Buffer,
        *,
        m: int,
        n: int,
        rows: int,
    ) -> None:
        """gradient[weight] [m, n] goes on with a[row, :]^T b[row, :] of each row in order."""
        matmul.gradient(
            rec,
            gradient.flat[weight],
            a,
            b,
            self["scratch"],
            m=m,
            n=n,
            rows=rows,
            context=self.cfg.context,
            dtype=self.ways.dtype,
            way=self.ways.matmul,
        )

    def _rope(self, rec: Recorder, qkv: Buffer, *, inverse: bool = False) -> None:
        cfg = self.cfg
        rope.apply(
            rec,
            qkv,
            self["cos"],
            self["sin"],
            rows=self.rows,
            context=cfg.context,
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            dtype=self.ways.dtype,
            inverse=inverse,
        )
