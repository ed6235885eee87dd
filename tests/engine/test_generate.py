"""Texts from a decoder: the seed's text whatever is beside it, ends, and what happens when the context is full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.generate import generate, kept_tokens
from ptxtrain.engine.sampler import Sampling

VOCAB = 50


class Counting:
    """Stands for a decoder: the likeliest token is the last one plus one, or all are alike. Keeps what it was asked."""

    def __init__(self, sequences: int = 1, context: int = 8, flat: bool = False) -> None:
        self.cfg = ModelConfig(VOCAB, context, 1, 8, 1, 1, 8, 8)
        self.sequences, self._flat = sequences, flat
        self.texts: list[list[int]] = [[] for _ in range(sequences)]
        self.reads: list[tuple[list[int], tuple[int, ...]]] = []

    def _logits(self, token: int) -> np.ndarray:
        out = np.zeros(VOCAB, np.float32)
        if not self._flat:
            out[(token + 1) % VOCAB] = 1.0
        return out

    def length(self, sequence: int = 0) -> int:
        return len(self.texts[sequence])

    def read(self, tokens: Sequence[int], sequences: Sequence[int] | None = None) -> np.ndarray:
        assert 1 <= len(tokens) <= self.cfg.context
        chosen = tuple(range(self.sequences) if sequences is None else sequences)
        self.reads.append((list(tokens), chosen))
        for n in chosen:
            self.texts[n] = list(tokens)
        return self._logits(tokens[-1])

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        for text, token in zip(self.texts, tokens, strict=True):
            assert len(text) < self.cfg.context
            text.append(token)
        return np.stack([self._logits(token) for token in tokens])


def tokens_of(decoder: Counting, prompt: list[int], tokens: int, sampling: Sampling, **more: object) -> list[list[int]]:
    """The tokens of each text."""
    found: dict[int, list[int]] = {}
    for picked in generate(decoder, prompt, tokens=tokens, sampling=sampling, **more):  # type: ignore[arg-type]
        found.setdefault(picked.text, []).append(picked.token)
    return [found[n] for n in sorted(found)]


def test_a_text_ends_with_its_length_or_its_end() -> None:
    """`tokens` at most, and the end token is the last one given out."""
    assert tokens_of(Counting(), [5], 3, Sampling(0.0)) == [[6, 7, 8]]
    assert tokens_of(Counting(), [5], 20, Sampling(0.0), end=9) == [[6, 7, 8, 9]]
    assert tokens_of(Counting(), [5], 20, Sampling(0.0), stopped=lambda n: True) == [[6]]


def test_the_last_token_is_not_computed_in_vain() -> None:
    """Neither after the length nor after the end is another step made."""
    decoder = Counting()
    tokens_of(decoder, [5], 3, Sampling(0.0))
    assert decoder.texts == [[5, 6, 7]]


def test_a_full_text_goes_on_from_its_last_half() -> None:
    """At T tokens the last T / 2 are read anew, and the text is as if nothing had happened."""
    decoder, told = Counting(context=8), []
    found = tokens_of(decoder, [1, 2], 20, Sampling(0.0), overflow=lambda: told.append(1))
    assert found == [list(range(3, 23))]
    # 1 … 9 stand: 8 of them in the cache, 9 has no place any more.
    assert decoder.reads == [
        ([1, 2], (0,)),
        ([6, 7, 8, 9], (0,)),
        ([11, 12, 13, 14], (0,)),
        ([16, 17, 18, 19], (0,)),
    ]
    assert len(told) == 3 and kept_tokens(8) == 4


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    """T tokens are read, and the first new one makes it start anew; T + 1 are refused with what to do."""
    decoder = Counting(context=4)
    assert tokens_of(decoder, [1, 2, 3, 4], 3, Sampling(0.0)) == [[5, 6, 7]]
    assert [read for read, _ in decoder.reads] == [[1, 2, 3, 4], [4, 5]]
    with pytest.raises(PtxtrainError, match="has 5 tokens, and the model reads at most 4; leave out at least 1"):
        tokens_of(decoder, [1, 2, 3, 4, 5], 3, Sampling(0.0))
    with pytest.raises(PtxtrainError, match="no tokens"):
        tokens_of(decoder, [], 3, Sampling(0.0))


def test_a_context_of_one_token_goes_on() -> None:
    """The smallest window there is."""
    assert tokens_of(Counting(context=1), [3], 4, Sampling(0.0)) == [[4, 5, 6, 7]]


def test_a_seed_and_number_give_a_text_whatever_is_beside_it() -> None:
    """Four at once, one alone, and two that begin at number 2: text n is the same. Other seeds and numbers give others."""
    sampling = Sampling(1.0, 0, seed=3)
    four = tokens_of(Counting(4, flat=True), [1], 30, sampling)
    assert tokens_of(Counting(1, flat=True), [1], 30, sampling) == four[:1]
    assert tokens_of(Counting(2, flat=True), [1], 30, sampling, first=2) == four[2:]
    assert tokens_of(Counting(4, flat=True), [1], 30, sampling, count=2) == four[:2]
    assert len({tuple(text) for text in four}) == 4 and len(set(four[0])) > 10
    assert tokens_of(Counting(1, flat=True), [1], 30, Sampling(1.0, 0, seed=4)) != four[:1]


def test_texts_end_one_by_one() -> None:
    """A text that has ended gives nothing more out; the others go on, over an overflow too."""
    sampling = Sampling(1.0, 0, seed=5)
    whole = tokens_of(Counting(3, flat=True), [1], 40, sampling)
    end = whole[1][4]
    found = tokens_of(Counting(3, flat=True), [1], 40, sampling, end=end)
    for full, text in zip(whole, found, strict=True):
        assert text == (full[: full.index(end) + 1] if end in full else full)


def test_tokens_that_have_no_text_are_not_picked() -> None:
    """A model with more tokens than its tokenizer: those from `vocab` on never come, greedy or not."""
    assert tokens_of(Counting(), [3], 3, Sampling(0.0), vocab=5) == [[4, 0, 1]]
    text = tokens_of(Counting(flat=True), [0], 60, Sampling(1.0, 0), vocab=4)[0]
    assert set(text) == {0, 1, 2, 3}


def test_the_penalty_is_for_the_prompt_and_what_was_picked() -> None:
    """Greedy counting on from 5 by a model that likes 6 best: each time another, because those before are seen."""

    class Same(Counting):
        def _logits(self, token: int) -> np.ndarray:
            return np.arange(VOCAB, 0, -1, dtype=np.float32) + 10

    assert tokens_of(Same(), [0], 3, Sampling(0.0)) == [[0, 0, 0]]
    assert tokens_of(Same(), [0], 3, Sampling(0.0, repetition_penalty=50.0)) == [[1, 2, 3]]


def test_logits_that_are_no_numbers_are_one_line() -> None:
    """A model with broken weights says so."""

    class Broken(Counting):
        def _logits(self, token: int) -> np.ndarray:
            return np.full(VOCAB, np.nan, np.float32)

    with pytest.raises(PtxtrainError, match="logit of token 0 is nan: its weights are not usable"):
        tokens_of(Broken(), [1], 3, Sampling())
