"""SwiGLU against float64, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, normal, run

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import swiglu


def forward(gate: npt.NDArray[Any], up: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return gate / (1 + np.exp(-gate)) * up


def backward(dout: npt.NDArray[Any], gate: npt.NDArray[Any], up: npt.NDArray[Any]) -> npt.NDArray[Any]:
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([dout * up * s * (1 + gate * (1 - s)), dout * gate * s], -1)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("width", [48, 97])
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_both_directions(device: Device, rows: int, width: int, dtype: str) -> None:
    rng = np.random.default_rng(rows * 1000 + width)
    gate_up, dout = normal(rng, rows, 2 * width, dtype=dtype, scale=4), normal(rng, rows, width, dtype=dtype)
    gate_up[0, 0] = -80.0  # sigmoid is 2e-35 here, and exp(-gate) 5e34
    gate, up = gate_up[:, :width], gate_up[:, width:]

    def record(rec: Recorder, b: Bench) -> None:
        x = b.put(gate_up, dtype)
        swiglu.forward(rec, b.empty("out", (rows, width), dtype), x, rows=rows, width=width, dtype=dtype)
        dx = b.empty("dgate_up", (rows, 2 * width), dtype)
        swiglu.backward(rec, dx, b.put(dout, dtype), x, rows=rows, width=width, dtype=dtype)

    found = run(device, record)
    g, u, d = (a.astype(np.float64) for a in (gate, up, dout))
    what = f"swiglu rows {rows} width {width} {dtype}"
    check(f"{what} forward", found["out"], forward(g, u), forward(gate, up), dtype=dtype)
    check(f"{what} backward", found["dgate_up"], backward(d, g, u), backward(dout, gate, up), dtype=dtype)


def test_far_ends_are_finite(device: Device) -> None:
    """exp(-gate) overflows to infinity below -88.7: the result is then -0, not NaN."""
    gate_up = np.array([[-500.0, -100.0, 100.0, 500.0, 2.0, 2.0, 2.0, 2.0]], np.float32)

    def record(rec: Recorder, b: Bench) -> None:
        x = b.put(gate_up)
        swiglu.forward(rec, b.empty("out", (1, 4)), x, rows=1, width=4, dtype="f32")
        swiglu.backward(rec, b.empty("dgate_up", (1, 8)), b.put(np.ones((1, 4))), x, rows=1, width=4, dtype="f32")

    found = run(device, record)
    assert found["out"].tolist() == [[0.0, 0.0, 200.0, 1000.0]]
    assert found["dgate_up"].tolist() == [[0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 100.0, 500.0]]
