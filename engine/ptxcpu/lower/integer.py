"""Integer arithmetic, logic, bits, comparisons and selection.

PTX and LLVM differ where LLVM has undefined results: shifts past the width, division by zero, INT_MIN / -1. Each is given
a value here, the ISA's where it names one.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, splat, vec
from ptxtrain.engine.ptxcpu.lower.floating import compare_floats, lower_float
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Imm, Instruction, Operand, Pair, Reg, Sink

Lowering = Callable[[Context, Instruction], None]


class Ops:
    """Operations on `lanes` values of `i{bits}`, as short as IR allows."""

    def __init__(self, ctx: Context, bits: int, lanes: int) -> None:
        self.ctx, self.bits, self.lanes = ctx, bits, lanes
        self.scalar = f"i{bits}"
        self.t = vec(self.scalar, lanes)
        self.b = vec("i1", lanes)

    def const(self, value: int) -> str:
        half = 1 << self.bits
        value %= half
        return splat(self.scalar, value - half if value >> (self.bits - 1) else value, self.lanes)

    def op(self, name: str, a: str, b: str) -> str:
        return self.ctx.emit.op(f"{name} {self.t} {a}, {b}")

    def compare(self, relation: str, a: str, b: str) -> str:
        return self.ctx.emit.op(f"icmp {relation} {self.t} {a}, {b}")

    def select(self, condition: str, a: str, b: str) -> str:
        return self.ctx.emit.select(self.scalar, self.lanes, condition, a, b)

    def intrinsic(self, name: str, *values: str) -> str:
        suffix = self.scalar if self.lanes == 1 else f"v{self.lanes}{self.scalar}"
        return self.ctx.emit.call(f"llvm.{name}.{suffix}", self.t, *((self.t, v) for v in values))

    def bit_intrinsic(self, name: str, value: str) -> str:
        """ctlz and cttz, with a zero's result defined."""
        suffix = self.scalar if self.lanes == 1 else f"v{self.lanes}{self.scalar}"
        return self.ctx.emit.call(f"llvm.{name}.{suffix}", self.t, (self.t, value), ("i1", "false"))

    def cast(self, name: str, value: str, to: int) -> str:
        return self.ctx.emit.op(f"{name} {self.t} {value} to {vec(f'i{to}', self.lanes)}")


def _ops(ctx: Context, ins: Instruction, type_: str, *operands: Operand) -> tuple[Ops, list[str]]:
    lanes = ctx.lanes_of(*operands)
    ops = Ops(ctx, TYPE_BITS[type_], lanes)
    return ops, [ctx.get(o, ops.scalar, lanes) for o in operands]


def _target(ins: Instruction) -> Reg | Sink:
    target = ins.operands[0]
    assert isinstance(target, Reg | Sink)
    return target


def _put(
    ctx: Context, ins: Instruction, ops: Ops, value: str, bits: int | None = None, *, signed: bool = False
) -> None:
    """Write an integer; signed results narrower than their register are sign-extended into it."""
    target = _target(ins)
    bits = bits or ops.bits
    if signed and isinstance(target, Reg) and TYPE_BITS[target.type] > bits:
        wide = TYPE_BITS[target.type]
        value = ctx.emit.op(f"sext {vec(f'i{bits}', ops.lanes)} {value} to {vec(f'i{wide}', ops.lanes)}")
        bits = wide
    ctx.set(target, value, f"i{bits}", ops.lanes)


def is_integer(type_: str) -> bool:
    """Whether arithmetic on this type is integer arithmetic."""
    return type_[0] in "usb" and not type_.startswith("bf")


def _simple(name: str) -> Lowering:
    def lower(ctx: Context, ins: Instruction) -> None:
        type_ = ins.types[-1]
        if not is_integer(type_):
            lower_float(ctx, ins)
            return
        if ins.has("cc") or ins.opcode in ("addc", "subc"):
            raise ctx.refuse(ins, "carry chains are not known")
        ops, (a, b) = _ops(ctx, ins, type_, *ins.operands[1:])
        if ins.has("sat"):
            value = ops.intrinsic("sadd.sat" if name == "add" else "ssub.sat", a, b)
        else:
            value = ops.op(name, a, b)
        _put(ctx, ins, ops, value)

    return lower


def _logic(name: str) -> Lowering:
    def lower(ctx: Context, ins: Instruction) -> None:
        ops, (a, b) = _ops(ctx, ins, ins.types[-1], *ins.operands[1:])
        _put(ctx, ins, ops, ops.op(name, a, b))

    return lower


