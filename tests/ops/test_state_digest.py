"""The integer sums of a state: the device's are NumPy's, at every size, and each changed bit and place shows."""

from __future__ import annotations

import numpy as np
import pytest
from opbench import Bench, run

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.digest import SumOfBuffer, join, state_sum
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import state_digest
from ptxtrain.ptx.specs import DigestSpec

GROUP = DigestSpec().group


def state(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any bits at all, NaN among them."""
    rng = np.random.default_rng(count)
    params, m, v = (rng.integers(0, 2**32, count, np.uint32).view(np.float32) for _ in range(3))
    return params, m, v


def compute(device: Device, *arrays: np.ndarray) -> int:
    count = len(arrays[0])

    def record(rec: Recorder, b: Bench) -> None:
        buffers = [b.put(array.view(np.int32), "i32") for array in arrays]
        partial = b.scratch(state_digest.scratch(count))
        state_digest.compute(rec, b.empty("total", (2,), "i32"), partial, *buffers, count=count)

    lo, hi = run(device, record)["total"].view(np.uint32).tolist()
    return int(hi) << 32 | int(lo)


@pytest.mark.parametrize(
    "count", [1, 31, 33, GROUP - 1, GROUP, 2049, 4 * 2048 + 3 * GROUP + 7, 2048 * 1024 + GROUP + 1]
)
def test_the_device_and_numpy_agree(device: Device, count: int) -> None:
    arrays = state(count)
    assert compute(device, *arrays) == state_sum(*arrays)


def test_nothing_is_read_that_is_not_there(checked_device: Device) -> None:
    arrays = state(2 * GROUP + 5)
    assert compute(checked_device, *arrays) == state_sum(*arrays)


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
