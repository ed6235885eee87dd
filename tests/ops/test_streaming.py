"""Outputs larger than caches are stored past them: other instructions, the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from opbench import Bench, normal, run

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import checks, rmsnorm, swiglu


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("width", [97, 256])
@pytest.mark.parametrize("rows", [1, 129])
def test_same_bits_past_the_caches(
    device: Device, monkeypatch: pytest.MonkeyPatch, rows: int, width: int, dtype: str
) -> None:
    """From the output's size on that the op names, its kernel stores with st.cs; what it stores is the same."""
    rng = np.random.default_rng(rows + width)
    gate_up, x, weight = normal(rng, rows, 2 * width, dtype=dtype), normal(rng, rows, width), normal(rng, width)
    texts: list[list[str]] = []

    def record(rec: Recorder, b: Bench) -> None:
        y, rstd = b.empty("norm", (rows, width), dtype), b.empty("rstd", (rows,))
        rmsnorm.forward(rec, y, rstd, b.put(x), b.put(weight), rows=rows, width=width, eps=1e-5, dtype=dtype)
        out = b.empty("swiglu", (rows, width), dtype)
        swiglu.forward(rec, out, b.put(gate_up, dtype), rows=rows, width=width, dtype=dtype)
        texts.append([launch.kernel.path.read_text() for launch in rec.launches])

    size = rows * width * checks.ITEM_SIZES[dtype]
    monkeypatch.setattr(checks, "STREAMED", size + 1)
    through = run(device, record)
    monkeypatch.setattr(checks, "STREAMED", size)
    past = run(device, record)
    assert [".cs" in text for text in (*texts[0], *texts[-1])] == [False, False, True, True]
    for name in ("norm", "rstd", "swiglu"):
        assert through[name].tobytes() == past[name].tobytes(), name
