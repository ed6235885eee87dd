"""cp.async: copies from global to shared memory of 4, 8 or 16 bytes a lane, with zero-filled tails.

The copy is made when it is issued, the earliest time that the ISA allows; commit and wait then have nothing to do. (The
checked mode makes it at the latest.)
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, splat
from ptxtrain.engine.ptxcpu.lower.places import lane_array
from ptxtrain.engine.ptxcpu.lower.steps import (
    Stepped,
    address_lines,
    arguments,
    first_pointer,
    is_quads,
    parameters,
    stepped_in,
)
from ptxtrain.engine.ptxcpu.tree import Imm, Instruction, Reg

LINE = 64  # bytes of a cache line
LANE_BYTES = 16  # of the largest copy
QUAD = 4  # lanes whose copies fill a line

# Arrays of the lanes' addresses, and what to add to each.
_ENDS = "ptr %dst, i64 %dst.offset, ptr %src, i64 %src.offset"


def lower_cp(ctx: Context, ins: Instruction) -> None:
    """cp.async.{ca, cg}.shared.global [dst], [src], size{, src-size | ignore}, and its groups."""
    if not ins.has("async") or ins.has("bulk", "mbarrier"):
        raise ctx.refuse(ins, "bulk and mbarrier copies are not known")
    if ins.has("commit_group", "wait_group", "wait_all"):
        return
    size = ins.operands[2]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise ctx.refuse(ins, "cp.async copies 4, 8 or 16 bytes")
    emit = ctx.emit
    kept = [stepped_in(ctx, o, space) for o, space in zip(ins.operands[:2], ("shared", "global"), strict=True)]
    mask = ctx.lane_mask()
    # A cache policy is a 64-bit register behind the size; it changes nothing here.
    extra = next((o for o in ins.operands[3:] if not (isinstance(o, Reg) and o.type.endswith("64"))), None)
    if extra is None or (isinstance(extra, Imm) and extra.value >= size.value):
        if kept[0] is not None and kept[1] is not None:
            _copy_stepped(ctx, (kept[0], kept[1]), size.value, mask)
            return
        ends, both = _arrays(ctx, ins)
        name = f"cp.async.{size.value}" + (".masked" if mask else "")
        emit.declare("llvm.prefetch.p0", "void", "ptr, i32 immarg, i32 immarg, i32 immarg")
        ctx.helpers.setdefault(name, _copy(name, size.value, masked=mask is not None))
        tail = f", i32 {ctx.mask_bits(mask)}" if mask else f", i64 {_ahead(ctx, ends[1][0])}"
        emit.do(f'call void @"{name}"({both}{tail})')
        return
    if isinstance(extra, Reg) and extra.type == "pred":
        ignored = ctx.get(extra, "i1", LANES)
        counts = emit.select("i32", LANES, ignored, splat("i32", 0, LANES), splat("i32", size.value, LANES))
    else:
        counts = ctx.get(extra, "i32", LANES)
    slot = emit.alloca("[32 x i32], align 64", "counts")
    emit.do(f"store <32 x i32> {counts}, ptr {slot}, align 64")
    bits = ctx.mask_bits(mask) if mask else "-1"
    if kept[0] is not None and kept[1] is not None:
        to, of = kept[0].kept.bits, kept[1].kept.bits
        name = f"cp.async.{size.value}.part.{to}.{of}"
        ends_of = f"{parameters('d', to)}, {parameters('s', of)}"
        ctx.helpers.setdefault(name, _copy_part(name, size.value, ends_of, _lane_loop("entry", to, of)))
        both = f"{arguments(ctx, kept[0])}, {arguments(ctx, kept[1])}"
        emit.do(f'call void @"{name}"({both}, ptr {slot}, i32 {bits})')
        return
    _, both = _arrays(ctx, ins)
    name = f"cp.async.{size.value}.part"
    ctx.helpers.setdefault(name, _copy_part(name, size.value, _ENDS, _LANE_OF_ARRAYS))
    emit.do(f'call void @"{name}"({both}, ptr {slot}, i32 {bits})')


def _copy_stepped(ctx: Context, ends: tuple[Stepped, Stepped], size: int, mask: str | None) -> None:
    """Whole copies between addresses that have roots; of 16 bytes by quads of lanes where those lie side by side."""
    emit = ctx.emit
    dst, src = ends
    name = f"cp.async.{size}.{dst.kept.bits}.{src.kept.bits}"
    ctx.helpers.setdefault(name, _copy_lanes(name, size, dst.kept.bits, src.kept.bits))
    bits = ctx.mask_bits(mask) if mask else "-1"
    call = f'call void @"{name}"({arguments(ctx, dst)}, {arguments(ctx, src)}, i32 {bits})'
    if size != LANE_BYTES or mask is not None:
        emit.do(call)
        return
    whole, apart, done = emit.label("quads"), emit.label("lanes"), emit.label("copied")
    emit.branch(emit.op(f"and i1 {is_quads(ctx, dst, size)}, {is_quads(ctx, src, size)}"), whole, apart)
    emit.start(apart)
    emit.do(call)
    emit.jump(done)
    emit.start(whole)
    for lane in range(0, LANES, QUAD):
        value = emit.op(f"load <16 x i32>, ptr {first_pointer(ctx, src, lane)}, align {LANE_BYTES}")
        emit.do(f"store <16 x i32> {value}, ptr {first_pointer(ctx, dst, lane)}, align {LANE_BYTES}")
    emit.jump(done)
    emit.start(done)


def _copy_lanes(name: str, size: int, to: int, of: int) -> str:
    """The copies of a mask's lanes."""
    ends = f"{parameters('d', to)}, {parameters('s', of)}"
    lines = [f'define internal void @"{name}"({ends}, i32 %mask) noinline nounwind {{', "entry:", "  br label %lanes"]
    lines += [
        *_lane_loop("entry", to, of),
        f"  %v = load i{8 * size}, ptr %s, align {size}",
        f"  store i{8 * size} %v, ptr %d, align {size}",
        "  br label %next",
        *_LANE_NEXT,
    ]
    return "\n".join([*lines, "}"])


