"""LayerNorm's launches: rows that do not depend on each other, weight gradients in a fixed order, buffers that are too small."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import layernorm

Float = npt.NDArray[Any]


def gradients(device: Device, x: Float, dout: Float, start: Float | None = None) -> dict[str, Float]:
    """dx, dw, db and the parts, in f32, from the kernels' own statistics."""
    rows, width = x.shape
    sizes: dict[str, Any] = {"rows": rows, "width": width, "dtype": "f32"}
    parts = layernorm.parts(rows)

    def record(rec: Recorder, b: Bench) -> None:
        mean, rstd, weight = b.empty("mean", (rows,)), b.empty("rstd", (rows,)), b.put(np.linspace(-1, 1, width))
        x_ = b.put(x)
        layernorm.forward(rec, b.empty("out", (rows, width)), mean, rstd, x_, weight, weight, eps=1e-5, **sizes)
        partials = b.empty("partial_w", (parts, width)), b.empty("partial_b", (parts, width))
        layernorm.backward(rec, b.empty("dx", (rows, width)), *partials, b.put(dout), x_, weight, mean, rstd, **sizes)
        for name, partial in zip(("dw", "db"), partials, strict=True):
            out = b.empty(name, (width,)) if start is None else b.put(start, name=name)
            accumulate = start is not None
            layernorm.weight_gradient(rec, out, partial, parts=parts, width=width, accumulate=accumulate)

    return run(device, record)


def test_weight_gradients_are_the_parts_in_order(device: Device) -> None:
    """From 0 or from what is there, to the last bit."""
    x, dout, start = (
        normal(np.random.default_rng(1), 70, 45),
        normal(np.random.default_rng(2), 70, 45),
        np.ones(45, "f"),
    )
    for begin in (None, start):
        found = gradients(device, x, dout, begin)
        for name, partial in (("dw", "partial_w"), ("db", "partial_b")):
            assert found[partial].shape == (3, 45)
            expected = np.zeros(45, "f") if begin is None else begin.copy()
            for part in found[partial]:
                expected += part
            same_bits(name, found[name], expected)


def test_a_row_does_not_depend_on_the_others(device: Device) -> None:
    x, dout = normal(np.random.default_rng(1), 33, 70), normal(np.random.default_rng(2), 33, 70)
    whole, last = gradients(device, x, dout), gradients(device, x[32:], dout[32:])
    for name in ("out", "mean", "rstd", "dx"):
        same_bits(name, last[name], whole[name][32:])
    same_bits("partial_w", last["partial_w"], whole["partial_w"][1:])


def test_refusals(device: Device) -> None:
    rec, small = Recorder(device), device.alloc(64)
    sizes: dict[str, Any] = {"rows": 5, "width": 8, "eps": 0.0}
    with pytest.raises(PtxtrainError, match="out holds 64 bytes, 40 x bf16 need 80"):
        layernorm.forward(rec, small, small, small, small, small, small, **sizes, dtype="bf16")
    with pytest.raises(PtxtrainError, match='dtype is "f64"'):
        layernorm.forward(rec, small, small, small, small, small, small, **sizes, dtype="f64")
