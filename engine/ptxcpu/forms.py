"""Instructions whose operands a row of the table cannot say: mov, cvt, ldmatrix, stmatrix, mma."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ptxtrain.engine.ptxcpu.roles import (
    Use,
    check_address,
    check_predicate,
    check_register,
    check_value,
    check_vector,
    listed,
    show,
)
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Imm,
    Instruction,
    Operand,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)

# The index of a wrong operand (-1: the instruction itself) and what is wrong.
Wrong = tuple[int, str]

SPECIALS_OF_64_BITS: Final = frozenset(
    ("%clock64", "%globaltimer", "%gridid", "%current_graph_exec", *(f"%pm{i}_64" for i in range(8)))
)


def _mov(instruction: Instruction) -> Wrong | None:
    types, given = instruction.types, instruction.operands
    if len(types) != 1 or types[0] in ("b8", "u8", "s8", "f16", "bf16", "tf32", "f16x2", "bf16x2"):
        return -1, "mov needs one type: .b16, .u32, .f32, .b64, .pred, …"
    if len(given) != 2:
        return -1, f"mov takes 2 operands, not {len(given)}"
    type = types[0]
    if other := next((m for m in instruction.modifiers if m != type and m not in ("v2", "v4")), None):
        return -1, f"mov does not take .{other}"
    vectors = [isinstance(operand, Vector) for operand in given]
    if instruction.has("v2", "v4"):
        use = Use(instruction, type, "")
        sides: tuple[Callable[[Operand], str | None], ...] = (
            lambda o: check_register(o, type),
            lambda o: check_value(o, type),
        )
        for index, side in enumerate(sides):
            if message := check_vector(given[index], use, side, type):
                return index, message
        return None
    if all(vectors):
        return 0, "only one side of mov can be a vector"
    for index in (0, 1):
        operand = given[index]
        if isinstance(operand, Vector):
            message = _packed(operand, type, written=index == 0)
        elif index == 0:
            message = check_register(operand, type)
        else:
            message = _source_of_mov(operand, type)
        if message is not None:
            return index, message
    return None


def _packed(vector: Vector, type: str, written: bool) -> str | None:
    bits, count = TYPE_BITS[type], len(vector.elements)
    if type not in ("b16", "b32", "b64", "b128"):
        return f"mov packs and unpacks .b16, .b32, .b64 and .b128, not .{type}"
    if count not in (2, 4) or bits // count < 8:
        return f"{count} elements do not make up .{type}"
    for element in vector.elements:
        if isinstance(element, Reg) and TYPE_BITS[element.type] != bits // count:
            return f"{element.name} has {TYPE_BITS[element.type]} bits; each of {count} elements of .{type} has {bits // count}"
        if isinstance(element, Reg) and element.type == "pred":
            return f"{element.name} is a predicate"
        if isinstance(element, Imm) and written:
            return "a constant cannot be written"
        if isinstance(element, Sink) and not written:
            return "_ cannot be read"
    return None


def _source_of_mov(operand: Operand, type: str) -> str | None:
    bits = TYPE_BITS[type]
    if isinstance(operand, Special):
        if type == "pred":
            return None if operand.name == "%is_explicit_cluster" else f"{operand.name} is not a predicate"
        wide = operand.name in SPECIALS_OF_64_BITS
        if type in ("f32", "f64") or bits == 128 or wide != (bits == 64):
            return f"{operand.name} has {64 if wide else 32} bits and does not fit .{type}"
        return None
    if isinstance(operand, Symbol):
        return None if type in ("b32", "u32", "s32", "b64", "u64", "s64") else f"an address does not fit .{type}"
    if type == "pred":
        return check_predicate(operand)
    return check_value(operand, type)


def _loses(to: str, of: str) -> bool:
    """Whether an integer type has values that another has not."""
    if of[0] == "s" and to[0] == "u":
        return True
    return TYPE_BITS[of] > TYPE_BITS[to] - (of[0] == "u" and to[0] == "s")


_FP8: Final = {
    "e4m3",
    "e5m2",
    "e2m1",
    "e3m2",
    "e2m3",
    "e4m3x2",
    "e5m2x2",
    "e2m1x2",
    "e3m2x2",
    "e2m3x2",
    "ue8m0x2",
    "s2f6x2",
}


def _cvt(instruction: Instruction) -> Wrong | None:
    types, given = instruction.types, instruction.operands
    if _FP8 & set(instruction.modifiers) or instruction.has("pack", "rs"):
        return None
    if len(types) != 2:
        return -1, "cvt needs two types, as cvt.rn.f32.s32"
    to, of = types
    known = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "sat", "ftz", "relu", "satfinite")
    if other := next((m for m in instruction.modifiers if m not in known and m not in types), None):
        return -1, f"cvt does not take .{other}"
    if bad := next((t for t in types if t == "pred" or (t[0] == "b" and t[1:].isdigit())), None):
        return -1, f"cvt does not convert .{bad}"
    packed = to in ("f16x2", "bf16x2")
    if packed and of != "f32":
        return -1, f"cvt.{to} converts two .f32, not .{of}"
    if len(given) != (3 if packed else 2):
        return -1, f"cvt.{to}.{of} takes {3 if packed else 2} operands, not {len(given)}"
    if message := _cvt_rounding(instruction, to, of):
        return -1, message
    exact = ("bf16", "bf16x2", "tf32", "f16x2")
    if message := check_register(given[0], to, to not in exact):
        return 0, message
    for index in range(1, len(given)):
        operand = given[index]
        if isinstance(operand, Special):
            if of[0] not in "us":
                return index, f"{operand.name} is an integer, not .{of}"
        elif message := check_value(operand, of, of not in exact):
            return index, message
    return None


def _cvt_rounding(instruction: Instruction, to: str, of: str) -> str | None:
    """Which conversions round, and how."""
    types = (to, of)
    float_to, float_of = to[0] not in "us", of[0] not in "us"
    to_float = [m for m in instruction.modifiers if m in ("rn", "rz", "rm", "rp", "rna")]
    to_integer = [m for m in instruction.modifiers if m in ("rni", "rzi", "rmi", "rpi")]
    if len(to_float) + len(to_integer) > 1:
        return f"{listed([*to_float, *to_integer])} exclude each other"
    if float_of and not float_to and not to_integer:
        return f"cvt.{to}.{of} needs one of .rni, .rzi, .rmi, .rpi"
    if (
        float_to
        and (not float_of or TYPE_BITS[to] < TYPE_BITS[of] or to in ("f16x2", "bf16x2", "tf32"))
        and not to_float
    ):
        return (
            f"cvt.{to}.{of} needs one of .rn, .rz, .rm, .rp" if to != "tf32" else "cvt.tf32.f32 needs .rna, .rn or .rz"
        )
    if not float_to and to_float:
        return f"cvt.{to}.{of} rounds with .rni, .rzi, .rmi or .rpi, not .{to_float[0]}"
    if to_integer and not float_of:
        return f"cvt.{to}.{of} does not round; leave out .{to_integer[0]}"
    if "bf16" in types and ("u8" in types or "s8" in types):
        return f"cvt does not convert .{of} to .{to}"
    widens = float_of and float_to and TYPE_BITS[to] >= TYPE_BITS[of] and not {"bf16", "tf32"} & set(types)
    if to_float and (to == of or (widens and to not in ("f16x2", "bf16x2"))):
        return f"cvt.{to}.{of} is exact; leave out .{to_float[0]}"
    if instruction.has("ftz") and "f32" not in types:
        return f"cvt.{to}.{of} has no .f32 to flush; leave out .ftz"
    if instruction.has("sat") and ("bf16" in types or not (float_to or float_of or _loses(to, of))):
        return f"cvt.{to}.{of} does not take .sat"
    if to_integer and float_to and to != of:
        return f".{to_integer[0]} rounds to an integer of the same type, not from .{of} to .{to}"
    return None


def _matrix_moves(instruction: Instruction) -> Wrong | None:
    """ldmatrix, stmatrix of 8x8 matrices of 16-bit elements."""
    given = instruction.operands
    if not instruction.has("m8n8"):
        return None
    count = next((int(word[1]) for word in ("x1", "x2", "x4") if instruction.has(word)), 0)
    known = ("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    if other := next((m for m in instruction.modifiers if m not in known), None):
        return None if other in ("b8",) else (-1, f"{instruction.opcode} does not take .{other}")
    for need in ("sync", "aligned", "b16"):
        if not instruction.has(need):
            return -1, f"{instruction.opcode} needs .{need}"
    if not count:
        return -1, f"{instruction.opcode} needs .x1, .x2 or .x4"
    if len(given) != 2:
        return -1, f"{instruction.opcode} takes 2 operands, not {len(given)}"
    vector, address = (0, 1) if instruction.opcode == "ldmatrix" else (1, 0)
    if message := _fragment(given[vector], count, "b32"):
        return vector, message
    message = check_address(given[address])
    return None if message is None else (address, message)


def _fragment(operand: Operand, count: int, type: str, constants: bool = False) -> str | None:
    if not isinstance(operand, Vector):
        return f"expected a vector of {count} register{'s' if count > 1 else ''}, not {show(operand)}"
    if len(operand.elements) != count:
        return f"this fragment has {count} registers, not {len(operand.elements)}"
    check_one = check_value if constants else check_register
    return next((wrong for one in operand.elements if (wrong := check_one(one, type)) is not None), None)


def _mma(instruction: Instruction) -> Wrong | None:
    """mma.sync.aligned.mMnNkK.row.col.D.A.B.C: the number of registers follows from the shape."""
    given, types = instruction.operands, instruction.types
    shape = next((m for m in instruction.modifiers if m[:1] == "m" and m[1:2].isdigit()), "")
    if not instruction.has("sync") or not instruction.has("aligned"):
        return -1, "mma needs .sync.aligned"
    if instruction.has("sp", "sp::ordered_metadata", "block_scale") or _FP8 & set(instruction.modifiers):
        return None
    sides = shape[1:].replace("n", " ").replace("k", " ").split()
    if len(sides) != 3 or not all(side.isdigit() for side in sides):
        return -1, "mma needs a shape such as .m16n8k16"
    if len(types) != 4:
        return None if instruction.has("s4", "u4", "b1") else (-1, "mma needs four types: of d, a, b and c")
    m, n, k = map(int, sides)
    if (m, n, k) == (8, 8, 4) and types[1] == "f16":
        return None
    if len(given) != 4:
        return -1, f"mma takes 4 operands, not {len(given)}"
    for index, (type, size) in enumerate(zip(types, (m * n, m * k, k * n, m * n), strict=True)):
        bits = TYPE_BITS[type]
        held = type if (index in (0, 3) and bits == 32) or type == "f64" else "b32"
        if message := _fragment(given[index], max(1, size * bits // 32 // TYPE_BITS[held]), held, index == 3):
            return index, message
    return None


FORMS: Final[dict[str, Callable[[Instruction], Wrong | None]]] = {
    "mov": _mov,
    "cvt": _cvt,
    "ldmatrix": _matrix_moves,
    "stmatrix": _matrix_moves,
    "mma": _mma,
}
