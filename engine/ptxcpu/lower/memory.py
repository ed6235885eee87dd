"""Loads and stores of every state space.

An access is a vector access where the analysis shows neighbouring lanes at neighbouring addresses, one scalar access where
all lanes share the address, and a gather or scatter otherwise.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import ALL_LANES, Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, splat, vec
from ptxtrain.engine.ptxcpu.lower.places import Place, place_of, space_of
from ptxtrain.engine.ptxcpu.lower.quads import SIZES, gather_quads, load_stepped, scatter_quads, store_stepped
from ptxtrain.engine.ptxcpu.lower.steps import stepped
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Instruction,
    Operand,
    Reg,
    Sink,
    Vector,
)

LINE = 64  # bytes of a cache line
STREAM = "stream"  # in the place of `volatile`: written once and not read soon


def _count(ins: Instruction) -> int:
    return next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)


def _elements(operand: Operand) -> list[Operand]:
    return list(operand.elements) if isinstance(operand, Vector) else [operand]


# Loads


def lower_ld(ctx: Context, ins: Instruction) -> None:
    """ld and ldu, of every space, width and vector length."""
    type_, count, space = ins.types[-1], _count(ins), space_of(ins)
    bits = TYPE_BITS[type_]
    targets = _elements(ins.operands[0])
    if len(targets) != count:
        raise ctx.refuse(ins, "this load is not known")
    place = place_of(ctx, ins, ins.operands[1], space)
    volatile = "volatile " if ins.has("volatile", "relaxed", "acquire", "mmio") else ""
    if place.scalar is not None:
        suffix = ", !invariant.load !0" if space == "param" else ""
        for i, target in enumerate(targets):
            pointer = step_pointer(ctx, place.scalar, i * bits // 8)
            value = ctx.emit.op(f"load {volatile}i{bits}, ptr {pointer}, align {bits // 8}{suffix}")
            _put(ctx, target, value, type_, 1)
        _order(ctx, ins, "acquire")
        return
    at = None
    if bits == 32 and count in SIZES and not volatile and place.lanes is not None and place.base is None:
        at = stepped(ctx, ins, ins.operands[1])
    if at is not None:
        values = load_stepped(ctx, at, count)
    else:
        values = load_lanes(ctx, place, bits, count, volatile)
    _order(ctx, ins, "acquire")
    for target, value in zip(targets, values, strict=True):
        _put(ctx, target, value, type_, LANES)


def _order(ctx: Context, ins: Instruction, order: str) -> None:
    """What an acquiring load or a releasing store keeps from moving past it."""
    if ins.has(order):
        ctx.emit.do(f"fence {order}")


def step_pointer(ctx: Context, pointer: str, by: int) -> str:
    return ctx.emit.op(f"getelementptr i8, ptr {pointer}, i64 {by}") if by else pointer


def _put(ctx: Context, target: Operand, value: str, type_: str, lanes: int) -> None:
    """Write a loaded number; signed ones are sign-extended into a wider register."""
    assert isinstance(target, Reg | Sink)
    bits = TYPE_BITS[type_]
    if type_[0] == "s" and isinstance(target, Reg) and TYPE_BITS[target.type] > bits:
        wide = TYPE_BITS[target.type]
        value = ctx.emit.op(f"sext {vec(f'i{bits}', lanes)} {value} to {vec(f'i{wide}', lanes)}")
        bits = wide
    ctx.set(target, value, f"i{bits}", lanes)


def load_lanes(ctx: Context, place: Place, bits: int, count: int, volatile: str = "") -> list[str]:
    """`count` vectors of 32 i{bits}."""
    emit = ctx.emit
    mask = ctx.lane_mask()
    if place.base is not None and place.stride == bits // 8 * count:
        if not place.loose:
            return _load_run(ctx, place.base, bits, count, mask, volatile)
        yes, no, done = emit.label("run"), emit.label("gather"), emit.label("loaded")
        assert ctx.straight is not None
        slots = [emit.alloca(vec(f"i{bits}", LANES), "l") for _ in range(count)]
        emit.branch(emit.op(f"load i1, ptr {ctx.straight}"), yes, no)
        for label, values in ((yes, "run"), (no, "gather")):
            emit.start(label)
            if values == "run":
                loaded = _load_run(ctx, place.base, bits, count, mask, volatile)
            else:
                assert place.lanes is not None
                loaded = _gather(ctx, place.lanes, bits, count, mask)
            for slot, value in zip(slots, loaded, strict=True):
                emit.do(f"store {vec(f'i{bits}', LANES)} {value}, ptr {slot}")
            emit.jump(done)
        emit.start(done)
        return [emit.op(f"load {vec(f'i{bits}', LANES)}, ptr {slot}") for slot in slots]
    assert place.lanes is not None
    return _gather(ctx, place.lanes, bits, count, mask)


def _load_run(ctx: Context, base: str, bits: int, count: int, mask: str | None, volatile: str) -> list[str]:
    """Neighbouring lanes at neighbouring addresses: one long load, then the lanes' elements are taken apart."""
    emit, n = ctx.emit, LANES * count
    t = vec(f"i{bits}", n)
    align = bits // 8 * count
    if mask is None:
        whole = emit.op(f"load {volatile}{t}, ptr {base}, align {align}")
    else:
        wide = _repeat(ctx, mask, count)
        whole = emit.call(
            f"llvm.masked.load.v{n}i{bits}.p0",
            t,
            ("ptr", base),
            ("i32", str(align)),
            (vec("i1", n), wide),
            (t, "zeroinitializer"),
        )
    if count == 1:
        return [whole]
    return [emit.op(f"shufflevector {t} {whole}, {t} poison, {_indices(range(i, n, count))}") for i in range(count)]


