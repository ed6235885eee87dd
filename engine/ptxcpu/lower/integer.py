"""Integer arithmetic. PTX and LLVM differ where LLVM has undefined results (division by zero, INT_MIN / -1): each is
given a value here, the ISA's where it names one.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.bits import BITS
from ptxtrain.engine.ptxcpu.lower.carry import (
    lower_carry,
    lower_distances,
    lower_dot,
    lower_mad_carry,
    lower_mad_sat,
    lower_mul24,
)
from ptxtrain.engine.ptxcpu.lower.compare import COMPARE
from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import splat, vec
from ptxtrain.engine.ptxcpu.lower.floating import lower_float
from ptxtrain.engine.ptxcpu.lower.ops import Lowering, Ops, is_integer, load, put
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Instruction, Operand


def _simple(name: str) -> Lowering:
    def lower(ctx: Context, ins: Instruction) -> None:
        type_ = ins.types[-1]
        if not is_integer(type_):
            lower_float(ctx, ins)
            return
        if ins.has("cc"):
            lower_carry(ctx, ins)
            return
        if type_.endswith("x2"):
            _put_pairs(ctx, ins, name)
            return
        ops, (a, b) = load(ctx, ins, type_, *ins.operands[1:])
        if ins.has("sat"):
            value = ops.intrinsic("sadd.sat" if name == "add" else "ssub.sat", a, b)
        else:
            value = ops.op(name, a, b)
        put(ctx, ins, ops, value)

    return lower


def _logic(name: str) -> Lowering:
    def lower(ctx: Context, ins: Instruction) -> None:
        ops, (a, b) = load(ctx, ins, ins.types[-1], *ins.operands[1:])
        put(ctx, ins, ops, ops.op(name, a, b))

    return lower


def _not(ctx: Context, ins: Instruction) -> None:
    ops, (a,) = load(ctx, ins, ins.types[-1], ins.operands[1])
    ones = splat("i1", "true", ops.lanes) if ops.bits == 1 else ops.const(-1)
    put(ctx, ins, ops, ops.op("xor", a, ones))


def _cnot(ctx: Context, ins: Instruction) -> None:
    ops, (a,) = load(ctx, ins, ins.types[-1], ins.operands[1])
    put(ctx, ins, ops, ops.select(ops.compare("eq", a, ops.const(0)), ops.const(1), ops.const(0)))


def _mul(ctx: Context, ins: Instruction) -> None:
    type_ = ins.types[-1]
    if not is_integer(type_):
        lower_float(ctx, ins)
        return
    _put_product(ctx, ins, None)


def _mad(ctx: Context, ins: Instruction) -> None:
    type_ = ins.types[-1]
    if not is_integer(type_):
        lower_float(ctx, ins)
        return
    if ins.has("cc"):
        lower_mad_carry(ctx, ins)
        return
    if ins.has("sat"):
        lower_mad_sat(ctx, ins)
        return
    _put_product(ctx, ins, ins.operands[3])


def _put_product(ctx: Context, ins: Instruction, addend: Operand | None) -> None:
    type_ = ins.types[-1]
    bits, signed = TYPE_BITS[type_], type_[0] == "s"
    given = (*ins.operands[1:3], addend) if addend is not None else ins.operands[1:3]
    lanes = ctx.lanes_of(*given)
    ops, wide = Ops(ctx, bits, lanes), Ops(ctx, 2 * bits, lanes)
    a, b = (ctx.get(o, ops.scalar, lanes) for o in ins.operands[1:3])
    extend = "sext" if signed else "zext"
    if ins.has("lo"):
        value, result = ops.op("mul", a, b), ops
    else:
        value, result = wide.op("mul", ops.cast(extend, a, 2 * bits), ops.cast(extend, b, 2 * bits)), wide
        if ins.has("hi"):
            value, result = wide.cast("trunc", wide.op("lshr", value, wide.const(bits)), bits), ops
    if addend is not None:
        value = result.op("add", value, ctx.get(addend, result.scalar, lanes))
    put(ctx, ins, result, value)


def _div_rem(name: str) -> Lowering:
    def lower(ctx: Context, ins: Instruction) -> None:
        type_ = ins.types[-1]
        if not is_integer(type_):
            lower_float(ctx, ins)
            return
        ops, (a, b) = load(ctx, ins, type_, *ins.operands[1:])
        signed = type_[0] == "s"
        # Division by zero gives all ones (rem: the dividend), as GPUs do; INT_MIN / -1 wraps. Neither may trap.
        zero = ops.compare("eq", b, ops.const(0))
        unsafe = zero
        if signed:
            lowest = ops.compare("eq", a, ops.const(1 << (ops.bits - 1)))
            over = ctx.emit.op(f"and {ops.b} {lowest}, {ops.compare('eq', b, ops.const(-1))}")
            unsafe = ctx.emit.op(f"or {ops.b} {zero}, {over}")
        safe = ops.select(unsafe, ops.const(1), b)
        value = ops.op(("s" if signed else "u") + name, a, safe)
        value = ops.select(zero, ops.const(-1) if name == "div" else a, value)
        put(ctx, ins, ops, value)

    return lower


def _abs(ctx: Context, ins: Instruction) -> None:
    if not is_integer(ins.types[-1]):
        lower_float(ctx, ins)
        return
    ops, (a,) = load(ctx, ins, ins.types[-1], ins.operands[1])
    negative = ops.op("sub", ops.const(0), a)
    put(ctx, ins, ops, ops.select(ops.compare("slt", a, ops.const(0)), negative, a))


def _neg(ctx: Context, ins: Instruction) -> None:
    if not is_integer(ins.types[-1]):
        lower_float(ctx, ins)
        return
    ops, (a,) = load(ctx, ins, ins.types[-1], ins.operands[1])
    put(ctx, ins, ops, ops.op("sub", ops.const(0), a))


def _min_max(name: str) -> Lowering:
    def lower(ctx: Context, ins: Instruction) -> None:
        type_ = ins.types[-1]
        if not is_integer(type_):
            lower_float(ctx, ins)
            return
        sign = "s" if type_[0] == "s" else "u"
        if type_.endswith("x2"):
            _put_pairs(ctx, ins, sign + name)
            return
        ops, (a, *others) = load(ctx, ins, type_, *ins.operands[1:])
        for b in others:
            a = ops.intrinsic(sign + name, a, b)
        if ins.has("relu"):
            a = ops.intrinsic("smax", a, ops.const(0))
        put(ctx, ins, ops, a)

    return lower


def _put_pairs(ctx: Context, ins: Instruction, name: str) -> None:
    """add, sub, min, max on two 16-bit halves."""
    lanes = ctx.lanes_of(*ins.operands[1:])
    halves = Ops(ctx, 16, 2 * lanes)
    values = [
        ctx.emit.op(f"bitcast {vec('i32', lanes)} {ctx.get(o, 'i32', lanes)} to {halves.t}") for o in ins.operands[1:]
    ]
    result = halves.op(name, *values) if name in ("add", "sub") else halves.intrinsic(name, *values)
    if ins.has("relu"):
        result = halves.intrinsic("smax", result, halves.const(0))
    word = Ops(ctx, 32, lanes)
    put(ctx, ins, word, ctx.emit.op(f"bitcast {halves.t} {result} to {word.t}"))


def _sad(ctx: Context, ins: Instruction) -> None:
    """c + |a - b|."""
    type_ = ins.types[-1]
    ops, (a, b, c) = load(ctx, ins, type_, *ins.operands[1:])
    less = ops.compare("slt" if type_[0] == "s" else "ult", a, b)
    distance = ops.select(less, ops.op("sub", b, a), ops.op("sub", a, b))
    put(ctx, ins, ops, ops.op("add", c, distance))


INTEGER: dict[str, Lowering] = {
    **BITS,
    **COMPARE,
    "add": _simple("add"),
    "sub": _simple("sub"),
    **dict.fromkeys(("addc", "subc"), lower_carry),
    "mul": _mul,
    "mad": _mad,
    "madc": lower_mad_carry,
    **dict.fromkeys(("mul24", "mad24"), lower_mul24),
    **dict.fromkeys(("dp4a", "dp2a"), lower_dot),
    **dict.fromkeys(("vabsdiff2", "vabsdiff4"), lower_distances),
    "fma": lower_float,
    "div": _div_rem("div"),
    "rem": _div_rem("rem"),
    "abs": _abs,
    "neg": _neg,
    "min": _min_max("min"),
    "max": _min_max("max"),
    "and": _logic("and"),
    "or": _logic("or"),
    "xor": _logic("xor"),
    "not": _not,
    "cnot": _cnot,
    "sad": _sad,
}
