"""The loss's sum: rows, then sequences, whatever the micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import loss_sum


def total(device: Device, loss: npt.NDArray[Any], start: float, micro_batch: int) -> npt.NDArray[Any]:
    def record(rec: Recorder, b: Bench) -> None:
        out = b.put(np.array([start]), name="total")
        for first in range(0, len(loss), micro_batch):
            part = loss[first : first + micro_batch]
            loss_sum.accumulate(rec, out, b.put(part), sequences=len(part), context=loss.shape[1])

    return run(device, record)["total"]


@pytest.mark.parametrize("context", [1, 9, 65])
@pytest.mark.parametrize("sequences", [1, 7, 8, 21])
def test_accumulate(device: Device, sequences: int, context: int) -> None:
    rng = np.random.default_rng(sequences)
    loss = rng.random((sequences, context), np.float32) * 10
    found = total(device, loss, 3.5, sequences)
    exact = np.array([3.5 + loss.astype(np.float64).sum()])
    same = np.array([np.float32(3.5) + loss.sum(dtype=np.float32)])
    check(f"loss_sum sequences {sequences} T {context}", found, exact, same)
    for micro_batch in (1, 2, 3):
        same_bits(f"micro-batches of {micro_batch}", total(device, loss, 3.5, micro_batch), found)
