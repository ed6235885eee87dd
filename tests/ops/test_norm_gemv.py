"""Norm and product in one kernel: against float64, against the separate kernels, and that rows and grid show in no bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from opbench import F32, F64, Bench, check, run, same_bits

from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import matmul, norm_gemv, rmsnorm
from ptxtrain.ptx import gemv_spec

EPS = 1e-5
NUMPY: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROUNDING = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}  # of a number, at most


def narrowed(x: npt.NDArray[Any], dtype: str) -> F32:
    """`x` rounded to the dtype, as f32."""
    return x.astype(NUMPY[dtype]).astype(np.float32)


def normed(x: npt.NDArray[Any], gamma: npt.NDArray[Any], beta: npt.NDArray[Any], norm: str) -> npt.NDArray[Any]:
    """The formula, in the arrays' own precision."""
    if norm == "none":
        return x
    eps = x.dtype.type(EPS)
    if norm == "rms":
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + eps) * gamma + beta


class Case:
    """Operands of one product, each exactly in its dtype."""

    def __init__(
        self, rows: int, width: int, columns: int, layout: str, norm: str, dtype: str, x_dtype: str, seed: int = 0
    ) -> None:
        rng = np.random.default_rng([seed, width, columns])
        self.rows, self.width, self.columns, self.layout, self.norm = rows, width, columns, layout, norm
        self.dtype, self.x_dtype = dtype, x_dtype
        self.x = narrowed(rng.standard_normal((rows, width)) + 0.5, x_dtype)
        self.gamma = narrowed(1 + 0.2 * rng.standard_normal(width), x_dtype)
        self.beta = narrowed(0.2 * rng.standard_normal(width), x_dtype)
        self.weight = narrowed(rng.standard_normal((width, columns)) / np.sqrt(width), dtype)
        self.residual = rng.standard_normal((rows, columns)).astype(np.float32)

    def __str__(self) -> str:
        return f"{self.layout} {self.norm} {self.rows} x {self.width} x {self.columns} {self.dtype} of {self.x_dtype}"

    def operands(self, b: Bench) -> tuple[Buffer, Buffer | None, Buffer | None, Buffer]:
        """x, gamma, beta and the weight on the device."""

        def put(x: npt.NDArray[Any], dtype: str) -> Buffer:
            return b.device.write(np.ascontiguousarray(x.astype(NUMPY[dtype])))

        weight = self.weight if self.layout == "kn" else self.weight.T
        gamma = put(self.gamma, self.x_dtype) if self.norm != "none" else None
        beta = put(self.beta, self.x_dtype) if self.norm == "layer" else None
        return put(self.x, self.x_dtype), gamma, beta, put(weight, self.dtype)

    def sizes(self) -> dict[str, Any]:
        return {
            "rows": self.rows, "width": self.width, "columns": self.columns, "layout": self.layout, "eps": EPS,
            "norm": self.norm, "dtype": self.dtype, "x_dtype": self.x_dtype, "norm_dtype": self.x_dtype,
        }  # fmt: skip

    def run(self, device: Device, out_dtype: str = "f32", residual: bool = False) -> F32:
        raw = np.uint16 if out_dtype != "f32" else np.float32

        def record(rec: Recorder, b: Bench) -> None:
            size = self.rows * self.columns * np.dtype(raw).itemsize
            out = b.scratch(size)
            b.wanted["out"] = (out, "bf16" if out_dtype != "f32" else "f32", (self.rows, self.columns))
            base = b.put(self.residual) if residual else None
            norm_gemv.run(rec, out, *self.operands(b), **self.sizes(), out_dtype=out_dtype, residual=base)

        found = run(device, record)["out"]
        if out_dtype == "f16":  # read back as bf16 and widened: take the bits again
            found = (found.view(np.uint32) >> 16).astype(np.uint16).view(np.float16).astype(np.float32)
        return found

    def exact(self) -> F64:
        """Float64, from normalised rows as they are rounded."""
        x, gamma, beta = (a.astype(np.float64) for a in (self.x, self.gamma, self.beta))
        return normed(x, gamma, beta, self.norm) @ self.weight.astype(np.float64)

    def same(self) -> F32:
        """The formula with f32 numbers and the same rounding in between."""
        x = normed(self.x, self.gamma, self.beta, self.norm)
        x = narrowed(x, self.dtype) if self.norm != "none" else x
        return np.asarray(x @ self.weight, np.float32)


