"""Comparisons of integers and floats, and choosing by their results: setp, set, selp, slct."""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower import functions
from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import splat, vec
from ptxtrain.engine.ptxcpu.lower.floating import compare_floats
from ptxtrain.engine.ptxcpu.lower.ops import Lowering, Ops, is_integer, load, put
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Imm, Instruction, Operand, Pair, Reg, Sink

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
    ops, (a, b) = load(ctx, ins, type_, *operands[:2])
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
    upper = ""
    if type_.endswith("x2"):
        compared, upper = (take_half(ctx, compared, lanes, half) for half in (0, 1))
    joined = next((m for m in ins.modifiers[1:] if m in _BOOL_OPS), None)
    extra: str | None = None
    if joined:
        wide = max(lanes, ctx.lanes_of(ins.operands[3]))
        if wide != lanes:
            compared, lanes = ctx.emit.broadcast("i1", compared), wide
            upper = ctx.emit.broadcast("i1", upper) if upper else ""
        extra = ctx.get(ins.operands[3], "i1", lanes)
    t = vec("i1", lanes)
    inverse = upper or (ctx.negated(compared, lanes) if isinstance(second, Reg) else "")
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
    if joined and type_.endswith("x2"):
        raise ctx.refuse(ins, "set of packed halves is known without a Boolean operation")
    if joined:
        wide = max(lanes, ctx.lanes_of(ins.operands[3]))
        if wide != lanes:
            compared, lanes = ctx.emit.broadcast("i1", compared), wide
        compared = ctx.emit.op(f"{joined} {vec('i1', lanes)} {compared}, {ctx.get(ins.operands[3], 'i1', lanes)}")
    if type_.endswith("x2"):
        # Each half of the result answers for its own half.
        halves = Ops(ctx, 16, 2 * lanes)
        yes = _ONE.get(result.removesuffix("x2"), -1)
        value = halves.select(compared, halves.const(yes), halves.const(0))
        word = Ops(ctx, 32, lanes)
        put(ctx, ins, word, ctx.emit.op(f"bitcast {halves.t} {value} to {word.t}"))
        return
    ops = Ops(ctx, TYPE_BITS[result], lanes)
    put(ctx, ins, ops, ops.select(compared, ops.const(_ONE.get(result, -1)), ops.const(0)))


_ONE = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}


def take_half(ctx: Context, value: str, lanes: int, half: int) -> str:
    """The i1 values of the lower (0) or upper (1) halves among those of `lanes` packed pairs."""
    t = vec("i1", 2 * lanes)
    if lanes == 1:
        return ctx.emit.op(f"extractelement {t} {value}, i32 {half}")
    order = ", ".join(f"i32 {2 * lane + half}" for lane in range(lanes))
    return ctx.emit.op(f"shufflevector {t} {value}, {t} poison, <{lanes} x i32> <{order}>")


def _selp(ctx: Context, ins: Instruction) -> None:
    a, b, p = ins.operands[1:4]
    lanes = ctx.lanes_of(a, b, p)
    ops = Ops(ctx, TYPE_BITS[ins.types[-1]], lanes)
    first, second = (_as_bits(ctx, o, ins.types[-1], lanes) for o in (a, b))
    put(ctx, ins, ops, ops.select(ctx.get(p, "i1", lanes), first, second))


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
        if ins.has("ftz"):
            value = functions.flush(ctx.emit, value, lanes)
        chosen = ctx.emit.op(f"fcmp oge {vec('float', lanes)} {value}, {splat('float', '0.0', lanes)}")
    else:
        word = Ops(ctx, 32, lanes)
        chosen = word.compare("sge", ctx.get(c, "i32", lanes), word.const(0))
    first, second = (_as_bits(ctx, o, ins.types[0], lanes) for o in (a, b))
    put(ctx, ins, ops, ops.select(chosen, first, second))


COMPARE: dict[str, Lowering] = {"setp": _setp, "set": _set, "selp": _selp, "slct": _slct}
