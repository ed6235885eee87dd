"""What ldmatrix brings as a factor of matrix tiles: 16 rows of 32 bytes, as they lie or turned.

Four matrices of a factor are, in nearly every kernel, 16 rows of 32 bytes at one distance. Where that is so (`steps.is_rows`,
found out once), a tile of rows is loaded straight from shared memory; the others are turned by whole vectors:

    A             rows of m, k along them        loaded as it lies
    B, transposed rows of k, n along them        two rows are interleaved to pairs of k
    B             rows of n, k along them        words transposed
    A, transposed rows of k, m along them        both
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, Emitter
from ptxtrain.engine.ptxcpu.lower.fragments import WORD, join, matrix_orders
from ptxtrain.engine.ptxcpu.lower.places import lane_array, space_of
from ptxtrain.engine.ptxcpu.lower.steps import (
    Stepped,
    arguments,
    first_pointer,
    is_rows,
    lane_pointer,
    parameters,
    row_stride,
    stepped,
)
from ptxtrain.engine.ptxcpu.tree import Instruction

_I = "<32 x i32>"
_ROW = "<8 x i32>"
_PAIR = "<16 x i32>"


@dataclass(frozen=True, slots=True)
class Source:
    """An ldmatrix to be done later: its rows' addresses as they are where it stands."""

    layout: str
    count: int
    transposed: bool
    at: Stepped | None
    rows: str = ""  # without a root: an array of pointers, and what to add to them
    offset: int = 0


def source_of(ctx: Context, ins: Instruction, layout: str) -> Source:
    count = next(int(m[1:]) for m in ins.modifiers if m in ("x1", "x2", "x4"))
    at = stepped(ctx, ins, ins.operands[1])
    if at is not None:
        return Source(layout, count, ins.has("trans"), at)
    rows, offset = lane_array(ctx, ins, ins.operands[1], space_of(ins))
    return Source(layout, count, ins.has("trans"), None, rows, offset)


def fetch(ctx: Context, source: Source, slot: str | None, new: Callable[[], str]) -> tuple[tuple[str, str], str]:
    """Bring a factor to memory, to `slot` or a new one; returns pointer and row distance, and the slot."""
    emit, layout = ctx.emit, source.layout
    stride = "64" if layout == "B2" else "32"
    name = f"ldmatrix.x{source.count}{'.trans' if source.transposed else ''}.{layout}"
    at = source.at
    if at is None:
        to = slot or new()
        ctx.helpers.setdefault(name, _from_pointers(name, source))
        emit.do(f'call void @"{name}"(ptr {to}, ptr {source.rows}, i64 {source.offset})')
        return (to, stride), to
    name += f".{at.kept.bits}"
    ctx.helpers.setdefault(name, _from_lanes(name, source, at.kept.bits))
    to = slot or new()
    body = {("A", True): _turn_a, ("B2", True): _interleave, ("B2", False): _turn_words}.get(
        (layout, source.transposed)
    )
    straight = layout == "A" and not source.transposed
    if source.count != 4 or (straight and slot is not None):
        emit.do(f'call void @"{name}"(ptr {to}, {arguments(ctx, at)})')
        return (to, stride), to
    regular = is_rows(ctx, at, 1 if (layout == "A") != source.transposed else 2)
    apart = row_stride(ctx, at)
    rows, lanes, done = emit.label("rows"), emit.label("lanes"), emit.label("brought")
    emit.branch(regular, done if straight else rows, lanes)
    emit.start(lanes)
    emit.do(f'call void @"{name}"(ptr {to}, {arguments(ctx, at)})')
    emit.jump(done)
    if body is not None:
        emit.start(rows)
        body(emit, first_pointer(ctx, at), apart, to)
        emit.jump(done)
    emit.start(done)
    if straight:
        pointer = emit.op(f"select i1 {regular}, ptr {first_pointer(ctx, at)}, ptr {to}")
        return (pointer, emit.op(f"select i1 {regular}, i64 {apart}, i64 {stride}")), to
    return (to, stride), to


# Helpers: rows anywhere


def _finish(name: str, parameters_: str, emit: Emitter) -> str:
    body = "\n".join(emit.lines)
    return f'define internal void @"{name}"({parameters_}) noinline nounwind {{\n{body}\n}}'


