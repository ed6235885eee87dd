"""Live-range splitting: a register that is used for several unrelated values becomes one register for each.

Hand-written PTX uses `%at` here for a uniform number and there for one that differs between lanes. Definitions that reach a
common use belong together (a web); each web gets a name of its own, so that the analyses judge values, not names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ptxtrain.engine.ptxcpu.cfg import Block
from ptxtrain.engine.ptxcpu.tree import Address, Call, Guard, Instruction, Negated, Operand, Pair, Reg, Vector
from ptxtrain.engine.ptxcpu.uses import results, sources

Rename = Callable[[Reg], Reg]


def split_webs(blocks: Sequence[Block]) -> None:
    """Rename registers in `blocks`, in place."""
    definitions: list[str] = []  # the register of each definition
    of_register: dict[str, int] = {}  # all definitions of a register, as a bit set
    first: dict[int, int] = {}  # id of an instruction -> its first definition
    for block in blocks:
        for ins in _instructions(block):
            written = results(ins)
            if written:
                first[id(ins)] = len(definitions)
            for reg in written:
                of_register[reg.name] = of_register.get(reg.name, 0) | 1 << len(definitions)
                definitions.append(reg.name)
    if all(bits & (bits - 1) == 0 for bits in of_register.values()):
        return
    reaching = _reaching(blocks, of_register, first)
    webs = _Webs(len(definitions))
    for block, at_start in zip(blocks, reaching, strict=True):
        current = at_start
        for ins in _instructions(block):
            for reg in sources(ins):
                webs.join(current & of_register.get(reg.name, 0))
            if ins.opcode == "mma":
                # Sums that grow in place stay in one place: they lie in memory, and two copies would not fit the cache.
                read = {reg.name for reg in sources(ins)}
                for i, reg in enumerate(results(ins)):
                    if reg.name in read:
                        webs.join(current & of_register[reg.name] | 1 << (first[id(ins)] + i))
            current = _after(ins, current, of_register, first)
    names = webs.names(definitions)
    for block, at_start in zip(blocks, reaching, strict=True):
        current = at_start
        body = []
        for ins in _instructions(block):

            def use(reg: Reg, current: int = current) -> Reg:
                here = current & of_register.get(reg.name, 0)
                return Reg(names[(here & -here).bit_length() - 1], reg.type) if here else reg

            body.append(_renamed(ins, use, _results_renamer(ins, first, names)))
            current = _after(ins, current, of_register, first)
        if block.branch is not None:
            block.branch = body.pop()
            block.guard = block.branch.guard
        block.body = body


def _instructions(block: Block) -> list[Instruction]:
    return [*block.body, block.branch] if block.branch is not None else block.body


def _after(ins: Instruction, current: int, of_register: dict[str, int], first: dict[int, int]) -> int:
    """The definitions that reach the place behind `ins`; a guarded one leaves the older ones standing."""
    for i, reg in enumerate(results(ins)):
        if ins.guard is None:
            current &= ~of_register[reg.name]
        current |= 1 << (first[id(ins)] + i)
    return current


def _reaching(blocks: Sequence[Block], of_register: dict[str, int], first: dict[int, int]) -> list[int]:
    """The definitions that reach the start of each block, as bit sets."""
    made, lost = [], []
    for block in blocks:
        generated = killed = 0
        for ins in _instructions(block):
            generated = _after(ins, generated, of_register, first)
            if ins.guard is None:
                for reg in results(ins):
                    killed |= of_register[reg.name]
        made.append(generated)
        lost.append(killed)
    reaching = [0] * len(blocks)
    waiting = list(range(len(blocks)))
    while waiting:
        index = waiting.pop(0)
        out = (reaching[index] & ~lost[index]) | made[index]
        for successor in blocks[index].inner_successors:
            if out & ~reaching[successor]:
                reaching[successor] |= out
                if successor not in waiting:
                    waiting.append(successor)
    return reaching


class _Webs:
    """Union-find over definitions."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def _root(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def join(self, members: int) -> None:
        """Put all definitions of a bit set into one web."""
        if not members & (members - 1):
            return
        root = self._root((members & -members).bit_length() - 1)
        while members:
            low = members & -members
            self._parent[self._root(low.bit_length() - 1)] = root
            members ^= low

    def names(self, definitions: Sequence[str]) -> list[str]:
        """A name for each definition: the register's own for its first web, numbered ones for the others."""
        counts: dict[str, int] = {}
        by_root: dict[int, str] = {}
        found = []
        for item, register in enumerate(definitions):
            root = self._root(item)
            if root not in by_root:
                number = counts.get(register, 0)
                counts[register] = number + 1
                by_root[root] = f"{register}#{number}" if number else register
            found.append(by_root[root])
        return found


def _results_renamer(ins: Instruction, first: dict[int, int], names: list[str]) -> Rename:
    remaining = {reg.name: first[id(ins)] + i for i, reg in enumerate(results(ins))}

    def rename(reg: Reg) -> Reg:
        return Reg(names[remaining[reg.name]], reg.type)

    return rename


def _renamed(ins: Instruction, use: Rename, write: Rename) -> Instruction:
    guard = Guard(use(ins.guard.reg), ins.guard.negated) if ins.guard is not None else None
    operands = list(ins.operands)
    written = bool(results(ins))
    for i, operand in enumerate(operands):
        if isinstance(operand, Call):
            operands[i] = Call(
                tuple(write(r) if isinstance(r, Reg) else r for r in operand.returns),
                use(operand.callee) if isinstance(operand.callee, Reg) else operand.callee,
                tuple(use(a) if isinstance(a, Reg) else a for a in operand.arguments),
            )
        else:
            operands[i] = _map(operand, write if written and i == 0 else use)
    return replace(ins, guard=guard, operands=tuple(operands))


def _map(operand: Operand, rename: Rename) -> Operand:
    match operand:
        case Reg():
            return rename(operand)
        case Negated(reg):
            return Negated(rename(reg))
        case Address(base, offset) if isinstance(base, Reg):
            return Address(rename(base), offset)
        case Vector(elements):
            return Vector(tuple(rename(e) if isinstance(e, Reg) else e for e in elements))
        case Pair(a, b):
            return Pair(rename(a) if isinstance(a, Reg) else a, rename(b) if isinstance(b, Reg) else b)
        case _:
            return operand
