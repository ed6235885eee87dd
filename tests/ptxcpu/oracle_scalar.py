"""What one PTX instruction computes on raw bits, exactly, in Python integers and fractions. The oracle's arithmetic.

Written from the PTX ISA alone and shared with nothing of the compiler. Slow and plain on purpose: every float result is
a fraction that is rounded once. Approximate instructions (`ex2.approx`, …) give the double-precision value rounded once;
tests allow the compiler the error that the ISA allows the hardware.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import NamedTuple

BITS = {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)}
BITS |= {"pred": 1, "f16": 16, "bf16": 16, "f32": 32, "tf32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "b128": 128}
FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "tf32": (8, 10)}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "tf32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}


class Number(NamedTuple):
    """A float: its sign (0 or 1), and its size; None for NaN, `math.inf` for infinity."""

    sign: int
    size: Fraction | float | None


def mask(bits: int) -> int:
    return (1 << bits) - 1


def signed(value: int, bits: int) -> int:
    value &= mask(bits)
    return value - (1 << bits) if value >> (bits - 1) else value


def integer(value: int, type: str) -> int:
    """Bits as the integer they stand for."""
    return signed(value, BITS[type]) if type[0] == "s" else value & mask(BITS[type])


# Floats


def layout(type: str) -> tuple[int, int, int]:
    """Bits of exponent and mantissa, and how many low bits of the register are not used (tf32)."""
    exponent, mantissa = FORMATS[type]
    return exponent, mantissa, 13 if type == "tf32" else 0


def unpack(bits: int, type: str) -> Number:
    exponent, mantissa, unused = layout(type)
    bits >>= unused
    sign = bits >> (exponent + mantissa) & 1
    field, low = bits >> mantissa & mask(exponent), bits & mask(mantissa)
    bias = mask(exponent - 1)
    if field == mask(exponent):
        return Number(sign, None if low else math.inf)
    if field == 0:
        return Number(sign, Fraction(low) * Fraction(2) ** (1 - bias - mantissa))
    return Number(sign, Fraction(low | 1 << mantissa) * Fraction(2) ** (field - bias - mantissa))


def pack(number: Number, type: str, mode: str = "rn") -> int:
    """The bits of a number after one rounding: rn, rz, rm, rp, or rna (half away from zero)."""
    exponent, mantissa, unused = layout(type)
    sign, size = number
    if size is None:
        return NAN[type]
    top = sign << (exponent + mantissa)
    infinity = mask(exponent) << mantissa
    if isinstance(size, float):
        return (top | infinity) << unused
    if size == 0:
        return top << unused
    bias = mask(exponent - 1)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** power > size:
        power -= 1
    power = max(power, 1 - bias)  # below, the step is that of the smallest normal number
    step = Fraction(2) ** (power - mantissa)
    steps = size // step
    if rounds_up(size / step - steps, bool(steps & 1), bool(sign), mode):
        steps += 1
    field = power + bias
    if steps >> mantissa == 0:  # subnormal
        field = 0
    elif steps >> (mantissa + 1):
        steps, field = steps >> 1, field + 1
    if field >= mask(exponent):
        away = mode in ("rn", "rna") or (mode == "rm" and sign) or (mode == "rp" and not sign)
        return (top | (infinity if away else infinity - 1)) << unused
    return (top | field << mantissa | steps & mask(mantissa)) << unused


def rounds_up(rest: Fraction, odd: bool, negative: bool, mode: str) -> bool:
    """Whether a size with `rest` of a step left over goes to the next step."""
    if mode == "rn":
        return rest > Fraction(1, 2) or (rest == Fraction(1, 2) and odd)
    if mode == "rna":
        return rest >= Fraction(1, 2)
    return bool(rest) and ((mode == "rm" and negative) or (mode == "rp" and not negative))


def number(value: float) -> Number:
    """A Python float."""
    if math.isnan(value):
        return Number(0, None)
    sign = int(math.copysign(1.0, value) < 0)
    return Number(sign, math.inf if math.isinf(value) else abs(Fraction(value)))


def as_float(x: Number) -> float:
    """Rounded to double."""
    if x.size is None:
        return math.nan
    value = (
        x.size if isinstance(x.size, float) else struct.unpack("<d", struct.pack("<Q", pack(x, "f64") & mask(63)))[0]
    )
    return -value if x.sign else value


def flush(bits: int, type: str) -> int:
    """A subnormal f32 as a zero of its sign."""
    return bits & 0x80000000 if type == "f32" and not bits & 0x7F800000 else bits


def fused(a: Number, b: Number, c: Number, mode: str) -> Number:
    """a * b + c, exact."""
    sign = a.sign ^ b.sign
    if a.size is None or b.size is None or c.size is None:
        return Number(0, None)
    if math.inf in (a.size, b.size):
        if 0 in (a.size, b.size) or (c.size == math.inf and c.sign != sign):
            return Number(0, None)
        return Number(sign, math.inf)
    if c.size == math.inf:
        return c
    product = a.size * b.size * (-1 if sign else 1)
    total = product + c.size * (-1 if c.sign else 1)
    if total == 0:  # of two zeros the common sign; of a cancellation +0, or -0 when rounding down
        both = sign == c.sign and product == 0 and c.size == 0
        return Number(sign if both else int(mode == "rm"), Fraction(0))
    return Number(int(total < 0), abs(total))


def times(a: Number, b: Number) -> Number:
    if a.size is None or b.size is None or (math.inf in (a.size, b.size) and 0 in (a.size, b.size)):
        return Number(0, None)
    return Number(a.sign ^ b.sign, math.inf if math.inf in (a.size, b.size) else a.size * b.size)


def over(a: Number, b: Number) -> Number:
    sign = a.sign ^ b.sign
    if a.size is None or b.size is None or a.size == b.size == math.inf or a.size == b.size == 0:
        return Number(0, None)
    if a.size == math.inf or b.size == 0:
        return Number(sign, math.inf)
    return Number(sign, Fraction(0) if b.size == math.inf else a.size / b.size)


def root(a: Number) -> Number:
    """To far more bits than any format has, with the rest made sticky."""
    if a.size is None or (a.sign and a.size != 0):
        return Number(0, None)
    if a.size in (0, math.inf):
        return a
    scale = 1 << 1400
    value = a.size * scale * scale
    whole = math.isqrt(value.numerator // value.denominator)
    exact = Fraction(whole) ** 2 == value
    return Number(0, Fraction(2 * whole + (not exact), 2 * scale))


def smaller(a: int, b: int, type: str, modifiers: tuple[str, ...], larger: bool) -> int:
    """min and max of floats."""
    x, y = unpack(a, type), unpack(b, type)
    sign = 0
    if "xorsign" in modifiers:
        sign = (x.sign ^ y.sign) << (BITS[type] - 1)
        a, b = a & mask(BITS[type] - 1), b & mask(BITS[type] - 1)
        x, y = Number(0, x.size), Number(0, y.size)
    if x.size is None or y.size is None:
        if "NaN" in modifiers or (x.size is None and y.size is None):
            return NAN[type]
        return (b if x.size is None else a) | sign

    def key(n: Number) -> tuple[float | Fraction, int]:
        assert n.size is not None
        return (-n.size if n.sign else n.size, -n.sign)

    return (b if (key(y) > key(x)) == larger and key(x) != key(y) else a) | sign


APPROXIMATE = {
    "ex2": lambda x: math.inf if x >= 1024 else 2.0**x,
    "lg2": lambda x: math.nan if x < 0 else -math.inf if x == 0 else x if x == math.inf else math.log2(x),
    "rsqrt": lambda x: math.copysign(math.inf, x) if x == 0 else math.nan if x < 0 else 1 / math.sqrt(x),
    "sin": lambda x: math.nan if math.isinf(x) else math.sin(x),
    "cos": lambda x: math.nan if math.isinf(x) else math.cos(x),
    "tanh": math.tanh,
}


def floating(opcode: str, type: str, modifiers: tuple[str, ...], values: list[int]) -> int:
    """An instruction on floats of one type."""
    if "ftz" in modifiers:
        values = [flush(value, type) for value in values]
    result = _floating(opcode, type, modifiers, values)
    if "relu" in modifiers:
        x = unpack(result, type)
        result = result if x.size is None or not x.sign else 0
    if "ftz" in modifiers:
        result = flush(result, type)
    return saturate(result, type) if "sat" in modifiers else result


def saturate(bits: int, type: str) -> int:
    """To [0, 1]; NaN to 0."""
    x = unpack(bits, type)
    if x.size is None or x.sign:
        return 0
    return pack(number(1.0), type) if x.size > 1 else bits


def _floating(opcode: str, type: str, modifiers: tuple[str, ...], values: list[int]) -> int:
    mode = next((m for m in modifiers if m in ("rz", "rm", "rp")), "rn")
    x = [unpack(value, type) for value in values]
    top = 1 << (BITS[type] - 1)
    if opcode in ("min", "max"):
        return smaller(values[0], values[1], type, modifiers, opcode == "max")
    if opcode in ("abs", "neg"):
        return NAN[type] if x[0].size is None else values[0] & (top - 1) if opcode == "abs" else values[0] ^ top
    if opcode == "copysign":
        return (values[1] & (top - 1)) | (values[0] & top)
    if opcode in APPROXIMATE:
        value = as_float(x[0])
        return pack(number(math.nan if math.isnan(value) else APPROXIMATE[opcode](value)), type)
    one = number(1.0)
    exact = {
        "add": lambda: fused(x[0], one, x[1], mode),
        "sub": lambda: fused(x[0], one, Number(1 - x[1].sign, x[1].size), mode),
        "mul": lambda: times(x[0], x[1]),
        "fma": lambda: fused(x[0], x[1], x[2], mode),
        "mad": lambda: fused(x[0], x[1], x[2], mode),
        "div": lambda: over(x[0], x[1]),
        "rcp": lambda: over(one, x[0]),
        "sqrt": lambda: root(x[0]),
    }[opcode]()
    return pack(exact, type, mode)


# Conversions


def convert(to: str, of: str, modifiers: tuple[str, ...], value: int) -> int:
    """cvt of one value."""
    ftz = "ftz" in modifiers
    if of in FORMATS:
        x = unpack(flush(value, of) if ftz else value, of)
        whole = next((m for m in modifiers if m in ("rni", "rzi", "rmi", "rpi")), "")
        if to not in FORMATS:
            if x.size is None:
                return 0
            low = -(1 << BITS[to] - 1) if to[0] == "s" else 0
            high = (1 << BITS[to] - (to[0] == "s")) - 1
            if x.size == math.inf:
                return (low if x.sign else high) & mask(BITS[to])
            return max(low, min(high, to_whole(x, whole))) & mask(BITS[to])
        if whole and x.size is not None and x.size != math.inf:
            size = to_whole(x, whole)
            x = Number(x.sign, abs(Fraction(size)))
    else:
        n = integer(value, of)
        if to not in FORMATS:
            if "sat" in modifiers:
                low = -(1 << BITS[to] - 1) if to[0] == "s" else 0
                n = max(low, min((1 << BITS[to] - (to[0] == "s")) - 1, n))
            return n & mask(BITS[to])
        x = Number(int(n < 0), Fraction(abs(n)))
    mode = next((m for m in modifiers if m in ("rn", "rz", "rm", "rp", "rna")), "rn")
    result = pack(x, to, mode)
    if "relu" in modifiers and x.sign and x.size is not None:
        result = 0
    if ftz:
        result = flush(result, to)
    return saturate(result, to) if "sat" in modifiers else result


def to_whole(x: Number, mode: str) -> int:
    """A finite number as an integer."""
    assert isinstance(x.size, Fraction)
    value = -x.size if x.sign else x.size
    return {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](value)


# Comparisons


def compare(op: str, type: str, a: int, b: int, ftz: bool = False) -> bool:
    """The comparison of set and setp."""
    if type in FORMATS:
        x, y = (unpack(flush(v, type) if ftz else v, type) for v in (a, b))
        unordered = x.size is None or y.size is None
        if op in ("num", "nan"):
            return unordered == (op == "nan")
        if unordered:
            return op.endswith("u") and len(op) == 3
        p, q = ((-n.size if n.sign else n.size) for n in (x, y))
    else:
        if op in ("lo", "ls", "hi", "hs"):
            op = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}[op]
        p, q = integer(a, type), integer(b, type)
    op = op[:2]
    return {"eq": p == q, "ne": p != q, "lt": p < q, "le": p <= q, "gt": p > q, "ge": p >= q}[
        {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}[op]
    ]


# Integers and bits


def wider(type: str) -> str:
    return f"{type[0]}{2 * BITS[type]}"


def integral(opcode: str, type: str, modifiers: tuple[str, ...], values: list[int]) -> int:
    """An instruction on integers or bits of one type; the caller cuts the result to the destination."""
    bits = BITS[type]
    x = [integer(value, type) for value in values]
    u = [value & mask(bits) for value in values]
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if type[0] == "s" else (0, mask(bits))
    if opcode in ("add", "sub"):
        result = x[0] + x[1] if opcode == "add" else x[0] - x[1]
        return max(least, min(most, result)) if "sat" in modifiers else result
    if opcode == "mul":
        return (x[0] * x[1]) >> bits if "hi" in modifiers else x[0] * x[1]
    if opcode == "mad":
        if "wide" in modifiers:
            return x[0] * x[1] + integer(values[2], wider(type))
        result = ((x[0] * x[1]) >> bits if "hi" in modifiers else x[0] * x[1]) + x[2]
        return max(least, min(most, result)) if "sat" in modifiers else result
    if opcode in ("mul24", "mad24"):
        cut = [signed(v, 24) if type[0] == "s" else v & mask(24) for v in u]
        product = (cut[0] * cut[1]) >> 16 if "hi" in modifiers else cut[0] * cut[1]
        return product + (x[2] if opcode == "mad24" else 0)
    if opcode in ("div", "rem"):
        if x[1] == 0:
            raise ZeroDivisionError("the result is not defined")
        quotient = abs(x[0]) // abs(x[1]) * (1 if (x[0] < 0) == (x[1] < 0) else -1)
        return quotient if opcode == "div" else x[0] - quotient * x[1]
    if opcode in ("min", "max"):
        return min(x[0], x[1]) if opcode == "min" else max(x[0], x[1])
    if opcode == "shl":
        return u[0] << min(values[1], bits)
    if opcode == "shr":
        return x[0] >> min(values[1], bits)
    if opcode == "bfe":
        at, length = values[1] & 255, values[2] & 255
        if length == 0:
            return 0
        field = (u[0] >> at) & mask(length)
        fill = u[0] >> min(at + length - 1, bits - 1) & 1
        return field | (mask(bits) & ~mask(min(max(0, min(length, bits - at)), bits)) if type[0] == "s" and fill else 0)
    if opcode == "bfi":
        at, length = values[2] & 255, values[3] & 255
        where = mask(length) << at & mask(bits)
        return (u[1] & ~where) | (u[0] << at & where)
    if opcode == "shf":
        n = min(values[2], 32) if "clamp" in modifiers else values[2] & 31
        both = u[1] << 32 | u[0]
        return both << n >> 32 if "l" in modifiers else both >> n
    if opcode == "prmt":
        return permute(u[0], u[1], values[2], modifiers)
    if opcode == "lop3":
        return sum(
            (values[3] >> ((u[0] >> i & 1) << 2 | (u[1] >> i & 1) << 1 | u[2] >> i & 1) & 1) << i for i in range(32)
        )
    if opcode == "bfind":
        v = x[0] if x[0] >= 0 else ~x[0]
        found = v.bit_length() - 1
        return found if found < 0 or "shiftamt" not in modifiers else bits - 1 - found
    if opcode in ("bmsk", "szext"):
        return masked(opcode, type, modifiers, u[0], u[1])
    if opcode == "fns":
        return nth_bit(u[0], u[1], signed(u[2], 32))
    return {
        "abs": lambda: abs(x[0]),
        "neg": lambda: -x[0],
        "sad": lambda: abs(x[0] - x[1]) + x[2],
        "and": lambda: u[0] & u[1],
        "or": lambda: u[0] | u[1],
        "xor": lambda: u[0] ^ u[1],
        "not": lambda: ~u[0],
        "cnot": lambda: int(u[0] == 0),
        "popc": lambda: u[0].bit_count(),
        "clz": lambda: bits - u[0].bit_length(),
        "brev": lambda: int(f"{u[0]:0{bits}b}"[::-1], 2),
    }[opcode]()


def masked(opcode: str, type: str, modifiers: tuple[str, ...], a: int, b: int) -> int:
    """bmsk and szext, as the ISA's pseudocode has them."""
    low = b & 31
    too_large = "clamp" in modifiers and b >= 32
    if opcode == "szext":
        above = 0 if too_large else mask(32) << low & mask(32)
        negative = type == "s32" and not too_large and low and a >> (low - 1) & 1
        return (a & ~above) | (above if negative else 0)
    from_start = 0 if "clamp" in modifiers and a >= 32 else mask(32) << (a & 31) & mask(32)
    end = (a & 31) + low
    from_end = 0 if end >= 32 or too_large or ("clamp" in modifiers and a >= 32) else mask(32) << end & mask(32)
    return from_start & ~from_end


