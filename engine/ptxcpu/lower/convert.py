"""cvt: between integers, floats, brain floats, tf32 and packed pairs.

Out-of-range floats saturate to the integer's range and NaN gives 0. A packed conversion puts its first source in the
upper half. Every narrowing rounds once.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower import functions, rounding
from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.eight_bits import EIGHT_BITS, lower_eight_bits
from ptxtrain.engine.ptxcpu.lower.emitter import splat, vec
from ptxtrain.engine.ptxcpu.lower.floating import Floats
from ptxtrain.engine.ptxcpu.lower.ops import Ops
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Instruction, Operand, Reg, Sink

_INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_FLOATS = ("f16", "bf16", "f32", "f64")


def lower_cvt(ctx: Context, ins: Instruction) -> None:
    """`cvt.{rounding}.{ftz}.{sat}.to.from d, a` and the packed forms."""
    if ins.has("pack"):
        _pack(ctx, ins)
        return
    if any(m in EIGHT_BITS for m in ins.modifiers):
        lower_eight_bits(ctx, ins)
        return
    if len(ins.types) != 2:
        raise ctx.refuse(ins, "this conversion is not known")
    to, source = ins.types
    lanes = ctx.lanes_of(*ins.operands[1:])
    target = ins.operands[0]
    assert isinstance(target, Reg | Sink)
    if to in ("bf16x2", "f16x2"):
        _packed(ctx, ins, target, to, source, lanes)
        return
    if to == "tf32":
        _tf32(ctx, ins, target, lanes)
        return
    a = ins.operands[1]
    if source in _FLOATS and to in _FLOATS:
        bits = _float_to_float(ctx, ins, a, source, to, lanes)
        ctx.set(target, bits, f"i{TYPE_BITS[to]}", lanes)
    elif source in _FLOATS:
        _float_to_int(ctx, ins, target, a, source, to, lanes)
    elif to in _FLOATS:
        bits = _int_to_float(ctx, ins, a, source, to, lanes)
        ctx.set(target, bits, f"i{TYPE_BITS[to]}", lanes)
    elif source in TYPE_BITS and source[0] in "usb" and to[0] in "usb":
        _int_to_int(ctx, ins, target, a, source, to, lanes)
    else:
        raise ctx.refuse(ins, "this conversion is not known")


def _int_to_int(
    ctx: Context, ins: Instruction, target: Reg | Sink, a: Operand, source: str, to: str, lanes: int
) -> None:
    emit = ctx.emit
    from_bits, to_bits = TYPE_BITS[source], TYPE_BITS[to]
    value = ctx.get(a, f"i{from_bits}", lanes)
    t = vec(f"i{from_bits}", lanes)
    if ins.has("sat"):
        value = _clamp(ctx, value, source, to, lanes)
    if to_bits < from_bits:
        value = emit.op(f"trunc {t} {value} to {vec(f'i{to_bits}', lanes)}")
    elif to_bits > from_bits:
        extend = "sext" if source[0] == "s" else "zext"
        value = emit.op(f"{extend} {t} {value} to {vec(f'i{to_bits}', lanes)}")
    # A narrow signed result is sign-extended into a wider register.
    if to[0] == "s" and isinstance(target, Reg) and TYPE_BITS[target.type] > to_bits:
        wide = TYPE_BITS[target.type]
        value = emit.op(f"sext {vec(f'i{to_bits}', lanes)} {value} to {vec(f'i{wide}', lanes)}")
        to_bits = wide
    ctx.set(target, value, f"i{to_bits}", lanes)


def _clamp(ctx: Context, value: str, source: str, to: str, lanes: int) -> str:
    """Clamp an integer of type `source` into the range of `to`, still `source` bits wide."""
    bits, to_bits = TYPE_BITS[source], TYPE_BITS[to]
    low, high = (-(1 << (to_bits - 1)), (1 << (to_bits - 1)) - 1) if to[0] == "s" else (0, (1 << to_bits) - 1)
    own_low, own_high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if source[0] == "s" else (0, (1 << bits) - 1)
    sign = "s" if source[0] == "s" else "u"
    t = vec(f"i{bits}", lanes)
    suffix = f"i{bits}" if lanes == 1 else f"v{lanes}i{bits}"
    if high < own_high:
        value = ctx.emit.call(f"llvm.{sign}min.{suffix}", t, (t, value), (t, splat(f"i{bits}", high, lanes)))
    if low > own_low:
        value = ctx.emit.call(f"llvm.{sign}max.{suffix}", t, (t, value), (t, splat(f"i{bits}", low, lanes)))
    return value


def _float_to_int(
    ctx: Context, ins: Instruction, target: Reg | Sink, a: Operand, source: str, to: str, lanes: int
) -> None:
    emit = ctx.emit
    floats = Floats(ctx, source, lanes)
    value = floats.load(a)
    if ins.has("ftz"):
        value = floats.flush(value)
    rounding = next((_INTEGRAL[m] for m in ins.modifiers if m in _INTEGRAL), "trunc")
    value = floats.intrinsic(rounding, value)
    if floats.scalar == "half":
        value, scalar, suffix = emit.op(f"fpext {floats.t} {value} to {vec('float', lanes)}"), "float", "f32"
    else:
        scalar, suffix = floats.scalar, "f64" if floats.scalar == "double" else "f32"
    bits = TYPE_BITS[to]
    kind = "fptosi" if to[0] == "s" else "fptoui"
    n = "" if lanes == 1 else f"v{lanes}"
    result = emit.call(f"llvm.{kind}.sat.{n}i{bits}.{n}{suffix}", vec(f"i{bits}", lanes), (vec(scalar, lanes), value))
    if to[0] == "s" and isinstance(target, Reg) and TYPE_BITS[target.type] > bits:
        wide = TYPE_BITS[target.type]
        result = emit.op(f"sext {vec(f'i{bits}', lanes)} {result} to {vec(f'i{wide}', lanes)}")
        bits = wide
    ctx.set(target, result, f"i{bits}", lanes)


def _int_to_float(ctx: Context, ins: Instruction, a: Operand, source: str, to: str, lanes: int) -> str:
    emit = ctx.emit
    bits, signed = TYPE_BITS[source], source[0] == "s"
    value = ctx.get(a, f"i{bits}", lanes)
    mode = _mode(ins)
    if to in ("f32", "f64"):
        scalar = "float" if to == "f32" else "double"
        if mode is None:
            name = "sitofp" if signed else "uitofp"
            number = emit.op(f"{name} {vec(f'i{bits}', lanes)} {value} to {vec(scalar, lanes)}")
        else:
            total, error = rounding.integer_as_f64(emit, value, bits, signed, lanes)
            round_ = functions.round_to_f32 if to == "f32" else rounding.step
            number = round_(emit, total, error, mode, lanes)
        if ins.has("sat"):
            number = Floats(ctx, to, lanes).saturate(number)
        return emit.op(f"bitcast {vec(scalar, lanes)} {number} to {vec(f'i{TYPE_BITS[to]}', lanes)}")
    # In f64 with its error, then rounded to odd twice, so that the last rounding is the only one.
    total, error = rounding.integer_as_f64(emit, value, bits, signed, lanes)
    odd = functions.to_odd(emit, total, error, lanes)
    number = functions.f64_to_f32_odd(emit, odd, lanes)
    if ins.has("sat"):
        number = Floats(ctx, "f32", lanes).saturate(number)
    return _narrow(ctx, number, to, lanes, mode)


def _mode(ins: Instruction) -> str | None:
    return next((m for m in ins.modifiers if m in ("rz", "rm", "rp")), None)


def _narrow(ctx: Context, value: str, to: str, lanes: int, mode: str | None = None) -> str:
    """f32 to the bits of f16 or bf16, to nearest even or in a directed mode."""
    emit = ctx.emit
    if mode is not None:
        return rounding.narrow(emit, value, to, mode, lanes)
    if to == "bf16":
        return functions.f32_to_bf16(emit, value, lanes)
    half = emit.op(f"fptrunc {vec('float', lanes)} {value} to {vec('half', lanes)}")
    return emit.op(f"bitcast {vec('half', lanes)} {half} to {vec('i16', lanes)}")


def _float_to_float(ctx: Context, ins: Instruction, a: Operand, source: str, to: str, lanes: int) -> str:
    """The bits of the converted number, as an integer of its width."""
    emit = ctx.emit
    floats = Floats(ctx, source, lanes)
    value = floats.load(a)
    if ins.has("ftz") and floats.scalar == "float":
        value = floats.flush(value)
    integral = next((_INTEGRAL[m] for m in ins.modifiers if m in _INTEGRAL), None)
    if integral:
        value = floats.intrinsic(integral, value)
    mode = _mode(ins)
    out = Floats(ctx, to, lanes)
    if floats.scalar == out.scalar and (to != "bf16" or source == "bf16"):
        result = value
        if to == "bf16":
            return _narrow(ctx, value, to, lanes)  # exact: it was one
    elif to == "bf16" and floats.scalar == "half":
        return _narrow(ctx, emit.op(f"fpext {floats.t} {value} to {vec('float', lanes)}"), to, lanes, mode)
    elif floats.scalar == "half":
        result = emit.op(f"fpext {floats.t} {value} to {vec('float', lanes)}")
        if out.scalar == "double":
            result = functions.extend(emit, result, lanes)
    elif out.scalar == "double":
        result = functions.extend(emit, value, lanes)
    elif to in ("f16", "bf16"):
        if floats.scalar == "double":
            value = functions.f64_to_f32_odd(emit, value, lanes)
        if ins.has("sat"):
            value = Floats(ctx, "f32", lanes).saturate(value)
        if ins.has("relu"):
            value = _relu(ctx, value, lanes)
        return _narrow(ctx, value, to, lanes, mode)
    elif mode is None:
        result = emit.op(f"fptrunc {floats.t} {value} to {out.t}")
    else:
        result = functions.round_to_f32(emit, value, splat("double", "0.0", lanes), mode, lanes)
    if ins.has("ftz") and to == "f32":
        result = out.flush(result)
    if ins.has("sat"):
        result = out.saturate(result)
    return emit.op(f"bitcast {vec(out.scalar, lanes)} {result} to {vec(f'i{TYPE_BITS[to]}', lanes)}")


def _relu(ctx: Context, value: str, lanes: int) -> str:
    floats = Floats(ctx, "f32", lanes)
    return floats.select(floats.compare("olt", value, floats.const(0)), floats.const(0), value)


def _packed(ctx: Context, ins: Instruction, target: Reg | Sink, to: str, source: str, lanes: int) -> None:
    """cvt.bf16x2.f32 d, a, b: a to the upper half, b to the lower."""
    if source != "f32" or len(ins.operands) != 3 or ins.has("rs"):
        raise ctx.refuse(ins, "this packed conversion is not known")
    emit, narrow = ctx.emit, to[:-2]
    halves = []
    for operand in ins.operands[1:]:
        value = ctx.get(operand, "float", lanes)
        if ins.has("relu"):
            value = _relu(ctx, value, lanes)
        bits = _narrow(ctx, value, narrow, lanes, _mode(ins))
        halves.append(emit.op(f"zext {vec('i16', lanes)} {bits} to {vec('i32', lanes)}"))
    upper = emit.op(f"shl {vec('i32', lanes)} {halves[0]}, {splat('i32', 16, lanes)}")
    ctx.set(target, emit.op(f"or {vec('i32', lanes)} {upper}, {halves[1]}"), "i32", lanes)


def _pack(ctx: Context, ins: Instruction) -> None:
    """cvt.pack.sat.{u16, s16, u8, s8}.s32{.b32} d, a, b{, c}: a and b clamped, b lowest; c's low bits move above them."""
    to, source = ins.types[0], ins.types[1]
    bits = TYPE_BITS[to]
    lanes = ctx.lanes_of(*ins.operands[1:])
    ops = Ops(ctx, 32, lanes)
    mask = ops.const((1 << bits) - 1)
    a, b = (ops.op("and", _clamp(ctx, ctx.get(o, "i32", lanes), source, to, lanes), mask) for o in ins.operands[1:3])
    value = ops.op("or", ops.op("shl", a, ops.const(bits)), b)
    if len(ins.operands) > 3:
        above = ops.op("shl", ctx.get(ins.operands[3], "i32", lanes), ops.const(2 * bits))
        value = ops.op("or", above, value)
    target = ins.operands[0]
    assert isinstance(target, Reg | Sink)
    ctx.set(target, value, "i32", lanes)


