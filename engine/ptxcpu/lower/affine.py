"""Instructions whose result is affine in the lane: the base is computed in scalars, a loose form's correction beside it.

value of lane l = base + stride * l + correction[l]; strides are constants, known to the analysis.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, integer, iota, splat, vec
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Instruction, Operand, Reg, Special, Symbol
from ptxtrain.engine.ptxcpu.uniformity import widened

_OPCODES = frozenset("mov cvta add sub and or neg mul mad shl shr cvt".split())
_BINARY = {"add": "add", "sub": "sub", "and": "and", "or": "or"}


def lower_affine(ctx: Context, ins: Instruction) -> bool:
    """Lower `ins` in affine form if its result has one; False leaves it to the ordinary lowering."""
    if not ins.operands or not isinstance(ins.operands[0], Reg):
        return False
    target = ins.operands[0]
    info = ctx.info(target)
    # Bases alone decide a uniform result too, where the lanes' strides cancel or are cut off.
    from_affine = info.uniform and any(ctx.info(o).affine for o in ins.operands[1:])
    if not (info.affine or from_affine) or ins.opcode not in _OPCODES or ctx.guard_mask is not None:
        return False
    emit, op, sources = ctx.emit, ins.opcode, ins.operands[1:]
    bits = TYPE_BITS[ins.types[0]]
    if op in ("mov", "cvta"):
        base, correction = _term(ctx, sources[0], bits)
        if op == "cvta":
            base = emit.op(f"add i{bits} {base}, {_window(ctx, ins)}")
    elif op in _BINARY:
        base_a, corr_a = _term(ctx, sources[0], bits)
        base_b, corr_b = _term(ctx, sources[1], bits)
        base = emit.op(f"{_BINARY[op]} i{bits} {base_a}, {base_b}")
        correction = _combine(ctx, "sub" if op == "sub" else "add", corr_a, corr_b, bits)
    elif op == "neg":
        base_a, corr_a = _term(ctx, sources[0], bits)
        base = emit.op(f"sub i{bits} 0, {base_a}")
        correction = _combine(ctx, "sub", None, corr_a, bits)
    elif op in ("mul", "mad"):
        base, correction, bits = _product(ctx, ins, bits)
        if op == "mad":
            base_c, corr_c = _term(ctx, sources[2], bits)
            base = emit.op(f"add i{bits} {base}, {base_c}")
            correction = _combine(ctx, "add", correction, corr_c, bits)
    elif op == "shl":
        base_a, corr_a = _term(ctx, sources[0], bits)
        amount = ctx.info(sources[1]).const
        assert amount is not None
        base = emit.op(f"shl i{bits} {base_a}, {amount}")
        correction = _scale(ctx, corr_a, 1 << amount, bits)
    elif op == "shr":
        base_a, correction = _term(ctx, sources[0], bits)
        kind = "ashr" if ins.types[0].startswith("s") else "lshr"
        base = emit.op(f"{kind} i{bits} {base_a}, {ctx.info(sources[1]).const}")
    elif op == "cvt":
        base, correction = _extend(ctx, sources[0], ins.types[1], bits)
    else:
        raise ctx.refuse(ins, f"{op} has an affine result but no affine lowering")
    if from_affine:
        ctx.set(target, base, f"i{bits}", 1)
        return True
    width = TYPE_BITS[target.type]
    if width != bits:
        raise ctx.refuse(ins, f"a {bits}-bit result in a {width}-bit register")
    ctx.set_affine(target, base, correction)
    return True


def _window(ctx: Context, ins: Instruction) -> str:
    """What `cvta` adds: generic addresses of shared memory are the host's own."""
    if ins.has("shared") or ins.has("shared::cta"):
        start = ctx.symbols["%shared"]()[1]
        return ctx.emit.op(f"sub i64 0, {start}") if ins.has("to") else start
    return "0"


def _term(ctx: Context, operand: Operand, bits: int) -> tuple[str, str | None]:
    """An operand's base and correction at a width that its register has, or is cut to."""
    base = ctx.base(operand, f"i{bits}")
    if not isinstance(operand, Reg) or not ctx.info(operand).affine:
        return base, None
    correction = ctx.correction(operand)
    width = TYPE_BITS[operand.type]
    if correction is not None and width > bits:
        correction = ctx.emit.op(f"trunc {vec(f'i{width}', LANES)} {correction} to {vec(f'i{bits}', LANES)}")
    return base, correction


