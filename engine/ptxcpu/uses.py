"""Which registers an instruction writes and which it reads."""

from __future__ import annotations

from collections.abc import Iterator

from ptxtrain.engine.ptxcpu.tree import Address, Call, Instruction, Negated, Operand, Pair, Reg, Vector

_NO_RESULT = frozenset(
    "st red bar barrier bra brx ret exit trap membar fence prefetch prefetchu cp pmevent brkpt nanosleep discard "
    "applypriority stmatrix setmaxnreg griddepcontrol mbarrier call".split()
)


_MAY_CARRY = frozenset(("add", "addc", "sub", "subc", "mad", "madc"))

CARRY = Reg("the carry flag", "pred")  # of each thread, beside its registers


def reads_carry(ins: Instruction) -> bool:
    """Whether an instruction adds the carry flag."""
    return ins.opcode in ("addc", "subc", "madc")


def results(ins: Instruction) -> list[Reg]:
    """The registers that an instruction writes."""
    if ins.opcode in _MAY_CARRY and ins.has("cc"):
        target = ins.operands[0]
        return [target, CARRY] if isinstance(target, Reg) else [CARRY]
    if ins.opcode == "call":
        call = next(o for o in ins.operands if isinstance(o, Call))
        return [r for r in call.returns if isinstance(r, Reg)]
    if not ins.operands or (ins.opcode in _NO_RESULT and not (ins.opcode in ("bar", "barrier") and ins.has("red"))):
        return []
    first = ins.operands[0]
    if isinstance(first, Pair):
        return [r for r in (first.first, first.second) if isinstance(r, Reg)]
    if isinstance(first, Vector):
        return [r for r in first.elements if isinstance(r, Reg)]
    return [first] if isinstance(first, Reg) else []


def sources(ins: Instruction) -> Iterator[Reg]:
    """The registers that an instruction reads, its guard among them."""
    if ins.guard is not None:
        yield ins.guard.reg
    if reads_carry(ins):
        yield CARRY
    skip = (
        1 if results(ins) or (ins.operands and isinstance(ins.operands[0], Vector | Pair) and ins.opcode != "st") else 0
    )
    for operand in ins.operands[skip:]:
        yield from registers(operand)


def registers(operand: Operand) -> Iterator[Reg]:
    """The registers in one operand."""
    match operand:
        case Reg():
            yield operand
        case Negated(reg):
            yield reg
        case Address(base, _):
            if isinstance(base, Reg):
                yield base
        case Vector(elements):
            yield from (e for e in elements if isinstance(e, Reg))
        case Call(_, callee, arguments):
            yield from (a for a in (callee, *arguments) if isinstance(a, Reg))
        case _:
            return
