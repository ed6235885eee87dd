"""The checked mode's part of lowering: calls of the native checks before accesses, barriers and warp collectives.

A check that finds something has put down what (see `checked.state.Finding`) and set the block's status; the warp then
ends. Everything else of the kernel is lowered as always, so the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.cfg import Block
from ptxtrain.engine.ptxcpu.checked import state
from ptxtrain.engine.ptxcpu.lower import warp
from ptxtrain.engine.ptxcpu.lower.checkshims import shims
from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, iota, vec
from ptxtrain.engine.ptxcpu.lower.places import lane_pointers, place_of, space_of
from ptxtrain.engine.ptxcpu.lower.runner import FIELDS
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Address,
    Imm,
    Instruction,
    Operand,
    Pair,
    Reg,
    Symbol,
    Variable,
    Vector,
)

GAP, LOCAL_GAP = 1024, 64  # bytes that nobody owns behind a variable
_STRONG = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
_WHOLE_WARP = frozenset({"mma", "wmma", "ldmatrix", "stmatrix"})


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a kernel where something is checked."""

    ins: Instruction
    size: int  # bytes of a lane's access
    kind: int
    space: str


@dataclass(slots=True)
class Checked:
    """What a kernel's findings are described with, and what its launches are checked against."""

    warps: int
    threads: int
    block: tuple[int, int, int]
    sites: list[Site]
    shared: list[tuple[int, int, str]]  # start, end and name of each shared variable
    shared_bytes: int  # static ones, gaps included
    dynamic_at: int | None  # where dynamic shared memory starts
    local: list[tuple[int, int, str]]
    local_bytes: int  # of one lane


def ranges(offsets: dict[str, int], variables: dict[str, Variable]) -> list[tuple[int, int, str]]:
    """Start, end and name of variables with a size."""
    return [(at, at + variables[name].nbytes, name) for name, at in offsets.items() if variables[name].nbytes]


