"""Device functions in PTX as people and compilers write them: registers as parameters, guards, tables, refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from both import HEAD, PROLOGUE

from ptxtrain.engine.errors import DeviceError
from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.tree import PtxError


def program(functions: str, body: str) -> str:
    params = ".param .u64 p_in, .param .u64 p_out"
    start = f"{HEAD}{functions}\n.visible .entry k({params})\n{{\n{PROLOGUE}ld.global.u32 %x, [%in];\n"
    return f"{start}{body}\nst.global.u32 [%out], %x;\nret;\n}}\n"


def run(functions: str, body: str, count: int = 80) -> tuple[Any, Any]:
    x = np.random.default_rng(7).integers(0, 100, count, dtype=np.uint32)
    out = np.zeros_like(x)
    load(program(functions, body)).launch("k", grid=(1, 1, 1), block=(count, 1, 1), args=[x, out])
    return x, out


TWICE = ".func (.reg .u32 r) twice (.reg .u32 a) { .reg .u32 t; add.u32 t, a, a; mov.u32 r, t; ret; }"


def test_registers_as_parameters_and_constants_as_arguments() -> None:
    x, out = run(TWICE, "call (%x), twice, (%x); call (%r1), twice, (21); add.u32 %x, %x, %r1;")
    assert (out == 2 * x + 42).all()


def test_a_guard_on_a_call() -> None:
    x, out = run(TWICE, "setp.lt.u32 %p1, %x, 50; @%p1 call (%x), twice, (%x); @!%p1 call (%x), twice, (3);")
    assert (out == np.where(x < 50, 2 * x, 6)).all()


def test_mixed_parameters() -> None:
    function = """.func (.param .b32 r) both (.reg .u32 a, .param .b32 b)
    { .reg .u32 t; ld.param.u32 t, [b]; mad.lo.u32 t, a, 3, t; st.param.b32 [r], t; ret; }"""
    x, out = run(function, "call (%x), both, (%x, %t);")
    assert (out == 3 * x + np.arange(x.size)).all()


def test_calls_in_a_loop_that_lanes_leave_one_by_one() -> None:
    function = """.func (.param .b32 r) step (.param .b32 a) { .reg .u32 t; .reg .pred odd;
    ld.param.u32 t, [a]; and.b32 t, t, 1; setp.ne.u32 odd, t, 0; ld.param.u32 t, [a]; @odd bra ODD;
    shr.u32 t, t, 1; st.param.b32 [r], t; ret;
    ODD: mad.lo.u32 t, t, 3, 1; st.param.b32 [r], t; ret; }"""
    body = """add.u32 %x, %x, 1; mov.u32 %r1, 0;
    AGAIN: setp.eq.u32 %p1, %x, 1; @%p1 bra DONE; { .param .b32 given; .param .b32 got; st.param.b32 [given], %x;
    call.uni (got), step, (given); ld.param.b32 %x, [got]; } add.u32 %r1, %r1, 1; bra AGAIN;
    DONE: mov.u32 %x, %r1;"""
    x, out = run(function, body)

    def steps(v: int) -> int:
        count = 0
        while v != 1:
            v, count = (3 * v + 1 if v & 1 else v >> 1), count + 1
        return count

    assert out.tolist() == [steps(int(v) + 1) for v in x]


def test_a_table_of_branches_in_a_function_that_is_called_twice() -> None:
    function = """.func (.reg .u32 r) pick (.reg .u32 a) { .reg .u32 i;
    T: .branchtargets A, B, C; rem.u32 i, a, 3; brx.idx i, T;
    A: add.u32 r, a, 100; ret; B: mul.lo.u32 r, a, 2; ret; C: mov.u32 r, 5; ret; }"""
    x, out = run(function, "call (%x), pick, (%x); call (%x), pick, (%x);")

    def pick(v: int) -> int:
        return (v + 100, 2 * v, 5)[v % 3]

    assert out.tolist() == [pick(pick(int(v))) for v in x]


def test_shared_memory_of_a_function_exists_once() -> None:
    function = """.func (.reg .u32 r) keep (.reg .u32 a, .reg .u32 first)
    { .shared .align 4 .b32 cell; .reg .pred p; setp.eq.u32 p, first, 0; @p st.shared.u32 [cell], a; bar.sync 0;
      ld.shared.u32 r, [cell]; bar.sync 0; ret; }"""
    body = "call (%r1), keep, (%x, %t); mov.u32 %r2, 1; call (%r3), keep, (%x, %r2); add.u32 %x, %r1, %r3;"
    x, out = run(function, body)
    assert (out == 2 * x[0]).all()


def test_structures_are_copied_through_memory_where_their_pieces_overlap() -> None:
    function = """.func (.param .b64 r) swap (.param .align 8 .b8 s[16]) { .reg .u32 a, b; .reg .b64 w;
    ld.param.u32 a, [s+4]; ld.param.u32 b, [s+8]; mov.b64 w, {b, a}; st.param.b64 [r], w; ret; }"""
    body = """{ .param .align 8 .b8 s[16]; .param .b64 r; mov.b64 %rd1, {%x, %t}; st.param.b64 [s], %rd1;
    mov.b64 %rd1, {%lane, %x}; st.param.b64 [s+8], %rd1; call (r), swap, (s); ld.param.b64 %rd2, [r]; }
    mov.b64 {%r1, %r2}, %rd2; mad.lo.u32 %x, %r1, 1000, %r2;"""
    x, out = run(function, body)
    t = np.arange(x.size)
    assert (out == t % 32 * 1000 + t).all()


INDIRECT = (
    TWICE
    + """
