"""The IR around a kernel: the loop over blocks, and the scheduler that resumes warps between barriers.

Memory of one worker (`%ws`): the block's control area, its shared memory, local memory, the warps' frames. The control
area is what `FIELDS` says; its size is CONTROL bytes. A task is described by `runtime.Task`.
"""

from __future__ import annotations

import os
import platform

from ptxtrain.engine.ptxcpu.traps import DEADLOCK

CONTROL = 1280  # bytes before shared memory
ALIGN = 128

# Byte offsets in the control area.
FIELDS = {
    "params": 0,
    "shared": 8,
    "globals": 16,
    "local": 24,
    "ctaid.x": 32,
    "ctaid.y": 36,
    "ctaid.z": 40,
    "nctaid.x": 44,
    "nctaid.y": 48,
    "nctaid.z": 52,
    "shared.bytes": 56,
    "exited": 60,  # threads of warps that have left
    "arrived": 64,  # [16] threads at each barrier
    "counts": 128,  # [16] the count that a barrier waits for, 0: all that have not left
    "status": 448,  # see `traps`
    "checker": 456,  # the checked mode's state
    "sync": 464,  # what workers share (`SYNC`), none where blocks are run without a plan
    "passes": 472,  # times that warps which wait for others were all visited
    "zero": 480,  # always 0, which LLVM does not know: see `Context.blended`
    "states": 192,  # [32] per warp: 0 ready, 1 + b waiting at barrier b, 99 left
    "handles": 512,  # [32] coroutine handles
    "trues": 1024,  # [16] threads that have come to bar.red with a true predicate
    "falses": 1088,  # [16] and with a false one
    "trues.result": 1152,  # [16] the same, of the last bar.red that was complete
    "falses.result": 1216,
}
LEFT = 99
SYNC = {"stop": 192, "failed": 256}  # byte offsets of the flags that end waiting


def _field(pointer: str, name: str) -> str:
    return f"getelementptr i8, ptr {pointer}, i64 {FIELDS[name]}"


def _keep_votes() -> str:
    """Part of `@release`: the votes of bar.red become results, and counting starts anew."""
    lines = []
    for name in ("trues", "falses"):
        lines.append(f"  %{name} = {_field('%cta', name)}")
        lines.append(f"  %{name}.at = getelementptr i32, ptr %{name}, i32 %id")
        lines.append(f"  %{name}.n = load i32, ptr %{name}.at")
        lines.append(f"  store i32 0, ptr %{name}.at")
        lines.append(f"  %{name}.result = {_field('%cta', f'{name}.result')}")
        lines.append(f"  %{name}.out = getelementptr i32, ptr %{name}.result, i32 %id")
        lines.append(f"  store i32 %{name}.n, ptr %{name}.out")
    return "\n".join(lines)


