"""What is known of each register: the same for the whole warp, `base + stride * lane`, or anything.

Uniform registers become scalars and affine ones a scalar base, so that addresses of neighbouring lanes are vector loads
and most arithmetic on addresses costs what it costs in scalar code. The analysis starts from the best case and lowers
its claims until they hold together with the regions that divergent branches make.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ptxtrain.engine.ptxcpu.cfg import Block, Region, find_regions, post_dominators
from ptxtrain.engine.ptxcpu.spins import SYNCHRONISING, find_spins
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Address,
    Function,
    Guard,
    Imm,
    Instruction,
    Negated,
    Operand,
    Reg,
    Special,
    Symbol,
    Vector,
)
from ptxtrain.engine.ptxcpu.uses import CARRY, reads_carry, results, sources

ANY_ALIGN = 1 << 40  # the alignment of zero
LANES = 32
MAX_STRIDE = 1 << 20  # bytes; so that 31 strides never bring a 32-bit shared address round


@dataclass(frozen=True, slots=True)
class Info:
    """A register's value in lane l is `base + stride * l`, the base a multiple of `align`; stride None: anything.

    `const` is the base's value where it is known. `loose`: the form may fail when a 32-bit sum wrapped before it was
    widened, so the value carries a correction that is zero otherwise.
    """

    stride: int | None
    align: int = 1
    const: int | None = None
    loose: bool = False

    @property
    def uniform(self) -> bool:
        return self.stride == 0

    @property
    def affine(self) -> bool:
        return self.stride is not None and self.stride != 0


VARYING = Info(None)
UNIFORM = Info(0)


def constant(value: int) -> Info:
    """The info of a known number."""
    return Info(0, _low_bit(value), value)


def _low_bit(value: int) -> int:
    return ANY_ALIGN if value == 0 else min(value & -value, ANY_ALIGN)


def _meet(a: Info | None, b: Info) -> Info:
    if a is None or a == b:
        return b
    if a.stride != b.stride:
        return VARYING
    if a.stride is None:
        return VARYING
    return Info(a.stride, min(a.align, b.align), a.const if a.const == b.const else None, a.loose or b.loose)


@dataclass(slots=True)
class Shape:
    """The block's shape that a kernel is compiled for."""

    x: int
    y: int
    z: int

    @property
    def threads(self) -> int:
        return self.x * self.y * self.z

    @property
    def warps(self) -> int:
        return (self.threads + LANES - 1) // LANES

    def special(self, name: str) -> Info:
        """What is known of a special register."""
        line = self.y == 1 and self.z == 1
        match name:
            case "%tid.x":
                return Info(1, LANES) if self.x % LANES == 0 or line else VARYING
            case "%tid.y":
                return constant(0) if self.y == 1 else UNIFORM if self.x % LANES == 0 else VARYING
            case "%tid.z":
                return constant(0) if self.z == 1 else UNIFORM if self.x * self.y % LANES == 0 else VARYING
            case "%ntid.x" | "%ntid.y" | "%ntid.z":
                return constant({"x": self.x, "y": self.y, "z": self.z}[name[-1]])
            case "%laneid":
                return Info(1, ANY_ALIGN, 0)
            case _ if name.startswith("%lanemask"):
                return VARYING
            case _:
                return UNIFORM