def _indices(values: range | list[int]) -> str:
    return f"<{len(values)} x i32> <" + ", ".join(f"i32 {v}" for v in values) + ">"


def _repeat(ctx: Context, mask: str, count: int) -> str:
    """Each lane's bit `count` times in a row."""
    if count == 1:
        return mask
    order = [lane for lane in range(LANES) for _ in range(count)]
    return ctx.emit.op(f"shufflevector <32 x i1> {mask}, <32 x i1> poison, {_indices(order)}")


def _gather(ctx: Context, pointers: str, bits: int, count: int, mask: str | None) -> list[str]:
    """`count` vectors; neighbours are gathered together, two by two, up to 64 bits at a time."""
    if bits == 32 and count in SIZES:
        return gather_quads(ctx, pointers, count, mask)
    emit = ctx.emit
    found = []
    if count % 2 == 0 and bits < 64:
        wide = vec(f"i{2 * bits}", LANES)
        for pair in _gather(ctx, pointers, 2 * bits, count // 2, mask):
            upper = emit.op(f"lshr {wide} {pair}, {splat(f'i{2 * bits}', bits, LANES)}")
            found += [emit.op(f"trunc {wide} {half} to {vec(f'i{bits}', LANES)}") for half in (pair, upper)]
        return found
    for i in range(count):
        at = emit.op(f"getelementptr i8, <32 x ptr> {pointers}, i64 {i * bits // 8}") if i else pointers
        found.append(_gather_words(ctx, at, bits, mask) if bits < 32 else _gather_one(ctx, at, bits, mask))
    return found


def _gather_one(ctx: Context, pointers: str, bits: int, mask: str | None) -> str:
    """One gather; with a mask by way of a function, because LLVM's code for it is long and such accesses are rare."""
    t = vec(f"i{bits}", LANES)
    gather_all = f"llvm.masked.gather.v32i{bits}.v32p0"
    parameters = f"<32 x ptr>, i32, <32 x i1>, {t}"
    if mask is None:
        name = ctx.emit.declare(gather_all, t, parameters)
        return ctx.emit.op(
            f"call {t} {name}(<32 x ptr> {pointers}, i32 {bits // 8}, <32 x i1> {ALL_LANES}, {t} zeroinitializer)"
        )
    helper = f"gather.i{bits}"
    ctx.emit.declare(gather_all, t, parameters)
    ctx.helpers.setdefault(
        helper,
        f"""define internal {t} @{helper}(<32 x ptr> %from, i32 %lanes) noinline nounwind memory(read) {{
  %mask = bitcast i32 %lanes to <32 x i1>
  %found = call {t} @{gather_all}(<32 x ptr> %from, i32 {bits // 8}, <32 x i1> %mask, {t} zeroinitializer)
  ret {t} %found
}}""",
    )
    return ctx.emit.op(f"call {t} @{helper}(<32 x ptr> {pointers}, i32 {ctx.mask_bits(mask)})")


def _gather_words(ctx: Context, pointers: str, bits: int, mask: str | None) -> str:
    """Gather the aligned words that hold 8- or 16-bit elements: processors gather nothing narrower than a word."""
    emit = ctx.emit
    address = emit.op(f"ptrtoint <32 x ptr> {pointers} to <32 x i64>")
    aligned = emit.op(f"and <32 x i64> {address}, {splat('i64', -4, LANES)}")
    words = _gather_one(ctx, emit.op(f"inttoptr <32 x i64> {aligned} to <32 x ptr>"), 32, mask)
    low = emit.op(f"trunc <32 x i64> {address} to <32 x i32>")
    within = emit.op(f"and <32 x i32> {low}, {splat('i32', 3, LANES)}")
    amount = emit.op(f"shl <32 x i32> {within}, {splat('i32', 3, LANES)}")
    moved = emit.op(f"lshr <32 x i32> {words}, {amount}")
    return emit.op(f"trunc <32 x i32> {moved} to {vec(f'i{bits}', LANES)}")


def gather(ctx: Context, pointers: str, bits: int, count: int) -> list[str]:
    """`count` vectors of 32 i{bits} from where a vector of pointers points, in the lanes that act."""
    return _gather(ctx, pointers, bits, count, ctx.lane_mask())


# Stores


def lower_st(ctx: Context, ins: Instruction) -> None:
    """st of every space, width and vector length. Where lanes write the same address the highest wins."""
    type_, count, space = ins.types[-1], _count(ins), space_of(ins)
    bits = TYPE_BITS[type_]
    values = _elements(ins.operands[1])
    if len(values) != count or space in ("param", "const"):
        raise ctx.refuse(ins, "this store is not known")
    emit = ctx.emit
    _order(ctx, ins, "release")
    place = place_of(ctx, ins, ins.operands[0], space)
    volatile = "volatile " if ins.has("volatile", "relaxed", "release", "mmio") else ""
    if ins.has("cs") and space in ("global", "generic"):
        volatile = STREAM
    if bits == 32 and count in SIZES and not volatile and place.lanes is not None and place.base is None:
        at = stepped(ctx, ins, ins.operands[0])
        if at is not None:
            store_stepped(ctx, at, values)
            return
    if place.scalar is not None:
        for i, value in enumerate(values):
            text = _highest(ctx, value, bits)
            pointer = step_pointer(ctx, place.scalar, i * bits // 8)
            kind = "" if volatile == STREAM else volatile
            emit.do(f"store {kind}i{bits} {text}, ptr {pointer}, align {bits // 8}")
        return
    store_lanes(ctx, place, bits, [ctx.get(v, f"i{bits}", LANES) for v in values], volatile)


def _highest(ctx: Context, value: Operand, bits: int) -> str:
    """The value of the highest lane that acts."""
    if ctx.info(value).uniform:
        return ctx.get(value, f"i{bits}", 1)
    emit, mask = ctx.emit, ctx.lane_mask()
    lane = "31"
    if mask is not None:
        zeros = emit.call("llvm.ctlz.i32", "i32", ("i32", ctx.mask_bits(mask)), ("i1", "false"))
        lane = emit.op(f"and i32 {emit.op(f'sub i32 31, {zeros}')}, 31")
    return emit.op(f"extractelement {vec(f'i{bits}', LANES)} {ctx.get(value, f'i{bits}', LANES)}, i32 {lane}")


def store_lanes(ctx: Context, place: Place, bits: int, values: list[str], volatile: str = "") -> None:
    """Write one vector of 32 i{bits} for each element of a lane."""
    emit = ctx.emit
    mask = ctx.lane_mask()
    if place.base is not None and place.stride == bits // 8 * len(values):
        if not place.loose:
            _store_run(ctx, place.base, bits, values, mask, volatile)
            return
        yes, no, done = emit.label("run"), emit.label("scatter"), emit.label("stored")
        assert ctx.straight is not None and place.lanes is not None
        emit.branch(emit.op(f"load i1, ptr {ctx.straight}"), yes, no)
        emit.start(yes)
        _store_run(ctx, place.base, bits, values, mask, volatile)
        emit.jump(done)
        emit.start(no)
        _scatter(ctx, place.lanes, bits, values, mask)
        emit.jump(done)
        emit.start(done)
        return
    assert place.lanes is not None
    _scatter(ctx, place.lanes, bits, values, mask)


def _store_run(ctx: Context, base: str, bits: int, values: list[str], mask: str | None, volatile: str) -> None:
    emit, count = ctx.emit, len(values)
    n = LANES * count
    t = vec(f"i{bits}", n)
    whole = values[0] if count == 1 else _interleave(ctx, values, bits)
    align = bits // 8 * count
    if volatile == STREAM:
        done = _stream_run(ctx, base, t, whole, mask, n * bits // 8)
        _store_whole(ctx, base, t, n, bits, whole, mask, count, align, "")
        emit.jump(done)
        emit.start(done)
        return
    _store_whole(ctx, base, t, n, bits, whole, mask, count, align, volatile)


def _stream_run(ctx: Context, base: str, t: str, whole: str, mask: str | None, size: int) -> str:
    """A store past the caches (st.cs) where all lanes act and the address allows it; begins the block for where not.

    Returns the label at which both ways meet.
    """
    emit = ctx.emit
    address = emit.op(f"ptrtoint ptr {base} to i64")
    low = emit.op(f"and i64 {address}, {min(size, LINE) - 1}")
    fits = emit.op(f"icmp eq i64 {low}, 0")
    if mask is not None:
        every = emit.op(f"icmp eq i32 {ctx.mask_bits(mask)}, -1")
        fits = emit.op(f"and i1 {fits}, {every}")
    past, through, done = emit.label("past"), emit.label("through"), emit.label("streamed")
    emit.branch(fits, past, through)
    emit.start(past)
    emit.do(f"store {t} {whole}, ptr {base}, align {min(size, LINE)}, !nontemporal !1")
    emit.jump(done)
    emit.start(through)
    return done


def _store_whole(
    ctx: Context, base: str, t: str, n: int, bits: int, whole: str, mask: str | None, count: int, align: int, kind: str
) -> None:
    emit = ctx.emit
    if mask is None:
        emit.do(f"store {kind}{t} {whole}, ptr {base}, align {align}")
        return
    wide = _repeat(ctx, mask, count)
    name = emit.declare(f"llvm.masked.store.v{n}i{bits}.p0", "void", f"{t}, ptr, i32, {vec('i1', n)}")
    emit.do(f"call void {name}({t} {whole}, ptr {base}, i32 {align}, {vec('i1', n)} {wide})")


def _interleave(ctx: Context, values: list[str], bits: int) -> str:
    """Lane 0's elements, lane 1's, … as one vector."""
    emit = ctx.emit
    parts, width = list(values), LANES
    while len(parts) > 1:
        t = vec(f"i{bits}", width)
        order = _indices(range(2 * width))
        parts = [
            emit.op(f"shufflevector {t} {a}, {t} {b}, {order}") for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        width *= 2
    count = len(values)
    t = vec(f"i{bits}", width)
    by_lane = [element * LANES + lane for lane in range(LANES) for element in range(count)]
    return emit.op(f"shufflevector {t} {parts[0]}, {t} poison, {_indices(by_lane)}")


def _scatter(ctx: Context, pointers: str, bits: int, values: list[str], mask: str | None) -> None:
    """One scatter for each vector; neighbours go together as in `_gather`."""
    if bits == 32 and len(values) in SIZES:
        scatter_quads(ctx, pointers, values, mask)
        return
    emit = ctx.emit
    t = vec(f"i{bits}", LANES)
    if len(values) % 2 == 0 and bits < 64:
        wide = vec(f"i{2 * bits}", LANES)
        pairs = []
        for low, high in zip(values[::2], values[1::2], strict=True):
            lower, upper = (emit.op(f"zext {t} {v} to {wide}") for v in (low, high))
            upper = emit.op(f"shl {wide} {upper}, {splat(f'i{2 * bits}', bits, LANES)}")
            pairs.append(emit.op(f"or {wide} {lower}, {upper}"))
        _scatter(ctx, pointers, 2 * bits, pairs, mask)
        return
    for i, value in enumerate(values):
        at = emit.op(f"getelementptr i8, <32 x ptr> {pointers}, i64 {i * bits // 8}") if i else pointers
        name = emit.declare(f"llvm.masked.scatter.v32i{bits}.v32p0", "void", f"{t}, <32 x ptr>, i32, <32 x i1>")
        if mask is None:
            emit.do(f"call void {name}({t} {value}, <32 x ptr> {at}, i32 {bits // 8}, <32 x i1> {ALL_LANES})")
            continue
        helper = f"scatter.i{bits}"
        ctx.helpers.setdefault(
            helper,
            f"""define internal void @{helper}({t} %value, <32 x ptr> %to, i32 %lanes) noinline nounwind {{
  %mask = bitcast i32 %lanes to <32 x i1>
  call void {name}({t} %value, <32 x ptr> %to, i32 {bits // 8}, <32 x i1> %mask)
  ret void
}}""",
        )
        emit.do(f"call void @{helper}({t} {value}, <32 x ptr> {at}, i32 {ctx.mask_bits(mask)})")
