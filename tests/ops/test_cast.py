"""Casts to the bit, with the values where rounding goes wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from opbench import Bench, normal, run, same_bits
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import cast

SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001]
    + [0x00008000, 0x00018000, 0x007FFFFF, 0x00800000, 0x3F807FFF],
    np.uint32,
).view(np.float32)


@pytest.mark.parametrize("count", [1, 255, 257, 1000])
def test_both_ways(device: Device, count: int) -> None:
    x = np.concatenate([SPECIAL, normal(np.random.default_rng(count), count)])[:count]
    with np.errstate(over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)

    def record(rec: Recorder, b: Bench) -> None:
        half = b.empty("bf16", (count,), "bf16")
        cast.to_bf16(rec, half, b.put(x), count=count)
        cast.to_f32(rec, b.empty("f32", (count,)), half, count=count)

    found = run(device, record)
    same_bits("cast.to_bf16", found["bf16"], expected)
    same_bits("cast.to_f32", found["f32"], expected)


def test_nan_stays_nan(device: Device) -> None:
    x = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)

    def record(rec: Recorder, b: Bench) -> None:
        cast.to_bf16(rec, b.empty("out", (3,), "bf16"), b.put(x.view(np.int32), "i32"), count=3)

    assert np.isnan(run(device, record)["out"]).all()
