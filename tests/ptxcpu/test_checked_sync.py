"""Checked mode: barriers, warp collectives, hung kernels, and orders of blocks and warps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkbench import SCHEDULES, clean, finds, floats, launch, module

from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.ptxcpu.checked import sanitizer
from ptxtrain.engine.ptxcpu.checked.compare import check_orders
from ptxtrain.engine.ptxcpu.checked.report import CheckError
from ptxtrain.engine.ptxcpu.checked.schedule import Schedule

OUT = [np.zeros(128, np.int32)]


KERNEL = """
extern "C" __global__ void k(int* out) {
    int t = threadIdx.x, lane = t % 32;
    __shared__ int s[128];
    s[t] = t;
    BODY
}
"""


def kernel(body: str) -> str:
    return KERNEL.replace("BODY", body)


BARRIER = 'asm volatile("bar.sync 0;" ::: "memory");'


@pytest.mark.parametrize(
    "body",
    [
        f"if (lane < 20) {{ {BARRIER} }} out[t] = s[t];",
        f"if (lane < 20) {{ {BARRIER} out[t] = 1; }} else {{ {BARRIER} out[t] = 2; }}",
        f"for (int i = 0; i < lane; i++) {{ {BARRIER} }} out[t] = s[t];",
        f"if (t == 77) {{ {BARRIER} }} out[t] = s[t];",
        f"switch (t % 3) {{ case 0: {BARRIER} break; case 1: out[t] = 5; break; default: out[t] = s[t]; }}",
    ],
)
def test_barriers_that_lanes_of_a_warp_do_not_reach(body: str) -> None:
    error = finds(kernel(body), OUT, "divergent barrier", block=128)
    assert "without lane" in str(error) and error.text.startswith("bar")


@pytest.mark.parametrize(
    "body",
    [
        f"if (lane >= 20) return; {BARRIER} out[t] = s[t];",  # those that have left do not count
        f"if (t >= 96) return; {BARRIER} out[t] = s[95 - t];",
        f"for (int i = 0; i < 3; i++) {{ if (lane == i) s[t] = i; {BARRIER} }} out[t] = s[t];",
        f"if (out[0] == 0) {{ {BARRIER} }} if (t < 127) out[1 + t] = s[t];",  # the same way for all
        f"if (t / 32 % 2) {{ {BARRIER} }} else {{ {BARRIER} }} out[t] = s[127 - t];",  # warps at two places
    ],
)
def test_barriers_that_all_reach(body: str) -> None:
    clean(kernel(body), OUT, block=128)


def test_a_partial_last_warp_is_whole() -> None:
    clean(kernel(f"{BARRIER} out[t] = s[49 - t];"), OUT, block=50)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('asm volatile("bar.sync %0;" :: "r"(t / 32));', "deadlock"),
        ('if (t < 32) asm volatile("bar.sync 1, 64;"); else asm volatile("bar.sync 2, 96;");', "deadlock"),
        ('if (t < 64) asm volatile("bar.sync 1;"); else asm volatile("bar.sync 2;");', "deadlock"),
        ('asm volatile("bar.sync 1, 40;");', "barrier count"),
        ('asm volatile("bar.sync 1, %0;" :: "r"(256));', "barrier count"),
        ('asm volatile("bar.sync %0;" :: "r"(out[0] + 16));', "barrier number"),
    ],
)
def test_barriers_that_cannot_be_right(body: str, kind: str) -> None:
    error = finds(kernel(f"{body} out[t] = 1;"), OUT, kind, block=128)
    if kind == "deadlock":
        assert "warp" in str(error) and "at line" in str(error)


def test_counted_barriers_of_parts_of_a_block() -> None:
    body = (
        'if (t < 64) asm volatile("bar.sync 1, 64;" ::: "memory"); else asm volatile("bar.sync 2, 64;" ::: "memory");'
    )
    clean(kernel(f"{body} out[t] = s[t ^ 63];"), OUT, block=128)


def test_reductions_at_barriers() -> None:
    clean(kernel("out[t] = __syncthreads_count(t % 3 == 0) + __syncthreads_or(t == 5) + s[127 - t];"), OUT, block=128)
    finds(
        kernel("if (lane) out[t] = __syncthreads_count(t % 3 == 0); __syncthreads(); out[t] += s[t];"),
        OUT,
        "divergent barrier",
        block=128,
    )


# Warp collectives

FULL = "0xffffffff"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("if (lane < 24) out[t] = __shfl_down_sync(0x00ffffff, t, 8);", "inactive lane"),
        (f"if (lane >= 24) return; out[t] = __shfl_xor_sync({FULL}, t, 16);", "inactive lane"),
        ("out[t] = __shfl_sync(0x0000ffff, t, lane + 1);", "inactive lane"),
        (f"if (lane < 16) out[t] = __shfl_sync({FULL}, t, 3);", "inactive lane"),
        (f"if (lane < 16) out[t] = __ballot_sync({FULL}, t);", "inactive lane"),
        ("if (lane < 16) out[t] = __any_sync(0xffff0000, t);", "inactive lane"),
        ("if (lane < 16) out[t] = __reduce_add_sync(0x1ffff, t);", "inactive lane"),
        (f"if (lane < 16) out[t] = __match_any_sync({FULL}, t);", "inactive lane"),
        ("if (lane < 16) __syncwarp(0xff); out[t] = 1;", "inactive lane"),
        ("if (lane < 16) __syncwarp(); __syncthreads(); out[t] = 1;", "divergent barrier"),
    ],
)  # fmt: skip
def test_collectives_without_some_of_their_lanes(body: str, kind: str) -> None:
    # Lanes that only skip to the kernel's end have left; here they have something to do.
    error = finds(kernel(f"{body} __syncthreads(); out[t] += s[t];"), OUT, kind, block=64)
    assert "lane" in str(error) or "mask" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        f"int v = t; for (int o = 16; o; o /= 2) v += __shfl_down_sync({FULL}, v, o); out[t] = v;",  # lanes past the end
        f"int v = t; for (int o = 16; o; o /= 2) v += __shfl_xor_sync({FULL}, v, o); out[t] = v;",
        f"out[t] = __shfl_up_sync({FULL}, t, 3) + __shfl_sync({FULL}, t, lane / 2, 16);",
        "if (lane < 16) out[t] = __shfl_xor_sync(0xffff, t, 8) + __ballot_sync(0xffff, t & 1);",
        "if (lane % 2) out[t] = __shfl_xor_sync(0xaaaaaaaa, t, 2);",
        f"if (lane >= 24) return; out[t] = __shfl_xor_sync({FULL}, t, 7) + __ballot_sync({FULL}, 1);",
        "if (lane < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000); out[t] = s[t];",
        "if (lane < 16) { __syncwarp(); out[t] = 1; } else { __syncwarp(); out[t] = 2; }",
        "unsigned m = __activemask(); out[t] = __popc(m) + __reduce_add_sync(m, t);",
    ],
)
def test_collectives_of_lanes_that_are_there(body: str) -> None:
    clean(kernel(body), OUT, block=64)


def test_a_shuffle_from_a_lane_that_does_not_exist() -> None:
    body = f"out[t] = __shfl_down_sync({FULL}, t, 16);"
    error = finds(kernel(body), OUT, "inactive lane", block=48)
    assert error.thread == (32, 0, 0) and "the value of lane 16" in str(error)
    clean(kernel(body), OUT, block=64)


INDEX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out) {
    .reg .b64 %o; .reg .b32 %t, %x, %l; .reg .pred %p;
    ld.param.u64 %o, [out];
    mov.u32 %t, %tid.x;
    add.u32 %l, %t, 5;
    shfl.sync.idx.b32 %xPREDICATE, %t, %l, CLAMP, 0xffffffff;
    mad.wide.u32 %o, %t, 4, %o;
    st.global.u32 [%o], %x;
    ret;
}
"""


