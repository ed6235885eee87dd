"""Fragments of matrix operands in a function's stack: where they are, copies of those that are not side by side.

What a fragment is, and its layouts, `fragments` says.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context, Storage
from ptxtrain.engine.ptxcpu.lower.emitter import LANES
from ptxtrain.engine.ptxcpu.lower.fragments import (
    BYTES,
    TILE,
    WORD,
    WORDS,
    Placement,
    fragment_bytes,
    read_register,
    write_register,
)
from ptxtrain.engine.ptxcpu.tree import Operand, Reg, Sink, Vector


def allocate_fragments(ctx: Context, placed: dict[str, Placement]) -> None:
    """Make the slots, and have each register live in its place."""
    emit = ctx.emit
    sizes: dict[int, int] = {}
    for place in placed.values():
        sizes[place.fragment] = max(sizes.get(place.fragment, 0), place.position + 1)
    layouts = {place.fragment: place.layout for place in placed.values()}
    slots = {
        number: emit.alloca(f"[{fragment_bytes(size, layouts[number])} x i8], align 64", "fragment")
        for number, size in sizes.items()
    }
    ctx.fragment_slots, ctx.fragment_sizes = slots, sizes
    # Addresses within the slots are made in the entry block, behind the slots.
    before, emit.lines = emit.lines, []
    for name, place in placed.items():
        slot = slots[place.fragment]
        if place.layout is None:
            at = emit.op(f"getelementptr i8, ptr {slot}, i64 {WORD * place.position}")
            ctx.storage[name] = Storage(at)
        else:
            ctx.storage[name] = Storage(slot, None, place.layout, place.position)
    emit.allocas += emit.lines
    emit.lines = before
    ctx.fragments = placed


def elements_of(operand: Operand) -> list[Reg | Sink]:
    found = operand.elements if isinstance(operand, Vector) else (operand,)
    return [e for e in found if isinstance(e, Reg | Sink)]


def run_of(ctx: Context, operand: Operand) -> tuple[Reg, str | None, int] | None:
    """The first register, the layout and its index there, if the operand is a run of one fragment."""
    elements = elements_of(operand)
    places = [ctx.fragments.get(e.name) if isinstance(e, Reg) else None for e in elements]
    first, head = places[0], elements[0]
    if first is None or not isinstance(head, Reg):
        return None
    for i, place in enumerate(places):
        if place is None or (place.fragment, place.position) != (first.fragment, first.position + i):
            return None
    return head, first.layout, ctx.storage[head.name].index


def address_of(
    ctx: Context, operand: Operand, layout: str | None = None, *, read: bool, copy: bool = False
) -> tuple[str, bool]:
    """A fragment's address in a layout, and whether it is a copy (wanted as `copy`) that a result must be copied back from."""
    run = None if copy else run_of(ctx, operand)
    if run is not None and run[1] == layout and (layout is None or run[2] == 0):
        return ctx.storage[run[0].name].slot, False
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    size = max(TILE, WORD * len(elements), BYTES[layout] if layout else 0)
    slot = ctx.emit.alloca(f"[{size} x i8], align 64", "copy")
    if read:
        for i, element in enumerate(elements):
            value = ctx.get(element, "i32", LANES)
            if layout is not None:
                write_register(ctx.emit, slot, layout, i, value)
                continue
            at = ctx.emit.op(f"getelementptr i8, ptr {slot}, i64 {WORD * i}")
            ctx.emit.do(f"store {WORDS} {value}, ptr {at}, align 64")
    return slot, True


def copy_back(ctx: Context, operand: Operand, slot: str, layout: str | None = None) -> None:
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    for i, element in enumerate(elements):
        assert isinstance(element, Reg | Sink)
        if layout is not None:
            value = read_register(ctx.emit, slot, layout, i)
        else:
            at = ctx.emit.op(f"getelementptr i8, ptr {slot}, i64 {WORD * i}")
            value = ctx.emit.op(f"load {WORDS}, ptr {at}, align 64")
        ctx.set(element, value, "i32", LANES)


def note_writes(ctx: Context, operand: Operand) -> None:
    for element in elements_of(operand):
        if isinstance(element, Reg):
            ctx.note_write(element)


def rows_of_sums(ctx: Context, values: list[Operand]) -> tuple[str, int] | None:
    """Where the eight rows of two registers of sums begin, 64 bytes apart, if they are even and odd columns of a tile's rows."""
    places = [ctx.fragments.get(v.name) if isinstance(v, Reg) else None for v in values]
    if len(places) != 2:
        return None
    first, second = places
    if first is None or second is None or first.layout not in ("C", "C2") or first.fragment != second.fragment:
        return None
    if first.position % 2 or second.position != first.position + 1:
        return None
    half, i = divmod(first.position, 4)
    return ctx.fragment_slots[first.fragment], 8 * 64 * (i // 2) + 32 * half
