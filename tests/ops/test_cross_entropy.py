"""Cross-entropy against float64 and against its naive twin; ignored rows; log-sum-exp of large logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, normal, rounded, run

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import cross_entropy, scalars

SCALE = 1 / 129


def formula(logits: npt.NDArray[Any], targets: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
    """loss, lse, gradient."""
    top = logits.max(-1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    kept = targets >= 0
    rows = np.arange(len(targets))
    hot = np.zeros_like(logits)
    hot[rows[kept], targets[kept]] = 1
    loss = np.where(kept, lse - logits[rows, np.maximum(targets, 0)], logits.dtype.type(0))
    gradient = (np.exp(logits - lse[:, None]) - hot) * logits.dtype.type(SCALE)
    gradient[~kept] = 0
    return loss, lse, gradient


def numbers() -> npt.NDArray[Any]:
    """The scalars, with NaN wherever the kernel has no business."""
    out = np.full(scalars.COUNT, np.nan, np.float32)
    out[scalars.GRAD_SCALE] = SCALE
    return out


def case(rows: int, vocab: int, dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(rows * 1000 + vocab)
    logits, targets = normal(rng, rows, vocab, dtype=dtype, scale=5), rng.integers(0, vocab, rows)
    targets[0] = vocab - 1
    logits[-1] = rounded(logits[-1] + 200, dtype)  # beyond the range of exp, unless shifted
    targets[rows // 2 :: 3] = -1
    return logits, targets


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("vocab", [2, 97, 300])
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_both_directions(device: Device, rows: int, vocab: int, dtype: str) -> None:
    logits, targets = case(rows, vocab, dtype)
    exact, same = formula(logits.astype(np.float64), targets), formula(logits, targets)

    def record(rec: Recorder, b: Bench) -> None:
        loss, lse = b.empty("loss", (rows,)), b.empty("lse", (rows,))
        x, t = b.put(logits, dtype, name="dlogits"), b.put(targets, "i32")
        cross_entropy.forward(rec, loss, lse, x, t, rows=rows, vocab=vocab, dtype=dtype)
        cross_entropy.backward(rec, x, lse, t, b.put(numbers()), rows=rows, vocab=vocab, dtype=dtype)

    found = run(device, record)
    what = f"cross_entropy rows {rows} vocab {vocab} {dtype}"
    check(f"{what} loss", found["loss"], exact[0], same[0], floor=16)
    check(f"{what} lse", found["lse"], exact[1], same[1])
    # A probability is exp(x - lse): an error of lse's last place, 2^-17 at 200, is a relative error of the probability.
    check(f"{what} gradient", found["dlogits"], exact[2], same[2], dtype=dtype, floor=16)
    ignored = targets < 0
    assert not found["loss"][ignored].any() and not found["dlogits"][ignored].any()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_against_the_naive_twin(device: Device, dtype: str) -> None:
    rows, vocab = 37, 97
    logits, targets = case(rows, vocab, dtype)

    def record(rec: Recorder, b: Bench) -> None:
        t, s = b.put(targets, "i32"), b.put(numbers())
        loss, lse, x = b.empty("loss", (rows,)), b.empty("lse", (rows,)), b.put(logits, dtype, name="dlogits")
        cross_entropy.forward(rec, loss, lse, x, t, rows=rows, vocab=vocab, dtype=dtype)
        cross_entropy.backward(rec, x, lse, t, s, rows=rows, vocab=vocab, dtype=dtype)
        loss, lse, x = b.empty("twin_loss", (rows,)), b.empty("twin_lse", (rows,)), b.put(logits, dtype, "twin_dlogits")
        sizes = (np.uint32(rows), np.uint32(vocab))
        kernel = rec.reference("cross_entropy", f"cross_entropy_forward_{dtype}")
        rec.launch(kernel, (2, 1, 1), (32, 1, 1), loss, lse, x, t, *sizes)
        kernel = rec.reference("cross_entropy", f"cross_entropy_backward_{dtype}")
        rec.launch(kernel, (2, 1, 1), (32, 1, 1), x, lse, t, s, *sizes)

    found = run(device, record)
    exact = formula(logits.astype(np.float64), targets)
    for name, truth in zip(("loss", "lse", "dlogits"), exact, strict=True):
        rounding = dtype if name == "dlogits" else "f32"
        check(f"cross_entropy {name} {dtype}", found[name], truth, found[f"twin_{name}"], dtype=rounding, floor=16)
