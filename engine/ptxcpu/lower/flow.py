"""Control flow: the blocks of a function as LLVM blocks, and regions of divergent lanes under masks.

Outside regions (see `cfg`) a warp's blocks become LLVM blocks with ordinary branches. A region's blocks are laid out one
after another; each has a pending mask, is skipped while that is empty, and passes its lanes on to the masks of the blocks
they go to.
"""

from __future__ import annotations

from collections.abc import Collection

from ptxtrain.engine.ptxcpu.cfg import EXIT, Block, Region
from ptxtrain.engine.ptxcpu.lower.checks import Checks
from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, splat
from ptxtrain.engine.ptxcpu.lower.opcodes import lower_opcode
from ptxtrain.engine.ptxcpu.lower.reads import reads_of_fragments
from ptxtrain.engine.ptxcpu.lower.warp import suspend
from ptxtrain.engine.ptxcpu.tree import Function, Guard, Instruction, Symbol
from ptxtrain.engine.ptxcpu.uniformity import Analysis

PATIENCE = 64  # rounds that lanes wait in a loop before other lanes of their warp run

# Instructions that must not run at all where a varying guard lets no lane through.
_SKIPPED_WHEN_EMPTY = frozenset({"ld", "ldu", "st", "atom", "red"})


class Flow:
    """Emits the blocks of one function into its context; the driver sets the fields up."""

    ctx: Context
    function: Function
    blocks: list[Block]
    analysis: Analysis
    checks: Checks | None
    messages: dict[int, str]
    labels: list[str]
    pending: dict[int, str]  # by block: the slot of the lanes that wait for it
    exit_masks: dict[int, str]  # by id of a region: the slot of the lanes that have come through
    rounds: list[str]  # slots that count the rounds of loops that wait for others
    at: int  # the block that is being lowered
    position: int  # of the instruction in it
    region: Region | None  # and the region that it is in
    _reads: list[list[frozenset[int]]] | None  # see `_alive_fragments`

    def _alive(self) -> str | None:
        """The lanes of the warp that have not left, as an i32; None: all, known when compiling."""
        ctx, emit = self.ctx, self.ctx.emit
        live = ctx.live_mask()
        if live is None:
            return None
        lanes = ctx.mask_bits(live)
        if self.region is not None:
            waiting = (*(self.pending[b] for b in self.region.blocks), self.exit_masks[id(self.region)])
            for slot in waiting:
                lanes = emit.op(f"or i32 {lanes}, {emit.op(f'load i32, ptr {slot}')}")
        return lanes

    def _turn(self) -> None:
        """Count a round of a loop, at its last instruction."""
        if self.checks is not None:
            block = self.blocks[self.at]
            last = block.branch or (block.body[-1] if block.body else None)
            if last is not None:
                self.checks.turn(last)

    def _let_others_run(self, edges: Collection[tuple[int, int]]) -> None:
        """Suspend the warp at a backward edge of a loop that waits for others."""
        if any((spin.source, spin.target) in edges for spin in self.analysis.spins):
            self.ctx.spins = True
            suspend(self.ctx)

    def _kills(self, block: Block) -> bool:
        """Whether some lanes may leave at the block's end while others go on."""
        return (
            block.guard is not None
            and EXIT in block.successors
            and bool(block.inner_successors)
            and not self.analysis.guard_is_uniform(block.guard)
        )

    def _alive_fragments(self) -> frozenset[int]:
        """The fragments of matrix operands that are read, at or behind the current instruction, before they are written."""
        if self._reads is None:
            self._reads = reads_of_fragments(self.blocks, self.ctx.fragments)
        return self._reads[self.at][self.position]

    # Blocks outside regions

    def _plain_block(self, block: Block) -> None:
        ctx, emit = self.ctx, self.ctx.emit
        emit.start(self.labels[block.index])
        self.at = block.index
        for position, ins in enumerate(block.body):
            self.position = position
            self._instruction(ins)
        self.position = len(block.body)
        ctx.queue.flush()
        if block.branch is not None and block.branch.opcode == "trap" and block.guard is None:
            self._trap(block.branch)
            return
        if block.branch is not None and block.branch.opcode == "brx":
            self._switch(block)
            return
        (target,) = block.targets
        if block.guard is None:
            self._enter(target)
            return
        assert block.fall is not None
        if block.branch is not None and block.branch.opcode == "trap":
            self._trap_if(block.branch, block.guard)
            self._enter(block.fall)
            return
        if self.analysis.guard_is_uniform(block.guard):
            condition = ctx.predicate(block.guard, 1)
            yes, no = emit.label("taken"), emit.label("not")
            emit.branch(condition, yes, no)
            emit.start(yes)
            self._enter(target)
            emit.start(no)
            self._enter(block.fall)
            return
        taken = ctx.predicate(block.guard, LANES)
        if target == block.fall:
            self._enter(target)
        elif EXIT in (target, block.fall):
            stays = ctx.negated(taken) if target == EXIT else taken
            self._narrow_live(stays)
            self._enter(block.fall if target == EXIT else target)
        else:
            self._diverge(block, taken)

    def _trap_if(self, ins: Instruction, guard: Guard) -> None:
        ctx, emit = self.ctx, self.ctx.emit
        if self.analysis.guard_is_uniform(guard):
            condition = ctx.predicate(guard, 1)
        else:
            bits = ctx.mask_bits(self._both(ctx.live_mask(), ctx.predicate(guard, LANES)))
            condition = emit.op(f"icmp ne i32 {bits}, 0")
        yes, no = emit.label("trap"), emit.label("on")
        emit.branch(condition, yes, no)
        emit.start(yes)
        self._trap(ins)
        emit.start(no)

    def _trap(self, ins: Instruction) -> None:
        """End the warp and have the launch fail."""
        self.ctx.fail(self.messages.get(ins.span.line, "the kernel executed trap"))

    def _both(self, mask: str | None, other: str) -> str:
        return other if mask is None else self.ctx.emit.op(f"and <32 x i1> {mask}, {other}")

    def _narrow_live(self, stays: str) -> None:
        """Lanes leave; when none is left the warp ends."""
        ctx, emit = self.ctx, self.ctx.emit
        live = self._both(ctx.live_mask(), stays)
        emit.do(f"store <32 x i1> {live}, ptr {ctx.live}")
        go_on = emit.label("left")
        none = emit.op(f"icmp eq i32 {ctx.mask_bits(live)}, 0")
        emit.branch(none, "finish", go_on)
        emit.start(go_on)

    def _enter(self, target: int) -> None:
        """Go to a block with all live lanes: straight, or by way of its region's start."""
        ctx, emit = self.ctx, self.ctx.emit
        if target == EXIT:
            emit.jump("finish")
            return
        if target <= self.at:
            self._turn()
            self._let_others_run({(self.at, target)})
        region = self.analysis.region_of.get(target)
        if region is None:
            emit.jump(self.labels[target])
            return
        live = ctx.live_mask()
        emit.do(f"store i32 {ctx.mask_bits(live) if live else '-1'}, ptr {self.pending[target]}")
        emit.jump(self._region_label(region))

    def _region_label(self, region: Region) -> str:
        return f"region{region.order[0]}"

    def _diverge(self, block: Block, taken: str) -> None:
        """Split the live lanes over two places, at least one of them in the branch's region."""
        ctx = self.ctx
        (target,) = block.targets
        assert block.fall is not None
        live = ctx.live_mask()
        region = self._region_after(block)
        self._pass_on(region, target, self._both(live, taken))
        self._pass_on(region, block.fall, self._both(live, ctx.negated(taken)))
        ctx.emit.jump(self._region_label(region))

    def _region_after(self, block: Block) -> Region:
        return next(self.analysis.region_of[s] for s in block.inner_successors if s in self.analysis.region_of)

    def _pass_on(self, region: Region, target: int, mask: str) -> None:
        """Add lanes to those that wait at a block of the region, or at its exit; lanes at EXIT are gone."""
        if target == EXIT:
            return
        emit = self.ctx.emit
        inside = target in region.blocks
        assert inside or target == region.exit, f"block {target} is no place to go from region {region.order}"
        slot = self.pending[target] if inside else self.exit_masks[id(region)]
        before = emit.op(f"load i32, ptr {slot}")
        emit.do(f"store i32 {emit.op(f'or i32 {before}, {self.ctx.mask_bits(mask)}')}, ptr {slot}")

    def _switch(self, block: Block) -> None:
        """brx.idx with an index that is the same for the warp."""
        ctx, emit = self.ctx, self.ctx.emit
        assert block.branch is not None
        table = block.branch.operands[1]
        assert isinstance(table, Symbol)
        names = self.function.branch_targets[table.name]
        index = ctx.get(block.branch.operands[0], "i32", LANES if not ctx.info(block.branch.operands[0]).uniform else 1)
        targets = self._table_blocks(names)
        if not ctx.info(block.branch.operands[0]).uniform:
            live = ctx.mask_value()
            region = self._region_after(block)
            for i, target in enumerate(targets):
                chosen = emit.op(f"icmp eq <32 x i32> {index}, {splat('i32', i, LANES)}")
                self._pass_on(region, target, emit.op(f"and <32 x i1> {live}, {chosen}"))
            emit.jump(self._region_label(region))
            return
        labels = [emit.label("case") for _ in targets]
        cases = " ".join(f"i32 {i}, label %{label}" for i, label in enumerate(labels))
        emit.do(f"switch i32 {index}, label %{labels[-1]} [{cases}]")
        for label, target in zip(labels, targets, strict=True):
            emit.start(label)
            self._enter(target)

    def _table_blocks(self, names: tuple[str, ...]) -> list[int]:
        found = {name: self._label_block[name] for name in set(names)}
        return [found[name] for name in names]

    @property
    def _label_block(self) -> dict[str, int]:
        return {name: b.index for b in self.blocks for name in b.labels}

    # Regions

    def _region(self, region: Region) -> None:
        ctx, emit = self.ctx, self.ctx.emit
        ctx.masked, self.region = True, region
        emit.start(self._region_label(region))
        ends: dict[int, list[int]] = {}
        for number, (_, last, _) in enumerate(region.loops):
            ends.setdefault(last, []).append(number)
        checks = [f"check{i}" for i in region.order]
        done = f"join.region{region.order[0]}"
        emit.jump(checks[0])
        waits = False
        for position, index in enumerate(region.order):
            following = checks[position + 1] if position + 1 < len(checks) else done
            after = f"after{index}" if position in ends else following
            emit.start(checks[position])
            body = f"masked{index}"
            waiting = emit.op(f"load i32, ptr {self.pending[index]}")
            emit.branch(emit.op(f"icmp eq i32 {waiting}, 0"), after, body)
            emit.start(body)
            emit.do(f"store i32 0, ptr {self.pending[index]}")
            emit.do(f"store <32 x i1> {emit.op(f'bitcast i32 {waiting} to <32 x i1>')}, ptr {ctx.live}")
            self.at = index
            self._masked_block(self.blocks[index], region)
            emit.jump(after)
            if position in ends:
                emit.start(after)
                # Inner loops go round first.
                for number in sorted(ends[position], reverse=True):
                    first, _, heads = region.loops[number]
                    total = "0"
                    for head in heads:
                        total = emit.op(f"or i32 {total}, {emit.op(f'load i32, ptr {self.pending[head]}')}")
                    on, again = emit.label("on"), emit.label("round")
                    emit.branch(emit.op(f"icmp ne i32 {total}, 0"), again, on)
                    emit.start(again)
                    self._turn()
                    inside = region.order[first : position + 1]
                    edges = {(u, v) for u in inside for v in heads}
                    self._let_others_run(edges)
                    if any((spin.source, spin.target) in edges for spin in self.analysis.spins):
                        waits = True
                        emit.branch(self._is_patient(region, set(inside)), checks[first], on)
                    else:
                        emit.jump(checks[first])
                    emit.start(on)
                emit.jump(following)
        emit.start(done)
        if waits:
            self._go_round(region, checks[0])
        slot = self.exit_masks[id(region)]
        joined = emit.op(f"load i32, ptr {slot}")
        emit.do(f"store i32 0, ptr {slot}")
        emit.do(f"store <32 x i1> {emit.op(f'bitcast i32 {joined} to <32 x i1>')}, ptr {ctx.live}")
        ctx.masked, self.region = False, None
        if region.exit is None:
            emit.jump("finish")
            return
        some = emit.label("some")
        emit.branch(emit.op(f"icmp eq i32 {joined}, 0"), "finish", some)
        emit.start(some)
        self._enter(region.exit)

    def _is_patient(self, region: Region, inside: set[int]) -> str:
        """Whether lanes go on waiting in a loop; from time to time others in the region, if there are any, come first."""
        emit = self.ctx.emit
        rounds = emit.alloca("i32", "rounds")
        self.rounds.append(rounds)
        count = emit.op(f"add i32 {emit.op(f'load i32, ptr {rounds}')}, 1")
        emit.do(f"store i32 {count}, ptr {rounds}")
        others = "0"
        for index in region.order:
            if index not in inside:
                others = emit.op(f"or i32 {others}, {emit.op(f'load i32, ptr {self.pending[index]}')}")
        few = emit.op(f"icmp ne i32 {emit.op(f'and i32 {count}, {PATIENCE - 1}')}, 0")
        return emit.op(f"or i1 {few}, {emit.op(f'icmp eq i32 {others}, 0')}")

    def _go_round(self, region: Region, start: str) -> None:
        """At a region's end: back to lanes that still wait in it, if there are any."""
        emit = self.ctx.emit
        left = "0"
        for index in region.order:
            left = emit.op(f"or i32 {left}, {emit.op(f'load i32, ptr {self.pending[index]}')}")
        over = emit.label("over")
        emit.branch(emit.op(f"icmp ne i32 {left}, 0"), start, over)
        emit.start(over)

    def _masked_block(self, block: Block, region: Region) -> None:
        ctx, emit = self.ctx, self.ctx.emit
        for ins in block.body:
            self._instruction(ins)
        here = ctx.mask_value()
        if block.branch is not None and block.branch.opcode == "trap":
            if block.guard is None:
                self._trap(block.branch)
                emit.start(emit.label("trapped"))
            else:
                self._trap_if(block.branch, block.guard)
                assert block.fall is not None
                self._pass_on(region, block.fall, here)
            return
        if block.branch is not None and block.branch.opcode == "brx":
            table = block.branch.operands[1]
            assert isinstance(table, Symbol)
            index = ctx.get(block.branch.operands[0], "i32", LANES)
            for i, target in enumerate(self._table_blocks(self.function.branch_targets[table.name])):
                chosen = emit.op(f"icmp eq <32 x i32> {index}, {splat('i32', i, LANES)}")
                self._pass_on(region, target, emit.op(f"and <32 x i1> {here}, {chosen}"))
            return
        (target,) = block.targets
        if block.guard is None:
            self._pass_on(region, target, here)
            return
        assert block.fall is not None
        taken = ctx.predicate(block.guard, LANES)
        self._pass_on(region, target, emit.op(f"and <32 x i1> {here}, {taken}"))
        self._pass_on(region, block.fall, emit.op(f"and <32 x i1> {here}, {ctx.negated(taken)}"))

    # Instructions

    def _instruction(self, ins: Instruction) -> None:
        ctx, emit = self.ctx, self.ctx.emit
        if ctx.queue.takes(ins):
            return
        ctx.queue.before(ins)
        if ins.guard is None:
            lower_opcode(ctx, ins)
            return
        if self.analysis.guard_is_uniform(ins.guard):
            yes, no = emit.label("do"), emit.label("done")
            emit.branch(ctx.predicate(ins.guard, 1), yes, no)
            emit.start(yes)
            lower_opcode(ctx, ins)
            emit.jump(no)
            emit.start(no)
            return
        mask = self._both(ctx.live_mask(), ctx.predicate(ins.guard, LANES))
        skips = ins.opcode in _SKIPPED_WHEN_EMPTY
        if skips:
            yes, no = emit.label("some"), emit.label("none")
            emit.branch(emit.op(f"icmp ne i32 {ctx.mask_bits(mask)}, 0"), yes, no)
            emit.start(yes)
        ctx.guard_mask = mask
        lower_opcode(ctx, ins)
        ctx.guard_mask = None
        if skips:
            emit.jump(no)
            emit.start(no)