class Checks:
    """Emits the checks of one kernel."""

    def __init__(self, ctx: Context, blocks: Sequence[Block], alive: Callable[[], str | None]) -> None:
        """`alive` gives the lanes of the warp that have not left, as an i32; None: all, known when compiling."""
        self.ctx, self.alive = ctx, alive
        # What compare-and-swap loops work on: they begin with a plain load, whose value the swap then tests.
        self._swapped = {ins.operands[1] for b in blocks for ins in b.body if ins.opcode == "atom" and ins.has("cas")}
        self.sites: list[Site] = []
        self._globals: list[str] = []
        self._slots: dict[str, str] = {}

    # What goes beside the kernel

    def head(self) -> list[str]:
        """Instructions at the start of a warp."""
        return [f"  %checker.at = getelementptr i8, ptr %cta, i64 {FIELDS['checker']}"]

    def definitions(self) -> str:
        """Globals, and the functions that the block loop calls."""
        return "\n".join([*self._globals, shims()])

    # Sites and calls

    def site(self, ins: Instruction, *, size: int = 1, element: int = 1, kind: int = 0, space: str = "generic") -> str:
        """A new site's global."""
        index = len(self.sites)
        self.sites.append(Site(ins, size, kind, space))
        shift = size.bit_length() - 1
        words = (index, size, kind, state.SPACES[space], 0, element, shift, size)
        name = f"@site.{index}"
        self._globals.append(f"{name} = internal global [8 x i32] [{', '.join(f'i32 {w}' for w in words)}]")
        return name

    def _run(self, name: str, arguments: Sequence[tuple[str, str]]) -> None:
        """Call a native check; the warp ends if it finds something."""
        emit = self.ctx.emit
        checker = emit.op("load ptr, ptr %checker.at")
        at = emit.op(f"getelementptr i8, ptr {checker}, i64 {8 * state.FUNCTIONS.index(name)}")
        function = emit.op(f"load ptr, ptr {at}")
        given = ", ".join(f"{t} {v}" for t, v in (("ptr", "%cta"), *arguments))
        found = emit.op(f"icmp ne i32 {emit.op(f'call i32 {function}({given})')}, 0")
        well = emit.label("well")
        emit.branch(found, "finish", well)
        emit.start(well)

    def _slot(self, what: str, nbytes: int) -> str:
        """Scratch memory of the kernel's own."""
        key = f"{what}.{nbytes}"
        if key not in self._slots:
            self._slots[key] = self.ctx.emit.alloca(f"[{nbytes} x i8], align 64", what)
        return self._slots[key]

    def _here(self) -> str:
        mask = self.ctx.lane_mask()
        return self.ctx.mask_bits(mask) if mask else "-1"

    def _alive(self) -> str:
        return self.alive() or "-1"

    def _all_here(self) -> bool:
        """Whether every lane of the warp is known to be here."""
        return self.ctx.live is None and self.ctx.guard_mask is None

    # Instructions

    def before(self, ins: Instruction) -> bool:
        """The checks of an instruction that is about to be lowered; True: it is lowered here altogether."""
        match ins.opcode:
            case "ld" | "ldu":
                self._load(ins)
            case "st":
                self._store(ins)
            case "atom" | "red":
                self._atomic(ins)
            case "bar" | "barrier":
                self._barrier(ins)
            case "membar" | "fence":
                self._fence(ins)
            case "shfl":
                self._shuffle(ins)
            case "vote" | "match" | "redux" | "elect" if ins.has("sync"):
                position = 1 if ins.opcode == "elect" else 2
                self._members(ins, ins.operands[position], self.site(ins))
            case "cp" if ins.has("async"):
                return self._copy(ins)
            case _ if ins.opcode in _WHOLE_WARP:
                self._matrix(ins)
        return False

    def _order(self, ins: Instruction) -> None:
        """An access that orders others, as a fence does."""
        if ins.has("acquire", "release", "acq_rel", "sc"):
            self._fence(ins)

    def _fence(self, ins: Instruction) -> None:
        if ins.has("proxy"):
            return
        self._run("fence", [("i32", "%warp"), ("i32", "0" if ins.has("cta") else "1")])

    def _load(self, ins: Instruction) -> None:
        space = space_of(ins)
        if space == "param":
            return
        self._order(ins)
        count = _count(ins)
        element = TYPE_BITS[ins.types[-1]] // 8
        strong = ins.has(*_STRONG) or ins.operands[1] in self._swapped
        kind = state.READ | (state.STRONG if strong else 0)
        self._access(ins, ins.operands[1], space, element * count, element, kind)

    def _store(self, ins: Instruction) -> None:
        space = space_of(ins)
        if space in ("param", "const"):
            return
        self._order(ins)
        value = ins.operands[1]
        values: list[Operand] = list(value.elements) if isinstance(value, Vector) else [value]
        bits = TYPE_BITS[ins.types[-1]]
        kind = state.WRITE | (state.STRONG if ins.has(*_STRONG) else 0)
        kept = "null" if space in ("global", "local") else self._values(values, bits)
        self._access(ins, ins.operands[0], space, bits // 8 * len(values), bits // 8, kind, kept)

    def _values(self, values: list[Operand], bits: int) -> str:
        """What the lanes store, in memory: element by element."""
        ctx, emit = self.ctx, self.ctx.emit
        slot = self._slot("values", 512 if bits * len(values) <= 128 else 1024)
        for i, value in enumerate(values):
            lanes = ctx.get(value, f"i{bits}", LANES)
            at = emit.op(f"getelementptr i8, ptr {slot}, i64 {i * bits // 8 * LANES}")
            emit.do(f"store {vec(f'i{bits}', LANES)} {lanes}, ptr {at}, align {bits // 8}")
        return slot

    def _atomic(self, ins: Instruction) -> None:
        self._order(ins)
        size = TYPE_BITS[ins.types[-1]] // 8
        kind = state.READ | state.WRITE | state.STRONG | (state.NO_INIT if ins.has("exch") else 0)
        address = ins.operands[1 if ins.opcode == "atom" else 0]
        self._access(ins, address, space_of(ins), size * _count(ins), size, kind)

    def _access(
        self, ins: Instruction, address: Operand, space: str, size: int, element: int, kind: int, values: str = "null"
    ) -> None:
        ctx, emit = self.ctx, self.ctx.emit
        if space == "generic" and isinstance(address, Address) and isinstance(address.base, Symbol):
            space = ctx.symbols[address.base.name]()[0] or space
        place = place_of(ctx, ins, address, space_of(ins))
        site = self.site(ins, size=size, element=element, kind=kind, space=space)
        last = (("i32", self._here()), ("ptr", site), ("ptr", values))
        single = place.scalar
        name = "access_uniform"
        if single is None and place.base is not None and place.stride == size and not place.loose:
            single, name = place.base, "access_run"
        if single is not None:
            at = emit.op(f"ptrtoint ptr {single} to i64")
            self._run(name, (("i32", "%warp"), ("i64", at), *last))
            return
        assert place.lanes is not None
        self._run("access_lanes", (("i32", "%warp"), ("ptr", self._addresses(place.lanes)), *last))

    def _addresses(self, pointers: str, what: str = "addresses") -> str:
        slot = self._slot(what, 256)
        self.ctx.emit.do(f"store <32 x ptr> {pointers}, ptr {slot}, align 64")
        return slot

    def lanes(self, ins: Instruction, pointers: str, size: int, *, write: bool) -> None:
        """An access of `size` bytes by each lane, at addresses that the lowering made."""
        kind = state.COLLECTIVE | (state.WRITE if write else state.READ)
        site = self.site(ins, size=size, element=size, kind=kind, space=space_of(ins))
        last = (("i32", self._here()), ("ptr", site), ("ptr", "null"))
        self._run("access_lanes", (("i32", "%warp"), ("ptr", self._addresses(pointers)), *last))

    def _matrix(self, ins: Instruction) -> None:
        if not self._all_here():
            self._run("whole_warp", [("i32", "%warp"), ("i32", self._here()), ("ptr", self.site(ins))])
        if ins.opcode not in ("ldmatrix", "stmatrix"):
            return
        writes = ins.opcode == "stmatrix"
        count = next((int(m[1:]) for m in ins.modifiers if m in ("x1", "x2", "x4")), 1)
        address = ins.operands[0 if writes else 1]
        pointers = lane_pointers(self.ctx, ins, address, space_of(ins))
        kind = state.COLLECTIVE | (state.WRITE if writes else state.READ)
        site = self.site(ins, size=16, element=16, kind=kind, space=space_of(ins))
        rows = str((1 << 8 * count) - 1 if count < 4 else -1)
        last = (("i32", rows), ("ptr", site), ("ptr", "null"))
        self._run("access_lanes", (("i32", "%warp"), ("ptr", self._addresses(pointers)), *last))

    # Barriers and warp collectives

    def _barrier(self, ins: Instruction) -> None:
        ctx = self.ctx
        if ins.has("warp"):
            site = self.site(ins)
            members = warp._warp_value(ctx, ins.operands[0])
            self._run("warp_barrier", self._warp_arguments(members, site))
            return
        numbers = ins.operands[1:-1] if ins.has("red") else ins.operands
        number = warp._warp_value(ctx, numbers[0])
        count = warp._warp_value(ctx, numbers[1]) if len(numbers) > 1 else "0"
        self._run(
            "barrier",
            [
                *(("i32", "%warp"), ("i32", self._here()), ("i32", self._alive())),
                *(("i32", number), ("i32", count), ("ptr", self.site(ins))),
            ],
        )

    def _warp_arguments(self, members: str, site: str) -> list[tuple[str, str]]:
        return [("i32", "%warp"), ("i32", self._here()), ("i32", members), ("i32", self._alive()), ("ptr", site)]

    def _everyone(self, mask: Operand) -> bool:
        """Whether all lanes are known to be here and in the mask."""
        info = self.ctx.info(mask)
        full = info.uniform and info.const is not None and info.const & 0xFFFFFFFF == 0xFFFFFFFF
        return full and self._all_here()

    def _members(self, ins: Instruction, mask: Operand, site: str) -> None:
        """Who executes a collective is in its own mask, and all whom the masks name come to it."""
        ctx, emit = self.ctx, self.ctx.emit
        if self._everyone(mask):
            return
        if ctx.info(mask).uniform:
            self._run("members", self._warp_arguments(ctx.get(mask, "i32", 1), site))
            return
        # Each lane has a mask of its own: the masks of all together, but for lanes that are not in their own.
        masks, here = ctx.get(mask, "i32", LANES), self._here()
        acting = emit.op(f"bitcast i32 {here} to <32 x i1>")
        named = emit.select("i32", LANES, acting, masks, "zeroinitializer")
        union = emit.call("llvm.vector.reduce.or.v32i32", "i32", ("<32 x i32>", named))
        own = emit.op(f"lshr <32 x i32> {masks}, {iota('i32', 1)}")
        inside = emit.op(f"icmp ne <32 x i32> {emit.op(f'and <32 x i32> {own}, splat (i32 1)')}, zeroinitializer")
        strangers = emit.op(f"and i32 {here}, {emit.op(f'xor i32 {ctx.mask_bits(inside)}, -1')}")
        members = emit.op(f"and i32 {union}, {emit.op(f'xor i32 {strangers}, -1')}")
        self._run("members", self._warp_arguments(members, site))

    def _shuffle(self, ins: Instruction) -> None:
        """Each lane that takes another's value must find that lane here, and in the mask.

        Shuffles up, down and across keep a lane's own value past the edge, and are meant to; an index past it is a mistake
        unless the kernel asks for the predicate.
        """
        ctx, emit = self.ctx, self.ctx.emit
        mask = ins.operands[4] if len(ins.operands) > 4 else Imm(-1, "int")
        mode = next(m for m in ins.modifiers if m in ("up", "down", "bfly", "idx"))
        b, c = ins.operands[2:4]
        clamp = ctx.info(c)
        by_index = mode == "idx" and not isinstance(ins.operands[0], Pair)
        may_miss = by_index and not (clamp.uniform and clamp.const is not None and clamp.const & 31 == 31)
        if self._everyone(mask) and not may_miss:
            return
        site = self.site(ins)
        self._members(ins, mask, site)
        here = self._here()
        known = [ctx.info(o) for o in (b, c)]
        if all(k.uniform and k.const is not None for k in known):
            order, inside = warp._known_sources(mode, (known[0].const or 0) % 32, known[1].const or 0)
            source = "<" + ", ".join(f"i32 {s}" for s in order) + ">"
            ok = "<" + ", ".join(f"i1 {'true' if i else 'false'}" for i in inside) + ">"
        else:
            source, ok = warp._sources(ctx, mode, b, c)
        active = emit.op(f"and <32 x i32> {emit.broadcast('i32', here)}, {ctx.get(mask, 'i32', LANES)}")
        bit = emit.op(f"and <32 x i32> {emit.op(f'lshr <32 x i32> {active}, {source}')}, splat (i32 1)")
        absent = emit.op(f"and <32 x i1> {emit.op(f'icmp eq <32 x i32> {bit}, zeroinitializer')}, {ok}")
        self._fail_where(absent, here, state.INACTIVE_SOURCE, site, source)
        if may_miss:
            self._fail_where(ctx.negated(ok), here, state.LANE_OUTSIDE, site, source)

    def _fail_where(self, lanes: str, here: str, kind: int, site: str, detail: str) -> None:
        """A finding of the first of the lanes that are here, with its element of an i32 vector as the detail."""
        ctx, emit = self.ctx, self.ctx.emit
        bad = emit.op(f"and i32 {ctx.mask_bits(lanes)}, {here}")
        yes, well = emit.label("bad"), emit.label("well")
        emit.branch(emit.op(f"icmp ne i32 {bad}, 0"), yes, well)
        emit.start(yes)
        first = emit.op(f"and i32 {emit.call('llvm.cttz.i32', 'i32', ('i32', bad), ('i1', 'false'))}, 31")
        one = emit.op(f"zext i32 {emit.op(f'extractelement <32 x i32> {detail}, i32 {first}')} to i64")
        self._run("fail", [("i32", "%warp"), ("i32", str(kind)), ("i32", bad), ("ptr", site), ("i64", one)])
        emit.jump(well)
        emit.start(well)

    def turn(self, ins: Instruction) -> None:
        """Another round of a loop."""
        self._run("turn", [("i32", "%warp"), ("i32", self._here()), ("ptr", self.site(ins))])

    # cp.async

    def _copy(self, ins: Instruction) -> bool:
        if ins.has("bulk", "mbarrier"):
            return False
        ctx, emit = self.ctx, self.ctx.emit
        if ins.has("commit_group"):
            self._run("copy_commit", [("i32", "%warp"), ("i32", self._here())])
            return True
        if ins.has("wait_group", "wait_all"):
            groups = ctx.get(ins.operands[0], "i32", 1) if ins.operands else "-1"
            self._run("copy_wait", [("i32", "%warp"), ("i32", self._here()), ("i32", groups)])
            return True
        size = ins.operands[2]
        if not isinstance(size, Imm) or size.value not in (4, 8, 16):
            return False
        bytes_ = size.value
        target = self._addresses(lane_pointers(ctx, ins, ins.operands[0], "shared"))
        source = self._addresses(lane_pointers(ctx, ins, ins.operands[1], "global"), "sources")
        extra = next((o for o in ins.operands[3:] if not (isinstance(o, Reg) and o.type.endswith("64"))), None)
        counts = "null"
        if extra is not None:
            if isinstance(extra, Reg) and extra.type == "pred":
                ignored = ctx.get(extra, "i1", LANES)
                full = f"splat (i32 {bytes_})"
                lanes = emit.select("i32", LANES, ignored, "zeroinitializer", full)
            else:
                lanes = ctx.get(extra, "i32", LANES)
            counts = self._slot("counts", 128)
            emit.do(f"store <32 x i32> {lanes}, ptr {counts}, align 64")
        from_site = self.site(ins, size=bytes_, element=bytes_, kind=state.READ, space="global")
        to_site = self.site(ins, size=bytes_, element=bytes_, kind=state.WRITE, space="shared")
        self._run(
            "copy_issue",
            [
                *(("i32", "%warp"), ("ptr", target), ("ptr", source), ("i32", self._here())),
                *(("ptr", counts), ("ptr", from_site), ("ptr", to_site)),
            ],
        )
        return True


def _count(ins: Instruction) -> int:
    return next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)
