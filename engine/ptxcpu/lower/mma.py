"""Warp matrix instructions: mma.sync, ldmatrix and stmatrix, over fragments that stay in memory (see `fragments`).

Each instruction is a call of a small helper that gets the fragments' addresses: measured for m16n8k16 bf16 on a Zen 4, 24.5 ns
a call against 62 with the arithmetic in line, where LLVM shuffles and spills, and a tenth of the compile time.

Layouts (PTX ISA, *Matrix fragments for mma*), g = lane / 4, t = lane % 4, low half of a register first:

    A m16k16   a0 (row g, k 2t, 2t+1)  a1 (row g+8)  a2 (row g, k 2t+8, 2t+9)  a3 (row g+8, k 2t+8, 2t+9)
    B k16n8    b0 (k 2t, 2t+1; n = g)  b1 (k 2t+8, 2t+9; n = g)
    C m16n8    c0, c1 (row g, n 2t, 2t+1)  c2, c3 (row g+8)     f16: two packed registers
    tf32       a0 (g, t) a1 (g+8, t) a2 (g, t+4) a3 (g+8, t+4)   b0 (k t, n g) b1 (k t+4)

Products of brain floats are done in one of three ways, by what the processor has (`jit.bf16_products`), and their bits differ:

    tiles   matrix tiles: the products of even and of odd k are each summed from zero, then added to C; subnormals are zero
    dot     vdpbf16ps: ascending k, within a pair the higher first, one fused multiply-add each; subnormals are zero
    fma     the same order by f32 fused multiply-adds, subnormals kept: the same bits on every machine
"""

from __future__ import annotations

from collections.abc import Iterable

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, Emitter, splat
from ptxtrain.engine.ptxcpu.lower.fragments import (
    WORD,
    is_tile_product,
    matrix_orders,
)
from ptxtrain.engine.ptxcpu.lower.matrices import bring
from ptxtrain.engine.ptxcpu.lower.places import lane_array, space_of
from ptxtrain.engine.ptxcpu.lower.slots import address_of, copy_back, note_writes, run_of
from ptxtrain.engine.ptxcpu.lower.tiles import tile_product
from ptxtrain.engine.ptxcpu.tree import Instruction

_I, _F = "<32 x i32>", "<32 x float>"


def _call(ctx: Context, name: str, arguments: Iterable[str]) -> None:
    """Call a helper."""
    ctx.emit.do(f'call void @"{name}"({", ".join(f"ptr {a}" for a in arguments)})')


_ATTRIBUTES = "noinline nounwind memory(argmem: readwrite)"


class _Helper:
    """Builds a helper function of pointers: registers loaded by position, results stored."""

    def __init__(self, name: str, pointers: str, more: str = "") -> None:
        self.emit = Emitter()
        self.name = name
        self.parameters = ", ".join(f"ptr %{p}" for p in pointers.split()) + more

    def row(self, index: int) -> str:
        """The address of row `index` of an ldmatrix or stmatrix."""
        at = self.emit.op(f"getelementptr ptr, ptr %rows, i64 {index}")
        return self.emit.op(f"getelementptr i8, ptr {self.emit.op(f'load ptr, ptr {at}')}, i64 %offset")

    def load(self, pointer: str, position: int, type_: str = _I) -> str:
        at = self.emit.op(f"getelementptr i8, ptr %{pointer}, i64 {WORD * position}")
        return self.emit.op(f"load {type_}, ptr {at}, align 64")

    def store(self, pointer: str, position: int, value: str, type_: str = _I) -> None:
        at = self.emit.op(f"getelementptr i8, ptr %{pointer}, i64 {WORD * position}")
        self.emit.do(f"store {type_} {value}, ptr {at}, align 64")

    def text(self) -> tuple[str, dict[str, str]]:
        """The definition, and the declarations it needs."""
        body = "\n".join(self.emit.lines)
        return (
            f'define internal void @"{self.name}"({self.parameters}) {_ATTRIBUTES} {{\n{body}\n  ret void\n}}',
            self.emit.declarations,
        )


def _add(ctx: Context, helper: _Helper) -> str:
    text, declarations = helper.text()
    for name, line in declarations.items():
        ctx.emit.declarations.setdefault(name, line)
    return text


