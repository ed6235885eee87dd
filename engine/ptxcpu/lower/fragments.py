"""Fragments: the registers of matrix operands, kept in memory, in a layout that suits what they are used for.

Matrix helpers and tile instructions take addresses, so these registers live in stack slots, those of one `{…}` operand side
by side. Plainly a register is 32 words in lane order. On processors with matrix tiles a fragment that is only ever one factor
of m16n8k16 products of brain floats lies in memory as the tile that the processor loads; g = lane / 4, t = lane % 4:

    A   16 rows of 32 bytes, k along the row: register i is 16 bytes of rows 8 (i % 2) + g at byte 16 (i / 2)
    B   8 rows of 32 bytes, a row for each pair of k, a word for each column: register i is rows 4 i + t, word g
    C   16 rows of 8 f32, 64 bytes apart: registers 0 and 1 are the even and odd columns of rows g, 2 and 3 of rows 8 + g
    B2  two B side by side, rows of 64 bytes: what one ldmatrix.x4 brings for two products
    C2  two C side by side: the sums of two products that follow each other with the same A and the two
        halves of a B2, which are then one product of tiles (`pairs`)

Reading or writing one register of such a fragment is a load and a shuffle; ldmatrix writes the layout as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.cfg import Block
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, Emitter
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Instruction, Reg, Vector
from ptxtrain.engine.ptxcpu.uniformity import Analysis

MATRIX_OPCODES = frozenset({"mma", "ldmatrix", "stmatrix"})
WORD = 4 * LANES  # bytes of one register of a warp
TILE = 4 * WORD  # bytes of an A or C tile
WORDS = "<32 x i32>"

_GROUP = {"A": 4, "B": 2, "C": 4, "B2": 4, "C2": 8}  # registers of one tile
BYTES = {"A": TILE, "B": TILE, "C": 2 * TILE, "B2": TILE + 64, "C2": 2 * TILE}  # and its memory, read in rows of 64


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
    sizes: dict[int, int] = {}
    for number, _ in placed.values():
        sizes[number] = sizes.get(number, 0) + 1
    for number, layout in layouts.items():
        if layout == "B" and sizes[number] == 4:
            layouts[number] = "B2"
    layouts = {number: layout for number, layout in layouts.items() if sizes[number] == _GROUP[layout]}
    partners = _partners(blocks, placed, layouts, sizes)
    for name, (number, i) in placed.items():
        if number in partners:
            placed[name] = (partners[number], i + 4)
    for number in partners.values():
        layouts[number] = "C2"
    return {name: Placement(number, i, layouts.get(number)) for name, (number, i) in placed.items()}


def _run(operand: object, placed: dict[str, tuple[int, int]]) -> tuple[int, int] | None:
    """The fragment and first position of an operand that is a run of one fragment."""
    if not isinstance(operand, Vector):
        return None
    places = [placed.get(e.name) if isinstance(e, Reg) else None for e in operand.elements]
    first = places[0]
    if first is None or places != [(first[0], first[1] + i) for i in range(len(places))]:
        return None
    return first


def pairs(
    blocks: Sequence[Block], placed: dict[str, tuple[int, int]], layouts: dict[int, str]
) -> Iterator[tuple[Instruction, Instruction]]:
    """Products that follow each other with the same A, the two halves of a B2, and sums that grow in place."""
    for block in blocks:
        previous: Instruction | None = None
        for ins in block.body:
            if not is_tile_product(ins) or ins.guard is not None:
                previous = None
                continue
            if previous is not None and _is_pair(previous, ins, placed, layouts):
                yield previous, ins
                previous = None
            else:
                previous = ins


def _is_pair(
    first: Instruction, second: Instruction, placed: dict[str, tuple[int, int]], layouts: dict[int, str]
) -> bool:
    d1, a1, b1, c1 = first.operands[:4]
    d2, a2, b2, c2 = second.operands[:4]
    low, high = _run(b1, placed), _run(b2, placed)
    if low is None or high is None or layouts.get(low[0]) != "B2":
        return False
    halves = low[0] == high[0] and (low[1], high[1]) == (0, 2)
    return halves and a1 == a2 and d1 == c1 and d2 == c2 and d1 != d2


def _partners(
    blocks: Sequence[Block], placed: dict[str, tuple[int, int]], layouts: dict[int, str], sizes: dict[int, int]
) -> dict[int, int]:
    """C fragments that become the right half of another one's tile: their number -> the other's.

    A fragment that is paired with different ones in different places stays alone, and so do they.
    """
    left_of: dict[int, int] = {}
    right_of: dict[int, int] = {}
    spoilt: set[int] = set()
    for first, second in pairs(blocks, placed, layouts):
        left, right = _run(first.operands[0], placed), _run(second.operands[0], placed)
        if left is None or right is None:
            continue
        a, b = left[0], right[0]
        whole = all(layouts.get(n) == "C" and sizes[n] == 4 for n in (a, b))
        if (
            not whole
            or left_of.setdefault(b, a) != a
            or right_of.setdefault(a, b) != b
            or a in left_of
            or b in right_of
        ):
            spoilt |= {a, b}
    return {b: a for b, a in left_of.items() if not {a, b} & spoilt}


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


def paired(blocks: Sequence[Block], placed: dict[str, Placement]) -> Iterator[tuple[Instruction, Instruction]]:
    """The pairs whose sums got one tile."""
    places = {name: (place.fragment, place.position) for name, place in placed.items()}
    layouts = {place.fragment: place.layout for place in placed.values() if place.layout is not None}
    for first, second in pairs(blocks, places, layouts):
        left, right = _run(first.operands[0], places), _run(second.operands[0], places)
        if left is None or right is None or layouts.get(left[0]) != "C2":
            continue
        if left[1] == 0 and right == (left[0], 4):
            yield first, second


def fragment_bytes(size: int, layout: str | None) -> int:
    """Memory of a fragment of `size` registers."""
    return BYTES[layout] if layout is not None else (size + 3) // 4 * TILE


# One register of a tile


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of a tile that hold a register: where they begin, their distance and width, and the register's words by lane.

    Words are counted along the rows' used parts, one after another.
    """

    start: int  # bytes
    rows: int
    stride: int  # bytes
    words: int  # of a row that are used
    order: tuple[int, ...]


