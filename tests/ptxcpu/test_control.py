"""Control flow, warps, barriers and memory: whole kernels on the CPU device against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from both import HEAD, check, entry, run_both

from ptxtrain.engine.errors import DeviceError, PtxtrainError
from ptxtrain.engine.ptxcpu import load

LOAD = "ld.global.u32 %x, [%in];\n"
STORE = "\nst.global.u32 [%out], %x;\n"

FLOW = {
    "if": "setp.lt.u32 %p1, %x, 5; @%p1 bra SMALL; add.u32 %x, %x, 1; SMALL: mul.lo.u32 %x, %x, 3;",
    "if else": """and.b32 %r1, %x, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra EVEN;
        mul.lo.u32 %x, %x, 3; add.u32 %x, %x, 1; bra JOIN; EVEN: shr.u32 %x, %x, 1; JOIN: xor.b32 %x, %x, 0x55;""",
    "nested": """setp.gt.u32 %p1, %x, 3; @!%p1 bra OUT; and.b32 %r1, %lane, 1; setp.ne.u32 %p2, %r1, 0;
        @%p2 bra ODD; add.u32 %x, %x, 100; setp.gt.u32 %p3, %lane, 16; @%p3 bra OUT; sub.u32 %x, %x, 7; bra OUT;
        ODD: setp.lt.u32 %p4, %x, 1000; @%p4 bra OUT; not.b32 %x, %x; OUT: add.u32 %x, %x, %lane;""",
    "loop with its own count in each lane": """and.b32 %r1, %x, 15; mov.u32 %r2, 0; mov.u32 %r3, 1;
        LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra END; mad.lo.u32 %r3, %r3, 5, %r2; add.u32 %r2, %r2, 1; bra LOOP;
        END: mov.u32 %x, %r3;""",
    "loop tested at its end": """mov.u32 %r2, %lane; LOOP: add.u32 %x, %x, %r2; sub.u32 %r2, %r2, 3; setp.gt.s32 %p1, %r2, 0;
        @%p1 bra LOOP;""",
    "loop with continue and break": """mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; setp.gt.u32 %p1, %r2, 20; @%p1 bra END;
        add.u32 %r4, %r2, %lane; and.b32 %r3, %r4, 3; setp.eq.u32 %p2, %r3, 1; @%p2 bra LOOP;
        add.u32 %x, %x, %r2; and.b32 %r5, %x, 63; setp.eq.u32 %p3, %r5, 63; @%p3 bra END; bra LOOP; END: xor.b32 %x, %x, 1;""",
    "loops in loops": """and.b32 %r1, %x, 3; mov.u32 %r2, 0; mov.u32 %r5, 0; OUTER: setp.gt.u32 %p1, %r2, %r1; @%p1 bra END;
        mov.u32 %r3, %lane; INNER: add.u32 %r5, %r5, %r3; shr.u32 %r3, %r3, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra INNER;
        add.u32 %r2, %r2, 1; bra OUTER; END: mov.u32 %x, %r5;""",
    "early return": """and.b32 %r1, %x, 1; setp.eq.u32 %p1, %r1, 0; @%p1 ret; setp.gt.u32 %p2, %lane, 20; @%p2 exit;
        add.u32 %x, %x, 5;""",
    "return inside a loop": """mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; add.u32 %x, %x, %r2; st.global.u32 [%out], %x;
        setp.gt.u32 %p1, %r2, %lane; @%p1 ret; setp.lt.u32 %p2, %r2, 25; @%p2 bra LOOP; not.b32 %x, %x;""",
    "swap under a branch": """mov.u32 %r1, %lane; mov.u32 %r2, 77; setp.lt.u32 %p1, %x, 1000; @%p1 bra KEEP;
        mov.u32 %r3, %r1; mov.u32 %r1, %r2; mov.u32 %r2, %r3; KEEP: shl.b32 %r1, %r1, 8; or.b32 %x, %r1, %r2;""",
    "guards": """setp.lt.u32 %p1, %x, 4; setp.gt.u32 %p2, %lane, 9; @%p1 add.u32 %x, %x, 1000; @!%p2 mul.lo.u32 %x, %x, 3;
        @%p1 setp.eq.u32 %p2, %lane, 3; @%p2 xor.b32 %x, %x, 0xFFFF; @!%p1 ld.global.u32 %x, [%in];""",
    "uniform branch over a divergent one": """mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST;
        setp.gt.u32 %p2, %x, 3; @%p2 bra JOIN; add.u32 %x, %x, 9; bra JOIN; FIRST: add.u32 %x, %x, 2; JOIN: add.u32 %x, %x, 1;""",
    "fall through three ways": """rem.u32 %r1, %x, 3; setp.eq.u32 %p1, %r1, 0; @%p1 bra A; setp.eq.u32 %p2, %r1, 1; @%p2 bra B;
        add.u32 %x, %x, 1; A: add.u32 %x, %x, 10; B: add.u32 %x, %x, 100;""",
    "switch": """and.b32 %r1, %x, 3; setp.eq.u32 %p1, %r1, 3; @%p1 bra END; TABLE: .branchtargets C0, C1, C2;
        brx.idx %r1, TABLE; C0: add.u32 %x, %x, 1; bra END; C1: add.u32 %x, %x, 20; bra END; C2: add.u32 %x, %x, 300; END:""",
    "registers first set under a branch": """mov.u32 %r1, 0; setp.gt.u32 %p1, %x, 4; @%p1 bra SET; bra USE;
        SET: mov.u32 %r1, %x; USE: add.u32 %x, %r1, 1;""",
}


@pytest.mark.parametrize("block", [(32, 1, 1), (80, 1, 1), (7, 1, 1)])
@pytest.mark.parametrize("flow", FLOW)
def test_flow(flow: str, block: tuple[int, int, int]) -> None:
    check(LOAD + FLOW[flow] + STORE, (2, 1, 1), block)


@pytest.mark.parametrize("block", [(8, 4, 1), (5, 3, 2), (16, 2, 3), (1, 1, 33)])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 3, 1), (1, 2, 2)])
def test_shapes(grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    names = [
        "tid.x",
        "tid.y",
        "tid.z",
        "ntid.y",
        "ctaid.x",
        "ctaid.y",
        "ctaid.z",
        "nctaid.x",
        "nctaid.z",
        "laneid",
        "warpid",
    ]
    names += ["lanemask_lt", "lanemask_ge", "lanemask_eq"]
    mix = "".join(f"mov.u32 %r1, %{name}; mad.lo.u32 %x, %x, 31, %r1;\n" for name in names)
    check("mov.u32 %x, 1;\n" + mix + STORE, grid, block)


LANES = {
    "shifts by the lane": """and.b32 %r1, %t, 31; shl.b32 %r2, 1, %r1; mov.u32 %r3, -1; shl.b32 %r4, %r3, %lane;
        shr.u32 %r5, %r3, %t; mov.u32 %r6, 0x80000000; shr.s32 %r7, %r6, %lane; not.b32 %r4, %r4;
        add.u32 %x, %r2, %r4; xor.b32 %x, %x, %r5;
        add.u32 %x, %x, %r7;""",
    "sums that wrap": """mad.lo.u32 %r1, %t, 0x40000000, 0x7FFFFFF0; sub.u32 %r2, %r1, %lane; sub.u32 %r2, %r2, %lane;
        shr.u32 %r3, %r2, 3; mad.wide.s32 %rd1, %r1, 4, 5; shr.u64 %rd1, %rd1, 7; cvt.u32.u64 %r4, %rd1; cvt.u64.u32 %rd2, %r2;
        shr.u64 %rd2, %rd2, 30; cvt.u32.u64 %r5, %rd2; add.u32 %x, %r3, %r4; add.u32 %x, %x, %r5;""",
    "masks": """and.b32 %r1, %t, 28; and.b32 %r2, %t, 0xFFFFFFF0; mul.lo.u32 %r3, %lane, 12; and.b32 %r4, %r3, 63;
        or.b32 %r5, %r3, 2; shl.b32 %r6, %t, 4; or.b32 %r6, %r6, 15; mad.lo.u32 %x, %r1, 31, %r2; mad.lo.u32 %x, %x, 31, %r4;
        mad.lo.u32 %x, %x, 31, %r5; xor.b32 %x, %x, %r6;""",
    "quotients": """shr.u32 %r1, %t, 2; div.u32 %r2, %t, 5; rem.u32 %r3, %t, 12; mov.u32 %r4, %ntid.x;
        rem.u32 %r5, %lane, %r4; neg.s32 %r6, %t; shr.s32 %r7, %r6, 2; cvt.s8.u32 %r8, %r6;
        mad.lo.u32 %x, %r1, 31, %r2; mad.lo.u32 %x, %x, 31, %r3;
        mad.lo.u32 %x, %x, 31, %r5; mad.lo.u32 %x, %x, 31, %r7; add.u32 %x, %x, %r8;""",
}


@pytest.mark.parametrize("block", [(32, 1, 1), (80, 1, 1), (8, 4, 3)])
@pytest.mark.parametrize("kind", LANES)
def test_values_that_follow_the_lane(kind: str, block: tuple[int, int, int]) -> None:
    """What a compiler may keep as a base and a stride, at the places where that stops being true."""
    check(LANES[kind] + STORE, (2, 1, 1), block)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_make_no_difference(threads: int) -> None:
    source = entry(LOAD + FLOW["loop with its own count in each lane"] + STORE)
    values = np.random.default_rng(1).integers(0, 1 << 32, 40 * 64, dtype=np.uint32)
    run_both(source, (40, 1, 1), (64, 1, 1), [values, np.zeros_like(values)], threads=threads)


SHUFFLES = [
    (mode, b, c)
    for mode, clamps in (
        ("up", (0, 0x1000, 0x1800)),
        ("down", (31, 0x181F, 0x101F)),
        ("bfly", (31, 0x1C1F)),
        ("idx", (31, 0x181F)),
    )
    for c in clamps
    for b in (0, 1, 3, 8, 17, 31, 33)
]


@pytest.mark.parametrize("block", [32, 64])
def test_shuffles(block: int) -> None:
    """All modes, distances and segments; both results; distances that differ between lanes."""
    text = "mov.u32 %r1, 0;\n"
    for mode, b, c in SHUFFLES:
        text += f"shfl.sync.{mode}.b32 %r2|%p1, %x, {b}, {c}, -1; selp.b32 %r3, 1, 2, %p1;\n"
        text += "mad.lo.u32 %r1, %r1, 31, %r2; mad.lo.u32 %r1, %r1, 7, %r3;\n"
    text += "shfl.sync.idx.b32 %r2, %x, %x, 31, -1; add.u32 %r1, %r1, %r2;\n"
    text += (
        "and.b32 %r4, %x, 7; shfl.sync.bfly.b32 %r2|%p1, %x, %r4, 0x181F, -1; add.u32 %r1, %r1, %r2; mov.u32 %x, %r1;"
    )
    check(LOAD + text + STORE, (2, 1, 1), (block, 1, 1))


def test_collectives() -> None:
    text = """setp.lt.u32 %p1, %x, 1000;
    vote.sync.ballot.b32 %r1, %p1, -1; vote.sync.ballot.b32 %r2, !%p1, 0xFFFFFFFF;
    vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1; vote.sync.uni.pred %p4, %p1, -1;
    selp.b32 %r3, 1, 0, %p2; selp.b32 %r4, 2, 0, %p3; selp.b32 %r5, 4, 0, %p4; or.b32 %r3, %r3, %r4; or.b32 %r3, %r3, %r5;
    and.b32 %r6, %x, 3; match.any.sync.b32 %r7, %r6, -1; match.all.sync.b32 %r8|%p5, %r6, -1; selp.b32 %r9, 8, 16, %p5;
    redux.sync.add.s32 %r10, %x, -1; redux.sync.min.u32 %r11, %x, -1; redux.sync.max.s32 %r12, %x, -1;
    redux.sync.xor.b32 %r13, %x, -1; redux.sync.or.b32 %r14, %x, -1; redux.sync.and.b32 %r15, %x, -1;
    """ + "".join(f"mad.lo.u32 %x, %x, 31, %r{i};" for i in (1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15))
    check(LOAD + text + STORE, (3, 1, 1), (64, 1, 1))


def test_collectives_of_some_lanes() -> None:
    """Inside a divergent branch, with a mask of those who are there."""
    text = """setp.ge.u32 %p1, %lane, 12; @%p1 bra REST;
    shfl.sync.down.b32 %r1, %x, 1, 31, 0xFFF; redux.sync.add.u32 %r2, %x, 0xFFF; vote.sync.ballot.b32 %r3, %p1, 0xFFF;
    bar.warp.sync 0xFFF; setp.eq.u32 %p2, %lane, 11; selp.b32 %r1, 0, %r1, %p2; add.u32 %x, %r1, %r2; xor.b32 %x, %x, %r3;
    REST: add.u32 %x, %x, 1;"""
    check(LOAD + text + STORE, (1, 1, 1), (96, 1, 1))


BARRIERS = {
    "reverse": """mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1; st.shared.u32 [%r2], %x; bar.sync 0;
        mov.u32 %r3, %ntid.x; sub.u32 %r3, %r3, %t; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %x, [%r3+-4];""",
    "sum in a tree": """mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1; st.shared.u32 [%r2], %x; bar.sync 0; mov.u32 %r3, 64;
        LOOP: mov.u32 %r5, %ntid.x; add.u32 %r6, %t, %r3; setp.lt.u32 %p1, %t, %r3; setp.lt.and.u32 %p1, %r6, %r5, %p1;
        @!%p1 bra SKIP; mad.lo.u32 %r7, %r3, 4, %r2; ld.shared.u32 %r8, [%r7]; ld.shared.u32 %r9, [%r2]; add.u32 %r9, %r9, %r8;
        st.shared.u32 [%r2], %r9; SKIP: bar.sync 0; shr.u32 %r3, %r3, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra LOOP;
        ld.shared.u32 %x, [tile];""",
    "named": """mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1; st.shared.u32 [%r2], %x; barrier.sync 3;
        xor.b32 %r3, %t, 1; mad.lo.u32 %r3, %r3, 4, %r1; mov.u32 %r4, %ntid.x; ld.shared.u32 %x, [%r3]; mov.u32 %r5, 2;
        bar.sync %r5; add.u32 %x, %x, 1; st.shared.u32 [%r2], %x; bar.sync 0; ld.shared.u32 %x, [%r3];""",
    "some threads have left": """setp.gt.u32 %p1, %t, 69; @%p1 ret; mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1;
        st.shared.u32 [%r2], %x; bar.sync 0; ld.shared.u32 %r3, [tile+8]; add.u32 %x, %x, %r3;""",
}


@pytest.mark.parametrize("block", [32, 64, 80, 96])
@pytest.mark.parametrize("kind", BARRIERS)
def test_barriers(kind: str, block: int) -> None:
    check(LOAD + BARRIERS[kind] + STORE, (3, 1, 1), (block, 1, 1), ".shared .align 4 .b8 tile[512];\n")


def test_barrier_inside_a_uniform_loop() -> None:
    text = """mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1; add.u32 %r4, %t, 1; mov.u32 %r5, %ntid.x; rem.u32 %r4, %r4, %r5;
    mad.lo.u32 %r4, %r4, 4, %r1; mov.u32 %r3, 0;
    LOOP: st.shared.u32 [%r2], %x; bar.sync 0; ld.shared.u32 %r6, [%r4]; mad.lo.u32 %x, %x, 3, %r6; bar.sync 0;
    add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 5; @%p1 bra LOOP;"""
    check(LOAD + text + STORE, (2, 1, 1), (96, 1, 1), ".shared .align 4 .b8 tile[512];\n")


def test_dynamic_shared_memory() -> None:
    text = """mov.u32 %r1, dynamic; mad.lo.u32 %r2, %t, 4, %r1; st.shared.u32 [%r2], %x; mov.u32 %r5, 1;
    st.shared.u32 [fixed], %r5; bar.sync 0;
    xor.b32 %r3, %t, 3; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %x, [%r3]; ld.shared.u32 %r4, [fixed];
    add.u32 %x, %x, %r4;"""
    declared = ".extern .shared .align 16 .b8 dynamic[];\n.shared .align 4 .b8 fixed[20];\n"
    check(LOAD + text + STORE, (2, 1, 1), (64, 1, 1), declared, shared=256)


MEMORY = {
    "bytes": """ld.global.u8 %h1, [%in]; ld.global.s8 %r1, [%in+1]; ld.global.u8 %r2, [%in+2]; ld.global.s8 %h2, [%in+3];
        cvt.u32.u16 %r3, %h1; cvt.u32.u16 %r4, %h2; mad.lo.u32 %x, %r1, 31, %r2; mad.lo.u32 %x, %x, 31, %r3;
        mad.lo.u32 %x, %x, 31, %r4; st.global.u8 [%out], %x; st.global.b8 [%out+1], %h2; st.global.s8 [%out+2], %r1;
        ret;""",
    "halves": """ld.global.u16 %r1, [%in]; ld.global.s16 %r2, [%in+2]; ld.global.s16 %rd1, [%in+2]; cvt.u32.u64 %r3, %rd1;
        shr.u64 %rd2, %rd1, 32; cvt.u32.u64 %r4, %rd2; mad.lo.u32 %x, %r1, 31, %r2; mad.lo.u32 %x, %x, 31, %r3;
        mad.lo.u32 %x, %x, 31, %r4;""",
    "words into wide registers": """ld.global.s32 %rd1, [%in]; ld.global.u32 %rd2, [%in]; shr.u64 %rd1, %rd1, 20;
        add.u64 %rd1, %rd1, %rd2; cvt.u32.u64 %x, %rd1; st.global.u32 [%out], %rd1;""",
    "local": """mov.u64 %rd1, depot; mov.u32 %r1, 0; FILL: mad.lo.u32 %r2, %r1, %x, %lane; mad.wide.u32 %rd2, %r1, 4, %rd1;
        st.local.u32 [%rd2], %r2; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 8; @%p1 bra FILL; and.b32 %r3, %x, 7;
        mad.wide.u32 %rd2, %r3, 4, %rd1; ld.local.u32 %x, [%rd2]; ld.local.v4.u32 {%r4, %r5, %r6, %r7}, [depot+16];
        add.u32 %x, %x, %r6; cvta.local.u64 %rd3, %rd1; ld.u32 %r8, [%rd3+4]; xor.b32 %x, %x, %r8;""",
    "generic shared": """mov.u64 %rd1, tile; cvta.shared.u64 %rd2, %rd1; mad.wide.u32 %rd3, %t, 4, %rd2; st.u32 [%rd3], %x;
        bar.sync 0; cvta.to.shared.u64 %rd4, %rd3; xor.b64 %rd4, %rd4, 4; ld.shared.u32 %x, [%rd4]; cvta.shared.u64 %rd5, tile;
        ld.u32 %r1, [%rd5+8]; add.u32 %x, %x, %r1; cvta.to.global.u64 %rd6, %in; ld.u32 %r2, [%rd6]; add.u32 %x, %x, %r2;""",
    "constants and globals": """and.b32 %r1, %x, 3; mov.u64 %rd1, table; mad.wide.u32 %rd1, %r1, 4, %rd1;
        ld.const.u32 %r2, [%rd1];
        ld.const.u32 %r3, [table+4]; ld.global.u64 %rd2, [where+8]; ld.global.u32 %r4, [%rd2]; ld.global.u32 %r5, [many+8];
        add.u32 %x, %r2, %r3; mad.lo.u32 %x, %x, 31, %r4; mad.lo.u32 %x, %x, 31, %r5;""",
    "same address": """ld.param.u64 %rd1, [p_in]; ld.global.u32 %r1, [%rd1]; ld.global.nc.u32 %r2, [%rd1+4];
        ld.global.L1::no_allocate.L2::128B.u32 %r3, [%rd1+8]; add.u32 %x, %x, %r1; add.u32 %x, %x, %r2; xor.b32 %x, %x, %r3;""",
    "gather": """mov.u32 %r1, %ntid.x; rem.u32 %r2, %x, %r1; ld.param.u64 %rd1, [p_in]; mad.wide.u32 %rd1, %r2, 4, %rd1;
        ld.global.u32 %x, [%rd1];""",
    "scatter": """ld.param.u64 %rd1, [p_out]; mul.lo.u32 %r1, %g, 7; mov.u32 %r2, %ntid.x; mov.u32 %r3, %nctaid.x;
        mul.lo.u32 %r2, %r2, %r3; rem.u32 %r1, %r1, %r2; mad.wide.u32 %rd1, %r1, 4, %rd1; st.global.u32 [%rd1], %x; ret;""",
    "not under the guard": """mov.u64 %rd1, 0; setp.lt.u32 %p1, %x, 7; @%p1 mov.u64 %rd1, %in; @%p1 ld.global.u32 %r1, [%rd1];
        @!%p1 mov.u32 %r1, 5; add.u32 %x, %x, %r1;""",
    "bits as floats": """ld.global.f32 %f1, [%in]; mov.b32 %r1, %f1; mov.b32 {%h1, %h2}, %r1; mov.b32 %x, {%h2, %h1};
        mov.b64 %rd1, {%r1, %x}; mov.b64 {_, %r2}, %rd1; mov.b64 {%h3, %h4, %h5, %h6}, %rd1; mov.b32 %r3, {%h6, 7};
        add.u32 %x, %r2, %r3;""",
}


@pytest.mark.parametrize("kind", MEMORY)
def test_memory(kind: str) -> None:
    declared = """.shared .align 16 .b8 tile[512];
    .const .align 4 .u32 table[4] = {10, 20, 30, 40};
    .global .u32 many[2][2] = {{1, 2}, {3}};
    .global .u64 where[2] = {0, many+4};
    """
    local = ".local .align 16 .b8 depot[64];\n"
    block = 64 if kind == "generic shared" else 80
    check(local + LOAD + MEMORY[kind] + STORE, (2, 1, 1), (block, 1, 1), declared)


@pytest.mark.parametrize(
    ("type", "width"),
    [(t, w) for t in ("u8", "s8", "u16", "b16", "u32", "f32", "b64") for w in (2, 4) if w * int(t[1:]) <= 128],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_vectors(type: str, width: int, space: str) -> None:
    bits = int(type[1:])
    nbytes = width * bits // 8
    register = {8: "b16", 16: "b16", 32: "b32", 64: "b64"}[bits]
    names = ", ".join(f"%v{i}" for i in range(width))
    back = ", ".join(f"%v{i}" for i in reversed(range(width)))
    store = f"st.global.v{width}.{type} [%b], {{{back}}};"
    if space == "shared":
        store = f""".reg .b32 %s; mov.u32 %s, tile; mad.lo.u32 %s, %t, {nbytes}, %s;
        st.shared.v{width}.{type} [%s], {{{back}}}; ld.shared.v{width}.{type} {{{names}}}, [%s];
        st.global.v{width}.{type} [%b], {{{names}}};"""
    source = f"""{HEAD}.shared .align 16 .b8 tile[2048];
    .visible .entry k(.param .u64 p_in, .param .u64 p_out, .param .u32 n) {{
    .reg .{register} %v<4>; .reg .b64 %a, %b; .reg .b32 %t, %n; .reg .pred %p;
    mov.u32 %t, %tid.x; ld.param.u32 %n, [n]; setp.ge.u32 %p, %t, %n; @%p ret; ld.param.u64 %a, [p_in]; ld.param.u64 %b, [p_out];
    mad.wide.u32 %a, %t, {nbytes}, %a; mad.wide.u32 %b, %t, {nbytes}, %b;
    ld.global.v{width}.{type} {{{names}}}, [%a]; {store} ret; }}"""
    data = np.random.default_rng(7).integers(0, 256, 80 * nbytes, dtype=np.uint8)
    run_both(source, (1, 1, 1), (80, 1, 1), [data, np.zeros_like(data), np.uint32(75)])


def test_atomics() -> None:
    """Integer atomics, whose sums do not depend on who is first; all threads on few addresses."""
    text = """and.b32 %r1, %x, 3; ld.param.u64 %rd1, [p_out]; mad.wide.u32 %rd2, %r1, 4, %rd1;
    red.global.add.u32 [%rd2], %x; atom.global.max.u32 %r2, [%rd1+16], %x; red.global.or.b32 [%rd1+20], %x;
    atom.global.min.s32 %r3, [%rd1+24], %x; red.global.and.b32 [%rd1+28], %x; atom.global.xor.b32 %r4, [%rd1+32], %x;
    atom.global.inc.u32 %r5, [%rd1+36], 6; mov.u32 %r6, tile; mad.lo.u32 %r6, %r1, 4, %r6; atom.shared.add.u32 %r7, [%r6], 1;
    bar.sync 0; setp.gt.u32 %p1, %t, 3; @%p1 ret; mad.lo.u32 %r8, %t, 4, 0; mov.u32 %r9, tile; add.u32 %r8, %r8, %r9;
    ld.shared.u32 %r9, [%r8]; mad.wide.u32 %rd3, %t, 4, %rd1; red.global.add.u32 [%rd3+40], %r9; ret;"""
    zero = "setp.lt.u32 %p2, %t, 4; mov.u32 %r20, tile; mad.lo.u32 %r20, %t, 4, %r20; @%p2 st.shared.u32 [%r20], 0; bar.sync 0;\n"
    check(zero + LOAD + text + STORE, (3, 1, 1), (80, 1, 1), ".shared .align 4 .b8 tile[16];\n")


def test_parameters_of_every_size() -> None:
    source = f"""{HEAD}.visible .entry k(.param .u64 p_out, .param .u8 a, .param .u16 b, .param .f32 c, .param .f64 d,
        .param .align 8 .b8 s[16], .param .s8 e) {{
    .reg .b64 %p, %d, %q; .reg .b32 %r<9>;
    ld.param.u64 %p, [p_out]; ld.param.u8 %r1, [a]; ld.param.u16 %r2, [b]; ld.param.b32 %r3, [c]; ld.param.b64 %d, [d];
    ld.param.u32 %r4, [s]; ld.param.b64 %q, [s+8]; ld.param.s8 %r5, [e]; ld.param.v2.u32 {{%r6, %r7}}, [s];
    st.global.u32 [%p], %r1; st.global.u32 [%p+4], %r2; st.global.u32 [%p+8], %r3; st.global.u32 [%p+12], %r4;
    st.global.b64 [%p+16], %d; st.global.b64 [%p+24], %q; st.global.u32 [%p+32], %r5; st.global.v2.u32 [%p+40], {{%r6, %r7}};
    ret; }}"""
    struct = np.void(bytes(range(16)))
    args = [
        np.zeros(12, np.uint32),
        np.uint8(200),
        np.uint16(60000),
        np.float32(1.5),
        np.float64(-2.5),
        struct,
        np.int8(-3),
    ]
    run_both(source, (1, 1, 1), (1, 1, 1), args)


def test_division_by_zero_does_not_trap() -> None:
    """The quotient is left open; the other lanes' are right and the process lives."""
    for type in ("u32", "s32", "u64", "s64", "u16", "s16"):
        bits = int(type[1:])
        register = f"b{bits}"
        source = f"""{HEAD}.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 q) {{
        .reg .{register} %x, %y, %z; .reg .b64 %p<3>; .reg .b32 %t; mov.u32 %t, %tid.x;
        ld.param.u64 %p0, [a]; ld.param.u64 %p1, [b]; ld.param.u64 %p2, [q];
        mad.wide.u32 %p0, %t, {bits // 8}, %p0; mad.wide.u32 %p1, %t, {bits // 8}, %p1; mad.wide.u32 %p2, %t, {bits // 8}, %p2;
        ld.global.{register} %x, [%p0]; ld.global.{register} %y, [%p1]; div.{type} %z, %x, %y; st.global.{register} [%p2], %z;
        rem.{type} %z, %x, %y; ret; }}"""
        dtype = np.dtype(f"{'i' if type[0] == 's' else 'u'}{bits // 8}")
        a = np.full(32, np.iinfo(dtype).min if type[0] == "s" else 7, dtype)
        b = np.zeros(32, dtype)
        b[1], b[2], a[3], b[3] = (-1 if type[0] == "s" else 1), 0, 9, 2
        out = np.zeros(32, dtype)
        load(source).launch("k", grid=(1, 1, 1), block=(32, 1, 1), args=[a, b, out])
        assert out[3] == 4