def _lane_loop(before: str, to: int, of: int) -> list[str]:
    """Lines of a loop over the lanes of %mask up to the body of one, with its pointers %d and %s."""
    lines = [
        "lanes:",
        f"  %lane = phi i64 [0, %{before}], [%lane.next, %next]",
        "  %lane32 = trunc i64 %lane to i32",
        "  %shifted = lshr i32 %mask, %lane32",
        "  %bit = and i32 %shifted, 1",
        "  %is.here = icmp ne i32 %bit, 0",
        "  br i1 %is.here, label %here, label %next",
        "here:",
    ]
    for end, bits in (("s", of), ("d", to)):
        lines += [
            f"  %{end}.at = getelementptr i{bits}, ptr %{end}.array, i64 %lane",
            f"  %{end}.0 = load i{bits}, ptr %{end}.at",
            f"  %{end}.sum = add i{bits} %{end}.0, %{end}.moved",
            *address_lines(end, bits, f"%{end}.sum", f"%{end}"),
        ]
    return lines


_LANE_NEXT = (
    "next:",
    "  %lane.next = add i64 %lane, 1",
    f"  %on = icmp ult i64 %lane.next, {LANES}",
    "  br i1 %on, label %lanes, label %done",
    "done:",
    "  ret void",
)


def _arrays(ctx: Context, ins: Instruction) -> tuple[list[tuple[str, int]], str]:
    """Both ends as arrays of pointers, and as arguments of a helper."""
    ends = [lane_array(ctx, ins, o, space) for o, space in zip(ins.operands[:2], ("shared", "global"), strict=True)]
    return ends, ", ".join(f"ptr {slot}, i64 {offset}" for slot, offset in ends)


def _ahead(ctx: Context, sources: str) -> str:
    """How far lane 0's source has moved since this instruction ran last, which is where it will likely move next."""
    emit = ctx.emit
    last = emit.alloca("i64", "last")
    emit.allocas.append(f"  store i64 0, ptr {last}")
    here = emit.op(f"load i64, ptr {sources}")
    ahead = emit.op(f"sub i64 {here}, {emit.op(f'load i64, ptr {last}')}")
    emit.do(f"store i64 {here}, ptr {last}")
    return ahead


