"""The digest's definition, and that each changed bit and place shows in it; its kernel is in `tests/ops/test_state_digest.py`."""

from __future__ import annotations

import numpy as np
import pytest

from ptxtrain.engine.digest import SumOfBuffer, join, state_digest, state_sum


def state(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any bits at all, NaN among them."""
    rng = np.random.default_rng(count)
    params, m, v = (rng.integers(0, 2**32, count, np.uint32).view(np.float32) for _ in range(3))
    return params, m, v


def naive(*arrays: np.ndarray) -> int:
    """The definition, number by number."""
    lo = hi = 0
    for b, array in enumerate(arrays):
        for i, word in enumerate(array.view(np.uint32).tolist()):
            x = word ^ ((i * 0x9E3779B9 + b * 0x85EBCA77) & 0xFFFFFFFF)
            x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
            x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
            x ^= x >> 16
            lo += x
            x = x * 0x31848BAB & 0xFFFFFFFF
            hi += x ^ x >> 14
    return (hi & 0xFFFFFFFF) << 32 | lo & 0xFFFFFFFF


def test_numpy_follows_the_definition_in_any_pieces() -> None:
    arrays = state(70_001)
    whole = state_sum(*arrays)
    assert whole == naive(*arrays)
    for cut in (1, 4096, 65_537):
        sums = [SumOfBuffer(b) for b in range(3)]
        for one, array in zip(sums, arrays, strict=True):
            for start in range(0, len(array), cut):
                one.feed(array[start : start + cut])
        assert join(sums) == whole


def test_each_bit_of_each_number_and_each_place_shows() -> None:
    """A changed number changes both halves; numbers that change places, within a buffer or between two, show as well."""
    arrays = state(300)
    whole = state_sum(*arrays)
    seen = {whole}
    for b in range(3):
        for bit in range(32):
            changed = [array.copy() for array in arrays]
            changed[b].view(np.uint32)[17 * (b + 1)] ^= np.uint32(1 << bit)
            total = state_sum(*changed)
            assert total & 0xFFFFFFFF != whole & 0xFFFFFFFF and total >> 32 != whole >> 32
            seen.add(total)
    swapped = [array.copy() for array in arrays]
    swapped[0][[3, 4]] = swapped[0][[4, 3]]
    seen |= {
        state_sum(*swapped),
        state_sum(arrays[1], arrays[0], arrays[2]),
        state_sum(arrays[0], arrays[2], arrays[1]),
    }
    assert len(seen) == 1 + 96 + 3
    zero = np.zeros(5, np.float32)
    assert state_sum(zero, zero, zero) != state_sum(-zero, zero, zero)


def test_two_flips_do_not_cancel() -> None:
    """Pairs of equal flips at neighbouring and distant places, the likeliest damage: 64 bits apart from each other."""
    arrays = state(400)
    seen, count = set(), 0
    for bit in (0, 12, 23, 30, 31):
        for i in range(0, 400, 9):
            for j in range(i + 1, 400, 13):
                changed = arrays[0].copy()
                changed.view(np.uint32)[[i, j]] ^= np.uint32(1 << bit)
                one = SumOfBuffer(0)
                one.feed(changed)
                seen.add(one.halves())
                count += 1
    assert len(seen) == count


def test_pieces_may_be_words_or_floats_and_nothing_else() -> None:
    numbers = state(100)[0]
    sums = [SumOfBuffer(2), SumOfBuffer(2)]
    sums[0].feed(numbers)
    sums[1].feed(numbers.view(np.uint32))
    assert sums[0].halves() == sums[1].halves()
    for wrong in (numbers.astype(np.float64), numbers.reshape(10, 10)):
        with pytest.raises(AssertionError):
            sums[0].feed(wrong)


def test_step_place_and_size_are_in_the_digest() -> None:
    digests = {
        state_digest(*args)
        for args in (
            (1, 2, 3, (4, 5)), (0, 2, 3, (4, 5)), (1, 1, 3, (4, 5)), (1, 2, 2, (4, 5)), (1, 2, 3, (3, 5)), (1, 2, 3, (4, 4)),
        )
    }  # fmt: skip
    assert len(digests) == 6 and all(len(digest) == 16 for digest in digests)
