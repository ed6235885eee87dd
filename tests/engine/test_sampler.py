"""Picking tokens: against the probabilities themselves, at every setting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.sampler import ENOUGH, Sampling, pick

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def _frequencies(sampling: Sampling, count: int = 4000) -> np.ndarray:
    picked = [pick(LOGITS, sampling, (i + 0.5) / count) for i in range(count)]
    return np.bincount(picked, minlength=4) / count


def test_evenly_spread_numbers_give_the_softmax() -> None:
    np.testing.assert_allclose(_frequencies(Sampling(1.0, 0)), [0.1, 0.4, 0.2, 0.3], atol=1e-3)


def test_temperature_sharpens_by_its_inverse_power() -> None:
    expected = np.array([0.1, 0.4, 0.2, 0.3]) ** 2
    np.testing.assert_allclose(_frequencies(Sampling(0.5, 0)), expected / expected.sum(), atol=1e-3)


def test_top_k_keeps_the_likeliest_and_their_proportions() -> None:
    np.testing.assert_allclose(_frequencies(Sampling(1.0, 2)), [0, 4 / 7, 0, 3 / 7], atol=1e-3)


def test_top_p_keeps_the_shortest_run_that_reaches_p() -> None:
    np.testing.assert_allclose(_frequencies(Sampling(1.0, 0, 0.69)), [0, 4 / 7, 0, 3 / 7], atol=1e-3)
    np.testing.assert_allclose(_frequencies(Sampling(1.0, 0, 0.75)), [0, 4 / 9, 2 / 9, 3 / 9], atol=1e-3)
    np.testing.assert_allclose(_frequencies(Sampling(1.0, 0, 1e-9)), [0, 1, 0, 0])


def test_temperature_zero_takes_the_first_of_the_likeliest() -> None:
    assert pick(np.array([1.0, 3.0, 3.0], np.float32), Sampling(0.0), 0.99) == 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    st.floats(1e-3, 100),
    st.integers(0, 30),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
)
def test_any_logits_give_a_token(
    logits: list[float], temperature: float, k: int, p: float, min_p: float, u: float
) -> None:
    """Whatever the settings, a token comes, and never one that they leave out."""
    values = np.array(logits, np.float32)
    token = pick(values, Sampling(temperature, k, p, min_p), u)
    assert 0 <= token < len(logits)
    if k:
        assert np.count_nonzero(values > values[token]) < k
    assert np.exp((float(values[token]) - float(values.max())) / temperature) >= min_p * (1 - 1e-9)


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(PtxtrainError, match="token 1 is nan"):
        pick(np.array([0.0, np.nan], np.float32), Sampling(), 0.5)


def test_min_p_keeps_what_has_that_share_of_the_likeliest() -> None:
    """0.3 / 0.4 = 0.75 and 0.2 / 0.4 = 0.5; before that, top-p may have left the second out."""
    np.testing.assert_allclose(_frequencies(Sampling(1.0, 0, min_p=0.7)), [0, 4 / 7, 0, 3 / 7], atol=1e-3)
    np.testing.assert_allclose(_frequencies(Sampling(1.0, 0, min_p=0.45)), [0, 4 / 9, 2 / 9, 3 / 9], atol=1e-3)
    np.testing.assert_allclose(_frequencies(Sampling(1.0, 0, 0.3, 0.1)), [0, 1, 0, 0])


def test_the_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    """By the tokens seen alone, and before everything else; the logits that were passed in keep their values."""
    logits = np.array([2.0, 1.5, -1.0, -1.2], np.float32)
    assert pick(logits, Sampling(0.0, repetition_penalty=2.0), 0.5) == 0
    assert pick(logits, Sampling(0.0, repetition_penalty=2.0), 0.5, {0}) == 1
    assert pick(logits, Sampling(0.0, repetition_penalty=2.0), 0.5, {0, 1, 2}) == 0
    assert pick(logits[2:], Sampling(0.0, repetition_penalty=2.0), 0.5, {0}) == 1
    assert logits.tolist() == np.array([2.0, 1.5, -1.0, -1.2], np.float32).tolist()


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize(("k", "p"), [(0, 0.5), (0, 0.999), (3000, 1.0), (40, 0.9), (2000, 0.95)])
def test_a_large_vocabulary_is_cut_as_a_whole_sort_cuts_it(spread: float, k: int, p: float) -> None:
    """The short way to the likeliest tokens gives those of the definition, with ties, and where it does not suffice."""
    rng = np.random.default_rng(k)
    logits = np.round(rng.standard_normal(4 * ENOUGH) * spread, 2).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    order = order[:k] if k else order
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / 0.7)
    if p < 1:
        kept = int(np.searchsorted(np.cumsum(weights), p * weights.sum())) + 1
        order, weights = order[:kept], weights[:kept]
    for u in rng.uniform(size=50):
        place = np.searchsorted(np.cumsum(weights), u * np.cumsum(weights)[-1], side="right")
        assert pick(logits, Sampling(0.7, k, p), u) == order[place]


def test_a_number_is_of_its_seed_text_and_place() -> None:
    """The same three give the same number, each of them another."""
    at = {(s, t, i): Sampling(seed=s).uniform(t, i) for s in (1, 2) for t in (0, 1) for i in (0, 1, 1000)}
    assert len(set(at.values())) == len(at) and all(0 < u < 1 for u in at.values())
    assert Sampling(seed=2).uniform(1, 1000) == at[2, 1, 1000]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": float("nan")},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
    ],
)
def test_settings_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(PtxtrainError):
        Sampling(**bad)  # type: ignore[arg-type]
