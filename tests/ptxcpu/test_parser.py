"""The parser: what becomes of each construct of the language."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from ptx_text import EVERYTHING, HEAD, nvrtc_ptx

from ptxtrain.engine.ptxcpu.parser import parse
from ptxtrain.engine.ptxcpu.tree import (
    Address,
    Call,
    Function,
    Guard,
    Imm,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Reg,
    Sink,
    Span,
    Special,
    Symbol,
    Vector,
)


def module(text: str) -> Module:
    return parse(text, Path("test.ptx"))


def body(text: str, declarations: str = "") -> Function:
    """A kernel with registers of every type and the given statements."""
    registers = "".join(
        f".reg .{type} {name}<9>;"
        for type, name in (
            *(("pred", "%p"), ("b16", "%h"), ("b32", "%r"), ("b64", "%rd"), ("f32", "%f"), ("f64", "%d")),
            *(("s32", "%s"), ("u32", "%u")),
        )
    )
    return module(f"{HEAD}{declarations}.entry k(.param .u64 P) {{ {registers}\n{text}\n}}").functions["k"]


def operand(text: str, form: str = "mov.b32 %r1, {};") -> Operand:
    instruction = body(form.format(text)).body[0]
    assert isinstance(instruction, Instruction)
    return instruction.operands[1]


@pytest.fixture(scope="module")
def everything() -> Module:
    return module(EVERYTHING)


def test_head(everything: Module) -> None:
    assert everything.version == (8, 8)
    assert everything.target == "sm_90a"
    assert list(everything.functions) == ["vprintf", "device", "k"]
    assert everything.functions["vprintf"].is_declaration
    kernel = everything.entry("k")
    assert kernel.is_entry and kernel.maxntid == (128, 1, 1) and kernel.reqntid is None
    assert [(p.name, p.type, p.align, p.nbytes) for p in kernel.params] == [
        ("a", "u64", 8, 8),
        ("p", "b8", 4, 16),
        ("x", "f32", 4, 4),
    ]
    assert [(v.name, v.space) for v in everything.functions["device"].returns] == [("out", "reg")]


def test_variables_and_initialisers(everything: Module) -> None:
    variables = everything.variables
    assert variables["dynamic"].extern and variables["dynamic"].nbytes == 0 and variables["dynamic"].align == 16
    assert variables["grid"].init == struct.pack("<6I", 1, 2, 0, 4, 0, 0)
    assert variables["floats"].init == struct.pack("<3f", 1, 1, -2500)
    assert variables["pointers"].relocations == ((0, Symbol("grid", 0)), (8, Symbol("grid", 8)))
    assert variables["pointers"].init == bytes(24)
    assert variables["quad"].align == 16 and variables["quad"].init == struct.pack("<4f", 1, 2, 3, 4)
    assert variables["$str"].init == b"hello\0"
    assert variables["negative"].init == b"\xfb"
    inner = everything.functions["k"].variables
    assert (inner["tile"].nbytes, inner["other"].nbytes, inner["depot"].nbytes) == (32, 8, 64)
    assert inner["tile"].align == inner["other"].align == 8


def test_scopes_make_names_unique(everything: Module) -> None:
    kernel = everything.functions["k"]
    labels = [item.name for item in kernel.body if isinstance(item, Label)]
    assert len(set(labels)) == len(labels) == 4
    branches = [i.operands[0] for i in kernel.body if isinstance(i, Instruction) and i.opcode == "bra"]
    inner, innermost, outer = labels[0], labels[1], labels[2]
    assert branches == [Symbol(inner), Symbol(innermost), Symbol(outer)]
    written = [i.operands[0] for i in kernel.body if isinstance(i, Instruction) and i.opcode == "mov"][:2]
    assert len({Reg("%r1", "b32"), *written}) == 3
    assert all(isinstance(reg, Reg) and kernel.registers[reg.name] == reg for reg in written)
    assert kernel.branch_targets == {"targets": (outer, "L2")}
    assert [name for name in kernel.variables if name.startswith("in1")] == ["in1", "in1$2"]


def test_only_registers_that_are_used_are_kept(everything: Module) -> None:
    registers = everything.functions["k"].registers
    assert "%r9" not in registers and "%r1" in registers and "lone" in registers


def test_calls(everything: Module) -> None:
    calls = [i.operands[0] for i in everything.functions["k"].body if isinstance(i, Instruction) and i.opcode == "call"]
    out, given = (Symbol("out1"),), (Symbol("in1"), Symbol("in2"))
    assert calls == [Call(out, Symbol("vprintf"), given), Call(out, Reg("%rd1", "b64"), given)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("7U", 7),
        ("-7", -7),
        ("0x1F", 31),
        ("0XffffffffU", 0xFFFFFFFF),
        ("017", 15),
        ("0b101", 5),
        ("0", 0),
        ("~0", -1),
        ("!3", 0),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("1<<4|1", 17),
        ("-7/2", -3),
        ("-7 - -2", -5),
        ("5 > 3 ? 10 : 20", 10),
        ("1 == 2 || 3", 1),
        ("WARP_SZ", 32),
        ("(.s64)0xFFFFFFFFFFFFFFFF", -1),
    ],
)
def test_integers(text: str, value: int) -> None:
    assert operand(text) == Imm(value, "int")


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        ("0f3F800000", "mov.f32 %f1, {};", Imm(0x3F800000, "f32")),
        ("-0f3F800000", "mov.f32 %f1, {};", Imm(0xBF800000, "f32")),
        ("0d3FF0000000000000", "mov.f64 %d1, {};", Imm(0x3FF0000000000000, "f64")),
        ("1.0", "mov.f32 %f1, {};", Imm(0x3FF0000000000000, "f64")),
        ("-1.5e-3", "mov.f64 %d1, {};", Imm(0xBF589374BC6A7EFA, "f64")),
        ("%tid.y", "mov.u32 %r1, {};", Special("%tid.y")),
        ("%lanemask_lt", "mov.u32 %r1, {};", Special("%lanemask_lt")),
        ("%clock64", "mov.u64 %rd1, {};", Special("%clock64")),
        ("%envreg3", "mov.b32 %r1, {};", Special("%envreg3")),
        ("P", "mov.b64 %rd1, {};", Symbol("P")),
        ("[%rd1]", "ld.global.u32 %r1, {};", Address(Reg("%rd1", "b64"), 0)),
        ("[ %rd1 + 0x10 ]", "ld.global.u32 %r1, {};", Address(Reg("%rd1", "b64"), 16)),
        ("[%rd1+-4]", "ld.global.u32 %r1, {};", Address(Reg("%rd1", "b64"), -4)),
        ("[P+2*4]", "ld.param.u32 %r1, {};", Address(Symbol("P"), 8)),
        ("[64]", "ld.shared.u32 %r1, {};", Address(None, 64)),
        ("{%h1, 3}", "mov.b32 %r1, {};", Vector((Reg("%h1", "b16"), Imm(3, "int")))),
        ("!%p2", "and.pred %p1, {}, %p3;", Negated(Reg("%p2", "pred"))),
    ],
)
def test_operands(text: str, form: str, expected: Operand) -> None:
    assert operand(text, form) == expected


def test_instruction() -> None:
    found = body("@!%p1 ld.global.nc.L1::no_allocate.L2::128B.v2.f32 {%f1,\n  _}, [%rd1]; // why").body[0]
    assert found == Instruction(
        "ld",
        ("global", "nc", "L1::no_allocate", "L2::128B", "v2", "f32"),
        (Vector((Reg("%f1", "f32"), Sink())), Address(Reg("%rd1", "b64"), 0)),
        Guard(Reg("%p1", "pred"), True),
        Span(5, 1),
        "@!%p1 ld.global.nc.L1::no_allocate.L2::128B.v2.f32 {%f1, _}, [%rd1]",
    )


def test_pairs() -> None:
    found = body("setp.lt.s32 %p1|%p2, %s1, 0; shfl.sync.up.b32 _|%p1, %r1, 1, 0, -1;").body
    assert [i.operands[0] for i in found if isinstance(i, Instruction)] == [
        Pair(Reg("%p1", "pred"), Reg("%p2", "pred")),
        Pair(Sink(), Reg("%p1", "pred")),
    ]


def test_vector_registers_have_components() -> None:
    found = body(".reg .v2 .f32 v; ld.global.v2.f32 v, [%rd1]; mov.f32 %f1, v.y;").body
    x, y = Reg("v.x", "f32"), Reg("v.y", "f32")
    assert isinstance(found[0], Instruction) and isinstance(found[1], Instruction)
    assert found[0].operands[0] == Vector((x, y)) and found[1].operands[1] == y


def test_register_families_nest() -> None:
    """`%r1<5>` in a scope inside that of `%r<20>`: the inner names win."""
    found = body("{ .reg .f32 %r1<5>; mov.f32 %r12, 0f00000000; mov.b32 %r2, 1; } mov.b32 %r8, 2;").body
    assert [i.operands[0].type for i in found if isinstance(i, Instruction) and isinstance(i.operands[0], Reg)] == [
        *("f32", "b32", "b32")
    ]


@pytest.mark.parametrize("options", [(), ("-lineinfo",), ("-G",), ("-use_fast_math",)])
def test_nvrtc_output(options: tuple[str, ...]) -> None:
    text = nvrtc_ptx(*options)
    found = module(text)
    assert {"first", "second"} <= set(found.functions)
    lines = text.splitlines()
    for function in found.functions.values():
        for item in function.body:
            if isinstance(item, Instruction):  # where it says it stands, it stands
                line = lines[item.span.line - 1][item.span.column - 1 :]
                assert line.startswith(item.text.split()[0].split("\t")[0]), (item, line)


def test_a_long_unrolled_kernel_is_parsed_whole() -> None:
    text = "fma.rn.f32 %f1, %f2, %f3, %f1;\n" * 20_000
    assert len(body(text).body) == 20_000
