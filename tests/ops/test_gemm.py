"""The kit's product: every layout, dtype and epilogue against float64, on the tensor cores and in f32 multiply-adds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from opbench import EPSILON, normal, same_bits

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import gemm
from ptxtrain.ptx import gemm_spec
from ptxtrain.ptx.gemm_spec import GemmSpec

Float = npt.NDArray[Any]
TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ROUNDING = {**EPSILON, "f16": 2.0**-12}
# m, n, k, dtype, out_dtype, bias_dtype: whole tiles, edges, rows that allow no copies of 16 bytes, single numbers
CASES = [
    (129, 72, 64, "f16", "f16", "bf16"),
    (33, 136, 40, "bf16", "f32", "f16"),
    (64, 64, 72, "bf16", "bf16", "f32"),
    (130, 65, 70, "f32", "f32", "f32"),
    (7, 5, 3, "f16", "bf16", "f16"),
    (1, 1, 1, "bf16", "f16", "f32"),
]
# Each layout of the first of both kernels, and two of the others.
WANTED = [(case, layout) for i, case in enumerate(CASES) for layout in gemm.LAYOUTS[:: 1 if i in (0, 3) else 1 + i]]


def operands(m: int, n: int, k: int, dtype: str, out_dtype: str, bias_dtype: str) -> tuple[Float, Float, Float, Float]:
    """a [M, K], b [K, N], residual [M, N], bias [N], each in its dtype."""
    rng = np.random.default_rng((m, n, k))
    shapes = (((m, k), dtype), ((k, n), dtype), ((m, n), out_dtype), ((n,), bias_dtype))
    a, b, residual, bias = (normal(rng, *shape).astype(TYPES[of]) for shape, of in shapes)
    return a, b, residual, bias


def product(
    device: Device,
    a: Float,
    b: Float,
    residual: Float | None,
    bias: Float | None,
    *,
    layout: str,
    dtypes: tuple[str, str, str],
    way: str | None = None,
    alpha: float = 0.75,
    overrides: dict[str, Any] | None = None,
) -> Float:
    """What the op leaves in an output full of NaN, or in the residual's own place."""
    dtype, out_dtype, bias_dtype = dtypes
    (m, k), n = a.shape, b.shape[1]
    x = device.write(a.T if layout[0] == "t" else a)
    y = device.write(b.T if layout[1] == "t" else b)
    if residual is None:
        out = device.alloc(m * n * TYPES[out_dtype](0).nbytes)
        device.fill(out, 0xFF)
    else:
        out = device.write(residual)
    rec = Recorder(device, overrides)
    gemm.run(
        rec, out, x, y, None if residual is None else out, None if bias is None else device.write(bias), m=m, n=n, k=k,
        layout=layout, dtype=dtype, out_dtype=out_dtype, bias_dtype=bias_dtype, alpha=alpha, way=way,
    )  # fmt: skip
    device.run(rec.plan())
    return device.read(out, TYPES[out_dtype], (m, n))


def compare(device: Device, m: int, n: int, k: int, dtypes: tuple[str, str, str], layout: str, **options: Any) -> None:
    """Within the rounding of the sums, a unit 2^-24 of their absolute sum for each k, and that of the result."""
    a, b, residual, bias = operands(m, n, k, *dtypes)
    wide = [x.astype(np.float64) for x in (a, b, residual, bias)]
    for parts in ((None, None), (residual, None), (None, bias), (residual, bias)):
        found = product(device, a, b, *parts, layout=layout, dtypes=dtypes, **options).astype(np.float64)
        exact = 0.75 * (wide[0] @ wide[1])
        scale = np.abs(wide[0]) @ np.abs(wide[1])
        for part, x in zip(parts, (wide[2], wide[3]), strict=True):
            exact = exact + (0.0 if part is None else x)
            scale = scale + (0.0 if part is None else np.abs(x))
        allowed = (k + 4) * 2.0**-24 * scale + 2 * ROUNDING[dtypes[1]] * np.abs(exact)
        wrong = ~(np.abs(found - exact) <= allowed)
        assert not wrong.any(), f"{layout} {m} {n} {k} {dtypes} {options}: {found[wrong][:5]} for {exact[wrong][:5]}"


@pytest.mark.parametrize(("case", "layout"), WANTED, ids=str)
def test_every_layout_dtype_and_epilogue(device: Device, case: tuple[Any, ...], layout: str) -> None:
    """alpha * (a @ b) + bias + residual, with each of the last two there or not."""
    compare(device, *case[:3], case[3:], layout)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_both_ways_agree(device: Device, dtype: str) -> None:
    """The tensor cores and the multiply-adds are the same function; asked for one, one gets it."""
    m, n, k = 70, 72, 48
    a, b, _, _ = operands(m, n, k, dtype, "f32", "f32")
    found = [
        product(device, a, b, None, None, layout="nn", dtypes=(dtype, "f32", "f32"), way=w) for w in ("fast", "f32")
    ]
    assert np.allclose(found[0], found[1], rtol=1e-5, atol=1e-4)
    assert found[0].tobytes() != found[1].tobytes(), "both ways took the same kernel"


