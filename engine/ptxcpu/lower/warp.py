"""Instructions of a whole warp and of a block: shuffles, votes, matches, reductions, barriers, fences."""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import ALL_LANES, Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, iota, splat, vec
from ptxtrain.engine.ptxcpu.tree import Instruction, Operand, Pair, Reg, Sink


def _target(ins: Instruction) -> tuple[Reg | Sink, Reg | Sink]:
    first = ins.operands[0]
    if isinstance(first, Pair):
        return first.first, first.second
    assert isinstance(first, Reg | Sink)
    return first, Sink()


def lower_shfl(ctx: Context, ins: Instruction) -> None:
    """shfl.sync.{up, down, bfly, idx}.b32 d|p, a, b, c, mask: lane j's value where j is inside the lane's segment.

    c holds the clamp in bits 0-4 and the segment mask in bits 8-12. A butterfly over the whole warp by a known distance
    is one shuffle of the vector.
    """
    emit = ctx.emit
    target, predicate = _target(ins)
    mode = next(m for m in ins.modifiers if m in ("up", "down", "bfly", "idx"))
    a, b, c = ins.operands[1:4]
    value = ctx.get(a, "i32", LANES)
    distance, clamp = ctx.info(b).const, ctx.info(c).const
    t = vec("i32", LANES)
    if distance is not None and clamp is not None and ctx.info(b).uniform and ctx.info(c).uniform:
        source, inside = _known_sources(mode, distance % 32, clamp)
        order = f"<{LANES} x i32> <" + ", ".join(f"i32 {s}" for s in source) + ">"
        result = emit.op(f"shufflevector {t} {value}, {t} poison, {order}")
        ok = "<" + ", ".join(f"i1 {'true' if i else 'false'}" for i in inside) + ">"
    else:
        source_lanes, ok = _sources(ctx, mode, b, c)
        result = _permute(ctx, value, source_lanes)
    ctx.set(target, result, "i32", LANES)
    ctx.set(predicate, ok, "i1", LANES)


def _known_sources(mode: str, distance: int, clamp_word: int) -> tuple[list[int], list[bool]]:
    clamp, segment = clamp_word & 31, clamp_word >> 8 & 31
    sources, inside = [], []
    for lane in range(LANES):
        last = (lane & segment) | (clamp & ~segment & 31)
        first = lane & segment
        source = {
            "up": lane - distance,
            "down": lane + distance,
            "bfly": lane ^ distance,
            "idx": first | (distance & ~segment & 31),
        }[mode]
        ok = source >= last if mode == "up" else source <= last
        sources.append(source if ok else lane)
        inside.append(ok)
    return sources, inside


def _sources(ctx: Context, mode: str, b: Operand, c: Operand) -> tuple[str, str]:
    """As `_known_sources`, computed when run."""
    emit, t = ctx.emit, vec("i32", LANES)

    def op(name: str, x: str, y: str) -> str:
        return emit.op(f"{name} {t} {x}, {y}")

    def k(value: int) -> str:
        return splat("i32", value, LANES)

    lane = iota("i32", 1)
    distance = op("and", ctx.get(b, "i32", LANES), k(31))
    word = ctx.get(c, "i32", LANES)
    clamp = op("and", word, k(31))
    segment = op("and", op("lshr", word, k(8)), k(31))
    free = op("xor", segment, k(31))
    first = op("and", lane, segment)
    last = op("or", first, op("and", clamp, free))
    source = {
        "up": lambda: op("sub", lane, distance),
        "down": lambda: op("add", lane, distance),
        "bfly": lambda: op("xor", lane, distance),
        "idx": lambda: op("or", first, op("and", distance, free)),
    }[mode]()
    ok = emit.op(f"icmp {'sge' if mode == 'up' else 'sle'} {t} {source}, {last}")
    return op("and", emit.select("i32", LANES, ok, source, lane), k(31)), ok


def _permute(ctx: Context, value: str, lanes: str) -> str:
    """value[lanes[l]] for each lane, through memory."""
    emit, t = ctx.emit, vec("i32", LANES)
    slot = emit.alloca(t, "permute")
    emit.do(f"store {t} {value}, ptr {slot}")
    wide = emit.op(f"zext {t} {lanes} to <32 x i64>")
    pointers = emit.op(f"getelementptr i32, ptr {slot}, <32 x i64> {wide}")
    return emit.call(
        "llvm.masked.gather.v32i32.v32p0",
        t,
        ("<32 x ptr>", pointers),
        ("i32", "4"),
        ("<32 x i1>", ALL_LANES),
        (t, "zeroinitializer"),
    )


def _members(ctx: Context, mask: Operand) -> str:
    """The lanes that take part: those of the member mask that are here, as an i32."""
    emit = ctx.emit
    here = ctx.lane_mask()
    member = ctx.get(mask, "i32", 1) if ctx.info(mask).uniform else _first_lane(ctx, mask)
    if here is None:
        return member
    return emit.op(f"and i32 {member}, {ctx.mask_bits(here)}")


def _first_lane(ctx: Context, operand: Operand) -> str:
    """A value that all lanes that are here must share, taken from the lowest of them."""
    emit, here = ctx.emit, ctx.lane_mask()
    lane = "0"
    if here is not None:
        lane = emit.call("llvm.cttz.i32", "i32", ("i32", ctx.mask_bits(here)), ("i1", "false"))
        lane = emit.op(f"and i32 {lane}, 31")
    return emit.op(f"extractelement <32 x i32> {ctx.get(operand, 'i32', LANES)}, i32 {lane}")


