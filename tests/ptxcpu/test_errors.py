"""Every mistake is a `PtxError` with line, column, the statement and what to do; never a traceback."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_text import EVERYTHING, HEAD, nvrtc_ptx

from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.ptxcpu.parser import parse, parse_file
from ptxtrain.engine.ptxcpu.tree import PtxError

REGISTERS = "".join(
    f".reg .{type} {name}<9>; "
    for type, name in (("pred", "%p"), ("b16", "%h"), ("b32", "%r"), ("b64", "%rd"), ("f32", "%f"), ("f64", "%d"))
)


def refused(text: str) -> PtxError:
    with pytest.raises(PtxError) as caught:
        parse(text, Path("bad.ptx"))
    message = str(caught.value)
    assert "\n" not in message and message.startswith("bad.ptx:")
    return caught.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1:1: a PTX file starts with .version, not the end of the file"),
        (".version eight", "1:10: expected a version such as 8.0, found eight in `.version eight`"),
        (".version 8.0\n.target sm80", "2:9: expected a target such as sm_80, found sm80"),
        (".version 8.0\n.address_size 64", "2:1: expected .target after .version, found .address_size"),
        (".version 8.0\n.target sm_80\n.address_size 32", "3:15: only .address_size 64 is supported"),
        (HEAD + ".entree k() { ret; }", "4:1: unknown directive .entree; did you mean .entry?"),
        (HEAD + "ret;", "4:1: expected a directive, found ret"),
        (HEAD + ".entry k() { ret;", "4:18: the file ends inside k: '}' is missing"),
        (HEAD + ".entry k() { ret", "4:17: expected ; after ret, found the end of the file"),
        (HEAD + ".entry k(", "4:10: expected .param, found the end of the file"),
        (HEAD + ".entry k() {\n /* ret; }", "5:2: this comment has no end: */ is missing"),
        (HEAD + '.entry k() { .pragma "x; }', "4:22: this string has no end on its line"),
        (HEAD + ".entry k() { ret; } #", "4:21: the character '#' has no place in PTX"),
        (HEAD + ".entry k() { ret; }\n.entry k() { ret; }", "5:8: k is defined in line 4 already"),
        (HEAD + ".func f(.param .b32 a);\n.func f() { ret; }", "5:7: f is declared with other parameters in line 4"),
        (
            HEAD + ".entry k(.param .b32 a, .param .b32 a) { ret; }",
            "4:37: the parameter a is declared in line 4 already",
        ),
        (HEAD + ".entry k() .maxnthreads 3 { ret; }", "4:12: unknown directive .maxnthreads"),
        (HEAD + ".global .b32 x;\n.global .b32 x;", "5:14: x is declared in line 4 already"),
        (HEAD + ".shared .b8 s[];", "4:13: s has no size; only .extern arrays may leave it open"),
        (HEAD + ".global .b32 x[2] = {1, 2, 3};", "4:28: more values than the array has room for (2)"),
        (HEAD + ".global .b8 x = 256;", "4:17: 256 does not fit .b8"),
        (HEAD + ".global .f32 x = 1;", "4:18: a .f32 needs a float, such as 0f3F800000, not an integer"),
        (HEAD + ".global .u64 x = nothing;", "4:18: undeclared name nothing"),
        (HEAD + ".global .u32 x; .global .u32 y = x;", "4:34: an address needs an element of 8 bytes"),
        (HEAD + ".shared .b32 x = 3;", "4:16: a variable in .shared cannot have an initialiser"),
        (HEAD + ".global .align 3 .b32 x;", "4:16: an alignment is a power of two, not 3"),
        (HEAD + ".global .texref t;", "4:9: textures and surfaces are not supported (.texref)"),
        (HEAD + ".global .b32 x = 1 / 0;", "4:20: this constant divides by zero"),
        (HEAD + ".global .b32 x = 0x1FFFFFFFFFFFFFFFF;", "4:18: this constant does not fit 64 bits"),
        (HEAD + ".global .b32 x = " + "(" * 99 + "1;", "constants nest at most 64 deep"),
    ],
)
def test_files(text: str, message: str) -> None:
    assert message in str(refused(text))


STATEMENTS = [
    # Names
    ("mov.u32 %r1, %r10;", 14, "undeclared register %r10; did you mean %r1?"),
    ("mov.u32 %r1, %tidx;", 14, "undeclared register %tidx"),
    ("mov.u32 %r1, %tid;", 18, "%tid needs a component: %tid.x, .y or .z"),
    ("mov.u64 %rd1, tille;", 15, "undeclared name tille; did you mean tile?"),
    ("bra NOWHERE;", 5, "undeclared label NOWHERE"),
    ("bra tile;", 5, "tile is not a label"),
    ("L: mov.u64 %rd1, L;", 18, "L is a label; only branches take labels"),
    ("L: ret; L: ret;", 9, "L is declared in line 6 already"),
    (".reg .b32 %r3;", 11, "%r3 is declared in line 5 already"),
    (".reg .b32 %r<3>;", 11, "registers of %r<3> are declared in line 5 already"),
    (".reg .b32 %laneid;", 11, "%laneid is a special register"),
    (".reg .b8 %x;", 6, "expected the type of a register, found .b8"),
    ("@%r1 bra L; L: ret;", 2, "a guard is a predicate; %r1 is a .b32 register"),
    ("call nothing;", 6, "undeclared function nothing"),
    ("call helper, (%r1, %r2);", 6, "helper has 1 argument, not 2"),
    ("call tile;", 6, "tile is not a function"),
    # Syntax
    ("add.s32 %r1 %r2, %r3;", 13, "expected , or ';' after an operand, found %r2"),
    ("add.s32 %r1, %r2, ;", 19, "expected an operand, found ';'"),
    ("add.s32 %r1, %r2, 12ab;", 19, "12ab is not a number"),
    ("ld.global.u32 %r1, [%rd1;", 25, "expected ] after an address, found ';'"),
    ("ld.global.u32 %r1, [%rd1 - 4];", 26, "write a negative offset as +-4"),
    ("ld.global.u32 %r1, [];", 21, "an address needs a register, a symbol or a constant"),
    ("ld.global.u32 %r1, [%rd1, {%r1}];", 25, "addresses with coordinates"),
    ("mov.b32 %r1, {%h1;", 18, "expected } after a vector"),
    (".frob 3;", 1, "unknown directive .frob"),
    (";", 1, "expected an instruction, found ';'"),
    # Modifiers and types
    ("add.f32x %f1, %f2, %f3;", 1, "add needs a type"),
    ("add.b32 %r1, %r2, %r3;", 1, "add does not work on .b32; it takes .s32, .u16"),
    ("add %r1, %r2, %r3;", 1, "add needs a type: .s32"),
    ("add.rn.s32 %r1, %r2, %r3;", 1, "add.s32 does not take .rn"),
    ("mul.s32 %r1, %r2, %r3;", 1, "mul.s32 needs one of .lo, .hi"),
    ("mul.lo.hi.s32 %r1, %r2, %r3;", 1, ".lo, .hi exclude each other"),
    ("fma.f32 %f1, %f2, %f3, %f4;", 1, "fma.f32 needs one of .rn, .rz, .rm, .rp"),
    ("setp.s32 %p1, %r1, %r2;", 1, "setp.s32 needs one of .eq, .ne"),
    ("setp.lo.s32 %p1, %r1, %r2;", 1, "setp.s32 does not take .lo"),
    ("cvt.s32.f32 %r1, %f1;", 1, "cvt.s32.f32 needs one of .rni, .rzi, .rmi, .rpi"),
    ("cvt.bf16.f32 %h1, %f1;", 1, "cvt.bf16.f32 needs one of .rn"),
    ("cvt.rn.f64.f32 %d1, %f1;", 1, "cvt.f64.f32 is exact; leave out .rn"),
    ("cvt.f32 %f1, %r1;", 1, "cvt needs two types"),
    ("shl.u32 %r1, %r2, 3;", 1, "shl does not work on .u32; it takes .b16, .b32, .b64"),
    # Operands
    ("add.s32 %r1, %r2;", 1, "add.s32 takes 3 operands, not 2"),
    ("add.s32 %r1, %r2, %r3, %r4;", 24, "add.s32 takes 3 operands, not 4"),
    ("add.s32 %r1, %rd2, %r3;", 14, "%rd2 is a .b64 register and does not fit .s32"),
    ("add.s32 %f1, %r2, %r3;", 9, "%f1 is a .f32 register and does not fit .s32"),
    ("add.f32 %f1, %f2, 1;", 19, "a .f32 needs a float constant"),
    ("add.s32 %r1, %r2, 1.0;", 19, "a float constant does not fit .s32"),
    ("add.s32 %r1, %tid.x, 1;", 14, "%tid.x can only be read by mov or cvt"),
    ("add.s32 1, %r1, %r2;", 9, "expected a register for .s32, not a constant"),
    ("add.u64 %rd1, tile, 4;", 15, "the address of tile can only be taken by mov or cvta"),
    ("mul.wide.s32 %r1, %r2, %r3;", 14, "%r1 is a .b32 register and does not fit .s64"),
    ("shl.b64 %rd1, %rd2, %rd3;", 21, "%rd3 is a .b64 register and does not fit .u32"),
    ("setp.eq.s32 %r1, %r2, %r3;", 13, "%r1 is a .b32 register and does not fit a predicate"),
    ("setp.eq.and.s32 %p1, %r2, %r3;", 1, "setp.eq.and.s32 takes 4 operands, not 3"),
    ("selp.b32 %r1, %r2, %r3, %r4;", 25, "%r4 is a .b32 register and does not fit a predicate"),
    ("and.b32 %r1, %r2, !%p1;", 19, "expected a register for .b32, not a negated predicate"),
    ("and.pred %p1, %p2, !%r1;", 21, "! takes a predicate; %r1 is a .b32 register"),
    ("mov.b32 %r1, %p1;", 14, "%p1 is a .pred register and does not fit .b32"),
    ("mov.u64 %rd1, %tid.x;", 15, "%tid.x has 32 bits and does not fit .u64"),
    ("mov.b32 {%h1, %h2, %h3}, %r1;", 9, "3 elements do not make up .b32"),
    ("mov.b32 {%r1, %r2}, %r3;", 9, "%r1 has 32 bits; each of 2 elements of .b32 has 16"),
    ("mov.b32 {%h1, %h2}, {%h1, %h2};", 9, "only one side of mov can be a vector"),
    ("ld.global.v4.u32 {%r1, %r2}, [%rd1];", 18, "the vector has 2 elements; 4 are needed"),
    ("ld.global.v2.u32 %r1, [%rd1];", 18, ".v2 needs a vector {…}, not %r1 (.b32)"),
    ("ld.global.u32 %r1, %rd1;", 20, "expected an address in brackets, not %rd1 (.b64)"),
    ("ld.global.u32 %r1, [%f1];", 20, "%f1 is a .f32 register; an address has 32 or 64 bits"),
    ("ld.global.u32 %h1, [%rd1];", 15, "%h1 is a .b16 register and does not fit .u32"),
    ("ld.global.u32 %r1, [tile];", 20, "tile is in .shared, not in .global"),
    ("ld.param.u32 %r1, [tile];", 19, "tile is in .shared, not in .param"),
    ("st.global.u32 [%rd1], tile;", 23, "the address of tile can only be taken by mov or cvta"),
    ("cp.async.cg.shared.global [%r1], [%rd1], 8;", 42, "cp.async copies 16 bytes here, not 8"),
    ("shfl.sync.down.b32 %r1, %r2, 1, 31;", 1, "shfl.sync.down.b32 takes 5 operands, not 4"),
    ("bar.arrive 0;", 1, "bar.arrive takes 2 operands, not 1"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2}, [%r3];", 42, "this fragment has 4 registers, not 2"),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r1,%r2}, {%f1,%f2,%f3,%f4};",
        72,
        "this fragment has 4 registers, not 2",
    ),
    ("atom.global.add.f32 %f1, [%rd1];", 1, "atom.add.f32 takes 3 operands, not 2"),
    ("ret 3;", 5, "ret takes 0 operands, not 1"),
]


@pytest.mark.parametrize(("statement", "column", "message"), STATEMENTS)
def test_statements(statement: str, column: int, message: str) -> None:
    declared = ".func helper(.reg .b32 a);"
    error = refused(
        f"{HEAD}{declared}\n.entry k() {{ {REGISTERS} .shared .align 16 .b8 tile[64];\n{statement}\nret; }}"
    )
    assert message in str(error), str(error)
    assert (error.span.line, error.span.column) == (6, column), str(error)
    assert error.text == statement.partition(";")[0] or statement == ";" or error.text in statement


def test_the_statement_is_quoted_on_one_line() -> None:
    error = refused(HEAD + ".entry k() { .reg .b32 %r<3>;\n  add.s32 // sum\n    %r1,\n    %r2;\n}")
    assert str(error) == "bad.ptx:5:3: add.s32 takes 3 operands, not 2 in `add.s32 %r1, %r2`"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PtxtrainError, match=r"cannot read the PTX file .*none\.ptx"):
        parse_file(tmp_path / "none.ptx")
    (tmp_path / "binary.ptx").write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(PtxError, match="this is not text"):
        parse_file(tmp_path / "binary.ptx")


def test_missing_entry() -> None:
    module = parse(HEAD + ".entry one() { ret; } .func two() { ret; }", Path("a.ptx"))
    with pytest.raises(PtxError, match="no entry called two; this file has one"):
        module.entry("two")


# Whatever is done to a valid file, the parser answers with a module or with a PtxError.


def survives(text: str) -> None:
    with contextlib.suppress(PtxError):
        parse(text, Path("bad.ptx"))


def test_every_prefix_is_refused() -> None:
    """A file cut off anywhere inside its last function is never taken for a whole one."""
    end = EVERYTHING.rindex("}", 0, EVERYTHING.index(".section"))
    start = EVERYTHING.index(".entry")
    for cut in range(start, end, 7):
        refused(EVERYTHING[:cut])


PIECES = st.sampled_from(
    [
        *'{}[]()<>,;:@!|+-~.%_0\n"$',
        *("%r1", "%tid", ".reg", ".b32", ".v4", "0f3F800000", "1.5", "0x", "/*", "//", "bra", "call", "mov", ".extern"),
        *("((", "]]", "::", "\x00", "é", "99999999999999999999", ".align 0", "{{{"),
    ]
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutations(data: st.DataObject) -> None:
    text = EVERYTHING
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 30))
        change = data.draw(st.sampled_from(["delete", "insert", "double", "swap", "cut"]))
        if change == "delete":
            text = text[:at] + text[at + length :]
        elif change == "insert":
            text = text[:at] + data.draw(PIECES) + text[at:]
        elif change == "double":
            text = text[: at + length] + text[at:]
        elif change == "swap":
            text = text[:at] + text[at + length : at + 2 * length] + text[at : at + length] + text[at + 2 * length :]
        else:
            text = text[:at]
    survives(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=40))
def test_soup(pieces: list[str]) -> None:
    survives(HEAD + " ".join(pieces))
    survives(HEAD + ".entry k() { .reg .b32 %r<3>; " + " ".join(pieces) + " }")


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 60), PIECES)
def test_mutations_of_nvrtc_output(at: int, length: int, piece: str) -> None:
    text = nvrtc_ptx()
    at %= len(text)
    survives(text[:at] + piece + text[at + length :])
