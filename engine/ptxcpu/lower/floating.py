"""Floating-point arithmetic: f16, bf16 and their packed pairs, f32, f64; rounding modes, .ftz, .sat, NaN rules.

No instruction carries fast-math flags, so LLVM neither contracts nor reorders: `mul` and `add` stay two roundings, `fma` is
one. The approximate instructions of a GPU are computed at least as exactly here, with the errors stated in `functions`.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxtrain.engine.ptxcpu.lower import functions
from ptxtrain.engine.ptxcpu.lower.context import Context, float_literal
from ptxtrain.engine.ptxcpu.lower.emitter import splat, vec
from ptxtrain.engine.ptxcpu.lower.rounding import Directed
from ptxtrain.engine.ptxcpu.tree import Instruction, Operand, Reg, Sink

_ELEMENTS = {"f16": "half", "f16x2": "half", "bf16": "i16", "bf16x2": "i16", "f32": "float", "f64": "double"}
_ROUNDINGS = ("rz", "rm", "rp")


class Floats:
    """Operations on the floats of one PTX type in `lanes` lanes; packed pairs count as twice the lanes."""

    def __init__(self, ctx: Context, type_: str, lanes: int) -> None:
        self.ctx, self.type, self.lanes = ctx, type_, lanes
        self.packed = type_.endswith("x2")
        self.count = lanes * 2 if self.packed else lanes
        self.element = _ELEMENTS[type_]
        self.is_bf16 = self.element == "i16"
        # Brain floats are computed as f32 and rounded back.
        self.scalar = "float" if self.is_bf16 else self.element
        self.t = vec(self.scalar, self.count)
        self.b = vec("i1", self.count)
        self.bits = {"half": 16, "float": 32, "double": 64}[self.scalar]

    # Values in and out

    def load(self, operand: Operand) -> str:
        """An operand as floats of the computing type."""
        if self.packed or self.is_bf16:
            return self.from_bits(self.ctx.get(operand, "i32" if self.packed else "i16", self.lanes))
        return self.ctx.get(operand, self.scalar, self.lanes)

    def store(self, target: Operand, value: str) -> None:
        """Write floats of the computing type."""
        assert isinstance(target, Reg | Sink)
        if self.packed or self.is_bf16:
            self.ctx.set(target, self.to_bits(value), "i32" if self.packed else "i16", self.lanes)
        else:
            self.ctx.set(target, value, self.element, self.lanes)

    def from_bits(self, bits: str) -> str:
        """Integers as wide as the PTX type as floats of the computing type."""
        emit = self.ctx.emit
        if self.packed:
            bits = emit.op(f"bitcast {vec('i32', self.lanes)} {bits} to {vec(self.element, self.count)}")
            return functions.bf16_to_f32(emit, bits, self.count) if self.is_bf16 else bits
        if self.is_bf16:
            return functions.bf16_to_f32(emit, bits, self.lanes)
        return emit.op(f"bitcast {vec(f'i{self.bits}', self.lanes)} {bits} to {self.t}")

    def to_bits(self, value: str) -> str:
        """The other way."""
        emit = self.ctx.emit
        if self.is_bf16:
            value = functions.f32_to_bf16(emit, value, self.count)
        if self.packed:
            return emit.op(f"bitcast {vec(self.element, self.count)} {value} to {vec('i32', self.lanes)}")
        return value if self.is_bf16 else emit.op(f"bitcast {self.t} {value} to {vec(f'i{self.bits}', self.lanes)}")

    # Operations

    def const(self, number: float | int) -> str:
        """A number as an operand; the numbers used are exact in every type."""
        import struct

        pattern = {16: "<e", 32: "<f", 64: "<d"}[self.bits]
        bits = int.from_bytes(struct.pack(pattern, number), "little")
        return splat(self.scalar, float_literal(bits, self.bits), self.count)

    def op(self, name: str, *values: str) -> str:
        return self.ctx.emit.op(f"{name} {self.t} {', '.join(values)}")

    def compare(self, relation: str, a: str, b: str) -> str:
        return self.ctx.emit.op(f"fcmp {relation} {self.t} {a}, {b}")

    def select(self, condition: str, a: str, b: str) -> str:
        return self.ctx.emit.select(self.scalar, self.count, condition, a, b)

    def intrinsic(self, name: str, *values: str) -> str:
        element = {"half": "f16", "float": "f32", "double": "f64"}[self.scalar]
        suffix = element if self.count == 1 else f"v{self.count}{element}"
        return self.ctx.emit.call(f"llvm.{name}.{suffix}", self.t, *((self.t, v) for v in values))

    def flush(self, value: str) -> str:
        """Subnormal f32 and f64 numbers become zeros of their sign; there is no such form for f16."""
        return value if self.scalar == "half" else functions.flush(self.ctx.emit, value, self.count, self.scalar)

    def saturate(self, value: str) -> str:
        """Clamped to [0, 1], NaN to 0."""
        low = self.select(self.compare("ogt", value, self.const(0)), value, self.const(0))
        return self.select(self.compare("olt", low, self.const(1)), low, self.const(1))


def lower_float(ctx: Context, ins: Instruction) -> None:
    """Any arithmetic instruction on floats: operands loaded and flushed, computed, flushed, clamped, stored."""
    type_ = next((t for t in reversed(ins.types) if t in _ELEMENTS), None)
    compute = _COMPUTE.get(ins.opcode)
    if type_ is None or compute is None:
        raise ctx.refuse(ins, f"no float form of {ins.opcode} on this type")
    operands = ins.operands[1:]
    floats = Floats(ctx, type_, ctx.lanes_of(*operands))
    values = [floats.load(o) for o in operands]
    ftz = ins.has("ftz")
    if ftz and ins.opcode == "ex2" and type_ == "f32" and not ins.has("sat", "relu"):
        floats.store(ins.operands[0], functions.call(ctx.emit, "ex2.ftz", values[0], floats.count))
        return
    if ftz:
        values = [floats.flush(v) for v in values]
    result = compute(ctx, ins, floats, values)
    if ftz:
        result = floats.flush(result)
    if ins.has("sat"):
        result = floats.saturate(result)
    if ins.has("relu"):
        # NaN becomes the canonical NaN, negative numbers zero.
        positive = floats.select(floats.compare("olt", result, floats.const(0)), floats.const(0), result)
        result = positive
    floats.store(ins.operands[0], result)


_Compute = Callable[[Context, Instruction, Floats, list[str]], str]


def _rounding(ins: Instruction) -> str | None:
    return next((m for m in ins.modifiers if m in _ROUNDINGS), None)


def _basic(name: str) -> _Compute:
    def compute(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
        mode = _rounding(ins)
        if mode is None:
            return floats.op(f"f{name}", *values)
        directed = _directed(ctx, floats, mode)
        return {"add": directed.add, "sub": directed.sub, "mul": directed.mul, "div": directed.div}[name](*values)

    return compute


def _directed(ctx: Context, floats: Floats, mode: str) -> Directed:
    assert floats.type in ("f32", "f64"), f".{mode} is known for f32 and f64"
    return Directed(ctx.emit, floats.scalar, mode, floats.count)


def _fma(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
    mode = _rounding(ins)
    if mode is not None:
        return _directed(ctx, floats, mode).fma(*values)
    if floats.type in ("f32", "f64"):
        return floats.intrinsic("fma", *values)
    emit, n = ctx.emit, floats.count
    # Half precision rounds once: the f64 sum is rounded to odd, so that rounding it again is harmless.
    a, b, c = (functions.extend(emit, v, n, floats.scalar) for v in values)
    product = emit.op(f"fmul {vec('double', n)} {a}, {b}")
    total, error = functions.two_sum(emit, product, c, n)
    odd = functions.to_odd(emit, total, error, n)
    if floats.is_bf16:
        return functions.f64_to_f32_odd(emit, odd, n)
    return emit.op(f"fptrunc {vec('double', n)} {odd} to {floats.t}")


def _unary(name: str) -> _Compute:
    def compute(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
        return floats.intrinsic(name, values[0])

    return compute


def _neg(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
    return floats.op("fneg", values[0])


def _min_max(name: str) -> _Compute:
    def compute(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
        sign = _product_of_signs(floats, values) if ins.has("xorsign") else None
        if ins.has("abs"):
            values = [floats.intrinsic("fabs", v) for v in values]
        kind = f"{name}imum" if ins.has("NaN") else f"{name}imumnum"
        result = values[0]
        for value in values[1:]:
            result = floats.intrinsic(kind, result, value)
        return floats.intrinsic("copysign", result, sign) if sign else result

    return compute


def _product_of_signs(floats: Floats, values: list[str]) -> str:
    """A number that is negative where an odd number of the values are."""
    emit = floats.ctx.emit
    t = vec(f"i{floats.bits}", floats.count)
    bits = [emit.op(f"bitcast {floats.t} {v} to {t}") for v in values]
    total = bits[0]
    for value in bits[1:]:
        total = emit.op(f"xor {t} {total}, {value}")
    return emit.op(f"bitcast {t} {total} to {floats.t}")


def _sqrt(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
    mode = _rounding(ins)
    return floats.intrinsic("sqrt", values[0]) if mode is None else _directed(ctx, floats, mode).sqrt(values[0])


def _rcp(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
    mode = _rounding(ins)
    one = floats.const(1)
    return floats.op("fdiv", one, values[0]) if mode is None else _directed(ctx, floats, mode).div(one, values[0])


def _rsqrt(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
    return floats.op("fdiv", floats.const(1), floats.intrinsic("sqrt", values[0]))


def _function(name: str) -> _Compute:
    """A function of f32; half precision goes through it and is rounded back."""

    def compute(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
        if floats.scalar == "double":
            raise ctx.refuse(ins, f"{ins.opcode} is known for f32 and narrower")
        emit, n, value = ctx.emit, floats.count, values[0]
        t = vec("float", n)
        if floats.scalar == "half":
            value = emit.op(f"fpext {floats.t} {value} to {t}")
        result = functions.call(emit, name, value, n)
        if floats.scalar == "half":
            result = emit.op(f"fptrunc {t} {result} to {floats.t}")
        return result

    return compute


def _copysign(ctx: Context, ins: Instruction, floats: Floats, values: list[str]) -> str:
    """The sign of a with the magnitude of b."""
    return floats.intrinsic("copysign", values[1], values[0])


_COMPUTE: dict[str, _Compute] = {
    "add": _basic("add"),
    "sub": _basic("sub"),
    "mul": _basic("mul"),
    "fma": _fma,
    "mad": _fma,
    "div": _basic("div"),
    "abs": _unary("fabs"),
    "neg": _neg,
    "min": _min_max("min"),
    "max": _min_max("max"),
    "sqrt": _sqrt,
    "rcp": _rcp,
    "rsqrt": _rsqrt,
    "ex2": _function("ex2"),
    "lg2": _function("lg2"),
    "sin": _function("sin"),
    "cos": _function("cos"),
    "tanh": _function("tanh"),
    "copysign": _copysign,
}

# Ordered comparisons are false with a NaN, those with `u` true.
_RELATIONS = {
    "eq": "oeq",
    "ne": "one",
    "lt": "olt",
    "le": "ole",
    "gt": "ogt",
    "ge": "oge",
    "equ": "ueq",
    "neu": "une",
    "ltu": "ult",
    "leu": "ule",
    "gtu": "ugt",
    "geu": "uge",
    "num": "ord",
    "nan": "uno",
}


def compare_floats(
    ctx: Context, ins: Instruction, relation: str, type_: str, operands: tuple[Operand, ...]
) -> tuple[str, int]:
    """A comparison of floats as i1 values, and their number."""
    if relation not in _RELATIONS or type_ not in _ELEMENTS:
        raise ctx.refuse(ins, f"no comparison .{relation} for .{type_}")
    lanes = ctx.lanes_of(*operands[:2])
    floats = Floats(ctx, type_, lanes)
    a, b = (floats.load(o) for o in operands[:2])
    if ins.has("ftz"):
        a, b = floats.flush(a), floats.flush(b)
    return floats.compare(_RELATIONS[relation], a, b), lanes


def _testp(ctx: Context, ins: Instruction) -> None:
    """testp.{finite, infinite, number, notanumber, normal, subnormal}."""
    classes = {
        "notanumber": 0x003,
        "infinite": 0x204,
        "subnormal": 0x090,
        "normal": 0x108,
        "finite": 0x1F8,
        "number": 0x3FC,
    }
    kind = next((m for m in ins.modifiers if m in classes), None)
    if kind is None:
        raise ctx.refuse(ins, "unknown test")
    floats = Floats(ctx, ins.types[-1], ctx.lanes_of(ins.operands[1]))
    value = floats.load(ins.operands[1])
    suffix = {"float": "f32", "double": "f64"}[floats.scalar]
    name = f"llvm.is.fpclass.{suffix if floats.count == 1 else f'v{floats.count}{suffix}'}"
    target = ins.operands[0]
    assert isinstance(target, Reg | Sink)
    ctx.set(target, ctx.emit.call(name, floats.b, (floats.t, value), ("i32", str(classes[kind]))), "i1", floats.lanes)


FLOATING = {
    **dict.fromkeys(("sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "copysign"), lower_float),
    "testp": _testp,
}
