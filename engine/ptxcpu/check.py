"""What each instruction takes: a table from opcodes to operand roles. An opcode without a row is the back end's to refuse."""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.tree import Instruction

# Opcodes that take no operands at all.
_BARE = frozenset(("ret", "exit", "trap", "brkpt"))


def check(instruction: Instruction) -> tuple[int, str] | None:
    """The index of a wrong operand (-1: the instruction itself) and what is wrong with it, or None."""
    if instruction.opcode in _BARE and instruction.operands:
        return 0, f"{instruction.opcode} takes no operands"
    return None
