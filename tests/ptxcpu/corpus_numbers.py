"""Cases of the corpus: reductions, normalisations, matrix products, the mathematical library, halves."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from corpus_case import Dim3, Launch, blocks_for, case, floats, ints

F32, F64, I32 = np.float32, np.float64, np.int32
BF16 = ml_dtypes.bfloat16


def _strided(x: np.ndarray, grid: int, block: int) -> list[np.ndarray]:
    """What each block of a grid-stride loop reads."""
    step = grid * block
    return [
        np.concatenate([x[i : min(i + block, x.size)] for i in range(b * block, x.size, step)] or [x[:0]])
        for b in range(grid)
    ]


@case("reductions", (96, 1, 1), (50, 1, 1))
def sum_tree(rng: np.random.Generator, block: Dim3) -> Launch:
    x, out = floats(rng, 1003), np.zeros(3, F32)
    expected = [part.sum(dtype=F64) for part in _strided(x, 3, block[0])]
    return Launch((3, 1, 1), [out, x, I32(x.size)], {0: expected}, 1e-4, 1e-4, shared=4 * block[0])


@case("reductions", (64, 1, 1), (256, 1, 1))
def sum_shuffle(rng: np.random.Generator, block: Dim3) -> Launch:
    x, out = floats(rng, 2000), np.zeros(3, F32)
    expected = [part.sum(dtype=F64) for part in _strided(x, 3, block[0])]
    return Launch((3, 1, 1), [out, x, I32(x.size)], {0: expected}, 1e-4, 1e-4)


@case("reductions", (64, 1, 1), (128, 1, 1))
def argmax_rows(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 60, 5, 77).astype(F32)
    args = [np.zeros(5, I32), np.zeros(5, F32), x, I32(77)]
    return Launch((5, 1, 1), args, {0: x.argmax(1), 1: x.max(1)})


@case("reductions", (40, 1, 1))
def sum_kahan(rng: np.random.Generator, block: Dim3) -> Launch:
    x = (floats(rng, 5000) * 10 ** rng.uniform(-6, 6, 5000)).astype(F32)
    expected = [math.fsum(x[i :: 2 * block[0]].astype(F64)) for i in range(2 * block[0])]
    return Launch((2, 1, 1), [np.zeros(2 * block[0]), x, I32(x.size)], {0: expected}, 1e-15, 1e-8)


@case("reductions", (64, 1, 1), (100, 1, 1))
def sum_last_block(rng: np.random.Generator, block: Dim3) -> Launch:
    x = floats(rng, 3000)
    parts = np.zeros(7, F32)
    return Launch((7, 1, 1), [np.zeros(1, F32), parts, x, I32(x.size)], {0: [x.sum(dtype=F64)]}, 1e-4, 1e-4)


@case("reductions", (32, 4, 1))
def moments(rng: np.random.Generator, block: Dim3) -> Launch:
    x = floats(rng, 8, 100) + 3
    args = [np.zeros(8, F32), np.zeros(8, F32), x, I32(100)]
    return Launch((2, 1, 1), args, {0: x.mean(1, dtype=F64), 1: x.astype(F64).var(1)}, 1e-4, 1e-5)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(F64) - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


@case("normal", (64, 1, 1), (32, 1, 1))
def softmax_online(rng: np.random.Generator, block: Dim3) -> Launch:
    x = floats(rng, 6, 45) * 4
    return Launch((6, 1, 1), [np.zeros_like(x), x, I32(45)], {0: _softmax(x)}, 1e-5, 1e-7, fast=1e-4)


@case("normal", (32, 4, 1), (32, 2, 1))
def softmax_warp(rng: np.random.Generator, block: Dim3) -> Launch:
    x = floats(rng, 6, 45) * 4
    args = [np.zeros_like(x), x, I32(6), I32(45)]
    return Launch((-(-6 // block[1]), 1, 1), args, {0: _softmax(x)}, 1e-4, 1e-6, fast=1e-4)


@case("normal", (64, 1, 1))
def cross_entropy(rng: np.random.Generator, block: Dim3) -> Launch:
    x, target = floats(rng, 70, 19), ints(rng, -3, 19, 70)
    losses = -np.log(_softmax(x))[np.arange(70), np.maximum(target, 0)]
    args = [np.zeros(70, F32), x, target, I32(70), I32(19)]
    return Launch((2, 1, 1), args, {0: np.where(target < 0, 0, losses)}, 1e-5, 1e-6, fast=1e-4)


@case("normal", (48, 1, 1), (64, 1, 1))
def layer_norm(rng: np.random.Generator, block: Dim3) -> Launch:
    x, w, b = floats(rng, 4, 83) * 2 + 1, floats(rng, 83), floats(rng, 83)
    wide = x.astype(F64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * w + b
    args = [np.zeros_like(x), x, w, b, I32(83), F32(1e-5)]
    return Launch((4, 1, 1), args, {0: expected}, 1e-4, 1e-5, shared=4 * block[0])


@case("normal", (100, 1, 1))
def gelu(rng: np.random.Generator, block: Dim3) -> Launch:
    x = floats(rng, 500) * 2
    exact = [0.5 * v * (1 + math.erf(v * math.sqrt(0.5))) for v in x.astype(F64)]
    inner = 0.79788456 * (x.astype(F64) + 0.044715 * x.astype(F64) ** 3)
    args = [np.zeros(500, F32), np.zeros(500, F32), x, I32(500)]
    return Launch((5, 1, 1), args, {0: exact, 1: 0.5 * x * (1 + np.tanh(inner))}, 1e-5, 1e-6, fast=2e-3)


@case("normal", (12, 3, 1))
def rope(rng: np.random.Generator, block: Dim3) -> Launch:
    x = floats(rng, 9, 3, 24)
    pairs = x.astype(F64).reshape(9, 3, 12, 2)
    angles = np.arange(9)[:, None] * 10000.0 ** (-2 * np.arange(12) / 24)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
    expected = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    return Launch((9, 1, 1), [x, I32(9), I32(3), I32(24)], {0: expected}, 1e-5, 1e-5, fast=1e-4)


@case("normal", (64, 1, 1))
def adam(rng: np.random.Generator, block: Dim3) -> Launch:
    p, m, v, g = floats(rng, 400), floats(rng, 400), np.abs(floats(rng, 400)), floats(rng, 400)
    m1, v1 = 0.9 * m.astype(F64) + 0.1 * g, 0.95 * v.astype(F64) + 0.05 * g.astype(F64) ** 2
    p1 = p - 0.01 * (m1 / 0.3) / (np.sqrt(v1 / 0.2) + 1e-8)
    args = [p.copy(), m.copy(), v.copy(), g, I32(100), F32(0.01), F32(0.3), F32(0.2)]
    return Launch((2, 1, 1), args, {0: p1, 1: m1, 2: v1}, 1e-5, 1e-6)


@case("matmul", (16, 4, 1), (7, 5, 1))
def matmul_naive(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = floats(rng, 19, 30), floats(rng, 30, 37)
    args = [np.zeros((19, 37), F32), a, b, I32(19), I32(37), I32(30)]
    return Launch((-(-37 // block[0]), -(-19 // block[1]), 1), args, {0: a.astype(F64) @ b}, 1e-4, 1e-4)


@case("matmul", (16, 16, 1))
def matmul_tiled(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = floats(rng, 33, 40), floats(rng, 40, 50)
    args = [np.zeros((33, 50), F32), a, b, I32(33), I32(50), I32(40)]
    return Launch((4, 3, 1), args, {0: a.astype(F64) @ b}, 1e-4, 1e-4)


@case("matmul", (64, 1, 1))
def matmul_registers(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = floats(rng, 50, 20), floats(rng, 20, 70)
    args = [np.zeros((50, 70), F32), a, b, I32(50), I32(70), I32(20)]
    return Launch((3, 2, 1), args, {0: a.astype(F64) @ b}, 1e-4, 1e-4)


@case("matmul", (32, 8, 1), (32, 3, 1))
def transpose(rng: np.random.Generator, block: Dim3) -> Launch:
    x = floats(rng, 45, 70)
    return Launch((3, 2, 1), [np.zeros((70, 45), F32), x, I32(45), I32(70)], {0: x.T})


@case("matmul", (16, 8, 1), (9, 3, 1))
def convolve(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -9, 9, 21, 30).astype(F32)
    padded, weights = np.pad(x, 1), np.array([[1, 2, 1], [2, -4, 2], [1, 2, 1]], F32)
    expected = sum(weights[i, j] * padded[i : i + 21, j : j + 30] for i in range(3) for j in range(3))
    args = [np.zeros_like(x), x, I32(21), I32(30)]
    return Launch((-(-30 // block[0]), -(-21 // block[1]), 1), args, {0: expected})


@case("matmul", (32, 1, 1))
def matvec(rng: np.random.Generator, block: Dim3) -> Launch:
    a, x = rng.normal(size=(5, 77)), rng.normal(size=77)
    return Launch((5, 1, 1), [np.zeros(5), a, x, I32(5), I32(77)], {0: a @ x}, 1e-12, 1e-13)


@case("doubles", (64, 1, 1))
def double_math(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.uniform(0.01, 9, 90)
    erf = np.array([math.erf(v) for v in x])
    columns = [np.sqrt(x), np.exp(-x), np.log(x), np.sin(x) * np.cos(x), x**1.7, x**-0.5 + np.cbrt(x)]
    columns += [np.tanh(x) + np.arctan(x), np.fmod(x, 0.7) + np.floor(x) + erf]
    return Launch((2, 1, 1), [np.zeros((90, 8)), x, I32(90)], {0: np.stack(columns, 1)}, 1e-13, 1e-14)


@case("doubles", (96, 1, 1))
def float_math(rng: np.random.Generator, block: Dim3) -> Launch:
    single = rng.uniform(0.01, 9, 90).astype(F32)
    x = single.astype(F64)
    columns = [np.sqrt(x) + 1 / x, np.exp(-x), np.log(x), np.sin(x), np.cos(x), x ** F64(F32(1.7))]
    columns += [x**-0.5 + np.cbrt(x), np.tanh(x) + np.arctan2(x, 2)]
    columns += [np.exp2(x) + np.log2(x) + 10 ** F64(0.1 * x) + np.log1p(x)]
    columns += [np.fmod(single, F32(0.7)) + np.floor(x) + np.ceil(x) + np.rint(x) + np.trunc(x)]
    args = [np.zeros((90, 10), F32), single, I32(90)]
    return Launch((1, 1, 1), args, {0: np.stack(columns, 1)}, 1e-6, 2e-6, fast=5e-4)


@case("doubles", (64, 1, 1), (40, 1, 1))
def gravity(rng: np.random.Generator, block: Dim3) -> Launch:
    bodies = rng.normal(size=(75, 4))
    delta = bodies[None, :, :3] - bodies[:, None, :3]
    r2 = (delta**2).sum(-1) + 1e-3
    force = (delta * (bodies[None, :, 3] / (r2 * np.sqrt(r2)))[..., None]).sum(1)
    return Launch(blocks_for(75, block), [np.zeros((75, 3)), bodies, I32(75)], {0: force}, 1e-11, 1e-11)


@case("doubles", (64, 1, 1))
def roundings(rng: np.random.Generator, block: Dim3) -> Launch:
    """Results to nearest, moved by one place where the exact error says so, by fractions."""
    from fractions import Fraction

    a, b = floats(rng, 50), floats(rng, 50)

    def bound(exact: Fraction, dtype: type, up: bool) -> float:
        near = dtype(float(exact))
        if up and Fraction(float(near)) < exact:
            return float(np.nextafter(near, dtype(np.inf)))
        if not up and Fraction(float(near)) > exact:
            return float(np.nextafter(near, dtype(-np.inf)))
        return float(near)

    def towards(exact: Fraction) -> float:
        return bound(exact, F32, exact < 0)

    def root(x: Fraction, dtype: type, up: bool) -> float:
        near = dtype(math.sqrt(x))
        while Fraction(float(near)) ** 2 > x:
            near = np.nextafter(near, dtype(0))
        while Fraction(float(np.nextafter(near, dtype(np.inf)))) ** 2 <= x:
            near = np.nextafter(near, dtype(np.inf))
        return float(np.nextafter(near, dtype(np.inf)) if up and Fraction(float(near)) ** 2 < x else near)

    f, d = np.zeros((50, 12), F32), np.zeros((50, 8))
    for i in range(50):
        x, y = Fraction(float(a[i])), Fraction(float(b[i]))
        f[i] = [
            *(bound(x + y, F32, False), bound(x + y, F32, True), towards(x + y)),
            *(bound(x * y, F32, False), bound(x * y, F32, True), towards(x * y)),
            *(bound(x / y, F32, False), bound(x / y, F32, True), root(abs(x), F32, False), root(abs(x), F32, True)),
            *(towards(1 / y), towards(x * y + x)),
        ]
        v = Fraction(float(b[i]) * 1.1)
        sums = [bound(e, F64, up) for e in (x + v, x * v, x / v) for up in (False, True)]
        d[i] = [*sums, bound(x * v + 1, F64, False), root(abs(x), F64, True)]
    return Launch((1, 1, 1), [np.zeros_like(f), np.zeros_like(d), a, b, I32(50)], {0: f, 1: d})


@case("doubles", (64, 1, 1))
def conversions(rng: np.random.Generator, block: Dim3) -> Launch:
    x = (floats(rng, 60) * 200).astype(F32)
    w = x.astype(F64) * 1000003.0
    whole = np.trunc(w).astype(np.int64)
    down = (whole + 7).astype(F32)
    over = np.abs(down.astype(F64)) > np.abs((whole + 7).astype(F64))
    down = np.where(over, np.nextafter(down, F32(0)), down)
    bits = whole.astype(F64).view(np.uint64)
    columns = [np.trunc(x), np.trunc(np.abs(x)), np.trunc(x), np.trunc(np.abs(x)).astype(np.uint8), np.rint(x)]
    columns += [np.ceil(x), np.floor(x), (whole >> 3).astype(I32), np.trunc(np.abs(w)).astype(np.int64).astype(I32)]
    columns += [whole.astype(F32).view(I32), down.astype(F32).view(I32)]
    columns += [((bits >> np.uint64(32)).astype(np.uint32) ^ w.view(np.uint64).astype(np.uint32)).view(I32)]
    expected = np.stack([c.astype(I32) for c in columns], 1)
    return Launch((1, 1, 1), [np.zeros((60, 12), I32), x, I32(60)], {0: expected})


@case("halves", (64, 1, 1))
def half_axpy(rng: np.random.Generator, block: Dim3) -> Launch:
    x, y = rng.normal(size=(2, 180)).astype(np.float16)
    expected = (F64(np.float16(0.7)) * x.astype(F64) + y).astype(np.float16)
    return Launch((2, 1, 1), [y.copy(), x, F32(0.7), I32(90)], {0: expected})


@case("halves", (64, 1, 1))
def half_mixed(rng: np.random.Generator, block: Dim3) -> Launch:
    x, y = rng.normal(size=(2, 100)).astype(np.float16)
    y[::10] = -x[::10]
    r = (x + y) * (x - y)
    r = np.where(x > y, np.maximum(r, np.float16(0.5)), np.where(-x == y, np.arange(100), r)).astype(np.float16)
    args = [np.zeros(100, np.float16), x, y, I32(100)]
    return Launch((2, 1, 1), args, {0: r + np.abs(np.minimum(x, y))}, fast=2e-3)


@case("halves", (32, 1, 1))
def half_functions(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.uniform(0.1, 6, 64).astype(np.float16)
    v = x.astype(F64)
    whole = np.rint(v) + np.trunc(v) + np.floor(v)
    columns = [c.astype(np.float16) for c in (np.exp(v), np.sqrt(v), 1 / v)] + [np.log(v).astype(np.float16) + whole]
    expected = np.stack([c.astype(F32) for c in columns], 1)
    return Launch((2, 1, 1), [np.zeros((64, 4), F32), x, I32(64)], {0: expected}, 2e-3, 1e-3)


@case("halves", (48, 1, 1))
def bf16_swiglu(rng: np.random.Generator, block: Dim3) -> Launch:
    gate, up = rng.normal(size=(2, 160)).astype(BF16)
    g = gate.astype(F64)
    expected = (g / (1 + np.exp(-g)) * up.astype(F64)).astype(BF16)
    return Launch((2, 1, 1), [np.zeros(160, BF16), gate, up, I32(80)], {0: expected}, 0.008, 1e-6)


@case("halves", (48, 1, 1))
def bf16_arithmetic(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.integers(-8, 9, (2, 160)).astype(BF16)
    x, y = a.astype(F32), b.astype(F32)
    r = np.maximum(np.maximum(x * y + (x + y), 0), -y)
    both = np.repeat((x > y).reshape(-1, 2).all(1), 2)
    r = np.where(both, np.minimum(r, x), r) + (x > y)
    return Launch((2, 1, 1), [np.zeros(160, BF16), a, b, I32(80)], {0: r})


@case("halves", (32, 1, 1))
def half_sums(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(-9, 9, (3, 64)).astype(np.float16)
    return Launch((3, 1, 1), [np.zeros(3, F32), x], {0: x.sum(1, dtype=F32)})


@case("halves", (64, 1, 1))
def half_atomics(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(-3, 4, (100, 2)).astype(np.float16)
    sums = np.stack([x[i::3].sum(0, dtype=F32) for i in range(3)])
    args = [np.zeros((3, 2), np.float16), np.zeros(1, BF16), x, I32(100)]
    return Launch((2, 1, 1), args, {0: sums, 1: [100.0]})


@case("halves", (64, 1, 1))
def half_comparisons(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.integers(-2, 3, (2, 90, 2)).astype(np.float16)
    a[::7, 0] = np.nan
    less = a < b
    r = less[:, 0] * 0xFF + less[:, 1] * 0xFF0000 + (a == b).all(1) * 0x100
    r |= (less | np.isnan(a) | np.isnan(b)).all(1) * 0x200 + (a[:, 0] >= b[:, 1]) * 0x1000
    args = [np.zeros(90, np.uint32), a, b, I32(90)]
    return Launch((2, 1, 1), args, {0: r.astype(np.uint32)})


@case("wmma", (32, 1, 1))
def wmma_half(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.integers(-4, 5, (32, 48)).astype(np.float16), rng.integers(-4, 5, (48, 32)).astype(np.float16)
    expected = 0.5 * (a.astype(F32) @ b.astype(F32))
    return Launch((2, 2, 1), [np.zeros((32, 32), F32), a, b, I32(32), I32(48)], {0: expected})


@case("wmma", (32, 1, 1))
def wmma_bf16(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.integers(-4, 5, (32, 48)).astype(BF16), rng.integers(-4, 5, (16, 48)).astype(BF16)
    c = ints(rng, -9, 9, 32, 16).astype(F32)
    expected = c + a.astype(F32) @ b.astype(F32).T
    return Launch((1, 2, 1), [c.copy(), a, b, I32(16), I32(48)], {0: expected})


@case("wmma", (32, 1, 1))
def wmma_wide(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.integers(-3, 4, (32, 64)).astype(np.float16), rng.integers(-3, 4, (16, 32)).astype(np.float16)
    expected = a.astype(F32).T @ b.astype(F32).T
    return Launch((2, 2, 1), [np.zeros((64, 16), np.float16), a, b, I32(16), I32(32)], {0: expected})
