"""The integer sums of a state: the device's are NumPy's, at every size."""

from __future__ import annotations

import numpy as np
import pytest
from opbench import Bench, run

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.digest import state_sum
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