def _combine(ctx: Context, op: str, a: str | None, b: str | None, bits: int) -> str | None:
    if b is None:
        return a
    if a is None and op == "add":
        return b
    return ctx.emit.op(f"{op} {vec(f'i{bits}', LANES)} {a or 'zeroinitializer'}, {b}")


def _scale(ctx: Context, correction: str | None, factor: int, bits: int) -> str | None:
    if correction is None:
        return None
    return ctx.emit.op(f"mul {vec(f'i{bits}', LANES)} {correction}, {splat(f'i{bits}', integer(factor, bits), LANES)}")


def _product(ctx: Context, ins: Instruction, bits: int) -> tuple[str, str | None, int]:
    """base and correction of `a * b` (one of them a known constant), and the product's width."""
    a, b = ins.operands[1], ins.operands[2]
    if not ctx.info(a).affine:
        a, b = b, a
    if not ctx.info(a).affine:
        return _uniform_product(ctx, ins, bits)
    factor = ctx.info(b).const
    assert factor is not None
    if ins.has("wide"):
        base, correction = _extend(ctx, a, ins.types[0], 2 * bits)
        if ins.types[0].startswith("u"):
            factor %= 1 << bits
        bits *= 2
    else:
        base, correction = _term(ctx, a, bits)
    scaled = ctx.emit.op(f"mul i{bits} {base}, {integer(factor, bits)}")
    return scaled, _scale(ctx, correction, factor, bits), bits


def _uniform_product(ctx: Context, ins: Instruction, bits: int) -> tuple[str, str | None, int]:
    """The product of a mad whose addend is the affine term."""
    wide = 2 * bits if ins.has("wide") else bits
    extend = "zext" if ins.types[0].startswith("u") else "sext"
    factors = [ctx.get(o, f"i{bits}", 1) for o in ins.operands[1:3]]
    if wide != bits:
        factors = [ctx.emit.op(f"{extend} i{bits} {f} to i{wide}") for f in factors]
    return ctx.emit.op(f"mul i{wide} {factors[0]}, {factors[1]}"), None, wide


def _extend(ctx: Context, operand: Operand, source_type: str, bits: int) -> tuple[str, str | None]:
    """An affine operand read as `source_type`, extended or cut to `bits`."""
    emit = ctx.emit
    source = TYPE_BITS[source_type]
    base, correction = _term(ctx, operand, source)
    if bits == source:
        return base, correction
    if bits < source:
        cut = emit.op(f"trunc i{source} {base} to i{bits}")
        if correction is not None:
            correction = emit.op(f"trunc {vec(f'i{source}', LANES)} {correction} to {vec(f'i{bits}', LANES)}")
        return cut, correction
    info = ctx.info(operand)
    assert info.stride is not None and not isinstance(operand, Symbol)
    extend = "sext" if source_type.startswith("s") else "zext"
    wide = emit.op(f"{extend} i{source} {base} to i{bits}")
    if not widened(info, source, signed=extend == "sext").loose:
        return wide, None
    # The sum is taken again at 64 bits; where it leaves the source's range, lanes wrapped and need their correction.
    last = emit.op(f"add i{bits} {wide}, {integer(info.stride * (LANES - 1), bits)}")
    if extend == "sext":
        low, high = -(1 << (source - 1)), (1 << (source - 1)) - 1
        ok = emit.op(f"icmp sle i{bits} {last}, {high}")
        ok = emit.op(f"and i1 {ok}, {emit.op(f'icmp sge i{bits} {last}, {low}')}")
    else:
        ok = emit.op(f"icmp ule i{bits} {last}, {(1 << source) - 1}")
    if correction is not None:
        ok = emit.op(f"and i1 {ok}, {_is_zero(ctx, correction, source)}")
    ctx.note_wrap(ok)
    scalar, wider = vec(f"i{source}", LANES), vec(f"i{bits}", LANES)
    narrow = ctx.get(operand, f"i{source}", LANES) if isinstance(operand, Reg | Special) else base
    exact = emit.op(f"{extend} {scalar} {narrow} to {wider}")
    straight = emit.op(f"add {wider} {emit.broadcast(f'i{bits}', wide)}, {iota(f'i{bits}', info.stride)}")
    return wide, emit.op(f"sub {wider} {exact}, {straight}")


def _is_zero(ctx: Context, correction: str, bits: int) -> str:
    total = ctx.emit.call(f"llvm.vector.reduce.or.v{LANES}i{bits}", f"i{bits}", (vec(f"i{bits}", LANES), correction))
    return ctx.emit.op(f"icmp eq i{bits} {total}, 0")
