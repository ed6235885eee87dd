"""Moves between registers, and between a window's addresses and generic ones."""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, iota, splat, vec
from ptxtrain.engine.ptxcpu.lower.places import space_of
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Address,
    Imm,
    Instruction,
    Operand,
    Reg,
    Sink,
    Special,
    Vector,
)


def lower_mov(ctx: Context, ins: Instruction) -> None:
    """mov of values, addresses and special registers, and between a register and a vector of narrower ones."""
    target, source = ins.operands
    bits = TYPE_BITS[ins.types[-1]]
    if isinstance(target, Vector):
        _unpack(ctx, target, source, bits)
        return
    assert isinstance(target, Reg | Sink)
    if isinstance(source, Vector):
        _pack(ctx, target, source, bits)
        return
    if isinstance(source, Special) and source.name not in ctx.specials:
        raise ctx.refuse(ins, f"the special register {source.name} is not known")
    lanes = ctx.lanes_of(source)
    if isinstance(source, Imm) and source.kind != "int":
        scalar = "double" if bits == 64 else "float"
        ctx.set(target, ctx.get(source, scalar, lanes), scalar, lanes)
        return
    ctx.set(target, ctx.get(source, f"i{bits}", lanes), f"i{bits}", lanes)


def _unpack(ctx: Context, target: Vector, source: Operand, bits: int) -> None:
    emit, each = ctx.emit, bits // len(target.elements)
    lanes = ctx.lanes_of(source)
    whole = ctx.get(source, f"i{bits}", lanes)
    for i, element in enumerate(target.elements):
        if isinstance(element, Sink):
            continue
        assert isinstance(element, Reg)
        t = vec(f"i{bits}", lanes)
        moved = emit.op(f"lshr {t} {whole}, {splat(f'i{bits}', i * each, lanes)}") if i else whole
        ctx.set(element, emit.op(f"trunc {t} {moved} to {vec(f'i{each}', lanes)}"), f"i{each}", lanes)


def _pack(ctx: Context, target: Reg | Sink, source: Vector, bits: int) -> None:
    emit, each = ctx.emit, bits // len(source.elements)
    values = [e for e in source.elements if isinstance(e, Reg | Imm)]
    lanes = ctx.lanes_of(*values)
    t = vec(f"i{bits}", lanes)
    total: str | None = None
    for i, element in enumerate(values):
        part = emit.op(f"zext {vec(f'i{each}', lanes)} {ctx.get(element, f'i{each}', lanes)} to {t}")
        if i:
            part = emit.op(f"shl {t} {part}, {splat(f'i{bits}', i * each, lanes)}")
        total = part if total is None else emit.op(f"or {t} {total}, {part}")
    assert total is not None
    ctx.set(target, total, f"i{bits}", lanes)


def lower_cvta(ctx: Context, ins: Instruction) -> None:
    """Between a window's addresses and generic ones, which are the host's."""
    target, source = ins.operands
    assert isinstance(target, Reg | Sink)
    emit, space = ctx.emit, space_of(ins)
    bits = TYPE_BITS[ins.types[-1]]
    lanes = LANES if space == "local" else ctx.lanes_of(source)
    if bits != 64:
        raise ctx.refuse(ins, "addresses have 64 bits")
    if isinstance(source, Address):
        raise ctx.refuse(ins, "cvta takes a register or a variable")
    value, t = ctx.get(source, "i64", lanes), vec("i64", lanes)
    if space in ("shared", "local", "param"):
        start = ctx.symbols[f"%{space}"]()[1]
        window = start if lanes == 1 else emit.broadcast("i64", start)
        if space == "local":
            window = emit.op(f"add {t} {window}, {iota('i64', ctx.local_bytes)}")
        value = emit.op(f"{'sub' if ins.has('to') else 'add'} {t} {value}, {window}")
    ctx.set(target, value, "i64", lanes)


def lower_isspacep(ctx: Context, ins: Instruction) -> None:
    """Whether a generic address lies in a window."""
    target, source = ins.operands
    assert isinstance(target, Reg | Sink)
    emit, space = ctx.emit, space_of(ins)
    lanes = ctx.lanes_of(source)
    t = vec("i64", lanes)
    value = ctx.get(source, "i64", lanes)

    def inside(window: str) -> str:
        start, size = ctx.symbols[f"%{window}"]()[1], ctx.symbols[f"%{window}.bytes"]()[1]
        if lanes != 1:
            start, size = emit.broadcast("i64", start), emit.broadcast("i64", size)
        return emit.op(f"icmp ult {t} {emit.op(f'sub {t} {value}, {start}')}, {size}")

    if space in ("shared", "local"):
        result = inside(space)
    elif space == "global":
        either = emit.op(f"or {vec('i1', lanes)} {inside('shared')}, {inside('local')}")
        result = ctx.negated(either, lanes)
    else:
        # Constants and parameters are global memory to a generic address.
        result = splat("i1", "false", lanes)
    ctx.set(target, result, "i1", lanes)
