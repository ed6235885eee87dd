"""What the kit's tests share: arrays of a place, results that must repeat to the bit, and the rule for rounding errors.

A result is right when its error against float64 is at most twice the error of the same formula in f32, plus a floor, plus
one rounding to its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Float = npt.NDArray[Any]
FLOATS = ("f16", "bf16", "f32")
DTYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
# The error of one rounding: relative, and where numbers are subnormal.
HALF = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 0.0}
TINY = {"f16": 2.0**-25, "bf16": 2.0**-134, "f32": 2.0**-150}


def rounded(x: Float, dtype: str) -> npt.NDArray[np.float32]:
    """`x` rounded to the dtype, as f32."""
    return np.asarray(x).astype(np.float32).astype(DTYPES[dtype]).astype(np.float32)


def normal(seed: int, *shape: int, dtype: str = "f32", scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Normal numbers that the dtype holds exactly."""
    return rounded(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


@dataclass(frozen=True)
class Place:
    """Makes arrays where a device has its memory."""

    kind: str

    def put(self, x: npt.ArrayLike, dtype: str = "f32") -> Any:
        """An array with these numbers."""
        host = np.ascontiguousarray(np.asarray(x)).astype(DTYPES[dtype])
        if self.kind == "cpu":
            return host
        import cupy

        return cupy.asarray(host)

    def empty(self, shape: tuple[int, ...], dtype: str = "f32") -> Any:
        """An output, all bits set: every number is NaN."""
        host = np.frombuffer(b"\xff" * (int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize), DTYPES[dtype])
        return self.put(host.reshape(shape).copy(), dtype)

    def get(self, x: Any) -> Float:
        """The array on the host, in its own dtype."""
        return np.asarray(x) if self.kind == "cpu" else np.asarray(x.get())


def twice(place: Place, call: Callable[[], Any]) -> list[Float]:
    """The results of a call as f32, after a second call has given the same bits."""
    first, again = ([place.get(x) for x in _several(call())] for _ in range(2))
    for i, (a, b) in enumerate(zip(first, again, strict=True)):
        assert a.tobytes() == b.tobytes(), f"result {i}: two calls gave different bits"
    return [x.astype(np.float32) for x in first]


def _several(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def check(what: str, actual: Float, exact: Float, same: Float, *, dtype: str = "f32", floor: float = 4.0) -> None:
    """Hold a result against float64.

    Args:
        what: function, sizes and seed, for the message.
        actual: the kit's.
        exact: the formula in float64.
        same: the formula in f32.
        dtype: of the result.
        floor: allowed beside twice the formula's own error, in f32 roundings of the largest result.
    """
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    assert actual.shape == exact.shape == np.shape(same), (what, actual.shape, exact.shape, np.shape(same))
    own = np.abs(np.asarray(same, np.float64) - exact).max(initial=0.0)
    allowed = 2 * own + floor * 2.0**-24 * np.abs(exact).max(initial=0.0)
    limit = allowed + (HALF[dtype] + 2.0**-22) * np.abs(exact) * (dtype != "f32") + TINY[dtype]
    wrong = ~(np.abs(actual - exact) <= limit)  # a NaN is wrong
    if wrong.any():
        places = np.argwhere(wrong)[:5]
        shown = "; ".join(f"{tuple(map(int, p))}: {actual[tuple(p)]!r} for {exact[tuple(p)]!r}" for p in places)
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} beyond {allowed:.3g} (own error {own:.3g}): {shown}"
        )


def slope(f: Callable[[Float], float], x: Float, step: float) -> Float:
    """The gradient of f at x by central differences, in float64 outside of f."""
    out = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        values = []
        for sign in (1, -1):
            moved = x.copy()
            moved[place] += sign * step
            values.append((f(moved), moved[place]))
        out[place] = (values[0][0] - values[1][0]) / (float(values[0][1]) - float(values[1][1]))
    return out
