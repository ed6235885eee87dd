"""What the instruction table accepts, the compiler can compile: each form once, through to LLVM IR that LLVM reads."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import pytest
from table_forms import ROWS, forms, kernel

from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.forms import SPECIALS_OF_64_BITS
from ptxtrain.engine.ptxcpu.scope import SPECIALS
from ptxtrain.engine.ptxcpu.tree import PtxError

# Forms that are refused with a message, and why.
REFUSED = {
    r"atom\.(cas|exch)\..*b128": "no atomic operations on 128 bits",
    r"barrier\.cluster": "no clusters",
    r"st\.(.*\.)?(const|param)": "constants and an entry's parameters are not written",
    r"ldu\.local": "local memory is never the same for all lanes",
    r"(atom|red)\.noftz\.(?!.*(add|min|max))": "an operation is missing",
    r"set\.\w+(\.ftz)?\.(and|or|xor)\.\w+\.b?f16x2": "set of packed halves takes no third operand",
    r"set\.\w+(\.ftz)?\.(and|or|xor)(\.ftz)?\.\w+\.b?f16x2": "set of packed halves takes no third operand",
}


@pytest.mark.parametrize("opcode", [op for op in ROWS if op not in ("bra", "brx", "brkpt")])
def test_accepted_forms_compile(opcode: str) -> None:
    known, wrong = 0, []
    for text in forms(opcode):
        try:
            module = load(kernel(text))
        except PtxError:
            continue  # combinations that the ISA does not have
        try:
            ir = module.ir("k", (64, 1, 1))
            known += 1
        except PtxError as error:
            placed = re.search(r":\d+:\d+: .* in `.*`$", str(error))
            if not placed or not any(re.match(pattern, text) for pattern in REFUSED):
                wrong.append(str(error))
            continue
        if known % 7 == 1:
            llvm.parse_assembly(ir).verify()
    assert not wrong, wrong[:10]
    assert known, "no form of this opcode is known"


def test_every_special_register_can_be_read() -> None:
    for name in sorted(SPECIALS):
        kind = "pred" if name == "%is_explicit_cluster" else "b64" if name in SPECIALS_OF_64_BITS else "b32"
        register = {"pred": "%p0", "b64": "%b640", "b32": "%b320"}[kind]
        llvm.parse_assembly(load(kernel(f"mov.{kind} {register}, {name}")).ir("k", (48, 1, 1))).verify()
