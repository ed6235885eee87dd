"""Picking tokens: against the probabilities themselves, and the window over a text longer than the context."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.sampler import Sampling, generate, pick

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
    st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
)
def test_any_logits_give_a_token(logits: list[float], temperature: float, k: int, p: float, u: float) -> None:
    values = np.array(logits, np.float32)
    token = pick(values, Sampling(temperature, k, p), u)
    assert 0 <= token < len(logits)
    if k == 1:
        assert values[token] == values.max()


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(PtxtrainError, match="token 1 is nan"):
        pick(np.array([0.0, np.nan], np.float32), Sampling(), 0.5)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}])
def test_settings_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(PtxtrainError):
        Sampling(**bad)  # type: ignore[arg-type]


def test_the_window_slides_and_the_end_token_ends() -> None:
    seen: list[list[int]] = []

    def logits_of(tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens[0].tolist())
        out = np.zeros(10, np.float32)
        out[(tokens[0, -1] + 1) % 10] = 1.0  # counts up
        return out

    greedy = Sampling(0.0)
    assert list(generate(logits_of, [5], context=3, tokens=20, sampling=greedy, end=9)) == [6, 7, 8, 9]
    assert seen == [[5], [5, 6], [5, 6, 7], [6, 7, 8]]


def test_the_same_seed_gives_the_same_text_and_another_does_not() -> None:
    def logits_of(tokens: np.ndarray) -> np.ndarray:
        return np.zeros(50, np.float32)

    def text(seed: int) -> list[int]:
        return list(generate(logits_of, [1], context=8, tokens=30, sampling=Sampling(1.0, 0, 1.0, seed)))

    assert text(3) == text(3)
    assert text(3) != text(4)
    assert len(set(text(3))) > 10


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(PtxtrainError, match="no tokens"):
        next(generate(lambda t: np.zeros(3), [], context=8, tokens=1, sampling=Sampling()))
