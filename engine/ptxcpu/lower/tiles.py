"""Products of brain floats by the processor's matrix tiles (Intel AMX)."""

from __future__ import annotations

from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.slots import address_of, copy_back, elements_of, note_writes, run_of
from ptxtrain.engine.ptxcpu.tree import Instruction, Operand, Reg, Vector

# Matrix tiles by what they hold; see `runner.with_tiles` for their shapes.
_TILE_NUMBERS = {"C2": (0, 1), "C": (2,), "A": (3, 4), "B2": (5, 6), "B": (7,)}


def tile_product(ctx: Context, ins: Instruction) -> None:
    """Tiles loaded, multiplied, stored: about 10 ns, for two products where they are a pair (`fragments.pairs`).

    A factor that a tile holds since an earlier product, in the same straight line of code, is not loaded again.
    """
    if id(ins) in ctx.done_before:
        return
    emit = ctx.emit
    ctx.uses_tiles = True
    partner = ctx.partner.get(id(ins))
    target: Operand = ins.operands[0]
    written: Operand = target
    a = _tile_of(ctx, _tile_operand(ctx, ins.operands[1], "A"), "A", ins.operands[1])
    if partner is not None:
        b_vector = Vector((*elements_of(ins.operands[2]), *elements_of(partner.operands[2])))
        b = _tile_of(ctx, _tile_operand(ctx, b_vector, "B2"), "B2", b_vector)
        c_vector = Vector((*elements_of(target), *elements_of(partner.operands[0])))
        c = d = _tile_operand(ctx, c_vector, "C2")
        number, written = _next_tile(ctx, "C2"), c_vector
        ctx.done_before.add(id(partner))
    else:
        b = _tile_of(ctx, _tile_operand(ctx, ins.operands[2], "B"), "B", ins.operands[2])
        c = _tile_operand(ctx, ins.operands[3], "C")
        d = _tile_operand(ctx, target, "C", read=False)
        number = _next_tile(ctx, "C")
    multiply = emit.declare("llvm.x86.tdpbf16ps", "void", "i8 immarg, i8 immarg, i8 immarg")
    store = emit.declare("llvm.x86.tilestored64", "void", "i8 immarg, ptr, i64")
    _load_tile(ctx, number, c)
    emit.do(f"call void {multiply}(i8 {number}, i8 {a}, i8 {b})")
    emit.do(f"call void {store}(i8 {number}, ptr {d.address}, i64 {d.stride})")
    if d.copied:
        copy_back(ctx, written, d.address, "C")
    else:
        note_writes(ctx, written)


@dataclass(frozen=True, slots=True)
class _TileAt:
    """Where a tile is in memory, the distance of its rows, and whether it is a copy of its registers."""

    address: str
    stride: int
    copied: bool = False


def _tile_operand(ctx: Context, operand: Operand, layout: str, *, read: bool = True) -> _TileAt:
    """An operand as a tile: its fragment's own memory, half of a double tile, or a copy."""
    run = run_of(ctx, operand)
    if run is not None:
        head, own, index = run
        slot = ctx.storage[head.name].slot
        if own == layout and index == 0:
            return _TileAt(slot, 64 if layout.endswith("2") else 32)
        half = {"B": 2, "C": 4}.get(layout)
        if half is not None and own == f"{layout}2" and index in (0, half):
            at = ctx.emit.op(f"getelementptr i8, ptr {slot}, i64 {32 * (index // half)}")
            return _TileAt(at, 64)
    assert not layout.endswith("2"), "a pair has a double tile"
    slot, _ = address_of(ctx, operand, layout, read=read, copy=True)
    return _TileAt(slot, 32, copied=True)


def _load_tile(ctx: Context, number: int, tile: _TileAt) -> None:
    load = ctx.emit.declare("llvm.x86.tileloadd64", "void", "i8 immarg, ptr, i64")
    ctx.emit.do(f"call void {load}(i8 {number}, ptr {tile.address}, i64 {tile.stride})")


def _next_tile(ctx: Context, layout: str) -> int:
    """The tile to use next, in turn."""
    numbers = _TILE_NUMBERS[layout]
    ctx.turns[layout] = ctx.turns.get(layout, -1) + 1
    return numbers[ctx.turns[layout] % len(numbers)]


def _tile_of(ctx: Context, tile: _TileAt, layout: str, operand: Operand) -> int:
    """The tile with a factor."""
    names = [e.name for e in elements_of(operand) if isinstance(e, Reg)]
    held = (" ".join(names), sum(ctx.written.get(name, 0) for name in names), ctx.emit.blocks)
    for number in _TILE_NUMBERS[layout]:
        if ctx.tiles.get(number) == held:
            return number
    number = _next_tile(ctx, layout)
    _load_tile(ctx, number, tile)
    ctx.tiles[number] = held
    return number
