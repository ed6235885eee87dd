"""Cross-entropy against float64 and against its naive twin; ignored rows; log-sum-exp of large logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, normal, rounded, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import cross_entropy, scalars
from ptxtrain.ptx import render

SCALE = 1 / 129


def formula(logits: npt.NDArray[Any], targets: npt.NDArray[Any], z_loss: float = 0.0) -> tuple[npt.NDArray[Any], ...]:
    """loss, lse, gradient."""
    z = logits.dtype.type(np.float32(z_loss))
    top = logits.max(-1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    kept = targets >= 0
    rows = np.arange(len(targets))
    hot = np.zeros_like(logits)
    hot[rows[kept], targets[kept]] = 1
    loss = np.where(kept, lse - logits[rows, np.maximum(targets, 0)] + z * lse * lse, logits.dtype.type(0))
    boost = 1 + 2 * z * lse
    gradient = (np.exp(logits - lse[:, None]) * boost[:, None] - hot) * logits.dtype.type(SCALE)
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


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 8), (7, 104), (129, 1000), (3, 4104)])
def test_fused_against_float64_and_the_twins(device: Device, rows: int, vocab: int, z_loss: float) -> None:
    """4,104 logits are three turns of the block, the last of one chunk. Without scalars the logits stay."""
    logits, targets = case(rows, vocab, "bf16")
    exact, same = (formula(logits.astype(kind), targets, z_loss) for kind in (np.float64, np.float32))

    def record(rec: Recorder, b: Bench) -> None:
        t, s, sizes = b.put(targets, "i32"), b.put(numbers()), {"rows": rows, "vocab": vocab, "z_loss": z_loss}
        loss, lse, x = b.empty("loss", (rows,)), b.empty("lse", (rows,)), b.put(logits, "bf16", "dlogits")
        cross_entropy.fused(rec, loss, lse, x, t, s, **sizes)
        loss, lse, x = b.empty("only_loss", (rows,)), b.empty("only_lse", (rows,)), b.put(logits, "bf16", "kept")
        cross_entropy.fused(rec, loss, lse, x, t, None, **sizes)
        loss, lse, x = b.empty("twin_loss", (rows,)), b.empty("twin_lse", (rows,)), b.put(logits, "bf16", "twin")
        cross_entropy.forward(rec, loss, lse, x, t, **sizes, dtype="bf16")
        cross_entropy.backward(rec, x, lse, t, s, **sizes, dtype="bf16")

    found = run(device, record)
    for prefix in ("", "twin_"):
        what = f"cross_entropy {prefix or 'fused '}rows {rows} vocab {vocab} z {z_loss}"
        check(f"{what} loss", found[f"{prefix}loss"], exact[0], same[0], floor=16)
        check(f"{what} lse", found[f"{prefix}lse"], exact[1], same[1])
        gradient = found["twin" if prefix else "dlogits"]
        check(f"{what} gradient", gradient, exact[2], same[2], dtype="bf16", floor=16)
    same_bits("the loss alone", found["only_loss"], found["loss"])
    same_bits("logits without a gradient", found["kept"], logits)
    ignored = targets < 0
    assert not found["loss"][ignored].any() and not found["dlogits"][ignored].any()


@pytest.mark.parametrize("vocab", [32_768, 65_536])
def test_long_rows(device: Device, vocab: int) -> None:
    """The dev preset's vocabulary, 64 KiB of shared memory, and one that takes a second read."""
    logits, targets = case(3, vocab, "bf16")
    exact, same = (formula(logits.astype(kind), targets) for kind in (np.float64, np.float32))

    def record(rec: Recorder, b: Bench) -> None:
        loss, lse, x = b.empty("loss", (3,)), b.empty("lse", (3,)), b.put(logits, "bf16", "dlogits")
        cross_entropy.fused(rec, loss, lse, x, b.put(targets, "i32"), b.put(numbers()), rows=3, vocab=vocab)
        assert rec.launches[-1].shared == (2 * vocab if vocab == 32_768 else 0)

    found = run(device, record)
    check(f"cross_entropy V {vocab} loss", found["loss"], exact[0], same[0], floor=16)
    check(f"cross_entropy V {vocab} gradient", found["dlogits"], exact[2], same[2], dtype="bf16", floor=16)