def _from_pointers(name: str, source: Source) -> str:
    """From an array of pointers."""
    emit = Emitter()

    def row(index: int) -> str:
        at = emit.op(f"getelementptr ptr, ptr %rows, i64 {index}")
        return emit.op(f"getelementptr i8, ptr {emit.op(f'load ptr, ptr {at}')}, i64 %offset")

    bring(emit, source.layout, source.count, transposed=source.transposed, row=row)
    emit.do("ret void")
    return _finish(name, "ptr %d, ptr %rows, i64 %offset", emit)


def _from_lanes(name: str, source: Source, bits: int) -> str:
    """From a root's array."""
    emit = Emitter()

    def row(index: int) -> str:
        emit.lines += lane_pointer("s", bits, index)
        return f"%s.p{index}"

    bring(emit, source.layout, source.count, transposed=source.transposed, row=row)
    emit.do("ret void")
    return _finish(name, f"ptr %d, {parameters('s', bits)}", emit)


def bring(emit: Emitter, layout: str | None, count: int, *, transposed: bool, row: Callable[[int], str]) -> None:
    """Load the rows of `count` matrices, and store their registers at %d in a layout (None: one after another)."""

    def store(position: int, value: str, type_: str = _I) -> None:
        at = emit.op(f"getelementptr i8, ptr %d, i64 {WORD * position}")
        emit.do(f"store {type_} {value}, ptr {at}, align 64")

    order = matrix_orders(layout, transposed=transposed)
    wholes = []
    for matrix in range(count):
        parts = [emit.op(f"load <4 x i32>, ptr {row(8 * matrix + i)}, align 16") for i in range(8)]
        whole = join(emit, parts, 4)
        if order != list(range(64)):
            halves = emit.op(f"bitcast {_I} {whole} to <64 x i16>")
            lanes = ", ".join(f"i32 {i}" for i in order)
            turned = emit.op(f"shufflevector <64 x i16> {halves}, <64 x i16> poison, <64 x i32> <{lanes}>")
            whole = emit.op(f"bitcast <64 x i16> {turned} to {_I}")
        wholes.append(whole)
    if layout == "A":
        # Rows of the tile are rows of two matrices behind each other: stored whole, so that a tile's load can take them
        # from the store that is still under way.
        pieces = ", ".join(
            f"i32 {LANES * part + 4 * line + i}" for line in range(8) for part in (0, 1) for i in range(4)
        )
        for half in (0, 1):
            both = emit.op(f"shufflevector {_I} {wholes[half]}, {_I} {wholes[half + 2]}, <64 x i32> <{pieces}>")
            store(2 * half, both, "<64 x i32>")
    elif layout == "B2":
        # A row has eight columns of the first product and eight of the second.
        pieces = ", ".join(
            f"i32 {LANES * part + 8 * line + i}" for line in range(4) for part in (0, 1) for i in range(8)
        )
        for step in (0, 1):
            both = emit.op(f"shufflevector {_I} {wholes[step]}, {_I} {wholes[step + 2]}, <64 x i32> <{pieces}>")
            store(2 * step, both, "<64 x i32>")
    else:
        for matrix, whole in enumerate(wholes):
            store(matrix, whole)


# 16 rows of 32 bytes at one distance


def _rows(emit: Emitter, first: str, apart: str) -> list[str]:
    found = []
    for row in range(16):
        by = emit.op(f"mul i64 {apart}, {row}")
        at = emit.op(f"getelementptr i8, ptr {first}, i64 {by}")
        found.append(emit.op(f"load {_ROW}, ptr {at}, align 16"))
    return found


def _shuffle(emit: Emitter, type_: str, a: str, b: str, order: list[int]) -> str:
    lanes = ", ".join(f"i32 {i}" for i in order)
    return emit.op(f"shufflevector {type_} {a}, {type_} {b}, <{len(order)} x i32> <{lanes}>")


