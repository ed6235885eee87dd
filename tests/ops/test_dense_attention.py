"""Attention of q, k, v apart, by the flash kernels and by score matrices: float64, rows of -inf, huge scores, neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attentionbench import TYPES, compare, exact, random, run

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import dense_attention, flash_attention

# way, B, H, G, T, C, dtype
CASES = [
    ("dense", 1, 2, 1, 5, 6, "f32"),
    ("dense", 2, 4, 2, 70, 48, "f16"),
    ("dense", 1, 1, 1, 1, 1, "bf16"),
    ("flash", 2, 4, 2, 70, 32, "f16"),
    ("flash", 1, 2, 2, 130, 32, "bf16"),
    ("flash", 1, 2, 1, 1, 32, "bf16"),
]
SLOW = [("flash", 2, 6, 2, 200, c, dtype) for c in flash_attention.HEAD_DIMS for dtype in ("f16", "bf16")]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_directions(device: Device, case: tuple[Any, ...], causal: bool) -> None:
    """out, lse, dq, dk and dv at odd lengths and grouped heads, and the same bits twice."""
    way, *sizes = case
    compare(device, way, *random(1, *sizes), causal)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_every_form(device: Device, case: tuple[Any, ...], causal: bool) -> None:
    """All that the flash kernels have, over several tiles."""
    way, *sizes = case
    compare(device, way, *random(2, *sizes), causal)


@pytest.mark.parametrize("way", ["dense", "flash"])
def test_huge_scores(device: Device, way: str) -> None:
    """Scores up to 10^9: no NaN, and what the largest score alone gives, its gradient too."""
    q, k, v, dout = random(3, 1, 2, 1, 65, 32, "f16")
    q, k = q * np.float16(15000), k * np.float16(15000)
    assert np.isfinite(q).all() and np.isfinite(k).all()
    for causal in (True, False):
        found, wanted = run(device, way, q, k, v, dout, causal), exact(q, k, v, dout, causal)
        assert np.abs(wanted["lse"]).max() > 1e8
        assert np.allclose(found["lse"], wanted["lse"], rtol=1e-6, atol=1e-6 * np.abs(wanted["lse"]).max())
        assert np.allclose(found["out"], wanted["out"], atol=2e-3)
        assert np.allclose(found["dv"], wanted["dv"], atol=2e-2)
        for name in ("dq", "dk"):  # 0 * 60000, but for the rounding of dP - delta
            assert np.abs(found[name].astype(np.float64) - wanted[name]).max() < 2e-6 * 60000, name


@pytest.mark.parametrize("way", ["dense", "flash"])
def test_keys_of_minus_infinity(device: Device, way: str) -> None:
    """A key whose score is -inf counts nothing; a row of nothing else gives out 0, lse -inf, and no gradient to values."""
    q, k, v, dout = random(4, 1, 2, 1, 70, 32, "bf16")
    q[..., 0] = 1
    k[0, 0, [0, 1, 40], 0] = -np.inf  # under the causal mask the first two rows see no other key
    found, wanted = run(device, way, q, k, v, dout, True), exact(q, k, v, dout, True)
    assert (found["lse"][0, :, :2] == -np.inf).all() and not found["out"][0, :, :2].astype(np.float32).any()
    assert np.allclose(found["lse"][0, :, 2:], wanted["lse"][0, :, 2:], rtol=1e-5)
    for name in ("out", "dk", "dv"):
        x = found[name].astype(np.float64)
        assert np.isfinite(x).all() and np.abs(x - wanted[name]).max() < 0.02 * np.abs(wanted[name]).max(), name
    assert not found["dv"][0, 0, [0, 1, 40]].astype(np.float32).any()


@pytest.mark.parametrize("way", ["dense", "flash"])
def test_equal_rows(device: Device, way: str) -> None:
    """All keys alike: out is the mean of the values seen, lse the score + log of their number, dq nothing."""
    t, dtype = 70, "f16"
    q, k, v, dout = random(5, 1, 2, 2, t, 32, dtype)
    k[:] = k[:, :, :1]
    v[:] = 0.5
    found = run(device, way, q, k, v, dout, False)
    assert (found["out"] == TYPES[dtype](0.5)).all()
    score = (q.astype(np.float64) * k).sum(-1) / np.sqrt(32)
    assert np.allclose(found["lse"], score + np.log(t), rtol=1e-5, atol=1e-5)
    assert np.abs(found["dq"].astype(np.float64)).max() < 1e-3


@pytest.mark.parametrize("way", ["dense", "flash"])
def test_neighbours_do_not_touch(device: Device, way: str) -> None:
    """The rows past one head's end are the next one's: NaN there must not get in, nor a NaN of a row be lost."""
    q, k, v, dout = random(6, 3, 2, 1, 65, 32, "bf16")
    for x in (q, k, v, dout):
        x[1] = np.nan
    for causal in (True, False):
        together = run(device, way, q, k, v, dout, causal)
        for i in (0, 2):
            alone = run(device, way, *(x[i : i + 1].copy() for x in (q, k, v, dout)), causal)
            for name, x in alone.items():
                assert together[name][i : i + 1].tobytes() == x.tobytes(), (name, i)
        assert all(np.isnan(x[1].astype(np.float32)).all() for x in together.values())


def test_bits_do_not_depend_on_threads() -> None:
    for way in ("dense", "flash"):
        x, found = random(7, 2, 4, 2, 70, 32, "f16"), []
        for threads in (1, 2):
            device = CpuDevice(threads)
            found.append(run(device, way, *x, False))
            device.close()
        assert all(found[1][name].tobytes() == a.tobytes() for name, a in found[0].items())


@pytest.mark.parametrize("way", ["dense", "flash"])
@pytest.mark.parametrize("causal", [True, False])
def test_checked(checked_device: Device, way: str, causal: bool) -> None:
    """No access out of bounds, no read of what nobody wrote, no race."""
    compare(checked_device, way, *random(8, 1, 2, 1, 70, 32, "f16"), causal)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["reverse", "random:1"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_checked_in_any_order(head_dim: int, schedule: str) -> None:
    """The same, in other orders of warps and blocks, where words are parked in shared memory too."""
    device = CpuDevice(checked=True, schedule=schedule)
    for causal in (True, False):
        compare(device, "flash", *random(9, 1, 4, 2, 130, head_dim, "bf16"), causal)
    device.close()


MUTANTS = {
    "a key too many": ("dense", "dense_attention_softmax", "add.u32         %query, %query, 1;", "add.u32 %query, %query, 2;"),
    "no delta": ("dense", "dense_attention_gradient", "sub.rn.f32      %ds, %y, %delta;", "mov.b32 %ds, %y;"),
    "keys for values": ("flash", "attention_forward", "ld.param.u64    %p_v, [v];", "ld.param.u64    %p_v, [k];"),
    "old sums not faded": ("flash", "attention_forward", "mul.rn.f32      %sum_0, %sum_0, %fade_0;", ""),
    "one head of a group": ("flash", "attention_dkv", "%remaining, %walks, %group;", "%remaining, %walks, 1;"),
    "a head too far": ("flash", "attention_dkv", "sub.u32         %row_gap, %context, %walks;", "mov.u32 %row_gap, %context;"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    way, stem, old, new = MUTANTS[name]

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    device = CpuDevice(2)
    with pytest.raises(AssertionError):
        compare(device, way, *random(10, 1, 4, 2, 130, 64, "f16"), True, overrides={stem: edit})
    device.close()


def test_refusals(device: Device) -> None:
    rec, x = Recorder(device), device.alloc(1 << 12)
    sizes: dict[str, Any] = {"batch": 1, "context": 4, "head_dim": 32, "causal": True}
    with pytest.raises(PtxtrainError, match="4 query heads cannot share 3 key/value heads"):
        dense_attention.forward(rec, x, x, x, x, x, x, **sizes, heads=4, kv_heads=3, dtype="f32")
    with pytest.raises(PtxtrainError, match="f32 has no tensor core"):
        flash_attention.forward_apart(rec, x, x, x, x, x, **sizes, heads=2, kv_heads=1, dtype="f32")
    with pytest.raises(PtxtrainError, match="an array is not aligned to 16 bytes"):
        flash_attention.forward_apart(rec, x, x, x.view(2, 2048), x, x, **sizes, heads=2, kv_heads=1, dtype="f16")
    with pytest.raises(PtxtrainError, match="out holds 4096 bytes, 16384 x f32 need 65536"):
        dense_attention.forward(rec, x, x, x, x, x, x, **sizes, heads=128, kv_heads=1, dtype="f32")
    assert not rec.launches
