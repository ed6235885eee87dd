"""The sum of two buffers, in place as well."""

from __future__ import annotations

import numpy as np
import pytest
from opbench import Bench, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import add


@pytest.mark.parametrize("count", [1, 256, 257, 1000])
def test_into(device: Device, count: int) -> None:
    rng = np.random.default_rng(count)
    x, y = normal(rng, count), normal(rng, count)

    def record(rec: Recorder, b: Bench) -> None:
        add.into(rec, b.empty("out", (count,)), b.put(x), b.put(y), count=count)
        left, right = b.put(x, name="left"), b.put(y, name="right")
        add.into(rec, left, left, right, count=count)
        add.into(rec, right, b.put(x), right, count=count)

    found = run(device, record)
    for name in ("out", "left", "right"):
        same_bits(f"add.into {name} count {count}", found[name], x + y)


@pytest.mark.parametrize("count", [1, 96, 257])
@pytest.mark.parametrize("parts", [1, 15, 16, 50])
def test_parts_are_added_in_order(device: Device, parts: int, count: int) -> None:
    rng = np.random.default_rng(parts * count)
    start, partial = normal(rng, count), normal(rng, parts, count)

    def record(rec: Recorder, b: Bench) -> None:
        add.parts(rec, b.put(start, name="out"), b.put(partial), parts=parts, count=count)

    expected = start
    for part in partial:
        expected = expected + part
    same_bits(f"add.parts {parts} x {count}", run(device, record)["out"], expected)
