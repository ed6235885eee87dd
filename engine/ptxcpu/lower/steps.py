"""Registers with a root (`ptxcpu/roots.py`): the root's vector as an array in memory, and a scalar beside it.

What is known of the lanes of a root is asked for where an access is lowered, but found out where the root is computed, so
the code there is written last (`finish_roots`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, vec
from ptxtrain.engine.ptxcpu.lower.places import space_of
from ptxtrain.engine.ptxcpu.roots import Root, step_of
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Address, Instruction, Operand, Reg

_MARK = "  ; root "


@dataclass(slots=True)
class Kept:
    """A root in memory: the array of its lanes' values, and the slots of what is known of them, by question."""

    array: str
    bits: int
    value: str = ""  # the vector, where the root is computed
    known: dict[tuple[str, int], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stepped:
    """The lanes' addresses of one access: `array[lane] + moved`, in the root's bits, and `offset` from there.

    32 bits are an offset into shared memory, 64 a host address, in shared memory (`is_shared`) an offset too.
    """

    kept: Kept
    moved: str
    offset: int
    is_shared: bool


def arguments(ctx: Context, at: Stepped) -> str:
    """The addresses as a helper takes them; see `parameters`."""
    emit = ctx.emit
    if at.kept.bits == 32:
        start = emit.op(f"getelementptr i8, ptr %shared, i64 {at.offset}") if at.offset else "%shared"
        return f"ptr {at.kept.array}, i32 {at.moved}, ptr {start}"
    return f"ptr {at.kept.array}, i64 {_moved_by(ctx, at)}"


def _moved_by(ctx: Context, at: Stepped) -> str:
    """All that is added to a root of 64 bits."""
    emit = ctx.emit
    moved = emit.op(f"add i64 {at.moved}, {at.offset}") if at.offset else at.moved
    return emit.op(f"add i64 {moved}, {emit.op('ptrtoint ptr %shared to i64')}") if at.is_shared else moved


def parameters(prefix: str, bits: int) -> str:
    """The parameters of a helper that takes `arguments`."""
    return f"ptr %{prefix}.array, i{bits} %{prefix}.moved" + (f", ptr %{prefix}.start" if bits == 32 else "")


def lane_pointer(prefix: str, bits: int, lane: int, tag: str = "") -> list[str]:
    """Lines of a helper that make `%<prefix>.p<lane><tag>`, the pointer of one lane."""
    n = f"{prefix}.{lane}{tag}"
    lines = [
        f"  %{n}.at = getelementptr i{bits}, ptr %{prefix}.array, i64 {lane}",
        f"  %{n}.v = load i{bits}, ptr %{n}.at",
        f"  %{n}.sum = add i{bits} %{n}.v, %{prefix}.moved",
    ]
    return [*lines, *address_lines(prefix, bits, f"%{n}.sum", f"%{prefix}.p{lane}{tag}")]


def address_lines(prefix: str, bits: int, value: str, name: str) -> list[str]:
    """Lines of a helper that make the pointer `name` from a sum of root and scalar."""
    if bits == 64:
        return [f"  {name} = inttoptr i64 {value} to ptr"]
    return [
        f"  {name}.wide = zext i32 {value} to i64",
        f"  {name} = getelementptr i8, ptr %{prefix}.start, i64 {name}.wide",
    ]


def stepped(ctx: Context, ins: Instruction, address: Operand) -> Stepped | None:
    """The addresses of an access of global or shared memory by a register with a root."""
    if not isinstance(address, Address) or not isinstance(address.base, Reg):
        return None
    root = ctx.roots.get(address.base.name)
    space = "shared" if ins.opcode in ("ldmatrix",) else space_of(ins)
    if root is None or space == "local" or space == "param":
        return None
    return _stepped(ctx, address, root, space)


def stepped_in(ctx: Context, address: Operand, space: str) -> Stepped | None:
    """As `stepped`, in a state space that the caller knows."""
    if not isinstance(address, Address) or not isinstance(address.base, Reg):
        return None
    root = ctx.roots.get(address.base.name)
    return None if root is None else _stepped(ctx, address, root, space)


def _stepped(ctx: Context, address: Address, root: Root, space: str) -> Stepped | None:
    emit, base = ctx.emit, address.base
    assert isinstance(base, Reg)
    bits = TYPE_BITS[base.type]
    if space != "shared" and bits != 64:
        return None
    kept = _kept(ctx, root)
    moved = emit.op(f"load i{bits}, ptr {_moved(ctx, base)}")
    return Stepped(kept, moved, address.offset, space == "shared")


def first_pointer(ctx: Context, at: Stepped, lane: int = 0) -> str:
    """One lane's pointer."""
    emit, bits = ctx.emit, at.kept.bits
    value = emit.op(f"add i{bits} {_lane(ctx, at.kept, lane)}, {at.moved}")
    if bits == 32:
        value = emit.op(f"zext i32 {value} to i64")
    if at.is_shared:
        pointer = emit.op(f"getelementptr i8, ptr %shared, i64 {value}")
    else:
        pointer = emit.op(f"inttoptr i64 {value} to ptr")
    return emit.op(f"getelementptr i8, ptr {pointer}, i64 {at.offset}") if at.offset else pointer


def row_stride(ctx: Context, at: Stepped) -> str:
    """From lane 0 to lane 1, in bytes, as an i64."""
    emit, bits = ctx.emit, at.kept.bits
    a, b = _lane(ctx, at.kept, 0), _lane(ctx, at.kept, 1)
    step = emit.op(f"sub i{bits} {b}, {a}")
    return emit.op(f"sext i32 {step} to i64") if bits == 32 else step


def all_pointers(ctx: Context, at: Stepped) -> str:
    """The lanes' pointers as a vector."""
    emit, bits = ctx.emit, at.kept.bits
    t = vec(f"i{bits}", LANES)
    values = emit.op(f"load {t}, ptr {at.kept.array}, align 64")
    if bits == 64:
        values = emit.op(f"add {t} {values}, {emit.broadcast('i64', _moved_by(ctx, at))}")
        return emit.op(f"inttoptr {t} {values} to <32 x ptr>")
    values = emit.op(f"add {t} {values}, {emit.broadcast('i32', at.moved)}")
    start = emit.op(f"getelementptr i8, ptr %shared, i64 {at.offset}")
    return emit.op(f"getelementptr i8, ptr {start}, <32 x i64> {emit.op(f'zext {t} {values} to <32 x i64>')}")


def is_quads(ctx: Context, at: Stepped, size: int) -> str:
    """An i1: four lanes in a row are always `size` bytes apart, lanes 4 q and up."""
    return ctx.emit.op(f"load i1, ptr {_question(ctx, at.kept, 'quads', size)}")


def is_rows(ctx: Context, at: Stepped, order: int) -> str:
    """An i1: the lanes' rows of four 8 x 8 matrices are 16 rows of 32 bytes at one distance.

    Order 1: matrices 0 and 1 are the left half of rows 0 to 15; order 2: matrices 0 and 1 are the halves of rows 0 to 7.
    """
    return ctx.emit.op(f"load i1, ptr {_question(ctx, at.kept, 'rows', order)}")


def note_step(ctx: Context, ins: Instruction) -> None:
    """Keep root and scalar up with an instruction that has just been lowered."""
    if not ctx.roots or not ins.operands or not isinstance(ins.operands[0], Reg):
        return
    target = ins.operands[0]
    root = ctx.roots.get(target.name)
    if root is None:
        return
    emit, bits = ctx.emit, TYPE_BITS[target.type]
    if ins is root.instruction:
        kept = _kept(ctx, root)
        kept.value = ctx.get(target, f"i{bits}", LANES)
        emit.lines.append(f"{_MARK}{id(ins)}")
        emit.do(f"store i{bits} 0, ptr {_moved(ctx, target)}")
        return
    step = step_of(ins, ctx.analysis)
    assert step is not None
    source, by = step
    value = emit.op(f"load i{bits}, ptr {_moved(ctx, source)}")
    if len(by) == 1:
        amount = ctx.get(by[0], f"i{bits}", 1)
    elif by:
        narrow = TYPE_BITS[ins.types[0]]
        factors = [ctx.get(o, f"i{narrow}", 1) for o in by]
        if narrow != bits:
            extend = "sext" if ins.types[0].startswith("s") else "zext"
            factors = [emit.op(f"{extend} i{narrow} {f} to i{bits}") for f in factors]
        amount = emit.op(f"mul i{bits} {factors[0]}, {factors[1]}")
    if by:
        value = emit.op(f"{'sub' if ins.opcode == 'sub' else 'add'} i{bits} {value}, {amount}")
    emit.do(f"store i{bits} {value}, ptr {_moved(ctx, target)}")


def finish_roots(ctx: Context) -> None:
    """Write the code behind each root: its array, and the answers to what was asked of it."""
    emit = ctx.emit
    lines, emit.lines = emit.lines, []
    for line in lines:
        if not line.startswith(_MARK):
            emit.lines.append(line)
            continue
        kept = ctx.kept[int(line[len(_MARK) :])]
        t = vec(f"i{kept.bits}", LANES)
        emit.do(f"store {t} {kept.value}, ptr {kept.array}, align 64")
        for (kind, number), slot in kept.known.items():
            if kind == "lane":
                emit.do(f"store i{kept.bits} {emit.op(f'extractelement {t} {kept.value}, i32 {number}')}, ptr {slot}")
                continue
            wanted = _quads(ctx, kept, number) if kind == "quads" else _rows(ctx, kept, number)
            differs = emit.op(f"icmp ne {t} {kept.value}, {wanted}")
            bits = emit.op(f"bitcast <32 x i1> {differs} to i32")
            emit.do(f"store i1 {emit.op(f'icmp eq i32 {bits}, 0')}, ptr {slot}")


def _kept(ctx: Context, root: Root) -> Kept:
    key = id(root.instruction)
    found = ctx.kept.get(key)
    if found is None:
        bits = TYPE_BITS[root.register.type]
        found = ctx.kept[key] = Kept(ctx.emit.alloca(f"[32 x i{bits}], align 64", "root"), bits)
    return found


def _moved(ctx: Context, reg: Reg) -> str:
    slot = ctx.moved.get(reg.name)
    if slot is None:
        bits = TYPE_BITS[reg.type]
        slot = ctx.moved[reg.name] = ctx.emit.alloca(f"i{bits}", "moved")
        ctx.emit.allocas.append(f"  store i{bits} 0, ptr {slot}")
    return slot


def _lane(ctx: Context, kept: Kept, lane: int) -> str:
    """One lane's value of a root."""
    return ctx.emit.op(f"load i{kept.bits}, ptr {_question(ctx, kept, 'lane', lane)}")


def _question(ctx: Context, kept: Kept, kind: str, number: int) -> str:
    slot = kept.known.get((kind, number))
    if slot is None:
        t = f"i{kept.bits}" if kind == "lane" else "i1"
        slot = kept.known[kind, number] = ctx.emit.alloca(t, "known")
        ctx.emit.allocas.append(f"  store {t} 0, ptr {slot}")
    return slot


def _quads(ctx: Context, kept: Kept, size: int) -> str:
    """Each lane's value as its quad's first lane has it."""
    emit, t = ctx.emit, vec(f"i{kept.bits}", LANES)
    order = ", ".join(f"i32 {lane // 4 * 4}" for lane in range(LANES))
    first = emit.op(f"shufflevector {t} {kept.value}, {t} poison, <32 x i32> <{order}>")
    steps = ", ".join(f"i{kept.bits} {size * (lane % 4)}" for lane in range(LANES))
    return emit.op(f"add {t} {first}, <{steps}>")


def _rows(ctx: Context, kept: Kept, order: int) -> str:
    """Each lane's value as lanes 0 and 1 have it."""
    emit, bits, t = ctx.emit, kept.bits, vec(f"i{kept.bits}", LANES)
    lanes = range(LANES)
    if order == 1:
        rows, halves = [lane % 16 for lane in lanes], [lane // 16 for lane in lanes]
    else:
        rows, halves = [lane % 8 + lane // 16 * 8 for lane in lanes], [lane // 8 % 2 for lane in lanes]
    first, second = (emit.op(f"extractelement {t} {kept.value}, i32 {i}") for i in (0, 1))
    stride = emit.op(f"sub i{bits} {second}, {first}")
    numbers = ", ".join(f"i{bits} {row}" for row in rows)
    distance = emit.op(f"mul {t} {emit.broadcast(f'i{bits}', stride)}, <{numbers}>")
    start = emit.op(f"add {t} {emit.broadcast(f'i{bits}', first)}, {distance}")
    return emit.op(f"add {t} {start}, <{', '.join(f'i{bits} {16 * h}' for h in halves)}>")