def _not(ctx: Context, ins: Instruction) -> None:
    ops, (a,) = _ops(ctx, ins, ins.types[-1], ins.operands[1])
    ones = splat("i1", "true", ops.lanes) if ops.bits == 1 else ops.const(-1)
    _put(ctx, ins, ops, ops.op("xor", a, ones))


def _cnot(ctx: Context, ins: Instruction) -> None:
    ops, (a,) = _ops(ctx, ins, ins.types[-1], ins.operands[1])
    _put(ctx, ins, ops, ops.select(ops.compare("eq", a, ops.const(0)), ops.const(1), ops.const(0)))


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
    if ins.has("cc", "sat") or ins.opcode == "madc":
        raise ctx.refuse(ins, "carry chains and saturation are not known")
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
    _put(ctx, ins, result, value)


def _div_rem(name: str) -> Lowering:
    def lower(ctx: Context, ins: Instruction) -> None:
        type_ = ins.types[-1]
        if not is_integer(type_):
            lower_float(ctx, ins)
            return
        ops, (a, b) = _ops(ctx, ins, type_, *ins.operands[1:])
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
        _put(ctx, ins, ops, value)

    return lower


def _abs(ctx: Context, ins: Instruction) -> None:
    if not is_integer(ins.types[-1]):
        lower_float(ctx, ins)
        return
    ops, (a,) = _ops(ctx, ins, ins.types[-1], ins.operands[1])
    negative = ops.op("sub", ops.const(0), a)
    _put(ctx, ins, ops, ops.select(ops.compare("slt", a, ops.const(0)), negative, a))


def _neg(ctx: Context, ins: Instruction) -> None:
    if not is_integer(ins.types[-1]):
        lower_float(ctx, ins)
        return
    ops, (a,) = _ops(ctx, ins, ins.types[-1], ins.operands[1])
    _put(ctx, ins, ops, ops.op("sub", ops.const(0), a))


def _min_max(name: str) -> Lowering:
    def lower(ctx: Context, ins: Instruction) -> None:
        type_ = ins.types[-1]
        if not is_integer(type_):
            lower_float(ctx, ins)
            return
        ops, (a, b) = _ops(ctx, ins, type_, *ins.operands[1:])
        _put(ctx, ins, ops, ops.intrinsic(("s" if type_[0] == "s" else "u") + name, a, b))

    return lower


def _shift(ctx: Context, ins: Instruction) -> None:
    """Amounts past the width give zero, or the sign (PTX clamps; LLVM's result would be poison)."""
    type_ = ins.types[-1]
    bits = TYPE_BITS[type_]
    value, amount = ins.operands[1:]
    lanes = ctx.lanes_of(value, amount)
    ops = Ops(ctx, bits, lanes)
    a = ctx.get(value, ops.scalar, lanes)
    arithmetic = ins.opcode == "shr" and type_[0] == "s"
    name = "shl" if ins.opcode == "shl" else "ashr" if arithmetic else "lshr"
    if isinstance(amount, Imm):
        count = amount.value % (1 << 32)
        if count >= bits:
            shifted = ops.op("ashr", a, ops.const(bits - 1)) if arithmetic else ops.const(0)
        else:
            shifted = ops.op(name, a, ops.const(count))
        _put(ctx, ins, ops, shifted)
        return
    raw = ctx.get(amount, "i32", lanes)
    by32 = Ops(ctx, 32, lanes)
    past = by32.compare("uge", raw, by32.const(bits))
    clamped = by32.select(past, by32.const(bits - 1), raw)
    count_text = clamped if bits == 32 else by32.cast("trunc" if bits < 32 else "zext", clamped, bits)
    shifted = ops.op(name, a, count_text)
    if not arithmetic:
        shifted = ops.select(past, ops.const(0), shifted)
    _put(ctx, ins, ops, shifted)


def _funnel(ctx: Context, ins: Instruction) -> None:
    """shf.{l,r}.{wrap,clamp}.b32: of the 64 bits `{b, a}`, the upper (l) or lower (r) half after the shift."""
    lanes = ctx.lanes_of(*ins.operands[1:])
    word, wide = Ops(ctx, 32, lanes), Ops(ctx, 64, lanes)
    a, b, c = (ctx.get(o, "i32", lanes) for o in ins.operands[1:])
    if ins.has("clamp"):
        count = word.intrinsic("umin", c, word.const(32))
    else:
        count = word.op("and", c, word.const(31))
    high = wide.op("shl", word.cast("zext", b, 64), wide.const(32))
    both = wide.op("or", high, word.cast("zext", a, 64))
    amount = word.cast("zext", count, 64)
    if ins.has("l"):
        shifted = wide.op("lshr", wide.op("shl", both, amount), wide.const(32))
    else:
        shifted = wide.op("lshr", both, amount)
    _put(ctx, ins, word, wide.cast("trunc", shifted, 32))


