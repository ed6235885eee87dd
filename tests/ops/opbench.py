"""What the op tests share: buffers on a device, runs that must repeat to the bit, and the rule for rounding errors.

An op is right when its error against float64 is at most twice the error of the same formula done in the kernel's own
precision, plus a floor that the test states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.kernels import Recorder

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i32": np.int32}
EPSILON = {"f32": 2.0**-24, "bf16": 2.0**-9}  # half a unit in the last place of 1: the error of one rounding


def rounded(x: npt.NDArray[Any], dtype: str) -> F32:
    """`x` rounded to the dtype, as f32."""
    return np.asarray(x).astype(np.float32).astype(DTYPES[dtype]).astype(np.float32)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "f32", scale: float = 1.0) -> F32:
    """Normal numbers that the dtype holds exactly."""
    return rounded(rng.standard_normal(shape) * scale, dtype)


@dataclass
class Bench:
    """One run of an op: makes its buffers and remembers which ones to read back."""

    device: Device
    rec: Recorder
    wanted: dict[str, tuple[Buffer, str, tuple[int, ...]]] = field(default_factory=dict)

    def put(self, x: npt.NDArray[Any], dtype: str = "f32", name: str = "") -> Buffer:
        """A buffer with `x`; with a name it is read back after the run."""
        buffer = self.device.write(np.ascontiguousarray(x).astype(DTYPES[dtype]))
        if name:
            self.wanted[name] = (buffer, dtype, np.shape(x))
        return buffer

    def empty(self, name: str, shape: tuple[int, ...], dtype: str = "f32") -> Buffer:
        """An output, full of NaN (all bits set), read back after the run."""
        buffer = self.device.alloc(max(int(np.prod(shape)), 1) * np.dtype(DTYPES[dtype]).itemsize)
        self.device.fill(buffer, 0xFF)
        self.wanted[name] = (buffer, dtype, shape)
        return buffer

    def scratch(self, nbytes: int) -> Buffer:
        buffer = self.device.alloc(nbytes)
        self.device.fill(buffer, 0xFF)
        return buffer

    def read(self) -> dict[str, npt.NDArray[Any]]:
        return {
            name: self.device.read(buffer, DTYPES[dtype], shape) for name, (buffer, dtype, shape) in self.wanted.items()
        }


def run(
    device: Device,
    record: Callable[[Recorder, Bench], None],
    overrides: Mapping[str, str] | None = None,
    times: int = 2,
) -> dict[str, npt.NDArray[Any]]:
    """Run what `record` records, from fresh buffers each time, and see that every run gives the same bits.

    Returns the outputs by name, bf16 ones widened to f32.
    """
    found: list[dict[str, npt.NDArray[Any]]] = []
    for _ in range(times):
        rec = Recorder(device, overrides)
        bench = Bench(device, rec)
        record(rec, bench)
        device.run(rec.plan())
        device.synchronize()
        found.append(bench.read())
    for again in found[1:]:
        for name, first in found[0].items():
            assert first.tobytes() == again[name].tobytes(), f"{name}: two runs gave different bits"
    return {name: x.astype(np.float32) if x.dtype == DTYPES["bf16"] else x for name, x in found[0].items()}


def check(
    what: str, actual: npt.NDArray[Any], exact: F64, same: F32, *, dtype: str = "f32", floor: float = 4.0
) -> None:
    """Hold a result against float64 and against the same formula in f32 (rounded once to the dtype at the end).

    Args:
        what: op, sizes and seed, for the message.
        actual: the kernel's.
        exact: the formula in float64.
        same: the formula in f32.
        dtype: of the result.
        floor: allowed beside twice the formula's own error, in roundings of the largest f32 result; a bf16 result may
            also land on the other side of a rounding.
    """
    actual = np.asarray(actual, np.float64)
    assert actual.shape == exact.shape == same.shape, (what, actual.shape, exact.shape, same.shape)
    own = np.abs(rounded(same, dtype).astype(np.float64) - exact)
    size = np.abs(exact)
    allowed = 2 * own.max(initial=0.0) + floor * EPSILON["f32"] * size.max(initial=0.0)
    limit = np.full(exact.shape, allowed)
    if dtype == "bf16":
        limit = 2 * own + floor * EPSILON["f32"] * size.max(initial=0.0) + 2 * EPSILON["bf16"] * size
    wrong = ~(np.abs(actual - exact) <= limit)  # a NaN is wrong
    if wrong.any():
        places = np.argwhere(wrong)[:5]
        shown = "; ".join(f"{tuple(map(int, p))}: {actual[tuple(p)]!r} for {exact[tuple(p)]!r}" for p in places)
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} beyond {limit.min():.3g} (own error {own.max():.3g}): {shown}"
        )


def same_bits(what: str, actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Both arrays hold the same bits."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (what, actual.dtype, expected.dtype)
    a = np.ascontiguousarray(actual).view(np.uint8).reshape(*actual.shape, -1)
    b = np.ascontiguousarray(expected).view(np.uint8).reshape(*expected.shape, -1)
    wrong = (a != b).any(axis=-1)
    if wrong.any():
        places = np.argwhere(wrong)[:5]
        shown = "; ".join(f"{tuple(map(int, p))}: {actual[tuple(p)]!r} for {expected[tuple(p)]!r}" for p in places)
        raise AssertionError(f"{what}: {wrong.sum()} of {wrong.size} differ: {shown}")
