"""Instructions of a whole warp and of a block: shuffles, votes, matches, reductions, barriers, fences."""

from __future__ import annotations

from collections.abc import Callable

from ptxtrain.engine.ptxcpu.lower.context import ALL_LANES, Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, iota, splat, vec
from ptxtrain.engine.ptxcpu.lower.runner import FIELDS
from ptxtrain.engine.ptxcpu.traps import apart
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


def _by_group(
    ctx: Context, mask: Operand | None, compute: Callable[[str], list[tuple[str, str, int]]]
) -> list[tuple[str, str, int]]:
    """What `compute(members)` gives, as (type, value, lanes); a mask that differs between lanes makes groups of them.

    Each group is computed on its own, the one with the lowest lane first; the results are then vectors.
    """
    emit = ctx.emit
    if mask is None or ctx.info(mask).uniform:
        return compute(ctx.mask_bits(ctx.mask_value()) if mask is None else _members(ctx, mask))
    own = ctx.get(mask, "i32", LANES)
    waiting = emit.alloca("i32", "waiting")
    here = ctx.mask_bits(ctx.mask_value())
    emit.do(f"store i32 {here}, ptr {waiting}")
    loop, body, done = emit.label("groups"), emit.label("group"), emit.label("grouped")
    emit.jump(loop)
    emit.start(loop)
    left = emit.op(f"load i32, ptr {waiting}")
    emit.branch(emit.op(f"icmp ne i32 {left}, 0"), body, done)
    emit.start(body)
    leader = emit.call("llvm.cttz.i32", "i32", ("i32", left), ("i1", "true"))
    named = emit.op(f"extractelement <32 x i32> {own}, i32 {leader}")
    members = emit.op(f"and i32 {named}, {here}")
    gone = emit.op(f"or i32 {members}, {emit.op(f'shl i32 1, {leader}')}")
    results = compute(members)
    chosen = emit.op(f"bitcast i32 {gone} to <32 x i1>")
    slots = []
    for type_, value, lanes in results:
        slot = emit.alloca(vec(type_, LANES), "grouped")
        whole = value if lanes == LANES else emit.broadcast(type_, value)
        before = emit.op(f"load {vec(type_, LANES)}, ptr {slot}")
        emit.do(f"store {vec(type_, LANES)} {emit.select(type_, LANES, chosen, whole, before)}, ptr {slot}")
        slots.append((type_, slot))
    others = emit.op(f"xor i32 {gone}, -1")
    emit.do(f"store i32 {emit.op(f'and i32 {left}, {others}')}, ptr {waiting}")
    emit.jump(loop)
    emit.start(done)
    return [(type_, emit.op(f"load {vec(type_, LANES)}, ptr {slot}"), LANES) for type_, slot in slots]


def _put(ctx: Context, target: Reg | Sink, result: tuple[str, str, int]) -> None:
    ctx.set(target, result[1], result[0], result[2])


def lower_vote(ctx: Context, ins: Instruction) -> None:
    """vote{.sync}.{all, any, uni, ballot}."""
    emit = ctx.emit
    bits = ctx.mask_bits(ctx.get(ins.operands[1], "i1", LANES))

    def compute(members: str) -> list[tuple[str, str, int]]:
        yes = emit.op(f"and i32 {bits}, {members}")
        if ins.has("ballot"):
            return [("i32", yes, 1)]
        every = emit.op(f"icmp eq i32 {yes}, {members}")
        some = emit.op(f"icmp ne i32 {yes}, 0")
        if ins.has("all"):
            return [("i1", every, 1)]
        if ins.has("any"):
            return [("i1", some, 1)]
        return [("i1", emit.op(f"or i1 {every}, {emit.op(f'xor i1 {some}, true')}"), 1)]

    (result,) = _by_group(ctx, ins.operands[2] if ins.has("sync") else None, compute)
    _put(ctx, _target(ins)[0], result)


def lower_elect(ctx: Context, ins: Instruction) -> None:
    """elect.sync d|p, mask: d the lowest member's lane, p true for that lane alone."""
    emit = ctx.emit

    def compute(members: str) -> list[tuple[str, str, int]]:
        lane = emit.call("llvm.cttz.i32", "i32", ("i32", members), ("i1", "false"))
        t = vec("i32", LANES)
        return [
            ("i32", lane, 1),
            ("i1", emit.op(f"icmp eq {t} {iota('i32', 1)}, {emit.broadcast('i32', lane)}"), LANES),
        ]

    leader, is_leader = _by_group(ctx, ins.operands[1], compute)
    target, predicate = _target(ins)
    _put(ctx, target, leader)
    _put(ctx, predicate, is_leader)