def _tf32(ctx: Context, ins: Instruction, target: Reg | Sink, lanes: int) -> None:
    """cvt.{rna, rn, rz}.tf32.f32: 10 bits of fraction; rna rounds halves away from zero."""
    emit, t = ctx.emit, vec("i32", lanes)

    def op(name: str, a: str, b: str) -> str:
        return emit.op(f"{name} {t} {a}, {b}")

    bits = ctx.get(ins.operands[1], "i32", lanes)
    if ins.has("rna"):
        rounded = op("add", bits, splat("i32", 0x1000, lanes))
    elif ins.has("rn"):
        odd = op("and", op("lshr", bits, splat("i32", 13, lanes)), splat("i32", 1, lanes))
        rounded = op("add", op("add", bits, splat("i32", 0xFFF, lanes)), odd)
    else:
        rounded = bits
    exponent = op("and", bits, splat("i32", 0x7F800000, lanes))
    special = emit.op(f"icmp eq {t} {exponent}, {splat('i32', 0x7F800000, lanes)}")
    fraction = op("and", bits, splat("i32", 0x7FFFFF, lanes))
    infinite = emit.op(f"icmp eq {t} {fraction}, {splat('i32', 0, lanes)}")
    beyond = emit.select("i32", lanes, infinite, bits, splat("i32", 0x7FFFFFFF, lanes))
    cut = op("and", rounded, splat("i32", -0x2000, lanes))
    ctx.set(target, emit.select("i32", lanes, special, beyond, cut), "i32", lanes)