def lower_vote(ctx: Context, ins: Instruction) -> None:
    """vote.sync.{all, any, uni, ballot}."""
    emit = ctx.emit
    members = _members(ctx, ins.operands[2]) if ins.has("sync") else ctx.mask_bits(ctx.mask_value())
    bits = ctx.mask_bits(ctx.get(ins.operands[1], "i1", LANES))
    yes = emit.op(f"and i32 {bits}, {members}")
    target, _ = _target(ins)
    if ins.has("ballot"):
        ctx.set(target, yes, "i32", 1)
        return
    every = emit.op(f"icmp eq i32 {yes}, {members}")
    some = emit.op(f"icmp ne i32 {yes}, 0")
    if ins.has("all"):
        result = every
    elif ins.has("any"):
        result = some
    else:
        result = emit.op(f"or i1 {every}, {emit.op(f'xor i1 {some}, true')}")
    ctx.set(target, result, "i1", 1)


def lower_activemask(ctx: Context, ins: Instruction) -> None:
    """The lanes that are here."""
    target, _ = _target(ins)
    ctx.set(target, ctx.mask_bits(ctx.mask_value()), "i32", 1)


def lower_match(ctx: Context, ins: Instruction) -> None:
    """match.{any, all}.sync: the lanes that hold the same value."""
    emit = ctx.emit
    target, predicate = _target(ins)
    type_ = f"i{ins.types[-1][1:]}"
    t = vec(type_, LANES)
    members = _members(ctx, ins.operands[2])
    value = ctx.get(ins.operands[1], type_, LANES)
    if ins.has("all"):
        lane = emit.call("llvm.cttz.i32", "i32", ("i32", members), ("i1", "false"))
        lane = emit.op(f"and i32 {lane}, 31")
        first = emit.broadcast(type_, emit.op(f"extractelement {t} {value}, i32 {lane}"))
        same = emit.op(f"and i32 {ctx.mask_bits(emit.op(f'icmp eq {t} {value}, {first}'))}, {members}")
        every = emit.op(f"icmp eq i32 {same}, {members}")
        ctx.set(target, emit.op(f"select i1 {every}, i32 {members}, i32 0"), "i32", 1)
        ctx.set(predicate, every, "i1", 1)
        return
    result = "zeroinitializer"
    for lane_number in range(LANES):
        one = emit.broadcast(type_, emit.op(f"extractelement {t} {value}, i32 {lane_number}"))
        same = emit.op(f"and i32 {ctx.mask_bits(emit.op(f'icmp eq {t} {value}, {one}'))}, {members}")
        result = emit.op(f"insertelement <32 x i32> {result}, i32 {same}, i32 {lane_number}")
    ctx.set(target, result, "i32", LANES)


_REDUCTIONS = {
    "add": ("add", 0),
    "and": ("and", -1),
    "or": ("or", 0),
    "xor": ("xor", 0),
    "umin": ("umin", -1),
    "umax": ("umax", 0),
    "smin": ("smin", 0x7FFFFFFF),
    "smax": ("smax", -0x80000000),
}


def lower_redux(ctx: Context, ins: Instruction) -> None:
    """redux.sync over the members that are here."""
    emit = ctx.emit
    name = next((m for m in ins.modifiers if m in ("add", "and", "or", "xor", "min", "max")), None)
    type_ = ins.types[-1]
    if name is None or type_[0] == "f":
        raise ctx.refuse(ins, "this reduction is not known")
    if name in ("min", "max"):
        name = type_[0] + name
    intrinsic, neutral = _REDUCTIONS[name]
    members = emit.op(f"bitcast i32 {_members(ctx, ins.operands[2])} to <32 x i1>")
    value = ctx.get(ins.operands[1], "i32", LANES)
    chosen = emit.select("i32", LANES, members, value, splat("i32", neutral, LANES))
    target, _ = _target(ins)
    ctx.set(target, emit.call(f"llvm.vector.reduce.{intrinsic}.v32i32", "i32", ("<32 x i32>", chosen)), "i32", 1)


def lower_barrier(ctx: Context, ins: Instruction) -> None:
    """bar and barrier: sync, arrive, and `bar.warp.sync`, at which a warp that runs in step has nothing to do."""
    if ins.has("warp"):
        return
    emit = ctx.emit
    if ins.has("red"):
        raise ctx.refuse(ins, "bar.red is not known")
    if not ins.operands or not all(ctx.info(o).uniform for o in ins.operands):
        raise ctx.refuse(ins, "a barrier's number and count must be the same for the whole warp")
    ctx.has_barrier = True
    number = ctx.get(ins.operands[0], "i32", 1)
    count = ctx.get(ins.operands[1], "i32", 1) if len(ins.operands) > 1 else "0"
    blocks = "false" if ins.has("arrive") else "true"
    emit.do(f"call void @arrive(ptr %cta, i32 {number}, i32 {count}, i1 {blocks}, i32 %warp)")
    if blocks == "true":
        resumed = emit.label("resumed")
        state = emit.op("call i8 @llvm.coro.suspend(token none, i1 false)")
        emit.do(f"switch i8 {state}, label %suspend [i8 0, label %{resumed} i8 1, label %cleanup]")
        emit.start(resumed)


def lower_fence(ctx: Context, ins: Instruction) -> None:
    """Memory fences order what other threads of the host see."""
    if ins.has("cta", "proxy") or ins.opcode == "prefetch":
        return
    ctx.emit.do("fence seq_cst")