def _count_bits(ctx: Context, ins: Instruction) -> None:
    ops, (a,) = _ops(ctx, ins, ins.types[-1], ins.operands[1])
    value = ops.intrinsic("ctpop", a) if ins.opcode == "popc" else ops.bit_intrinsic("ctlz", a)
    _put(ctx, ins, Ops(ctx, 32, ops.lanes), ops.cast("trunc", value, 32) if ops.bits == 64 else value)


def _reverse(ctx: Context, ins: Instruction) -> None:
    ops, (a,) = _ops(ctx, ins, ins.types[-1], ins.operands[1])
    _put(ctx, ins, ops, ops.intrinsic("bitreverse", a))


def _find(ctx: Context, ins: Instruction) -> None:
    """bfind: the position of the highest bit that differs from the sign (signed) or is set; all ones if there is none."""
    type_ = ins.types[-1]
    ops, (a,) = _ops(ctx, ins, type_, ins.operands[1])
    if type_[0] == "s":
        a = ops.op("xor", a, ops.op("ashr", a, ops.const(ops.bits - 1)))
    zeros = ops.bit_intrinsic("ctlz", a)
    value = zeros if ins.has("shiftamt") else ops.op("sub", ops.const(ops.bits - 1), zeros)
    value = ops.select(ops.compare("eq", a, ops.const(0)), ops.const(-1), value)
    _put(ctx, ins, Ops(ctx, 32, ops.lanes), ops.cast("trunc", value, 32) if ops.bits == 64 else value)


def _extract(ctx: Context, ins: Instruction) -> None:
    """bfe: `len` bits from `pos`; signed results are filled with the field's top bit, the value's where that lies past it."""
    type_ = ins.types[-1]
    bits = TYPE_BITS[type_]
    lanes = ctx.lanes_of(*ins.operands[1:])
    ops, word = Ops(ctx, bits, lanes), Ops(ctx, 32, lanes)
    a = ctx.get(ins.operands[1], ops.scalar, lanes)
    position, length = (word.op("and", ctx.get(o, "i32", lanes), word.const(255)) for o in ins.operands[2:4])
    shifted = _shift_by(ctx, ops, word, "lshr", a, position)
    mask = ops.op("xor", _shift_by(ctx, ops, word, "shl", ops.const(-1), length), ops.const(-1))
    value = ops.op("and", shifted, mask)
    if type_[0] == "s":
        end = word.op("sub", word.op("add", position, length), word.const(1))
        sign_at = word.intrinsic("umin", end, word.const(bits - 1))
        sign = ops.op("and", _shift_by(ctx, ops, word, "lshr", a, sign_at), ops.const(1))
        fill = ops.op("and", ops.op("sub", ops.const(0), sign), ops.op("xor", mask, ops.const(-1)))
        value = ops.op("or", value, fill)
        value = ops.select(word.compare("eq", length, word.const(0)), ops.const(0), value)
    _put(ctx, ins, ops, value)


def _shift_by(ctx: Context, ops: Ops, word: Ops, name: str, value: str, amount: str) -> str:
    """A logical shift by an i32 amount, zero past the width."""
    past = word.compare("uge", amount, word.const(ops.bits))
    safe = word.select(past, word.const(0), amount)
    count = safe if ops.bits == 32 else word.cast("zext", safe, ops.bits)
    return ops.select(past, ops.const(0), ops.op(name, value, count))


def _insert(ctx: Context, ins: Instruction) -> None:
    """bfi: the low `len` bits of a into b at `pos`."""
    bits = TYPE_BITS[ins.types[-1]]
    lanes = ctx.lanes_of(*ins.operands[1:])
    ops, word = Ops(ctx, bits, lanes), Ops(ctx, 32, lanes)
    a, b = (ctx.get(o, ops.scalar, lanes) for o in ins.operands[1:3])
    position, length = (word.op("and", ctx.get(o, "i32", lanes), word.const(255)) for o in ins.operands[3:5])
    field = ops.op("xor", _shift_by(ctx, ops, word, "shl", ops.const(-1), length), ops.const(-1))
    mask = _shift_by(ctx, ops, word, "shl", field, position)
    placed = ops.op("and", _shift_by(ctx, ops, word, "shl", a, position), mask)
    kept = ops.op("and", b, ops.op("xor", mask, ops.const(-1)))
    _put(ctx, ins, ops, ops.op("or", placed, kept))


