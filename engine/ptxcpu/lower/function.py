"""The driver: an entry of a module, compiled for one block shape, as a whole module of LLVM IR.

A warp is a function (`flow` has its blocks). In a kernel with barriers it is a coroutine: a barrier suspends the warp, and LLVM
keeps what lives across it. Around it stands the loop over blocks and warps (`runner`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.cfg import Block, Region, build_blocks
from ptxtrain.engine.ptxcpu.inline import inline_calls, trap_messages
from ptxtrain.engine.ptxcpu.jit import bf16_products
from ptxtrain.engine.ptxcpu.lower import runner
from ptxtrain.engine.ptxcpu.lower.checks import GAP, LOCAL_GAP, Checked, Checks, ranges
from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, iota, splat
from ptxtrain.engine.ptxcpu.lower.flow import Flow
from ptxtrain.engine.ptxcpu.lower.fragments import paired, place_fragments
from ptxtrain.engine.ptxcpu.lower.layouts import layout, layout_globals, layout_params
from ptxtrain.engine.ptxcpu.lower.names import Names
from ptxtrain.engine.ptxcpu.lower.slots import allocate_fragments
from ptxtrain.engine.ptxcpu.lower.steps import finish_roots
from ptxtrain.engine.ptxcpu.lower.tiles import Queue
from ptxtrain.engine.ptxcpu.roots import find_roots
from ptxtrain.engine.ptxcpu.spins import SYNCHRONISING, may_wait
from ptxtrain.engine.ptxcpu.tree import Function, Instruction, Module, Operand, PtxError, Symbol
from ptxtrain.engine.ptxcpu.uniformity import Analysis, Shape
from ptxtrain.engine.ptxcpu.webs import split_webs

RUN = "run"  # the name of the function that runs blocks


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel as LLVM IR, and the memory a worker needs for it (bytes; dynamic shared memory and frames aside)."""

    ir: str
    warps: int
    shared: int
    local: int  # of one warp
    coroutine: bool
    checked: Checked | None = None


def lower_entry(module: Module, function: Function, block: tuple[int, int, int], *, checked: bool = False) -> Lowered:
    """Lower `function` for blocks of this shape; `checked` with calls of the checks.

    Raises:
        PtxError: it uses an instruction, or a form of one, that this compiler does not know.
    """
    try:
        return _Driver(module, function, Shape(*block), checked).lower()
    except (AssertionError, LookupError, ValueError, TypeError, StopIteration, RecursionError) as error:
        raise PtxError(f"{function.name} cannot be compiled ({error})", module.path, function.span) from error


def _used_symbols(blocks: list[Block]) -> set[str]:
    names: set[str] = set()

    def look(operand: Operand) -> None:
        if isinstance(operand, Symbol):
            names.add(operand.name)
        elif hasattr(operand, "base") and isinstance(operand.base, Symbol):
            names.add(operand.base.name)

    for b in blocks:
        for ins in b.body:
            for operand in ins.operands:
                look(operand)
    return names


def _is_plain_barrier(ins: Instruction) -> bool:
    """Whether a barrier waits for the whole block or for the warp."""
    return ins.has("warp") or (len(ins.operands) == 1 and not ins.has("arrive", "red", "cluster"))


