"""The names of a function: `{ }` scopes, and names made unique across them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Reg, Span

COMPONENTS: Final = "xyzw"

_AXES: Final = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
# Special registers as operands name them.
SPECIALS: Final = frozenset(
    [f"%{name}.{axis}" for name in _AXES for axis in COMPONENTS]
    + [f"%lanemask_{relation}" for relation in ("eq", "le", "lt", "ge", "gt")]
    + [f"%pm{i}" for i in range(8)]
    + [f"%pm{i}_64" for i in range(8)]
    + [f"%envreg{i}" for i in range(32)]
    + [f"%reserved_smem_offset_{which}" for which in ("begin", "end", "cap", "0", "1")]
    + ["%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clock", "%clock_hi", "%clock64"]
    + ["%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%cluster_ctarank", "%cluster_nctarank"]
    + ["%is_explicit_cluster", "%total_smem_size", "%aggr_smem_size", "%dynamic_smem_size", "%current_graph_exec"]
)
SPECIAL_VECTORS: Final = frozenset(f"%{name}" for name in _AXES)


@dataclass(frozen=True, slots=True)
class Family:
    """`.reg .b32 %r<10>;`: the registers %r0 … %r9, made when they are first named."""

    prefix: str
    count: int
    type: str
    span: Span

    def holds(self, name: str) -> bool:
        """Whether `name` is one of them."""
        index = name[len(self.prefix) :]
        if not name.startswith(self.prefix) or not index.isdigit() or not index.isascii() or len(index) > 9:
            return False
        return (index == "0" or index[0] != "0") and int(index) < self.count

    def overlaps(self, other: Family) -> bool:
        """Whether a name is in both."""
        short, long = sorted((self, other), key=lambda family: len(family.prefix))
        between = long.prefix[len(short.prefix) :]
        if not long.prefix.startswith(short.prefix) or (between and not between.isdigit()):
            return False
        return not between or short.holds(f"{long.prefix}0")


@dataclass(frozen=True, slots=True)
class Named:
    """What a name of a scope stands for: a register, a vector of registers, or a variable or label by its unique name."""

    kind: str  # "register", "vector", "variable", "label", "targets", "prototype"
    span: Span
    registers: tuple[Reg, ...] = ()
    unique: str = ""


@dataclass(slots=True)
class Scope:
    """One `{ }`."""

    parent: Scope | None = None
    names: dict[str, Named] = field(default_factory=dict)
    families: list[Family] = field(default_factory=list)


class Names:
    """All names of one function. `registers` are those declared one by one, and those of families that were used."""

    def __init__(self) -> None:
        self.scope = Scope()
        self.registers: dict[str, Reg] = {}
        self._used: set[str] = set()

    def enter(self) -> None:
        """A `{`."""
        self.scope = Scope(self.scope)

    def leave(self) -> bool:
        """A `}`; false if it ends the function."""
        if self.scope.parent is None:
            return False
        self.scope = self.scope.parent
        return True

    def unique(self, name: str) -> str:
        """`name`, or `name$2`, … if an earlier scope has it."""
        found, n = name, 1
        while found in self._used:
            n += 1
            found = f"{name}${n}"
        self._used.add(found)
        return found

    def here(self, name: str) -> Span | None:
        """Where the innermost scope declares `name`, or None."""
        if name in self.scope.names:
            return self.scope.names[name].span
        return next((family.span for family in self.scope.families if family.holds(name)), None)

    def declare_register(self, name: str, type: str, width: int, span: Span) -> None:
        """A register, or for `width` 2 or 4 a vector of them, called `name.x`, `name.y`, …."""
        unique = self.unique(name)
        regs: tuple[Reg, ...]
        if width == 1:
            regs = (Reg(unique, type),)
        else:
            regs = tuple(Reg(f"{unique}.{COMPONENTS[i]}", type) for i in range(width))
        self.registers.update((reg.name, reg) for reg in regs)
        self.scope.names[name] = Named("register" if width == 1 else "vector", span, regs)

    def declare_family(self, family: Family) -> Span | None:
        """`%r<10>`; the place of an earlier declaration of one of its names, else None."""
        for other in self.scope.families:
            if family.overlaps(other):
                return other.span
        for name, named in self.scope.names.items():
            if family.holds(name):
                return named.span
        self.scope.families.append(family)
        return None

    def declare(self, name: str, kind: str, span: Span) -> str:
        """A variable, label, list of targets or prototype; its unique name."""
        unique = self.unique(name)
        self.scope.names[name] = Named(kind, span, unique=unique)
        return unique

    def find(self, name: str, scope: Scope | None = None) -> Named | None:
        """What `name` stands for, seen from `scope` (the innermost one if None)."""
        look: Scope | None = scope or self.scope
        while look is not None:
            named = look.names.get(name)
            if named is not None:
                return named
            for family in look.families:
                if family.holds(name):
                    reg = Reg(self.unique(name), family.type)
                    self.registers[reg.name] = reg
                    named = look.names[name] = Named("register", family.span, (reg,))
                    return named
            look = look.parent
        return None

    def visible(self, *kinds: str) -> list[str]:
        """Names that can be seen here, for hints."""
        names: list[str] = []
        look: Scope | None = self.scope
        while look is not None:
            names += [name for name, named in look.names.items() if named.kind in kinds]
            if "register" in kinds:
                names += [f"{f.prefix}{i}" for f in look.families for i in range(min(f.count, 200))]
            look = look.parent
        return names


REGISTER_TYPES: Final = frozenset(TYPE_BITS) - {"b8", "u8", "s8", "bf16", "bf16x2", "tf32", "u16x2", "s16x2"}
