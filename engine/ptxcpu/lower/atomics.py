"""atom and red: the lanes that act, one after another from the lowest; each its own atomic operation.

Integer operations of a whole warp on one address whose old values nobody wants are one operation on the lanes' sum. Shared
memory belongs to one host thread, so its operations are plain. Floats are read, computed and exchanged by compare-and-swap;
f32 sums in global memory flush subnormal numbers, as the ISA has it, and those in shared memory do not.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, splat, vec
from ptxtrain.engine.ptxcpu.lower.floating import Floats
from ptxtrain.engine.ptxcpu.lower.memory import step_pointer
from ptxtrain.engine.ptxcpu.lower.places import Place, place_of, space_of
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Address, Instruction, Operand, Reg, Sink, Symbol, Vector

_NAMES = ("add", "and", "or", "xor", "exch", "inc", "dec", "min", "max", "cas")
_ATOMICRMW = {"exch": "xchg", "inc": "uinc_wrap", "dec": "udec_wrap", "smin": "min", "smax": "max"}
# What lanes that do not act contribute to a sum of the whole warp.
_NEUTRAL = {"add": 0, "and": -1, "or": 0, "xor": 0, "umin": -1, "umax": 0}


def lower_atom(ctx: Context, ins: Instruction) -> None:
    """Every operation, type and vector of atom and red but those on 128 bits."""
    emit = ctx.emit
    type_, space = ins.types[-1], space_of(ins)
    returns = ins.opcode == "atom"
    operands = ins.operands[1:] if returns else ins.operands
    if ins.has("L2::cache_hint"):
        operands = operands[:-1]
    name = next(m for m in ins.modifiers if m in _NAMES)
    bits = TYPE_BITS[type_]
    if bits not in (16, 32, 64):
        raise ctx.refuse(ins, f"atomic operations on {bits} bits are not known")
    place = place_of(ctx, ins, operands[0], space)
    sources = [_elements(o) for o in operands[1:]]
    targets = _elements(ins.operands[0]) if returns else [Sink()] * len(sources[0])
    kind = _kind(name, type_)
    assert isinstance(operands[0], Address)
    if isinstance(operands[0].base, Symbol) and space == "generic":
        space = ctx.symbols[operands[0].base.name]()[0]
    if place.scalar is not None and kind in (*_NEUTRAL, "smin", "smax") and all(isinstance(t, Sink) for t in targets):
        _whole_warp(ctx, ins, kind, place.scalar, bits, sources[0][0], space)
        return
    pointers = _pointers(ctx, place)
    values = [[ctx.get(o, f"i{bits}", LANES) for o in one] for one in sources]
    slots = [None if isinstance(t, Sink) else emit.alloca(vec(f"i{bits}", LANES), "old") for t in targets]
    mask = ctx.lane_mask()
    waiting = emit.alloca("i32", "waiting")
    emit.do(f"store i32 {ctx.mask_bits(mask) if mask else '-1'}, ptr {waiting}")
    loop, body, done = emit.label("lanes"), emit.label("lane"), emit.label("atomic")
    emit.jump(loop)
    emit.start(loop)
    left = emit.op(f"load i32, ptr {waiting}")
    emit.branch(emit.op(f"icmp ne i32 {left}, 0"), body, done)
    emit.start(body)
    lane = emit.call("llvm.cttz.i32", "i32", ("i32", left), ("i1", "true"))
    below = emit.op(f"sub i32 {left}, 1")
    emit.do(f"store i32 {emit.op(f'and i32 {left}, {below}')}, ptr {waiting}")
    pointer = emit.op(f"extractelement <32 x ptr> {pointers}, i32 {lane}")
    t = vec(f"i{bits}", LANES)
    for i, slot in enumerate(slots):
        parts = [emit.op(f"extractelement {t} {one[i]}, i32 {lane}") for one in values]
        old = _one(ctx, ins, kind, type_, step_pointer(ctx, pointer, i * bits // 8), parts, space)
        if slot is not None:
            before = emit.op(f"load {t}, ptr {slot}")
            emit.do(f"store {t} {emit.op(f'insertelement {t} {before}, i{bits} {old}, i32 {lane}')}, ptr {slot}")
    emit.jump(loop)
    emit.start(done)
    for target, slot in zip(targets, slots, strict=True):
        if slot is not None:
            assert isinstance(target, Reg)
            ctx.set(target, emit.op(f"load {t}, ptr {slot}"), f"i{bits}", LANES)


def _elements(operand: Operand) -> list[Operand]:
    return list(operand.elements) if isinstance(operand, Vector) else [operand]


def _pointers(ctx: Context, place: Place) -> str:
    if place.lanes is not None:
        return place.lanes
    assert place.scalar is not None
    return ctx.emit.broadcast("ptr", place.scalar)


def _kind(name: str, type_: str) -> str:
    """The operation as `atomicrmw` calls it; floats are `fadd`, `fmin`, `fmax`."""
    if name == "cas" or name == "exch":
        return name
    if type_[0] == "f" or type_.startswith("bf"):
        return f"f{name}"
    return ("s" if type_[0] == "s" else "u") + name if name in ("min", "max") else name


def _whole_warp(
    ctx: Context, ins: Instruction, kind: str, pointer: str, bits: int, source: Operand, space: str
) -> None:
    """One operation for all lanes, on what they contribute together."""
    emit = ctx.emit
    scalar, t = f"i{bits}", vec(f"i{bits}", LANES)
    neutral = {"smin": (1 << (bits - 1)) - 1, "smax": -(1 << (bits - 1))}.get(kind, _NEUTRAL.get(kind, 0))
    value = ctx.get(source, scalar, LANES)
    mask = ctx.lane_mask()
    if mask is not None:
        value = emit.select(scalar, LANES, mask, value, splat(scalar, neutral, LANES))
    total = emit.call(f"llvm.vector.reduce.{kind}.v32{scalar}", scalar, (t, value))
    _one(ctx, ins, kind, ins.types[-1], pointer, [total], space)


def _one(ctx: Context, ins: Instruction, kind: str, type_: str, pointer: str, parts: list[str], space: str) -> str:
    """One lane's operation; the old value's bits."""
    emit, bits = ctx.emit, TYPE_BITS[type_]
    scalar = f"i{bits}"
    order = "acq_rel" if ins.has("acq_rel", "acquire", "release") else "monotonic"
    if space == "shared":
        old = emit.op(f"load {scalar}, ptr {pointer}, align {bits // 8}")
        emit.do(f"store {scalar} {_new(ctx, kind, type_, old, parts, flush=False)}, ptr {pointer}, align {bits // 8}")
        return old
    if kind == "cas":
        fail = "acquire" if order == "acq_rel" else "monotonic"
        pair = emit.op(f"cmpxchg ptr {pointer}, {scalar} {parts[0]}, {scalar} {parts[1]} {order} {fail}")
        return emit.op(f"extractvalue {{ {scalar}, i1 }} {pair}, 0")
    if kind[0] != "f":
        return emit.op(f"atomicrmw {_ATOMICRMW.get(kind, kind)} ptr {pointer}, {scalar} {parts[0]} {order}")
    slot = emit.alloca(scalar, "seen")
    again, done = emit.label("again"), emit.label("exchanged")
    emit.do(f"store {scalar} {emit.op(f'load {scalar}, ptr {pointer}, align {bits // 8}')}, ptr {slot}")
    emit.jump(again)
    emit.start(again)
    old = emit.op(f"load {scalar}, ptr {slot}")
    new = _new(ctx, kind, type_, old, parts, flush=type_ == "f32")
    pair = emit.op(f"cmpxchg ptr {pointer}, {scalar} {old}, {scalar} {new} {order} monotonic")
    emit.do(f"store {scalar} {emit.op(f'extractvalue {{ {scalar}, i1 }} {pair}, 0')}, ptr {slot}")
    emit.branch(emit.op(f"extractvalue {{ {scalar}, i1 }} {pair}, 1"), done, again)
    emit.start(done)
    return old


def _new(ctx: Context, kind: str, type_: str, old: str, parts: list[str], *, flush: bool) -> str:
    """What memory holds afterwards."""
    emit, bits = ctx.emit, TYPE_BITS[type_]
    scalar = f"i{bits}"
    if kind == "cas":
        same = emit.op(f"icmp eq {scalar} {old}, {parts[0]}")
        return emit.op(f"select i1 {same}, {scalar} {parts[1]}, {scalar} {old}")
    if kind == "exch":
        return parts[0]
    if kind == "inc":
        over = emit.op(f"icmp uge {scalar} {old}, {parts[0]}")
        return emit.op(f"select i1 {over}, {scalar} 0, {scalar} {emit.op(f'add {scalar} {old}, 1')}")
    if kind == "dec":
        none = emit.op(f"icmp eq {scalar} {old}, 0")
        over = emit.op(f"icmp ugt {scalar} {old}, {parts[0]}")
        wraps = emit.op(f"or i1 {none}, {over}")
        return emit.op(f"select i1 {wraps}, {scalar} {parts[0]}, {scalar} {emit.op(f'sub {scalar} {old}, 1')}")
    if kind in ("smin", "smax", "umin", "umax"):
        return emit.call(f"llvm.{kind}.{scalar}", scalar, (scalar, old), (scalar, parts[0]))
    if kind[0] != "f":
        return emit.op(f"{kind} {scalar} {old}, {parts[0]}")
    floats = Floats(ctx, type_, 1)
    a, b = floats.from_bits(old), floats.from_bits(parts[0])
    if flush:
        a, b = floats.flush(a), floats.flush(b)
    result = floats.op("fadd", a, b) if kind == "fadd" else floats.intrinsic(f"{kind[1:]}imumnum", a, b)
    return floats.to_bits(floats.flush(result) if flush else result)
