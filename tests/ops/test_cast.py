"""Casts to the bit, with the values where rounding goes wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from opbench import Bench, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import cast

# Zeros, infinities, ties to even, the largest number, and denormals around bf16's smallest.
BITS = """00000000 80000000 7F800000 FF800000 3F808000 3F818000 3F808001 3F807FFF 7F7FFFFF
    00000001 00008000 00018000 007FFFFF 00800000"""
SPECIAL = np.array([int(bits, 16) for bits in BITS.split()], np.uint32).view(np.float32)


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