.func (.reg .u32 r) thrice (.reg .u32 a) { mul.lo.u32 r, a, 3; ret; }
.global .u64 table[2] = {twice, thrice};
"""
)


def test_calls_through_registers() -> None:
    body = """P: .callprototype (.reg .u32 _) _ (.reg .u32 _);
    and.b32 %r1, %x, 1; mov.u64 %rd1, table; mad.wide.u32 %rd1, %r1, 8, %rd1; ld.global.u64 %rd2, [%rd1];
    call (%x), %rd2, (%x), P;"""
    x, out = run(INDIRECT, body)
    assert (out == np.where(x & 1, 3 * x, 2 * x)).all()
    body = "P: .callprototype (.reg .u32 _) _ (.reg .u32 _); mov.u64 %rd2, 12345; call (%x), %rd2, (%x), P;"
    with pytest.raises(DeviceError, match="an indirect call went to an address that is no function it fits"):
        run(INDIRECT, body)


REFUSED = {
    "recursion": (
        ".func (.reg .u32 r) f (.reg .u32 a);\n.func (.reg .u32 r) g (.reg .u32 a) { call (r), f, (a); ret; }\n"
        ".func (.reg .u32 r) f (.reg .u32 a) { call (r), g, (a); ret; }",
        "call (%x), f, (%x);",
        r":6:\d+: recursive calls are not supported \(g -> f -> g\)|: recursive calls .*\(f -> g -> f\)",
    ),
    "no body": (
        ".extern .func (.reg .u32 r) far (.reg .u32 a);",
        "call (%x), far, (%x);",
        "far has no body in this file",
    ),
    "no function fits": (
        TWICE,
        "P: .callprototype _ (); call %rd1, (), P;",
        "no function that the indirect call can reach",
    ),
    "stack": ("", "alloca.u64 %rd1, 16;", "the instruction alloca is not known in `alloca"),
    "mbarrier": ("", "mbarrier.init.shared.b64 [%rd1], 32;", "the instruction mbarrier is not known"),
    "clusters": ("", "barrier.cluster.arrive;", "clusters are not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_where_and_what(case: str) -> None:
    functions, body, message = REFUSED[case]
    with pytest.raises(PtxError, match=message) as caught:
        load(program(functions, body)).ir("k", (32, 1, 1))
    assert caught.value.span.line > 3 and caught.value.text


def test_deep_calls_are_refused_and_not_a_crash() -> None:
    names = [f"f{i}" for i in range(150)]
    functions = ".func f149 () { ret; }\n" + "\n".join(
        f".func {a} () {{ call {b}, (); ret; }}" for a, b in reversed(list(pairwise(names)))
    )
    with pytest.raises(PtxError, match="calls nest at most 100 deep"):
        load(program(functions, "call f0, ();")).ir("k", (32, 1, 1))
    doubling = ".func g0 () { ret; }\n" + "\n".join(
        f".func g{i} () {{ call g{i - 1}, (); call g{i - 1}, (); ret; }}" for i in range(1, 30)
    )
    with pytest.raises(PtxError, match="more than 200,000 instructions"):
        load(program(doubling, "call g29, ();")).ir("k", (32, 1, 1))