def _paired_rows(emit: Emitter, first: str, apart: str) -> list[str]:
    """Rows 2 i and 2 i + 1 halfword by halfword, as eight vectors of 16 words."""
    rows = _rows(emit, first, apart)
    order = [half + 16 * part for half in range(16) for part in (0, 1)]
    found = []
    for low, high in zip(rows[::2], rows[1::2], strict=True):
        parts = [emit.op(f"bitcast {_ROW} {r} to <16 x i16>") for r in (low, high)]
        mixed = _shuffle(emit, "<16 x i16>", parts[0], parts[1], order)
        found.append(emit.op(f"bitcast <32 x i16> {mixed} to {_PAIR}"))
    return found


def _store_rows(emit: Emitter, rows: list[str], to: str) -> None:
    for i, row in enumerate(rows):
        at = emit.op(f"getelementptr i8, ptr {to}, i64 {64 * i}")
        emit.do(f"store {_PAIR} {row}, ptr {at}, align 64")


def _interleave(emit: Emitter, first: str, apart: str, to: str) -> None:
    _store_rows(emit, _paired_rows(emit, first, apart), to)


def _turn_words(emit: Emitter, first: str, apart: str, to: str) -> None:
    """16 rows of 8 words to 8 rows of 16."""
    rows = _rows(emit, first, apart)
    # Rows i and i + 8 side by side, then 8 x 8 words turned in both halves at once.
    both = [_shuffle(emit, _ROW, rows[i], rows[i + 8], list(range(16))) for i in range(8)]
    _store_rows(emit, _turn(emit, both), to)


def _turn_a(emit: Emitter, first: str, apart: str, to: str) -> None:
    """16 rows of k, m along them, to 16 rows of m with eight pairs of k: 32 bytes each."""
    _store_rows(emit, _turn_back(emit, _paired_rows(emit, first, apart)), to)


def _unpack(emit: Emitter, a: str, b: str, *, high: bool, width: int) -> str:
    """Words (or pairs of them) of both in turn, from the lower or upper half of each 16 bytes."""
    order = []
    for quarter in range(0, 16, 4):
        if width == 1:
            first = quarter + 2 * high
            order += [first, 16 + first, first + 1, 17 + first]
        else:
            first = quarter + 2 * high
            order += [first, first + 1, 16 + first, 17 + first]
    return _shuffle(emit, _PAIR, a, b, order)


def _blocks(emit: Emitter, rows: list[str]) -> list[str]:
    """4 x 4 words turned within each 16 bytes of four vectors."""
    a = [_unpack(emit, rows[i], rows[i + 1], high=h, width=1) for i in (0, 2) for h in (False, True)]
    # a: (01 low, 01 high, 23 low, 23 high)
    return [
        _unpack(emit, a[0], a[2], high=False, width=2),
        _unpack(emit, a[0], a[2], high=True, width=2),
        _unpack(emit, a[1], a[3], high=False, width=2),
        _unpack(emit, a[1], a[3], high=True, width=2),
    ]


def _turn(emit: Emitter, both: list[str]) -> list[str]:
    """both[i]: row i, then row i + 8, of 8 words; returns column j of all 16 rows for each j."""
    low, high = _blocks(emit, both[:4]), _blocks(emit, both[4:])
    # low[j]: rows 0-3 of columns j (16 bytes 0), j + 4 (1), rows 8-11 of columns j (2), j + 4 (3)
    first = [*range(0, 4), *range(16, 20), *range(8, 12), *range(24, 28)]
    second = [i + 4 for i in first]
    columns = [_shuffle(emit, _PAIR, low[j], high[j], first) for j in range(4)]
    return columns + [_shuffle(emit, _PAIR, low[j], high[j], second) for j in range(4)]


def _turn_back(emit: Emitter, rows: list[str]) -> list[str]:
    """8 rows of 16 words to 16 rows of 8, two to a vector."""
    low, high = _blocks(emit, rows[:4]), _blocks(emit, rows[4:])
    # low[j]: words 0-3 of columns j, j + 4, j + 8, j + 12; high[j]: words 4-7 of them
    found = [""] * 8
    for quarter in range(4):
        for pair in (0, 1):
            even, odd = 2 * pair, 2 * pair + 1
            q = 4 * quarter
            merged = [
                _shuffle(emit, _PAIR, low[j], high[j], [*range(q, q + 4), *range(16 + q, 20 + q)]) for j in (even, odd)
            ]
            found[2 * quarter + pair] = _shuffle(emit, _ROW, merged[0], merged[1], list(range(16)))
    return found
