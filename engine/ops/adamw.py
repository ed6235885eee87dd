"""AdamW (Loshchilov and Hutter 2019) over a range of the flat parameters: decoupled weight decay, f32 master weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ptxtrain.engine import philox
from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import scalars as scalar_table
from ptxtrain.engine.ops.checks import holds, of_kit, require, sizes, vector
from ptxtrain.ptx.kit_spec import AdamSpec


def update(
    rec: Recorder,
    params: Buffer,  # [count] f32
    m: Buffer,  # [count] f32
    v: Buffer,  # [count] f32
    copy: Buffer | None,  # [count] bf16: the weights as the matmuls read them
    grads: Buffer,  # [count] f32
    scalars: Buffer,  # [scalars.COUNT] f32: LR, BIAS1, BIAS2, CLIP are read
    *,
    count: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """With g = grads * CLIP: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
    params -= LR * ((m / BIAS1) / (sqrt(v / BIAS2) + eps) + decay * params). With a CLIP of NaN nothing changes."""
    op = "adamw.update"
    sizes(op, count=count)
    for name, buffer in (("params", params), ("m", m), ("v", v), ("grads", grads)):
        holds(op, name, buffer, count, "f32")
    if copy is not None:
        holds(op, "copy", copy, count, "bf16")
    holds(op, "scalars", scalars, scalar_table.COUNT, "f32")
    spec = AdamSpec(vector=vector(rec, count, params, m, v, copy, grads))
    target = np.uint64(0) if copy is None else copy
    kernel = rec.ptx("adamw_update", spec=spec)
    numbers = (np.float32(x) for x in (beta1, beta2, eps, decay))
    flag = np.uint32(copy is not None)
    rec.launch(
        kernel, spec.grid(count), spec.block, params, m, v, target, grads, scalars, np.uint32(count), *numbers, flag
    )


def step(
    rec: Recorder,
    params: Buffer,  # [count] f32, or bf16 when random is there
    m: Buffer,  # [count] f32
    v: Buffer,  # [count] f32
    copy: Buffer | None,  # [count] copy_dtype: the weights as the matmuls read them, of f32 ones
    grads: Buffer,  # [count] dtype
    *,
    count: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    bias1: float,
    bias2: float,
    clip: float,
    dtype: str,
    copy_dtype: str = "bf16",
    random: tuple[int, int, int] | None = None,  # seed, step, stream
) -> None:
    """As `update`, with the numbers of the step given; gradients of any dtype of the kit.

    With `random` params is bf16 and rounded by chance, unbiased, by the 16 bits of each element that `chance` gives.
    """
    op = "adamw.step"
    sizes(op, count=count)
    of_kit(op, dtype)
    require(op, copy_dtype in ("f16", "bf16"), f'copy_dtype is "{copy_dtype}", must be "f16" or "bf16"')
    require(op, random is None or copy is None, "bf16 weights are read as they are, without a copy")
    master = "f32" if random is None else "bf16"
    holds(op, "params", params, count, master)
    holds(op, "grads", grads, count, dtype)
    for name, buffer in (("m", m), ("v", v)):
        holds(op, name, buffer, count, "f32")
    if copy is not None:
        holds(op, "copy", copy, count, copy_dtype)
    width = 1 if random is not None else vector(rec, count, params, m, v, copy, grads)
    spec = AdamSpec(vector=width, grads=dtype, master=master, copy=copy_dtype, direct=True)
    words: tuple[np.uint32, ...] = ()
    if random is not None:
        seed, number, stream = random
        parts = (seed & 0xFFFFFFFF, seed >> 32, stream, number, philox.ROUNDING)
        words = tuple(np.uint32(part) for part in parts)
    target = np.uint64(0) if copy is None else copy
    numbers = (np.float32(x) for x in (beta1, beta2, eps, decay, lr, bias1, bias2, clip))
    args = (params, m, v, target, grads, np.uint32(count))
    flag = np.uint32(copy is not None)
    rec.launch(rec.ptx("adamw_update", spec=spec), spec.grid(count), spec.block, *args, *words, *numbers, flag)


def chance(seed: int, step: int, stream: int, count: int) -> npt.NDArray[np.uint16]:
    """The random bits that `step` rounds bf16 weights with, u16 [count]: a function of these numbers and the element's index.

    Counters of Philox are (c, stream, step, ROUNDING). Of 256 neighbours element i takes counter c = i / 256 * 32 + i % 32,
    and of its four words the lower or upper half: the (i / 32 % 8)-th of its eight halves.
    """
    warps = -(-count // 256)
    words = philox.words(seed, philox.ROUNDING, step, stream << 34, 128 * warps).reshape(warps, 32, 4)
    halves = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16)  # [warps, lane, word, half]
    return halves.reshape(warps, 32, 8).transpose(0, 2, 1).reshape(-1)[:count]
