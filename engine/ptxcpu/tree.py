"""The syntax tree of a PTX module, as `parser.parse` makes it and the rest of the compiler reads it.

Everything is resolved by then: registers of nested `{ }` scopes have unique names, parameterised register declarations
(`%r<10>`) are expanded, immediates are values, and each operand is of one of the classes below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ptxtrain.engine.errors import PtxtrainError

# Bits of each fundamental type. `pred` is one bit wide and never in memory.
TYPE_BITS = {
    "pred": 1,
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 128,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "tf32": 32,
    "f16x2": 32,
    "bf16x2": 32,
    "u16x2": 32,
    "s16x2": 32,
    "f64": 64,
}


@dataclass(frozen=True, slots=True)
class Span:
    """Where something stands in the file, from 1."""

    line: int
    column: int


class PtxError(PtxtrainError):
    """A PTX file that is malformed or uses what this compiler does not know: file, line, column, the instruction."""

    def __init__(self, message: str, path: Path | str, span: Span, text: str = "") -> None:
        self.path, self.span, self.text = path, span, text
        shown = f" in `{text}`" if text else ""
        super().__init__(f"{path}:{span.line}:{span.column}: {message}{shown}")


@dataclass(frozen=True, slots=True)
class Reg:
    """A register. `name` is unique in its function; `type` is as declared (`f32`, `b64`, `pred`, …)."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate. Integers are signed Python ints in `value`; float literals keep their bits and their own width.

    `0f3F800000` is `Imm(0x3F800000, "f32")`, `0d…` and decimal floats are `"f64"`, integers are `"int"`.
    """

    value: int
    kind: str  # "int", "f32", "f64"


@dataclass(frozen=True, slots=True)
class Special:
    """A special register with its component, e.g. `%tid.x`, `%laneid`, `%clock64`."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, or a parameter, function or label, by name. `offset` is in bytes (`mov %r, buf+16`)."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`; base None is an absolute address."""

    base: Reg | Symbol | None
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, …}`."""

    elements: tuple[Reg | Imm | Sink, ...]


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: the result is not wanted."""


@dataclass(frozen=True, slots=True)
class Negated:
    """`!%p` as a source operand."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Pair:
    """`%d|%p`: a result and a predicate result (setp, shfl, match)."""

    first: Reg | Sink
    second: Reg | Sink


@dataclass(frozen=True, slots=True)
class Call:
    """The operands of `call`: `(returns), callee, (arguments)`; callee a Symbol, or a Reg for an indirect call."""

    returns: tuple[Symbol | Reg, ...]
    callee: Symbol | Reg
    arguments: tuple[Symbol | Reg | Imm, ...]


Operand: TypeAlias = Reg | Imm | Special | Symbol | Address | Vector | Sink | Negated | Pair | Call


@dataclass(frozen=True, slots=True)
class Guard:
    """`@%p` or `@!%p`."""

    reg: Reg
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `@%p fma.rn.f32 d, a, b, c` has opcode `fma` and modifiers `("rn", "f32")`.

    A modifier keeps its inner colons and brackets: `.L2::128B` is `"L2::128B"`.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    span: Span
    text: str  # the source, whitespace folded, for messages

    @property
    def types(self) -> tuple[str, ...]:
        """The modifiers that are types, in order: `cvt.rn.bf16.f32` has `("bf16", "f32")`."""
        return tuple(m for m in self.modifiers if m in TYPE_BITS)

    def has(self, *modifiers: str) -> bool:
        """Whether any of `modifiers` is there."""
        return any(m in self.modifiers for m in modifiers)


@dataclass(frozen=True, slots=True)
class Label:
    """A place in a body. Names of nested scopes are made unique as registers are."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in a state space: `.shared .align 16 .b8 tile[4096];`

    `nbytes` is 0 for an `extern` array without a size (dynamic shared memory). `init` holds an initialiser's bytes, with
    `relocations` (offset, symbol) for addresses in it.
    """

    name: str
    space: str  # "shared", "global", "const", "local", "param"
    type: str
    align: int
    nbytes: int
    span: Span
    extern: bool = False
    init: bytes | None = None
    relocations: tuple[tuple[int, Symbol], ...] = ()


@dataclass(slots=True)
class Function:
    """An entry or a device function. `variables` are those declared in its body (any space); names are unique."""

    name: str
    is_entry: bool
    params: tuple[Variable, ...]
    returns: tuple[Variable, ...]
    registers: dict[str, Reg]
    variables: dict[str, Variable]
    body: list[Instruction | Label]
    branch_targets: dict[str, tuple[str, ...]]  # `.branchtargets` lists by their label, for brx.idx
    span: Span
    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    is_declaration: bool = False


@dataclass(slots=True)
class Module:
    """A whole file."""

    path: Path
    text: str
    version: tuple[int, int]
    target: str
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)

    def entry(self, name: str) -> Function:
        """The entry `name`, or a `PtxError` that lists those there are."""
        function = self.functions.get(name)
        if function is None or not function.is_entry:
            names = ", ".join(f.name for f in self.functions.values() if f.is_entry) or "none"
            raise PtxError(f"no entry called {name}; this file has {names}", self.path, Span(1, 1))
        return function
