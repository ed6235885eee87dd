"""Loops that wait for other threads: whose course depends on memory that others write while the loop runs.

A warp in such a loop must let other warps run, and lanes that wait must let others of their own warp run: the lowering
suspends the warp at the loop's backward edges. What counts as such memory are the results of atomics, loads that are
volatile or ordered, and any load in a loop with a fence or a sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.cfg import Block
from ptxtrain.engine.ptxcpu.tree import Instruction, Label
from ptxtrain.engine.ptxcpu.uses import results, sources

_ORDERED = ("volatile", "relaxed", "acquire", "mmio")
_PAUSES = frozenset(("fence", "membar", "nanosleep"))
SYNCHRONISING = frozenset(("bar", "barrier", "shfl", "vote", "match", "redux", "elect"))


@dataclass(frozen=True, slots=True)
class Spin:
    """A waiting loop: the backward edge from block `source` to `target`, and the blocks of the loop."""

    source: int
    target: int
    blocks: frozenset[int]


def may_wait(body: Iterable[Instruction | Label]) -> bool:
    """Whether a function has anything that a loop could wait for."""
    instructions = [item for item in body if isinstance(item, Instruction)]
    pauses = any(ins.opcode in _PAUSES for ins in instructions)
    return any(_watches(ins, pauses) for ins in instructions)


def _watches(ins: Instruction, pauses: bool) -> bool:
    """Whether an instruction reads what other threads may write meanwhile."""
    if ins.opcode == "atom":
        return True
    return ins.opcode == "ld" and (ins.has(*_ORDERED) or (pauses and not ins.has("param", "const", "local", "nc")))


def find_spins(blocks: Sequence[Block]) -> tuple[Spin, ...]:
    """The waiting loops of a function, without those that have a barrier of the block on their way."""
    before: list[list[int]] = [[] for _ in blocks]
    for block in blocks:
        for successor in block.inner_successors:
            before[successor].append(block.index)
    found = []
    for block in blocks:
        for target in block.inner_successors:
            if target > block.index:
                continue
            loop = _natural_loop(before, block.index, target)
            if _waits([blocks[b] for b in sorted(loop)]):
                found.append(Spin(block.index, target, frozenset(loop)))
    return tuple(found)


def _natural_loop(before: Sequence[Sequence[int]], source: int, target: int) -> set[int]:
    loop, stack = {target, source}, [source] if source != target else []
    while stack:
        for predecessor in before[stack.pop()]:
            if predecessor not in loop:
                loop.add(predecessor)
                stack.append(predecessor)
    return loop


def _waits(loop: Sequence[Block]) -> bool:
    """Whether some branch or guard of the loop depends on what others write."""
    instructions = [ins for block in loop for ins in (*block.body, *((block.branch,) if block.branch else ()))]
    if any(ins.opcode in ("bar", "barrier") and not ins.has("warp") for ins in instructions):
        return False
    pauses = any(ins.opcode in _PAUSES for ins in instructions)
    watched = {reg.name for ins in instructions if _watches(ins, pauses) for reg in results(ins)}
    if not watched:
        return False
    grows = True
    while grows:
        grows = False
        for ins in instructions:
            written = {reg.name for reg in results(ins)}
            if not written <= watched and any(reg.name in watched for reg in sources(ins)):
                watched |= written
                grows = True
    return any(
        reg.name in watched
        for ins in instructions
        if ins.guard is not None or ins.opcode == "brx"
        for reg in (*((ins.guard.reg,) if ins.guard else ()), *(sources(ins) if ins.opcode == "brx" else ()))
    )