class _Driver(Flow):
    def __init__(self, module: Module, function: Function, shape: Shape, checked: bool = False) -> None:
        self.messages = trap_messages(module)
        function = inline_calls(module, function)
        self.module, self.function, self.shape = module, function, shape
        self.blocks = build_blocks(function, alone=SYNCHRONISING if may_wait(function.body) else frozenset())
        split_webs(self.blocks)
        used = _used_symbols(self.blocks)
        visible = {**module.variables, **function.variables}
        self.variables = {n: v for n, v in visible.items() if n in used or (v.space == "shared" and v.nbytes == 0)}
        params, _ = layout_params(function)
        by_space = {s: [v for v in self.variables.values() if v.space == s] for s in ("shared", "local")}
        gap = GAP if checked else 0
        self.shared_at, self.shared = layout(by_space["shared"], gap)
        self.local_at, local = layout(by_space["local"], gap and LOCAL_GAP)
        self.global_at, _ = layout_globals(module, function, gap)
        self.local = (local + 15) // 16 * 16
        self.analysis = Analysis(function, self.blocks, shape)
        self.ctx = Context(module, self.analysis, shape)
        self.checks = self.ctx.checks = Checks(self.ctx, self.blocks, self._alive) if checked else None
        self.ctx.alive = self._alive
        self.ctx.is_alone = (
            not checked
            and shape.warps == 1
            and all(_is_plain_barrier(ins) for b in self.blocks for ins in b.body if ins.opcode in ("bar", "barrier"))
        )
        self.at = -1  # the block that is being lowered
        self.position = 0
        self._reads = None
        self.region: Region | None = None  # and the region that it is in
        self.ctx.local_bytes = self.local
        self.ctx.products = bf16_products()
        tiles = self.ctx.products == "tiles"
        placed = place_fragments(self.blocks, self.analysis, tiles=tiles)
        allocate_fragments(self.ctx, placed)
        self.ctx.queue = Queue(self.ctx)
        self.ctx.alive_fragments = self._alive_fragments
        self.ctx.partner = {id(first): second for first, second in paired(self.blocks, placed)}
        if not checked:
            self.ctx.roots = find_roots(self.blocks, self.analysis)
        self.labels = [f"b{b.index}" for b in self.blocks]
        self.pending: dict[int, str] = {}
        self.exit_masks: dict[int, str] = {}
        self.rounds: list[str] = []  # slots that count the rounds of loops that wait for others
        offsets = {"param": params, "shared": self.shared_at, "local": self.local_at, "global": self.global_at}
        Names(self.ctx, module, shape, offsets, self.shared, self.local)

    # The whole module

    def lower(self) -> Lowered:
        ctx, emit, shape = self.ctx, self.ctx.emit, self.shape
        partial = shape.threads % LANES != 0
        kills = any(self._kills(b) for b in self.blocks)
        if partial or kills or self.analysis.regions:
            ctx.live = emit.alloca("<32 x i1>", "live")
        if self.analysis.regions:
            for region in self.analysis.regions:
                for index in region.blocks:
                    self.pending[index] = emit.alloca("i32", "pending")
                self.exit_masks[id(region)] = emit.alloca("i32", "joined")
        emit.jump(self.labels[0]) if 0 not in self.analysis.region_of else self._enter(0)
        for block in self.blocks:
            if block.index not in self.analysis.region_of:
                self._plain_block(block)
        for region in self.analysis.regions:
            self._region(region)
        finish_roots(ctx)
        body = "\n".join(emit.lines)
        warp = self._warp_function(body, partial)
        coroutine = ctx.has_barrier
        loop = runner.block_loop(
            RUN,
            warps=shape.warps,
            shared=self.shared,
            local=self.local * LANES,
            coroutine=coroutine,
            checked=self.checks is not None,
            spins=ctx.spins,
        )
        parts = [
            f"; {self.function.name} of {self.module.path.name} for blocks of {shape.x} x {shape.y} x {shape.z}",
            *emit.declarations.values(),
            *ctx.helpers.values(),
            runner.COROUTINE_DECLARATIONS if coroutine else "",
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
            "declare void @llvm.trap()",
            runner.spin_declarations() if ctx.spins else "",
            runner.helpers(shape.warps, reduces=ctx.has_reduction, checked=self.checks is not None)
            if coroutine
            else "",
            self.checks.definitions() if self.checks else "",
            warp,
            runner.with_tiles(loop) if ctx.uses_tiles else loop,
            "!0 = !{}",
            "!1 = !{i32 1}",
        ]
        return Lowered(
            "\n".join(parts), shape.warps, self.shared, self.local * LANES, coroutine, self._what_was_checked()
        )

    def _what_was_checked(self) -> Checked | None:
        if self.checks is None:
            return None
        dynamic = [at for name, at in self.shared_at.items() if self.variables[name].nbytes == 0]
        return Checked(
            self.shape.warps,
            self.shape.threads,
            (self.shape.x, self.shape.y, self.shape.z),
            self.checks.sites,
            ranges(self.shared_at, self.variables),
            self.shared,
            min(dynamic, default=None),
            ranges(self.local_at, self.variables),
            self.local,
        )

    def _warp_function(self, body: str, partial: bool) -> str:
        emit, coroutine = self.ctx.emit, self.ctx.has_barrier
        head = []
        for name, type_ in (("params", "ptr"), ("shared", "ptr"), ("globals", "ptr"), ("local", "ptr")):
            head.append(self._field(f"%{name}{'.all' if name == 'local' else ''}", name, type_))
        for axis in "xyz":
            head.append(self._field(f"%ctaid.{axis}", f"ctaid.{axis}", "i32"))
            head.append(self._field(f"%nctaid.{axis}", f"nctaid.{axis}", "i32"))
        head.append(self._field("%shared.size", "shared.bytes", "i32"))
        head.append("  %warp64 = zext i32 %warp to i64")
        head.append(f"  %local.at = mul i64 %warp64, {self.local * LANES}")
        head.append("  %local = getelementptr i8, ptr %local.all, i64 %local.at")
        if self.ctx.uses_zero:
            head.append(f"  %zero.at = getelementptr i8, ptr %cta, i64 {runner.FIELDS['zero']}")
            head.append("  %opaque.zero = load volatile i64, ptr %zero.at")
        head += emit.allocas
        if self.ctx.straight:
            head.append(f"  store i1 true, ptr {self.ctx.straight}")
        if self.ctx.live:
            if partial:
                # Threads past the block's end do not exist.
                head.append("  %first.thread = shl i32 %warp, 5")
                head.append(f"  %rest = sub i32 {self.shape.threads}, %first.thread")
                head.append("  %rest.1 = insertelement <32 x i32> poison, i32 %rest, i32 0")
                head.append(
                    "  %rest.n = shufflevector <32 x i32> %rest.1, <32 x i32> poison, <32 x i32> zeroinitializer"
                )
                head.append(f"  %exist = icmp ult <32 x i32> {iota('i32', 1)}, %rest.n")
                head.append(f"  store <32 x i1> %exist, ptr {self.ctx.live}")
            else:
                head.append(f"  store <32 x i1> {splat('i1', 'true', LANES)}, ptr {self.ctx.live}")
        for slot in (*self.pending.values(), *self.exit_masks.values(), *self.rounds):
            head.append(f"  store i32 0, ptr {slot}")
        if self.checks:
            head += self.checks.head()
        start = "\n".join(head)
        if not coroutine:
            return f"define internal void @warp(ptr noalias %cta, i32 %warp) {{\nentry:\n{start}\n{body}\nfinish:\n  ret void\n}}"
        return f"""define internal ptr @warp(ptr %cta, i32 %warp, ptr %mem) presplitcoroutine {{
entry:
  %id = call token @llvm.coro.id(i32 64, ptr null, ptr null, ptr null)
  %size = call i64 @llvm.coro.size.i64()
  store volatile i64 %size, ptr @frame.size
  %hdl = call ptr @llvm.coro.begin(token %id, ptr %mem)
{start}
{body}
finish:
  call void @leave(ptr %cta, i32 %warp)
  %last = call i8 @llvm.coro.suspend(token none, i1 true)
  switch i8 %last, label %suspend [i8 0, label %never i8 1, label %cleanup]
never:
  call void @llvm.trap()
  unreachable
cleanup:
  %freed = call ptr @llvm.coro.free(token %id, ptr %hdl)
  br label %suspend
suspend:
  call void @llvm.coro.end(ptr %hdl, i1 false, token none)
  ret ptr %hdl
}}"""

    @staticmethod
    def _field(name: str, field: str, type_: str) -> str:
        return (
            f"  {name}.at = getelementptr i8, ptr %cta, i64 {runner.FIELDS[field]}\n"
            f"  {name} = load {type_}, ptr {name}.at"
        )
