"""The next token's logits from a whole text: one sequence, forward only, over weights that a training step may share.

A text is read in a window: a model of the smallest power of two of tokens that holds it, so that a short text costs little. What
the layers make of it can be kept in a `KvCache`, from which `decode.Decoder` goes on token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.device.base import Buffer, Device, Plan
from ptxtrain.engine.init import F32
from ptxtrain.engine.kernels import Override, Recorder
from ptxtrain.engine.kvcache import KvCache
from ptxtrain.engine.model import I32, Model, Weights
from ptxtrain.engine.ops import kv_append, norm_gemv, rope
from ptxtrain.engine.ways import Ways

SMALLEST_WINDOW = 16  # tokens


def record_head(
    rec: Recorder,
    out: Buffer,  # [M, V] f32
    x: Buffer,  # [M, D] f32, the residual stream behind the last layer
    weights: Weights,
    cfg: ModelConfig,
    ways: Ways,
    *,
    rows: int,
) -> None:
    """The final norm and the output layer, for a few rows."""
    norm_gemv.run(
        rec,
        out,
        x,
        weights.f32["final_norm"],
        None,
        weights.matrices["embedding"],
        rows=rows,
        width=cfg.width,
        columns=cfg.vocab_size,
        layout="nk",
        eps=cfg.norm_eps,
        norm="rms",
        dtype=ways.dtype,
        x_dtype="f32",
        norm_dtype="f32",
        out_dtype="f32",
    )


class RopeTables:
    """cos and sin of all T positions on the device, and the positions 0 to T - 1 themselves."""

    def __init__(self, cfg: ModelConfig, device: Device) -> None:
        cos, sin = rope.tables(cfg.context, cfg.head_dim, cfg.rope_base)
        self.cos, self.sin = device.write(cos), device.write(sin)
        self.ascending = device.write(np.arange(cfg.context, dtype=np.int32))


class Inference:
    """Models of one sequence in a few lengths, made when first asked for.

    Args:
        cache: where `read` keeps keys and values.
        tables: RoPE's, needed with a cache.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        device: Device,
        weights: Weights,
        *,
        way: str,
        overrides: Mapping[str, Override] | None = None,
        cache: KvCache | None = None,
        tables: RopeTables | None = None,
    ) -> None:
        self._cfg, self._device, self._weights, self._way = cfg, device, weights, way
        self._overrides, self._cache, self._tables = overrides, cache, tables
        self._windows: dict[int, _Window] = {}

    def logits(
        self,
        tokens: I32,  # [1, t], 1 <= t <= T
    ) -> F32:
        """The logits that follow the last token, f32 [V]. Waits."""
        assert tokens.shape[0] == 1, tokens.shape
        return self.read(tokens[0], ())

    def read(
        self,
        tokens: I32,  # [t], 1 <= t <= T
        sequences: Sequence[int],  # of the cache
    ) -> F32:
        """As `logits`; the keys and values of the tokens go to places 0 to t - 1 of these sequences of the cache."""
        length, context = tokens.shape[0], self._cfg.context
        assert 1 <= length <= context, tokens.shape
        # A row of a causal model depends on no later one, so a shorter context gives the same for less work.
        size = min(context, max(SMALLEST_WINDOW, 1 << (length - 1).bit_length()))
        if size not in self._windows:
            cfg = replace(self._cfg, context=size)
            self._windows[size] = _Window(
                cfg,
                self._cfg.context,
                self._device,
                self._weights,
                self._way,
                self._overrides,
                self._cache,
                self._tables,
            )
        return self._windows[size].read(tokens, tuple(sequences))


class _Window:
    """A model of one sequence of `cfg.context` tokens. `places` is the length of the cache's sequences."""

    def __init__(
        self,
        cfg: ModelConfig,
        places: int,
        device: Device,
        weights: Weights,
        way: str,
        overrides: Mapping[str, Override] | None,
        cache: KvCache | None,
        tables: RopeTables | None,
    ) -> None:
        self._cfg, self._places, self._device, self._weights = cfg, places, device, weights
        self._cache, self._tables = cache, tables
        self._model = Model(cfg, device, weights, micro_batch=1, way=way, backward=False)
        self._rec = Recorder(device, overrides=overrides)
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._out = device.alloc(4 * cfg.vocab_size)
        self._tokens = np.zeros(cfg.context, np.int32)

    def _forward(self, sequences: tuple[int, ...]) -> Plan:
        """The model's launches, and those that put each layer's keys and values into these sequences of the cache."""
        if sequences not in self._plans:

            def keep(layer: int, qkv: Buffer) -> None:
                for index in sequences:
                    self._keep(layer, qkv, index)

            self._model.record_forward(self._rec, keep)
            self._plans[sequences] = self._rec.plan()
        return self._plans[sequences]

    def _keep(self, layer: int, qkv: Buffer, index: int) -> None:
        """Rows past the text's end go along: their places are written again before anyone reads them."""
        cfg, cache, tables = self._cfg, self._cache, self._tables
        assert cache is not None and tables is not None
        kv_append.run(
            self._rec,
            qkv,
            *cache.sequence(layer, index),
            tables.cos,
            tables.sin,
            tables.ascending,
            rows=cfg.context,
            per_sequence=cfg.context,
            context=self._places,
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            dtype=self._model.ways.dtype,
            turn=False,
        )

    def read(self, tokens: I32, sequences: tuple[int, ...]) -> F32:
        cfg, device, length = self._cfg, self._device, tokens.shape[0]
        self._tokens[:length] = tokens
        self._tokens[length:] = 0
        device.upload(self._model["tokens"], self._tokens)
        device.run(self._forward(sequences))
        last = self._model["x"].view(4 * (length - 1) * cfg.width, 4 * cfg.width)
        record_head(self._rec, self._out, last, self._weights, cfg, self._model.ways, rows=1)
        for launch in self._rec.launches:
            device.launch(launch)
        self._rec.launches.clear()
        values: F32 = device.read(self._out, np.float32, (cfg.vocab_size,))
        return values
