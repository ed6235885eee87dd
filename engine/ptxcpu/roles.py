"""What an operand may be: the roles that the instruction table names, and the words that messages use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Address,
    Imm,
    Instruction,
    Negated,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)

SPACES: Final = ("global", "shared", "local", "const", "param")
_WIDER: Final = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


@dataclass(frozen=True, slots=True)
class Use:
    """The instruction of an operand, its first and its second type."""

    instruction: Instruction
    type: str
    second: str


def fits(reg: Reg, type: str, wider: bool = False) -> bool:
    """Whether a register can stand where an instruction has `type`, perhaps with more bits."""
    kind, bits = reg.type, TYPE_BITS[type]
    if (kind == "pred") != (type == "pred"):
        return False
    if TYPE_BITS[kind] != bits and not (wider and TYPE_BITS[kind] > bits):
        return False
    if (type[0] == "b" and type[1:].isdigit()) or kind[0] == "b":
        return True
    if kind == "f16x2":
        return type in ("f16x2", "u32", "s32")
    return kind == type if type[0] not in "us" else kind[0] in "us"


def check_register(operand: Operand, type: str, wider: bool = False) -> str | None:
    if not isinstance(operand, Reg):
        return f"expected a register for .{type}, not {show(operand)}"
    if not fits(operand, type, wider):
        wanted = "a predicate" if type == "pred" else f".{type}"
        return f"{operand.name} is a .{operand.type} register and does not fit {wanted}"
    return None


def _constant(operand: Imm, type: str) -> str | None:
    if operand.kind == "int":
        return (
            None
            if type[0] in "us" or (type[1:].isdigit() and type[0] == "b") or type == "pred"
            else (
                f"a .{type} needs a float constant"
                if type in ("f32", "f64")
                else f"a .{type} has no constants; use a register"
            )
        )
    if type in ("f32", "f64") or operand.kind == {"b32": "f32", "b64": "f64"}.get(type):
        return None
    return f"a float constant does not fit .{type}"


def check_value(operand: Operand, type: str, wider: bool = False) -> str | None:
    """A register or a constant."""
    if isinstance(operand, Imm):
        return _constant(operand, type)
    if isinstance(operand, Special):
        return f"{operand.name} can only be read by mov or cvt; move it to a register first"
    if isinstance(operand, Symbol):
        return f"the address of {operand.name} can only be taken by mov or cvta; move it to a register first"
    return check_register(operand, type, wider)


def check_predicate(operand: Operand) -> str | None:
    if isinstance(operand, Negated | Imm):
        return None if not isinstance(operand, Imm) or operand.kind == "int" else "expected a predicate"
    return check_register(operand, "pred")


def _pair(operand: Operand, type: str) -> str | None:
    """`d`, `d|p`; either may be `_` in the pair."""
    if not isinstance(operand, Pair):
        return check_register(operand, type)
    first = None if isinstance(operand.first, Sink) else check_register(operand.first, type)
    second = None if isinstance(operand.second, Sink) else check_register(operand.second, "pred")
    return first or second


def check_vector(operand: Operand, use: Use, one: Callable[[Operand], str | None], type: str) -> str | None:
    """`{a, b}` with as many elements as `.v2`, `.v4` or `.v8` says, or a scalar."""
    width = next((int(word[1]) for word in ("v2", "v4", "v8") if use.instruction.has(word)), 1)
    if width * TYPE_BITS[type] > 256 or (width > 1 and type == "b128"):
        return f".v{width}.{type} is more than 32 bytes"
    if not isinstance(operand, Vector):
        return one(operand) if width == 1 else f".v{width} needs a vector {{…}}, not {show(operand)}"
    if len(operand.elements) != width:
        return f"the vector has {len(operand.elements)} elements; {width} are needed"
    kinds = {element.type for element in operand.elements if isinstance(element, Reg)}
    if len({TYPE_BITS[kind] for kind in kinds}) > 1:
        return "the registers of a vector must have one size"
    return next((wrong for element in operand.elements if (wrong := one(element)) is not None), None)


def _destination(operand: Operand, type: str, wider: bool, sink: bool) -> str | None:
    return None if sink and isinstance(operand, Sink) else check_register(operand, type, wider)


def check_address(operand: Operand) -> str | None:
    if not isinstance(operand, Address):
        return f"expected an address in brackets, not {show(operand)}"
    if isinstance(operand.base, Reg) and operand.base.type not in ("b32", "u32", "s32", "b64", "u64", "s64"):
        return f"{operand.base.name} is a .{operand.base.type} register; an address has 32 or 64 bits and is no float"
    return None


def _cvta(operand: Operand, type: str) -> str | None:
    return None if isinstance(operand, Symbol) else check_register(operand, type)


def _number(operand: Operand) -> str | None:
    return None if isinstance(operand, Imm) and operand.kind == "int" else f"expected a constant, not {show(operand)}"


def _label(operand: Operand) -> str | None:
    return None if isinstance(operand, Symbol) else f"expected a label, not {show(operand)}"


def _size_or_predicate(operand: Operand) -> str | None:
    """The fourth operand of cp.async: how much is read, or whether the source is ignored."""
    if isinstance(operand, Negated) or (isinstance(operand, Reg) and operand.type == "pred"):
        return None
    return (
        check_value(operand, "b32")
        if not isinstance(operand, Reg) or operand.type != "f32"
        else check_value(operand, "u32")
    )


def _pointer(operand: Operand) -> str | None:
    if isinstance(operand, Reg) and operand.type in ("b32", "u32", "s32", "b64", "u64", "s64"):
        return None
    return f"expected a register with an address, not {show(operand)}"


ROLES: Final[dict[str, Callable[[Operand, Use], str | None]]] = {
    # Registers that are written: of the first type, of it or `_`, twice as wide, of 32 bits, a predicate
    "d": lambda o, use: check_register(o, use.type),
    "e": lambda o, use: _destination(o, use.type, False, True),
    "ev": lambda o, use: check_vector(o, use, lambda one: _destination(one, use.type, False, True), use.type),
    "w": lambda o, use: check_register(o, _WIDER[use.type]),
    "di": lambda o, use: check_register(o, "u32"),
    "P": lambda o, use: check_register(o, "pred"),
    "PP": lambda o, use: _pair(o, "pred"),
    "dP": lambda o, use: _pair(o, use.type or "b32"),
    "iP": lambda o, use: _pair(o, "u32"),
    # Registers or constants that are read: of the first type, the second, twice as wide, of 32 bits, a predicate
    "s": lambda o, use: check_value(o, use.type),
    "sv": lambda o, use: check_vector(o, use, lambda one: check_value(one, use.type), use.type),
    "t": lambda o, use: check_value(o, use.second),
    "ws": lambda o, use: check_value(o, _WIDER[use.type]),
    "i": lambda o, use: check_value(o, "u32"),
    "ip": lambda o, use: _size_or_predicate(o),
    "p": lambda o, use: check_predicate(o),
    # A constant, a label, an address, a register with one, what cvta takes; what is loaded and stored
    "n": lambda o, use: _number(o),
    "l": lambda o, use: _label(o),
    "a": lambda o, use: check_address(o),
    "x": lambda o, use: _pointer(o),
    "q": lambda o, use: _cvta(o, use.type),
    "ld": lambda o, use: check_vector(
        o, use, lambda one: _destination(one, use.type, True, isinstance(o, Vector)), use.type
    ),
    "st": lambda o, use: check_vector(o, use, lambda one: check_value(one, use.type, True), use.type),
}


# Words of messages


def show(operand: Operand) -> str:
    """An operand as messages call it."""
    if isinstance(operand, Reg):
        return f"{operand.name} (.{operand.type})"
    if isinstance(operand, Imm):
        return "a constant"
    if isinstance(operand, Special | Symbol):
        return operand.name
    words = {Vector: "a vector", Sink: "_", Address: "an address", Negated: "a negated predicate", Pair: "a pair"}
    return words.get(type(operand), "this")


def listed(words: Sequence[str]) -> str:
    return ", ".join(f".{word}" for word in words)


def form_name(instruction: Instruction, without: str = "") -> str:
    """`mul.wide.s32`: the opcode and its modifiers but for hints and the one that is wrong."""
    hints = ("L1", "L2", "aligned", *SPACES)
    parts = [m for m in instruction.modifiers if m != without and m.split("::")[0] not in hints]
    return ".".join((instruction.opcode, *parts))
