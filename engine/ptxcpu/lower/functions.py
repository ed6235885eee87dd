"""Float functions as straight-line IR: conversions, exact sums, and own vector versions of ex2, lg2, sin, cos, tanh.

LLVM would turn the transcendental intrinsics into 32 calls of libm (60 ns a warp); the polynomials here take 8 to 15 ns.
Largest errors measured over all f32 arguments of the main range are beside each function.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from ptxtrain.engine.ptxcpu.jit import host_features
from ptxtrain.engine.ptxcpu.lower.context import float_literal
from ptxtrain.engine.ptxcpu.lower.emitter import Emitter, splat, vec


def _f32(number: float) -> str:
    return float_literal(struct.unpack("<I", struct.pack("<f", number))[0], 32)


def _f64(number: float) -> str:
    return float_literal(struct.unpack("<Q", struct.pack("<d", number))[0], 64)


class Math:
    """Short forms for one float type in n lanes."""

    def __init__(self, emit: Emitter, n: int, scalar: str = "float") -> None:
        self.emit, self.n, self.scalar = emit, n, scalar
        self.bits = 32 if scalar == "float" else 64
        self.t, self.i, self.b = vec(scalar, n), vec(f"i{self.bits}", n), vec("i1", n)
        self.suffix = (f"v{n}" if n > 1 else "") + ("f32" if scalar == "float" else "f64")

    def k(self, number: float) -> str:
        return splat(self.scalar, _f32(number) if self.bits == 32 else _f64(number), self.n)

    def ki(self, number: int) -> str:
        return splat(f"i{self.bits}", number, self.n)

    def f(self, name: str, a: str, b: str) -> str:
        return self.emit.op(f"{name} {self.t} {a}, {b}")

    def int(self, name: str, a: str, b: str) -> str:
        return self.emit.op(f"{name} {self.i} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        return self.emit.call(f"llvm.fma.{self.suffix}", self.t, (self.t, a), (self.t, b), (self.t, c))

    def unary(self, name: str, a: str) -> str:
        return self.emit.call(f"llvm.{name}.{self.suffix}", self.t, (self.t, a))

    def cmp(self, relation: str, a: str, b: str) -> str:
        return self.emit.op(f"fcmp {relation} {self.t} {a}, {b}")

    def icmp(self, relation: str, a: str, b: str) -> str:
        return self.emit.op(f"icmp {relation} {self.i} {a}, {b}")

    def pick(self, condition: str, a: str, b: str) -> str:
        return self.emit.op(f"select {self.b} {condition}, {self.t} {a}, {self.t} {b}")

    def as_int(self, a: str) -> str:
        return self.emit.op(f"bitcast {self.t} {a} to {self.i}")

    def as_float(self, a: str) -> str:
        return self.emit.op(f"bitcast {self.i} {a} to {self.t}")

    def to_int(self, a: str) -> str:
        return self.emit.op(f"fptosi {self.t} {a} to {self.i}")

    def from_int(self, a: str) -> str:
        return self.emit.op(f"sitofp {self.i} {a} to {self.t}")

    def horner(self, x: str, coefficients: list[float]) -> str:
        """coefficients[0] + x * (coefficients[1] + …), by fma."""
        total = self.k(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            total = self.fma(total, x, self.k(c))
        return total


# Conversions


def extend(emit: Emitter, value: str, n: int, scalar: str = "float") -> str:
    """To f64, exactly."""
    return emit.op(f"fpext {vec(scalar, n)} {value} to {vec('double', n)}")


def bf16_to_f32(emit: Emitter, value: str, n: int) -> str:
    """The i16 bits of brain floats as f32: the upper half of the word."""
    wide = emit.op(f"zext {vec('i16', n)} {value} to {vec('i32', n)}")
    moved = emit.op(f"shl {vec('i32', n)} {wide}, {splat('i32', 16, n)}")
    return emit.op(f"bitcast {vec('i32', n)} {moved} to {vec('float', n)}")


def f32_to_bf16(emit: Emitter, value: str, n: int, *, truncate: bool = False) -> str:
    """f32 to the i16 bits of brain floats, to nearest even (or towards zero); NaN becomes 0x7FFF.

    In integers, because the processor's own conversion flushes subnormal numbers.
    """
    m = Math(emit, n)
    bits = m.as_int(value)
    if truncate:
        rounded = bits
    else:
        odd = m.int("and", m.int("lshr", bits, m.ki(16)), m.ki(1))
        rounded = m.int("add", m.int("add", bits, m.ki(0x7FFF)), odd)
    upper = m.int("lshr", rounded, m.ki(16))
    is_nan = m.cmp("uno", value, value)
    chosen = emit.op(f"select {m.b} {is_nan}, {m.i} {m.ki(0x7FFF)}, {m.i} {upper}")
    return emit.op(f"trunc {m.i} {chosen} to {vec('i16', n)}")


def flush(emit: Emitter, value: str, n: int, scalar: str = "float") -> str:
    """Subnormal numbers to zeros of their sign. By integers: a processor flag would leak into what LLVM moves."""
    m = Math(emit, n, scalar)
    bits = m.as_int(value)
    exponent = m.int("and", bits, m.ki(0x7F800000 if m.bits == 32 else 0x7FF << 52))
    sign = m.int("and", bits, m.ki(-(1 << (m.bits - 1))))
    small = m.icmp("eq", exponent, m.ki(0))
    return m.as_float(emit.op(f"select {m.b} {small}, {m.i} {sign}, {m.i} {bits}"))


# Exact sums in f64


def two_sum(emit: Emitter, a: str, b: str, n: int) -> tuple[str, str]:
    """Knuth's two-sum: the f64 sum and its exact rounding error."""
    m = Math(emit, n, "double")
    total = m.f("fadd", a, b)
    virtual = m.f("fsub", total, a)
    error = m.f("fadd", m.f("fsub", a, m.f("fsub", total, virtual)), m.f("fsub", b, virtual))
    # With infinities and NaN the error is NaN, and the sum is exact as it is.
    finite = m.cmp("ord", error, m.k(0.0))
    return total, m.pick(finite, error, m.k(0.0))