def lower_activemask(ctx: Context, ins: Instruction) -> None:
    """The lanes that are here."""
    target, _ = _target(ins)
    ctx.set(target, ctx.mask_bits(ctx.mask_value()), "i32", 1)


def lower_match(ctx: Context, ins: Instruction) -> None:
    """match.{any, all}.sync: the lanes that hold the same value."""
    emit = ctx.emit
    type_ = f"i{ins.types[-1][1:]}"
    t = vec(type_, LANES)
    value = ctx.get(ins.operands[1], type_, LANES)

    def compute_all(members: str) -> list[tuple[str, str, int]]:
        lane = emit.call("llvm.cttz.i32", "i32", ("i32", members), ("i1", "false"))
        lane = emit.op(f"and i32 {lane}, 31")
        first = emit.broadcast(type_, emit.op(f"extractelement {t} {value}, i32 {lane}"))
        same = emit.op(f"and i32 {ctx.mask_bits(emit.op(f'icmp eq {t} {value}, {first}'))}, {members}")
        every = emit.op(f"icmp eq i32 {same}, {members}")
        return [("i32", emit.op(f"select i1 {every}, i32 {members}, i32 0"), 1), ("i1", every, 1)]

    def compute_any(members: str) -> list[tuple[str, str, int]]:
        result = "zeroinitializer"
        for lane_number in range(LANES):
            one = emit.broadcast(type_, emit.op(f"extractelement {t} {value}, i32 {lane_number}"))
            same = emit.op(f"and i32 {ctx.mask_bits(emit.op(f'icmp eq {t} {value}, {one}'))}, {members}")
            result = emit.op(f"insertelement <32 x i32> {result}, i32 {same}, i32 {lane_number}")
        return [("i32", result, LANES)]

    results = _by_group(ctx, ins.operands[2], compute_all if ins.has("all") else compute_any)
    for target, result in zip(_target(ins), results, strict=False):
        _put(ctx, target, result)


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
    name = next(m for m in ins.modifiers if m in ("add", "and", "or", "xor", "min", "max"))
    type_ = ins.types[-1]
    is_float = type_ == "f32"
    if name in ("min", "max") and not is_float:
        name = type_[0] + name
    value = ctx.get(ins.operands[1], "i32", LANES)

    def compute(members: str) -> list[tuple[str, str, int]]:
        inside = emit.op(f"bitcast i32 {members} to <32 x i1>")
        if is_float:
            return [("i32", _redux_float(ctx, ins, name, value, inside), 1)]
        intrinsic, neutral = _REDUCTIONS[name]
        chosen = emit.select("i32", LANES, inside, value, splat("i32", neutral, LANES))
        return [("i32", emit.call(f"llvm.vector.reduce.{intrinsic}.v32i32", "i32", ("<32 x i32>", chosen)), 1)]

    (result,) = _by_group(ctx, ins.operands[2], compute)
    _put(ctx, _target(ins)[0], result)


def _redux_float(ctx: Context, ins: Instruction, name: str, value: str, inside: str) -> str:
    """redux.sync.{min, max}{.abs}{.NaN}.f32 as a tree of the two-operand instruction; the bits of the result."""
    emit, t = ctx.emit, vec("float", LANES)
    bound = "0x7FF0000000000000" if name == "min" else "0xFFF0000000000000"
    # Without .NaN the tree ignores NaN, so a NaN is what the lanes outside contribute.
    neutral = bound if ins.has("NaN") else "0x7FF8000000000000"
    number = emit.op(f"bitcast <32 x i32> {value} to {t}")
    if ins.has("abs"):
        number = emit.call("llvm.fabs.v32f32", t, (t, number))
    number = emit.select("float", LANES, inside, number, splat("float", neutral, LANES))
    kind = f"llvm.{name}imum{'' if ins.has('NaN') else 'num'}.v32f32"
    for distance in (16, 8, 4, 2, 1):
        order = ", ".join(f"i32 {lane ^ distance}" for lane in range(LANES))
        other = emit.op(f"shufflevector {t} {number}, {t} poison, <{LANES} x i32> <{order}>")
        number = emit.call(kind, t, (t, number), (t, other))
    return emit.op(f"bitcast float {emit.op(f'extractelement {t} {number}, i32 0')} to i32")