def test_an_index_outside_of_the_segment() -> None:
    """Lanes 7 to 26 and 31 ask for a lane past the eleventh; with the predicate that is a question, without it a mistake."""
    text = INDEX.replace("CLAMP", "11")
    error = finds(text.replace("PREDICATE", ""), [np.zeros(32, np.int32)], "inactive lane")
    assert error.thread == (7, 0, 0) and "outside of its segment" in str(error)
    clean(text.replace("PREDICATE", "|%p"), [np.zeros(32, np.int32)])
    clean(INDEX.replace("CLAMP", "31").replace("PREDICATE", ""), [np.zeros(32, np.int32)])


MMA = r"""
extern "C" __global__ void k(float* out, const unsigned* x) {
    float d[4] = {0, 0, 0, 0};
    unsigned a[4], b[2];
    int t = threadIdx.x;
    if (t LIMIT) return;
    for (int i = 0; i < 4; i++) a[i] = x[32 * i + t];
    for (int i = 0; i < 2; i++) b[i] = x[128 + 32 * i + t];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int i = 0; i < 4; i++) out[32 * i + t] = d[i];
}
"""


def test_matrix_instructions_need_the_whole_warp() -> None:
    args = [np.zeros(128, np.float32), np.zeros(192, np.uint32)]
    finds(MMA.replace("LIMIT", "> 30"), args, "inactive lane")
    clean(MMA.replace("LIMIT", "> 31"), args)


