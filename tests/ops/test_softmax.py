"""Softmax's launches: rows that do not depend on each other, in place, buffers that are too small."""

from __future__ import annotations

import numpy as np
import pytest
from opbench import Bench, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import softmax


def test_a_row_does_not_depend_on_the_others_or_on_the_place(device: Device) -> None:
    x, dout = normal(np.random.default_rng(1), 9, 70), normal(np.random.default_rng(2), 9, 70)

    def record(rec: Recorder, b: Bench) -> None:
        for name, first in (("whole", 0), ("last", 8)):
            rows = 9 - first
            out, dx = b.put(x[first:], name=f"out {name}"), b.empty(f"dx {name}", (rows, 70))
            softmax.forward(rec, out, out, rows=rows, width=70, dtype="f32")
            softmax.backward(rec, dx, out, b.put(dout[first:]), rows=rows, width=70, dtype="f32")

    found = run(device, record)
    for name in ("out", "dx"):
        same_bits(name, found[f"{name} last"], found[f"{name} whole"][8:])


def test_refusals(device: Device) -> None:
    rec, small = Recorder(device), device.alloc(64)
    with pytest.raises(PtxtrainError, match="out holds 64 bytes, 40 x f16 need 80"):
        softmax.forward(rec, small, small, rows=5, width=8, dtype="f16")
    with pytest.raises(PtxtrainError, match="width is 0"):
        softmax.backward(rec, small, small, small, rows=5, width=0, dtype="f32")
