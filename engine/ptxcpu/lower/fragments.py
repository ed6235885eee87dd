"""Fragments: the registers of matrix operands, kept in memory, in a layout that suits what they are used for.

Matrix helpers and tile instructions take addresses, so these registers live in stack slots, those of one `{…}` operand side
by side. Plainly a register is 32 words in lane order. On processors with matrix tiles a fragment that is only ever one factor
of m16n8k16 products of brain floats lies in memory as the tile that the processor loads; g = lane / 4, t = lane % 4:

    A   16 rows of 32 bytes, k along the row: register i is 16 bytes of rows 8 (i % 2) + g at byte 16 (i / 2)
    B   8 rows of 32 bytes, a row for each pair of k, a word for each column: register i is rows 4 i + t, word g
    C   16 rows of 8 f32: registers 0 and 1 are the even and odd columns of rows g, 2 and 3 of rows 8 + g

Reading or writing one register of such a fragment is a load and a shuffle; ldmatrix writes the layout as it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.cfg import Block
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, Emitter
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Instruction, Reg, Vector
from ptxtrain.engine.ptxcpu.uniformity import Analysis

MATRIX_OPCODES = frozenset({"mma", "ldmatrix", "stmatrix"})
WORD = 4 * LANES  # bytes of one register of a warp
TILE = 4 * WORD  # bytes of an A or C tile
WORDS = "<32 x i32>"
_PAIR = "<64 x i32>"

_GROUP = {"A": 4, "B": 2, "C": 4}  # registers of one tile


@dataclass(frozen=True, slots=True)
class Placement:
    """A register's place: its fragment, its position there, and the fragment's layout."""

    fragment: int
    position: int
    layout: str | None


def is_tile_product(ins: Instruction) -> bool:
    """Whether an mma is one that matrix tiles can do."""
    return ins.opcode == "mma" and ins.has("m16n8k16") and ins.types == ("f32", "bf16", "bf16", "f32")


def place_fragments(blocks: Sequence[Block], analysis: Analysis, *, tiles: bool) -> dict[str, Placement]:
    """Registers of matrix operands -> places, the longest operands first.

    A shorter operand that is a run of a longer one shares its place; one that is not is copied at each use. A fragment has
    a tile's layout if `tiles` are used and everything that multiplies with it takes it as the same factor.
    """
    matrix = [ins for block in blocks for ins in block.body if ins.opcode in MATRIX_OPCODES]
    operands: dict[tuple[str, ...], None] = {}
    for ins in matrix:
        for operand in ins.operands:
            if isinstance(operand, Vector) and all(_in_memory(e, analysis) for e in operand.elements):
                operands[tuple(e.name for e in operand.elements if isinstance(e, Reg))] = None
    placed: dict[str, tuple[int, int]] = {}
    for number, names in enumerate(sorted(operands, key=len, reverse=True)):
        if len(set(names)) == len(names) and not any(n in placed for n in names):
            placed.update({name: (number, i) for i, name in enumerate(names)})
    layouts = _layouts(matrix, placed) if tiles else {}
    return {name: Placement(number, i, layouts.get(number)) for name, (number, i) in placed.items()}


def _in_memory(element: object, analysis: Analysis) -> bool:
    return isinstance(element, Reg) and TYPE_BITS[element.type] == 32 and analysis.of(element).stride is None


def _layouts(matrix: Sequence[Instruction], placed: dict[str, tuple[int, int]]) -> dict[int, str]:
    wanted: dict[int, set[str]] = {}
    for ins in matrix:
        if ins.opcode == "ldmatrix":
            continue
        roles = "CABC" if is_tile_product(ins) else "----"
        for operand, role in zip(ins.operands, roles, strict=False):
            elements = operand.elements if isinstance(operand, Vector) else (operand,)
            places = [placed.get(e.name) if isinstance(e, Reg) else None for e in elements]
            first = places[0]
            run = first is not None and places == [(first[0], first[1] + i) for i in range(len(places))]
            aligned = run and first is not None and role in _GROUP and first[1] % _GROUP[role] == 0
            for place in places:
                if place is not None:
                    wanted.setdefault(place[0], set()).add(role if aligned else "-")
    return {number: roles.pop() for number, roles in wanted.items() if len(roles) == 1 and "-" not in roles}


def fragment_bytes(size: int) -> int:
    """Memory of a fragment of `size` registers, a whole number of tiles."""
    return (size + 3) // 4 * TILE


# One register of a tile


def _order(layout: str, index: int) -> list[int]:
    """The words of the register's 64 (A, C) or 32 (B) word piece, by lane."""
    match layout:
        case "A":
            return [lane // 4 * 8 + 4 * (index // 2) + lane % 4 for lane in range(LANES)]
        case "C":
            return [2 * lane + index % 2 for lane in range(LANES)]
        case _:
            return [lane % 4 * 8 + lane // 4 for lane in range(LANES)]


def _piece(layout: str, index: int) -> int:
    """The byte where the piece with the register begins."""
    return {"A": 2 * WORD * (index % 2), "C": 2 * WORD * (index // 2), "B": WORD * index}[layout]


def _words(order: Sequence[int]) -> str:
    return f"<{len(order)} x i32> <" + ", ".join(f"i32 {i}" for i in order) + ">"


def read_register(emit: Emitter, tile: str, layout: str, index: int) -> str:
    """Register `index` of a tile, in lane order."""
    at = emit.op(f"getelementptr i8, ptr {tile}, i64 {_piece(layout, index)}")
    t = WORDS if layout == "B" else _PAIR
    piece = emit.op(f"load {t}, ptr {at}, align 64")
    return emit.op(f"shufflevector {t} {piece}, {t} poison, {_words(_order(layout, index))}")


def write_register(emit: Emitter, tile: str, layout: str, index: int, value: str) -> None:
    """Put a register's lanes where they belong in a tile."""
    at = emit.op(f"getelementptr i8, ptr {tile}, i64 {_piece(layout, index)}")
    order = _order(layout, index)
    if layout == "B":
        inverse = [order.index(word) for word in range(LANES)]
        moved = emit.op(f"shufflevector {WORDS} {value}, {WORDS} poison, {_words(inverse)}")
        emit.do(f"store {WORDS} {moved}, ptr {at}, align 64")
        return
    piece = emit.op(f"load {_PAIR}, ptr {at}, align 64")
    spread = emit.op(f"shufflevector {WORDS} {value}, {WORDS} poison, {_words([i % LANES for i in range(2 * LANES)])}")
    lane_of = {word: lane for lane, word in enumerate(order)}
    mixed = [2 * LANES + lane_of[word] if word in lane_of else word for word in range(2 * LANES)]
    both = emit.op(f"shufflevector {_PAIR} {piece}, {_PAIR} {spread}, {_words(mixed)}")
    emit.do(f"store {_PAIR} {both}, ptr {at}, align 64")


def tile_address(emit: Emitter, slot: str, placement: Placement) -> tuple[str, int]:
    """The tile that a placed register is in, and its index there."""
    group = _GROUP[placement.layout or "C"]
    number, index = divmod(placement.position, group)
    offset = number * group * WORD
    return (emit.op(f"getelementptr i8, ptr {slot}, i64 {offset}") if offset else slot), index


def matrix_orders(layout: str | None, *, transposed: bool) -> list[int]:
    """The halfwords of an 8 x 8 matrix of rows in the order in which a register of `layout` takes them.

    Element 2 l + h of a register is M[l / 4][2 (l % 4) + h], or M[2 (l % 4) + h][l / 4] transposed; B has word
    8 (l % 4) + l / 4 for lane l.
    """
    plain = []
    for lane in range(LANES):
        g, t = divmod(lane, 4)
        for half in (0, 1):
            row, column = (2 * t + half, g) if transposed else (g, 2 * t + half)
            plain.append(8 * row + column)
    if layout != "B":
        return plain
    found = [0] * (2 * LANES)
    for lane in range(LANES):
        g, t = divmod(lane, 4)
        for half in (0, 1):
            found[2 * (8 * t + g) + half] = plain[2 * lane + half]
    return found