def test_no_bit_depends_on_the_tile_or_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU tiles, CPU tiles, one thread or two: the same chain for each output."""
    a, b, residual, bias = operands(70, 150, 67, "f32", "f32", "f32")
    found = []
    for threads, shape in ((1, {}), (2, {"warps": 16, "columns": 1, "block_k": 64}), (2, {"columns": 2, "warps": 4})):

        def pick(layout: str, *of: Any, gpu: bool, shape: dict[str, int] = shape) -> GemmSpec:
            return GemmSpec(layout, *of, **shape)

        monkeypatch.setattr(gemm_spec, "choose", pick)
        device = CpuDevice(threads)
        dtypes = ("f32", "f32", "f32")
        found.append([product(device, a, b, residual, bias, layout=layout, dtypes=dtypes) for layout in ("nn", "tt")])
        device.close()
    for first, second in pairwise(found):
        for x, y in zip(first, second, strict=True):
            same_bits("another tile", y, x)
    for x in found[0]:
        same_bits("another layout", x, found[0][0])


def test_unaligned_rows(device: Device) -> None:
    """A matrix that starts 2 bytes into its memory goes to the multiply-adds and is right."""
    m, n, k = 16, 24, 16
    a, b, _, _ = operands(m, n, k, "f16", "f32", "f32")
    flat = device.write(np.concatenate([np.full(1, np.nan, np.float16), b.reshape(-1)]))
    out, rec = device.write(np.full((m, n), np.nan, np.float32)), Recorder(device)
    gemm.run(
        rec, out, device.write(a), flat.view(2, 2 * n * k), m=m, n=n, k=k, layout="nn", dtype="f16", out_dtype="f32"
    )
    device.run(rec.plan())
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.allclose(device.read(out, np.float32, (m, n)), exact, rtol=1e-5, atol=1e-5)


def test_batches_that_share_a_matrix(device: Device) -> None:
    """out[z] = a[z] @ b[z / group], rows of out wider than N left alone."""
    batch, group, m, n, k = 4, 2, 9, 5, 7
    rng = np.random.default_rng(1)
    a, b = normal(rng, batch, k, m), normal(rng, batch // group, n, k).astype(np.float16)
    out, rec = device.write(np.full((batch, m, 8), 9, np.float32)), Recorder(device)
    gemm.batched(
        rec, out, device.write(a), device.write(b), batch=batch, group=group, m=m, n=n, k=k, strides=(8, m, k),
        layout="tt", a_dtype="f32", b_dtype="f16", out_dtype="f32",
    )  # fmt: skip
    device.run(rec.plan())
    found = device.read(out, np.float32, (batch, m, 8))
    exact = np.einsum("zkm,znk->zmn", a.astype(np.float64), np.repeat(b, group, 0).astype(np.float64))
    assert np.allclose(found[..., :n], exact, rtol=1e-5, atol=1e-5) and (found[..., n:] == 9).all()


@pytest.mark.parametrize("way", ["fast", "f32"])
def test_checked(checked_device: Device, way: str) -> None:
    """No access out of bounds, no read of what nobody wrote, no race."""
    compare(checked_device, 40, 72, 24, ("f16", "bf16", "f32"), "tt", way=way)
    compare(checked_device, 33, 72, 24, ("bf16", "f16", "bf16"), "nn", way=way)


MUTANTS = {
    "no alpha": ("gemm", "mul.rn.f32      %acc_0_0, %acc_0_0, %alpha;", "", "f32"),
    "a k too few": ("gemm", "setp.lt.u32     %is_more, %quads, 64;", "setp.lt.u32 %is_more, %quads, 60;", "f32"),
    "bias of the next column": ("matmul", "[%p_bias + 0]", "[%p_bias + 4]", "fast"),
    "no residual": ("matmul", "add.rn.f32      %acc_0_0_0, %acc_0_0_0, %old0;", "", "fast"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    stem, old, new, way = MUTANTS[name]

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    device = CpuDevice(2)
    with pytest.raises(AssertionError):
        compare(device, 64, 64, 64, ("bf16", "f32", "f32"), "nn", way=way, overrides={stem: edit})
    device.close()


def test_refusals(device: Device) -> None:
    rec, x = Recorder(device), device.alloc(64)
    sizes: dict[str, Any] = {"m": 4, "n": 4, "k": 4, "dtype": "f32", "out_dtype": "f32"}
    with pytest.raises(PtxtrainError, match='layout is "xy", must be one of nn, nt, tn, tt'):
        gemm.run(rec, x, x, x, layout="xy", **sizes)
    with pytest.raises(PtxtrainError, match='out_dtype is "i8"'):
        gemm.run(rec, x, x, x, layout="nn", **{**sizes, "out_dtype": "i8"})
    with pytest.raises(PtxtrainError, match="the tensor cores do not take this: f32 has no tensor core"):
        gemm.run(rec, x, x, x, layout="nn", way="fast", **sizes)
    with pytest.raises(PtxtrainError, match=r"a holds 64 bytes, 20 x f32 need 80"):
        gemm.run(rec, x, x, x, layout="nn", **{**sizes, "m": 5, "n": 3})
    assert not rec.launches
