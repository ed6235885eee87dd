"""Where each parameter lies in the flat buffers: weights, gradients and AdamW's m and v share one layout.

Matrices come first, then norm weights, so that one update serves all that decay and one all that do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.device.base import Buffer


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter tensor. `offset` is in elements; `decay`: a matrix, which decays and has a copy in bf16."""

    name: str
    shape: tuple[int, ...]
    offset: int
    decay: bool

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


def parameter_table(cfg: ModelConfig) -> tuple[Tensor, ...]:
    """Every parameter in the order it lies in memory, without gaps. Matrices are row-major [inputs, outputs].

    embedding [V, D] (the output layer too), then per layer qkv [D, (H + 2G) C], attention_out [H C, D], gate_up [D,
    2F], mlp_down [F, D], then per layer attention_norm [D], mlp_norm [D], then final_norm [D].
    """
    width, heads_width = cfg.width, cfg.heads * cfg.head_dim
    qkv_width = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (cfg.vocab_size, width))]
    for i in range(cfg.layers):
        shapes += [
            (f"layers.{i}.qkv", (width, qkv_width)),
            (f"layers.{i}.attention_out", (heads_width, width)),
            (f"layers.{i}.gate_up", (width, 2 * cfg.mlp_width)),
            (f"layers.{i}.mlp_down", (cfg.mlp_width, width)),
        ]
    for i in range(cfg.layers):
        shapes += [(f"layers.{i}.attention_norm", (width,)), (f"layers.{i}.mlp_norm", (width,))]
    shapes.append(("final_norm", (width,)))
    table, offset = [], 0
    for name, shape in shapes:
        table.append(Tensor(name, shape, offset, decay=len(shape) == 2))
        offset += table[-1].size
    return tuple(table)


def parameter_count(table: Sequence[Tensor]) -> int:
    """The number of elements of all tensors."""
    return sum(t.size for t in table)


def matrix_count(table: Sequence[Tensor]) -> int:
    """The number of elements of the matrices, which lie first."""
    return sum(t.size for t in table if t.decay)


class Flat:
    """A device buffer in the table's layout; `flat["layers.0.qkv"]` is that tensor's part."""

    def __init__(
        self,
        buffer: Buffer,  # [count or more] of `itemsize` bytes each
        table: Sequence[Tensor],
        itemsize: int,
    ) -> None:
        self.buffer = buffer
        self._parts = {
            t.name: buffer.view(t.offset * itemsize, t.size * itemsize)
            for t in table
            if (t.offset + t.size) * itemsize <= buffer.nbytes
        }

    def __getitem__(self, name: str) -> Buffer:
        return self._parts[name]
