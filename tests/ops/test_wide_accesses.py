"""Accesses of 16 bytes change no bit: what a thread takes at once shows in no sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from opbench import Bench, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import adamw, add, cast, embedding, scalars, swiglu
from ptxtrain.engine.ops.checks import vector


def both(
    device: Device,
    record: Callable[[Recorder, Bench], None],
    switch: Callable[[bool], None],
    expected: int,
) -> None:
    """Narrow, then wide, the same bits; and the wide run has `expected` launches with other kernels than the narrow one."""
    found, names = [], []
    for wide in (False, True):
        switch(wide)
        found.append(run(device, record))
        rec = Recorder(device)
        record(rec, Bench(device, rec))
        names.append([launch.kernel.path for launch in rec.launches])
    assert sum(a != b for a, b in zip(*names, strict=True)) == expected
    for name, bits in found[0].items():
        same_bits(name, found[1][name], bits)


@pytest.mark.parametrize("count", [4, 1020, 1028])
def test_flat_kernels(device: Device, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(count)
    x, m, grads, partial = normal(rng, count), normal(rng, count), normal(rng, count), normal(rng, 19, count)
    table = np.full(scalars.COUNT, 0.25, np.float32)

    def switch(wide: bool) -> None:
        for module in (adamw, add, cast):
            monkeypatch.setattr(module, "vector", lambda *_: 4 if wide else 1)

    def record(rec: Recorder, b: Bench) -> None:
        state = (b.put(x, name="x"), b.put(m, name="m"), b.put(x * x, name="v"), b.empty("copy", (count,), "bf16"))
        adamw.update(rec, *state, b.put(grads), b.put(table), count=count, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1)
        narrow = b.empty("bf16", (count,), "bf16")
        cast.to_bf16(rec, narrow, b.put(x), count=count)
        cast.to_f32(rec, b.empty("f32", (count,)), narrow, count=count)
        add.into(rec, b.empty("sum", (count,)), b.put(x), b.put(m), count=count)
        add.parts(rec, b.put(x, name="parts"), b.put(partial), parts=19, count=count)

    both(device, record, switch, expected=5)


@pytest.mark.parametrize("width", [4, 132, 260])
def test_embedding(device: Device, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(width)
    tokens = rng.integers(0, 7, 23)
    table, dx, start = normal(rng, 9, width), normal(rng, 23, width), normal(rng, 9, width)
    order = np.argsort(tokens, kind="stable")
    starts = np.searchsorted(tokens[order], np.arange(10))

    def record(rec: Recorder, b: Bench) -> None:
        sizes = {"rows": 23, "width": width, "vocab": 9}
        embedding.forward(rec, b.empty("out", (23, width)), b.put(tokens, "i32"), b.put(table), **sizes)
        dtable = b.put(start, name="dtable")
        embedding.backward(rec, dtable, b.put(dx), b.put(order, "i32"), b.put(starts, "i32"), **sizes)

    def switch(wide: bool) -> None:
        monkeypatch.setattr(embedding, "vector", lambda *_: 4 if wide else 1)

    both(device, record, switch, expected=2)


@pytest.mark.parametrize("width", [8, 248, 264])
def test_swiglu(device: Device, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(width)
    gate_up, dout = normal(rng, 9, 2 * width, dtype="bf16", scale=3.0), normal(rng, 9, width, dtype="bf16")

    def record(rec: Recorder, b: Bench) -> None:
        sizes: dict[str, Any] = {"rows": 9, "width": width, "dtype": "bf16"}
        swiglu.forward(rec, b.empty("out", (9, width), "bf16"), b.put(gate_up, "bf16"), **sizes)
        dgate_up = b.empty("dgate_up", (9, 2 * width), "bf16")
        swiglu.backward(rec, dgate_up, b.put(dout, "bf16"), b.put(gate_up, "bf16"), **sizes)

    def switch(wide: bool) -> None:
        monkeypatch.setattr(swiglu, "FULL", 0.0 if wide else 2.0)

    both(device, record, switch, expected=2)


def test_when_it_is_wide(device: Device) -> None:
    rec, x = Recorder(device), device.alloc(64)
    wide = 1 if device.kind == "cpu" else 4
    assert vector(rec, 8, x, None) == wide
    assert vector(rec, 9, x) == 1 and vector(rec, 8, x, x.view(4, 32)) == 1
    assert swiglu._spec(1024, "bf16", x).wide and not swiglu._spec(1024, "f32", x).wide
    assert not swiglu._spec(384, "bf16", x).wide, "a quarter of the lanes would idle"
    assert not swiglu._spec(1028, "bf16", x).wide and not swiglu._spec(1024, "bf16", x.view(8, 16)).wide