# mma


def _quad(index: int) -> list[int]:
    """Lane (g, t) takes lane (g, index): a row's element, whatever the column."""
    return [lane // 4 * 4 + index for lane in range(LANES)]


def _column(index: int, odd: int) -> list[int]:
    """Lane (g, t) takes element `index` of column 2t + odd, whatever the row."""
    return [8 * (lane % 4) + 4 * odd + index for lane in range(LANES)]


def _shuffle(emit: Emitter, type_: str, value: str, order: list[int]) -> str:
    lanes = ", ".join(f"i32 {i}" for i in order)
    return emit.op(f"shufflevector {type_} {value}, {type_} poison, <{len(order)} x i32> <{lanes}>")


def _halves(emit: Emitter, value: str, type_: str) -> list[tuple[str, str]]:
    """Both f32 vectors of a register of pairs, the higher k first."""
    if type_ == "bf16":
        low = emit.op(f"shl {_I} {value}, {splat('i32', 16, LANES)}")
        high = emit.op(f"and {_I} {value}, {splat('i32', -65536, LANES)}")
        return [("high", emit.op(f"bitcast {_I} {high} to {_F}")), ("low", emit.op(f"bitcast {_I} {low} to {_F}"))]
    pairs = emit.op(f"bitcast {_I} {value} to <64 x half>")
    found = []
    for name, start in (("high", 1), ("low", 0)):
        lanes = ", ".join(f"i32 {i}" for i in range(start, 64, 2))
        half = emit.op(f"shufflevector <64 x half> {pairs}, <64 x half> poison, <32 x i32> <{lanes}>")
        found.append((name, emit.op(f"fpext <32 x half> {half} to {_F}")))
    return found


def _fma(emit: Emitter, a: str, b: str, c: str) -> str:
    return emit.call("llvm.fma.v32f32", _F, (_F, a), (_F, b), (_F, c))


def _multiply(emit: Emitter, type_: str, a: list[str], b: list[str], c: list[str]) -> list[str]:
    """c + a b on registers; a is [row half][k half] flattened as in the ISA, all of them i32 vectors; c f32."""
    c = list(c)
    for k_half, b_word in enumerate(b):
        rows = a[2 * k_half : 2 * k_half + 2]
        if type_ == "tf32":
            parts_b = [("", emit.op(f"bitcast {_I} {_cut(emit, b_word)} to {_F}"))]
            parts_a = [[("", emit.op(f"bitcast {_I} {_cut(emit, row)} to {_F}"))] for row in rows]
        else:
            parts_b = _halves(emit, b_word, type_)
            parts_a = [_halves(emit, row, type_) for row in rows]
        for index in range(4):
            for part, (_, b_part) in enumerate(parts_b):
                columns = [_shuffle(emit, _F, b_part, _column(index, odd)) for odd in (0, 1)]
                for row_half, row in enumerate(parts_a):
                    value = _shuffle(emit, _F, row[part][1], _quad(index))
                    for odd in (0, 1):
                        slot = 2 * row_half + odd
                        c[slot] = _fma(emit, value, columns[odd], c[slot])
    return c


def _cut(emit: Emitter, word: str) -> str:
    """tf32 uses the upper 19 bits of its operands."""
    return emit.op(f"and {_I} {word}, {splat('i32', -8192, LANES)}")


def _multiply_dot(emit: Emitter, a: list[str], b: list[str], c: list[str]) -> list[str]:
    """As `_multiply` for bf16, by `vdpbf16ps`: 64 of them and 48 shuffles for m16n8k16."""
    parts = [[_half_of(emit, word, _F, "float", h) for h in (0, 1)] for word in c]
    dot = emit.declare("llvm.x86.avx512bf16.dpbf16ps.512", "<16 x float>", "<16 x float>, <32 x bfloat>, <32 x bfloat>")

    def pairs(value: str) -> str:
        return emit.op(f"bitcast <16 x i32> {value} to <32 x bfloat>")

    for k_half, b_word in enumerate(b):
        rows = [[_half_of(emit, word, _I, "i32", h) for h in (0, 1)] for word in a[2 * k_half : 2 * k_half + 2]]
        for index in range(4):
            columns = []
            for odd in (0, 1):
                columns.append(pairs(_shuffle(emit, _I, b_word, _column(index, odd)[:16])))
            for row_half, row in enumerate(rows):
                for half, word in enumerate(row):
                    value = pairs(_shuffle(emit, "<16 x i32>", word, _quad(index)[:16]))
                    for odd in (0, 1):
                        slot = 2 * row_half + odd
                        parts[slot][half] = emit.op(
                            f"call <16 x float> {dot}(<16 x float> {parts[slot][half]}, <32 x bfloat> {value}, "
                            f"<32 x bfloat> {columns[odd]})"
                        )
    order = ", ".join(f"i32 {i}" for i in range(LANES))
    return [
        emit.op(f"shufflevector <16 x float> {low}, <16 x float> {high}, <32 x i32> <{order}>") for low, high in parts
    ]


def _half_of(emit: Emitter, value: str, type_: str, scalar: str, half: int) -> str:
    order = ", ".join(f"i32 {16 * half + i}" for i in range(16))
    return emit.op(f"shufflevector {type_} {value}, {type_} poison, <16 x i32> <{order}>")


def multiply_tile(emit: Emitter, type_: str, a: list[str], b: list[str], c: list[str], *, dot: bool) -> list[str]:
    """c + a b for one m16n8 tile in registers: a and b i32 vectors as in the ISA, c four f32 vectors."""
    if dot and type_ == "bf16":
        return _multiply_dot(emit, a, b, c)
    return _multiply(emit, type_, a, b, c)


def unpack_f16(emit: Emitter, words: list[str]) -> list[str]:
    """f16 accumulators as f32: (low, high) of each register."""
    found = []
    for word in words:
        high, low = (v for _, v in _halves(emit, word, "f16"))
        found += [low, high]
    return found


def pack_f16(emit: Emitter, values: list[str]) -> list[str]:
    words = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        halves = [emit.op(f"fptrunc {_F} {v} to <32 x half>") for v in (low, high)]
        order = ", ".join(f"i32 {i // 2 + LANES * (i % 2)}" for i in range(2 * LANES))
        both = emit.op(f"shufflevector <32 x half> {halves[0]}, <32 x half> {halves[1]}, <64 x i32> <{order}>")
        words.append(emit.op(f"bitcast <64 x half> {both} to {_I}"))
    return words


_K = {"tf32": {"m16n8k8": 2, "m16n8k4": 1}, "bf16": {"m16n8k16": 2, "m16n8k8": 1}, "f16": {"m16n8k16": 2, "m16n8k8": 1}}


def lower_mma(ctx: Context, ins: Instruction) -> None:
    """mma.sync.aligned.{m16n8k16, m16n8k8, m16n8k4}.row.col.D.A.B.C d, a, b, c."""
    types = ins.types
    shape = next((m for m in ins.modifiers if m.startswith("m16n8k")), "")
    if len(types) != 4 or types[1] != types[2] or types[0] != types[3] or types[0] not in ("f32", "f16"):
        raise ctx.refuse(ins, "this mma is not known: f32 or f16 sums of bf16, f16 or tf32")
    steps = _K.get(types[1], {}).get(shape)
    if steps is None or not (ins.has("row") and ins.has("col")):
        raise ctx.refuse(ins, f"mma of shape {shape or 'unknown'} on {types[1]} is not known")
    if ctx.products == "tiles" and is_tile_product(ins):
        tile_product(ctx, ins)
        return
    name = f"mma.{shape}.{types[1]}.{types[0]}"
    if name not in ctx.helpers:
        helper = _Helper(name, "d a b c")
        emit = helper.emit
        a = [helper.load("a", i) for i in range(2 * steps)]
        b = [helper.load("b", i) for i in range(steps)]
        if types[0] == "f32":
            c = [helper.load("c", i, _F) for i in range(4)]
        else:
            c = unpack_f16(emit, [helper.load("c", i) for i in range(2)])
        d = multiply_tile(emit, types[1], a, b, c, dot=ctx.products == "dot")
        if types[0] == "f32":
            for i, value in enumerate(d):
                helper.store("d", i, value, _F)
        else:
            for i, value in enumerate(pack_f16(emit, d)):
                helper.store("d", i, value)
        ctx.helpers[name] = _add(ctx, helper)
    target = ins.operands[0]
    d_slot, copied = address_of(ctx, target, read=False)
    slots = [address_of(ctx, o, read=True)[0] for o in ins.operands[1:4]]
    _call(ctx, name, (d_slot, *slots))
    if copied:
        copy_back(ctx, target, d_slot)
    else:
        note_writes(ctx, target)


# ldmatrix and stmatrix


def _matrices(ctx: Context, ins: Instruction) -> int:
    count = next((int(m[1:]) for m in ins.modifiers if m in ("x1", "x2", "x4")), 0)
    if not count or not ins.has("m8n8") or ins.types[-1:] != ("b16",):
        raise ctx.refuse(ins, "this matrix form is not known: m8n8, x1, x2 or x4, b16")
    return count


def lower_ldmatrix(ctx: Context, ins: Instruction) -> None:
    """Lane l of each matrix gets row l / 4, elements 2 (l % 4) and the next; .trans: the matrix transposed.

    Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i. A matrix that is not transposed is its eight rows,
    one after another; a fragment in a tile's layout is written as the tile has it.
    """
    count, transposed = _matrices(ctx, ins), ins.has("trans")
    target = ins.operands[0]
    run = run_of(ctx, target)
    layout = run[1] if run is not None and run[1] in ("A", "B", "B2") and run[2] == 0 else None
    if layout in ("A", "B2") and count != 4:
        layout = None
    name = f"ldmatrix.x{count}{'.trans' if transposed else ''}.to.{layout}"
    if name not in ctx.helpers:
        helper = _Helper(name, "d rows", ", i64 %offset")
        bring(helper.emit, layout, count, transposed=transposed, row=helper.row)
        # The rows lie in shared memory, so the helper reads more than its arguments' memory.
        ctx.helpers[name] = _add(ctx, helper).replace("memory(argmem: readwrite)", "")
    rows, offset = lane_array(ctx, ins, ins.operands[1], space_of(ins))
    slot, copied = address_of(ctx, target, layout, read=False)
    note_writes(ctx, target)
    ctx.emit.do(f'call void @"{name}"(ptr {slot}, ptr {rows}, i64 {offset})')
    if copied:
        copy_back(ctx, target, slot, layout)


def lower_stmatrix(ctx: Context, ins: Instruction) -> None:
    """The reverse of ldmatrix."""
    count, transposed = _matrices(ctx, ins), ins.has("trans")
    name = f"stmatrix.x{count}{'.trans' if transposed else ''}"
    if name not in ctx.helpers:
        helper = _Helper(name, "s rows", ", i64 %offset")
        emit = helper.emit
        inverse = [0] * 64
        for position, source in enumerate(matrix_orders(None, transposed=True)):
            inverse[source] = position
        for matrix in range(count):
            whole = helper.load("s", matrix)
            if transposed:
                halves = emit.op(f"bitcast {_I} {whole} to <64 x i16>")
                whole = emit.op(f"bitcast <64 x i16> {_shuffle(emit, '<64 x i16>', halves, inverse)} to {_I}")
            for row in range(8):
                order = ", ".join(f"i32 {4 * row + i}" for i in range(4))
                part = emit.op(f"shufflevector {_I} {whole}, {_I} poison, <4 x i32> <{order}>")
                emit.do(f"store <4 x i32> {part}, ptr {helper.row(8 * matrix + row)}, align 16")
        ctx.helpers[name] = _add(ctx, helper).replace("memory(argmem: readwrite)", "")
    rows, offset = lane_array(ctx, ins, ins.operands[0], space_of(ins))
    slot, _ = address_of(ctx, ins.operands[1], read=True)
    ctx.emit.do(f'call void @"{name}"(ptr {slot}, ptr {rows}, i64 {offset})')


MATRIX = {"mma": lower_mma, "ldmatrix": lower_ldmatrix, "stmatrix": lower_stmatrix}
