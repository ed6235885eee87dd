"""The matmul reference: every output is one chain of fused multiply-adds in ascending k, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import Bench, check, normal, rounded, run, same_bits

from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import matmul

Float = npt.NDArray[Any]
SHAPES = [(1, 1, 1), (7, 97, 9), (129, 48, 65), (130, 33, 130), (8, 32, 64), (300, 97, 20)]


def stored(a: Float, b: Float, layout: str) -> tuple[Float, Float]:
    """a [M, K] and b [K, N] as the layout keeps them."""
    return (a.T if layout == "tn" else a), (b.T if layout == "nt" else b)


def chain(start: Float, a: Float, b: Float) -> Float:
    """sum = fma(a[m, k], b[k, n], sum), k ascending.

    A product of two f32 is exact in 48 bits; the 64 bits of a long double hold the sum closely enough that rounding it
    again to f32 is right but for one case in 2^40.
    """
    assert np.finfo(np.longdouble).nmant >= 63
    out = start.astype(np.float32)
    for k in range(a.shape[1]):
        products = a[:, k, None].astype(np.longdouble) * b[None, k, :].astype(np.longdouble)
        out = (products + out.astype(np.longdouble)).astype(np.float32)
    return out


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_bits_are_one_chain(device: Device, m: int, n: int, k: int, layout: str, dtype: str) -> None:
    rng = np.random.default_rng(m * n * k)
    a, b, residual = normal(rng, m, k, dtype=dtype), normal(rng, k, n, dtype=dtype), normal(rng, m, n)
    a0, b0 = stored(a, b, layout)
    sizes: dict[str, Any] = {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype}

    def record(rec: Recorder, bench: Bench) -> None:
        x, y = bench.put(a0, dtype), bench.put(b0, dtype)
        matmul.run(rec, bench.empty("out", (m, n)), x, y, **sizes, out_dtype="f32")
        matmul.run(rec, bench.empty("bf16", (m, n), "bf16"), x, y, **sizes, out_dtype="bf16")
        stream = bench.put(residual, name="stream")
        matmul.run(rec, stream, x, y, **sizes, out_dtype="f32", residual=stream)
        matmul.run(rec, bench.put(residual, name="sum"), x, y, **sizes, out_dtype="f32", accumulate=True)

    found = run(device, record)
    what = f"matmul.run {layout} {dtype} M {m} N {n} K {k}"
    product = chain(np.zeros((m, n)), a, b)
    same_bits(what, found["out"], product)
    same_bits(f"{what} to bf16", found["bf16"], rounded(product, "bf16"))
    same_bits(f"{what} residual", found["stream"], product + residual)
    same_bits(f"{what} accumulate", found["sum"], chain(residual, a, b))
    check(what, found["out"], a.astype(np.float64) @ b.astype(np.float64), product)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_a_cut_of_k_leaves_the_bits(device: Device, layout: str) -> None:
    """Micro-batches cut a weight gradient's k anywhere: the chain goes on as if there were no cut."""
    m, n, k = 40, 33, 150
    rng = np.random.default_rng(3)
    a, b = normal(rng, m, k), normal(rng, k, n)

    def product(*cuts: int) -> Float:
        def record(rec: Recorder, bench: Bench) -> None:
            out = bench.empty("out", (m, n))
            for first, last in zip((0, *cuts), (*cuts, k), strict=True):
                x, y = (bench.put(part) for part in stored(a[:, first:last], b[first:last], layout))
                matmul.run(
                    rec, out, x, y, m=m, n=n, k=last - first, layout=layout, dtype="f32", out_dtype="f32",
                    accumulate=first > 0,
                )  # fmt: skip

        return run(device, record, times=1)["out"]

    whole = product()
    same_bits("one cut", product(64), whole)
    same_bits("three cuts", product(1, 20, 149), whole)


def test_signed_zero_survives_the_edge_of_a_tile(device: Device) -> None:
    """-0 + 0 * 0 is 0: steps of k that do not exist must not be multiplied."""
    a, b = np.full((1, 1), -1.0, np.float32), np.zeros((1, 1), np.float32)

    def record(rec: Recorder, bench: Bench) -> None:
        out = bench.put(np.full((1, 1), -0.0), name="out")
        matmul.run(
            rec, out, bench.put(a), bench.put(b), m=1, n=1, k=1, layout="nn", dtype="f32", out_dtype="f32",
            accumulate=True,
        )  # fmt: skip

    assert np.signbit(run(device, record)["out"]).all()


def test_unaligned_operands(device: Device) -> None:
    """A weight may start anywhere in the flat buffer: the wide loads of "nt" need 16 bytes, others must do without."""
    m, n, k = 5, 40, 72
    rng = np.random.default_rng(4)
    a, b = normal(rng, m, k), normal(rng, n, k)

    def record(rec: Recorder, bench: Bench) -> None:
        flat = bench.put(np.concatenate([[np.nan], b.reshape(-1)]))
        shifted: Buffer = flat.view(4, 4 * n * k)
        out = bench.empty("out", (m, n))
        matmul.run(rec, out, bench.put(a), shifted, m=m, n=n, k=k, layout="nt", dtype="f32", out_dtype="f32")

    same_bits("nt from an odd address", run(device, record)["out"], chain(np.zeros((m, n)), a, b.T))


def test_refusals(device: Device) -> None:
    rec = Recorder(device)
    x = device.alloc(64)
    sizes: dict[str, Any] = {"m": 4, "n": 4, "k": 4}
    with pytest.raises(PtxtrainError, match='layout is "tt"'):
        matmul.run(rec, x, x, x, **sizes, layout="tt", dtype="f32", out_dtype="f32")
    with pytest.raises(PtxtrainError, match="only an f32 out can be accumulated into"):
        matmul.run(rec, x, x, x, **sizes, layout="nn", dtype="bf16", out_dtype="bf16", accumulate=True)
    with pytest.raises(PtxtrainError, match=r"a holds 64 bytes, 20 x f32 need 80"):
        matmul.run(rec, x, x, x, m=5, n=3, k=4, layout="nn", dtype="f32", out_dtype="f32")
