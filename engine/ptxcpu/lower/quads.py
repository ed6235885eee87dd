"""Accesses by quads: lanes 4 q to 4 q + 3 side by side, quads anywhere. So do the fragments of matrix products reach memory.

No analysis finds the pattern (it is an address of lane / 4 and lane % 4), so a helper looks: where each quad's addresses follow
one another it makes eight accesses of four lanes, otherwise a gather or scatter. Measured on a Sapphire Rapids, whose
scatters are quick: a product with k = 32 takes an eighth less time, one with k = 128 a twentieth.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, Emitter
from ptxtrain.engine.ptxcpu.lower.fragments import join
from ptxtrain.engine.ptxcpu.lower.slots import rows_of_sums
from ptxtrain.engine.ptxcpu.lower.steps import Stepped, arguments, is_quads, lane_pointer, parameters
from ptxtrain.engine.ptxcpu.tree import Operand

QUAD = 4
SIZES = (1, 2, 4)  # words of a lane


def gather_quads(ctx: Context, pointers: str, count: int, mask: str | None) -> list[str]:
    """`count` vectors of 32 i32, lane l's from the words at its pointer; 0 in lanes that do not act."""
    name = f"gather.quads.{count}"
    ctx.helpers.setdefault(name, _gather_text(ctx, name, count))
    emit = ctx.emit
    slot = emit.alloca(f"[{count} x <32 x i32>], align 64", "quads")
    lanes = "-1" if mask is None else ctx.mask_bits(mask)
    emit.do(f"call void @{name}(ptr {slot}, <32 x ptr> {pointers}, i32 {lanes})")
    found = []
    for i in range(count):
        at = emit.op(f"getelementptr i8, ptr {slot}, i64 {4 * LANES * i}")
        found.append(emit.op(f"load <32 x i32>, ptr {at}, align 64"))
    return found


def scatter_quads(ctx: Context, pointers: str, values: list[str], mask: str | None) -> None:
    """Each lane's words to its pointer; where lanes write the same address the highest wins."""
    name = f"scatter.quads.{len(values)}"
    ctx.helpers.setdefault(name, _scatter_text(ctx, name, len(values)))
    lanes = "-1" if mask is None else ctx.mask_bits(mask)
    words = ", ".join(f"<32 x i32> {value}" for value in values)
    ctx.emit.do(f"call void @{name}(<32 x ptr> {pointers}, {words}, i32 {lanes})")


def _order(indices: list[int]) -> str:
    return f"<{len(indices)} x i32> <" + ", ".join(f"i32 {i}" for i in indices) + ">"


