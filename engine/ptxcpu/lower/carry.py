"""Integer instructions with a carry flag, and the short products: add.cc, addc, sub.cc, subc, mad.cc, madc, mul24, dp4a, dp2a.

The carry flag is a register of each thread (`CARRY`) that those instructions read and write beside their operands; after a
subtraction it holds the borrow.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.ops import Ops
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Instruction, Reg, Sink
from ptxtrain.engine.ptxcpu.uses import CARRY, reads_carry


def _target(ins: Instruction) -> Reg | Sink:
    target = ins.operands[0]
    assert isinstance(target, Reg | Sink)
    return target


def lower_carry(ctx: Context, ins: Instruction) -> None:
    """add.cc, addc{.cc}, sub.cc, subc{.cc}."""
    reads = reads_carry(ins)
    lanes = ctx.lanes_of(*ins.operands[1:], *((CARRY,) if reads else ()))
    ops = Ops(ctx, TYPE_BITS[ins.types[-1]], lanes)
    a, b = (ctx.get(o, ops.scalar, lanes) for o in ins.operands[1:3])
    _finish(ctx, ins, ops, a, b, subtract=ins.opcode.startswith("sub"))


def lower_mad_carry(ctx: Context, ins: Instruction) -> None:
    """mad.{lo,hi}.cc, madc.{lo,hi}{.cc}: the carry is of the sum of the half product and c."""
    reads = reads_carry(ins)
    type_ = ins.types[-1]
    bits = TYPE_BITS[type_]
    lanes = ctx.lanes_of(*ins.operands[1:], *((CARRY,) if reads else ()))
    ops, wide = Ops(ctx, bits, lanes), Ops(ctx, 2 * bits, lanes)
    a, b, c = (ctx.get(o, ops.scalar, lanes) for o in ins.operands[1:4])
    if ins.has("lo"):
        product = ops.op("mul", a, b)
    else:
        extend = "sext" if type_[0] == "s" else "zext"
        whole = wide.op("mul", ops.cast(extend, a, 2 * bits), ops.cast(extend, b, 2 * bits))
        product = wide.cast("trunc", wide.op("lshr", whole, wide.const(bits)), bits)
    _finish(ctx, ins, ops, product, c, subtract=False)


def _finish(ctx: Context, ins: Instruction, ops: Ops, a: str, b: str, *, subtract: bool) -> None:
    """a + b or a - b, the flag before taken in and the flag after written out where the instruction says so."""
    emit, lanes = ctx.emit, ops.lanes

    def step(x: str, y: str) -> tuple[str, str]:
        result = ops.op("sub" if subtract else "add", x, y)
        return result, ops.compare("ult", x, y) if subtract else ops.compare("ult", result, x)

    result, flag = step(a, b)
    if reads_carry(ins):
        before = emit.op(f"zext {ops.b} {ctx.get(CARRY, 'i1', lanes)} to {ops.t}")
        result, second = step(result, before)
        flag = emit.op(f"or {ops.b} {flag}, {second}")
    ctx.set(_target(ins), result, ops.scalar, lanes)
    if ins.has("cc"):
        ctx.set(CARRY, flag, "i1", lanes)


def lower_mul24(ctx: Context, ins: Instruction) -> None:
    """mul24 and mad24: the low (lo) or high (hi) 32 bits of the 48-bit product of the low 24 bits."""
    signed = ins.types[-1][0] == "s"
    lanes = ctx.lanes_of(*ins.operands[1:])
    word, wide = Ops(ctx, 32, lanes), Ops(ctx, 64, lanes)
    factors = []
    for operand in ins.operands[1:3]:
        value = word.op("shl", ctx.get(operand, "i32", lanes), word.const(8))
        value = word.op("ashr" if signed else "lshr", value, word.const(8))
        factors.append(word.cast("sext" if signed else "zext", value, 64))
    product = wide.op("mul", *factors)
    if ins.has("hi"):
        product = wide.op("lshr", product, wide.const(16))
    value = wide.cast("trunc", product, 32)
    if ins.opcode == "mad24":
        c = ctx.get(ins.operands[3], "i32", lanes)
        value = word.intrinsic("sadd.sat", value, c) if ins.has("sat") else word.op("add", value, c)
    ctx.set(_target(ins), value, "i32", lanes)


def lower_dot(ctx: Context, ins: Instruction) -> None:
    """dp4a: c plus four products of bytes. dp2a: c plus two products of a's halves with b's low or high two bytes."""
    lanes = ctx.lanes_of(*ins.operands[1:])
    ops = Ops(ctx, 32, lanes)
    a, b, total = (ctx.get(o, "i32", lanes) for o in ins.operands[1:4])

    def part(value: str, type_: str, at: int, bits: int) -> str:
        moved = ops.op("shl", value, ops.const(32 - at - bits)) if at + bits < 32 else value
        return ops.op("ashr" if type_[0] == "s" else "lshr", moved, ops.const(32 - bits))

    of_a, of_b = ins.types[0], ins.types[1]
    if ins.opcode == "dp4a":
        pairs = [(part(a, of_a, 8 * i, 8), part(b, of_b, 8 * i, 8)) for i in range(4)]
    else:
        first = 16 if ins.has("hi") else 0
        pairs = [(part(a, of_a, 16 * i, 16), part(b, of_b, first + 8 * i, 8)) for i in range(2)]
    for x, y in pairs:
        total = ops.op("add", total, ops.op("mul", x, y))
    ctx.set(_target(ins), total, "i32", lanes)


def lower_distances(ctx: Context, ins: Instruction) -> None:
    """vabsdiff2 and vabsdiff4: |a - b| of each half or byte; with .add the sum of those and c."""
    count = int(ins.opcode[-1])
    bits = 32 // count
    lanes = ctx.lanes_of(*ins.operands[1:])
    word, pieces, wide = Ops(ctx, 32, lanes), Ops(ctx, bits, count * lanes), Ops(ctx, 32, count * lanes)
    parts = []
    for operand, type_ in zip(ins.operands[1:3], ins.types[1:3], strict=True):
        split = ctx.emit.op(f"bitcast {word.t} {ctx.get(operand, 'i32', lanes)} to {pieces.t}")
        parts.append(pieces.cast("sext" if type_[0] == "s" else "zext", split, 32))
    a, b = parts
    distance = wide.select(wide.compare("slt", a, b), wide.op("sub", b, a), wide.op("sub", a, b))
    if not ins.has("add"):
        joined = ctx.emit.op(f"bitcast {pieces.t} {wide.cast('trunc', distance, bits)} to {word.t}")
        ctx.set(_target(ins), joined, "i32", lanes)
        return
    total = ctx.get(ins.operands[3], "i32", lanes)
    for i in range(count):
        if lanes == 1:
            one = ctx.emit.op(f"extractelement {wide.t} {distance}, i32 {i}")
        else:
            order = ", ".join(f"i32 {count * lane + i}" for lane in range(lanes))
            one = ctx.emit.op(f"shufflevector {wide.t} {distance}, {wide.t} poison, <{lanes} x i32> <{order}>")
        total = word.op("add", total, one)
    ctx.set(_target(ins), total, "i32", lanes)


def lower_mad_sat(ctx: Context, ins: Instruction) -> None:
    """mad.hi.sat.s32: the sum is clamped."""
    lanes = ctx.lanes_of(*ins.operands[1:])
    word, wide = Ops(ctx, 32, lanes), Ops(ctx, 64, lanes)
    a, b, c = (ctx.get(o, "i32", lanes) for o in ins.operands[1:4])
    whole = wide.op("mul", word.cast("sext", a, 64), word.cast("sext", b, 64))
    high = wide.cast("trunc", wide.op("lshr", whole, wide.const(32)), 32)
    ctx.set(_target(ins), word.intrinsic("sadd.sat", high, c), "i32", lanes)