def nth_bit(bits: int, base: int, n: int) -> int:
    """fns."""
    if n == 0:
        return base if bits >> base & 1 else mask(32)
    position, left = base, abs(n)
    while 0 <= position < 32:
        left -= bits >> position & 1
        if left == 0:
            return position
        position += 1 if n > 0 else -1
    return mask(32)


def dot(opcode: str, types: tuple[str, ...], modifiers: tuple[str, ...], values: list[int]) -> int:
    """dp4a and dp2a."""

    def parts(value: int, type: str, bits: int, first: int, count: int) -> list[int]:
        found = [value >> first + bits * i & mask(bits) for i in range(count)]
        return [signed(v, bits) if type[0] == "s" else v for v in found]

    count, bits = (4, 8) if opcode == "dp4a" else (2, 16)
    a = parts(values[0], types[0], bits, 0, count)
    b = parts(values[1], types[1], 8, 16 if "hi" in modifiers else 0, count)
    return sum(x * y for x, y in zip(a, b, strict=True)) + values[2] & mask(32)


def carried(opcode: str, type: str, modifiers: tuple[str, ...], values: list[int], flag: int) -> tuple[int, int]:
    """add.cc and its kind: the result and the flag afterwards."""
    bits = BITS[type]
    u = [value & mask(bits) for value in values]
    taken = flag if opcode in ("addc", "subc", "madc") else 0
    if opcode.startswith("sub"):
        result = u[0] - u[1] - taken
    elif opcode.startswith("add"):
        result = u[0] + u[1] + taken
    else:
        x = [integer(value, type) for value in values]
        product = (x[0] * x[1]) >> bits if "hi" in modifiers else x[0] * x[1]
        result = (product & mask(bits)) + u[2] + taken
    return result & mask(bits), int(result != result & mask(bits))


