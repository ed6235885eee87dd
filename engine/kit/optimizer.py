"""AdamW: one fused step over a group of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS, fail, number
from ptxtrain.engine.kit.core import Call
from ptxtrain.engine.ops import adamw


def adamw_step(
    params: Array,
    m: Array,
    v: Array,
    grads: Array,
    *,
    lr: float,
    bc1: float,
    bc2: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    copy: Array | None = None,
    seed: int | None = None,
    step: int | None = None,
    stream: int = 0,
) -> tuple[Array, Array, Array]:
    """AdamW (Loshchilov and Hutter 2019) in place, with decoupled decay and the caller's bias corrections.

    With g = grads * grad_scale: m = beta1 * m + (1 - beta1) * g, v = beta2 * v + (1 - beta2) * g^2, and
    params = params - lr * ((m / bc1) / (sqrt(v / bc2) + eps) + weight_decay * params). At step t, counted from 1, bc1 is
    1 - beta1^t and bc2 is 1 - beta2^t. One call is one parameter group.

    params in bf16 are rounded by chance, up as often as they lie near the upper neighbour, so that updates too small for one
    rounding still count on average. The random bits (Philox4x32-10) are a function of seed, step, stream and the element's
    index: the same on every device, at any number of threads.

    Args:
        params: [...], f32 master weights, or bf16 ones with seed and step.
        m: [...], f32, the first moment; 0 before the first step.
        v: [...], f32, the second moment; as well.
        grads: [...], f16, bf16 or f32.
        lr: the learning rate.
        bc1: 1 - beta1^t, in (0, 1].
        bc2: 1 - beta2^t, in (0, 1].
        beta1: in [0, 1].
        beta2: in [0, 1].
        eps: above 0.
        weight_decay: at least 0.
        grad_scale: what gradients are multiplied by first: a clip factor, or 1 / the loss scale of f16.
        copy: [...], f16 or bf16: receives f32 params rounded, for the matrix products.
        seed: 0 to 2^64 - 1, for bf16 params.
        step: 0 to 2^32 - 1, for bf16 params; another one at each step.
        stream: 0 to 2^32 - 1, for bf16 params; another one for each array that is updated with the same seed and step.

    Returns:
        params, m, v, as they were passed in.

    Raises:
        ContractError: a shape, dtype, layout, place or number that does not fit.

    >>> params, m, v = np.array([1, 2], np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> grads = np.array([0.5, -0.5], np.float16)
    >>> _ = kit.adamw_step(params, m, v, grads, lr=0.1, bc1=1 - 0.9**1, bc2=1 - 0.999**1)
    >>> print(params.round(4), m.round(4), v.round(6))
    [0.9 2.1] [ 0.05 -0.05] [0.00025 0.00025]
    """
    call = Call("adamw_step")
    op = call.op
    params_ = call.state("params", params, ("...",), ("f32", "bf16"))
    m_ = call.state("m", m, ("...",), "f32")
    v_ = call.state("v", v, ("...",), "f32")
    grads_ = call.input("grads", grads, ("...",), FLOATS)
    copy_ = None if copy is None else call.output("copy", copy, ("...",), ("f16", "bf16"))
    numbers = {
        "lr": number(op, "lr", lr),
        "beta1": number(op, "beta1", beta1, low=0, high=1),
        "beta2": number(op, "beta2", beta2, low=0, high=1),
        "eps": number(op, "eps", eps, low=0, open_low=True),
        "decay": number(op, "weight_decay", weight_decay, low=0),
        "bias1": number(op, "bc1", bc1, low=0, high=1, open_low=True),
        "bias2": number(op, "bc2", bc2, low=0, high=1, open_low=True),
        "clip": number(op, "grad_scale", grad_scale),
    }
    for name, key in (("eps", "eps"), ("bc1", "bias1"), ("bc2", "bias2")):
        call.require(float(np.float32(numbers[key])) > 0, name, "a number that f32 holds", numbers[key])
    random = None
    if params_.dtype == "bf16":
        call.require(copy is None, "copy", "none beside bf16 params, which are read as they are", "an array")
        random = (
            _word(op, "seed", seed, 64),
            _word(op, "step", step, 32),
            _word(op, "stream", stream, 32),
        )

    def record(rec: Recorder) -> None:
        target = None if copy_ is None else copy_.buffer
        buffers = (params_.buffer, m_.buffer, v_.buffer, target, grads_.buffer)
        copy_dtype = "bf16" if copy_ is None else copy_.dtype
        options: dict[str, Any] = {**numbers, "dtype": grads_.dtype, "copy_dtype": copy_dtype, "random": random}
        adamw.step(rec, *buffers, count=params_.count, **options)

    if params_.count:
        call.run(record)
    return params_.result, m_.result, v_.result


def _word(op: str, name: str, value: int | None, bits: int) -> int:
    """An integer of so many bits; bf16 weights cannot be rounded without it."""
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        fail(op, name, f"an integer from 0 to 2^{bits} - 1, which bf16 params are rounded with", repr(value))
    return value