def helpers(warps: int, *, reduces: bool = False, checked: bool = False) -> str:
    """`@arrive` (a warp comes to a barrier) and `@leave` (a warp ends), for a block of `warps` warps.

    `reduces`: the kernel has bar.red.
    """
    return f"""
define internal void @release(ptr %cta, i32 %id) noinline {{
  {"call void @checked.release(ptr %cta, i32 %id)" if checked else ""}
  %arrived = {_field("%cta", "arrived")}
  %a = getelementptr i32, ptr %arrived, i32 %id
  store i32 0, ptr %a
{_keep_votes() if reduces else ""}
  %states = {_field("%cta", "states")}
  %waiting = add i32 %id, 1
  br label %loop
loop:
  %w = phi i32 [0, %0], [%w.next, %next]
  %s = getelementptr i32, ptr %states, i32 %w
  %state = load i32, ptr %s
  %here = icmp eq i32 %state, %waiting
  br i1 %here, label %free, label %next
free:
  store i32 0, ptr %s
  br label %next
next:
  %w.next = add i32 %w, 1
  %more = icmp ult i32 %w.next, {warps}
  br i1 %more, label %loop, label %done
done:
  ret void
}}

define internal void @arrive(ptr %cta, i32 %number, i32 %count, i1 %blocks, i32 %warp) noinline {{
  %id = and i32 %number, 15
  br i1 %blocks, label %wait, label %count.it
wait:
  %states = {_field("%cta", "states")}
  %s = getelementptr i32, ptr %states, i32 %warp
  %waiting = add i32 %id, 1
  store i32 %waiting, ptr %s
  br label %count.it
count.it:
  {"call void @checked.arrive(ptr %cta, i32 %id, i32 %warp)" if checked else ""}
  %arrived = {_field("%cta", "arrived")}
  %a = getelementptr i32, ptr %arrived, i32 %id
  %before = load i32, ptr %a
  %now = add i32 %before, 32
  store i32 %now, ptr %a
  %counts = {_field("%cta", "counts")}
  %c = getelementptr i32, ptr %counts, i32 %id
  store i32 %count, ptr %c
  %exited.p = {_field("%cta", "exited")}
  %exited = load i32, ptr %exited.p
  %all = sub i32 {32 * warps}, %exited
  %is.all = icmp eq i32 %count, 0
  %goal = select i1 %is.all, i32 %all, i32 %count
  %complete = icmp uge i32 %now, %goal
  br i1 %complete, label %free, label %done
free:
  call void @release(ptr %cta, i32 %id)
  br label %done
done:
  ret void
}}

define internal void @leave(ptr %cta, i32 %warp) noinline {{
  {"call void @checked.leave(ptr %cta, i32 %warp)" if checked else ""}
  %states = {_field("%cta", "states")}
  %s = getelementptr i32, ptr %states, i32 %warp
  store i32 {LEFT}, ptr %s
  %exited.p = {_field("%cta", "exited")}
  %before = load i32, ptr %exited.p
  %exited = add i32 %before, 32
  store i32 %exited, ptr %exited.p
  %all = sub i32 {32 * warps}, %exited
  %arrived = {_field("%cta", "arrived")}
  %counts = {_field("%cta", "counts")}
  br label %loop
loop:
  %id = phi i32 [0, %0], [%id.next, %next]
  %a = getelementptr i32, ptr %arrived, i32 %id
  %here = load i32, ptr %a
  %c = getelementptr i32, ptr %counts, i32 %id
  %count = load i32, ptr %c
  %some = icmp ne i32 %here, 0
  %is.all = icmp eq i32 %count, 0
  %enough = icmp uge i32 %here, %all
  %x = and i1 %some, %is.all
  %complete = and i1 %x, %enough
  br i1 %complete, label %free, label %next
free:
  call void @release(ptr %cta, i32 %id)
  br label %next
next:
  %id.next = add i32 %id, 1
  %more = icmp ult i32 %id.next, 16
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


COROUTINE_DECLARATIONS = """
declare token @llvm.coro.id(i32, ptr, ptr, ptr)
declare i64 @llvm.coro.size.i64()
declare ptr @llvm.coro.begin(token, ptr)
declare i8 @llvm.coro.suspend(token, i1)
declare void @llvm.coro.end(ptr, i1, token)
declare ptr @llvm.coro.free(token, ptr)
declare void @llvm.coro.resume(ptr)
@frame.size = internal global i64 0
"""


def block_loop(
    name: str, *, warps: int, shared: int, local: int, coroutine: bool, checked: bool = False, spins: bool = False
) -> str:
    """`i32 @name(task, first, last, ws)`: blocks [first, last) in order; 0, or a status of `traps`.

    `shared` and `local` are the bytes of static shared memory of a block and of a warp's local memory. `checked` blocks and
    warps run in the order that the launch asks for, and stop where a check finds something. `spins`: warps may wait for
    others without a barrier.
    """
    fill = "\n".join(
        f"  %f{i} = {_field('%ws', field)}\n  store i32 %{value}, ptr %f{i}"
        for i, (field, value) in enumerate(
            (("nctaid.x", "gx"), ("nctaid.y", "gy"), ("nctaid.z", "gz"), ("shared.bytes", "shared.bytes"))
        )
    )
    run = _coroutine_block(warps, checked, spins) if coroutine else _plain_block(warps, checked)
    b = "%b.at" if checked else "%b"
    return f"""
