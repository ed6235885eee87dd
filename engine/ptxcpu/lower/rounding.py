"""Arithmetic rounded towards zero (rz), down (rm) or up (rp), without touching the processor's mode.

The result to nearest is taken first; the sign of its exact error (by error-free transformations: two-sum, two-product,
remainders by fma) then says whether the neighbour on the other side is the wanted one. f32 goes through f64, where sums and
products of f32 numbers are exact or have an exact error. Tiny f64 numbers are scaled up first, so that their errors are not
lost below the smallest subnormal number.
"""

from __future__ import annotations

import math

from ptxtrain.engine.ptxcpu.lower import functions
from ptxtrain.engine.ptxcpu.lower.emitter import Emitter, splat, vec
from ptxtrain.engine.ptxcpu.lower.functions import Math

_UP, _TINY = 2.0**300, 2.0**-700  # a scale, and the size below which it is needed


class Directed:
    """Operations of `n` floats of type `scalar` ("float" or "double") in one rounding mode."""

    def __init__(self, emit: Emitter, scalar: str, mode: str, n: int) -> None:
        self.emit, self.scalar, self.mode, self.n = emit, scalar, mode, n
        self.m = Math(emit, n, "double")

    def _wide(self, value: str) -> str:
        return functions.extend(self.emit, value, self.n) if self.scalar == "float" else value

    def _finish(self, total: str, error: str) -> str:
        """total + error, which only counts by its sign, in the wanted type."""
        if self.scalar == "float":
            return functions.round_to_f32(self.emit, total, error, self.mode, self.n)
        return step(self.emit, total, error, self.mode, self.n)

    def _overflow(self, total: str, error: str, *inputs: str) -> str:
        """Where finite inputs gave infinity, the true value lies on the near side of it; other infinities are exact."""
        m = self.m
        finite = None
        for value in inputs:
            below = m.cmp("olt", m.unary("fabs", value), m.k(math.inf))
            finite = below if finite is None else self.emit.op(f"and {m.b} {finite}, {below}")
        infinite = m.cmp("oeq", m.unary("fabs", total), m.k(math.inf))
        towards = self.emit.op(f"select {m.b} {finite}, {m.t} {self._negative(total)}, {m.t} {m.k(0.0)}")
        return m.pick(infinite, towards, error)

    def _zero_sign(self, total: str, result: str, a: str, b: str) -> str:
        """A sum that is exactly zero is negative when rounding down, unless both terms are +0."""
        if self.mode != "rm":
            return result
        m = self.m
        either = m.int("and", m.int("or", m.as_int(a), m.as_int(b)), m.ki(-(1 << 63)))
        zero = m.as_float(either)
        t = vec(self.scalar, self.n)
        if self.scalar == "float":
            zero = self.emit.op(f"fptrunc {m.t} {zero} to {t}")
        return self.emit.op(f"select {m.b} {m.cmp('oeq', total, m.k(0.0))}, {t} {zero}, {t} {result}")

    def add(self, a: str, b: str) -> str:
        a, b = self._wide(a), self._wide(b)
        total, error = functions.two_sum(self.emit, a, b, self.n)
        if self.scalar == "double":
            error = self._overflow(total, error, a, b)
        return self._zero_sign(total, self._finish(total, error), a, b)

    def sub(self, a: str, b: str) -> str:
        return self.add(a, self.emit.op(f"fneg {vec(self.scalar, self.n)} {b}"))

    def mul(self, a: str, b: str) -> str:
        m = self.m
        a, b = self._wide(a), self._wide(b)
        total = m.f("fmul", a, b)
        if self.scalar == "float":
            return self._finish(total, m.k(0.0))
        scale = self._scale(total)
        error = m.fma(
            m.f("fmul", a, scale), m.f("fmul", b, scale), self._negative(m.f("fmul", m.f("fmul", total, scale), scale))
        )
        error = self._lost(total, 0.0, error, a, b)
        return self._finish(total, self._overflow(total, error, a, b))

    def _lost(self, product: str, limit: float, error: str, a: str, b: str) -> str:
        """The error where a product of numbers that are not zero is below `limit`: there it only counts by its sign."""
        m = self.m
        tiny = m.cmp("ole", m.unary("fabs", product), m.k(limit))
        some = self.emit.op(f"and {m.b} {m.cmp('one', a, m.k(0.0))}, {m.cmp('one', b, m.k(0.0))}")
        sign = self.emit.call(f"llvm.copysign.{m.suffix}", m.t, (m.t, m.k(1.0)), (m.t, product))
        return m.pick(self.emit.op(f"and {m.b} {tiny}, {some}"), sign, error)

    def fma(self, a: str, b: str, c: str) -> str:
        m = self.m
        a, b, c = self._wide(a), self._wide(b), self._wide(c)
        product = m.f("fmul", a, b)
        if self.scalar == "float":
            total, error = functions.two_sum(self.emit, product, c, self.n)
            return self._zero_sign(total, self._finish(total, error), product, c)
        total = m.fma(a, b, c)
        # Boldo and Muller, "Exact and approximated error of the FMA" (IEEE Trans. Computers 2011), algorithm ErrFma.
        scale = self._scale(total)
        a2, b2 = m.f("fmul", a, scale), m.f("fmul", b, scale)
        c2, r2 = (m.f("fmul", m.f("fmul", v, scale), scale) for v in (c, total))
        u1 = m.f("fmul", a2, b2)
        u2 = m.fma(a2, b2, self._negative(u1))
        alpha1, alpha2 = functions.two_sum(self.emit, c2, u2, self.n)
        beta1, beta2 = functions.two_sum(self.emit, u1, alpha1, self.n)
        gamma = m.f("fadd", m.f("fsub", beta1, r2), beta2)
        error = self._lost(u1, 2.0**-900, m.f("fadd", gamma, alpha2), a, b)
        result = self._finish(total, self._overflow(total, error, a, b, c))
        exact_zero = m.pick(m.cmp("oeq", error, m.k(0.0)), total, m.k(1.0))
        return self._zero_sign(exact_zero, result, product, c)

    def div(self, a: str, b: str) -> str:
        m = self.m
        a, b = self._wide(a), self._wide(b)
        total = m.f("fdiv", a, b)
        scale = self._scale(a)
        rest = m.fma(self._negative(m.f("fmul", total, scale)), b, m.f("fmul", a, scale))
        flip = m.cmp("olt", b, m.k(0.0))
        error = m.pick(flip, self._negative(rest), rest)
        if self.scalar == "double":
            by_zero = m.cmp("oeq", b, m.k(0.0))
            error = m.pick(by_zero, m.k(0.0), self._overflow(total, error, a, b))
        return self._finish(total, error)

    def sqrt(self, a: str) -> str:
        m = self.m
        a = self._wide(a)
        root = m.unary("sqrt", a)
        scale = self._scale(a)
        scaled = m.f("fmul", root, scale)
        rest = m.fma(self._negative(scaled), scaled, m.f("fmul", m.f("fmul", a, scale), scale))
        return self._finish(root, rest)

    def _negative(self, value: str) -> str:
        return self.emit.op(f"fneg {self.m.t} {value}")

    def _scale(self, value: str) -> str:
        """2^300 for tiny numbers, else 1."""
        m = self.m
        if self.scalar == "float":
            return m.k(1.0)
        return m.pick(m.cmp("olt", m.unary("fabs", value), m.k(_TINY)), m.k(_UP), m.k(1.0))