def relative_rms(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    return float(np.sqrt(((a - e) ** 2).mean() / (e**2).mean()))


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("norm", ["rms", "layer", "none"])
@pytest.mark.parametrize(
    ("rows", "width", "columns", "dtype", "x_dtype"),
    [
        (1, 384, 640, "bf16", "f32"),
        (2, 6, 130, "bf16", "bf16"),
        (2, 200, 66, "f16", "f16"),
        (3, 97, 75, "bf16", "f32"),
        (4, 35, 33, "f32", "f32"),
    ],
)
def test_against_float64(
    device: Device, rows: int, width: int, columns: int, dtype: str, x_dtype: str, norm: str, layout: str
) -> None:
    """Every layout, norm and dtype, at even sizes (two numbers a lane) and odd ones, to the size of its roundings."""
    case = Case(rows, width, columns, layout, norm, dtype, x_dtype)
    found, exact = case.run(device), case.exact()
    if dtype == "f32" or norm == "none":
        check(str(case), found, exact, case.same(), floor=4 + np.sqrt(width))
        return
    # What is rounded is each normalised number: its error is at most ROUNDING of it.
    x = normed(case.x.astype(np.float64), case.gamma, case.beta, norm)
    allowed = ROUNDING[dtype] * (np.abs(x) @ np.abs(case.weight)) * 1.01 + 1e-6
    assert (np.abs(found - exact) <= allowed).all(), f"{case}: {np.abs(found - exact).max():.3g}"


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize(
    ("dtype", "width", "columns"), [("f32", 64, 66), ("bf16", 64, 66), ("bf16", 33, 35), ("f16", 33, 35)]
)
def test_the_output_is_rounded_once_after_the_residual(
    device: Device, dtype: str, width: int, columns: int, layout: str
) -> None:
    """out_dtype and residual: the f32 result plus the residual, rounded to nearest even."""
    case = Case(2, width, columns, layout, "rms", "bf16", "f32")
    wide = case.run(device)
    found = case.run(device, out_dtype=dtype, residual=True)
    same_bits(f"{case} to {dtype}", found, narrowed(wide + case.residual, dtype))


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_the_residual_may_be_the_output(device: Device, layout: str) -> None:
    """A residual stream that is added to in place."""
    case = Case(3, 40, 70, layout, "none", "bf16", "bf16")

    def record(rec: Recorder, b: Bench) -> None:
        stream = b.put(case.residual, name="out")
        norm_gemv.run(rec, stream, *case.operands(b), **case.sizes(), out_dtype="f32", residual=stream)

    same_bits(str(case), run(device, record)["out"], case.run(device, residual=True))


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize(("norm", "width", "columns"), [("rms", 384, 200), ("layer", 99, 50)])
def test_a_row_has_the_same_bits_alone(device: Device, norm: str, width: int, columns: int, layout: str) -> None:
    """The number of rows in a launch shows in no bit of a row."""
    together = Case(4, width, columns, layout, norm, "bf16", "f32")
    found = together.run(device)
    for rows in (1, 3):
        part = Case(4, width, columns, layout, norm, "bf16", "f32")
        part.rows, part.x = rows, part.x[4 - rows :]
        same_bits(f"{part}", part.run(device), found[4 - rows :])


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_against_the_separate_kernels_in_bf16(device: Device, layout: str) -> None:
    """RMSNorm, then the tensor cores' product: the same normalised numbers, so only the order of the sums differs."""
    case = Case(4, 384, 640, layout, "rms", "bf16", "f32")

    def record(rec: Recorder, b: Bench) -> None:
        x, gamma, _, weight = case.operands(b)
        assert gamma is not None
        middle = b.scratch(4 * 384 * 2)
        rmsnorm.forward(rec, middle, b.scratch(16), x, gamma, rows=4, width=384, eps=EPS, dtype="bf16")
        matmul.run(
            rec, b.empty("out", (4, 640)), middle, weight, m=4, n=640, k=384,
            layout="nn" if layout == "kn" else "nt", dtype="bf16", out_dtype="f32", way="fast",
        )  # fmt: skip

    assert relative_rms(case.run(device), run(device, record)["out"]) < 1e-5


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_against_norm_then_product_in_f16(device: Device, norm: str, layout: str) -> None:
    """The fused form in f16 throughout is within 5e-3 relative RMS of norm (stored in f16), then product (stored in f16)."""
    case = Case(4, 512, 300, layout, norm, "f16", "f16")
    stored = narrowed(normed(case.x, case.gamma, case.beta, norm), "f16")
    separate = narrowed(stored @ case.weight, "f16")
    assert relative_rms(case.run(device, out_dtype="f16"), separate) < 5e-3


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_rows_of_zeros_and_of_equal_numbers(device: Device, norm: str, layout: str) -> None:
    """No NaN: a row without spread is normalised to zero (layer), or to its sign (rms)."""
    case = Case(2, 48, 32, layout, norm, "f16", "f16")
    case.x = np.stack([np.zeros(48), np.full(48, 4.0)]).astype(np.float32)
    found = case.run(device)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, case.same(), atol=2e-3)
    if norm == "rms":
        assert (found[0] == 0).all()


