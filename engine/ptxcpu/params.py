"""`.param` variables of calls, as registers where that is possible and as local memory elsewhere.

The call convention stores arguments into `.param` variables and loads them in the callee. Once both are in one body, a
variable that is only loaded and stored by its name, always in the same pieces, is a handful of registers.
"""

from __future__ import annotations

from dataclasses import replace

from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Address,
    Function,
    Instruction,
    Label,
    Operand,
    Reg,
    Sink,
    Symbol,
    Variable,
    Vector,
)

_Piece = tuple[int, int]  # offset in bytes, bits


def place_params(function: Function) -> Function:
    """`function`, whose calls are inlined, without `.param` variables of its own; the entry's parameters stay."""
    own = {name: v for name, v in function.variables.items() if v.space == "param"}
    if not own:
        return function
    pieces: dict[str, set[_Piece]] = {name: set() for name in own}
    in_memory: set[str] = set()
    for item in function.body:
        if isinstance(item, Instruction):
            _look(item, pieces, in_memory)
    in_memory |= {name for name, found in pieces.items() if _overlap(found)}
    variables = {n: replace(v, space="local") if n in in_memory else v for n, v in function.variables.items()}
    variables = {n: v for n, v in variables.items() if v.space != "param"}
    registers = dict(function.registers)
    body: list[Instruction | Label] = []
    for item in function.body:
        name = None if isinstance(item, Label) else _accessed(item)
        if isinstance(item, Label) or name is None or name not in own:
            body.append(item)
        elif name in in_memory:
            modifiers = tuple("local" if m.startswith("param") else m for m in item.modifiers)
            body.append(replace(item, modifiers=modifiers))
        else:
            body += _moves(item, own[name], registers)
    return replace(function, body=body, variables=variables, registers=registers)


def _accessed(ins: Instruction) -> str | None:
    """The variable that a load or store names in its address."""
    if ins.opcode not in ("ld", "st"):
        return None
    address = ins.operands[1 if ins.opcode == "ld" else 0]
    return address.base.name if isinstance(address, Address) and isinstance(address.base, Symbol) else None


def _data(ins: Instruction) -> tuple[Operand, ...]:
    value = ins.operands[0 if ins.opcode == "ld" else 1]
    return value.elements if isinstance(value, Vector) else (value,)


def _look(ins: Instruction, pieces: dict[str, set[_Piece]], in_memory: set[str]) -> None:
    name = _accessed(ins)
    if name in pieces:
        address = ins.operands[1 if ins.opcode == "ld" else 0]
        assert isinstance(address, Address)
        bits = TYPE_BITS[ins.types[-1]]
        if bits > 64:
            in_memory.add(name)
        pieces[name] |= {(address.offset + i * bits // 8, bits) for i in range(len(_data(ins)))}
        return
    for operand in ins.operands:
        if isinstance(operand, Symbol) and operand.name in pieces:
            in_memory.add(operand.name)  # its address is taken


def _overlap(pieces: set[_Piece]) -> bool:
    end = 0
    for offset, bits in sorted(pieces):
        if offset < end:
            return True
        end = offset + bits // 8
    return False


def _moves(ins: Instruction, variable: Variable, registers: dict[str, Reg]) -> list[Instruction]:
    """A load or store of pieces as moves between registers."""
    address = ins.operands[1 if ins.opcode == "ld" else 0]
    assert isinstance(address, Address)
    type_ = ins.types[-1]
    bits = TYPE_BITS[type_]
    made = []
    for i, value in enumerate(_data(ins)):
        if isinstance(value, Sink):
            continue
        name = f"{variable.name}+{address.offset + i * bits // 8}"
        piece = registers.setdefault(name, Reg(name, f"b{bits}"))
        opcode = "mov"
        modifiers: tuple[str, ...] = (f"b{bits}",)
        operands: tuple[Operand, ...] = (piece, value)
        if ins.opcode == "ld":
            assert isinstance(value, Reg)
            operands = value, piece
            if (wide := TYPE_BITS[value.type]) > bits:
                sign = "s" if type_[0] == "s" else "u"
                opcode, modifiers = "cvt", (f"{sign}{wide}", f"{sign}{bits}")
        made.append(replace(ins, opcode=opcode, modifiers=modifiers, operands=operands))
    return made
