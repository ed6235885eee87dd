"""Text from a model: the next token is picked from its logits with counter-based random numbers.

The number that picks token i of a text is a function of seed and i alone, so the same seed gives the same text. Where a text
grows past the context T, only its last T tokens are read: the window slides one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxtrain.engine import philox
from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.inference import Inference
from ptxtrain.engine.init import F32
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.model import Weights
from ptxtrain.engine.ops import cast
from ptxtrain.engine.parameters import Flat, matrix_count, parameter_table
from ptxtrain.engine.ways import resolve

Logits: TypeAlias = npt.NDArray[np.float32]  # [V]
# tokens i32 [1, t], t <= T -> logits f32 [V] of the last position
LogitsOf: TypeAlias = Callable[[npt.NDArray[np.int32]], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is picked. Temperature 0 takes the likeliest (the lowest id among equals); `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise PtxtrainError(f"temperature {self.temperature:g} is outside 0 to 100; 0 takes the likeliest token")
        if self.top_k < 0:
            raise PtxtrainError(f"top-k {self.top_k} is negative; 0 turns it off")
        if not 0 < self.top_p <= 1:
            raise PtxtrainError(f"top-p {self.top_p:g} is outside 0 (excluded) to 1; 1 turns it off")


def pick(logits: Logits, sampling: Sampling, uniform: float) -> int:
    """The token that `uniform` in (0, 1) falls on, likeliest first.

    `top_k` keeps the k likeliest tokens; `top_p` then keeps the shortest run of likeliest tokens whose probabilities reach p.
    """
    if not np.isfinite(logits).all():
        bad = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise PtxtrainError(f"the model's logit of token {bad} is {logits[bad]}: its weights are not usable")
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")  # equal logits by id, whatever the sort
    if sampling.top_k:
        order = order[: sampling.top_k]
    scaled = logits[order].astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[0])
    cumulative = np.cumsum(weights)
    if sampling.top_p < 1:
        kept = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:kept]
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(order[min(place, len(cumulative) - 1)])


def generate(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    context: int,
    tokens: int,
    sampling: Sampling,
    end: int | None = None,
) -> Iterator[int]:
    """Up to `tokens` tokens after `prompt` (at least one token), one at a time; ends early after token `end`.

    Every token costs a forward pass over the last `context` tokens.
    """
    if not prompt:
        raise PtxtrainError("a prompt of no tokens cannot be continued; give it a character")
    text = list(prompt)
    for index in range(tokens):
        window = np.array([text[-context:]], np.int32)
        uniform = 0.5
        if sampling.temperature > 0:
            uniform = float(philox.uniform(sampling.seed, philox.SAMPLING, 0, index, 1)[0])
        token = pick(np.asarray(logits_of(window), np.float32), sampling, uniform)
        yield token
        if token == end:
            return
        text.append(token)


def load_model(
    cfg: ModelConfig,
    device: Device,
    params: F32,  # flat, [parameters]
    way: str,
) -> Inference:
    """A model to sample from, alone on the device: weights, and none of what training needs."""
    table = parameter_table(cfg)
    weights = Flat(device.write(params), table, 4)
    if resolve(cfg, way).dtype == "f32":
        return Inference(cfg, device, Weights(weights, weights), way=way)
    count = matrix_count(table)
    copies = device.alloc(2 * count)
    rec = Recorder(device)
    cast.to_bf16(rec, copies, weights.buffer, count=count)
    device.run(rec.plan())
    device.synchronize()
    return Inference(cfg, device, Weights(weights, Flat(copies, table, 2)), way=way)