define i32 @"{name}"(ptr %task, i64 %first, i64 %last, ptr noalias %ws) {{
entry:
  %params.p = getelementptr i8, ptr %task, i64 8
  %params = load ptr, ptr %params.p
  %globals.p = getelementptr i8, ptr %task, i64 16
  %globals = load ptr, ptr %globals.p
  %gx.p = getelementptr i8, ptr %task, i64 24
  %gx = load i32, ptr %gx.p
  %gy.p = getelementptr i8, ptr %task, i64 28
  %gy = load i32, ptr %gy.p
  %gz.p = getelementptr i8, ptr %task, i64 32
  %gz = load i32, ptr %gz.p
  %dynamic.p = getelementptr i8, ptr %task, i64 36
  %dynamic = load i32, ptr %dynamic.p
  %shared.bytes = add i32 %dynamic, {shared}
  %shared.up = add i32 %shared.bytes, {ALIGN - 1}
  %shared.round = and i32 %shared.up, -{ALIGN}
  %shared.size = zext i32 %shared.round to i64
  %shared = getelementptr i8, ptr %ws, i64 {CONTROL}
  %local = getelementptr i8, ptr %shared, i64 %shared.size
  %frames = getelementptr i8, ptr %local, i64 {local * warps}
{fill}
  %p0 = {_field("%ws", "params")}
  store ptr %params, ptr %p0
  %p1 = {_field("%ws", "shared")}
  store ptr %shared, ptr %p1
  %p2 = {_field("%ws", "globals")}
  store ptr %globals, ptr %p2
  %x.p = {_field("%ws", "ctaid.x")}
  %y.p = {_field("%ws", "ctaid.y")}
  %z.p = {_field("%ws", "ctaid.z")}
  %gx64 = zext i32 %gx to i64
  %gy64 = zext i32 %gy to i64
  %local.p = {_field("%ws", "local")}
  store ptr %local, ptr %local.p
  %states = {_field("%ws", "states")}
  %handles = {_field("%ws", "handles")}
  %status.p = {_field("%ws", "status")}
  store i32 0, ptr %status.p
  %zero.p = {_field("%ws", "zero")}
  store i64 0, ptr %zero.p
  {"call void @checked.start(ptr %ws, ptr %task, i64 %first)" if checked else ""}
  br label %blocks
blocks:
  %b = phi i64 [%first, %entry], [%b.next, %block.done]
  %is.more = icmp ult i64 %b, %last
  br i1 %is.more, label %block, label %all.done
block:
  {"%b.at = call i64 @checked.block(ptr %ws, i64 %b)" if checked else ""}
  %x = urem i64 {b}, %gx64
  %row = udiv i64 {b}, %gx64
  %y = urem i64 %row, %gy64
  %z = udiv i64 %row, %gy64
  %x32 = trunc i64 %x to i32
  %y32 = trunc i64 %y to i32
  %z32 = trunc i64 %z to i32
  store i32 %x32, ptr %x.p
  store i32 %y32, ptr %y.p
  store i32 %z32, ptr %z.p
{run}
block.done:
  %b.next = add i64 %b, 1
  %ended = load i32, ptr %status.p
  %is.well = icmp eq i32 %ended, 0
  br i1 %is.well, label %blocks, label %failed
failed:
  ret i32 %ended
all.done:
  ret i32 0
}}
"""


def _ordered(number: str, checked: bool) -> tuple[str, str]:
    """The warp that comes as the `number`th, and the instruction that finds it."""
    if not checked:
        return number, ""
    return f"{number}.at", f"{number}.at = call i32 @checked.warp(ptr %ws, i32 {number})"


def _stop(label: str, following: str, checked: bool) -> str:
    """Go on at `following`, or end the blocks where a check has found something."""
    if not checked:
        return f"  br label %{following}"
    return (
        f"  %status.{label} = load i32, ptr %status.p\n  %well.{label} = icmp eq i32 %status.{label}, 0\n"
        f"  br i1 %well.{label}, label %{following}, label %block.done"
    )


def _plain_block(warps: int, checked: bool) -> str:
    w, find = _ordered("%w", checked)
    return f"""
  br label %warps
warps:
  %w = phi i32 [0, %block], [%w.next, %warp.done]
  {find}
  call void @warp(ptr %ws, i32 {w})
{_stop("w", "warp.done", checked)}
warp.done:
  %w.next = add i32 %w, 1
  %w.more = icmp ult i32 %w.next, {warps}
  br i1 %w.more, label %warps, label %block.done
"""


def _keep_waiting() -> str:
    """Between two passes over warps of which some wait without a barrier: end it if anything went wrong, or yield."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    pause = "call void @llvm.x86.sse2.pause()" if x86 else ""
    rest = "call i32 @sched_yield()" if os.name == "posix" else "add i32 0, 0"
    return f"""
  %trouble = load i32, ptr %status.p
  %is.calm = icmp eq i32 %trouble, 0
  br i1 %is.calm, label %calm, label %block.done
calm:
  {pause}
  %passes.p = {_field("%ws", "passes")}
  %passes = load i32, ptr %passes.p
  %passes.next = add i32 %passes, 1
  store i32 %passes.next, ptr %passes.p
  %few = and i32 %passes.next, 255
  %is.few = icmp ne i32 %few, 0
  br i1 %is.few, label %pass, label %ask
ask:
  %rested = {rest}
  %sync.p = {_field("%ws", "sync")}
  %sync = load ptr, ptr %sync.p
  %alone = icmp eq ptr %sync, null
  br i1 %alone, label %pass, label %look.up
look.up:
  %stop.p = getelementptr i8, ptr %sync, i64 {SYNC["stop"]}
  %stop = load atomic i64, ptr %stop.p monotonic, align 8
  %failed.p = getelementptr i8, ptr %sync, i64 {SYNC["failed"]}
  %failed.now = load atomic i64, ptr %failed.p monotonic, align 8
  %either = or i64 %stop, %failed.now
  %is.over = icmp ne i64 %either, 0
  br i1 %is.over, label %give.up, label %pass
give.up:
  ret i32 0
"""


