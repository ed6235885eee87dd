"""The next token's logits: one sequence, forward only, over weights that a training step may share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.device.base import Device, Plan
from ptxtrain.engine.init import F32
from ptxtrain.engine.kernels import Override, Recorder
from ptxtrain.engine.model import I32, Model, Weights
from ptxtrain.engine.ops import matmul

SMALLEST_WINDOW = 16  # tokens


class Inference:
    """Models of one sequence in a few lengths, made when first asked for."""

    def __init__(
        self,
        cfg: ModelConfig,
        device: Device,
        weights: Weights,
        *,
        way: str,
        overrides: Mapping[str, Override] | None = None,
    ) -> None:
        self._cfg, self._device, self._weights, self._way = cfg, device, weights, way
        self._overrides = overrides
        self._windows: dict[int, _Window] = {}

    def logits(
        self,
        tokens: I32,  # [1, t], 1 <= t <= T
    ) -> F32:
        """The logits that follow the last token, f32 [V]. Waits."""
        length, context = tokens.shape[1], self._cfg.context
        assert tokens.shape[0] == 1 and 1 <= length <= context, tokens.shape
        # A row of a causal model depends on no later one, so a shorter context gives the same for less work.
        size = min(context, max(SMALLEST_WINDOW, 1 << (length - 1).bit_length()))
        if size not in self._windows:
            cfg = replace(self._cfg, context=size)
            self._windows[size] = _Window(cfg, self._device, self._weights, self._way, self._overrides)
        return self._windows[size].logits(tokens)


class _Window:
    """A model of one sequence of `cfg.context` tokens."""

    def __init__(
        self, cfg: ModelConfig, device: Device, weights: Weights, way: str, overrides: Mapping[str, Override] | None
    ) -> None:
        self._cfg, self._device = cfg, device
        self._head = weights.matrices["embedding"]
        self._model = Model(cfg, device, weights, micro_batch=1, way=way, backward=False)
        self._rec = Recorder(device, overrides=overrides)
        self._model.record_forward(self._rec)
        self._forward = self._rec.plan()
        self._rows: dict[int, Plan] = {}
        self._out = device.alloc(4 * cfg.vocab_size)
        self._tokens = np.zeros(cfg.context, np.int32)

    def _row_plan(self, row: int) -> Plan:
        """The output layer for one row alone."""
        if row not in self._rows:
            cfg, ways = self._cfg, self._model.ways
            size = cfg.width * ways.item
            matmul.run(
                self._rec,
                self._out,
                self._model["final"].view(row * size, size),
                self._head,
                m=1,
                n=cfg.vocab_size,
                k=cfg.width,
                layout="nt",
                dtype=ways.dtype,
                out_dtype="f32",
                way=ways.matmul,
            )
            self._rows[row] = self._rec.plan()
        return self._rows[row]

    def logits(self, tokens: I32) -> F32:
        length = tokens.shape[1]
        self._tokens[:length] = tokens[0]
        self._tokens[length:] = 0
        self._device.upload(self._model["tokens"], self._tokens)
        self._device.run(self._forward)
        self._device.run(self._row_plan(length - 1))
        values: F32 = self._device.read(self._out, np.float32, (self._cfg.vocab_size,))
        return values
