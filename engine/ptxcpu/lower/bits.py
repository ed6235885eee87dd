"""Shifts, bit fields, counts, permutations and three-input logic.

LLVM's shifts past the width are undefined; PTX clamps the amount, so that they give zero or the sign.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import vec
from ptxtrain.engine.ptxcpu.lower.ops import Lowering, Ops, load, put
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Imm, Instruction, Pair


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
        put(ctx, ins, ops, shifted)
        return
    raw = ctx.get(amount, "i32", lanes)
    by32 = Ops(ctx, 32, lanes)
    past = by32.compare("uge", raw, by32.const(bits))
    clamped = by32.select(past, by32.const(bits - 1), raw)
    count_text = clamped if bits == 32 else by32.cast("trunc" if bits < 32 else "zext", clamped, bits)
    shifted = ops.op(name, a, count_text)
    if not arithmetic:
        shifted = ops.select(past, ops.const(0), shifted)
    put(ctx, ins, ops, shifted)


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
    put(ctx, ins, word, wide.cast("trunc", shifted, 32))


def _count_bits(ctx: Context, ins: Instruction) -> None:
    ops, (a,) = load(ctx, ins, ins.types[-1], ins.operands[1])
    value = ops.intrinsic("ctpop", a) if ins.opcode == "popc" else ops.bit_intrinsic("ctlz", a)
    put(ctx, ins, Ops(ctx, 32, ops.lanes), ops.cast("trunc", value, 32) if ops.bits == 64 else value)


def _reverse(ctx: Context, ins: Instruction) -> None:
    ops, (a,) = load(ctx, ins, ins.types[-1], ins.operands[1])
    put(ctx, ins, ops, ops.intrinsic("bitreverse", a))


def _find(ctx: Context, ins: Instruction) -> None:
    """bfind: the position of the highest bit that differs from the sign (signed) or is set; all ones if there is none."""
    type_ = ins.types[-1]
    ops, (a,) = load(ctx, ins, type_, ins.operands[1])
    if type_[0] == "s":
        a = ops.op("xor", a, ops.op("ashr", a, ops.const(ops.bits - 1)))
    zeros = ops.bit_intrinsic("ctlz", a)
    value = zeros if ins.has("shiftamt") else ops.op("sub", ops.const(ops.bits - 1), zeros)
    value = ops.select(ops.compare("eq", a, ops.const(0)), ops.const(-1), value)
    put(ctx, ins, Ops(ctx, 32, ops.lanes), ops.cast("trunc", value, 32) if ops.bits == 64 else value)


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
        # Bits above the field, and those that the field would take from above the value.
        inside = ops.op("and", mask, _shift_by(ctx, ops, word, "lshr", ops.const(-1), position))
        fill = ops.op("and", ops.op("sub", ops.const(0), sign), ops.op("xor", inside, ops.const(-1)))
        value = ops.op("or", value, fill)
        value = ops.select(word.compare("eq", length, word.const(0)), ops.const(0), value)
    put(ctx, ins, ops, value)


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
    put(ctx, ins, ops, ops.op("or", placed, kept))


def _lop3(ctx: Context, ins: Instruction) -> None:
    """Any function of three bits: bit (a << 2 | b << 1 | c) of the table."""
    table = ins.operands[4]
    assert isinstance(table, Imm)
    ops, values = load(ctx, ins, "b32", *ins.operands[1:4])
    negated = [ops.op("xor", v, ops.const(-1)) for v in values]
    total: str | None = None
    for row in range(8):
        if not table.value >> row & 1:
            continue
        terms = [values[i] if row >> (2 - i) & 1 else negated[i] for i in range(3)]
        term = ops.op("and", ops.op("and", terms[0], terms[1]), terms[2])
        total = term if total is None else ops.op("or", total, term)
    total = total or ops.op("and", values[0], ops.const(0))
    target = ins.operands[0]
    if not isinstance(target, Pair):
        put(ctx, ins, ops, total)
        return
    # lop3.BoolOp d|p, a, b, c, table, q: p = (d != 0) BoolOp q
    lanes = max(ops.lanes, ctx.lanes_of(ins.operands[5]))
    some = ops.compare("ne", total, ops.const(0))
    if lanes != ops.lanes:
        some = ctx.emit.broadcast("i1", some)
    joined = "and" if ins.has("and") else "or"
    some = ctx.emit.op(f"{joined} {vec('i1', lanes)} {some}, {ctx.get(ins.operands[5], 'i1', lanes)}")
    # The operands are read before either result is written.
    ctx.set(target.first, total, "i32", ops.lanes)
    ctx.set(target.second, some, "i1", lanes)


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
    put(ctx, ins, word, total)


def _mask_bits(ctx: Context, ins: Instruction) -> None:
    """bmsk.{clamp,wrap}: ones from bit a on, b of them; clamped amounts of 32 and more give none, or all to the top."""
    word, (a, b) = load(ctx, ins, "b32", *ins.operands[1:3])
    ones, limit = word.const(-1), word.const(31)
    start, width = word.op("and", a, limit), word.op("and", b, limit)
    end = word.op("add", start, width)
    from_start = word.op("shl", ones, start)
    from_end = _shift_by(ctx, word, word, "shl", ones, end)
    if ins.has("clamp"):
        from_start = word.select(word.compare("ugt", a, limit), word.const(0), from_start)
        from_end = word.select(word.compare("ugt", b, limit), word.const(0), from_end)
    put(ctx, ins, word, word.op("and", from_start, word.op("xor", from_end, ones)))


def _extend_bits(ctx: Context, ins: Instruction) -> None:
    """szext.{clamp,wrap}: the low b bits of a, zero- or sign-extended; 0 where b is 0, a itself where b is clamped."""
    word, (a, b) = load(ctx, ins, "b32", *ins.operands[1:3])
    width = word.op("and", b, word.const(31))
    away = word.op("and", word.op("sub", word.const(0), width), word.const(31))
    value = word.op("ashr" if ins.types[-1][0] == "s" else "lshr", word.op("shl", a, away), away)
    value = word.select(word.compare("eq", width, word.const(0)), word.const(0), value)
    if ins.has("clamp"):
        value = word.select(word.compare("ugt", b, word.const(31)), a, value)
    put(ctx, ins, word, value)


def _find_nth(ctx: Context, ins: Instruction) -> None:
    """fns d, mask, base, n: the place of the n-th set bit from `base` on, upwards (n > 0), downwards (n < 0) or there."""
    word, (mask, base, n) = load(ctx, ins, "b32", *ins.operands[1:4])
    zero, ones = word.const(0), word.const(-1)
    down = word.compare("slt", n, zero)
    # Downwards is upwards in the reversed word.
    bits = word.select(down, word.intrinsic("bitreverse", mask), mask)
    first = word.select(down, word.op("sub", word.const(31), base), base)
    bits = word.op("and", bits, _shift_by(ctx, word, word, "shl", ones, first))
    nowhere = word.compare("eq", n, zero)
    count = _magnitude(word, n)
    for skipped in range(1, 32):
        rest = word.op("and", bits, word.op("sub", bits, word.const(1)))
        bits = word.select(word.compare("ugt", count, word.const(skipped)), rest, bits)
    bits = word.select(word.compare("ugt", count, word.const(32)), zero, bits)
    found = word.bit_intrinsic("cttz", bits)
    none = word.compare("eq", bits, zero)
    misses = ctx.emit.op(f"and {word.b} {nowhere}, {word.compare('ne', found, base)}")
    none = ctx.emit.op(f"or {word.b} {none}, {misses}")
    found = word.select(down, word.op("sub", word.const(31), found), found)
    put(ctx, ins, word, word.select(none, ones, found))


def _magnitude(word: Ops, n: str) -> str:
    """|n|, 1 for 0."""
    size = word.select(word.compare("slt", n, word.const(0)), word.op("sub", word.const(0), n), n)
    return word.intrinsic("umax", size, word.const(1))


BITS: dict[str, Lowering] = {
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "popc": _count_bits,
    "clz": _count_bits,
    "brev": _reverse,
    "bfind": _find,
    "bfe": _extract,
    "bfi": _insert,
    "bmsk": _mask_bits,
    "szext": _extend_bits,
    "fns": _find_nth,
    "lop3": _lop3,
    "prmt": _prmt,
}