def _copy(name: str, size: int, *, masked: bool) -> str:
    """All lanes' copies in a row (19 ns for 32 of 16 bytes), or those of a mask.

    Rows of a tile lie too far apart for the processor to see where they lead, so the copy without a mask asks for the
    lines that the next tile will want (`ahead` bytes on): a tenth of a large product's time.
    """
    lines = [f'define internal void @"{name}"({_ENDS}, {"i32 %mask" if masked else "i64 %ahead"}) noinline nounwind {{']
    lines.append("entry:")
    for lane in range(LANES):
        if masked:
            lines += [
                f"  %bit{lane} = and i32 %mask, {1 << lane if lane < 31 else -(1 << 31)}",
                f"  %here{lane} = icmp ne i32 %bit{lane}, 0",
                f"  br i1 %here{lane}, label %copy{lane}, label %next{lane}",
                f"copy{lane}:",
            ]
        lines += [
            f"  %s{lane}.at = getelementptr ptr, ptr %src, i64 {lane}",
            f"  %s{lane}.0 = load ptr, ptr %s{lane}.at",
            f"  %s{lane} = getelementptr i8, ptr %s{lane}.0, i64 %src.offset",
            f"  %d{lane}.at = getelementptr ptr, ptr %dst, i64 {lane}",
            f"  %d{lane}.0 = load ptr, ptr %d{lane}.at",
            f"  %d{lane} = getelementptr i8, ptr %d{lane}.0, i64 %dst.offset",
            f"  %v{lane} = load <{size // 4} x i32>, ptr %s{lane}, align {size}",
            f"  store <{size // 4} x i32> %v{lane}, ptr %d{lane}, align {size}",
        ]
        if masked:
            lines += [f"  br label %next{lane}", f"next{lane}:"]
        elif lane * size % LINE == 0:
            lines += [
                f"  %p{lane} = getelementptr i8, ptr %s{lane}, i64 %ahead",
                f"  call void @llvm.prefetch.p0(ptr %p{lane}, i32 0, i32 2, i32 1)",
            ]
    return "\n".join([*lines, "  ret void", "}"])


_LANE_OF_ARRAYS = [
    "lanes:",
    "  %lane = phi i64 [0, %entry], [%lane.next, %next]",
    "  %lane32 = trunc i64 %lane to i32",
    "  %shifted = lshr i32 %mask, %lane32",
    "  %bit = and i32 %shifted, 1",
    "  %is.here = icmp ne i32 %bit, 0",
    "  br i1 %is.here, label %here, label %next",
    "here:",
    "  %s.at = getelementptr ptr, ptr %src, i64 %lane",
    "  %s.0 = load ptr, ptr %s.at",
    "  %s = getelementptr i8, ptr %s.0, i64 %src.offset",
    "  %d.at = getelementptr ptr, ptr %dst, i64 %lane",
    "  %d.0 = load ptr, ptr %d.at",
    "  %d = getelementptr i8, ptr %d.0, i64 %dst.offset",
]


def _copy_part(name: str, size: int, ends: str, lane: list[str]) -> str:
    """The first counts[lane] bytes of each lane's source, zeros behind them; a count of 0 reads nothing."""
    loop = "\n".join(lane)
    after = "\n".join(_LANE_NEXT)
    return f"""define internal void @"{name}"({ends}, ptr %counts, i32 %mask) noinline nounwind {{
entry:
  br label %lanes
{loop}
  %c.at = getelementptr i32, ptr %counts, i64 %lane
  %count = load i32, ptr %c.at
  %is.whole = icmp uge i32 %count, {size}
  br i1 %is.whole, label %whole, label %part
whole:
  %v = load i{8 * size}, ptr %s, align {size}
  store i{8 * size} %v, ptr %d, align {size}
  br label %next
part:
  store i{8 * size} 0, ptr %d, align {size}
  %count64 = zext i32 %count to i64
  br label %bytes
bytes:
  %i = phi i64 [0, %part], [%i.next, %byte]
  %more = icmp ult i64 %i, %count64
  br i1 %more, label %byte, label %next
byte:
  %b.s = getelementptr i8, ptr %s, i64 %i
  %b = load i8, ptr %b.s
  %b.d = getelementptr i8, ptr %d, i64 %i
  store i8 %b, ptr %b.d
  %i.next = add i64 %i, 1
  br label %bytes
{after}
}}"""