def _piece(layout: str, index: int) -> _Piece:
    def order(word: Callable[[int, int], int]) -> tuple[int, ...]:
        return tuple(word(lane // 4, lane % 4) for lane in range(LANES))

    if layout == "A":
        return _Piece(256 * (index % 2), 8, 32, 8, order(lambda g, t: 8 * g + 4 * (index // 2) + t))
    if layout[0] == "C":
        half, i = divmod(index, 4)
        stride = 64
        return _Piece(8 * stride * (i // 2) + 32 * half, 8, stride, 8, order(lambda g, t: 8 * g + 2 * t + i % 2))
    half, i = divmod(index, 2)
    stride = 64 if layout == "B2" else 32
    return _Piece(4 * stride * i + 32 * half, 4, stride, 8, order(lambda g, t: 8 * t + g))


def _words(order: Sequence[int]) -> str:
    return f"<{len(order)} x i32> <" + ", ".join(f"i32 {i}" for i in order) + ">"


def join(emit: Emitter, parts: list[str], width: int) -> str:
    """Concatenate vectors of i32, a power of two of them."""
    while len(parts) > 1:
        t = f"<{width} x i32>"
        parts = [
            emit.op(f"shufflevector {t} {a}, {t} {b}, {_words(range(2 * width))}")
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        width *= 2
    return parts[0]


def _load_piece(emit: Emitter, tile: str, piece: _Piece) -> tuple[str, int]:
    """The used words of a piece's rows as one vector, and their number."""
    total = piece.rows * piece.words
    if piece.stride == 4 * piece.words:
        at = emit.op(f"getelementptr i8, ptr {tile}, i64 {piece.start}")
        return emit.op(f"load <{total} x i32>, ptr {at}, align 32"), total
    rows = []
    for row in range(piece.rows):
        at = emit.op(f"getelementptr i8, ptr {tile}, i64 {piece.start + row * piece.stride}")
        rows.append(emit.op(f"load <{piece.words} x i32>, ptr {at}, align 32"))
    return join(emit, rows, piece.words), total


def read_register(emit: Emitter, tile: str, layout: str, index: int) -> str:
    """Register `index` of a tile, in lane order."""
    piece = _piece(layout, index)
    words, total = _load_piece(emit, tile, piece)
    t = f"<{total} x i32>"
    return emit.op(f"shufflevector {t} {words}, {t} poison, {_words(piece.order)}")


def write_register(emit: Emitter, tile: str, layout: str, index: int, value: str) -> None:
    """Put a register's lanes where they belong in a tile."""
    piece = _piece(layout, index)
    total = piece.rows * piece.words
    lane_of = {word: lane for lane, word in enumerate(piece.order)}
    if total == LANES:
        moved = emit.op(f"shufflevector {WORDS} {value}, {WORDS} poison, {_words([lane_of[w] for w in range(total)])}")
    else:
        words, _ = _load_piece(emit, tile, piece)
        twice = _words([i % LANES for i in range(total)])
        spread = emit.op(f"shufflevector {WORDS} {value}, {WORDS} poison, {twice}")
        mixed = [total + lane_of[word] if word in lane_of else word for word in range(total)]
        t = f"<{total} x i32>"
        moved = emit.op(f"shufflevector {t} {words}, {t} {spread}, {_words(mixed)}")
    if piece.stride == 4 * piece.words:
        at = emit.op(f"getelementptr i8, ptr {tile}, i64 {piece.start}")
        emit.do(f"store <{total} x i32> {moved}, ptr {at}, align 32")
        return
    for row in range(piece.rows):
        own = range(row * piece.words, (row + 1) * piece.words)
        t = f"<{total} x i32>"
        part = emit.op(f"shufflevector {t} {moved}, {t} poison, {_words(own)}")
        at = emit.op(f"getelementptr i8, ptr {tile}, i64 {piece.start + row * piece.stride}")
        emit.do(f"store <{piece.words} x i32> {part}, ptr {at}, align 32")


def register_function(layout: str, index: int, *, write: bool) -> tuple[str, str]:
    """The name and definition of a function that reads or writes a register of a double tile.

    Its rows are apart, so the code is long; the sums of a matmul are set once and read once, each by such a call.
    """
    name = f"{'put' if write else 'take'}.{layout}.{index}"
    emit = Emitter()
    if write:
        write_register(emit, "%tile", layout, index, "%value")
        head, last = f"void @{name}(ptr %tile, {WORDS} %value)", "ret void"
    else:
        value = read_register(emit, "%tile", layout, index)
        head, last = f"{WORDS} @{name}(ptr %tile)", f"ret {WORDS} {value}"
    body = "\n".join(emit.lines)
    return name, f"define internal {head} noinline nounwind memory(argmem: readwrite) {{\n{body}\n  {last}\n}}"


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
    if layout not in ("B", "B2"):
        return plain
    found = [0] * (2 * LANES)
    for lane in range(LANES):
        g, t = divmod(lane, 4)
        for half in (0, 1):
            found[2 * (8 * t + g) + half] = plain[2 * lane + half]
    return found
