"""Normally distributed numbers and the initial weights, with the same bits on every machine.

Only +, -, *, / and square roots of float64 are used, which IEEE 754 rounds in one way; NumPy's logarithm would give
other bits with another SIMD level. Each number is rounded once to f32 at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptxtrain.engine import philox
from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.parameters import parameter_count, parameter_table
from ptxtrain.engine.philox import F64

F32: TypeAlias = npt.NDArray[np.float32]

STD = 0.02
_CHUNK = 1 << 16  # numbers made at a time: the temporaries stay in the second-level cache

# AS 241 (PPND16), M. J. Wichura, "The percentage points of the normal distribution", Applied Statistics 37 (1988):
# three pairs of polynomials, relative accuracy about 1e-16.
_CENTRE = (
    (
        3.3871328727963666080,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_MIDDLE = (
    (
        1.42343711074968357734,
        4.63033784615654529590,
        5.76949722146069140550,
        3.64784832476320460504,
        1.27045825245236838258,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187,
        1.67638483018380384940,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_FAR = (
    (
        6.65790464350110377720,
        5.46378491116411436990,
        1.78482653991729133580,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
_LN2 = 0.693147180559945309417


def _polynomial(coefficients: Sequence[float], x: F64) -> F64:
    """sum of coefficients[i] * x^i by Horner's rule."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def log(x: F64) -> F64:
    """The natural logarithm of positive normal numbers to within a few units in the last place.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s) = 2 (s + s^3 / 3 + s^5 / 5 + …) with s = (m - 1) / (m
    + 1), |s| <= 0.172: the first term left out, s^25 / 25, is below 3e-21.
    """
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.70710678118654752
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = (exponent - small).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return exponent * _LN2 + 2.0 * s * _polynomial([1.0 / n for n in range(1, 25, 2)], s * s)


def inverse_normal(u: F64) -> F64:
    """The number below which a standard normal variable lies with probability u, 0 < u < 1. Same shape as u."""
    q = u - 0.5
    centre = 0.180625 - q * q
    out = q * _polynomial(_CENTRE[0], centre) / _polynomial(_CENTRE[1], centre)
    outer = np.flatnonzero(np.abs(q) > 0.425)
    r = np.sqrt(-log(np.minimum(u[outer], 1.0 - u[outer])))
    middle, far = r - 1.6, r - 5.0
    tail = np.where(
        r <= 5.0,
        _polynomial(_MIDDLE[0], middle) / _polynomial(_MIDDLE[1], middle),
        _polynomial(_FAR[0], far) / _polynomial(_FAR[1], far),
    )
    out[outer] = np.where(q[outer] < 0.0, -tail, tail)
    return out


def normal(seed: int, purpose: int, stream: int, count: int, std: float = 1.0) -> F32:
    """The first `count` numbers of a stream, normal with mean 0 and deviation `std`, f32 [count].

    A number depends on its place in the stream, not on how many are made.
    """
    out = np.empty(count, np.float32)
    for start in range(0, count, _CHUNK):
        part = out[start : start + _CHUNK]
        part[:] = std * inverse_normal(philox.uniform(seed, purpose, stream, start, part.size))
    return out


def initial_weights(cfg: ModelConfig, seed: int) -> F32:
    """The flat parameters that a run starts from, f32 [parameter count], laid out as `parameters.parameter_table` says.

    Normal with deviation 0.02; the projections into the residual stream 0.02 / sqrt(2 L), since 2 L of them add up
    there; norm weights 1. Tensor i of the table takes stream i.
    """
    table = parameter_table(cfg)
    flat = np.empty(parameter_count(table), np.float32)
    residual_std = STD / math.sqrt(2.0 * cfg.layers)
    for stream, tensor in enumerate(table):
        part = flat[tensor.offset : tensor.offset + tensor.size]
        if not tensor.decay:
            part[:] = 1.0
        else:
            into_residual = tensor.name.endswith(("attention_out", "mlp_down"))
            part[:] = normal(seed, philox.INITIAL_WEIGHTS, stream, tensor.size, residual_std if into_residual else STD)
    return flat