class Analysis:
    """Everything that the lowering asks about a function compiled for one block shape."""

    def __init__(self, function: Function, blocks: Sequence[Block], shape: Shape) -> None:
        self.function, self.blocks, self.shape = function, blocks, shape
        self._places: dict[str, list[tuple[int, Instruction]]] = defaultdict(list)  # definitions
        self._uses: dict[str, set[int]] = defaultdict(set)
        for block in blocks:
            for ins in self._instructions(block):
                for reg in results(ins):
                    self._places[reg.name].append((block.index, ins))
                for reg in sources(ins):
                    self._uses[reg.name].add(block.index)
        self.info: dict[str, Info] = {}
        self.regions: list[Region] = []
        self.region_of: dict[int, Region] = {}
        self.spins = find_spins(blocks)
        self._loops: dict[int, frozenset[tuple[int, int]]] = {}
        self._forced: set[str] = set()
        self._solve()

    @staticmethod
    def _instructions(block: Block) -> list[Instruction]:
        return [*block.body, block.branch] if block.branch else block.body

    def _solve(self) -> None:
        ipdom = post_dominators(self.blocks)
        divergent: set[int] = set()
        while True:
            self._propagate()
            found = {b.index for b in self.blocks if self._diverges(b)}
            stable = found <= divergent
            divergent |= found
            self._set_regions(find_regions(self.blocks, divergent, self._joins(divergent, ipdom)))
            forced = self._forced_varying()
            if stable and forced <= self._forced:
                return
            self._forced |= forced

    def _joins(self, divergent: set[int], ipdom: Sequence[int | None]) -> list[int | None]:
        """Where the lanes of each divergent branch join: at its post-dominator.

        Lanes that leave a waiting loop may have to go on before the others can follow (they hold a lock), so they join
        only before the next instruction that needs all of them.
        """
        joins = list(ipdom)
        for spin in self.spins:
            for index in divergent & spin.blocks:
                if set(self.blocks[index].inner_successors) <= spin.blocks:
                    continue
                join = ipdom[index]
                while join is not None and not self._synchronises(join):
                    join = ipdom[join]
                joins[index] = join
        return joins

    def _synchronises(self, index: int) -> bool:
        return any(ins.opcode in SYNCHRONISING for ins in self.blocks[index].body[:1])

    def _diverges(self, block: Block) -> bool:
        """Whether lanes may go different ways at the block's end, an early return of some aside."""
        if len(block.inner_successors) < 2:
            return False
        if block.guard is not None and not self.of(block.guard.reg).uniform:
            return True
        return (
            block.branch is not None and block.branch.opcode == "brx" and not self.of(block.branch.operands[0]).uniform
        )

    def _set_regions(self, regions: list[Region]) -> None:
        self.regions = regions
        self.region_of = {b: r for r in regions for b in r.blocks}
        self._loops = {}
        for number, region in enumerate(regions):
            for position, block in enumerate(region.order):
                inside = [i for i, (first, last, _) in enumerate(region.loops) if first <= position <= last]
                if any(spin.target in region.blocks for spin in self.spins):
                    # Lanes may go through any block of the region while others wait behind it.
                    inside.append(-1 - block)
                self._loops[block] = frozenset((number, i) for i in inside)

    def _leaves_loop(self, name: str) -> bool:
        """Whether a register defined once is read outside of a divergent loop that defines it."""
        ((block, _),) = self._places[name]
        inside = self._loops.get(block, frozenset())
        return any(not inside <= self._loops.get(use, frozenset()) for use in self._uses[name])

    def _forced_varying(self) -> set[str]:
        forced = set()
        for name, places in self._places.items():
            in_region = [b for b, _ in places if b in self.region_of]
            if in_region and (len(places) > 1 or self._leaves_loop(name)):
                forced.add(name)
        return forced

    def needs_blend(self, reg: Reg) -> bool:
        """Whether lanes that are masked off may still need the register's old value."""
        places = self._places[reg.name]
        return len(places) > 1 or self._leaves_loop(reg.name)

    def _propagate(self) -> None:
        self.info = {name: VARYING for name in self._forced}
        changed = True
        while changed:
            changed = False
            for block in self.blocks:
                for ins in block.body:
                    written = results(ins)
                    if not written:
                        continue
                    new = self._transfer(ins)
                    if new is None:
                        continue
                    for reg in written:
                        old = self.info.get(reg.name)
                        met = _meet(old, self._fit(reg, new))
                        if met != old:
                            self.info[reg.name], changed = met, True

    @staticmethod
    def _fit(reg: Reg, info: Info) -> Info:
        """Affine forms are kept for 32- and 64-bit integers alone."""
        if info.stride and (TYPE_BITS[reg.type] not in (32, 64) or abs(info.stride) > MAX_STRIDE):
            return VARYING
        if info.uniform and info.loose:
            return VARYING
        return info

    def of(self, operand: Operand) -> Info:
        """What is known of an operand's value; a register that nothing defines is uniform."""
        match operand:
            case Reg(name, _):
                return self.info.get(name, UNIFORM)
            case Imm(value, kind):
                return constant(value) if kind == "int" else UNIFORM
            case Special(name):
                return self.shape.special(name)
            case Symbol():
                return UNIFORM
            case Negated(reg):
                return UNIFORM if self.of(reg).uniform else VARYING
            case Address(base, offset):
                return (
                    self.of(Symbol(base.name, base.offset + offset))
                    if isinstance(base, Symbol)
                    else (self.of(base) if base is not None else constant(offset))
                )
            case Vector(elements):
                return UNIFORM if all(self.of(e).uniform for e in elements if not _is_sink(e)) else VARYING
            case _:
                return UNIFORM

    def guard_is_uniform(self, guard: Guard | None) -> bool:
        return guard is None or self.of(guard.reg).uniform

    def _known(self, operand: Operand) -> Info | None:
        """As `of`, but None while the optimistic pass has not reached the register's definitions."""
        if isinstance(operand, Reg) and operand.name in self._places and operand.name not in self.info:
            return None
        return self.of(operand)

    def _transfer(self, ins: Instruction) -> Info | None:
        if not self.guard_is_uniform(ins.guard):
            return VARYING
        op = ins.opcode
        if op in ("activemask", "bar", "barrier", "createpolicy"):
            return UNIFORM
        if op in ("vote", "redux"):
            # Lanes with different member masks are different groups, each with its own result.
            return UNIFORM if not ins.has("sync") or self.of(ins.operands[2]).uniform else VARYING
        if op in ("shfl", "match", "atom", "mma", "wmma", "ldmatrix", "call", "elect"):
            return VARYING
        if op == "ld" and ins.has("local"):
            return VARYING
        known = [self._known(o) for o in (*ins.operands[1:], *((CARRY,) if reads_carry(ins) else ()))]
        infos = [k for k in known if k is not None]
        if len(infos) < len(known):
            # Wait for the others, unless what is known already spoils it.
            return VARYING if any(k.stride is None for k in infos) else None
        if op == "ld":
            return UNIFORM if infos[0].uniform else VARYING
        if op == "cvta" and ins.has("local"):
            return VARYING
        bits = TYPE_BITS.get(ins.types[0], 0) if ins.types else 0
        if ins.types and ins.types[0][0] in "usb" and not ins.types[0].startswith("bf") and ins.types[0][-2:] != "x2":
            special = self._integer(ins, infos, bits)
            if special is not None:
                return special
        return UNIFORM if all(i.uniform for i in infos) else VARYING

    def _integer(self, ins: Instruction, infos: list[Info], bits: int) -> Info | None:
        """The rules that keep an affine form or a constant; None leaves it to the default."""
        op = ins.opcode
        if any(i.stride is None for i in infos):
            return None
        match op:
            case "mov" | "cvta":
                return infos[0] if len(infos) == 1 and not isinstance(ins.operands[0], Vector) else None
            case "add" | "sub" if not ins.has("cc", "sat"):
                return _wrap(_sum(infos[0], infos[1], 1 if op == "add" else -1), bits)
            case "neg":
                return _wrap(_sum(constant(0), infos[0], -1), bits)
            case "mul" if ins.has("lo") or ins.has("wide"):
                return self._product(ins, infos[0], infos[1], bits)
            case "mad" if ins.has("lo") or ins.has("wide"):
                product = self._product(ins, infos[0], infos[1], bits)
                wide = 2 * bits if ins.has("wide") else bits
                return None if product is None or ins.has("cc", "sat") else _wrap(_sum(product, infos[2], 1), wide)
            case "shl" if infos[1].uniform and infos[1].const is not None and 0 <= infos[1].const < bits:
                return _wrap(_scaled(infos[0], 1 << infos[1].const), bits)
            case "shr" if infos[1].uniform and infos[1].const is not None and 0 <= infos[1].const < bits:
                return self._shift_right(infos[0], infos[1].const)
            case "and":
                return self._and(infos[0], infos[1], bits) or self._and(infos[1], infos[0], bits)
            case "or":
                return self._or(infos[0], infos[1]) or self._or(infos[1], infos[0])
            case "cvt" if (
                len(ins.types) == 2 and ins.types[1][0] in "us" and ins.types[1] != "bf16" and not ins.has("sat")
            ):
                source = TYPE_BITS[ins.types[1]]
                if bits > source:
                    return widened(infos[0], source, signed=ins.types[1].startswith("s"))
                return _wrap(infos[0], bits) if bits in (32, 64) else None
            case _:
                return None

    @staticmethod
    def _product(ins: Instruction, a: Info, b: Info, bits: int) -> Info | None:
        if ins.has("wide"):
            signed = ins.types[0].startswith("s")
            a, b = widened(a, bits, signed=signed), widened(b, bits, signed=signed)
            bits *= 2
        if a.uniform and b.uniform:
            align = min(a.align * b.align, ANY_ALIGN)
            const = a.const * b.const if a.const is not None and b.const is not None else None
            return _wrap(Info(0, align, const, a.loose or b.loose), bits)
        if a.const is not None and a.uniform:
            return _wrap(_scaled(b, a.const), bits)
        if b.const is not None and b.uniform:
            return _wrap(_scaled(a, b.const), bits)
        return None

    @staticmethod
    def _shift_right(a: Info, amount: int) -> Info | None:
        if a.loose or a.stride is None:
            return None
        span, unit = a.stride * (LANES - 1), 1 << amount
        if a.uniform:
            align = max(a.align >> amount, 1)
            return Info(0, align, None)
        if a.stride > 0 and a.align >= unit > span:
            return Info(0, max(a.align >> amount, 1))
        return None

    @staticmethod
    def _and(a: Info, mask: Info, bits: int) -> Info | None:
        """`a & mask` where the mask is known: the low bits of an aligned run of lanes, or the bits above them."""
        if mask.const is None or not mask.uniform or a.loose or not a.affine or a.stride is None or a.stride < 0:
            return None
        value, span = mask.const % (1 << bits), a.stride * (LANES - 1)
        if value & (value + 1) == 0 and a.align > value >= span:
            return Info(a.stride, ANY_ALIGN, 0)
        low = (~value) % (1 << bits)
        if low & (low + 1) == 0 and a.align > low >= span:
            return Info(0, a.align)
        return None

    @staticmethod
    def _or(a: Info, bits: Info) -> Info | None:
        """`a | bits` is a sum where the known bits lie below every bit that `a` may have set."""
        if bits.const is None or not bits.uniform or bits.const < 0 or a.loose or not a.affine or a.stride is None:
            return None
        if bits.const < min(a.align, a.stride & -a.stride):
            return replace(_sum(a, bits, 1), loose=False)
        return None