def _lop3(ctx: Context, ins: Instruction) -> None:
    """Any function of three bits: bit (a << 2 | b << 1 | c) of the table."""
    table = ins.operands[4]
    if not isinstance(table, Imm) or len(ins.operands) != 5 or ins.has("BoolOp"):
        raise ctx.refuse(ins, "lop3 is known with an immediate table and no predicate")
    ops, values = _ops(ctx, ins, "b32", *ins.operands[1:4])
    negated = [ops.op("xor", v, ops.const(-1)) for v in values]
    total: str | None = None
    for row in range(8):
        if not table.value >> row & 1:
            continue
        terms = [values[i] if row >> (2 - i) & 1 else negated[i] for i in range(3)]
        term = ops.op("and", ops.op("and", terms[0], terms[1]), terms[2])
        total = term if total is None else ops.op("or", total, term)
    _put(ctx, ins, ops, total or ops.op("and", values[0], ops.const(0)))


_PRMT_MODES = {
    "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
    "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
    "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
}


def _prmt(ctx: Context, ins: Instruction) -> None:
    """Four bytes chosen from the eight of `{b, a}`; in the general mode a nibble's top bit copies the byte's sign."""
    lanes = ctx.lanes_of(*ins.operands[1:])
    word, wide = Ops(ctx, 32, lanes), Ops(ctx, 64, lanes)
    a, b, c = (ctx.get(o, "i32", lanes) for o in ins.operands[1:])
    both = wide.op("or", wide.op("shl", word.cast("zext", b, 64), wide.const(32)), word.cast("zext", a, 64))
    mode = next((m for m in ins.modifiers if m in _PRMT_MODES), None)
    total: str | None = None
    for i in range(4):
        replicate: str | None = None
        if mode is None:
            nibble = word.op("lshr", c, word.const(4 * i)) if i else c
            index = word.op("and", nibble, word.const(7))
            replicate = word.compare("ne", word.op("and", nibble, word.const(8)), word.const(0))
        else:
            pick = word.op("and", c, word.const(3))
            index = word.const(_PRMT_MODES[mode][0][i])
            for value in range(1, 4):
                chosen = word.compare("eq", pick, word.const(value))
                index = word.select(chosen, word.const(_PRMT_MODES[mode][value][i]), index)
        amount = wide.op("shl", word.cast("zext", index, 64), wide.const(3))
        byte = word.op("and", wide.cast("trunc", wide.op("lshr", both, amount), 32), word.const(255))
        if replicate is not None:
            signed = word.compare("uge", byte, word.const(128))
            byte = word.select(replicate, word.select(signed, word.const(255), word.const(0)), byte)
        placed = word.op("shl", byte, word.const(8 * i)) if i else byte
        total = placed if total is None else word.op("or", total, placed)
    assert total is not None
    _put(ctx, ins, word, total)


def _sad(ctx: Context, ins: Instruction) -> None:
    """c + |a - b|."""
    type_ = ins.types[-1]
    ops, (a, b, c) = _ops(ctx, ins, type_, *ins.operands[1:])
    less = ops.compare("slt" if type_[0] == "s" else "ult", a, b)
    distance = ops.select(less, ops.op("sub", b, a), ops.op("sub", a, b))
    _put(ctx, ins, ops, ops.op("add", c, distance))


_SIGNED = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
_UNSIGNED = {
    "eq": "eq",
    "ne": "ne",
    **{"lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge"},
    **{"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"},
}


def _compare(
    ctx: Context, ins: Instruction, relation: str, type_: str, operands: tuple[Operand, ...]
) -> tuple[str, int]:
    """The comparison `operands[0] relation operands[1]` as i1 values, and their number."""
    if not is_integer(type_):
        return compare_floats(ctx, ins, relation, type_, operands)
    ops, (a, b) = _ops(ctx, ins, type_, *operands[:2])
    table = _SIGNED if type_[0] == "s" else _UNSIGNED
    if relation not in table:
        raise ctx.refuse(ins, f"no comparison .{relation} for .{type_}")
    return ops.compare(table[relation], a, b), ops.lanes


_BOOL_OPS = {"and": "and", "or": "or", "xor": "xor"}