def step(emit: Emitter, total: str, error: str, mode: str, n: int) -> str:
    """The f64 `total`, or its neighbour, so that total + error is rounded in `mode`; the error counts by its sign."""
    m = Math(emit, n, "double")
    bits = m.as_int(total)
    negative = m.icmp("slt", bits, m.ki(0))
    less, more = m.cmp("olt", error, m.k(0.0)), m.cmp("ogt", error, m.k(0.0))
    if mode == "rm":
        moves, grows = less, negative
    elif mode == "rp":
        moves, grows = more, emit.op(f"xor {m.b} {negative}, {splat('i1', 'true', n)}")
    else:
        moves = emit.op(f"select {m.b} {negative}, {m.b} {more}, {m.b} {less}")
        grows = splat("i1", "false", n)
    delta = emit.op(f"select {m.b} {grows}, {m.i} {m.ki(1)}, {m.i} {m.ki(-1)}")
    moved = m.int("add", bits, delta)
    if mode != "rz":
        smallest = m.ki(-(1 << 63) + 1 if mode == "rm" else 1)
        at_zero = m.icmp("eq", m.int("shl", bits, m.ki(1)), m.ki(0))
        moved = emit.op(f"select {m.b} {at_zero}, {m.i} {smallest}, {m.i} {moved}")
    return m.as_float(emit.op(f"select {m.b} {moves}, {m.i} {moved}, {m.i} {bits}"))


