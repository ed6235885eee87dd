"""Whether an instruction has the modifiers and operands that its form takes.

Types of registers follow the PTX ISA's rule: the size must be equal, `.bN` goes with everything of its size, `.u` and
`.s` go with each other, `.f` only with itself; loads, stores and conversions may have wider registers. An opcode
without a row in `table` is left to the back end, which refuses what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ptxtrain.engine.ptxcpu.forms import FORMS, Wrong
from ptxtrain.engine.ptxcpu.roles import ROLES, SPACES, Use, form_name, listed
from ptxtrain.engine.ptxcpu.table import ROWS, Row
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Address,
    Imm,
    Instruction,
    Reg,
    Symbol,
)

# The state space of a variable by its name, None for functions.
SpaceOf = Callable[[str], str | None]


def check(instruction: Instruction, space_of: SpaceOf) -> Wrong | None:
    """What is wrong with an instruction, or None."""
    special = FORMS.get(instruction.opcode)
    if special is not None:
        return special(instruction)
    rows = ROWS.get(instruction.opcode)
    if rows is None:
        return None
    policy = instruction.has("L2::cache_hint")
    if policy:
        last = instruction.operands[-1] if instruction.operands else None
        if not isinstance(last, Reg) or last.type not in ("b64", "u64", "s64"):
            return len(instruction.operands) - 1, ".L2::cache_hint needs a 64-bit register as its last operand"
        instruction = replace(instruction, operands=instruction.operands[:-1])
    row = _row(instruction, rows)
    if row is None:
        return None
    if isinstance(row, str):
        return -1, row
    return _modifiers(instruction, row) or _operands(instruction, row) or _space(instruction, space_of)


def _row(instruction: Instruction, rows: list[Row]) -> Row | str | None:
    """The form; what is wrong with the types; or None if the opcode has forms that the table leaves out."""
    fitting = [row for row in rows if all(word in instruction.modifiers for word in row.when.split())]
    types = instruction.types
    name = instruction.opcode
    if not fitting:
        return None
    most = max(len(row.when.split()) for row in fitting)
    wanted: list[str] = []
    for row in fitting:
        if not row.types and not types:
            return row
        if types and types[0] in row.types.split():
            if row.second and (len(types) != 2 or types[1] not in row.second.split()):
                return f"{name}.{types[0]} needs a second type: {listed(row.second.split())}"
            if not row.second and len(types) > 1:
                return f"{name} takes one type, not {listed(types)}"
            return row
        if len(row.when.split()) == most:
            wanted += [type for type in row.types.split() if type not in wanted]
    if not types:
        return f"{name} needs a type: {listed(wanted)}"
    if not wanted:
        return f"{name} takes no type"
    return f"{'.'.join((name, *fitting[0].when.split()))} does not work on .{types[0]}; it takes {listed(wanted)}"


def _modifiers(instruction: Instruction, row: Row) -> Wrong | None:
    need, when = row.need.split(), row.when.split()
    allowed = {*row.allow.split(), *need, *when}
    seen: set[str] = set()
    for modifier in instruction.modifiers:
        if modifier in TYPE_BITS or modifier.startswith(("L1::", "L2::")):
            continue
        if modifier not in allowed:
            return -1, f"{form_name(instruction, modifier)} does not take .{modifier}"
        if modifier in seen:
            return -1, f".{modifier} stands twice"
        seen.add(modifier)
    if need and not any(word in seen for word in need):
        return -1, f"{form_name(instruction)} needs one of {listed(need)}"
    for group in (("rn", "rz", "rm", "rp", "approx", "full"), ("lo", "hi", "wide"), ("v2", "v4", "v8")):
        if len(both := [word for word in group if word in seen]) > 1:
            return -1, f"{listed(both)} exclude each other"
    return None


def _operands(instruction: Instruction, row: Row) -> Wrong | None:
    forms = [form.split() for form in row.operands.split("/")]
    given = instruction.operands
    roles = next((form for form in forms if len(form) == len(given)), None)
    if roles is None:
        counts = " or ".join(str(len(form)) for form in forms)
        plural = "" if counts == "1" else "s"
        index = max(len(form) for form in forms) if len(given) > max(len(form) for form in forms) else -1
        return index, f"{form_name(instruction)} takes {counts} operand{plural}, not {len(given)}"
    types = instruction.types
    use = Use(instruction, types[0] if types else "", types[1] if len(types) > 1 else "")
    for index, (role, operand) in enumerate(zip(roles, given, strict=True)):
        message = ROLES[role](operand, use)
        if message is not None:
            return index, message
    return None


def _space(instruction: Instruction, space_of: SpaceOf) -> Wrong | None:
    """A symbol in an address must be of the space that the instruction names."""
    named = [m.split("::")[0] for m in instruction.modifiers if m.split("::")[0] in SPACES]
    addresses = [(i, o) for i, o in enumerate(instruction.operands) if isinstance(o, Address)]
    for (index, address), space in zip(addresses, named, strict=False):
        if isinstance(address.base, Symbol):
            found = space_of(address.base.name)
            if found != space:
                where = f"in .{found}" if found else "a function"
                return index, f"{address.base.name} is {where}, not in .{space}"
    if instruction.opcode == "cp":
        sizes = (16,) if instruction.has("cg") else (4, 8, 16)
        for index, operand in enumerate(instruction.operands):
            if index == 2 and isinstance(operand, Imm) and operand.value not in sizes:
                return 2, f"cp.async copies {' or '.join(map(str, sizes))} bytes here, not {operand.value}"
    return None