def test_layer_norm_of_numbers_far_from_zero(device: Device) -> None:
    """The variance is that of the differences from the mean: nothing cancels at a mean of a thousand spreads."""
    case = Case(1, 256, 64, "kn", "layer", "f32", "f32")
    case.x = case.x + np.float32(1000)
    x = case.x.astype(np.float64)
    exact = normed(x, case.gamma.astype(np.float64), case.beta.astype(np.float64), "layer") @ case.weight
    assert relative_rms(case.run(device), exact) < 1e-4


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("norm", ["rms", "layer", "none"])
def test_checked_mode_finds_nothing(checked_device: Device, norm: str, layout: str) -> None:
    """No access beside the operands, no race on shared memory, at sizes that end inside a tile."""
    for rows, width, columns in ((1, 66, 70), (4, 37, 41)):
        case = Case(rows, width, columns, layout, norm, "bf16", "f32")
        case.run(checked_device, out_dtype="bf16", residual=True)


def test_bad_arguments_are_refused(device: Device) -> None:
    """One line each, with what was expected and what came."""
    case = Case(1, 8, 8, "kn", "rms", "bf16", "f32")
    rec = Recorder(device)
    b = Bench(device, rec)
    out, operands = b.scratch(4 * 8 * 8), case.operands(b)
    good = {**case.sizes(), "out_dtype": "f32"}
    for change, message in (
        ({"rows": 5}, "5 rows: at most 4 are fused"),
        ({"layout": "nn"}, 'layout is "nn", must be one of kn, nk'),
        ({"norm": "batch"}, 'norm is "batch"'),
        ({"norm": "layer"}, 'norm "layer" needs beta'),
        ({"norm": "none"}, 'norm "none" takes no gamma'),
        ({"dtype": "f64"}, 'dtype is "f64"'),
        ({"eps": float("nan")}, "eps is nan"),
        ({"width": 9}, "x holds 32 bytes, 9 x f32 need 36"),
        ({"rows": 2}, "x holds 32 bytes"),
    ):
        with pytest.raises(PtxtrainError, match=message):
            norm_gemv.run(rec, out, *operands, **{**good, **change})
    with pytest.raises(PtxtrainError, match="residual holds 4 bytes"):
        norm_gemv.run(rec, out, *operands, **good, residual=b.scratch(4))


def test_folds_leave_each_lane_its_output() -> None:
    """The steps by which a warp's sums meet, played with numbers: lane l ends with output l / (32 / count)."""
    for count in (1, 4, 8, 32):
        sums = np.random.default_rng(count).standard_normal((count, 32))
        total, lanes = sums.sum(axis=1), np.arange(32)
        for step, pairs in gemv_spec.folds(count):
            low = lanes & step == 0
            for a, b in pairs:
                keep = sums[a] if b is None else np.where(low, sums[a], sums[b])
                give = sums[a] if b is None else np.where(low, sums[b], sums[a])
                sums[a] = keep + give[lanes ^ step]
        np.testing.assert_allclose(sums[0], total[lanes // (32 // count)])
