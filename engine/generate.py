"""Texts from a model: tokens one after the other from a `Decoder`, for a few texts at once, and what happens when one is full.

A text that has grown to the context T starts anew from the last T / 2 of its tokens, and goes on from there: the model then reads
between T / 2 and T tokens, and each half is read twice. That is the rule at every overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.decode import Decoder
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.init import F32
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.model import Weights
from ptxtrain.engine.ops import cast
from ptxtrain.engine.parameters import Flat, matrix_count, parameter_table
from ptxtrain.engine.sampler import Sampling, pick
from ptxtrain.engine.ways import resolve


@dataclass(frozen=True, slots=True)
class Picked:
    """One more token of a text. `text` counts from 0 through all samples."""

    text: int
    token: int


def kept_tokens(context: int) -> int:
    """How many of a full text's last tokens it goes on from."""
    return max(1, context // 2)


def check_prompt(tokens: Sequence[int], context: int) -> None:
    """Raise PtxtrainError for a prompt that is empty or longer than the context."""
    if not tokens:
        raise PtxtrainError("a prompt of no tokens cannot be continued; give it a character")
    if len(tokens) > context:
        raise PtxtrainError(
            f"the prompt has {len(tokens):,} tokens, and the model reads at most {context:,}; leave out at least "
            f"{len(tokens) - context:,}"
        )


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    tokens: int,
    sampling: Sampling,
    end: int | None = None,
    first: int = 0,
    count: int | None = None,
    vocab: int | None = None,
    stopped: Callable[[int], bool] = lambda _: False,
    overflow: Callable[[], None] = lambda: None,
) -> Iterator[Picked]:
    """Up to `tokens` tokens after `prompt` for each of the decoder's texts, in turns.

    Args:
        first: the number of the decoder's first text; text n's random numbers are stream n.
        count: how many of the decoder's texts are wanted, by default all.
        vocab: tokens from this on are never picked; a model may have more than its tokenizer.
        end: the token that ends a text; it is given out.
        stopped: whether a text has ended otherwise; asked after each of its tokens.
        overflow: called each time that texts are full and start anew from their last half.

    Raises:
        PtxtrainError: the prompt is empty or longer than the context, or a logit is not a number.
    """
    context = decoder.cfg.context
    check_prompt(prompt, context)
    texts = [list(prompt) for _ in range(decoder.sequences)]
    seen = [set(prompt) for _ in texts]
    alive = [n < (count or len(texts)) for n in range(len(texts))]
    logits = np.tile(decoder.read(prompt), (len(texts), 1))
    for index in range(tokens):
        for n, text in enumerate(texts):
            if not alive[n]:
                text.append(text[-1])  # keeps its place in the batch; nobody looks
                continue
            uniform = sampling.uniform(first + n, index) if sampling.temperature > 0 else 0.5
            token = pick(logits[n][:vocab], sampling, uniform, seen[n])
            text.append(token)
            seen[n].add(token)
            yield Picked(first + n, token)
            alive[n] = token != end and not stopped(first + n)
        if index + 1 == tokens or not any(alive):
            return
        logits = _following(decoder, texts, overflow)


def _following(decoder: Decoder, texts: list[list[int]], overflow: Callable[[], None]) -> F32:
    """The logits behind each text's last token, f32 [M, V]."""
    context = decoder.cfg.context
    if decoder.length() < context:
        return decoder.step([text[-1] for text in texts])
    overflow()
    rows = np.zeros((len(texts), decoder.cfg.vocab_size), np.float32)
    for n, text in enumerate(texts):
        del text[: len(text) - kept_tokens(context)]
        rows[n] = decoder.read(text, (n,))
    return rows


def load_decoder(
    cfg: ModelConfig,
    device: Device,
    params: F32,  # flat, [parameters]
    way: str,
    *,
    sequences: int = 1,
) -> Decoder:
    """A model to sample from, alone on the device: weights, a cache, and none of what training needs."""
    return Decoder(cfg, device, load_weights(cfg, device, params, way), way=way, sequences=sequences)


def load_weights(cfg: ModelConfig, device: Device, params: F32, way: str) -> Weights:
    """The weights as the kernels of a way read them. Waits."""
    table = parameter_table(cfg)
    weights = Flat(device.write(params), table, 4)
    if resolve(cfg, way).dtype == "f32":
        return Weights(weights, weights)
    count = matrix_count(table)
    copies = device.alloc(2 * count)
    rec = Recorder(device)
    cast.to_bf16(rec, copies, weights.buffer, count=count)
    device.run(rec.plan())
    device.synchronize()
    return Weights(weights, Flat(copies, table, 2))
