"""Philox against published vectors, the normal numbers against the distribution, the initial weights against the design."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from ptxtrain.engine import init, philox
from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.parameters import parameter_table

TINY = ModelConfig(vocab_size=512, context=16, layers=3, width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=96)


# Random123, kat_vectors: philox 4x32 10.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    assert philox.philox4x32(counter, key).tolist() == expected
    assert philox.philox4x32([counter, counter], key).tolist() == [expected, expected]


def test_words_are_keyed_by_everything_and_by_position_alone() -> None:
    whole = philox.words(7, 1, 2, 0, 1000)
    for start, count in [(0, 1), (1, 6), (3, 5), (4, 4), (997, 3), (500, 0)]:
        assert np.array_equal(philox.words(7, 1, 2, start, count), whole[start : start + count])
    for other in [(8, 1, 2), (7 + 2**32, 1, 2), (7, 2, 2), (7, 1, 3)]:
        assert np.count_nonzero(philox.words(*other, 0, 1000) == whole) < 5
    far = philox.words(7, 1, 2, 4 * 2**32, 4)
    assert not np.array_equal(far, whole[:4])


def test_uniform_is_open_and_even() -> None:
    u = philox.uniform(1, 1, 0, 0, 200_000)
    assert u.min() > 0.0 and u.max() < 1.0
    counts = np.bincount((u * 100).astype(int), minlength=100)
    chi_square = float(((counts - 2000.0) ** 2 / 2000.0).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom: 1e-4 of the mass lies outside


def test_log_is_exact_to_a_few_ulp() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.random(20_000), 2.0 ** rng.uniform(-60, 60, 20_000), [1.0, 0.5, math.sqrt(0.5)]])
    expected = np.log(x)
    assert np.all(np.abs(init.log(x) - expected) <= 4 * np.spacing(np.maximum(np.abs(expected), 0.5)))


def test_inverse_normal_against_the_standard_library() -> None:
    points = np.concatenate([np.linspace(1e-6, 1 - 1e-6, 4001), [2.0**-53, 1e-15, 1e-10, 0.075, 0.925, 1 - 1e-10]])
    expected = np.array([NormalDist().inv_cdf(float(p)) for p in points])
    np.testing.assert_allclose(init.inverse_normal(points), expected, rtol=2e-14, atol=1e-15)


def test_normal_numbers_have_the_moments_and_the_tails() -> None:
    n = 400_000
    z = init.normal(3, philox.INITIAL_WEIGHTS, 0, n).astype(np.float64)
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - moment) < 4.5 * math.sqrt(variance / n), power
    # Kolmogorov-Smirnov: sqrt(n) * D exceeds 2.1 once in 3,400.
    z.sort()
    cdf = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z[::40]])
    d = np.abs(cdf - (np.arange(n)[::40] + 0.5) / n).max()
    assert math.sqrt(n) * d < 2.1
    beyond = np.count_nonzero(np.abs(z) > 4)
    assert 8 <= beyond <= 48  # expected 25.3
    serial = init.normal(3, philox.INITIAL_WEIGHTS, 0, n).astype(np.float64)
    assert abs((serial[1:] * serial[:-1]).mean()) < 4.5 / math.sqrt(n)


def test_normal_depends_on_place_alone() -> None:
    long = init.normal(1, 2, 3, 70_001)
    assert np.array_equal(init.normal(1, 2, 3, 65_537), long[:65_537])


EXPECTED_BITS = ["bf982b37", "bfe02f11", "3ed584c8", "3fca1faa", "c0859759", "c080d5fb", "408c2b2b", "4096d3b4"]


def test_bits_are_the_same_everywhere() -> None:
    """Fixed bits: another machine, NumPy or SIMD level must give these. They span the centre and the tails."""
    first = init.normal(1, philox.INITIAL_WEIGHTS, 0, 100_000)
    tails = np.sort(first)
    got = [f"{w:08x}" for w in np.concatenate([first[:4], tails[:2], tails[-2:]]).view(np.uint32)]
    assert got == EXPECTED_BITS


def test_initial_weights_follow_the_design() -> None:
    flat = init.initial_weights(TINY, seed=1)
    assert flat.dtype == np.float32
    for tensor in parameter_table(TINY):
        part = flat[tensor.offset : tensor.offset + tensor.size].astype(np.float64)
        if not tensor.decay:
            assert np.all(part == 1.0), tensor.name
            continue
        std = 0.02
        if tensor.name.endswith(("attention_out", "mlp_down")):
            std /= math.sqrt(2 * TINY.layers)
        assert abs(part.std() / std - 1) < 4.5 / math.sqrt(2 * part.size), tensor.name
        assert abs(part.mean()) < 4.5 * std / math.sqrt(part.size), tensor.name
    assert not np.array_equal(flat, init.initial_weights(TINY, seed=2))
    assert np.array_equal(flat, init.initial_weights(TINY, seed=1))


def test_no_two_tensors_share_numbers() -> None:
    flat = init.initial_weights(TINY, seed=1)
    starts = [
        flat[t.offset : t.offset + 64] / flat[t.offset : t.offset + 64].std() for t in parameter_table(TINY) if t.decay
    ]
    for i, a in enumerate(starts):
        for b in starts[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.6