LDMATRIX = r"""
extern "C" __global__ void k(unsigned* out, int shift, int rows) {
    __shared__ __align__(16) unsigned s[160];
    int t = threadIdx.x;
    for (int i = 0; i < rows; i++) s[32 * i + t] = 100 * i + t;
    SYNC
    unsigned r[4], at = (unsigned)__cvta_generic_to_shared(s + 4 * t + shift);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    for (int i = 0; i < 4; i++) out[32 * i + t] = r[i];
}
"""


def test_ldmatrix_reads_other_lanes_rows() -> None:
    source = LDMATRIX.replace("SYNC", "__syncwarp();")
    out = np.zeros(128, np.uint32)
    clean(source, [out, np.int32(0), np.int32(4)])
    finds(LDMATRIX.replace("SYNC", ""), [out, np.int32(0), np.int32(4)], "race")
    finds(source, [out, np.int32(2), np.int32(5)], "misaligned")
    finds(source, [out, np.int32(36), np.int32(5)], "out of bounds")
    error = finds(source, [out, np.int32(0), np.int32(3)], "uninitialised")
    assert error.thread == (24, 0, 0)


WMMA = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 a, .param .u32 stride) {
    .reg .b64 %o, %a; .reg .b32 %s, %r<8>; .reg .f32 %c<8>;
    ld.param.u64 %o, [out];
    ld.param.u64 %a, [a];
    ld.param.u32 %s, [stride];
    wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%a], %s;
    mov.b32 %c0, %r0; mov.b32 %c1, %r1; mov.b32 %c2, %r2; mov.b32 %c3, %r3;
    mov.b32 %c4, %r4; mov.b32 %c5, %r5; mov.b32 %c6, %r6; mov.b32 %c7, %r7;
    wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%o], {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7}, 16;
    ret;
}
"""


def test_wmma_reads_and_writes_whole_tiles() -> None:
    """Rows of 24 numbers: the last row ends 8 before the array's end."""
    a, out = np.zeros(16 * 24, np.float16), np.zeros((16, 16), np.float32)
    clean(WMMA, [out, a[:-8], np.uint32(24)])
    assert finds(WMMA, [out, a[:-9], np.uint32(24)], "out of bounds").allocation == "a"
    assert finds(WMMA, [out.reshape(-1)[:-1], a, np.uint32(24)], "out of bounds").allocation == "out"


# Kernels that hang

HUNG = {
    "a flag that nobody sets": "while (*(volatile int*)out == 0) { } out[1] = t;",
    "a flag that a lane sets too late": "while (*(volatile int*)out == 0) { } if (lane == 5) atomicExch(out, 1);",
    "a loop that never ends": "for (int i = 0; i >= 0; i = (i + 1) % 1000) out[t] = i;",
    "a lock that nobody gives back": "while (atomicCAS(out, 0, 1) != 0) { } out[1] = t;",
}


@pytest.mark.parametrize("case", HUNG)
def test_kernels_that_hang(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer.Sanitizer.__init__, "__kwdefaults__", {"rounds": 10_000})
    error = finds(kernel(HUNG[case]), OUT, "hung", block=64)
    assert "10,001 times" in str(error)


def test_a_lock_that_lanes_take_in_turn() -> None:
    body = "while (atomicCAS(out, 0, 1) != 0) { } out[1] += t; __threadfence(); atomicExch(out, 0);"
    assert clean(kernel(body), OUT, block=64)[0][1] == 63 * 32


