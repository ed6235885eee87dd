"""One query over a cache: against float64 and against flash attention's last row; what lies past the position shows in no bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from opbench import F32, F64, Bench, normal, run, same_bits

from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import attention_decode, flash_attention
from ptxtrain.ptx.decode_spec import DecodeSpec

NUMPY: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROUNDING = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}


def narrowed(x: npt.NDArray[Any], dtype: str) -> F32:
    return x.astype(NUMPY[dtype]).astype(np.float32)


class Case:
    """Queries and a cache, exact in the dtype; the cache is NaN past each position."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, context: int, positions: list[int], dtype: str, scale: float = 1
    ) -> None:
        rng = np.random.default_rng([heads, head_dim, context])
        self.heads, self.kv_heads, self.head_dim, self.context, self.dtype = heads, kv_heads, head_dim, context, dtype
        self.positions = np.array(positions, np.int32)
        batch = len(positions)
        self.qkv = narrowed(scale * rng.standard_normal((batch, heads + 2 * kv_heads, head_dim)), dtype)
        self.keys, self.values = (
            narrowed(scale * rng.standard_normal((batch, kv_heads, context, head_dim)), dtype) for _ in range(2)
        )
        for b, position in enumerate(positions):
            self.keys[b, :, position + 1 :] = self.values[b, :, position + 1 :] = np.nan

    def __str__(self) -> str:
        return f"H {self.heads} G {self.kv_heads} C {self.head_dim} T {self.context} {self.dtype} at {self.positions}"

    def run(self, device: Device, checked: bool = False) -> F32:
        def put(b: Bench, x: F32) -> Buffer:
            return b.device.write(x.astype(NUMPY[self.dtype]))

        def cache(b: Bench, x: F32) -> Buffer:
            """In checked mode what is past the position has never been written."""
            if not checked:
                return put(b, x)
            raw, item = x.astype(NUMPY[self.dtype]), np.dtype(NUMPY[self.dtype]).itemsize
            buffer, row = b.device.alloc(raw.nbytes), self.head_dim * item
            for s in range(len(self.positions)):
                for g in range(self.kv_heads):
                    start = (s * self.kv_heads + g) * self.context * row
                    part = np.ascontiguousarray(raw[s, g, : self.positions[s] + 1])
                    b.device.upload(buffer.view(start, part.nbytes), part)
                    b.device.synchronize()
            return buffer

        shape = (len(self.positions), self.heads, self.head_dim)

        def record(rec: Recorder, b: Bench) -> None:
            out = b.scratch(int(np.prod(shape)) * np.dtype(NUMPY[self.dtype]).itemsize)
            b.wanted["out"] = (out, "f32" if self.dtype == "f32" else "bf16", shape)
            attention_decode.run(
                rec, out, put(b, self.qkv), cache(b, self.keys), cache(b, self.values), b.put(self.positions, "i32"),
                batch=shape[0], context=self.context, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
                dtype=self.dtype,
            )  # fmt: skip

        found = run(device, record)["out"]
        if self.dtype == "f16":  # read back as bf16 and widened: take the bits again
            found = (found.view(np.uint32) >> 16).astype(np.uint16).view(np.float16).astype(np.float32)
        return found

    def exact(self, kind: type = np.float64) -> F64:
        out = np.empty((len(self.positions), self.heads, self.head_dim))
        for b, position in enumerate(self.positions):
            for h in range(self.heads):
                g = h // (self.heads // self.kv_heads)
                keys, values = (x[b, g, : position + 1].astype(kind) for x in (self.keys, self.values))
                scores = keys @ self.qkv[b, h].astype(kind) / kind(np.sqrt(self.head_dim))
                weights = np.exp(scores - scores.max())
                out[b, h] = (weights / weights.sum()) @ values
        return out


CASES = [
    (6, 2, 64, 512, [511], "bf16"),
    (6, 2, 64, 300, [0, 299, 31, 256], "bf16"),
    (4, 2, 32, 70, [32, 69], "f32"),
    (3, 3, 80, 50, [47], "bf16"),
    (2, 1, 12, 40, [0, 39], "f32"),
    (2, 2, 128, 33, [32], "f16"),
    (1, 1, 2, 9, [8], "bf16"),
    (2, 1, 256, 20, [19], "bf16"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "context", "positions", "dtype"), CASES)
def test_against_float64(
    device: Device, heads: int, kv_heads: int, head_dim: int, context: int, positions: list[int], dtype: str
) -> None:
    """Every head size and dtype, positions at, before and behind a tile's end; NaN past them is never read."""
    case = Case(heads, kv_heads, head_dim, context, positions, dtype)
    found, exact = case.run(device), case.exact()
    own = np.abs(case.exact(np.float32) - exact).max()
    wrong = np.abs(found - exact) - (ROUNDING[dtype] * np.abs(exact) + 4 * own + 32 * 2.0**-24)
    assert (wrong <= 0).all(), f"{case}: {wrong.max():.3g} beyond the rounding"