def narrow(emit: Emitter, value: str, to: str, mode: str, n: int) -> str:
    """f32 to the i16 bits of f16 or bf16 in one of the directed modes; the value must not have been rounded to nearest."""
    m = Math(emit, n)
    half, word = vec("half", n), vec("i16", n)
    if to == "bf16":
        bits = functions.f32_to_bf16(emit, value, n)
        back = functions.bf16_to_f32(emit, bits, n)
    else:
        nearest = emit.op(f"fptrunc {m.t} {value} to {half}")
        bits = emit.op(f"bitcast {half} {nearest} to {word}")
        back = emit.op(f"fpext {half} {nearest} to {m.t}")
    over, under = m.cmp("ogt", back, value), m.cmp("olt", back, value)
    negative = emit.op(f"icmp slt {word} {bits}, {splat('i16', 0, n)}")
    if mode == "rz":
        moves, grows = emit.op(f"select {m.b} {negative}, {m.b} {under}, {m.b} {over}"), splat("i1", "false", n)
    elif mode == "rm":
        moves, grows = over, negative
    else:
        moves, grows = under, emit.op(f"xor {m.b} {negative}, {splat('i1', 'true', n)}")
    delta = emit.op(f"select {m.b} {grows}, {word} {splat('i16', 1, n)}, {word} {splat('i16', -1, n)}")
    moved = emit.op(f"add {word} {bits}, {delta}")
    magnitude = emit.op(f"shl {word} {bits}, {splat('i16', 1, n)}")
    at_zero = emit.op(f"icmp eq {word} {magnitude}, {splat('i16', 0, n)}")
    smallest = splat("i16", -0x7FFF if mode == "rm" else 1, n)
    moved = emit.op(f"select {m.b} {at_zero}, {word} {smallest}, {word} {moved}")
    return emit.op(f"select {m.b} {moves}, {word} {moved}, {word} {bits}")


def integer_as_f64(emit: Emitter, value: str, bits: int, signed: bool, n: int) -> tuple[str, str]:
    """An integer as an f64 and its exact error (zero up to 32 bits)."""
    m = Math(emit, n, "double")
    convert = "sitofp" if signed else "uitofp"
    t = vec(f"i{bits}", n)
    if bits <= 32:
        return emit.op(f"{convert} {t} {value} to {m.t}"), m.k(0.0)
    upper = m.int("ashr" if signed else "lshr", value, m.ki(32))
    lower = m.int("and", value, m.ki(0xFFFFFFFF))
    high = m.f("fmul", emit.op(f"{convert} {t} {upper} to {m.t}"), m.k(2.0**32))
    return functions.two_sum(emit, high, emit.op(f"uitofp {t} {lower} to {m.t}"), n)
