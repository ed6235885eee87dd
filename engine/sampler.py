"""Picking a token from its logits, with counter-based random numbers.

The number that picks token i of text n is a function of seed, n and i alone: the same seed gives the same text, whatever is
sampled beside it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptxtrain.engine import philox
from ptxtrain.engine.errors import PtxtrainError

Logits: TypeAlias = npt.NDArray[np.float32]  # [V]
I64: TypeAlias = npt.NDArray[np.int64]
F64: TypeAlias = npt.NDArray[np.float64]

ENOUGH = 1024  # likeliest tokens that are put in order first where top-p will hardly need more


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is picked, in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Temperature 0 takes the likeliest (the lowest id among equals); `top_k` 0, `top_p` 1, `min_p` 0 and a penalty of 1 are off.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise PtxtrainError(f"temperature {self.temperature:g} is outside 0 to 100; 0 takes the likeliest token")
        if self.top_k < 0:
            raise PtxtrainError(f"top-k {self.top_k} is negative; 0 turns it off")
        if not 0 < self.top_p <= 1:
            raise PtxtrainError(f"top-p {self.top_p:g} is outside 0 (excluded) to 1; 1 turns it off")
        if not 0 <= self.min_p <= 1:
            raise PtxtrainError(f"min-p {self.min_p:g} is outside 0 to 1; 0 turns it off")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise PtxtrainError(
                f"repetition penalty {self.repetition_penalty:g} is outside 0.01 to 100; 1 turns it off, 1.1 is mild"
            )

    def uniform(self, text: int, index: int) -> float:
        """The number in (0, 1) that picks token `index` of a text."""
        return float(philox.uniform(self.seed, philox.SAMPLING, text, index, 1)[0])


def pick(
    logits: Logits,
    sampling: Sampling,
    uniform: float,  # in (0, 1)
    seen: Collection[int] = (),
) -> int:
    """The token that `uniform` falls on; with top-k or top-p likeliest first, otherwise by id.

    `seen` are the tokens that the repetition penalty is for: positive logits are divided by it, negative ones multiplied.
    `top_k` keeps the k likeliest tokens; `top_p` then keeps the shortest run of likeliest tokens whose probabilities reach p;
    `min_p` those at least that share of the likeliest one's probability.

    Source of the penalty: Keskar et al. 2019, CTRL, section 4.1.

    Raises:
        PtxtrainError: a logit is not a finite number.
    """
    if not np.isfinite(logits).all():
        bad = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise PtxtrainError(f"the model's logit of token {bad} is {logits[bad]}: its weights are not usable")
    if sampling.repetition_penalty != 1 and seen:
        logits = _penalised(logits, sampling.repetition_penalty, seen)
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    ids, weights = _candidates(logits, sampling)
    if sampling.top_p < 1:
        ids, weights = _reach(logits, ids, weights, sampling)
    if sampling.min_p > 0:
        kept = weights >= sampling.min_p * weights.max()
        ids, weights = ids[kept], weights[kept]
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def _penalised(logits: Logits, penalty: float, seen: Collection[int]) -> Logits:
    ids = np.fromiter(seen, np.int64, len(seen))
    ids = ids[ids < len(logits)]
    logits = logits.copy()
    values = logits[ids]
    logits[ids] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
    return logits


def _weights(logits: Logits, ids: I64 | slice, temperature: float) -> F64:
    """What the tokens weigh beside the likeliest of all, which weighs 1."""
    return np.exp((logits[ids].astype(np.float64) - float(logits.max())) / temperature)


def _likeliest(logits: Logits, count: int) -> I64:
    """The `count` likeliest tokens in order, equal ones by id: a whole sort of V takes ten times as long."""
    if count >= len(logits):
        return np.argsort(-logits, kind="stable")
    least = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= least)
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def _candidates(logits: Logits, sampling: Sampling) -> tuple[I64, F64]:
    """What is left after top-k: in order of likelihood where that matters, otherwise by id."""
    if sampling.top_k:
        ids = _likeliest(logits, sampling.top_k)
    elif sampling.top_p < 1:
        ids = _likeliest(logits, ENOUGH)
    else:
        ids = np.arange(len(logits))
    return ids, _weights(logits, ids, sampling.temperature)


def _reach(logits: Logits, ids: I64, weights: F64, sampling: Sampling) -> tuple[I64, F64]:
    """The shortest run of candidates that reaches top-p of their sum: of all tokens', if top-k is off."""
    cumulative = np.cumsum(weights)
    total = float(cumulative[-1])
    if not sampling.top_k:
        total = float(np.cumsum(_weights(logits, slice(None), sampling.temperature))[-1])
        if cumulative[-1] < sampling.top_p * total:  # rare: so many tokens are nearly alike
            ids = _likeliest(logits, len(logits))
            weights = _weights(logits, ids, sampling.temperature)
            cumulative = np.cumsum(weights)
    kept = int(np.searchsorted(cumulative, sampling.top_p * total)) + 1
    return ids[:kept], weights[:kept]