def spin_declarations() -> str:
    """What `block_loop` with `spins` calls."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    lines = ["declare void @llvm.x86.sse2.pause()"] if x86 else []
    return "\n".join(lines + (["declare i32 @sched_yield()"] if os.name == "posix" else []))


def _coroutine_block(warps: int, checked: bool, spins: bool) -> str:
    w, find = _ordered("%w", checked)
    v, find_v = _ordered("%v", checked)
    return f"""
  %fresh = {_field("%ws", "exited")}
  call void @llvm.memset.p0.i64(ptr %fresh, i8 0, i64 {FIELDS["status"] - FIELDS["exited"]}, i1 false)
  %votes = {_field("%ws", "trues")}
  call void @llvm.memset.p0.i64(ptr %votes, i8 0, i64 128, i1 false)
  br label %start
start:
  %w = phi i32 [0, %block], [%w.next, %started]
  {find}
  ; Frames go by the order of starting: the first start tells how large they are.
  %w64 = zext i32 %w to i64
  %size.raw = load i64, ptr @frame.size
  %size.up = add i64 %size.raw, {ALIGN - 1}
  %size = and i64 %size.up, -{ALIGN}
  %own = mul i64 %w64, %size
  %frame = getelementptr i8, ptr %frames, i64 %own
  %handle = call ptr @warp(ptr %ws, i32 {w}, ptr %frame)
  %slot = getelementptr ptr, ptr %handles, i32 {w}
  store ptr %handle, ptr %slot
{_stop("w", "started", checked)}
started:
  %w.next = add i32 %w, 1
  %w.more = icmp ult i32 %w.next, {warps}
  br i1 %w.more, label %start, label %pass
pass:
  br label %visit
visit:
  %v = phi i32 [0, %pass], [%v.next, %visited]
  %moved = phi i1 [false, %pass], [%moved.next, %visited]
  %waiting = phi i1 [false, %pass], [%waiting.next, %visited]
  {find_v}
  %s = getelementptr i32, ptr %states, i32 {v}
  %state = load i32, ptr %s
  %is.ready = icmp eq i32 %state, 0
  br i1 %is.ready, label %go, label %look
go:
  %slot.v = getelementptr ptr, ptr %handles, i32 {v}
  %handle.v = load ptr, ptr %slot.v
  call void @llvm.coro.resume(ptr %handle.v)
{_stop("v", "resumed", checked)}
resumed:
  br label %visited
look:
  %left = icmp eq i32 %state, {LEFT}
  %still = xor i1 %left, true
  br label %visited
visited:
  %one = phi i1 [true, %resumed], [false, %look]
  %two = phi i1 [true, %resumed], [%still, %look]
  %moved.next = or i1 %moved, %one
  %waiting.next = or i1 %waiting, %two
  %v.next = add i32 %v, 1
  %v.more = icmp ult i32 %v.next, {warps}
  br i1 %v.more, label %visit, label %passed
passed:
  br i1 %waiting.next, label %again, label %block.done
again:
  br i1 %moved.next, label %{"wait.on" if spins else "pass"}, label %deadlock
{"wait.on:" + _keep_waiting() if spins else ""}
deadlock:
  ret i32 {DEADLOCK}
"""


# Matrix tiles: palette 1; the bytes of a row of each of the eight (four sums, two A, two B, see `tiles`), then their rows.
_ROW_BYTES = (64, 64, 64, 64, 32, 32, 64, 64)
_TILE_ROWS = (16, 16, 16, 16, 16, 16, 8, 8)
_TILE_BYTES = [1, *([0] * 15), *(b for n in _ROW_BYTES for b in (n, 0)), *([0] * 16), *_TILE_ROWS, *([0] * 8)]


def with_tiles(loop: str) -> str:
    """`block_loop`'s text with the thread's matrix tiles set up before the blocks and given back behind them."""
    loop = loop.replace("entry:\n", "entry:\n  call void @llvm.x86.ldtilecfg(ptr @tile.config)\n", 1)
    loop = loop.replace("  ret i32", "  call void @llvm.x86.tilerelease()\n  ret i32")
    config = ", ".join(f"i8 {b}" for b in _TILE_BYTES)
    return f"""
@tile.config = private constant [64 x i8] [{config}], align 64
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
{loop}"""
