"""A slow, plain interpreter of PTX: one thread at a time, registers are Python integers. The compiler is held against it.

Each thread runs alone until it ends or comes to an instruction that needs others (a barrier, a shuffle, a vote); when
all whom that instruction waits for are there, it is carried out for them together. It shares the parser with the
compiler and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle_scalar as scalar
from oracle_scalar import BITS, mask

from ptxtrain.engine.ptxcpu.tree import (
    Address,
    Function,
    Imm,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)

SHARED_WINDOW, LOCAL_WINDOW = 0x0100_0000, 0x0200_0000  # where generic addresses see them
_COLLECTIVE = ("bar", "barrier", "shfl", "vote", "redux", "match")
_STEPS = 2_000_000  # of one launch; beyond, the kernel is taken to hang

# Instructions that only compute their first operand from the others.
_PURE = (
    *("add", "sub", "mul", "mad", "mul24", "mad24", "fma", "div", "rem", "min", "max", "abs", "neg", "sad", "copysign"),
    *("and", "or", "xor", "not", "cnot", "shl", "shr", "shf", "popc", "clz", "brev", "bfind", "bfe", "bfi", "prmt"),
    *("dp4a", "dp2a", "bmsk", "szext", "fns"),
    *("lop3", "selp", "slct", "set", "testp", "cvt", "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh"),
)


class Unsupported(Exception):
    """An instruction that this interpreter leaves out."""


class Step:
    """What running an instruction needs of it, found once: its types, those of its sources and its result, its space."""

    def __init__(self, item: Instruction) -> None:
        self.item, self.opcode, self.operands = item, item.opcode, item.operands
        self.types, self.modifiers = item.types, item.modifiers
        self.type = self.types[0] if self.types else ""
        self.sources = operand_types(item) if self.types else ()
        self.result = result_type(item) if self.types else ""
        self.space = next((m.partition("::")[0] for m in item.modifiers if m.partition("::")[0] in _SPACES), "")


class Thread:
    """One thread: registers, place in the body, local memory."""

    def __init__(self, index: tuple[int, int, int], linear: int, local: int) -> None:
        self.index, self.linear = index, linear
        self.registers: dict[str, int] = {}
        self.pc = 0
        self.local = bytearray(local)
        self.waiting = False
        self.done = False


class Launch:
    """One launch of an entry."""

    def __init__(self, module: Module, entry: str, grid: Sequence[int], block: Sequence[int], shared: int) -> None:
        self.module, self.function = module, module.entry(entry)
        self.grid, self.block = tuple(grid), tuple(block)
        self.steps_of = [Step(item) if isinstance(item, Instruction) else None for item in self.function.body]
        self.labels = {item.name: i for i, item in enumerate(self.function.body) if isinstance(item, Label)}
        self.memory: list[tuple[int, memoryview]] = []  # global memory: where it starts, its bytes
        self.addresses: dict[str, tuple[str, int]] = {}  # symbol: its space and its address there
        self.sizes = {"shared": 16, "local": 16}
        self.steps = 0
        self._lay_out(self.function, shared)
        self.shared = bytearray()
        self.block_index = (0, 0, 0)
        self.threads: list[Thread] = []

    def _lay_out(self, function: Function, dynamic: int) -> None:
        variables = [*self.module.variables.values(), *function.variables.values()]
        for variable in sorted(variables, key=lambda v: v.extern):
            if variable.space in ("shared", "local"):
                start = -(-self.sizes[variable.space] // max(variable.align, 16)) * max(variable.align, 16)
                self.addresses[variable.name] = variable.space, start
                self.sizes[variable.space] = start + (dynamic if variable.extern else variable.nbytes)
            elif variable.space in ("global", "const"):
                data = bytearray(variable.init or bytes(variable.nbytes))
                self.addresses[variable.name] = variable.space, self.map(memoryview(data))
        for variable in variables:
            for offset, symbol in variable.relocations:
                address = self.addresses[symbol.name][1] + symbol.offset
                self.reach("global", self.addresses[variable.name][1] + offset, 8)[:] = struct.pack("<Q", address)
        offset = 0
        for variable in function.params:
            offset = -(-offset // variable.align) * variable.align
            self.addresses[variable.name] = "param", offset
            offset += variable.nbytes
        self.params = bytearray(offset)

    def map(self, data: memoryview) -> int:
        """Give bytes a place in global memory."""
        start = 0x7000_0000_0000 + 0x1_0000_0000 * len(self.memory)
        self.memory.append((start, data))
        return start

    def reach(self, space: str, address: int, nbytes: int, thread: Thread | None = None) -> memoryview:
        """The bytes at an address, which must all be in one object."""
        if space in ("", "generic"):
            if SHARED_WINDOW <= address < LOCAL_WINDOW:
                space, address = "shared", address - SHARED_WINDOW
            elif LOCAL_WINDOW <= address < 2 * LOCAL_WINDOW:
                space, address = "local", address - LOCAL_WINDOW
            else:
                space = "global"
        if address % nbytes:
            raise IndexError(f"{space} address {address:#x} is not a multiple of {nbytes}")
        if space in ("global", "const"):
            for start, data in self.memory:
                if start <= address and address + nbytes <= start + len(data):
                    return data[address - start : address - start + nbytes]
        else:
            held = {"shared": self.shared, "param": self.params, "local": thread.local if thread else bytearray()}[
                space
            ]
            if address >= 0 and address + nbytes <= len(held):
                return memoryview(held)[address : address + nbytes]
        raise IndexError(f"{nbytes} bytes at {address:#x} are outside .{space}")

    # Running

    def run(self) -> None:
        gx, gy, gz = self.grid
        for z in range(gz):
            for y in range(gy):
                for x in range(gx):
                    self.block_index = (x, y, z)
                    self._run_block()

    def _run_block(self) -> None:
        bx, by, bz = self.block
        self.shared = bytearray(self.sizes["shared"])
        places = [(x, y, z) for z in range(bz) for y in range(by) for x in range(bx)]
        self.threads = [Thread(place, i, self.sizes["local"]) for i, place in enumerate(places)]
        while not all(thread.done for thread in self.threads):
            for thread in self.threads:
                while not thread.done and not thread.waiting:
                    self._step(thread)
            self._meet()

    def _step(self, thread: Thread) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise TimeoutError("this kernel does not end")
        if thread.pc >= len(self.steps_of):
            thread.done = True
            return
        step = self.steps_of[thread.pc]
        if step is None:  # a label
            thread.pc += 1
            return
        guard = step.item.guard
        if guard is not None and bool(thread.registers.get(guard.reg.name, 0)) == guard.negated:
            thread.pc += 1
            return
        if step.opcode in _COLLECTIVE:
            thread.waiting = True
            return
        thread.pc += 1
        self._execute(thread, step)

    def _execute(self, thread: Thread, step: Step) -> None:
        item, opcode, operands = step.item, step.opcode, step.operands
        if opcode == "bra":
            assert isinstance(operands[0], Symbol)
            thread.pc = self.labels[operands[0].name]
        elif opcode == "brx":
            targets = self.function.branch_targets[operands[1].name]  # type: ignore[union-attr]
            thread.pc = self.labels[targets[self.read(thread, operands[0], "u32")]]
        elif opcode in ("ret", "exit"):
            thread.done = True
        elif opcode == "mov":
            self._mov(thread, item)
        elif opcode == "setp":
            values = [self.read(thread, o, kind) for o, kind in zip(operands[1:], step.sources, strict=False)]
            results = scalar.compare_and_join(step.type, step.modifiers, values)
            targets = operands[0] if isinstance(operands[0], Pair) else Pair(operands[0], Sink())  # type: ignore[arg-type]
            for target, result in zip((targets.first, targets.second), results, strict=True):
                self.write(thread, target, int(result), "pred")
        elif item.has("cc") or opcode in ("addc", "subc", "madc"):
            values = [self.read(thread, o, step.type) for o in operands[1:]]
            flag = thread.registers.get("carry", 0)
            result, flag = scalar.carried(opcode, step.type, step.modifiers, values, flag)
            self.write(thread, operands[0], result, step.type)
            if item.has("cc"):
                thread.registers["carry"] = flag
        elif opcode == "lop3" and isinstance(operands[0], Pair):
            result = scalar.evaluate("lop3", ("b32",), (), [self.read(thread, o, "b32") for o in operands[1:5]])
            some, joined = int(result != 0), self.read(thread, operands[5], "pred")
            self.write(thread, operands[0].first, result, "b32")
            self.write(thread, operands[0].second, some & joined if item.has("and") else some | joined, "pred")
        elif opcode in _PURE:
            values = [self.read(thread, o, kind) for o, kind in zip(operands[1:], step.sources, strict=False)]
            result = scalar.evaluate(opcode, step.types, step.modifiers, values)
            self.write(thread, operands[0], result, step.result)
        elif opcode in ("ld", "st"):
            self._access(thread, step)
        elif opcode in ("atom", "red"):
            self._atomic(thread, item)
        elif opcode == "cvta":
            self._cvta(thread, item)
        elif opcode not in ("membar", "fence", "prefetch", "nanosleep"):
            raise Unsupported(item.text)

    # Operands

    def read(self, thread: Thread, operand: Operand, type: str) -> int:
        """The bits of a source operand."""
        bits = BITS[type]
        if isinstance(operand, Reg):
            return thread.registers.get(operand.name, 0) & mask(bits)
        if isinstance(operand, Negated):
            return 1 - thread.registers.get(operand.reg.name, 0)
        if isinstance(operand, Imm):
            return immediate(operand, type) & mask(bits)
        if isinstance(operand, Special):
            return self.special(thread, operand.name) & mask(bits)
        if isinstance(operand, Symbol):
            return (self.addresses[operand.name][1] + operand.offset) & mask(bits)
        raise Unsupported(f"{operand} as a source")

    def write(self, thread: Thread, operand: Operand, value: int, type: str) -> None:
        """Put bits of `type` into a register, which may be wider."""
        if isinstance(operand, Sink):
            return
        assert isinstance(operand, Reg), operand
        if type[0] == "s":
            value = scalar.signed(value, BITS[type])
        thread.registers[operand.name] = value & mask(BITS[operand.type])

    def special(self, thread: Thread, name: str) -> int:
        base, _, axis = name.removeprefix("%").partition(".")
        if axis:
            i = "xyz".index(axis)
            return {"tid": thread.index, "ntid": self.block, "ctaid": self.block_index, "nctaid": self.grid}[base][i]
        lane = thread.linear % 32
        masks = {"eq": 1 << lane, "lt": mask(lane), "le": mask(lane + 1), "gt": mask(32) & ~mask(lane + 1)}
        masks["ge"] = masks["gt"] | masks["eq"]
        if base.startswith("lanemask_"):
            return masks[base.removeprefix("lanemask_")]
        if base in ("laneid", "warpid", "nwarpid"):
            return {"laneid": lane, "warpid": thread.linear // 32, "nwarpid": -(-len(self.threads) // 32)}[base]
        raise Unsupported(name)

    # Instructions

    def _mov(self, thread: Thread, item: Instruction) -> None:
        to, of = item.operands
        type = item.types[0]
        if isinstance(to, Vector) and isinstance(of, Vector):
            values = [self.read(thread, element, type) for element in of.elements]
            for element, value in zip(to.elements, values, strict=True):
                self.write(thread, element, value, type)
        elif isinstance(to, Vector):
            each = BITS[type] // len(to.elements)
            value = self.read(thread, of, type)
            for i, element in enumerate(to.elements):
                self.write(thread, element, value >> each * i & mask(each), f"b{each}")
        elif isinstance(of, Vector):
            each = BITS[type] // len(of.elements)
            parts = [self.read(thread, element, f"b{each}") for element in of.elements]
            self.write(thread, to, sum(part << each * i for i, part in enumerate(parts)), type)
        else:
            self.write(thread, to, self.read(thread, of, type), type)

    def _address(self, thread: Thread, operand: Operand) -> int:
        assert isinstance(operand, Address)
        base = 0
        if isinstance(operand.base, Reg):
            base = self.read(thread, operand.base, f"b{BITS[operand.base.type]}")
        elif operand.base is not None:
            base = self.addresses[operand.base.name][1]
        return base + operand.offset

    def _access(self, thread: Thread, step: Step) -> None:
        item, space, type = step.item, step.space, step.type
        size = BITS[type] // 8
        at, data = (1, 0) if item.opcode == "ld" else (0, 1)
        operand = item.operands[data]
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        address = self._address(thread, item.operands[at])
        held = self.reach(space, address, size * len(elements), thread)
        if item.opcode == "ld":
            for i, element in enumerate(elements):
                self.write(thread, element, int.from_bytes(held[size * i : size * (i + 1)], "little"), type)
        else:
            values = [self.read(thread, element, type) for element in elements]
            held[:] = b"".join(value.to_bytes(size, "little") for value in values)

    def _atomic(self, thread: Thread, item: Instruction) -> None:
        space = next((m for m in item.modifiers if m in _SPACES), "")
        type, operands = item.types[0], list(item.operands)
        to = operands.pop(0) if item.opcode == "atom" else Sink()
        held = self.reach(space, self._address(thread, operands[0]), BITS[type] // 8, thread)
        old = int.from_bytes(held, "little")
        values = [self.read(thread, operand, type) for operand in operands[1:]]
        if item.has("cas"):
            new = values[1] if old == values[0] else old
        elif item.has("exch"):
            new = values[0]
        elif item.has("inc"):
            new = 0 if old >= values[0] else old + 1
        elif item.has("dec"):
            new = values[0] if old == 0 or old > values[0] else old - 1
        else:
            op = next(m for m in item.modifiers if m in ("add", "min", "max", "and", "or", "xor"))
            new = scalar.evaluate(op, item.types, (), [old, values[0]])
        held[:] = new.to_bytes(len(held), "little")
        self.write(thread, to, old, type)

    def _cvta(self, thread: Thread, item: Instruction) -> None:
        type = item.types[0]
        value = self.read(thread, item.operands[1], type)
        window = SHARED_WINDOW if item.has("shared") else LOCAL_WINDOW if item.has("local") else 0
        self.write(thread, item.operands[0], value - window if item.has("to") else value + window, type)

    # Instructions for several threads

    def _meet(self) -> None:
        """Carry out what waiting threads are all there for."""
        met = False
        waiting = [thread for thread in self.threads if thread.waiting]
        for warp in range(-(-len(self.threads) // 32)):
            groups: dict[int, list[Thread]] = {}
            for thread in waiting:
                if thread.linear // 32 == warp:
                    groups.setdefault(thread.pc, []).append(thread)
            for pc, group in groups.items():
                item = self.function.body[pc]
                assert isinstance(item, Instruction)
                if item.opcode not in ("bar", "barrier") or item.has("warp"):
                    met |= self._warp(item, group)
        met |= self._barriers(waiting)
        if waiting and not met:
            raise RuntimeError(f"these threads wait forever: {[thread.linear for thread in waiting]}")

    def _warp(self, item: Instruction, group: list[Thread]) -> bool:
        """An instruction with a member mask, once all its members are at it."""
        last = len(item.operands) - 1
        here = sum(1 << thread.linear % 32 for thread in group)
        members = self.read(group[0], item.operands[last], "b32")
        warp = group[0].linear // 32
        alive = sum(1 << t.linear % 32 for t in self.threads if t.linear // 32 == warp and not t.done)
        if members & alive & ~here:
            return False
        lanes = {thread.linear % 32: thread for thread in group if members >> thread.linear % 32 & 1}
        if item.opcode == "shfl":
            self._shuffle(item, lanes)
        elif item.opcode == "vote":
            votes = {lane: self.read(t, item.operands[1], "pred") for lane, t in lanes.items()}
            ballot = sum(vote << lane for lane, vote in votes.items())
            results = {"ballot": ballot, "any": int(ballot != 0), "all": int(all(votes.values()))}
            results["uni"] = int(len(set(votes.values())) == 1)
            what = next(m for m in item.modifiers if m in results)
            for thread in lanes.values():
                self.write(thread, item.operands[0], results[what], item.types[0])
        elif item.opcode == "redux":
            op = next(m for m in item.modifiers if m in ("add", "min", "max", "and", "or", "xor"))
            values = [self.read(thread, item.operands[1], item.types[0]) for thread in lanes.values()]
            total = values[0]
            for value in values[1:]:
                total = scalar.evaluate(op, item.types, (), [total, value])
            for thread in lanes.values():
                self.write(thread, item.operands[0], total, item.types[0])
        elif item.opcode == "match":
            values = {lane: self.read(thread, item.operands[1], item.types[0]) for lane, thread in lanes.items()}
            for lane, thread in lanes.items():
                same = sum(1 << other for other, value in values.items() if value == values[lane])
                target = item.operands[0]
                if item.has("all"):
                    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
                    agreed = len(set(values.values())) == 1
                    self.write(thread, first, same if agreed else 0, "b32")
                    self.write(thread, second, int(agreed), "pred")
                else:
                    self.write(thread, target, same, "b32")
        elif not item.has("warp"):
            raise Unsupported(item.text)
        for thread in group:
            thread.waiting, thread.pc = False, thread.pc + 1
        return True

    def _shuffle(self, item: Instruction, lanes: dict[int, Thread]) -> None:
        target = item.operands[0]
        first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
        sources = {lane: self.read(thread, item.operands[1], "b32") for lane, thread in lanes.items()}
        for lane, thread in lanes.items():
            b = self.read(thread, item.operands[2], "b32") & 31
            c = self.read(thread, item.operands[3], "b32")
            clamp, segment = c & 31, c >> 8 & 31
            most, least = (lane & segment) | (clamp & ~segment), lane & segment
            if item.has("up"):
                j, inside = lane - b, lane - b >= most
            elif item.has("down"):
                j, inside = lane + b, lane + b <= most
            elif item.has("bfly"):
                j, inside = lane ^ b, lane ^ b <= most
            else:
                j = least | (b & ~segment & 31)
                inside = j <= most
            source = j if inside else lane
            self.write(thread, first, sources.get(source, 0), "b32")
            self.write(thread, second, int(inside), "pred")

    def _barriers(self, waiting: list[Thread]) -> bool:
        met = False
        groups: dict[int, list[Thread]] = {}
        for thread in waiting:
            item = self.function.body[thread.pc]
            if (
                thread.waiting
                and isinstance(item, Instruction)
                and item.opcode in ("bar", "barrier")
                and not item.has("warp")
            ):
                first = 1 if item.has("red") else 0
                groups.setdefault(self.read(thread, item.operands[first], "b32"), []).append(thread)
        alive = sum(not thread.done for thread in self.threads)
        for group in groups.values():
            wanted = alive
            item = self.function.body[group[0].pc]
            assert isinstance(item, Instruction)
            if item.has("red"):
                if len(group) == wanted:
                    self._reduce(group)
                    met = True
                continue
            if len(item.operands) > 1:
                wanted = self.read(group[0], item.operands[1], "b32")
            if len(group) >= wanted:
                met = True
                for thread in group:
                    thread.waiting, thread.pc = False, thread.pc + 1
        return met

    def _reduce(self, group: list[Thread]) -> None:
        """bar.red over the whole block."""
        votes = []
        for thread in group:
            item = self.function.body[thread.pc]
            assert isinstance(item, Instruction)
            votes.append(self.read(thread, item.operands[-1], "pred"))
        for thread in group:
            item = self.function.body[thread.pc]
            assert isinstance(item, Instruction)
            result = sum(votes) if item.has("popc") else all(votes) if item.has("and") else any(votes)
            self.write(thread, item.operands[0], int(result), item.types[0])
            thread.waiting, thread.pc = False, thread.pc + 1


_SPACES = ("global", "shared", "local", "const", "param")


def immediate(operand: Imm, type: str) -> int:
    """The bits of a constant as `type`."""
    if operand.kind == "int" or operand.kind == type or BITS[type] == BITS[operand.kind]:
        return int(operand.value != 0) if type == "pred" else operand.value
    return scalar.pack(scalar.unpack(operand.value, operand.kind), type)


def operand_types(item: Instruction) -> tuple[str, ...]:
    """The types of an instruction's sources."""
    type = item.types[0]
    second = item.types[1] if len(item.types) > 1 else type
    special = {
        "shl": (type, "u32"),
        "shr": (type, "u32"),
        "shf": (type, type, "u32"),
        "bfe": (type, "u32", "u32"),
        "bfi": (type, type, "u32", "u32"),
        "selp": (type, type, "pred"),
        "setp": (type, type, "pred"),
        "slct": (type, type, second),
        "set": (second, second, "pred"),
        "cvt": (second, second),
    }
    if item.opcode == "mad" and item.has("wide"):
        return type, type, scalar.wider(type)
    return special.get(item.opcode, (type,) * 4)


def result_type(item: Instruction) -> str:
    """The type of an instruction's result."""
    if item.opcode in ("popc", "clz", "bfind"):
        return "u32"
    if item.opcode == "testp":
        return "pred"
    return scalar.wider(item.types[0]) if item.has("wide") else item.types[0]


def run(
    module: Module,
    entry: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared: int = 0,
) -> None:
    """Run a launch. Arguments are NumPy arrays (their memory is passed as a pointer, and changed) or NumPy scalars."""
    launch = Launch(module, entry, grid, block, shared)
    for variable, arg in zip(launch.function.params, args, strict=True):
        if isinstance(arg, np.ndarray):
            assert arg.flags.c_contiguous
            data = struct.pack("<Q", launch.map(memoryview(arg.reshape(-1).view(np.uint8)).cast("B")))
        else:
            data = arg.tobytes()
        assert len(data) == variable.nbytes, (variable.name, len(data), variable.nbytes)
        offset = launch.addresses[variable.name][1]
        launch.params[offset : offset + len(data)] = data
    launch.run()