def _look(count: int) -> list[str]:
    """Lines up to a branch to %apart or %quad.0: whether quads act as a whole, and their addresses follow one another."""
    first = _order([lane // QUAD * QUAD for lane in range(LANES)])
    steps = ", ".join(f"i64 {4 * count * (lane % QUAD)}" for lane in range(LANES))
    return [
        "  %at = ptrtoint <32 x ptr> %where to <32 x i64>",
        f"  %first = shufflevector <32 x i64> %at, <32 x i64> poison, {first}",
        f"  %wanted = add <32 x i64> %first, <{steps}>",
        "  %strays = icmp ne <32 x i64> %at, %wanted",
        "  %stray = bitcast <32 x i1> %strays to i32",
        "  %acting = and i32 %stray, %lanes",
        f"  %heads = and i32 %lanes, {0x11111111}",
        "  %whole = mul i32 %heads, 15",
        "  %split = xor i32 %whole, %lanes",
        "  %odd = or i32 %acting, %split",
        "  %is_apart = icmp ne i32 %odd, 0",
        "  br i1 %is_apart, label %apart, label %quad.0",
    ]


def _each_quad(q: int) -> list[str]:
    """Lines that skip a quad which does not act."""
    return [
        f"quad.{q}:",
        f"  %bit.{q} = and i32 %lanes, {1 << (QUAD * q)}",
        f"  %acts.{q} = icmp ne i32 %bit.{q}, 0",
        f"  br i1 %acts.{q}, label %do.{q}, label %quad.{q + 1}",
        f"do.{q}:",
        f"  %p.{q} = extractelement <32 x ptr> %where, i32 {QUAD * q}",
    ]


def _gather_text(ctx: Context, name: str, count: int) -> str:
    quads, words = LANES // QUAD, QUAD * count
    lines = _look(count)
    # The quads' words as they lie in memory, in a buffer that starts as zeros, then taken apart.
    total = LANES * count
    entry = [f"  %buffer = alloca <{total} x i32>, align 64"]
    for q in range(quads):
        if q == 0:
            lines += [
                "quad.0:",
                f"  store <{total} x i32> zeroinitializer, ptr %buffer, align 64",
                "  br label %from.0",
            ]
        text = _each_quad(q)
        if q == 0:
            text[0] = "from.0:"
        lines += [
            *text,
            f"  %v.{q} = load <{words} x i32>, ptr %p.{q}, align 4",
            f"  %b.{q} = getelementptr i8, ptr %buffer, i64 {4 * words * q}",
            f"  store <{words} x i32> %v.{q}, ptr %b.{q}, align 4",
            f"  br label %quad.{q + 1}",
        ]
    lines += [f"quad.{quads}:", f"  %all = load <{total} x i32>, ptr %buffer, align 64"]
    for i in range(count):
        lines += [
            f"  %w.{i} = shufflevector <{total} x i32> %all, <{total} x i32> poison, {_order(list(range(i, total, count)))}",
            f"  %o.{i} = getelementptr i8, ptr %out, i64 {4 * LANES * i}",
            f"  store <32 x i32> %w.{i}, ptr %o.{i}, align 64",
        ]
    lines += ["  ret void", "apart:", "  %mask = bitcast i32 %lanes to <32 x i1>"]
    call = "llvm.masked.gather.v32i32.v32p0"
    ctx.emit.declare(call, "<32 x i32>", "<32 x ptr>, i32, <32 x i1>, <32 x i32>")
    for i in range(count):
        lines += [
            f"  %a.{i} = getelementptr i8, <32 x ptr> %where, i64 {4 * i}",
            f"  %g.{i} = call <32 x i32> @{call}(<32 x ptr> %a.{i}, i32 4, <32 x i1> %mask, <32 x i32> zeroinitializer)",
            f"  %s.{i} = getelementptr i8, ptr %out, i64 {4 * LANES * i}",
            f"  store <32 x i32> %g.{i}, ptr %s.{i}, align 64",
        ]
    body = "\n".join([*entry, *lines, "  ret void"])
    return f"define internal void @{name}(ptr %out, <32 x ptr> %where, i32 %lanes) noinline nounwind {{\n{body}\n}}"


def _scatter_text(ctx: Context, name: str, count: int) -> str:
    quads, words, total = LANES // QUAD, QUAD * count, LANES * count
    parts, width, lines = [f"%v{i}" for i in range(count)], LANES, _look(count)
    head: list[str] = []
    while len(parts) > 1:
        joined = []
        for i in range(0, len(parts), 2):
            new = f"%join.{width}.{i}"
            t, order = f"<{width} x i32>", _order(list(range(2 * width)))
            head.append(f"  {new} = shufflevector {t} {parts[i]}, {t} {parts[i + 1]}, {order}")
            joined.append(new)
        parts, width = joined, 2 * width
    t = f"<{total} x i32>"
    for q in range(quads):
        lanes = range(QUAD * q, QUAD * (q + 1))
        taken = _order([LANES * i + lane for lane in lanes for i in range(count)])
        lines += [
            *_each_quad(q),
            f"  %d.{q} = shufflevector {t} {parts[0]}, {t} poison, {taken}",
            f"  store <{words} x i32> %d.{q}, ptr %p.{q}, align 4",
            f"  br label %quad.{q + 1}",
        ]
    lines += [f"quad.{quads}:", "  ret void", "apart:", "  %mask = bitcast i32 %lanes to <32 x i1>"]
    call = "llvm.masked.scatter.v32i32.v32p0"
    ctx.emit.declare(call, "void", "<32 x i32>, <32 x ptr>, i32, <32 x i1>")
    for i in range(count):
        lines += [
            f"  %a.{i} = getelementptr i8, <32 x ptr> %where, i64 {4 * i}",
            f"  call void @{call}(<32 x i32> %v{i}, <32 x ptr> %a.{i}, i32 4, <32 x i1> %mask)",
        ]
    arguments = ", ".join(f"<32 x i32> %v{i}" for i in range(count))
    body = "\n".join([*head, *lines, "  ret void"])
    return f"define internal void @{name}(<32 x ptr> %where, {arguments}, i32 %lanes) noinline nounwind {{\n{body}\n}}"


# Addresses that have a root


def load_stepped(ctx: Context, at: Stepped, count: int) -> list[str]:
    """As `gather_quads` from addresses whose quads are known."""
    bits = at.kept.bits
    name = f"load.quads.{count}.{bits}"
    ctx.helpers.setdefault(name, _load_text(ctx, name, count, bits))
    emit, mask = ctx.emit, ctx.lane_mask()
    slot = emit.alloca(f"[{count} x <32 x i32>], align 64", "quads")
    lanes = "-1" if mask is None else ctx.mask_bits(mask)
    quads = is_quads(ctx, at, 4 * count)
    emit.do(f'call void @"{name}"(ptr {slot}, {arguments(ctx, at)}, i32 {lanes}, i1 {quads})')
    found = []
    for i in range(count):
        here = emit.op(f"getelementptr i8, ptr {slot}, i64 {4 * LANES * i}")
        found.append(emit.op(f"load <32 x i32>, ptr {here}, align 64"))
    return found


def store_stepped(ctx: Context, at: Stepped, values: list[Operand]) -> None:
    """As `scatter_quads` to addresses whose quads are known; even and odd columns of sums go as the rows that they are."""
    emit, mask, count, bits = ctx.emit, ctx.lane_mask(), len(values), at.kept.bits
    rows = rows_of_sums(ctx, values)
    name = f"store.{'rows' if rows else f'quads.{count}'}.{bits}"
    ctx.helpers.setdefault(name, _store_text(ctx, name, count, bits, from_rows=rows is not None))
    lanes = "-1" if mask is None else ctx.mask_bits(mask)
    quads = is_quads(ctx, at, 4 * count)
    if rows is not None:
        words = f"ptr {emit.op(f'getelementptr i8, ptr {rows[0]}, i64 {rows[1]}')}"
    else:
        words = ", ".join(f"<32 x i32> {ctx.get(v, 'i32', LANES)}" for v in values)
    emit.do(f'call void @"{name}"({words}, {arguments(ctx, at)}, i32 {lanes}, i1 {quads})')


def _choose(emit: Emitter) -> None:
    every = emit.op("icmp eq i32 %lanes, -1")
    emit.branch(emit.op(f"and i1 {every}, %quads"), "whole", "apart")
    emit.start("whole")


def _apart(emit: Emitter, bits: int) -> tuple[str, str]:
    """Begin the way for lanes that lie anywhere: their pointers and mask."""
    emit.start("apart")
    t = f"<32 x i{bits}>"
    values = emit.op(f"load {t}, ptr %a.array, align 64")
    values = emit.op(f"add {t} {values}, {emit.broadcast(f'i{bits}', '%a.moved')}")
    mask = emit.op("bitcast i32 %lanes to <32 x i1>")
    if bits == 64:
        return emit.op(f"inttoptr {t} {values} to <32 x ptr>"), mask
    wide = emit.op(f"zext {t} {values} to <32 x i64>")
    return emit.op(f"getelementptr i8, ptr %a.start, <32 x i64> {wide}"), mask


def _load_text(ctx: Context, name: str, count: int, bits: int) -> str:
    emit, width = Emitter(), QUAD * count
    _choose(emit)
    rows = []
    for quad in range(LANES // QUAD):
        emit.lines += lane_pointer("a", bits, QUAD * quad)
        rows.append(emit.op(f"load <{width} x i32>, ptr %a.p{QUAD * quad}, align {4 * count}"))
    total, t = join(emit, rows, width), f"<{LANES * count} x i32>"
    for i in range(count):
        value = (
            total
            if count == 1
            else emit.op(f"shufflevector {t} {total}, {t} poison, {_order([*range(i, LANES * count, count)])}")
        )
        emit.do(
            f"store <32 x i32> {value}, ptr {emit.op(f'getelementptr i8, ptr %out, i64 {4 * LANES * i}')}, align 64"
        )
    emit.do("ret void")
    pointers, mask = _apart(emit, bits)
    call = ctx.emit.declare("llvm.masked.gather.v32i32.v32p0", "<32 x i32>", "<32 x ptr>, i32, <32 x i1>, <32 x i32>")
    for i in range(count):
        at = emit.op(f"getelementptr i8, <32 x ptr> {pointers}, i64 {4 * i}")
        value = emit.op(f"call <32 x i32> {call}(<32 x ptr> {at}, i32 4, <32 x i1> {mask}, <32 x i32> zeroinitializer)")
        emit.do(
            f"store <32 x i32> {value}, ptr {emit.op(f'getelementptr i8, ptr %out, i64 {4 * LANES * i}')}, align 64"
        )
    emit.do("ret void")
    return _function(name, f"ptr %out, {parameters('a', bits)}, i32 %lanes, i1 %quads", emit)


def _store_text(ctx: Context, name: str, count: int, bits: int, *, from_rows: bool) -> str:
    emit, width, total = Emitter(), QUAD * count, LANES * count
    t = f"<{total} x i32>"

    def row(quad: int) -> str:
        at = emit.op(f"getelementptr i8, ptr %rows, i64 {64 * quad}")
        return emit.op(f"load <8 x i32>, ptr {at}, align 32")

    def words() -> str:
        """The lanes' words one after another."""
        if from_rows:
            return join(emit, [row(quad) for quad in range(LANES // QUAD)], 8)
        whole = join(emit, [f"%v{i}" for i in range(count)], LANES)
        order = [LANES * i + lane for lane in range(LANES) for i in range(count)]
        return whole if count == 1 else emit.op(f"shufflevector {t} {whole}, {t} poison, {_order(order)}")

    _choose(emit)
    whole = "" if from_rows else words()
    for quad in range(LANES // QUAD):
        emit.lines += lane_pointer("a", bits, QUAD * quad)
        part = [*range(width * quad, width * (quad + 1))]
        value = row(quad) if from_rows else emit.op(f"shufflevector {t} {whole}, {t} poison, {_order(part)}")
        emit.do(f"store <{width} x i32> {value}, ptr %a.p{QUAD * quad}, align {4 * count}")
    emit.do("ret void")
    pointers, mask = _apart(emit, bits)
    call = ctx.emit.declare("llvm.masked.scatter.v32i32.v32p0", "void", "<32 x i32>, <32 x ptr>, i32, <32 x i1>")
    whole = words()
    for i in range(count):
        value = emit.op(f"shufflevector {t} {whole}, {t} poison, {_order([*range(i, total, count)])}")
        at = emit.op(f"getelementptr i8, <32 x ptr> {pointers}, i64 {4 * i}")
        emit.do(f"call void {call}(<32 x i32> {value}, <32 x ptr> {at}, i32 4, <32 x i1> {mask})")
    emit.do("ret void")
    given = "ptr %rows" if from_rows else ", ".join(f"<32 x i32> %v{i}" for i in range(count))
    return _function(name, f"{given}, {parameters('a', bits)}, i32 %lanes, i1 %quads", emit)


def _function(name: str, parameters_: str, emit: Emitter) -> str:
    body = "\n".join(emit.lines)
    return f'define internal void @"{name}"({parameters_}) noinline nounwind {{\n{body}\n}}'
