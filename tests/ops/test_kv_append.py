"""Rows into the cache: the bits of RoPE's own kernel, at the right places, and nothing else touched."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from opbench import Bench, normal, run, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import kv_append, rope


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (3, 1, 12), (2, 2, 80)])
def test_new_rows(device: Device, heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
    """One row of three sequences at different positions: queries and keys as `rope.apply` turns them, values as they are."""
    batch, context, positions = 3, 9, np.array([0, 8, 5], np.int32)
    all_heads = heads + 2 * kv_heads
    qkv = normal(np.random.default_rng(head_dim), batch, all_heads, head_dim, dtype=dtype)
    cos, sin = rope.tables(context, head_dim, 10_000.0)
    sizes = {"context": context, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}

    def record(rec: Recorder, b: Bench) -> None:
        caches = [b.empty(name, (batch, kv_heads, context, head_dim), dtype) for name in ("keys", "values")]
        tables = (b.put(cos), b.put(sin))
        row = b.put(qkv, dtype, name="qkv")
        kv_append.run(rec, row, *caches, *tables, b.put(positions, "i32"), rows=batch, per_sequence=1, **sizes)
        whole = np.zeros((batch, context, all_heads, head_dim))
        whole[np.arange(batch), positions] = qkv
        rope.apply(rec, b.put(whole, dtype, name="whole"), *tables, rows=batch * context, **sizes)

    found = run(device, record)
    turned = found["whole"][np.arange(batch), positions]
    same_bits("queries", found["qkv"][:, :heads], turned[:, :heads])
    same_bits("the row's keys and values", found["qkv"][:, heads:], qkv[:, heads:])
    for s, position in enumerate(positions):
        same_bits("keys", found["keys"][s, :, position], turned[s, heads : heads + kv_heads])
        same_bits("values", found["values"][s, :, position], qkv[s, heads + kv_heads :])
        found["keys"][s, :, position] = found["values"][s, :, position] = np.nan
    assert np.isnan(found["keys"]).all() and np.isnan(found["values"]).all(), "only those places are written"


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_rows_that_are_turned_already(device: Device, dtype: str) -> None:
    """A prompt's rows are copied; those at or past T go nowhere, and queries stay."""
    sequences, rows, heads, kv_heads, head_dim, context = 2, 4, 2, 1, 6, 3
    kind = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}[dtype]
    qkv = np.random.default_rng(0).standard_normal((sequences * rows, heads + 2 * kv_heads, head_dim)).astype(kind)
    raw = "f32" if dtype == "f32" else "bf16"

    def record(rec: Recorder, b: Bench) -> None:
        shape = (sequences, kv_heads, context, head_dim)
        caches = [b.empty(name, shape, raw) for name in ("keys", "values")]
        cos, sin = rope.tables(context, head_dim, 10_000.0)
        row = b.device.write(qkv)
        b.wanted["qkv"] = (row, raw, qkv.shape)
        kv_append.run(
            rec, row, *caches, b.put(cos), b.put(sin), b.put(np.tile(np.arange(rows), sequences), "i32"),
            rows=sequences * rows, per_sequence=rows, context=context, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, dtype=dtype, turn=False,
        )  # fmt: skip

    def widened(x: np.ndarray) -> np.ndarray:
        """As the bench reads 16 bits back: as bf16, whatever they are."""
        return x if dtype == "f32" else x.view(ml_dtypes.bfloat16).astype(np.float32)

    found = run(device, record)
    same_bits("qkv", found["qkv"], widened(qkv))
    by_sequence = widened(qkv).reshape(sequences, rows, heads + 2 * kv_heads, head_dim)[:, :context]
    same_bits("keys", found["keys"][:, 0], np.ascontiguousarray(by_sequence[:, :, heads]))
    same_bits("values", found["values"][:, 0], np.ascontiguousarray(by_sequence[:, :, heads + 1]))


def test_checked_mode_finds_nothing(checked_device: Device) -> None:
    """Odd head sizes, heads that do not fill the last block, and a position past the end."""
    rng = np.random.default_rng(0)
    cos, sin = rope.tables(5, 10, 10_000.0)

    def record(rec: Recorder, b: Bench) -> None:
        row = b.put(normal(rng, 2, 5, 10, dtype="bf16"), "bf16")
        caches = [b.scratch(2 * 1 * 5 * 10 * 2) for _ in range(2)]
        kv_append.run(
            rec, row, *caches, b.put(cos), b.put(sin), b.put(np.array([4, 5]), "i32"), rows=2, per_sequence=1,
            context=5, heads=3, kv_heads=1, head_dim=10, dtype="bf16",
        )  # fmt: skip

    run(checked_device, record, times=1)


def test_bad_arguments_are_refused(device: Device) -> None:
    """One line each, with what was expected and what came."""
    rec = Recorder(device)
    b = Bench(device, rec)
    buffers = [b.scratch(n) for n in (96, 64, 64, 64, 64, 8)]
    good = {
        "rows": 2, "per_sequence": 1, "context": 4, "heads": 1, "kv_heads": 1, "head_dim": 4, "dtype": "bf16",
    }  # fmt: skip
    kv_append.run(rec, *buffers, **good)
    for change, message in (
        ({"per_sequence": 3}, "2 rows are not whole sequences of 3"),
        ({"head_dim": 3}, "head_dim is 3, must be even"),
        ({"dtype": "i8"}, 'dtype is "i8"'),
        ({"context": 5}, "keys holds 64 bytes"),
        ({"rows": 5}, "qkv holds 96 bytes"),
    ):
        with pytest.raises(PtxtrainError, match=message):
            kv_append.run(rec, *buffers, **{**good, **change})
