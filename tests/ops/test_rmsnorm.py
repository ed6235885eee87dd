"""RMSNorm against float64: forward, the gradient of x, and the order of the weight gradient's sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import rmsnorm
from ptxtrain.ptx.specs import NormBackwardSpec

EPS = 1e-5
Float = npt.NDArray[Any]


def forward(x: Float, weight: Float) -> tuple[Float, Float]:
    rstd = 1 / np.sqrt((x * x).mean(-1) + x.dtype.type(EPS))
    return x * rstd[:, None] * weight, rstd


def backward(dout: Float, x: Float, weight: Float, rstd: Float) -> tuple[Float, Float]:
    """dx, and each row's part of the weight's gradient."""
    xhat = x * rstd[:, None]
    g = dout * weight
    return rstd[:, None] * (g - xhat * (g * xhat).mean(-1, keepdims=True)), dout * xhat


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("width", [1, 48, 97])
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_forward(device: Device, rows: int, width: int, dtype: str) -> None:
    rng = np.random.default_rng(rows * 1000 + width)
    x, weight = normal(rng, rows, width, scale=3), normal(rng, width)

    def record(rec: Recorder, b: Bench) -> None:
        out, rstd = b.empty("out", (rows, width), dtype), b.empty("rstd", (rows,))
        rmsnorm.forward(rec, out, rstd, b.put(x), b.put(weight), rows=rows, width=width, eps=EPS, dtype=dtype)

    found = run(device, record)
    exact, same = forward(x.astype(np.float64), weight.astype(np.float64)), forward(x, weight)
    what = f"rmsnorm.forward rows {rows} width {width} {dtype}"
    check(what, found["out"], exact[0], same[0], dtype=dtype)
    check(f"{what} rstd", found["rstd"], exact[1], same[1])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("width", [48, 97, 300])
@pytest.mark.parametrize("context", [1, 9, 65])
def test_backward(device: Device, context: int, width: int, dtype: str, accumulate: bool) -> None:
    rows = 2 * context
    rng = np.random.default_rng(context * 1000 + width)
    x, weight, dout = normal(rng, rows, width), normal(rng, width), normal(rng, rows, width, dtype=dtype)
    old, rstd = normal(rng, rows, width), forward(x, weight)[1]
    spec, count = NormBackwardSpec(), rmsnorm.parts(rows, context)

    def record(rec: Recorder, b: Bench) -> None:
        dx = b.put(old, name="dx") if accumulate else b.empty("dx", (rows, width))
        partial = b.empty("partial", (count, width))
        inputs = (b.put(dout, dtype), b.put(x), b.put(weight), b.put(rstd))
        sizes: dict[str, Any] = {"rows": rows, "width": width, "context": context}
        rmsnorm.backward(rec, dx, partial, *inputs, **sizes, dtype=dtype, accumulate=accumulate)

    found = run(device, record)
    wide = [a.astype(np.float64) for a in (dout, x, weight, rstd)]
    exact, same = backward(*wide), backward(dout, x, weight, rstd)
    what = f"rmsnorm.backward T {context} width {width} {dtype}"
    add = old if accumulate else np.float32(0)
    check(what, found["dx"], exact[0] + add, same[0] + add)
    parts = [spec.part(i, context) for i in range(count)]
    exact_parts = np.array([exact[1][first:last].sum(0) for first, last in parts])
    same_parts = np.array([same[1][first:last].sum(0) for first, last in parts])
    check(f"{what} partial", found["partial"], exact_parts, same_parts)


@pytest.mark.parametrize("parts", [1, 7, 8, 17])
@pytest.mark.parametrize("width", [48, 97])
def test_weight_gradient_adds_parts_in_order(device: Device, parts: int, width: int) -> None:
    rng = np.random.default_rng(parts)
    partial, old = normal(rng, parts, width), normal(rng, width, scale=100)

    def record(rec: Recorder, b: Bench) -> None:
        rmsnorm.weight_gradient(rec, b.put(old, name="dweight"), b.put(partial), parts=parts, width=width)

    expected = old.copy()
    for part in partial:
        expected += part
    same_bits(f"rmsnorm.weight_gradient parts {parts} width {width}", run(device, record)["dweight"], expected)


def test_weight_gradient_does_not_depend_on_the_micro_batch(device: Device) -> None:
    context, width, sequences = 40, 48, 4
    rows = sequences * context
    rng = np.random.default_rng(1)
    x, weight, dout, rstd = normal(rng, rows, width), normal(rng, width), normal(rng, rows, width), normal(rng, rows)

    def gradient(micro_batch: int) -> npt.NDArray[Any]:
        def record(rec: Recorder, b: Bench) -> None:
            dweight = b.put(np.zeros(width), name="dweight")
            n = micro_batch * context
            for first in range(0, rows, n):
                dx, count = b.scratch(4 * n * width), rmsnorm.parts(n, context)
                partial = b.scratch(4 * count * width)
                part = slice(first, first + n)
                inputs = (b.put(dout[part]), b.put(x[part]), b.put(weight), b.put(rstd[part]))
                sizes: dict[str, Any] = {"rows": n, "width": width, "context": context}
                rmsnorm.backward(rec, dx, partial, *inputs, **sizes, dtype="f32", accumulate=False)
                rmsnorm.weight_gradient(rec, dweight, partial, parts=count, width=width)

        return run(device, record, times=1)["dweight"]

    whole = gradient(4)
    same_bits("micro-batches of 1", gradient(1), whole)
    same_bits("micro-batches of 2", gradient(2), whole)