def round_to_f32(emit: Emitter, total: str, error: str, mode: str, n: int) -> str:
    """total + error rounded to f32 towards zero (rz), down (rm) or up (rp)."""
    m, s = Math(emit, n, "double"), Math(emit, n)
    if mode == "rz":
        down = round_to_f32(emit, total, error, "rm", n)
        up = round_to_f32(emit, total, error, "rp", n)
        return s.pick(m.cmp("olt", total, m.k(0.0)), up, down)
    nearest = emit.op(f"fptrunc {m.t} {total} to {s.t}")
    back = extend(emit, nearest, n)
    past, same = ("ogt", "olt") if mode == "rm" else ("olt", "ogt")
    over = m.cmp(past, back, total)
    on_edge = emit.op(f"and {m.b} {m.cmp('oeq', back, total)}, {m.cmp(same, error, m.k(0.0))}")
    step = emit.op(f"or {m.b} {over}, {on_edge}")
    bits = s.as_int(nearest)
    # The neighbour's bits: away from zero adds one to the magnitude, towards it takes one; zero steps to a subnormal.
    negative = s.icmp("slt", bits, s.ki(0))
    grows = negative if mode == "rm" else emit.op(f"xor {s.b} {negative}, {splat('i1', 'true', n)}")
    delta = emit.op(f"select {s.b} {grows}, {s.i} {s.ki(1)}, {s.i} {s.ki(-1)}")
    moved = s.int("add", bits, delta)
    at_zero = s.icmp("eq", s.int("shl", bits, s.ki(1)), s.ki(0))
    smallest = s.ki(-0x7FFFFFFF if mode == "rm" else 1)
    moved = emit.op(f"select {s.b} {at_zero}, {s.i} {smallest}, {s.i} {moved}")
    return s.as_float(emit.op(f"select {s.b} {step}, {s.i} {moved}, {s.i} {bits}"))


def to_odd(emit: Emitter, total: str, error: str, n: int) -> str:
    """total + error in f64, an inexact sum made odd: rounding it again to a shorter type gives the right result."""
    m = Math(emit, n, "double")
    bits = m.as_int(total)
    inexact = m.cmp("one", error, m.k(0.0))
    even = m.icmp("eq", m.int("and", bits, m.ki(1)), m.ki(0))
    # Towards zero if the error points there, then set the last bit: the odd neighbour of the true value.
    opposite = emit.op(f"xor {m.b} {m.cmp('olt', error, m.k(0.0))}, {m.cmp('olt', total, m.k(0.0))}")
    lower = m.int("sub", bits, m.ki(1))
    toward = emit.op(f"select {m.b} {opposite}, {m.i} {lower}, {m.i} {m.int('or', bits, m.ki(1))}")
    adjust = emit.op(f"and {m.b} {inexact}, {even}")
    return m.as_float(emit.op(f"select {m.b} {adjust}, {m.i} {toward}, {m.i} {bits}"))