def test_a_sequence_has_the_same_bits_alone(device: Device) -> None:
    """Neither the number of sequences nor what lies past the position shows."""
    case = Case(6, 2, 64, 200, [199, 3, 64], "bf16")
    found = case.run(device)
    for b in range(3):
        alone = Case(6, 2, 64, 200, [199, 3, 64], "bf16")
        for name in ("qkv", "keys", "values", "positions"):
            setattr(alone, name, getattr(case, name)[b : b + 1])
        alone.keys, alone.values = np.nan_to_num(alone.keys, nan=9.0), np.nan_to_num(alone.values, nan=9.0)
        same_bits(str(alone), alone.run(device)[0], found[b])


def test_very_large_and_equal_scores(device: Device) -> None:
    """Scores of tens of thousands pick one key; equal scores average the values."""
    case = Case(2, 1, 32, 90, [89], "f32", scale=100)
    np.testing.assert_allclose(case.run(device), case.exact(), rtol=1e-4, atol=1e-3)
    case.qkv[:] = 0
    np.testing.assert_allclose(case.run(device), case.exact(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_against_the_last_row_of_flash_attention(device: Device, head_dim: int) -> None:
    """The same numbers as the tensor cores' kernel, within the rounding of weights to bf16 that it does and this one does not."""
    heads, kv_heads, context = 4, 2, 77
    qkv = normal(np.random.default_rng(head_dim), context, heads + 2 * kv_heads, head_dim, dtype="bf16")
    sizes = {"batch": 1, "context": context, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}

    def record(rec: Recorder, b: Bench) -> None:
        flash_attention.forward(
            rec, b.empty("out", (context, heads, head_dim), "bf16"), b.scratch(4 * heads * context), b.put(qkv, "bf16"),
            **sizes,
        )  # fmt: skip

    whole = run(device, record)["out"]
    case = Case(heads, kv_heads, head_dim, context, [context - 1], "bf16")
    case.qkv = qkv[-1:]
    case.keys = np.ascontiguousarray(qkv[None, :, heads : heads + kv_heads].transpose(0, 2, 1, 3))
    case.values = np.ascontiguousarray(qkv[None, :, heads + kv_heads :].transpose(0, 2, 1, 3))
    np.testing.assert_allclose(case.run(device)[0], whole[-1], atol=2e-2, rtol=2e-2)
    assert np.abs(case.run(device)[0] - whole[-1]).mean() < 2e-3


def test_checked_mode_finds_nothing(checked_device: Device) -> None:
    """Nothing past the position is read, nor anything beside the cache; no race between warps."""
    for of in ((2, 1, 64, 70, [40, 69], "bf16"), (1, 1, 12, 40, [33], "f32")):
        Case(*of).run(checked_device, checked=True)


def test_the_tree_gives_each_lane_its_key() -> None:
    """Played with numbers: lane l ends with score l, and no more than six scores are held at once."""
    products = np.random.default_rng(0).standard_normal((32, 32))
    held: dict[int, npt.NDArray[np.float64]] = {}
    most, lanes = 0, np.arange(32)
    for node in DecodeSpec().order:
        if node.distance == 0:
            held[node.a] = products[node.a]
        else:
            low, a, b = lanes & node.distance == 0, held[node.a], held.pop(node.b)
            held[node.a] = np.where(low, a, b) + np.where(low, b, a)[lanes ^ node.distance]
        most = max(most, len(held))
    np.testing.assert_allclose(held[0], products.sum(axis=1))
    assert most == 6 and list(held) == [0]


def test_bad_arguments_are_refused(device: Device) -> None:
    """One line each, with what was expected and what came."""
    rec = Recorder(device)
    b = Bench(device, rec)
    buffers = [b.scratch(n) for n in (64, 128, 640, 640, 4)]
    good = {"batch": 1, "context": 10, "heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": "bf16"}
    for change, message in (
        ({"heads": 3, "kv_heads": 2}, "3 query heads do not share 2 key heads evenly"),
        ({"head_dim": 15}, "head_dim is 15, must be even"),
        ({"head_dim": 258}, "head_dim is 258"),
        ({"dtype": "i8"}, 'dtype is "i8"'),
        ({"context": 21}, "keys holds 640 bytes, 336 x bf16 need 672"),
        ({"batch": 2}, "out holds 64 bytes"),
    ):
        with pytest.raises(PtxtrainError, match=message):
            attention_decode.run(rec, *buffers, **{**good, **change})
