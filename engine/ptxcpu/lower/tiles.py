"""Products of brain floats by the processor's matrix tiles (Intel AMX).

Matrix instructions of a straight line are not lowered one by one but queued, and written when something else needs what they
give or would spoil what they take (`needs`). By then the products of each sum are known, and are put into an order that
moves little: four sums at a time, two rows by two columns where their factors allow, each from its first product to its last
in a tile of its own. A sum stays in its tile, ahead of its place in memory, until its registers are wanted, the tile is
wanted for another, or the straight line ends. The products of one sum keep their order, so no bit depends on any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.fragments import BYTES, is_tile_product
from ptxtrain.engine.ptxcpu.lower.matrices import Source, fetch, source_of
from ptxtrain.engine.ptxcpu.lower.places import space_of
from ptxtrain.engine.ptxcpu.lower.slots import address_of, copy_back, elements_of, note_writes, run_of
from ptxtrain.engine.ptxcpu.tree import Imm, Instruction, Operand, Reg, Vector
from ptxtrain.engine.ptxcpu.uses import results, sources

# Which of the eight tiles hold what; see `runner.with_tiles` for their shapes.
SUMS, ROWS, COLUMNS = (0, 1, 2, 3), (4, 5), (6, 7)

STRIDES = {"A": 32, "B": 32, "B2": 64, "C": 64, "C2": 64}  # bytes of a row of a tile in memory

# What has to find memory as the program has it, or may let others change it. Global stores do not reach shared memory.
_BARRIERS = frozenset(
    "atom red bar barrier membar fence call wmma stmatrix mbarrier brx bra ret exit trap mma ldmatrix nanosleep".split()
)


@dataclass(slots=True, eq=False)
class Factor:
    """A factor of queued products: in memory at `home`, or what an ldmatrix will bring."""

    fragment: int
    layout: str
    home: str
    source: Source | None = None
    uses: int = 0
    place: tuple[str, str] | None = None  # pointer and row distance, once it is there
    slot: str | None = None


@dataclass(slots=True, eq=False)
class Sum:
    """A C tile and its queued products, as (row factor, column factor, byte of the column factor's rows)."""

    fragment: int
    home: str
    start: str | None  # where its first value lies; None: zero
    products: list[tuple[Factor, Factor, int]] = field(default_factory=list)


class Queue:
    """The matrix instructions of a straight line that are not written yet, and the sums that tiles hold."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.sums: dict[int, Sum] = {}
        self.brought: dict[int, Factor] = {}  # by fragment: what queued ldmatrix bring to its registers
        self.lying: dict[int, Factor] = {}  # by fragment: factors in memory that queued products read
        self.zeros: dict[int, set[int]] = {}  # by fragment of sums: registers set to zero, not yet in memory
        self.held: dict[int, tuple[int, str]] = {}  # by fragment: the tile that is ahead of memory, and its place there
        self.recent: list[int] = []  # tiles of SUMS, the last used last
        self.free: dict[str, list[str]] = {}  # memory for factors, by layout

    # What may be queued

    def takes(self, ins: Instruction) -> bool:
        """Queue an instruction if it can be."""
        ctx = self.ctx
        if ins.guard is not None or ctx.masked or ctx.checks is not None:
            return False
        if ins.opcode == "mov":
            return self._zero(ins)
        if ins.opcode == "ldmatrix":
            return self._bring(ins)
        return is_tile_product(ins) and self.multiply(ins)

    def _zero(self, ins: Instruction) -> bool:
        target, source = ins.operands
        if not isinstance(target, Reg) or not isinstance(source, Imm) or source.value != 0:
            return False
        place = self.ctx.fragments.get(target.name)
        if place is None or place.layout not in ("C", "C2"):
            return False
        self._settle({place.fragment}, keep_zeros=True)
        self.ctx.note_write(target)
        self.zeros.setdefault(place.fragment, set()).add(place.position)
        return True

    def _bring(self, ins: Instruction) -> bool:
        ctx = self.ctx
        run = run_of(ctx, ins.operands[0])
        names = [e.name for e in elements_of(ins.operands[0]) if isinstance(e, Reg)]
        if run is None or run[1] not in ("A", "B", "B2") or run[2] != 0:
            return False
        fragment = ctx.fragments[names[0]].fragment
        if len(names) != ctx.fragment_sizes[fragment]:
            return False
        if fragment in self.lying:
            self._settle({fragment})
        source = source_of(ctx, ins, run[1])
        note_writes(ctx, ins.operands[0])
        self.brought[fragment] = Factor(fragment, run[1], ctx.storage[run[0].name].slot, source)
        return True

    def multiply(self, ins: Instruction) -> bool:
        """Queue a product, and its partner if it has one; False if its operands are not tiles as they are."""
        ctx = self.ctx
        if id(ins) in ctx.done_before:
            return True
        partner = ctx.partner.get(id(ins))
        target, a, b, c = ins.operands[:4]
        if partner is not None:
            target = c = Vector((*elements_of(target), *elements_of(partner.operands[0])))
            b = Vector((*elements_of(b), *elements_of(partner.operands[2])))
        found = [run_of(ctx, o) for o in (target, a, b, c)]
        if any(f is None for f in found):
            return False
        (d_head, d_layout, d_at), (_, a_layout, a_at), (_, b_layout, b_at), (c_head, c_layout, c_at) = (
            f for f in found if f is not None
        )
        wide = partner is not None
        if (
            d_layout != c_layout
            or d_layout != ("C2" if wide else "C")
            or (a_layout, d_at, a_at, c_at) != ("A", 0, 0, 0)
        ):
            return False
        if b_layout not in ("B", "B2") or (wide and (b_layout, b_at) != ("B2", 0)) or b_at not in (0, 2):
            return False
        ctx.uses_tiles = True
        row, column = self._factor(a), self._factor(b)
        to, of = ctx.fragments[d_head.name].fragment, ctx.fragments[c_head.name].fragment
        group = self._sum(to, of, ctx.storage[d_head.name].slot, ctx.storage[c_head.name].slot)
        group.products.append((row, column, 32 if b_at else 0))
        row.uses += 1
        column.uses += 1
        note_writes(ctx, target)
        if partner is not None:
            ctx.done_before.add(id(partner))
        return True

    def _factor(self, operand: Operand) -> Factor:
        """What a product's operand is now."""
        ctx = self.ctx
        (head, layout, _) = run_of(ctx, operand) or (None, None, 0)
        assert head is not None and layout is not None
        fragment = ctx.fragments[head.name].fragment
        found = self.brought.get(fragment) or self.lying.get(fragment)
        if found is None:
            found = self.lying[fragment] = Factor(fragment, layout, ctx.fragment_slots[fragment])
        return found

    def _sum(self, to: int, of: int, home: str, start: str) -> Sum:
        if to != of:
            self._settle({to, of})
            found = self.sums[to] = Sum(to, home, start)
            return found
        known = self.sums.get(to)
        if known is None:
            zeros = self.zeros.get(to)
            if zeros is not None and len(zeros) == self.ctx.fragment_sizes[to]:
                del self.zeros[to]
                self.held.pop(to, None)
                known = Sum(to, home, None)
            else:
                self._settle({to}, keep_held=True)
                known = Sum(to, home, start)
            self.sums[to] = known
        return known

    # When the queue is written

    def before(self, ins: Instruction) -> None:
        """Write what an instruction that is not queued must find done."""
        if not self.busy:
            return
        opcode = ins.opcode
        if opcode in _BARRIERS or (opcode == "cp" and not ins.has("commit_group", "wait_group", "wait_all")):
            self.flush(everything=opcode != "cp")
            return
        if opcode in ("st", "ld", "ldu") and (
            ins.has("volatile", "relaxed", "acquire", "release", "mmio")
            or (opcode == "st" and space_of(ins) != "global")
        ):
            self.flush(everything=False)
        places = self.ctx.fragments
        touched = {places[r.name].fragment for r in (*results(ins), *sources(ins)) if r.name in places}
        if touched:
            self._settle(touched)

    @property
    def busy(self) -> bool:
        return bool(self.sums or self.brought or self.zeros or self.held)

    def _settle(self, fragments: set[int], *, keep_zeros: bool = False, keep_held: bool = False) -> None:
        """Bring these fragments' memory up to date."""
        if any(f in self.sums or f in self.brought or f in self.lying for f in fragments):
            self._write()
        for fragment in fragments:
            if fragment in self.zeros and not keep_zeros:
                self._write_zeros(fragment)
            if not keep_held:
                self._store(fragment)

    def flush(self, *, everything: bool = True) -> None:
        """Write the queue; `everything`: and the sums that tiles hold."""
        self._write()
        if everything:
            for fragment in list(self.zeros):
                self._write_zeros(fragment)
            for fragment in list(self.held):
                self._store(fragment)
            self.recent.clear()

    # Writing it

    def _write(self) -> None:
        ctx = self.ctx
        alive = ctx.alive_fragments() if self.brought else frozenset()
        sums, self.sums = self.sums, {}
        brought, self.brought, self.lying = self.brought, {}, {}
        for factor in brought.values():
            if factor.fragment in alive:
                factor.slot = factor.home
                if not factor.uses:
                    self._place(factor)
        groups = _groups(list(sums.values()))
        loaded: dict[int, tuple[Factor, int]] = {}
        turns = {ROWS: 0, COLUMNS: 0}
        for group in groups:
            for one in group:
                for row, column, _ in one.products:
                    self._place(row)
                    self._place(column)
            tiles = [self._tile_for(s, {g.fragment for g in group}) for s in group]
            for step in range(max(len(s.products) for s in group)):
                for one, tile in zip(group, tiles, strict=True):
                    if step < len(one.products):
                        row, column, at = one.products[step]
                        a = self._load(row, 0, ROWS, loaded, turns)
                        b = self._load(column, at, COLUMNS, loaded, turns)
                        multiply = ctx.emit.declare("llvm.x86.tdpbf16ps", "void", "i8 immarg, i8 immarg, i8 immarg")
                        ctx.emit.do(f"call void {multiply}(i8 {tile}, i8 {a}, i8 {b})")
                        self._used(row)
                        self._used(column)

    def _tile_for(self, one: Sum, group: set[int]) -> int:
        """The tile of a sum, with its first value."""
        held = self.held.get(one.fragment)
        if held is not None:
            tile = held[0]
        else:
            taken = {t: f for f, (t, _) in self.held.items()}
            free = [t for t in SUMS if t not in taken]
            if free:
                tile = free[0]
            else:
                tile = next(t for t in self.recent if taken[t] not in group)
                self._store(taken[tile])
            if one.start is not None:
                self._tile_load(tile, one.start, "64")
        if one.start is None:
            zero = self.ctx.emit.declare("llvm.x86.tilezero", "void", "i8 immarg")
            self.ctx.emit.do(f"call void {zero}(i8 {tile})")
        self.held[one.fragment] = (tile, one.home)
        self.recent = [*(t for t in self.recent if t != tile), tile]
        return tile

    def _load(
        self,
        factor: Factor,
        at: int,
        tiles: tuple[int, int],
        loaded: dict[int, tuple[Factor, int]],
        turns: dict[tuple[int, int], int],
    ) -> int:
        """The tile with a factor."""
        for tile in tiles:
            if tile in loaded and loaded[tile][0] is factor and loaded[tile][1] == at:
                turns[tiles] = tiles.index(tile)
                return tile
        turns[tiles] = 1 - turns[tiles]
        tile = tiles[turns[tiles]]
        pointer, stride = self._place(factor)
        if at:
            pointer = self.ctx.emit.op(f"getelementptr i8, ptr {pointer}, i64 {at}")
        self._tile_load(tile, pointer, stride)
        loaded[tile] = (factor, at)
        return tile

    def _place(self, factor: Factor) -> tuple[str, str]:
        """Where a factor lies, brought there if it is not."""
        if factor.place is None:
            if factor.source is None:
                factor.place = factor.home, str(STRIDES[factor.layout])
            else:
                slot = factor.slot
                factor.place, used = fetch(self.ctx, factor.source, slot, lambda: self._slot(factor.layout))
                if slot is None:
                    factor.slot = used
        return factor.place

    def _slot(self, layout: str) -> str:
        free = self.free.setdefault(layout, [])
        return free.pop() if free else self.ctx.emit.alloca(f"[{BYTES[layout]} x i8], align 64", "factor")

    def _used(self, factor: Factor) -> None:
        factor.uses -= 1
        if factor.uses == 0 and factor.slot is not None and factor.slot != factor.home:
            self.free.setdefault(factor.layout, []).insert(0, factor.slot)

    def _tile_load(self, tile: int, pointer: str, stride: str) -> None:
        load = self.ctx.emit.declare("llvm.x86.tileloadd64", "void", "i8 immarg, ptr, i64")
        self.ctx.emit.do(f"call void {load}(i8 {tile}, ptr {pointer}, i64 {stride})")

    def _store(self, fragment: int) -> None:
        held = self.held.pop(fragment, None)
        if held is not None:
            store = self.ctx.emit.declare("llvm.x86.tilestored64", "void", "i8 immarg, ptr, i64")
            self.ctx.emit.do(f"call void {store}(i8 {held[0]}, ptr {held[1]}, i64 64)")

    def _write_zeros(self, fragment: int) -> None:
        """Zeros that were set, to memory: a whole tile's at once."""
        ctx, emit = self.ctx, self.ctx.emit
        positions = self.zeros.pop(fragment)
        slot = ctx.fragment_slots[fragment]
        if len(positions) == ctx.fragment_sizes[fragment]:
            self.held.pop(fragment, None)
            for row in range(16):
                at = emit.op(f"getelementptr i8, ptr {slot}, i64 {64 * row}")
                emit.do(f"store <16 x i32> zeroinitializer, ptr {at}, align 64")
            return
        self._store(fragment)
        for name, place in ctx.fragments.items():
            if place.fragment == fragment and place.position in positions:
                ctx.set(Reg(name, "b32"), "zeroinitializer", "i32", 32)


def _groups(sums: list[Sum]) -> list[list[Sum]]:
    """Sums in groups of at most four: two that share their row factors, and two that share their column factors with those."""

    def rows(s: Sum) -> list[int]:
        return [id(p[0]) for p in s.products]

    def columns(s: Sum) -> list[tuple[int, int]]:
        return [(id(p[1]), p[2]) for p in s.products]

    by_rows: dict[tuple[int, ...], list[Sum]] = {}
    for s in sums:
        by_rows.setdefault(tuple(rows(s)), []).append(s)
    lines = list(by_rows.values())
    found: list[list[Sum]] = []
    whole = all([columns(s) for s in line] == [columns(s) for s in lines[0]] for line in lines)
    if whole and len(lines) > 1:
        # Two columns at a time down all rows, so that a column's factors are needed for a short while.
        width = len(lines[0])
        for x in range(0, width, 2):
            for y in range(0, len(lines), 2):
                found.append([s for line in lines[y : y + 2] for s in line[x : x + 2]])
        return found
    for line in lines:
        found += [line[x : x + 4] for x in range(0, len(line), 4)]
    return found


def tile_product(ctx: Context, ins: Instruction) -> None:
    """A product on its own: its operands copied to tiles if they are not, and its sum stored at once."""
    queue = ctx.queue
    if queue.multiply(ins):
        queue.flush()
        return
    queue.flush()
    ctx.uses_tiles = True
    target = ins.operands[0]
    a, b, c = (address_of(ctx, o, layout, read=True)[0] for o, layout in zip(ins.operands[1:4], "ABC", strict=True))
    d, copied = address_of(ctx, target, "C", read=False)
    one = Sum(-1, d, c)
    one.products.append((Factor(-1, "A", a, uses=1), Factor(-2, "B", b, uses=1), 0))
    queue.sums[-1] = one
    queue.flush()
    if copied:
        copy_back(ctx, target, d, "C")
    else:
        note_writes(ctx, target)
