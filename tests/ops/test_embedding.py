"""The embedding: rows by token, and a gradient whose sums have one writer and one order."""

from __future__ import annotations

import numpy as np
import pytest
from opbench import Bench, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import embedding

VOCAB = 97


@pytest.mark.parametrize("width", [48, 97])
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_forward(device: Device, rows: int, width: int) -> None:
    rng = np.random.default_rng(rows)
    table, tokens = normal(rng, VOCAB, width), rng.integers(0, VOCAB, rows)
    tokens[-1] = VOCAB - 1

    def record(rec: Recorder, b: Bench) -> None:
        inputs = (b.put(tokens, "i32"), b.put(table))
        embedding.forward(rec, b.empty("out", (rows, width)), *inputs, rows=rows, width=width, vocab=VOCAB)

    same_bits(f"embedding.forward rows {rows} width {width}", run(device, record)["out"], table[tokens])


@pytest.mark.parametrize("width", [48, 97])
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_backward(device: Device, rows: int, width: int) -> None:
    rng = np.random.default_rng(rows)
    dx, old = normal(rng, rows, width), normal(rng, VOCAB, width, scale=100)
    tokens = rng.integers(0, 11, rows)  # few tokens: long chains, and most rows of the table untouched
    tokens[0] = VOCAB - 1
    order = np.argsort(tokens, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=VOCAB))])

    def record(rec: Recorder, b: Bench) -> None:
        inputs = (b.put(dx), b.put(order, "i32"), b.put(starts, "i32"))
        embedding.backward(rec, b.put(old, name="dtable"), *inputs, rows=rows, width=width, vocab=VOCAB)

    expected = old.copy()
    for row, token in enumerate(tokens):
        expected[token] += dx[row]
    same_bits(f"embedding.backward rows {rows} width {width}", run(device, record)["dtable"], expected)