def permute(a: int, b: int, choice: int, modifiers: tuple[str, ...]) -> int:
    """prmt."""
    source = [(b << 32 | a) >> 8 * i & 255 for i in range(8)]
    k = choice & 3
    modes = {
        "f4e": [k, k + 1, k + 2, k + 3],
        "b4e": [k, (k - 1) & 7, (k - 2) & 7, (k - 3) & 7],
        "rc8": [k] * 4,
        "ecl": [max(k, i) for i in range(4)],
        "ecr": [min(k, i) for i in range(4)],
        "rc16": [2 * (k & 1), 2 * (k & 1) + 1] * 2,
    }
    mode = next((m for m in modifiers if m in modes), None)
    picks = modes[mode] if mode else [choice >> 4 * i & 15 for i in range(4)]
    result = 0
    for i, pick in enumerate(picks):
        byte = source[pick & 7]
        result |= (255 if pick & 8 and byte >> 7 else 0 if pick & 8 else byte) << 8 * i
    return result


def evaluate(opcode: str, types: tuple[str, ...], modifiers: tuple[str, ...], values: list[int]) -> int:
    """The result of an instruction without side effects, on operands as raw bits: the bits of its destination."""
    type = types[0]
    if opcode == "cvt":
        if type in ("f16x2", "bf16x2"):
            half = type.removesuffix("x2")
            high, low = (convert(half, "f32", modifiers, value) for value in values)
            return high << 16 | low
        return convert(type, types[1], modifiers, values[0])
    if opcode == "selp":
        return values[0] if values[2] & 1 else values[1]
    if opcode == "slct":
        positive = compare("ge", types[1], values[2], 0, "ftz" in modifiers)
        return values[0] if positive else values[1]
    if opcode == "set":
        if types[1].endswith("x2"):
            one = pack(number(1.0), type.removesuffix("x2")) if type.endswith("x2") else mask(16)
            halves = [[v >> shift & 0xFFFF for v in values] for shift in (16, 0)]
            high, low = (compare(modifiers[0], types[1][:-2], *half, "ftz" in modifiers) for half in halves)
            return (one << 16 if high else 0) | (one if low else 0)
        met = _joined(compare(modifiers[0], types[1], values[0], values[1], "ftz" in modifiers), modifiers, values[2:])
        return (pack(number(1.0), type) if type in FORMATS else mask(BITS[type])) if met else 0
    if opcode == "testp":
        return int(_testp(modifiers[0], type, values[0]))
    if type in ("f16x2", "bf16x2"):
        half = type.removesuffix("x2")
        high, low = (floating(opcode, half, modifiers, [v >> shift & 0xFFFF for v in values]) for shift in (16, 0))
        return high << 16 | low
    if type in FORMATS:
        return floating(opcode, type, modifiers, values)
    if opcode in ("dp4a", "dp2a"):
        return dot(opcode, types, modifiers, values)
    wide = BITS["u32"] if opcode in ("popc", "clz", "bfind") else BITS[type]
    if "wide" in modifiers:
        wide = 2 * BITS[type]
    if type == "pred":
        return {"and": all, "or": any, "xor": lambda v: sum(v) & 1, "not": lambda v: not v[0]}[opcode](values)
    return integral(opcode, type, modifiers, values) & mask(wide)


