"""Basic blocks of a function, and the regions that lanes of a warp may run through on different paths.

A branch that may differ between lanes starts a *region*: the blocks that can be reached from it before the paths join
again (at the branch's immediate post-dominator). The lowering runs a region's blocks one after another under masks;
outside regions a warp runs as one thread does. A lane that returns early only leaves the warp's live mask, so it makes
no region: `if (i >= n) return;` costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ptxtrain.engine.ptxcpu.tree import Function, Guard, Instruction, Label, Symbol

EXIT = -1  # the block index that stands for leaving the function

BRANCHES = frozenset({"bra", "ret", "exit", "brx", "trap"})


@dataclass(slots=True)
class Block:
    """Instructions without their last branch. `guard` is the branch's; `targets` are where it goes when taken.

    `fall` is where control goes when the branch is not taken (None when it has no guard). `index` of brx.idx is kept in
    `branch`. Either may be EXIT.
    """

    index: int
    body: list[Instruction] = field(default_factory=list)
    branch: Instruction | None = None
    guard: Guard | None = None
    targets: tuple[int, ...] = ()
    fall: int | None = None
    labels: tuple[str, ...] = ()

    @property
    def successors(self) -> tuple[int, ...]:
        """All places that control can go, EXIT among them, each once."""
        found = dict.fromkeys(self.targets)
        if self.fall is not None:
            found.setdefault(self.fall)
        return tuple(found)

    @property
    def inner_successors(self) -> tuple[int, ...]:
        """The successors without EXIT."""
        return tuple(s for s in self.successors if s != EXIT)


def build_blocks(function: Function, *, alone: frozenset[str] = frozenset()) -> list[Block]:
    """The reachable blocks in the order of the text; block 0 is the entry. Instructions `alone` start blocks."""
    starts: dict[str, int] = {}
    raw: list[list[Instruction]] = [[]]
    for item in function.body:
        if isinstance(item, Label):
            if raw[-1]:
                raw.append([])
            starts[item.name] = len(raw) - 1
        else:
            if item.opcode in alone and raw[-1]:
                raw.append([])
            raw[-1].append(item)
            if item.opcode in BRANCHES:
                raw.append([])
    # Falling off the end returns, as ptxas has it.
    names: dict[int, list[str]] = {}
    for name, start in starts.items():
        names.setdefault(start, []).append(name)
    blocks = [Block(i, labels=tuple(names.get(i, ()))) for i in range(len(raw))]
    for block, instructions in zip(blocks, raw, strict=True):
        following = block.index + 1 if block.index + 1 < len(raw) else EXIT
        last = instructions[-1] if instructions else None
        if last is None or last.opcode not in BRANCHES:
            block.body, block.targets = instructions, (following,)
            continue
        block.body, block.branch, block.guard = instructions[:-1], last, last.guard
        block.fall = following if last.guard else None
        if last.opcode == "bra":
            (target,) = last.operands
            assert isinstance(target, Symbol)
            block.targets = (starts[target.name],)
        elif last.opcode == "brx":
            table = last.operands[1]
            assert isinstance(table, Symbol)
            block.targets = tuple(dict.fromkeys(starts[name] for name in function.branch_targets[table.name]))
        else:
            block.targets = (EXIT,)
    _shortcut_returns(blocks)
    return _drop_unreachable(blocks)


def _shortcut_returns(blocks: list[Block]) -> None:
    """Let branches to a block that only returns go to EXIT, so that they count as early returns."""
    only_return = {b.index for b in blocks if not b.body and b.targets == (EXIT,) and b.guard is None and not _traps(b)}
    # An empty block that falls to such a block is one too.
    changed = True
    while changed:
        changed = False
        for b in blocks:
            if b.index not in only_return and not b.body and b.branch is None and set(b.targets) <= only_return:
                only_return.add(b.index)
                changed = True
    for b in blocks:
        if b.branch is not None and b.branch.opcode == "brx":
            continue
        b.targets = tuple(EXIT if t in only_return else t for t in b.targets)
        if b.fall is not None and b.fall in only_return:
            b.fall = EXIT


def _traps(block: Block) -> bool:
    return block.branch is not None and block.branch.opcode == "trap"


def _drop_unreachable(blocks: list[Block]) -> list[Block]:
    seen, stack = {0}, [0]
    while stack:
        for s in blocks[stack.pop()].inner_successors:
            if s not in seen:
                seen.add(s)
                stack.append(s)
    order = sorted(seen)
    renamed = {old: new for new, old in enumerate(order)} | {EXIT: EXIT}
    kept = [blocks[i] for i in order]
    for b in kept:
        b.index = renamed[b.index]
        b.targets = tuple(renamed[t] for t in b.targets)
        b.fall = None if b.fall is None else renamed[b.fall]
    return kept


def post_dominators(blocks: Sequence[Block]) -> list[int | None]:
    """The immediate post-dominator of each block, None where paths join only at the function's end.

    Early returns are dead ends and do not count as paths: the block that most blocks lead to, of those that a lane may
    leave the function from, is taken as the function's end.
    """
    ends = [b.index for b in blocks if EXIT in b.successors]
    if not ends:
        return [None] * len(blocks)
    before: list[list[int]] = [[] for _ in blocks]
    for b in blocks:
        for s in b.inner_successors:
            before[s].append(b.index)
    main_end = max(ends, key=lambda end: (len(_closure(before, end)), end))
    everything = (1 << len(blocks)) - 1
    sets = [everything] * len(blocks)
    sets[main_end] = 1 << main_end
    changed = True
    while changed:
        changed = False
        for b in reversed(blocks):
            if b.index == main_end or not b.inner_successors:
                continue
            meet = everything
            for s in b.inner_successors:
                meet &= sets[s]
            meet |= 1 << b.index
            if meet != sets[b.index]:
                sets[b.index], changed = meet, True
    result: list[int | None] = []
    for b in blocks:
        rest = sets[b.index] & ~(1 << b.index)
        if sets[b.index] == everything or not rest:
            result.append(None)
            continue
        result.append(next((i for i in _bits(rest) if sets[i] == rest), None))
    return result


def _closure(edges: Sequence[Sequence[int]], start: int) -> set[int]:
    seen, stack = {start}, [start]
    while stack:
        for s in edges[stack.pop()]:
            if s not in seen:
                seen.add(s)
                stack.append(s)
    return seen


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(slots=True)
class Region:
    """Blocks that run under masks, in the order in which they are laid out; `exit` is where lanes join (or None).

    `loops` are the cycles among them, outermost first: (position of the first block, position of the last, the blocks
    that a lane may wait at to go round again).
    """

    blocks: frozenset[int]
    exit: int | None
    order: list[int] = field(default_factory=list)
    loops: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)


def find_regions(blocks: Sequence[Block], divergent: Iterable[int], ipdom: Sequence[int | None]) -> list[Region]:
    """The regions that the branches at the ends of the `divergent` blocks make; overlapping ones are merged."""
    regions: list[tuple[set[int], int | None]] = []
    for b in sorted(divergent):
        regions.append((_reach(blocks, blocks[b].inner_successors, ipdom[b]), ipdom[b]))
    merged = True
    while merged:
        merged = False
        for i in range(len(regions)):
            for j in range(i + 1, len(regions)):
                (left, left_exit), (right, right_exit) = regions[i], regions[j]
                if not left & right:
                    continue
                regions[i] = _merge(blocks, left | right, (left_exit, right_exit), ipdom)
                del regions[j]
                merged = True
                break
            if merged:
                break
    found = []
    for members, join in regions:
        if members:
            region = Region(frozenset(members), join)
            _order(blocks, region)
            found.append(region)
    return found


def _reach(blocks: Sequence[Block], start: Iterable[int], stop: int | None) -> set[int]:
    seen = {s for s in start if s != stop}
    stack = list(seen)
    while stack:
        for s in blocks[stack.pop()].inner_successors:
            if s != stop and s not in seen:
                seen.add(s)
                stack.append(s)
    return seen


def _merge(
    blocks: Sequence[Block], members: set[int], exits: tuple[int | None, int | None], ipdom: Sequence[int | None]
) -> tuple[set[int], int | None]:
    """The smallest region that holds `members` and has one exit: one of their exits, or a place where those join."""
    candidates: dict[int | None, None] = {}
    for start in exits:
        at = start
        while at is not None and at not in candidates:
            candidates[at] = None
            at = ipdom[at]
    candidates[None] = None
    starts = members | {e for e in exits if e is not None}
    found = [(_reach(blocks, starts, join), join) for join in candidates if join is None or join not in members]
    return min(found, key=lambda region: len(region[0]))


def _order(blocks: Sequence[Block], region: Region) -> None:
    """Lay the region out so that every edge goes forward, but for those that go round a loop; loops are contiguous."""

    def place(members: set[int], edges_out: dict[int, list[int]]) -> None:
        for component in reversed(_components(members, edges_out)):
            first = len(region.order)
            if len(component) == 1 and component[0] not in edges_out[component[0]]:
                region.order.append(component[0])
                continue
            inside = set(component)
            entered = sorted(
                n for n in component if any(n in blocks[b.index].successors for b in blocks if b.index not in inside)
            )
            header = entered[0] if entered else min(component)
            cut = {n: [s for s in edges_out[n] if s in inside and s != header] for n in component}
            slot = len(region.loops)
            region.loops.append((0, 0, ()))
            place(inside, cut)
            # A cycle with one entrance can only wait at its header; one with several at any block that is entered.
            waiting = (header,) if len(entered) <= 1 else tuple(entered)
            targets = {s for n in component for s in edges_out[n] if s in inside}
            backward = tuple(
                n for n in targets if any(n in edges_out[m] and _later(region.order, m, n) for m in component)
            )
            region.loops[slot] = (first, len(region.order) - 1, tuple(dict.fromkeys(waiting + backward)))

    members = set(region.blocks)
    place(members, {n: [s for s in blocks[n].inner_successors if s in members] for n in members})


def _later(order: list[int], a: int, b: int) -> bool:
    return order.index(a) >= order.index(b)


def _components(nodes: set[int], edges: dict[int, list[int]]) -> list[list[int]]:
    """Tarjan's strongly connected components, each after all that it leads to."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    result: list[list[int]] = []
    for root in sorted(nodes):
        if root in index:
            continue
        work = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, successors = work[-1]
            for s in successors:
                if s not in index:
                    index[s] = low[s] = len(index)
                    stack.append(s)
                    on_stack.add(s)
                    work.append((s, iter(edges[s])))
                    break
                if s in on_stack:
                    low[node] = min(low[node], index[s])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    result.append(sorted(component))
    return result
