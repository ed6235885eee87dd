"""Which function lowers which opcode."""

from __future__ import annotations

from collections.abc import Callable

from ptxtrain.engine.ptxcpu.lower.affine import lower_affine
from ptxtrain.engine.ptxcpu.lower.async_copy import lower_cp
from ptxtrain.engine.ptxcpu.lower.atomics import lower_atom
from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.convert import lower_cvt
from ptxtrain.engine.ptxcpu.lower.floating import FLOATING
from ptxtrain.engine.ptxcpu.lower.integer import INTEGER
from ptxtrain.engine.ptxcpu.lower.memory import lower_ld, lower_st
from ptxtrain.engine.ptxcpu.lower.mma import MATRIX
from ptxtrain.engine.ptxcpu.lower.moves import lower_cvta, lower_isspacep, lower_mov
from ptxtrain.engine.ptxcpu.lower.steps import note_step
from ptxtrain.engine.ptxcpu.lower.warp import (
    lower_activemask,
    lower_barrier,
    lower_elect,
    lower_fence,
    lower_match,
    lower_nothing,
    lower_policy,
    lower_redux,
    lower_shfl,
    lower_vote,
)
from ptxtrain.engine.ptxcpu.lower.wmma import lower_wmma
from ptxtrain.engine.ptxcpu.tree import Instruction

NOTHING = (
    "prefetch prefetchu discard applypriority nanosleep pmevent setmaxnreg griddepcontrol".split()
)  # instructions that need not do anything

LOWERINGS: dict[str, Callable[[Context, Instruction], None]] = {
    **INTEGER,
    **FLOATING,
    **MATRIX,
    "cp": lower_cp,
    "wmma": lower_wmma,
    "cvt": lower_cvt,
    "ld": lower_ld,
    "ldu": lower_ld,
    "st": lower_st,
    "mov": lower_mov,
    "cvta": lower_cvta,
    "isspacep": lower_isspacep,
    "atom": lower_atom,
    "red": lower_atom,
    "shfl": lower_shfl,
    "vote": lower_vote,
    "activemask": lower_activemask,
    "match": lower_match,
    "redux": lower_redux,
    "bar": lower_barrier,
    "barrier": lower_barrier,
    "membar": lower_fence,
    "fence": lower_fence,
    "elect": lower_elect,
    "createpolicy": lower_policy,
    **dict.fromkeys(NOTHING, lower_nothing),
}


def lower_opcode(ctx: Context, ins: Instruction) -> None:
    """Lower an instruction, its guard aside.

    Raises:
        PtxError: the instruction, or this form of it, is not known.
    """
    lowering = LOWERINGS.get(ins.opcode)
    if lowering is None:
        raise ctx.refuse(ins, f"the instruction {ins.opcode} is not known")
    ctx.opcode = ins.opcode
    try:
        if ctx.checks is not None and ctx.checks.before(ins):
            return
        if not lower_affine(ctx, ins):
            lowering(ctx, ins)
        note_step(ctx, ins)
    except (AssertionError, KeyError, ValueError, IndexError, StopIteration, TypeError) as error:
        raise ctx.refuse(ins, f"this form of {ins.opcode} is not known ({error})") from error
