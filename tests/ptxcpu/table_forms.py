"""Instructions made from the instruction table: each row with each of its types, and each optional modifier once."""

from __future__ import annotations

from collections.abc import Iterator

from ptxtrain.engine.ptxcpu.roles import SPACES
from ptxtrain.engine.ptxcpu.table import ROWS, Row
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS

_WIDER = {"u16": 32, "s16": 32, "u32": 64, "s32": 64}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}

DECLARATIONS = "\n".join(
    [
        *(f".reg .b{bits} %b{bits}<20>;" for bits in (16, 32, 64, 128)),
        ".reg .f32 %f32<20>; .reg .f64 %f64<20>; .reg .pred %p<20>; .reg .b64 %at;",
        ".shared .align 16 .b8 tile[256]; .local .align 16 .b8 depot[256];",
    ]
)


def _register(type_: str, number: int) -> str:
    if type_ == "pred":
        return f"%p{number}"
    if type_ in ("f32", "f64"):
        return f"%{type_}{number}"
    return f"%b{max(16, TYPE_BITS[type_])}{number}"


def _operand(role: str, number: int, type_: str, second: str, modifiers: tuple[str, ...], opcode: str) -> str:
    width = next((_VECTORS[m] for m in modifiers if m in _VECTORS), 1)

    def vector(first: int) -> str:
        one = [_register(type_, first + i) for i in range(width)]
        return one[0] if width == 1 else "{" + ", ".join(one) + "}"

    space = next((m.split("::")[0] for m in modifiers if m.split("::")[0] in SPACES), "generic")
    if role == "a":
        if opcode == "cp":
            return "[tile]" if number == 0 else "[%at]"
        return {"shared": "[tile]", "local": "[depot]", "param": "[p]"}.get(space, "[%at]")
    return {
        **dict.fromkeys(("d", "e", "s"), lambda: _register(type_, number)),
        **dict.fromkeys(("ev", "sv", "ld", "st"), lambda: vector(number + 1 if role in ("sv", "st") else 0)),
        "w": lambda: f"%b{_WIDER[type_]}{number}",
        "ws": lambda: f"%b{_WIDER[type_]}{number}",
        "di": lambda: f"%b32{number}",
        "i": lambda: f"%b32{number}",
        "ip": lambda: f"%b32{number}",
        "P": lambda: f"%p{number}",
        "PP": lambda: f"%p{number}|%p{number + 9}",
        "dP": lambda: f"{_register(type_ or 'b32', number)}|%p{number + 9}",
        "iP": lambda: f"%b32{number}|%p{number + 9}",
        "p": lambda: f"!%p{number}",
        "t": lambda: _register(second, number),
        "n": lambda: "16" if opcode == "cp" else "2",
        "x": lambda: "%at",
        "q": lambda: f"%b64{number}",
    }[role]()


def _form(opcode: str, row: Row, operands: str, type_: str, second: str, more: tuple[str, ...]) -> str | None:
    words = (*more, *row.when.split()) if opcode in ("set", "setp") else (*row.when.split(), *more)
    roles = operands.split()
    if "l" in roles:
        return None
    try:
        given = [_operand(role, i, type_, second, words, opcode) for i, role in enumerate(roles)]
    except KeyError:
        return None
    name = ".".join((opcode, *words, *((type_,) if type_ else ()), *((second,) if second else ())))
    return f"{name} {', '.join(given)}"


def _compares(type_: str, relation: str) -> bool:
    """Whether a comparison is one of numbers of this type; the table does not say so for `set`."""
    if type_[0] == "f" or type_.startswith("bf"):
        return relation not in ("lo", "ls", "hi", "hs")
    known = {"b": ("eq", "ne"), "s": ("eq", "ne", "lt", "le", "gt", "ge")}.get(type_[0])
    return relation in known if known else len(relation) == 2


def forms(opcode: str) -> Iterator[str]:
    """The instructions of an opcode, without their semicolons. Not all combinations are allowed by the ISA."""
    for row in ROWS[opcode]:
        needs = row.need.split() or [""]
        for type_ in row.types.split() or [""]:
            for second in row.second.split() or [""]:
                for operands in row.operands.split("/"):
                    for need in needs:
                        base = (need,) if need else ()
                        for extra in ["", *row.allow.split()]:
                            if extra and extra in (*row.when.split(), need):
                                continue
                            more = (*base, *((extra,) if extra else ()))
                            if opcode in ("set", "setp") and not _compares(type_ if opcode == "setp" else second, need):
                                continue
                            text = _form(opcode, row, operands, type_, second, more)
                            if text is not None:
                                yield text


def kernel(instruction: str) -> str:
    """A kernel that is this one instruction."""
    return f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .align 16 .b8 p[256], .param .u64 at)
{{
{DECLARATIONS}
ld.param.u64 %at, [at];
{instruction};
ret;
}}
"""
