"""The keys and values of the tokens that a model has read, kept for those to come."""

from __future__ import annotations

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.ops.checks import ITEM_SIZES


def cache_bytes(cfg: ModelConfig, sequences: int, dtype: str) -> int:
    """What a cache takes on the device."""
    return 2 * cfg.layers * sequences * _sequence_bytes(cfg, dtype)


def _sequence_bytes(cfg: ModelConfig, dtype: str) -> int:
    """Of one sequence's keys in one layer: [G, T, C]."""
    return cfg.kv_heads * cfg.context * cfg.head_dim * ITEM_SIZES[dtype]


class KvCache:
    """Room for T tokens of each of some sequences: keys and values of a layer are [B, G, T, C] in the activations' dtype."""

    def __init__(self, cfg: ModelConfig, device: Device, *, sequences: int, dtype: str) -> None:
        self._sequence = _sequence_bytes(cfg, dtype)
        whole = device.alloc(cache_bytes(cfg, sequences, dtype))
        part = sequences * self._sequence
        self._keys = [whole.view(2 * i * part, part) for i in range(cfg.layers)]
        self._values = [whole.view((2 * i + 1) * part, part) for i in range(cfg.layers)]

    def layer(self, i: int) -> tuple[Buffer, Buffer]:
        """Layer i's keys and values of all sequences."""
        return self._keys[i], self._values[i]

    def sequence(self, i: int, index: int) -> tuple[Buffer, Buffer]:
        """Layer i's keys and values of one sequence."""
        start = index * self._sequence
        return self._keys[i].view(start, self._sequence), self._values[i].view(start, self._sequence)
