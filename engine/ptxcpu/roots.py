"""Addresses that only ever move by what all lanes share.

A kernel computes its lanes' addresses once and then steps them: `from = from + stride`, `at = lane + stage`. Such a register is
kept a second time, as its *root*, the vector that was computed once, and a scalar, how far all lanes have moved since. Memory
instructions that go by 32 pointers then read them from an array that is written once, and whether lanes lie side by side
is found out once and not at each access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ptxtrain.engine.ptxcpu.cfg import Block
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Address, Imm, Instruction, Operand, Reg
from ptxtrain.engine.ptxcpu.uniformity import Analysis
from ptxtrain.engine.ptxcpu.uses import results

_STEPS = frozenset(("mov", "add", "sub", "mad"))
_ADDRESSED = frozenset(("cp", "ldmatrix", "ld", "st"))


@dataclass(frozen=True, slots=True)
class Root:
    """The instruction that computes a root, and where it stands."""

    instruction: Instruction
    block: int
    position: int

    @property
    def register(self) -> Reg:
        target = self.instruction.operands[0]
        assert isinstance(target, Reg)
        return target


def find_roots(blocks: Sequence[Block], analysis: Analysis) -> dict[str, Root]:
    """Registers that are addresses with a root -> their root."""
    definitions: dict[str, list[Root]] = {}
    addresses: dict[str, list[tuple[int, int]]] = {}
    for block in blocks:
        for position, ins in enumerate(block.body):
            for reg in results(ins):
                definitions.setdefault(reg.name, []).append(Root(ins, block.index, position))
            if ins.opcode in _ADDRESSED:
                for operand in ins.operands:
                    if isinstance(operand, Address) and isinstance(operand.base, Reg):
                        addresses.setdefault(operand.base.name, []).append((block.index, position))
    if not addresses:
        return {}
    once = _run_once(blocks)
    dominated = _dominators(blocks)
    without: set[str] = set()
    while True:
        roots = _solve(definitions, without, analysis)
        spoilt = {name for name, root in roots.items() if root is None or not _may_be_root(root, once, analysis)}
        for name, places in addresses.items():
            root = roots.get(name)
            if root is not None and not all(_comes_before(root, place, dominated) for place in places):
                spoilt.add(name)
        if not spoilt:
            break
        without |= spoilt
    used = {id(root.instruction) for name in addresses if (root := roots.get(name)) is not None}
    return {name: root for name, root in roots.items() if root is not None and id(root.instruction) in used}


def step_of(ins: Instruction, analysis: Analysis) -> tuple[Reg, list[Operand]] | None:
    """The register that an instruction moves by something uniform, and what that is: nothing, one summand or two factors.

    Of `sub` it is what is taken away.
    """
    if ins.opcode not in _STEPS or not ins.operands or not isinstance(ins.operands[0], Reg) or len(ins.types) != 1:
        return None
    if (
        ins.types[0][0] not in "usb"
        or TYPE_BITS[ins.types[0]] not in (32, 64)
        or ins.has("cc", "sat", "hi", "v2", "v4")
    ):
        return None
    operands = ins.operands[1:]
    moving = [o for o in operands if not _is_uniform(o, analysis)]
    if len(moving) != 1 or not isinstance(moving[0], Reg):
        return None
    index = operands.index(moving[0])
    allowed = {"mov": (0,), "add": (0, 1), "sub": (0,), "mad": (2,)}[ins.opcode]
    width = TYPE_BITS[ins.types[0]] * (2 if ins.has("wide") else 1)
    if index not in allowed or TYPE_BITS[moving[0].type] != width or TYPE_BITS[ins.operands[0].type] != width:
        return None
    return moving[0], [o for i, o in enumerate(operands) if i != index]


def _is_uniform(operand: Operand, analysis: Analysis) -> bool:
    return isinstance(operand, Reg | Imm) and analysis.of(operand).uniform


def _solve(definitions: dict[str, list[Root]], without: set[str], analysis: Analysis) -> dict[str, Root | None]:
    """The root of each varying register, None where its definitions have different ones."""
    found: dict[str, Root | None] = {}
    names = [n for n, places in definitions.items() if n not in without and _may_have_root(places, analysis)]
    changed = True
    while changed:
        changed = False
        for name in names:
            if name in found and found[name] is None:
                continue
            roots: dict[int, Root] = {}
            for place in definitions[name]:
                step = step_of(place.instruction, analysis)
                root: Root | None = place
                if step is not None and step[0].name in definitions and step[0].name not in without:
                    root = found.get(step[0].name, place if step[0].name not in names else None)
                if root is not None:
                    roots[id(root.instruction)] = root
            new = next(iter(roots.values())) if len(roots) == 1 else None
            if roots and (name not in found or found[name] is not new):
                if new is not None and found.get(name) is not None and found[name] is not new:
                    new = None
                found[name], changed = new, True
    return found


def _may_have_root(places: list[Root], analysis: Analysis) -> bool:
    for place in places:
        ins = place.instruction
        target = ins.operands[0]
        if not isinstance(target, Reg) or TYPE_BITS[target.type] not in (32, 64) or target.type[0] not in "usb":
            return False
        if analysis.of(target).stride is not None or not analysis.guard_is_uniform(ins.guard):
            return False
        if place.block in analysis.region_of:
            return False
    return True


def _may_be_root(root: Root, once: set[int], analysis: Analysis) -> bool:
    return root.block in once and root.instruction.guard is None


def _comes_before(root: Root, place: tuple[int, int], dominators: list[int]) -> bool:
    if root.block == place[0]:
        return root.position < place[1]
    return bool(dominators[place[0]] >> root.block & 1)


def _run_once(blocks: Sequence[Block]) -> set[int]:
    """Blocks that no path passes twice."""
    reach = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            mask = 0
            for s in block.inner_successors:
                mask |= 1 << s | reach[s]
            if mask != reach[block.index]:
                reach[block.index], changed = mask, True
    return {b.index for b in blocks if not reach[b.index] >> b.index & 1}


def _dominators(blocks: Sequence[Block]) -> list[int]:
    """For each block the mask of the blocks that every path to it passes, itself among them."""
    every = (1 << len(blocks)) - 1
    before: list[list[int]] = [[] for _ in blocks]
    for block in blocks:
        for s in block.inner_successors:
            before[s].append(block.index)
    found = [every] * len(blocks)
    found[0] = 1
    changed = True
    while changed:
        changed = False
        for block in blocks[1:]:
            mask = every
            for p in before[block.index]:
                mask &= found[p]
            mask |= 1 << block.index
            if mask != found[block.index]:
                found[block.index], changed = mask, True
    return found
