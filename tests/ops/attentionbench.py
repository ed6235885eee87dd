"""Attention of q, k, v apart in float64, and one run of the ops that compute it: the flash kernels and the dense path."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import dense_attention, flash_attention

Float = npt.NDArray[Any]
TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
UNIT = {"f32": 2.0**-23, "f16": 2.0**-11, "bf16": 2.0**-8}


def exact(q: Float, k: Float, v: Float, dout: Float, causal: bool) -> dict[str, Float]:
    """Everything in float64: out, lse and the gradients. Scores of -inf count nothing; a row of them gives 0."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    group, (_, _, t, c) = q.shape[1] // k.shape[1], q.shape
    wide_k, wide_v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        s = q @ wide_k.swapaxes(-1, -2) / np.sqrt(c)
        if causal:
            s = np.where(np.tri(t, dtype=bool), s, -np.inf)
        top = s.max(-1, keepdims=True)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True)
        p = e / np.where(total == 0, 1, total)
        lse = (top + np.log(total))[..., 0]
        out = p @ wide_v
        ds = p * (dout @ wide_v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True)) / np.sqrt(c)
        dk, dv = (
            x.reshape(k.shape[0], k.shape[1], group, t, c).sum(2)
            for x in (ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout)
        )
        return {"out": out, "lse": lse, "dq": ds @ wide_k, "dk": dk, "dv": dv}


def random(seed: int, b: int, h: int, g: int, t: int, c: int, dtype: str) -> list[Float]:
    """q, k, v, dout."""
    rng = np.random.default_rng((seed, b, h, g, t, c))
    return [rng.standard_normal((b, n, t, c)).astype(TYPES[dtype]) for n in (h, g, g, h)]


def run(
    device: Device,
    way: str,
    q: Float,
    k: Float,
    v: Float,
    dout: Float,
    causal: bool,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Float]:
    """Both directions, "flash" or "dense", from outputs full of NaN; the same bits twice."""
    (b, h, t, c), g = q.shape, k.shape[1]
    dtype = next(name for name, kind in TYPES.items() if q.dtype == kind)
    found: list[dict[str, Float]] = []
    for _ in range(2):
        rec = Recorder(device, overrides)
        x = [device.write(a) for a in (q, k, v, dout)]
        kinds = {"out": q, "dq": q, "dk": k, "dv": v, "lse": np.empty((b, h, t), np.float32)}
        made = {name: _poisoned(device, a.nbytes) for name, a in kinds.items()}
        sizes: dict[str, Any] = {"batch": b, "context": t, "heads": h, "kv_heads": g, "head_dim": c, "dtype": dtype}
        gradients = [made[name] for name in ("dq", "dk", "dv")]
        if way == "flash":
            flash_attention.forward_apart(rec, made["out"], made["lse"], *x[:3], **sizes, causal=causal)
            delta = _poisoned(device, 4 * b * h * t)
            flash_attention.backward_apart(
                rec, *gradients, x[3], made["out"], made["lse"], *x[:3], delta, **sizes, causal=causal
            )
        else:
            scores, dscores = (_poisoned(device, 4 * b * h * t * t) for _ in range(2))
            dense_attention.forward(rec, made["out"], made["lse"], *x[:3], scores, **sizes, causal=causal)
            dense_attention.backward(
                rec, *gradients, scores, dscores, made["lse"], x[3], made["out"], *x[:3], **sizes, causal=causal
            )
        device.run(rec.plan())
        found.append({name: device.read(made[name], a.dtype, a.shape) for name, a in kinds.items()})
    for name, first in found[0].items():
        assert first.tobytes() == found[1][name].tobytes(), f"{name}: two runs gave different bits"
    return found[0]


def _poisoned(device: Device, nbytes: int) -> Buffer:
    buffer = device.alloc(nbytes)
    device.fill(buffer, 0xFF)
    return buffer


def compare(device: Device, way: str, q: Float, k: Float, v: Float, dout: Float, causal: bool, **options: Any) -> None:
    """Each result within a few roundings of its own dtype, by the size of the whole array's numbers."""
    found, wanted = run(device, way, q, k, v, dout, causal, **options), exact(q, k, v, dout, causal)
    dtype = next(name for name, kind in TYPES.items() if q.dtype == kind)
    for name, x in found.items():
        unit = 2.0**-20 if name == "lse" else (64 if dtype == "f32" else 4) * UNIT[dtype]
        allowed = unit * max(np.abs(wanted[name]).max(), 1e-3)
        error = np.abs(x.astype(np.float64) - wanted[name]).max()
        assert error <= allowed, (
            f"{way} {dtype} {q.shape} {k.shape} causal {causal} {name}: {error:.3g} > {allowed:.3g}"
        )
