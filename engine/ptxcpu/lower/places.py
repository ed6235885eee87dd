"""Where accesses go: addresses of PTX turned into host pointers.

A place is one pointer for all lanes, a first lane's pointer with a constant stride, or a vector of pointers. Generic addresses
of shared and local memory are the host's own, so generic accesses need no test.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, iota
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Address,
    Instruction,
    Operand,
    Reg,
    Symbol,
)

SPACES = ("param", "const", "global", "shared", "local")


def space_of(ins: Instruction) -> str:
    """The state space of an access, `generic` if none is named."""
    for modifier in ins.modifiers:
        name = modifier.split("::")[0]
        if name in SPACES:
            return name
    return "generic"


@dataclass(slots=True)
class Place:
    """Where an access goes. One of: `scalar` (all lanes), `base` with `stride`, `lanes` (a vector of pointers).

    A base whose form is `loose` holds only while the function's `straight` flag does; `lanes` is then given too.
    """

    scalar: str | None = None
    base: str | None = None
    stride: int = 0
    lanes: str | None = None
    loose: bool = False


def place_of(ctx: Context, ins: Instruction, address: Operand, space: str) -> Place:
    """Turn `[base + offset]` into host pointers."""
    assert isinstance(address, Address)
    base, offset = address.base, address.offset
    if space == "generic" and isinstance(base, Symbol):
        # A symbol stands for its address in its own window: `ld [symbol]` is an access to that space.
        space = ctx.symbols[base.name]()[0]
    if space in ("shared", "local", "param"):
        return _in_window(ctx, base, offset, space)
    if base is None or ctx.info(base).uniform:
        start = str(offset) if base is None else ctx.get(base, "i64", 1)
        return Place(scalar=_pointer(ctx, start, 0 if base is None else offset))
    info = ctx.info(base)
    assert isinstance(base, Reg)
    if info.affine and info.stride is not None and TYPE_BITS[base.type] == 64:
        pointer = _pointer(ctx, ctx.base(base, "i64"), offset)
        return Place(base=pointer, stride=info.stride, loose=info.loose, lanes=_pointers(ctx, base, offset))
    return Place(lanes=_pointers(ctx, base, offset))


def lane_pointers(ctx: Context, ins: Instruction, address: Operand, space: str) -> str:
    """The lanes' host pointers as one vector, whatever is known of them."""
    place = place_of(ctx, ins, address, space)
    if place.lanes is not None:
        return place.lanes
    assert place.scalar is not None
    return ctx.emit.broadcast("ptr", place.scalar)


def lane_array(ctx: Context, ins: Instruction, address: Operand, space: str) -> tuple[str, int]:
    """The lanes' pointers as an array in memory, and an offset to be added to each.

    An array that stands there already, made from the same value of the same register, serves again: a kernel reads its
    matrices at constant distances from one address.
    """
    assert isinstance(address, Address)
    if not isinstance(address.base, Reg):
        return _new_array(ctx, lane_pointers(ctx, ins, address, space)), 0
    name = address.base.name
    key = (name, space, ctx.written.get(name, 0), ctx.emit.blocks)
    slot = ctx.arrays.get(key)
    if slot is None:
        slot = ctx.arrays[key] = _new_array(ctx, lane_pointers(ctx, ins, Address(address.base, 0), space))
    return slot, address.offset


def _new_array(ctx: Context, pointers: str) -> str:
    slot = ctx.emit.alloca("[32 x ptr], align 64", "pointers")
    ctx.emit.do(f"store <32 x ptr> {pointers}, ptr {slot}, align 64")
    return slot


def _pointer(ctx: Context, start: str, offset: int) -> str:
    pointer = ctx.emit.op(f"inttoptr i64 {start} to ptr")
    return ctx.emit.op(f"getelementptr i8, ptr {pointer}, i64 {offset}") if offset else pointer


def _pointers(ctx: Context, base: Reg, offset: int) -> str:
    value = ctx.get(base, "i64", LANES)
    pointers = ctx.emit.op(f"inttoptr <32 x i64> {value} to <32 x ptr>")
    return ctx.emit.op(f"getelementptr i8, <32 x ptr> {pointers}, i64 {offset}") if offset else pointers


def _in_window(ctx: Context, base: Reg | Symbol | None, offset: int, space: str) -> Place:
    """An access to shared or local memory or to parameters: offsets into the block's, the lane's or the launch's own."""
    emit = ctx.emit
    start = {"shared": "%shared", "local": "%local", "param": "%params"}[space]
    lane_stride = ctx.local_bytes if space == "local" else 0

    def at(value: str) -> str:
        moved = emit.op(f"getelementptr i8, ptr {start}, i64 {value}")
        return emit.op(f"getelementptr i8, ptr {moved}, i64 {offset}") if offset else moved

    def spread(values: str) -> str:
        if lane_stride:
            values = emit.op(f"add <32 x i64> {values}, {iota('i64', lane_stride)}")
        moved = emit.op(f"getelementptr i8, ptr {start}, <32 x i64> {values}")
        return emit.op(f"getelementptr i8, <32 x ptr> {moved}, i64 {offset}") if offset else moved

    if base is None or ctx.info(base).uniform:
        value = "0" if base is None else _offset(ctx, base, 1)
        if not lane_stride:
            return Place(scalar=at(value))
        return Place(base=at(value), stride=lane_stride, lanes=spread(emit.broadcast("i64", value)))
    info = ctx.info(base)
    assert isinstance(base, Reg)
    if info.affine and info.stride is not None:
        scalar = ctx.base(base, f"i{TYPE_BITS[base.type]}")
        if TYPE_BITS[base.type] == 32:
            scalar = emit.op(f"sext i32 {scalar} to i64")
        return Place(
            base=at(scalar),
            stride=info.stride + lane_stride,
            loose=info.loose,
            lanes=spread(_offset(ctx, base, LANES)),
        )
    return Place(lanes=spread(_offset(ctx, base, LANES)))


def _offset(ctx: Context, base: Reg | Symbol, lanes: int) -> str:
    """A 32- or 64-bit offset as i64."""
    return ctx.get(base, "i64", lanes)