def _warp_value(ctx: Context, operand: Operand) -> str:
    """An i32 that all lanes share, though the analysis may not know it."""
    return ctx.get(operand, "i32", 1) if ctx.info(operand).uniform else _first_lane(ctx, operand)


def lower_barrier(ctx: Context, ins: Instruction) -> None:
    """bar and barrier: sync, arrive, red, and `bar.warp.sync`, at which a warp that runs in step has nothing to do."""
    if ins.has("warp"):
        return
    if ins.has("cluster"):
        raise ctx.refuse(ins, "clusters are not supported")
    emit = ctx.emit
    if ctx.is_alone and not ctx.masked and ctx.guard_mask is None:
        return
    ctx.has_barrier = True
    if ctx.masked or ctx.guard_mask is not None:
        _come_together(ctx, ins)
    reduces = ins.has("red")
    numbers = ins.operands[1:-1] if reduces else ins.operands
    number = _warp_value(ctx, numbers[0])
    count = _warp_value(ctx, numbers[1]) if len(numbers) > 1 else "0"
    blocks = "false" if ins.has("arrive") else "true"
    if reduces:
        ctx.has_reduction = True
        here = ctx.mask_bits(ctx.mask_value())
        yes = emit.op(f"and i32 {ctx.mask_bits(ctx.get(ins.operands[-1], 'i1', LANES))}, {here}")
        for name, bits in (("trues", yes), ("falses", emit.op(f"xor i32 {yes}, {here}"))):
            slot = _reduction(ctx, name, number)
            votes = emit.call("llvm.ctpop.i32", "i32", ("i32", bits))
            total = emit.op(f"add i32 {emit.op(f'load i32, ptr {slot}')}, {votes}")
            emit.do(f"store i32 {total}, ptr {slot}")
    emit.do(f"call void @arrive(ptr %cta, i32 {number}, i32 {count}, i1 {blocks}, i32 %warp)")
    if blocks == "false":
        return
    suspend(ctx)
    if reduces:
        trues, falses = (
            emit.op(f"load i32, ptr {_reduction(ctx, f'{n}.result', number)}") for n in ("trues", "falses")
        )
        target, _ = _target(ins)
        if ins.has("popc"):
            ctx.set(target, trues, "i32", 1)
        else:
            met = f"icmp eq i32 {falses}, 0" if ins.has("and") else f"icmp ne i32 {trues}, 0"
            ctx.set(target, emit.op(met), "i1", 1)


def _come_together(ctx: Context, ins: Instruction) -> None:
    """End the launch where lanes of a warp come to a barrier while others of it that have not left are elsewhere.

    A warp counts as a whole at a barrier. Lanes that wait for each other at barriers on different paths are not supported.
    """
    emit = ctx.emit
    alive = ctx.alive()
    if alive is None:
        alive = "-1"
    parted, together = emit.label("apart"), emit.label("together")
    same = emit.op(f"icmp eq i32 {ctx.mask_bits(ctx.mask_value())}, {alive}")
    emit.branch(same, together, parted)
    emit.start(parted)
    ctx.fail(apart(f"{ctx.module.path.name}:{ins.span.line}"))
    emit.start(together)


def _reduction(ctx: Context, field: str, number: str) -> str:
    """The slot of a barrier among the 16 of a field of the control area."""
    emit = ctx.emit
    at = emit.op(f"getelementptr i8, ptr %cta, i64 {FIELDS[field]}")
    return emit.op(f"getelementptr i32, ptr {at}, i32 {emit.op(f'and i32 {number}, 15')}")


def suspend(ctx: Context) -> None:
    """Let other warps run; the scheduler comes back when this one is ready."""
    emit = ctx.emit
    ctx.has_barrier = True
    resumed = emit.label("resumed")
    state = emit.op("call i8 @llvm.coro.suspend(token none, i1 false)")
    emit.do(f"switch i8 {state}, label %suspend [i8 0, label %{resumed} i8 1, label %cleanup]")
    emit.start(resumed)


def lower_nothing(ctx: Context, ins: Instruction) -> None:
    """Advice to the hardware: caches, register counts, sleeping; and grids that wait for each other, which run in order."""


def lower_policy(ctx: Context, ins: Instruction) -> None:
    """createpolicy: a cache policy, which no instruction looks at."""
    target, _ = _target(ins)
    ctx.set(target, "0", "i64", 1)


def lower_fence(ctx: Context, ins: Instruction) -> None:
    """Memory fences order what other threads of the host see."""
    if ins.has("cta", "proxy") or ins.opcode == "prefetch":
        return
    ctx.emit.do("fence seq_cst")
