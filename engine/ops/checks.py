"""What every op checks before it records a launch, and how it turns numbers into kernel arguments."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder

ITEM_SIZES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i64": 8}


def require(op: str, holds: bool, message: str) -> None:
    """Raise the op's error unless `holds`."""
    if not holds:
        raise PtxtrainError(f"{op}: {message}")


def sizes(op: str, **values: int) -> None:
    """Each must be at least 1 and fit the 32-bit sizes that kernels take."""
    for name, value in values.items():
        require(op, 1 <= value < 2**31, f"{name} is {value}, must be 1 to {2**31 - 1}")


def is_bf16(op: str, dtype: str) -> np.uint32:
    """The kernels' run-time flag for an activation's dtype."""
    require(op, dtype in ("f32", "bf16"), f'dtype is "{dtype}", must be "f32" or "bf16"')
    return np.uint32(dtype == "bf16")


def is_half(op: str, dtype: str) -> tuple[str, np.uint32]:
    """For kernels whose Spec has the dtype of two bytes: which one, and the run-time flag that it is there, not f32."""
    of_kit(op, dtype)
    return "f16" if dtype == "f16" else "bf16", np.uint32(dtype != "f32")


def of_kit(op: str, dtype: str) -> None:
    """The kit's kernels are there for each of three dtypes."""
    require(op, dtype in ("f16", "bf16", "f32"), f'dtype is "{dtype}", must be "f16", "bf16" or "f32"')


def holds(op: str, name: str, buffer: Buffer, count: int, dtype: str) -> None:
    """The buffer must have room for `count` numbers."""
    needed = count * ITEM_SIZES[dtype]
    require(op, buffer.nbytes >= needed, f"{name} holds {buffer.nbytes} bytes, {count} x {dtype} need {needed}")


def whole_sequences(op: str, rows: int, context: int) -> None:
    """Rows must be whole sequences."""
    require(op, rows % context == 0, f"{rows} rows are not whole sequences of {context}")


def even_head(op: str, head_dim: int) -> None:
    """RoPE turns pairs, so heads have an even number of channels."""
    require(op, head_dim % 2 == 0, f"head_dim is {head_dim}, must be even")


def vector(rec: Recorder, count: int, *buffers: Buffer | None) -> int:
    """Neighbouring f32 that a thread of a kernel without sums across threads takes; which shows in no bit.

    4, 16 bytes, on a GPU where `count` and the addresses allow it. On the CPU device 1: there a warp's neighbouring numbers
    are one access anyway, and to take fours apart made AdamW take 3.0 ms instead of 1.9 for 2^21 numbers.
    """
    if rec.device.kind == "cpu" or count % 4 or any(b is not None and b.ptr % 16 for b in buffers):
        return 1
    return 4


STREAMED = 48 << 20  # bytes of an output: more than a GPU's second cache or what a CPU's core has to itself


def streams(nbytes: int) -> bool:
    """Whether a kernel's output is to go past the caches, which shows in no bit.

    A store through the caches reads the line first on a CPU: of an output that leaves them before it is read again, that is
    a third of the traffic of a copy.
    """
    return nbytes >= STREAMED