def f64_to_f32_odd(emit: Emitter, value: str, n: int) -> str:
    """f64 to f32, rounded to odd."""
    m, s = Math(emit, n, "double"), Math(emit, n)
    nearest = emit.op(f"fptrunc {m.t} {value} to {s.t}")
    back = extend(emit, nearest, n)
    error = m.f("fsub", value, back)
    bits = s.as_int(nearest)
    inexact = m.cmp("one", error, m.k(0.0))
    even = s.icmp("eq", s.int("and", bits, s.ki(1)), s.ki(0))
    opposite = emit.op(f"xor {m.b} {m.cmp('olt', error, m.k(0.0))}, {m.cmp('olt', value, m.k(0.0))}")
    toward = emit.op(
        f"select {s.b} {opposite}, {s.i} {s.int('sub', bits, s.ki(1))}, {s.i} {s.int('or', bits, s.ki(1))}"
    )
    adjust = emit.op(f"and {s.b} {inexact}, {even}")
    return s.as_float(emit.op(f"select {s.b} {adjust}, {s.i} {toward}, {s.i} {bits}"))


# Functions


_ZMM = 16  # f32 of a 512-bit register


def _has_scalef(n: int) -> bool:
    """Whether `_power` is one instruction."""
    return n % _ZMM == 0 and "+avx512f" in host_features()[1]


def _power(emit: Emitter, y: str, whole: str, n: int) -> str:
    """y * 2^whole, rounded once, subnormal results too; whole is an integral f32 in [-252, 254], or NaN and the result of no use.

    By AVX-512's vscalefps where there is one, which takes the exponent as a float, else in two exact steps: the same bits.
    """
    m = Math(emit, n)
    if _has_scalef(n):
        return _scalef(emit, y, whole, n)
    exponent = m.to_int(m.pick(m.cmp("uno", whole, whole), m.k(0.0), whole))
    half = m.int("ashr", exponent, m.ki(1))
    rest = m.int("sub", exponent, half)
    for part in (half, rest):
        scale = m.as_float(m.int("shl", m.int("add", part, m.ki(127)), m.ki(23)))
        y = m.f("fmul", y, scale)
    return y


def _scalef(emit: Emitter, y: str, whole: str, n: int) -> str:
    """`_power` by the instruction, on each 16 lanes."""
    t, part = vec("float", n), vec("float", _ZMM)
    call = emit.declare("llvm.x86.avx512.mask.scalef.ps.512", part, f"{part}, {part}, {part}, i16, i32 immarg")
    found = []
    for first in range(0, n, _ZMM):
        order = ", ".join(f"i32 {i}" for i in range(first, first + _ZMM))
        a, b = (
            emit.op(f"shufflevector {t} {x}, {t} poison, <{_ZMM} x i32> <{order}>") if n > _ZMM else x
            for x in (y, whole)
        )
        found.append(emit.op(f"call {part} {call}({part} {a}, {part} {b}, {part} zeroinitializer, i16 -1, i32 4)"))
    while len(found) > 1:
        width = n // len(found)
        half, order = vec("float", width), ", ".join(f"i32 {i}" for i in range(2 * width))
        found = [
            emit.op(f"shufflevector {half} {a}, {half} {b}, <{2 * width} x i32> <{order}>")
            for a, b in zip(found[::2], found[1::2], strict=True)
        ]
    return found[0]


def _ex2(emit: Emitter, x: str, n: int, *, flushed: bool = False) -> str:
    """2^x: the nearest integer apart, a polynomial of degree 7 for the rest (0.9 ulp).

    `flushed`: subnormal arguments and results are zeros. An argument below 2^-126 gives 1 anyway, and results are subnormal
    for arguments below -126 alone, so that two flushes cost one comparison.
    """
    m = Math(emit, n)
    # Past these the result is infinity or zero whatever the argument; the clamp keeps the integer small.
    clamped = m.pick(m.cmp("ogt", x, m.k(129.0)), m.k(129.0), x)
    if not (flushed and _has_scalef(n)):
        clamped = m.pick(m.cmp("olt", clamped, m.k(-151.0)), m.k(-151.0), clamped)
    whole = m.unary("rint", clamped)
    rest = m.f("fsub", clamped, whole)
    coefficients = [math.log(2.0) ** k / math.factorial(k) for k in range(8)]
    y = m.horner(rest, coefficients)
    y = _power(emit, y, whole, n)
    if flushed:
        y = m.pick(m.cmp("olt", x, m.k(-126.0)), m.k(0.0), y)
    return m.pick(m.cmp("uno", x, x), x, y)


def _ex2_flushed(emit: Emitter, x: str, n: int) -> str:
    return _ex2(emit, x, n, flushed=True)


