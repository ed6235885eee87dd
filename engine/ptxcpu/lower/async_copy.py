"""cp.async: copies from global to shared memory of 4, 8 or 16 bytes a lane, with zero-filled tails.

The copy is made when it is issued, the earliest time that the ISA allows; commit and wait then have nothing to do. (The
checked mode makes it at the latest.)
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, splat
from ptxtrain.engine.ptxcpu.lower.memory import lane_pointers
from ptxtrain.engine.ptxcpu.tree import Imm, Instruction, Reg


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
    pointers = []
    for operand, space in zip(ins.operands[:2], ("shared", "global"), strict=True):
        slot = emit.alloca("[32 x ptr], align 64", "ends")
        emit.do(f"store <32 x ptr> {lane_pointers(ctx, ins, operand, space)}, ptr {slot}, align 64")
        pointers.append(slot)
    mask = ctx.lane_mask()
    # A cache policy is a 64-bit register behind the size; it changes nothing here.
    extra = next((o for o in ins.operands[3:] if not (isinstance(o, Reg) and o.type.endswith("64"))), None)
    if extra is None or (isinstance(extra, Imm) and extra.value >= size.value):
        name = f"cp.async.{size.value}" + (".masked" if mask else "")
        ctx.helpers.setdefault(name, _copy(name, size.value, masked=mask is not None))
        tail = f", i32 {ctx.mask_bits(mask)}" if mask else ""
        emit.do(f'call void @"{name}"(ptr {pointers[0]}, ptr {pointers[1]}{tail})')
        return
    if isinstance(extra, Reg) and extra.type == "pred":
        ignored = ctx.get(extra, "i1", LANES)
        counts = emit.select("i32", LANES, ignored, splat("i32", 0, LANES), splat("i32", size.value, LANES))
    else:
        counts = ctx.get(extra, "i32", LANES)
    slot = emit.alloca("[32 x i32], align 64", "counts")
    emit.do(f"store <32 x i32> {counts}, ptr {slot}, align 64")
    name = f"cp.async.{size.value}.part"
    ctx.helpers.setdefault(name, _copy_part(name, size.value))
    bits = ctx.mask_bits(mask) if mask else "-1"
    emit.do(f'call void @"{name}"(ptr {pointers[0]}, ptr {pointers[1]}, ptr {slot}, i32 {bits})')


def _copy(name: str, size: int, *, masked: bool) -> str:
    """All lanes' copies in a row (19 ns for 32 of 16 bytes), or those of a mask."""
    lines = [
        f'define internal void @"{name}"(ptr %dst, ptr %src{", i32 %mask" if masked else ""}) noinline nounwind {{'
    ]
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
            f"  %s{lane} = load ptr, ptr %s{lane}.at",
            f"  %d{lane}.at = getelementptr ptr, ptr %dst, i64 {lane}",
            f"  %d{lane} = load ptr, ptr %d{lane}.at",
            f"  %v{lane} = load i{8 * size}, ptr %s{lane}, align {size}",
            f"  store i{8 * size} %v{lane}, ptr %d{lane}, align {size}",
        ]
        if masked:
            lines += [f"  br label %next{lane}", f"next{lane}:"]
    return "\n".join([*lines, "  ret void", "}"])


def _copy_part(name: str, size: int) -> str:
    """The first counts[lane] bytes of each lane's source, zeros behind them; a count of 0 reads nothing."""
    return f"""define internal void @"{name}"(ptr %dst, ptr %src, ptr %counts, i32 %mask) noinline nounwind {{
entry:
  br label %lanes
lanes:
  %lane = phi i64 [0, %entry], [%lane.next, %next]
  %lane32 = trunc i64 %lane to i32
  %moved = lshr i32 %mask, %lane32
  %bit = and i32 %moved, 1
  %is.here = icmp ne i32 %bit, 0
  br i1 %is.here, label %here, label %next
here:
  %s.at = getelementptr ptr, ptr %src, i64 %lane
  %s = load ptr, ptr %s.at
  %d.at = getelementptr ptr, ptr %dst, i64 %lane
  %d = load ptr, ptr %d.at
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
next:
  %lane.next = add i64 %lane, 1
  %on = icmp ult i64 %lane.next, {LANES}
  br i1 %on, label %lanes, label %done
done:
  ret void
}}"""