def test_wrong_launches() -> None:
    module = load(entry(STORE))
    array = np.zeros(32, np.uint32)
    with pytest.raises(PtxtrainError, match=r"takes 2 arguments"):
        module.launch("k", grid=(1, 1, 1), block=(32, 1, 1), args=[array])
    with pytest.raises(PtxtrainError, match=r"no entry called other"):
        module.launch("other", grid=(1, 1, 1), block=(32, 1, 1), args=[array, array])
    with pytest.raises(PtxtrainError, match=r"grid"):
        module.launch("k", grid=(0, 1, 1), block=(32, 1, 1), args=[array, array])
    with pytest.raises(PtxtrainError):
        module.launch("k", grid=(1, 1, 1), block=(2048, 1, 1), args=[array, array])
    with pytest.raises(PtxtrainError):
        module.launch("k", grid=(1, 1, 1), block=(32, 1, 1), args=[array[::2], array])
    with pytest.raises(PtxtrainError, match="4 bytes"):
        module.launch("k", grid=(1, 1, 1), block=(32, 1, 1), args=[np.uint32(1), array])


def test_trap_is_reported() -> None:
    module = load(entry("setp.eq.u32 %p1, %t, 40; @%p1 trap;"))
    array = np.zeros(64, np.uint32)
    with pytest.raises(DeviceError, match=r"k"):
        module.launch("k", grid=(1, 1, 1), block=(64, 1, 1), args=[array, array])
