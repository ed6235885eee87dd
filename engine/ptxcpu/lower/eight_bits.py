"""cvt between pairs of 8-bit floats (e4m3, e5m2) and f32 or f16x2.

e4m3 has 4 bits of exponent (bias 7), no infinity, and NaN with all bits set; e5m2 is the upper byte of an f16.
Narrowing rounds to nearest even and saturates to the largest finite number (`.satfinite`, which the ISA demands).
"""

from __future__ import annotations

import struct

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import splat, vec
from ptxtrain.engine.ptxcpu.lower.floating import Floats
from ptxtrain.engine.ptxcpu.lower.functions import Math
from ptxtrain.engine.ptxcpu.tree import Instruction, Reg, Sink

EIGHT_BITS = {"e4m3x2": (4, 3, 448.0), "e5m2x2": (5, 2, 57344.0)}  # bits of exponent and fraction, largest number


def lower_eight_bits(ctx: Context, ins: Instruction) -> None:
    """cvt.rn.satfinite{.relu}.{e4m3x2, e5m2x2}.{f32, f16x2} and cvt.rn{.relu}.f16x2.{e4m3x2, e5m2x2}."""
    kind = next(m for m in ins.modifiers if m in EIGHT_BITS)
    target = ins.operands[0]
    assert isinstance(target, Reg | Sink)
    lanes = ctx.lanes_of(*ins.operands[1:])
    if ins.modifiers.index(kind) == len(ins.modifiers) - 1:
        _widen(ctx, ins, target, kind, lanes)
        return
    if not ins.has("satfinite"):
        raise ctx.refuse(ins, "8-bit floats are converted to with .satfinite")
    emit = ctx.emit
    if ins.types[-1] == "f16x2":
        halves = Floats(ctx, "f16x2", lanes)
        both = emit.op(f"fpext {halves.t} {halves.load(ins.operands[1])} to {vec('float', 2 * lanes)}")
        small = _narrow(ctx, ins, both, kind, 2 * lanes)
    else:
        upper, lower = (_narrow(ctx, ins, ctx.get(o, "float", lanes), kind, lanes) for o in ins.operands[1:3])
        word = vec("i16", lanes)
        wide = emit.op(f"zext {vec('i8', lanes)} {upper} to {word}")
        high = emit.op(f"shl {word} {wide}, {splat('i16', 8, lanes)}")
        low = emit.op(f"zext {vec('i8', lanes)} {lower} to {word}")
        ctx.set(target, emit.op(f"or {word} {high}, {low}"), "i16", lanes)
        return
    ctx.set(target, emit.op(f"bitcast {vec('i8', 2 * lanes)} {small} to {vec('i16', lanes)}"), "i16", lanes)


def _narrow(ctx: Context, ins: Instruction, value: str, kind: str, n: int) -> str:
    """f32 to the i8 bits."""
    exponent_bits, fraction_bits, largest = EIGHT_BITS[kind]
    m = Math(ctx.emit, n)
    is_nan = m.cmp("uno", value, value)
    if ins.has("relu"):
        value = m.pick(m.cmp("olt", value, m.k(0.0)), m.k(0.0), value)
    bias = (1 << (exponent_bits - 1)) - 1
    size = m.unary("fabs", value)
    size = m.pick(m.cmp("ogt", size, m.k(largest)), m.k(largest), size)
    # Normal numbers: round the f32's fraction by its bits. Subnormal ones: add a number whose last place is theirs.
    bits = m.as_int(size)
    shift = 23 - fraction_bits
    odd = m.int("and", m.int("lshr", bits, m.ki(shift)), m.ki(1))
    rounded = m.int("add", m.int("add", bits, m.ki((1 << (shift - 1)) - 1)), odd)
    normal = m.int("sub", m.int("lshr", rounded, m.ki(shift)), m.ki((127 - bias) << fraction_bits))
    magic = 2.0 ** (1 - bias - fraction_bits + 23)
    (magic_bits,) = struct.unpack("<I", struct.pack("<f", magic))
    subnormal = m.int("sub", m.as_int(m.f("fadd", size, m.k(magic))), m.ki(magic_bits))
    tiny = m.cmp("olt", size, m.k(2.0 ** (1 - bias)))
    code = ctx.emit.op(f"select {m.b} {tiny}, {m.i} {subnormal}, {m.i} {normal}")
    sign = m.int("and", m.int("lshr", m.as_int(value), m.ki(24)), m.ki(0x80))
    code = m.int("or", code, sign)
    code = ctx.emit.op(f"select {m.b} {is_nan}, {m.i} {m.ki(0x7F)}, {m.i} {code}")
    return ctx.emit.op(f"trunc {m.i} {code} to {vec('i8', n)}")


def _widen(ctx: Context, ins: Instruction, target: Reg | Sink, kind: str, lanes: int) -> None:
    """Pairs of 8-bit floats to f16x2, exactly."""
    emit, n = ctx.emit, 2 * lanes
    pair = emit.op(f"bitcast {vec('i16', lanes)} {ctx.get(ins.operands[1], 'i16', lanes)} to {vec('i8', n)}")
    t = vec("i16", n)
    wide = emit.op(f"zext {vec('i8', n)} {pair} to {t}")
    if kind == "e5m2x2":
        bits = emit.op(f"shl {t} {wide}, {splat('i16', 8, n)}")
    else:
        # The exponent moves to an f16's, whose bias is larger by 8: a product with 2^8 puts it right, subnormals too.
        size = emit.op(f"and {t} {wide}, {splat('i16', 0x7F, n)}")
        moved = emit.op(f"shl {t} {size}, {splat('i16', 7, n)}")
        half = vec("half", n)
        number = emit.op(f"bitcast {t} {moved} to {half}")
        scaled = emit.op(f"fmul {half} {number}, {splat('half', '0xH5C00', n)}")
        plain = emit.op(f"bitcast {half} {scaled} to {t}")
        nan = emit.op(f"icmp eq {t} {size}, {splat('i16', 0x7F, n)}")
        plain = emit.select("i16", n, nan, splat("i16", 0x7FFF, n), plain)
        top = emit.op(f"and {t} {wide}, {splat('i16', 0x80, n)}")
        sign = emit.op(f"shl {t} {top}, {splat('i16', 8, n)}")
        bits = emit.op(f"or {t} {plain}, {sign}")
    if ins.has("relu"):
        negative = emit.op(f"icmp slt {t} {bits}, {splat('i16', 0, n)}")
        bits = emit.select("i16", n, negative, splat("i16", 0, n), bits)
    ctx.set(target, emit.op(f"bitcast {t} {bits} to {vec('i32', lanes)}"), "i32", lanes)