def test_long_loops_are_not_hung() -> None:
    source = kernel("int v = t; for (int i = 0; i < 200000; i++) v = v * 5 + (v >> 3); out[t] = v;")
    clean(source, OUT, block=64)


# Orders

TICKETS = """
extern "C" __global__ void k(int* next, int* out) {
    __shared__ int mine;
    if (threadIdx.x % 32 == 0) out[atomicAdd(next, 1)] = blockIdx.x * 100 + threadIdx.x / 32;
}
"""


def test_orders_of_blocks_and_warps() -> None:
    """The tickets that warps draw show the order in which they run."""
    seen = {}
    for schedule in SCHEDULES:
        out = np.full(12, -1, np.int32)
        launch(TICKETS, [np.zeros(1, np.int32), out], grid=4, block=96, schedule=schedule)
        seen[schedule] = out.tolist()
    forward = [100 * b + w for b in range(4) for w in range(3)]
    assert seen["forward"] == forward and seen["reverse"] == forward[::-1]
    for schedule in ("random:1", "random:2"):
        assert sorted(seen[schedule]) == forward and seen[schedule] not in (forward, forward[::-1])
    assert seen["random:1"] != seen["random:2"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 32, 97, 1000])
@pytest.mark.parametrize("kind", ["forward", "reverse", "random:3", "random:4"])
def test_every_order_is_a_permutation(kind: str, count: int) -> None:
    factor, offset = Schedule.parse(kind).order(count, salt=11)
    assert sorted((i * factor + offset) % count for i in range(count)) == list(range(count))


def test_orders_that_do_not_exist() -> None:
    for text in ("backward", "random:x", "reverse:1", "random:-1"):
        with pytest.raises(PtxtrainError, match="choose forward, reverse, random"):
            Schedule.parse(text)


def test_results_that_depend_on_the_order_are_told() -> None:
    """Tickets are no race, yet who draws which depends on the schedule."""
    out = np.full(12, -1, np.int32)
    args = [np.zeros(1, np.int32), out]
    with pytest.raises(
        PtxtrainError, match=r"k \(<text>\): the result depends on the order .* k_param_1\[0\] is .* in forward"
    ):
        check_orders(module(TICKETS), "k", grid=(4, 1, 1), block=(96, 1, 1), args=args)
    assert out.tolist() == [100 * b + w for b in range(4) for w in range(3)]
    body = "atomicAdd(out + 1 + t % 7, t);"
    totals = np.zeros(16, np.int32)
    check_orders(module(kernel(body)), "k", grid=(3, 1, 1), block=(64, 1, 1), args=[totals])
    assert totals.sum() == 3 * 63 * 32


def test_checked_bits_are_the_unchecked_ones() -> None:
    source = """
    extern "C" __global__ void k(float* out, const float* x, int n) {
        __shared__ float s[64];
        extern __shared__ float d[];
        int i = blockIdx.x * 64 + threadIdx.x;
        float v = i < n ? x[i] : 0;
        float w = sinf(v) + expf(-v * v) / (1 + rsqrtf(fabsf(v) + 0.1f)), local[7];
        for (int j = 0; j < 7; j++) local[j] = w * j;
        s[threadIdx.x] = w; d[63 - threadIdx.x] = v;
        __syncthreads();
        for (int j = 1; j < 5; j++) w = fmaf(s[(threadIdx.x * j) % 64], local[(i + j) % 7], w * d[threadIdx.x]);
        for (int o = 16; o; o /= 2) w += __shfl_xor_sync(0xffffffff, w, o);
        if (i < n) out[i] = w;
    }"""
    x: Any = floats(1000)
    clean(source, [np.zeros(1000, np.float32), x, np.int32(1000)], grid=16, block=64, shared=256)


def test_a_finding_leaves_the_module_usable() -> None:
    bad, good = kernel("if (lane) __syncthreads(); out[t] = 1;"), kernel("out[t] = s[t];")
    for _ in range(3):
        with pytest.raises(CheckError):
            launch(bad, [OUT[0].copy()], block=64)
        out = np.zeros(64, np.int32)
        launch(good, [out], block=64)
        assert out.tolist() == list(range(64))
    assert module(bad).ready("k", (64, 1, 1)).checked is not None
