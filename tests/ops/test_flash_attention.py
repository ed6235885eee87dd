"""Flash attention against float64, the naive twin and the same formula with its roundings; edges, order, independence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import EPSILON, Bench, normal, rounded, run, same_bits
from test_attention import attend as attend_naively
from test_attention import backward, forward, split

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import flash_attention
from ptxtrain.ptx import attention_spec, render

Float = npt.NDArray[Any]
CASES = [
    (1, 1, 1, 64),
    (63, 3, 1, 64),
    (64, 8, 1, 64),
    (65, 6, 2, 64),
    (500, 6, 2, 64),
    (65, 8, 2, 32),
    (130, 3, 1, 32),
]
SLOW = [(t, h, g, c) for c in (32, 64, 128) for t in (1, 63, 64, 65) for h, g in ((1, 1), (3, 1), (8, 1), (6, 2))]
SLOW += [(500, 6, 2, 32), (500, 6, 2, 128), (257, 4, 4, 128)]


def attend(
    device: Device, qkv: Float, dout: Float, heads: int, kv_heads: int, overrides: dict[str, str] | None = None
) -> dict[str, Float]:
    """out, lse, delta and dqkv; qkv [B, T, H + 2G, C], dout [B, T, H, C]."""
    batch, context, _, head_dim = qkv.shape

    def record(rec: Recorder, b: Bench) -> None:
        sizes = {"batch": batch, "context": context, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        x, lse = b.put(qkv, "bf16"), b.empty("lse", (batch, heads, context))
        out, delta = b.empty("out", dout.shape, "bf16"), b.empty("delta", (batch, heads, context))
        assert delta.nbytes == flash_attention.delta_bytes(batch=batch, context=context, heads=heads)
        flash_attention.forward(rec, out, lse, x, **sizes)
        dqkv = b.empty("dqkv", qkv.shape, "bf16")
        flash_attention.backward(rec, dqkv, b.put(dout, "bf16"), out, lse, x, delta, **sizes)

    return run(device, record, overrides)


def forward_as_the_kernel(qkv: Float, heads: int, kv_heads: int) -> tuple[Float, Float]:
    """out and lse in f32, with probabilities rounded to bf16 for the product with v, but not for their sum."""
    q, k, v = split(qkv, heads, kv_heads)
    scores = q @ k.transpose(0, 1, 3, 2) * np.float32(1 / np.sqrt(qkv.shape[-1]))
    scores = np.where(np.tri(qkv.shape[1], dtype=bool), scores, np.float32(-np.inf))
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    return (rounded(p, "bf16") @ v / total).transpose(0, 2, 1, 3), (top + np.log(total))[..., 0]


def backward_as_the_kernel(qkv: Float, dout: Float, out: Float, lse: Float, heads: int, kv_heads: int) -> Float:
    """dqkv in f32, with P and dS rounded to bf16 for their products."""
    q, k, v = split(qkv, heads, kv_heads)
    d, scale = dout.transpose(0, 2, 1, 3), np.float32(1 / np.sqrt(qkv.shape[-1]))
    scores = np.where(np.tri(qkv.shape[1], dtype=bool), q @ k.transpose(0, 1, 3, 2) * scale, np.float32(-np.inf))
    p = np.exp(scores - lse[..., None])
    delta = (d * out.transpose(0, 2, 1, 3)).sum(-1, keepdims=True)
    ds = rounded(p * (d @ v.transpose(0, 1, 3, 2) - delta), "bf16")
    batch, _, context, channels = q.shape
    grouped = (batch, kv_heads, heads // kv_heads, context, channels)
    dk = (ds.transpose(0, 1, 3, 2) @ q).reshape(grouped).sum(2) * scale
    dv = (rounded(p, "bf16").transpose(0, 1, 3, 2) @ d).reshape(grouped).sum(2)
    return np.concatenate([ds @ k * scale, dk, dv], 1).transpose(0, 2, 1, 3)


def hold(
    what: str, actual: Float, exact: Float, same: Float, unit: float, *, floor: float = 16.0, each: bool = True
) -> None:
    """The norm of the error, and the largest (`each`), at most twice those of the formula in the kernel's precision plus
    `floor` roundings of `unit`: dS = P * (dP - delta) cancels where one key has all the weight."""
    assert actual.shape == exact.shape == same.shape
    error, own = np.abs(actual - exact), np.abs(same - exact)
    allowed = 2 * own.max() + floor * EPSILON["f32"] * unit
    wrong = ~(error <= allowed) & each
    if wrong.any():
        places = [tuple(map(int, p)) for p in np.argwhere(wrong)[:5]]
        shown = "; ".join(f"{p}: {actual[p]!r} for {exact[p]!r}" for p in places)
        raise AssertionError(f"{what}: {wrong.sum()} of {wrong.size} beyond {allowed:.3g}: {shown}")
    norm, limit = np.linalg.norm(error), 2 * np.linalg.norm(own) + floor * EPSILON["f32"] * unit * np.sqrt(error.size)
    assert norm <= limit, f"{what}: norm of the error {norm:.4g}, allowed {limit:.4g}"


def parts(dqkv: Float, heads: int, kv_heads: int) -> dict[str, Float]:
    return dict(zip(("dq", "dk", "dv"), np.split(dqkv, [heads, heads + kv_heads], axis=2), strict=True))


def compare(device: Device, qkv: Float, dout: Float, heads: int, kv_heads: int, *, twin: bool = True) -> None:
    """Everything against float64: twice the formula's own error; its norm twice the naive twin's, which rounds no P or dS."""
    found = attend(device, qkv, dout, heads, kv_heads)
    what = f"flash attention H {heads} G {kv_heads} C {qkv.shape[-1]} T {qkv.shape[1]}"
    wide, stored = qkv.astype(np.float64), found["out"]
    exact_out, exact_lse, _ = forward(wide, heads, kv_heads)
    out, lse = forward_as_the_kernel(qkv, heads, kv_heads)
    hold(f"{what} out", stored, exact_out, rounded(out, "bf16"), np.abs(exact_out).max())
    hold(f"{what} lse", found["lse"], exact_lse, lse, np.abs(exact_lse).max())
    delta = (dout.astype(np.float64) * stored).sum(-1).transpose(0, 2, 1)
    hold(f"{what} delta", found["delta"], delta, delta, np.abs(dout * stored).sum(-1).max(), floor=4)
    exact = backward(wide, dout.astype(np.float64), stored.astype(np.float64), heads, kv_heads)
    same = rounded(backward_as_the_kernel(qkv, dout, stored, found["lse"], heads, kv_heads), "bf16")
    unit = float(np.abs(exact).max())
    each = [parts(x, heads, kv_heads) for x in (found["dqkv"], exact, same)]
    for name in each[0]:
        hold(f"{what} {name}", *(x[name] for x in each), unit)
    if twin:
        naive = attend_naively(device, qkv, dout, heads, kv_heads, "bf16")
        exact_twin = backward(wide, dout.astype(np.float64), naive["out"].astype(np.float64), heads, kv_heads)
        hold(f"{what} out, against the twin", stored, exact_out, naive["out"], 1.0, each=False)
        each = [parts(x, heads, kv_heads) for x in (found["dqkv"], exact, naive["dqkv"] - exact_twin + exact)]
        for name in each[0]:
            hold(f"{what} {name}, against the twin", *(x[name] for x in each), unit, each=False)


def random(seed: int, batch: int, context: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Float, Float]:
    rng = np.random.default_rng(seed)
    qkv = normal(rng, batch, context, heads + 2 * kv_heads, head_dim, dtype="bf16")
    return qkv, normal(rng, batch, context, heads, head_dim, dtype="bf16")


@pytest.mark.parametrize(("context", "heads", "kv_heads", "head_dim"), CASES)
def test_both_directions(device: Device, context: int, heads: int, kv_heads: int, head_dim: int) -> None:
    qkv, dout = random(context, 1 if context > 200 else 2, context, heads, kv_heads, head_dim)
    compare(device, qkv, dout, heads, kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize(("context", "heads", "kv_heads", "head_dim"), SLOW)
def test_every_head_dimension(device: Device, context: int, heads: int, kv_heads: int, head_dim: int) -> None:
    qkv, dout = random(context, 2, context, heads, kv_heads, head_dim)
    compare(device, qkv, dout, heads, kv_heads)


@pytest.mark.parametrize("scale", [4.0, 32.0])
def test_large_scores(device: Device, scale: float) -> None:
    """Scores up to 128 and 8,192, where all the weight is on one key or two."""
    qkv, dout = random(3, 1, 65, 2, 1, 64)
    qkv[:, :, :3] *= scale
    assert np.isfinite(attend(device, qkv, dout, 2, 1)["dqkv"]).all()
    compare(device, qkv, dout, 2, 1)


def test_equal_rows(device: Device) -> None:
    """All keys alike: every probability is 1 / (t + 1), out is v to the bit, lse the score + log(t + 1), dq nothing."""
    context, head_dim = 130, 64
    qkv, dout = random(4, 1, context, 2, 1, head_dim)
    qkv[:] = qkv[:, :1]
    found = attend(device, qkv, dout, 2, 1)
    same_bits("out", found["out"], np.broadcast_to(qkv[:, :, 3:], dout.shape))
    q, k, _ = split(qkv.astype(np.float64), 2, 1)
    score = (q * k).sum(-1) / np.sqrt(head_dim)
    assert found["lse"] == pytest.approx(score + np.log(np.arange(1, context + 1)), rel=1e-6, abs=1e-6)
    assert np.abs(found["dqkv"][:, :, :2]).max() < 1e-4


def test_zeros(device: Device) -> None:
    qkv = np.zeros((1, 65, 4, 64), np.float32)
    found = attend(device, qkv, np.zeros((1, 65, 2, 64), np.float32), 2, 1)
    assert not found["out"].any() and not found["dqkv"].any()
    assert found["lse"] == pytest.approx(np.broadcast_to(np.log(np.arange(1, 66)), (1, 2, 65)), rel=1e-6)


def test_later_keys_do_not_reach_earlier_queries(device: Device) -> None:
    qkv, dout = random(5, 1, 130, 2, 1, 64)
    first = attend(device, qkv, dout, 2, 1)
    qkv[0, 100:] *= 100
    second = attend(device, qkv, dout, 2, 1)
    for name in ("out", "lse", "delta"):
        axis = 1 if name == "out" else 2
        before = [np.take(x[name], range(100), axis) for x in (first, second)]
        same_bits(f"{name} before the change", before[1], before[0])
    same_bits("dq before the change", second["dqkv"][:, :100, :2], first["dqkv"][:, :100, :2])
    assert (second["out"][:, 100:] != first["out"][:, 100:]).any()


def test_sequences_do_not_touch_each_other(device: Device) -> None:
    """The rows past one sequence's end are the next one's: NaN there must not get in."""
    qkv, dout = random(6, 3, 65, 4, 2, 64)
    qkv[1], dout[1] = np.nan, np.nan
    together = attend(device, qkv, dout, 4, 2)
    for i in (0, 2):
        alone = attend(device, qkv[i : i + 1], dout[i : i + 1], 4, 2)
        for name in ("out", "lse", "delta", "dqkv"):
            same_bits(f"sequence {i} {name}", together[name][i : i + 1], alone[name])
        assert np.isfinite(alone["dqkv"]).all()


def test_bits_do_not_depend_on_threads() -> None:
    qkv, dout = random(7, 2, 130, 6, 2, 64)
    found = []
    for threads in (1, 2):
        device = CpuDevice(threads)
        found.append(attend(device, qkv, dout, 6, 2))
        device.close()
    for name, x in found[0].items():
        same_bits(name, found[1][name], x)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:1"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_checked(head_dim: int, schedule: str) -> None:
    """No access out of bounds, no read of what nobody wrote, no race, whatever the order of warps and blocks."""
    qkv, dout = random(8, 2, 130, 4, 2, head_dim)
    checked, plain = CpuDevice(checked=True, schedule=schedule), CpuDevice(2)
    found, expected = (attend(device, qkv, dout, 4, 2) for device in (checked, plain))
    for name, x in expected.items():
        same_bits(name, found[name], x)


MUTANTS = {
    "a key too many": ("attention_forward", "%is_later, %ahead, 0;", "%is_later, %ahead, -1;"),
    "old sums not faded": ("attention_forward", "mul.rn.f32      %sum_0, %sum_0, %fade_0;", ""),
    "no delta": ("attention_dq", "%dp_0_0, %delta_0;", "%dp_0_0, 0f00000000;"),
    "query and delta mismatched": ("attention_dkv", "%dp_1_1, %delta_3;", "%dp_1_1, %delta_2;"),
    "one query head of a group": ("attention_dkv", "mul.lo.u32      %remaining, %walks, %group;", "mov.u32 %remaining, %walks;"),
    "queries in the order of their rows": ("attention_dkv", "mad.lo.u32      %at, %query, 4, %at;", "and.b32 %at, %lane, 7;"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stem, old, new = MUTANTS[name]
    make = {"attention_forward": attention_spec.forward_spec, "attention_dq": attention_spec.dq_spec}
    text = render.render(stem, make.get(stem, attention_spec.dkv_spec)(64))
    assert old in text
    edited = {stem: text.replace(old, new)}
    monkeypatch.setitem(globals(), "attend", lambda *args: attend_with(edited, *args))
    qkv, dout = random(9, 2, 130, 4, 2, 64)
    with pytest.raises(AssertionError):
        compare(device, qkv, dout, 4, 2, twin=False)


def attend_with(overrides: dict[str, str], device: Device, *args: Any, plain: Any = attend) -> dict[str, Float]:
    found: dict[str, Float] = plain(device, *args, overrides)
    return found


def test_refusals(device: Device) -> None:
    rec, x = Recorder(device), device.alloc(1 << 16)
    sizes: dict[str, Any] = {"batch": 1, "context": 4}
    with pytest.raises(PtxtrainError, match="4 query heads cannot share 3 key/value heads"):
        flash_attention.forward(rec, x, x, x, **sizes, heads=4, kv_heads=3, head_dim=64)
    with pytest.raises(PtxtrainError, match="head_dim is 48, the flash kernels have 32, 64, 128; use one of them, or"):
        flash_attention.backward(rec, x, x, x, x, x, x, **sizes, heads=4, kv_heads=2, head_dim=48)
    with pytest.raises(PtxtrainError, match="lse holds 16 bytes, 8 x f32 need 32"):
        flash_attention.forward(rec, x, x.view(0, 16), x, **sizes, heads=2, kv_heads=1, head_dim=32)
    assert not rec.launches
