"""One more token for each of a few texts: the model by kernels for few rows, over a cache of keys and values.

A step is one plan. What changes from step to step, the tokens and their positions, lies in a small buffer on the device, so
that a GPU replays one graph. A text's logits have the same bits whatever texts are beside it, and however often it is read
again; read as a whole by `inference.Inference` they are the same within rounding, because tensor cores add in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.inference import Inference, RopeTables, record_head
from ptxtrain.engine.init import F32
from ptxtrain.engine.kernels import Override, Recorder
from ptxtrain.engine.kvcache import KvCache
from ptxtrain.engine.model import Weights
from ptxtrain.engine.ops import attention_decode, embedding, kv_append, norm_gemv, swiglu
from ptxtrain.engine.ways import resolve
from ptxtrain.ptx.gemv_spec import MOST_ROWS

__all__ = ["MOST_ROWS", "Decoder"]


class Decoder:
    """Up to `MOST_ROWS` texts that grow token by token, at most T tokens each.

    `read` starts a text, or several with the same one; `step` adds a token to each. All memory but that of the windows that
    `read` needs is taken when it is made.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        device: Device,
        weights: Weights,
        *,
        way: str,
        sequences: int = 1,
        overrides: Mapping[str, Override] | None = None,
    ) -> None:
        assert 1 <= sequences <= MOST_ROWS, sequences
        self.cfg, self.sequences = cfg, sequences
        self._device, self._weights, self._ways = device, weights, resolve(cfg, way)
        self._lengths = [0] * sequences
        self._cache = KvCache(cfg, device, sequences=sequences, dtype=self._ways.dtype)
        self._tables = RopeTables(cfg, device)
        self._inference = Inference(
            cfg, device, weights, way=way, overrides=overrides, cache=self._cache, tables=self._tables
        )
        self._take_memory()
        rec = Recorder(device, overrides=overrides)
        self._record(rec)
        self._plan = rec.plan()

    def _take_memory(self) -> None:
        cfg, rows, item, alloc = self.cfg, self.sequences, self._ways.item, self._device.alloc
        heads_width = cfg.heads * cfg.head_dim
        self._numbers = alloc(4 * 2 * rows)  # tokens, then positions, i32
        self._x = alloc(4 * rows * cfg.width)  # the residual stream, which each layer adds to in place
        self._qkv = alloc(item * rows * (heads_width + 2 * cfg.kv_heads * cfg.head_dim))
        self._attention = alloc(item * rows * heads_width)
        self._gate_up = alloc(item * rows * 2 * cfg.mlp_width)
        self._mlp = alloc(item * rows * cfg.mlp_width)
        self._logits = alloc(4 * rows * cfg.vocab_size)

    def _record(self, rec: Recorder) -> None:
        cfg, rows, dtype = self.cfg, self.sequences, self._ways.dtype
        tokens, positions = self._numbers.view(0, 4 * rows), self._numbers.view(4 * rows, 4 * rows)
        embedding.forward(
            rec, self._x, tokens, self._weights.f32["embedding"], rows=rows, width=cfg.width, vocab=cfg.vocab_size
        )
        for i in range(cfg.layers):
            keys, values = self._cache.layer(i)
            self._product(rec, self._qkv, self._x, f"layers.{i}.qkv", norm=f"layers.{i}.attention_norm")
            kv_append.run(
                rec,
                self._qkv,
                keys,
                values,
                self._tables.cos,
                self._tables.sin,
                positions,
                rows=rows,
                per_sequence=1,
                context=cfg.context,
                heads=cfg.heads,
                kv_heads=cfg.kv_heads,
                head_dim=cfg.head_dim,
                dtype=dtype,
            )
            attention_decode.run(
                rec,
                self._attention,
                self._qkv,
                keys,
                values,
                positions,
                batch=rows,
                context=cfg.context,
                heads=cfg.heads,
                kv_heads=cfg.kv_heads,
                head_dim=cfg.head_dim,
                dtype=dtype,
            )
            self._product(rec, self._x, self._attention, f"layers.{i}.attention_out")
            self._product(rec, self._gate_up, self._x, f"layers.{i}.gate_up", norm=f"layers.{i}.mlp_norm")
            swiglu.forward(rec, self._mlp, self._gate_up, rows=rows, width=cfg.mlp_width, dtype=dtype)
            self._product(rec, self._x, self._mlp, f"layers.{i}.mlp_down")
        record_head(rec, self._logits, self._x, self._weights, cfg, self._ways, rows=rows)

    def _product(self, rec: Recorder, out: Buffer, x: Buffer, weight: str, norm: str | None = None) -> None:
        """out = norm(x) @ weight with a norm; without one, out, the residual stream, += x @ weight."""
        cfg, dtype = self.cfg, self._ways.dtype
        heads_width = cfg.heads * cfg.head_dim
        width, columns = {
            "qkv": (cfg.width, heads_width + 2 * cfg.kv_heads * cfg.head_dim),
            "attention_out": (heads_width, cfg.width),
            "gate_up": (cfg.width, 2 * cfg.mlp_width),
            "mlp_down": (cfg.mlp_width, cfg.width),
        }[weight.rpartition(".")[2]]
        norm_gemv.run(
            rec,
            out,
            x,
            None if norm is None else self._weights.f32[norm],
            None,
            self._weights.matrices[weight],
            rows=self.sequences,
            width=width,
            columns=columns,
            layout="kn",
            eps=cfg.norm_eps,
            norm="none" if norm is None else "rms",
            dtype=dtype,
            x_dtype=dtype if norm is None else "f32",
            norm_dtype="f32",
            out_dtype="f32" if norm is None else dtype,
            residual=out if norm is None else None,
        )

    def length(self, sequence: int = 0) -> int:
        """How many tokens a text has."""
        return self._lengths[sequence]

    def read(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int32],  # [t], 1 <= t <= T
        sequences: Sequence[int] | None = None,
    ) -> F32:
        """Start these texts anew (by default all) with the same tokens. The logits that follow, f32 [V]. Waits."""
        chosen = range(self.sequences) if sequences is None else sequences
        logits = self._inference.read(np.asarray(tokens, np.int32), tuple(chosen))
        for index in chosen:
            self._lengths[index] = len(tokens)
        return logits

    def step(
        self,
        tokens: Sequence[int],  # [M], one for each text
    ) -> F32:
        """Add a token to each text. The logits that follow it, f32 [M, V]. Waits.

        A text that is full (T tokens) must be started anew first.
        """
        assert len(tokens) == self.sequences and all(0 < n < self.cfg.context for n in self._lengths), self._lengths
        numbers = np.array([*tokens, *self._lengths], np.int32)
        self._device.upload(self._numbers, numbers)
        self._device.run(self._plan)
        shape = (self.sequences, self.cfg.vocab_size)
        logits: F32 = self._device.read(self._logits, np.float32, shape)
        self._lengths = [n + 1 for n in self._lengths]
        return logits
