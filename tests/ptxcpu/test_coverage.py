"""Which accepted instructions have no test of their results: every opcode and type of the instruction table is looked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from table_forms import ROWS, forms
from test_conformance import FAMILIES

from ptxtrain.engine.ptxcpu.tree import TYPE_BITS

HERE = Path(__file__).parent

# Opcodes whose results are compared elsewhere than in the table, because they are not functions of a lane's registers.
ELSEWHERE = {
    **dict.fromkeys(("ld", "st"), "test_control.py test_packed.py test_corpus.py"),
    **dict.fromkeys(("atom", "red"), "test_atomics.py"),
    **dict.fromkeys(("vote", "match", "redux", "elect", "bar", "barrier"), "test_warp.py"),
    "shfl": "test_control.py",
    "activemask": "corpus/votes.cu",
    **dict.fromkeys(("cvta", "isspacep", "ldu"), "test_windows.py"),
    "cp": "test_checked_init.py",
    **dict.fromkeys(("bra", "brx", "ret", "exit"), "test_control.py"),
    "trap": "test_calls.py test_control.py test_machine.py",
    "membar": "corpus/reductions.cu corpus/scans.cu",
}
# Hints and stops without a result; `test_table` compiles them.
NO_RESULT = {"prefetch", "prefetchu", "nanosleep", "griddepcontrol", "setmaxnreg", "brkpt", "pmevent"}

# Types whose results other files compare: opcode -> types.
TYPES_ELSEWHERE = {
    **{key: {("u16x2",), ("s16x2",)} for key in ("add", "min", "max")},  # test_packed.py
    # The ISA has carries of 32 and 64 bits; the table's 16-bit forms are refused by ptxas and by the compiler.
    **{key: {("u16",), ("s16",)} for key in ("addc", "subc", "madc")},
    # Both halves' answers do not fit 16 bits; ptxas takes the form, and nothing says what it gives.
    "set": {(result, f"{half}x2") for result in ("u16", "s16") for half in ("f16", "bf16")},
}


def _opcode_and_types(text: str) -> tuple[str, tuple[str, ...]]:
    opcode, *modifiers = text.strip().split(" ")[0].split(".")
    return opcode, tuple(m for m in modifiers if m in TYPE_BITS)


COMPARED = {
    _opcode_and_types(part)
    for family in FAMILIES.values()
    for form in family
    for part in form.text.split(";")
    if part.strip()
}


def _names(opcode: str) -> str:
    """The opcode in PTX, or the function of CUDA C that becomes it."""
    return {"activemask": "__activemask", "membar": "__threadfence"}.get(opcode, rf"\b{opcode}\b")


@pytest.mark.parametrize("opcode", ROWS)
def test_every_opcode_and_type_has_a_row(opcode: str) -> None:
    """The table's opcode, with each combination of types that it may have, is compared with the oracle lane by lane."""
    if opcode in NO_RESULT:
        return
    if opcode in ELSEWHERE:
        texts = [(HERE / name).read_text() for name in ELSEWHERE[opcode].split() if (HERE / name).exists()]
        assert any(re.search(_names(opcode), text) for text in texts), f"{opcode} is in none of {ELSEWHERE[opcode]}"
        return
    wanted = {_opcode_and_types(text)[1] for text in forms(opcode)} - TYPES_ELSEWHERE.get(opcode, set())
    lacking = {types for types in wanted if (opcode, types) not in COMPARED}
    assert not lacking, f"{opcode} has no row for {sorted(lacking)}"


def test_a_missing_row_is_seen() -> None:
    """The test above can fail: the table has no row for an opcode that does not exist, or a type that is left out."""
    assert ("add", ("f32",)) in COMPARED
    assert ("add", ("b8",)) not in COMPARED