def _lg2(emit: Emitter, x: str, n: int) -> str:
    """log2 x = e + 2/ln 2 * atanh((m - 1) / (m + 1)) with m in [sqrt 1/2, sqrt 2) (1.5 ulp; near 1 relative too)."""
    m = Math(emit, n)
    tiny = m.cmp("olt", x, m.k(2.0**-126))
    scaled = m.pick(tiny, m.f("fmul", x, m.k(2.0**24)), x)
    bits = m.as_int(scaled)
    shifted = m.int("sub", bits, m.ki(0x3F3504F3))
    exponent = m.int("ashr", shifted, m.ki(23))
    mantissa = m.as_float(m.int("sub", bits, m.int("shl", exponent, m.ki(23))))
    less = m.pick(tiny, m.k(24.0), m.k(0.0))
    e = m.f("fsub", m.from_int(exponent), less)
    low = m.f("fsub", mantissa, m.k(1.0))
    s = m.f("fdiv", low, m.f("fadd", mantissa, m.k(1.0)))
    series = m.horner(m.f("fmul", s, s), [2 / math.log(2) / (2 * k + 1) for k in range(6)])
    y = m.fma(s, series, e)
    y = m.pick(m.cmp("oeq", x, m.k(math.inf)), m.k(math.inf), y)
    y = m.pick(m.cmp("olt", x, m.k(0.0)), m.k(math.nan), y)
    y = m.pick(m.cmp("oeq", x, m.k(0.0)), m.k(-math.inf), y)
    return m.pick(m.cmp("uno", x, x), x, y)


def _sine(shift: int) -> Callable[[Emitter, str, int], str]:
    def emit_sine(emit: Emitter, x: str, n: int) -> str:
        """sin(x + shift * pi/2) in f64 with a two-part pi/2 (exact to f32 rounding for |x| < 2^30)."""
        m, s = Math(emit, n, "double"), Math(emit, n)
        wide = extend(emit, x, n)
        # Infinite arguments give NaN; huge ones are reduced as well as f64 can.
        whole = m.unary("rint", m.f("fmul", wide, m.k(2 / math.pi)))
        rest = m.fma(whole, m.k(-math.pi / 2), wide)
        rest = m.fma(whole, m.k(-6.123233995736766e-17), rest)
        turn = m.fma(m.unary("floor", m.f("fmul", whole, m.k(0.25))), m.k(-4.0), whole)
        finite = m.cmp("ord", turn, m.k(0.0))
        quadrant = m.int("add", m.to_int(m.pick(finite, turn, m.k(0.0))), m.ki(shift))
        z = m.f("fmul", rest, rest)
        sine = m.f("fmul", rest, m.horner(z, [(-1) ** k / math.factorial(2 * k + 1) for k in range(8)]))
        cosine = m.horner(z, [(-1) ** k / math.factorial(2 * k) for k in range(9)])
        odd = m.icmp("ne", m.int("and", quadrant, m.ki(1)), m.ki(0))
        y = m.pick(odd, cosine, sine)
        minus = m.icmp("ne", m.int("and", quadrant, m.ki(2)), m.ki(0))
        y = m.pick(minus, emit.op(f"fneg {m.t} {y}"), y)
        y = m.pick(finite, y, m.k(math.nan))
        return emit.op(f"fptrunc {m.t} {y} to {s.t}")

    return emit_sine


def _tanh(emit: Emitter, x: str, n: int) -> str:
    """(1 - t) / (1 + t) with t = e^(-2|x|); an odd polynomial below 1/4 (3 ulp)."""
    m = Math(emit, n)
    size = m.unary("fabs", x)
    t = _ex2(emit, m.f("fmul", size, m.k(-2 / math.log(2))), n)
    large = m.f("fdiv", m.f("fsub", m.k(1.0), t), m.f("fadd", m.k(1.0), t))
    z = m.f("fmul", size, size)
    series = m.horner(z, [1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835])
    small = m.f("fmul", size, series)
    y = m.pick(m.cmp("olt", size, m.k(0.25)), small, large)
    y = emit.call(f"llvm.copysign.{m.suffix}", m.t, (m.t, y), (m.t, x))
    return m.pick(m.cmp("uno", x, x), x, y)


_FUNCTIONS: dict[str, Callable[[Emitter, str, int], str]] = {
    "ex2": _ex2,
    "ex2.ftz": _ex2_flushed,
    "lg2": _lg2,
    "sin": _sine(0),
    "cos": _sine(1),
    "tanh": _tanh,
}


def call(emit: Emitter, name: str, x: str, n: int) -> str:
    """The f32 function `name` of n values, in line."""
    return _FUNCTIONS[name](emit, x, n)
