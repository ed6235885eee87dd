"""Which fragments of matrix operands are still read, so that what nobody reads is not written."""

from __future__ import annotations

from collections.abc import Sequence

from ptxtrain.engine.ptxcpu.cfg import Block
from ptxtrain.engine.ptxcpu.lower.fragments import Placement
from ptxtrain.engine.ptxcpu.tree import Instruction
from ptxtrain.engine.ptxcpu.uses import results, sources


def reads_of_fragments(blocks: Sequence[Block], places: dict[str, Placement]) -> list[list[frozenset[int]]]:
    """For each place in each block the fragments with registers that are read from there on before they are written."""
    bits = {name: 1 << i for i, name in enumerate(places)}

    def step(ins: Instruction, after: int) -> int:
        if ins.guard is None:
            for reg in results(ins):
                after &= ~bits.get(reg.name, 0)
        for reg in sources(ins):
            after |= bits.get(reg.name, 0)
        return after

    at_start = [0] * len(blocks)
    at_end = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            mask = 0
            for s in block.inner_successors:
                mask |= at_start[s]
            at_end[block.index] = mask
            for ins in reversed(block.body):
                mask = step(ins, mask)
            if mask != at_start[block.index]:
                at_start[block.index], changed = mask, True
    fragments = [place.fragment for place in places.values()]
    found = []
    sets: dict[int, frozenset[int]] = {}
    for block in blocks:
        masks = [at_end[block.index]]
        for ins in reversed(block.body):
            masks.append(step(ins, masks[-1]))
        for mask in masks:
            if mask not in sets:
                sets[mask] = frozenset(f for i, f in enumerate(fragments) if mask >> i & 1)
        found.append([sets[mask] for mask in reversed(masks)])
    return found