def _is_sink(operand: object) -> bool:
    return not isinstance(operand, Reg | Imm)


def _sum(a: Info, b: Info, sign: int) -> Info:
    if a.stride is None or b.stride is None:
        return VARYING
    const = a.const + sign * b.const if a.const is not None and b.const is not None else None
    return Info(a.stride + sign * b.stride, min(a.align, b.align), const, a.loose or b.loose)


def _scaled(a: Info, factor: int) -> Info:
    if a.stride is None:
        return VARYING
    if factor == 0:
        return constant(0)
    align = min(a.align * _low_bit(factor), ANY_ALIGN)
    return Info(a.stride * factor, align, None if a.const is None else a.const * factor, a.loose)


def _wrap(info: Info, bits: int) -> Info:
    """Strides and constants modulo 2^bits, as signed numbers."""

    def signed(value: int) -> int:
        value %= 1 << bits
        return value - (1 << bits) if value >> (bits - 1) else value

    if info.stride is None or bits not in (32, 64):
        return info if bits in (32, 64) or info.stride in (None, 0) else VARYING
    const = None if info.const is None else signed(info.const)
    return Info(signed(info.stride), info.align, const, info.loose)


def widened(info: Info, bits: int, *, signed: bool) -> Info:
    """The info after sign or zero extension from `bits`: the sum must not have wrapped, or a correction is needed."""
    if info.const is not None:
        const = info.const % (1 << bits)
        info = replace(info, const=const - (1 << bits) if signed and const >> (bits - 1) else const)
    if not info.affine or info.stride is None:
        return info
    # A run of lanes inside an aligned piece cannot cross a power of two; neither can a small known base.
    if 0 < info.stride * (LANES - 1) < info.align and not info.loose:
        return info
    if info.const is not None and not info.loose:
        last = info.const + info.stride * (LANES - 1)
        if 0 <= info.const < 1 << (bits - 1) and 0 <= last < 1 << (bits - 1):
            return info
    return replace(info, loose=True)