def test_a_row_too_long_for_the_chip_gives_the_same_bits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab = 5, 4104
    logits, targets = case(rows, vocab, "bf16")
    assert cross_entropy.reads_twice(vocab) is None and "128 KiB" in str(cross_entropy.reads_twice(65536))

    def record(rec: Recorder, b: Bench) -> None:
        loss, lse, x = b.empty("loss", (rows,)), b.empty("lse", (rows,)), b.put(logits, "bf16", "dlogits")
        cross_entropy.fused(rec, loss, lse, x, b.put(targets, "i32"), b.put(numbers()), rows=rows, vocab=vocab)

    on_chip = run(device, record)
    monkeypatch.setattr(cross_entropy, "ON_CHIP", 0)
    twice = run(device, record)
    for name, bits in on_chip.items():
        same_bits(name, twice[name], bits)


def test_fused_masks_of_minus_infinity(device: Device) -> None:
    """Logits of -inf have probability 0, also where a thread has nothing else."""
    logits = np.full((2, 4096), -np.inf, np.float32)
    logits[:, 8:16] = 3.0
    targets = np.array([9, 10])

    def record(rec: Recorder, b: Bench) -> None:
        loss, lse, x = b.empty("loss", (2,)), b.empty("lse", (2,)), b.put(logits, "bf16", "dlogits")
        cross_entropy.fused(rec, loss, lse, x, b.put(targets, "i32"), b.put(numbers()), rows=2, vocab=4096)

    found = run(device, record)
    np.testing.assert_allclose(found["loss"], math.log(8), rtol=1e-6)
    expected = np.where(np.isfinite(logits), 1 / 8, 0.0)
    expected[[0, 1], targets] -= 1
    np.testing.assert_allclose(found["dlogits"], expected * SCALE, rtol=2.0**-8)


MUTANTS = [
    ("the sum not rescaled", "mul.rn.f32      %sum, %sum, %e;                           //", "//"),
    ("the target left out", "@%is_owner st.global.b16 [%p_target], %hot;", ""),
    ("the target's one forgotten", "fma.rn.f32      %e, %e, %factor, %scale;", "mul.rn.f32      %e, %e, %factor;"),
    ("ignored rows learn", "@%is_ignored bra ZEROS;", ""),
    (
        "a lane's sum counted twice",
        "add.rn.f32      %sum, %sum, %other_sum;",
        "fma.rn.f32      %sum, %other_sum, 0f40000000, %sum;",
    ),
    ("the last turn left out", "setp.lt.u32     %is_more, %base, %chunks;", "setp.lt.u32     %is_more, %base, 512;"),
]


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS, ids=[row[0].replace(" ", "-") for row in MUTANTS])
def test_mutants_of_the_fused_kernel_are_caught(device: Device, name: str, old: str, new: str) -> None:
    rows, vocab = 7, 4104
    logits, targets = case(rows, vocab, "bf16")
    exact, same = (formula(logits.astype(kind), targets) for kind in (np.float64, np.float32))
    text = render.render("cross_entropy")
    assert old in text

    def record(rec: Recorder, b: Bench) -> None:
        loss, lse, x = b.empty("loss", (rows,)), b.empty("lse", (rows,)), b.put(logits, "bf16", "dlogits")
        cross_entropy.fused(rec, loss, lse, x, b.put(targets, "i32"), b.put(numbers()), rows=rows, vocab=vocab)

    def hold(overrides: dict[str, str]) -> None:
        found = run(device, record, overrides)
        check(f"{name} loss", found["loss"], exact[0], same[0], floor=16)
        check(f"{name} gradient", found["dlogits"], exact[2], same[2], dtype="bf16", floor=16)

    hold({})
    with pytest.raises(AssertionError):
        hold({"cross_entropy": text.replace(old, new)})


def test_refusals(device: Device) -> None:
    rec, x = Recorder(device), device.alloc(4096)
    with pytest.raises(PtxtrainError, match="rows of 97 logits are no multiple of 8"):
        cross_entropy.fused(rec, x, x, x, x, x, rows=1, vocab=97)
    with pytest.raises(PtxtrainError, match="not aligned to 16 bytes"):
        cross_entropy.fused(rec, x, x, x.view(2, 1024), x, x, rows=1, vocab=96)