def _setp(ctx: Context, ins: Instruction) -> None:
    """p = (a rel b) [BoolOp c], and q = !(a rel b) [BoolOp c]."""
    relation, type_ = ins.modifiers[0], ins.types[-1]
    compared, lanes = _compare(ctx, ins, relation, type_, ins.operands[1:3])
    target = ins.operands[0]
    first = target.first if isinstance(target, Pair) else target
    second = target.second if isinstance(target, Pair) else Sink()
    assert isinstance(first, Reg | Sink)
    joined = next((m for m in ins.modifiers[1:] if m in _BOOL_OPS), None)
    extra: str | None = None
    if joined:
        wide = max(lanes, ctx.lanes_of(ins.operands[3]))
        if wide != lanes:
            compared, lanes = ctx.emit.broadcast("i1", compared), wide
        extra = ctx.get(ins.operands[3], "i1", lanes)
    t = vec("i1", lanes)
    inverse = ctx.negated(compared, lanes) if isinstance(second, Reg) else ""
    if extra is not None and joined is not None:
        compared = ctx.emit.op(f"{joined} {t} {compared}, {extra}")
        if inverse:
            inverse = ctx.emit.op(f"{joined} {t} {inverse}, {extra}")
    ctx.set(first, compared, "i1", lanes)
    if inverse:
        ctx.set(second, inverse, "i1", lanes)


def _set(ctx: Context, ins: Instruction) -> None:
    """All ones or zero (integers), 1.0 or 0.0 (floats)."""
    relation, result, type_ = ins.modifiers[0], ins.types[0], ins.types[1]
    compared, lanes = _compare(ctx, ins, relation, type_, ins.operands[1:3])
    joined = next((m for m in ins.modifiers[1:] if m in _BOOL_OPS), None)
    if joined:
        wide = max(lanes, ctx.lanes_of(ins.operands[3]))
        if wide != lanes:
            compared, lanes = ctx.emit.broadcast("i1", compared), wide
        compared = ctx.emit.op(f"{joined} {vec('i1', lanes)} {compared}, {ctx.get(ins.operands[3], 'i1', lanes)}")
    bits = TYPE_BITS[result]
    ops = Ops(ctx, bits, lanes)
    yes = ops.const(0x3F800000) if result == "f32" else ops.const(-1)
    _put(ctx, ins, ops, ops.select(compared, yes, ops.const(0)))


def _selp(ctx: Context, ins: Instruction) -> None:
    a, b, p = ins.operands[1:4]
    lanes = ctx.lanes_of(a, b, p)
    ops = Ops(ctx, TYPE_BITS[ins.types[-1]], lanes)
    first, second = (_as_bits(ctx, o, ins.types[-1], lanes) for o in (a, b))
    _put(ctx, ins, ops, ops.select(ctx.get(p, "i1", lanes), first, second))


def _as_bits(ctx: Context, operand: Operand, type_: str, lanes: int) -> str:
    """An operand's bits as an integer; a float literal is first made one of `type_`."""
    bits = TYPE_BITS[type_]
    if isinstance(operand, Imm) and operand.kind != "int" and type_ in ("f32", "f64"):
        value = ctx.get(operand, "float" if type_ == "f32" else "double", lanes)
        source = vec("float" if type_ == "f32" else "double", lanes)
        return ctx.emit.op(f"bitcast {source} {value} to {vec(f'i{bits}', lanes)}")
    return ctx.get(operand, f"i{bits}", lanes)


def _slct(ctx: Context, ins: Instruction) -> None:
    """c >= 0 ? a : b."""
    a, b, c = ins.operands[1:4]
    lanes = ctx.lanes_of(a, b, c)
    ops = Ops(ctx, TYPE_BITS[ins.types[0]], lanes)
    if ins.types[1] == "f32":
        value = ctx.get(c, "float", lanes)
        chosen = ctx.emit.op(f"fcmp oge {vec('float', lanes)} {value}, {splat('float', '0.0', lanes)}")
    else:
        word = Ops(ctx, 32, lanes)
        chosen = word.compare("sge", ctx.get(c, "i32", lanes), word.const(0))
    first, second = (_as_bits(ctx, o, ins.types[0], lanes) for o in (a, b))
    _put(ctx, ins, ops, ops.select(chosen, first, second))


def scalar_lane(ctx: Context, type_: str, value: str, lane: str | int) -> str:
    """One lane of a vector."""
    return ctx.emit.op(f"extractelement {vec(type_, LANES)} {value}, i32 {lane}")


INTEGER: dict[str, Lowering] = {
    "add": _simple("add"),
    "sub": _simple("sub"),
    "mul": _mul,
    "mad": _mad,
    "fma": lambda ctx, ins: lower_float(ctx, ins),
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
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "popc": _count_bits,
    "clz": _count_bits,
    "brev": _reverse,
    "bfind": _find,
    "bfe": _extract,
    "bfi": _insert,
    "lop3": _lop3,
    "prmt": _prmt,
    "sad": _sad,
    "setp": _setp,
    "set": _set,
    "selp": _selp,
    "slct": _slct,
}
