"""wmma: matrix instructions whose fragment layout is the implementation's own.

The layout chosen here is that of `mma` tiles: A as m16k16 tiles (4 registers each), B as k16n8 tiles (2 each), C and D as
m16n8 tiles (4 f32 registers, or 2 of packed f16). The registers that the ISA gives beyond those hold zeros. A height of 8
(m8n32k16) uses the upper half of a tile.

    m16n16k16   A 1 tile   B 2 tiles   C 2 tiles
    m32n8k16    A 2        B 1         C 2
    m8n32k16    A 1/2      B 4         C 4 halves
    m16n16k8    tf32: as m16n16k16 with k 8
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, integer, splat
from ptxtrain.engine.ptxcpu.lower.memory import gather, store_lanes
from ptxtrain.engine.ptxcpu.lower.mma import multiply_tile, pack_f16, unpack_f16
from ptxtrain.engine.ptxcpu.lower.places import Place, lane_pointers, space_of
from ptxtrain.engine.ptxcpu.tree import Instruction, Operand, Reg, Sink, Vector

_I = "<32 x i32>"
_ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "f32": 4}


@dataclass(frozen=True, slots=True)
class _Slot:
    """One register of a fragment: its elements' rows and columns for each lane (one or two of them, low half first)."""

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]


def _shape(ins: Instruction) -> tuple[int, int, int]:
    text = next((m for m in ins.modifiers if m in ("m16n16k16", "m32n8k16", "m8n32k16", "m16n16k8")), None)
    if text is None:
        raise ValueError("shape")
    m, rest = text[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def _lanes(row: int, column: int, step: int, across: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows row + g and columns column + step * t; `across` swaps the two."""
    near = tuple(row + lane // 4 for lane in range(LANES))
    far = tuple(column + step * (lane % 4) for lane in range(LANES))
    return (far, near) if across else (near, far)


def _slots(kind: str, type_: str, m: int, n: int, k: int) -> Iterator[_Slot]:
    """The registers of a fragment in order, without those that are padding."""
    if kind in ("a", "b"):
        tiles = range(0, max(m, 16), 16) if kind == "a" else range(0, n, 8)
        halves = (0, 8) if kind == "a" else (0,)
        for tile in tiles:
            for k_half in range(0, k, 4 if type_ == "tf32" else 8):
                for half in halves:
                    if kind == "a" and tile + half >= m:
                        continue
                    pair = (0,) if type_ == "tf32" else (0, 1)
                    step = 1 if type_ == "tf32" else 2
                    places = [_lanes(tile + half, k_half + i, step, kind == "b") for i in pair]
                    yield _Slot(tuple(r for r, _ in places), tuple(c for _, c in places))
        return
    for row_tile in range(0, max(m, 16), 16):
        for column_tile in range(0, n, 8):
            for half in (0, 8):
                if row_tile + half >= m:
                    continue
                places = [_lanes(row_tile + half, column_tile + odd, 2, False) for odd in (0, 1)]
                if type_ == "f16":
                    yield _Slot(tuple(r for r, _ in places), tuple(c for _, c in places))
                else:
                    for r, c in places:
                        yield _Slot((r,), (c,))


def _kind(ins: Instruction) -> str:
    return next(m for m in ins.modifiers if m in ("a", "b", "c", "d"))


def _stride(ctx: Context, ins: Instruction, position: int) -> str:
    """The leading dimension in elements as an i64: the operand, or the tile's own width."""
    if len(ins.operands) > position:
        return ctx.get(ins.operands[position], "i32", 1) if ctx.info(ins.operands[position]).uniform else "-1"
    m, n, k = _shape(ins)
    kind, row_major = _kind(ins), ins.has("row")
    width = {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[kind][1 if row_major else 0]
    return str(width)


def _element_pointers(ctx: Context, base: str, slot: _Slot, part: int, stride: str, size: int, row_major: bool) -> str:
    """Where element `part` of a register lies, for each lane."""
    emit = ctx.emit
    major, minor = (slot.rows, slot.columns) if row_major else (slot.columns, slot.rows)
    wide = emit.broadcast("i64", emit.op(f"sext i32 {stride} to i64"))

    def constant(values: tuple[int, ...]) -> str:
        return "<" + ", ".join(f"i64 {integer(v, 64)}" for v in values) + ">"

    index = emit.op(f"mul <32 x i64> {wide}, {constant(major[part])}")
    index = emit.op(f"add <32 x i64> {index}, {constant(minor[part])}")
    offset = emit.op(f"mul <32 x i64> {index}, {splat('i64', size, LANES)}")
    return emit.op(f"getelementptr i8, <32 x ptr> {base}, <32 x i64> {offset}")


def _registers(operand: Operand) -> list[Reg | Sink]:
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    return [e for e in elements if isinstance(e, Reg | Sink)]


def _load(ctx: Context, ins: Instruction) -> None:
    """wmma.load.{a, b, c}: gathers, one for each element of a lane's registers."""
    emit, type_ = ctx.emit, ins.types[-1]
    size, bits = _ELEMENT_BYTES[type_], 8 * _ELEMENT_BYTES[type_]
    base = lane_pointers(ctx, ins, ins.operands[1], space_of(ins))
    stride, row_major = _stride(ctx, ins, 2), ins.has("row")
    targets = _registers(ins.operands[0])
    values = []
    for slot in _slots(_kind(ins), type_, *_shape(ins)):
        word: str | None = None
        for part in range(len(slot.rows)):
            pointers = _element_pointers(ctx, base, slot, part, stride, size, row_major)
            if ctx.checks:
                ctx.checks.lanes(ins, pointers, size, write=False)
            (value,) = gather(ctx, pointers, bits, 1)
            if bits == 16:
                value = emit.op(f"zext <32 x i16> {value} to {_I}")
                if part:
                    value = emit.op(f"shl {_I} {value}, {splat('i32', 16, LANES)}")
            word = value if word is None else emit.op(f"or {_I} {word}, {value}")
        assert word is not None
        values.append(word)
    for i, target in enumerate(targets):
        ctx.set(target, values[i] if i < len(values) else "zeroinitializer", "i32", LANES)


def _store(ctx: Context, ins: Instruction) -> None:
    """wmma.store.d."""
    emit, type_ = ctx.emit, ins.types[-1]
    size = _ELEMENT_BYTES[type_]
    base = lane_pointers(ctx, ins, ins.operands[0], space_of(ins))
    stride, row_major = _stride(ctx, ins, 2), ins.has("row")
    sources = _registers(ins.operands[1])
    for i, slot in enumerate(_slots("d", type_, *_shape(ins))):
        word = ctx.get(sources[i], "i32", LANES)
        for part in range(len(slot.rows)):
            pointers = _element_pointers(ctx, base, slot, part, stride, size, row_major)
            value = word
            if size == 2:
                if part:
                    value = emit.op(f"lshr {_I} {value}, {splat('i32', 16, LANES)}")
                value = emit.op(f"trunc {_I} {value} to <32 x i16>")
            if ctx.checks:
                ctx.checks.lanes(ins, pointers, size, write=True)
            store_lanes(ctx, Place(lanes=pointers), 8 * size, [value])


def _mma(ctx: Context, ins: Instruction) -> None:
    """wmma.mma: the tiles' products."""
    emit = ctx.emit
    m, n, _ = _shape(ins)
    types = ins.types
    # With one type named for both factors (f16) the list is D, C.
    factor = types[1] if len(types) == 4 else "f16"
    result, start = types[0], types[-1]
    a, b, c = ([ctx.get(r, "i32", LANES) for r in _registers(o)] for o in ins.operands[1:4])
    if start == "f16":
        sums = unpack_f16(emit, c)
    else:
        sums = [emit.op(f"bitcast {_I} {w} to <32 x float>") for w in c]
    half_height = m == 8
    per_tile = 2 if half_height else 4
    a_words = 2 if half_height else 4
    b_tiles = n // 8
    done: list[str] = []
    for row_tile in range(max(m // 16, 1)):
        words = a[a_words * row_tile : a_words * (row_tile + 1)]
        if half_height:
            words = [words[0], "zeroinitializer", words[1], "zeroinitializer"]
        for column_tile in range(b_tiles):
            first = per_tile * (row_tile * b_tiles + column_tile)
            tile = sums[first : first + per_tile]
            if half_height:
                tile = [*tile, "zeroinitializer", "zeroinitializer"]
            factors = b[2 * column_tile : 2 * column_tile + 2]
            done += multiply_tile(emit, factor, words, factors, tile, dot=ctx.products == "dot")[:per_tile]
    if result == "f16":
        words_out = pack_f16(emit, done)
    else:
        words_out = [emit.op(f"bitcast <32 x float> {v} to {_I}") for v in done]
    for target, word in zip(_registers(ins.operands[0]), words_out, strict=True):
        ctx.set(target, word, "i32", LANES)


def lower_wmma(ctx: Context, ins: Instruction) -> None:
    """wmma.{load, store, mma}.sync.aligned."""
    if not set(ins.types) <= {"f16", "bf16", "tf32", "f32"} or ins.has("satfinite"):
        raise ctx.refuse(ins, "wmma is known for f16, bf16 and tf32 with f16 or f32 sums")
    if ins.has("load"):
        _load(ctx, ins)
    elif ins.has("store"):
        _store(ctx, ins)
    else:
        _mma(ctx, ins)