def _joined(met: bool, modifiers: tuple[str, ...], rest: list[int]) -> bool:
    op = next((m for m in modifiers if m in ("and", "or", "xor")), None)
    if op is None:
        return met
    c = bool(rest[0] & 1)
    return met and c if op == "and" else met or c if op == "or" else met != c


def compare_and_join(type: str, modifiers: tuple[str, ...], values: list[int]) -> tuple[bool, bool]:
    """setp: p = cmp op c, q = not cmp op c."""
    if type.endswith("x2"):
        halves = [[v >> shift & 0xFFFF for v in values[:2]] for shift in (0, 16)]
        low, high = (compare(modifiers[0], type[:-2], *half, "ftz" in modifiers) for half in halves)
        return _joined(low, modifiers, values[2:]), _joined(high, modifiers, values[2:])
    met = compare(modifiers[0], type, values[0], values[1], "ftz" in modifiers)
    return _joined(met, modifiers, values[2:]), _joined(not met, modifiers, values[2:])


def _testp(what: str, type: str, bits: int) -> bool:
    x = unpack(bits, type)
    exponent, mantissa, _ = layout(type)
    field = bits >> mantissa & mask(exponent)
    finite = x.size is not None and x.size != math.inf
    return {
        "finite": finite,
        "infinite": x.size == math.inf,
        "number": x.size is not None,
        "notanumber": x.size is None,
        "normal": finite and field != 0,
        "subnormal": finite and field == 0 and x.size != 0,
    }[what]
