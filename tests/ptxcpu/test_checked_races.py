"""Checked mode: races in shared memory between barriers, and in global memory between blocks of a launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkbench import SCHEDULES, clean, finds, floats, launch

from ptxtrain.engine.ptxcpu.checked.report import CheckError

# The block softmax of llm.c (dev/cuda/softmax_forward.cu, softmax_forward_kernel4): the maximum is read from
# storage[0] after a barrier, and warp 0 puts the sum there with no barrier between.
SOFTMAX = """
__device__ float warp_max(float v) {
    for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, o));
    return v;
}
__device__ float warp_sum(float v) {
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
    return v;
}
extern "C" __global__ void k(float* out, const float* inp, int C) {
    extern __shared__ float shared[];
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, warps = blockDim.x / 32;
    float* storage = shared;
    const float* x = inp + (long long)blockIdx.x * C;
    float* y = out + (long long)blockIdx.x * C;
    float most = -1e30f;
    for (int i = tid; i < C; i += blockDim.x) most = fmaxf(most, x[i]);
    most = warp_max(most);
    if (lane == 0) storage[warp] = most;
    __syncthreads();
    if (tid == 0) {
        float value = storage[tid];
        for (int i = 1; i < warps; i++) value = fmaxf(value, storage[i]);
        storage[0] = value;
    }
    __syncthreads();
    float offset = storage[0];
    for (int i = tid; i < C; i += blockDim.x) y[i] = expf(x[i] - offset);
    float sum = 0;
    for (int i = tid; i < C; i += blockDim.x) sum += y[i];
    sum = warp_sum(sum);
    BARRIER
    if (lane == 0) storage[warp] = sum;
    __syncthreads();
    if (tid == 0) {
        float value = storage[tid];
        for (int i = 1; i < warps; i++) value += storage[i];
        storage[0] = value;
    }
    __syncthreads();
    sum = storage[0];
    for (int i = tid; i < C; i += blockDim.x) y[i] = y[i] / sum;
}
"""


def test_softmax_that_overwrites_the_maximum_before_every_warp_has_read_it() -> None:
    x = floats(3, 300)
    args = [np.zeros_like(x), x, np.int32(300)]
    error = finds(SOFTMAX.replace("BARRIER", ""), args, "race", grid=3, block=128, shared=16)
    assert error.allocation == "dynamic shared memory" and error.offset == 0
    assert "no barrier between" in str(error) and error.other_line not in (None, error.line)
    result = clean(SOFTMAX.replace("BARRIER", "__syncthreads();"), args, grid=3, block=128, shared=16)[0]
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.abs(result - exact / exact.sum(1, keepdims=True)).max() < 1e-6


MATMUL = """
extern "C" __global__ void k(float* c, const float* a, const float* b, int n) {
    __shared__ float as[16][16], bs[16][16];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * 16 + ty, column = blockIdx.x * 16 + tx;
    float sum = 0;
    for (int k0 = 0; k0 < n; k0 += 16) {
        as[ty][tx] = a[row * n + k0 + tx];
        bs[ty][tx] = b[(k0 + ty) * n + column];
        FIRST
        for (int i = 0; i < 16; i++) sum = fmaf(as[ty][i], bs[i][tx], sum);
        SECOND
    }
    c[row * n + column] = sum;
}
"""


@pytest.mark.parametrize("missing", ["FIRST", "SECOND"])
def test_tiled_matmul_without_one_of_its_barriers(missing: str) -> None:
    a, b = floats(48, 48), floats(48, 48, seed=1)
    args = [np.zeros_like(a), a, b, np.int32(48)]
    shape: dict[str, Any] = {"grid": (3, 3, 1), "block": (16, 16, 1)}
    broken = MATMUL.replace(missing, "").replace("FIRST", "__syncthreads();").replace("SECOND", "__syncthreads();")
    error = finds(broken, args, "race", "uninitialised", **shape)
    assert error.size == 1024
    right = MATMUL.replace("FIRST", "__syncthreads();").replace("SECOND", "__syncthreads();")
    result = clean(right, args, **shape)[0]
    assert np.allclose(result, a @ b, atol=1e-4)


PAIRS = r"""
extern "C" __global__ void k(int* out) {
    __shared__ SHARED s[256];
    int t = threadIdx.x;
    s[t] = t;
    __syncthreads();
    int v = 0;
    BODY
    __syncthreads();
    out[t] = v + s[t];
}
"""
# Bodies with a mistake, and what makes it right.
BODIES = {
    "read after write, next thread": ("s[t] = t + 1; SYNC v = s[(t + 1) % 64];", "__syncthreads();"),
    "read after write, other warp": ("s[t] = t + 1; SYNC v = s[63 - t];", "__syncthreads();"),
    "write after read, other warp": ("v = s[63 - t]; SYNC s[t] = v;", "__syncthreads();"),
    "write after read, next thread": ("v = s[t ^ 1]; SYNC s[t] = v;", "__syncwarp();"),
    "write after write": ("s[t] = v + 1; SYNC s[63 - t] = t;", "__syncthreads();"),
    "one writes, all read": ("if (t == 7) s[0] = 9; SYNC v = s[0];", "__syncthreads();"),
    "all read, one writes": ("v = s[0]; SYNC if (t == 7) s[0] = 9;", "__syncthreads();"),
    "within a warp": ("s[t] = t + 2; SYNC v = s[t ^ 16];", "__syncwarp();"),
    "one warp's lanes in a loop": ("for (int i = 1; i < 32; i *= 2) { v += s[t ^ i]; SYNC s[t] = v; SYNC }", "__syncwarp();"),
    "neighbours in one word": ("s[t] = t + 1; SYNC v = s[t ^ 33];", "__syncthreads();"),
}  # fmt: skip


@pytest.mark.parametrize("type_", ["int", "unsigned char", "short", "double"])
@pytest.mark.parametrize("case", BODIES)
def test_pairs_of_accesses(case: str, type_: str) -> None:
    body, fix = BODIES[case]
    source = PAIRS.replace("SHARED", type_).replace("BODY", body)
    args = [np.zeros(64, np.int32)]
    error = finds(source.replace("SYNC", ""), args, "race", block=64)
    assert error.allocation is not None and error.other_line is not None
    clean(source.replace("SYNC", fix), args, block=64)


RIGHT = {
    "each thread its own": "s[t] = 1; v = s[t]; s[t] = v + 1; v = s[t];",
    "own bytes of one word": "((unsigned char*)s)[t] = t; v = ((unsigned char*)s)[t]; ((unsigned char*)s)[t] = v;",
    "own bytes, then the own word": "v = ((char*)s)[4 * t + 1]; v += s[t]; s[t] = v;",
    "many readers": "v = s[0] + s[t] + s[63 - t]; v += s[1];",
    "one value for all": "s[3] = 5; __syncthreads(); v = s[3];",
    "a flag that several set": "if (t % 3 == 0) s[0] = 1; __syncthreads(); v = s[0];",
    "atomics": "atomicAdd(s, 1); atomicAdd(s + t % 5, t); __syncthreads(); v = s[0];",
    "volatile flags": "if (t == 0) *(volatile int*)s = 7; else v = 0 * *(volatile int*)s;",
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_no_race(case: str) -> None:
    clean(PAIRS.replace("SHARED", "int").replace("BODY", RIGHT[case]), [np.zeros(64, np.int32)], block=64)


WRONG = {
    "atomics and a plain read": "atomicAdd(s, 1); v = s[0];",
    "atomics and a plain write": "atomicAdd(s, 1); if (t == 40) s[0] = 0;",
    "two values in one store": "s[t / 2] = t;",
    "all lanes to one place": "s[3] = t;",
    "two warps to one place": "if (t % 32 == 0) s[3] = t;",
    "a byte that another thread has read": "if (t == 40) v = ((char*)s)[9]; if (t == 41) { v = s[2]; ((char*)s)[9] = 1; }",
    "a byte of a word that another thread has read": "if (t == 40) v = s[2]; if (t == 41) ((char*)s)[11] = 1;",
    "overlapping wide stores": "if (t < 2) { int2* p = (int2*)(s + 2 * (t * 0)); *p = make_int2(t, t); }",
}


@pytest.mark.parametrize("case", WRONG)
def test_more_races(case: str) -> None:
    finds(PAIRS.replace("SHARED", "int").replace("BODY", WRONG[case]), [np.zeros(64, np.int32)], "race", block=64)


NAMED = r"""
#define SYNC(id, n) asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory")
#define ARRIVE(id, n) asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory")
extern "C" __global__ void k(int* out) {
    __shared__ int ring[2][32];
    int t = threadIdx.x, warp = t / 32, lane = t % 32, total = 0;
    if (warp == 0) {                       // the producer fills one of two stages
        for (int i = 0; i < 6; i++) {
            if (i >= 2) SYNC(3 + i % 2, 96);
            ring[i % 2][lane] = 100 * i + lane;
            ARRIVE(1 + i % 2, 96);
        }
    } else {                               // two warps read it
        for (int i = 0; i < 6; i++) {
            SYNC(1 + i % 2, 96);
            EARLY
            total += ring[i % 2][(lane + warp) % 32];
            LATE
        }
    }
    out[t] = total;
}
"""


def test_producers_and_consumers_at_named_barriers() -> None:
    args = [np.zeros(96, np.int32)]
    arrive = "if (i < 4) ARRIVE(3 + i % 2, 96);"
    result = clean(NAMED.replace("EARLY", "").replace("LATE", arrive), args, block=96)[0]
    lanes = np.arange(32)
    assert np.array_equal(result[32:64], 1500 + 6 * ((lanes + 1) % 32))
    # The stage is given back before it has been read.
    finds(NAMED.replace("EARLY", arrive).replace("LATE", ""), args, "race", block=96)


def test_a_barrier_of_two_warps_does_not_order_a_third() -> None:
    source = r"""
    extern "C" __global__ void k(int* out) {
        __shared__ int s[96];
        int t = threadIdx.x;
        s[t] = t;
        if (t < 64) asm volatile("bar.sync 1, 64;" ::: "memory");
        THIRD
        out[t] = s[FROM];
    }"""
    args = [np.zeros(96, np.int32)]
    clean(source.replace("THIRD", "").replace("FROM", "t < 64 ? 63 - t : t"), args, block=96)
    finds(source.replace("THIRD", "").replace("FROM", "95 - t"), args, "race", "uninitialised", block=96)
    clean(source.replace("THIRD", "__syncthreads();").replace("FROM", "95 - t"), args, block=96)


def test_what_two_barriers_hand_on_is_ordered() -> None:
    """Warp 0 to warp 1 at barrier 1, warp 1 to warp 2 at barrier 2."""
    source = r"""
    extern "C" __global__ void k(int* out) {
        __shared__ int s[32];
        int t = threadIdx.x, lane = t % 32;
        if (t < 32) { s[lane] = lane; asm volatile("bar.arrive 1, 64;" ::: "memory"); }
        else if (t < 64) {
            asm volatile("bar.sync 1, 64;" ::: "memory");
            asm volatile("bar.arrive 2, 64;" ::: "memory");
        } else { asm volatile("bar.sync 2, 64;" ::: "memory"); out[lane] = s[31 - lane]; }
    }"""
    assert clean(source, [np.zeros(32, np.int32)], block=96)[0].tolist() == list(range(31, -1, -1))


def test_flags_with_fences_order_warps() -> None:
    source = r"""
    extern "C" __global__ void k(int* out) {
        __shared__ int data[32], more[32];
        __shared__ int flag;
        int t = threadIdx.x, lane = t % 32;
        if (t == 0) flag = 0;
        __syncthreads();
        if (t < 32) {
            data[lane] = lane;
            FENCE
            __syncwarp();
            if (lane == 0) *(volatile int*)&flag = 1;
        } else {
            while (*(volatile int*)&flag == 0) { }
            FENCE
            more[lane] = data[31 - lane];
            out[lane] = more[lane];
        }
    }"""
    launch(source.replace("FENCE", "__threadfence_block();"), [np.zeros(32, np.int32)], block=64)
    with pytest.raises(CheckError, match="race"):
        launch(source.replace("FENCE", ""), [np.zeros(32, np.int32)], block=64)


def test_a_warp_that_left_and_a_barrier_of_the_others() -> None:
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ int s[64];
        int t = threadIdx.x;
        if (t < 32) { s[t] = t; return; }
        __syncthreads();
        out[t - 32] = s[t - 32];
    }"""
    launch(source, [np.zeros(32, np.int32)], block=64)


# Global memory

BLOCKS = """
extern "C" __global__ void k(int* out, int* x, int n) {
    int i = INDEX;
    if (i < n) { BODY }
}
"""
OWN, SHIFTED, THREAD = (
    "blockIdx.x * blockDim.x + threadIdx.x",
    "blockIdx.x * (blockDim.x - 1) + threadIdx.x",
    "threadIdx.x",
)


@pytest.mark.parametrize(
    ("index", "body"),
    [
        (THREAD, "out[i] = blockIdx.x;"),  # every block the same elements
        (THREAD, "out[i] = 2 * i;"),  # even if they write the same
        (SHIFTED, "out[i] = i;"),  # one element overlaps
        (OWN, "out[i] = x[i]; x[(i + 1) % n] = i;"),  # reads what the next block writes
        (OWN, "x[i] = i; out[i] = x[n - 1 - i];"),
        (OWN, "atomicAdd(out, i); x[i] = out[0];"),  # an atomic and a plain read
        (OWN, "((unsigned char*)out)[i] = 1; ((unsigned char*)out)[i + 1] = 2;"),  # bytes of a word of two blocks
        (OWN, "((short*)out)[(i + 31) / 32 * 32 % n] = i;"),
    ],
)
def test_races_between_blocks(index: str, body: str) -> None:
    source = BLOCKS.replace("INDEX", index).replace("BODY", body)
    args = [np.zeros(256, np.int32), np.zeros(256, np.int32), np.int32(250)]
    error = finds(source, args, "race", grid=4, block=64)
    assert "blocks of one launch are not ordered" in str(error) and error.other_line is not None


@pytest.mark.parametrize(
    ("index", "body"),
    [
        (OWN, "out[i] = x[i] + x[n - 1 - i];"),
        (OWN, "out[i] = i; x[i] = out[i]; out[i] = x[i];"),
        (OWN, "atomicAdd(out + i % 7, i);"),
        (OWN, "atomicMax(out, i); atomicMin(out + 1, i);"),
        (OWN, "((unsigned char*)out)[i] = 1;"),  # blocks whose bytes share words
        (OWN, "((unsigned char*)out)[3 * i] = 1; ((short*)x)[i] = ((unsigned char*)out)[3 * i];"),
        (SHIFTED, "((char*)out)[i + blockIdx.x] = 1;"),
    ],
)
def test_no_races_between_blocks(index: str, body: str) -> None:
    source = BLOCKS.replace("INDEX", index).replace("BODY", body)
    args = [np.zeros(256, np.int32), np.zeros(256, np.int32), np.int32(250)]
    clean(source, args, grid=4, block=63)


def test_compare_and_swap_loops_begin_with_a_plain_load() -> None:
    """The sum of doubles as the CUDA C++ Programming Guide has it."""
    source = """
    __device__ double add(double* address, double value) {
        unsigned long long* bits = (unsigned long long*)address, old = *bits, assumed;
        do {
            assumed = old;
            old = atomicCAS(bits, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
        } while (assumed != old);
        return __longlong_as_double(old);
    }
    extern "C" __global__ void k(double* sum) { add(sum, threadIdx.x); }"""
    assert clean(source, [np.zeros(1)], grid=3, block=64)[0][0] == 3 * 63 * 32


def test_two_launches_may_write_the_same() -> None:
    source = BLOCKS.replace("INDEX", OWN).replace("BODY", "out[n - 1 - i] = x[i]; ")
    args = [np.zeros(256, np.int32), np.zeros(256, np.int32), np.int32(250)]
    for _ in range(2):
        clean(source, args, grid=4, block=64)


def test_the_last_block_adds_what_all_have_written() -> None:
    """The pattern of the CUDA samples (threadFenceReduction): fence, ticket, and the last block reads all."""
    source = """
    __device__ unsigned tickets = 0;
    extern "C" __global__ void k(float* out, float* partial, const float* x) {
        __shared__ bool last;
        float v = x[blockIdx.x * 32 + threadIdx.x];
        for (int o = 16; o > 0; o /= 2) v += __shfl_down_sync(0xffffffff, v, o);
        if (threadIdx.x == 0) {
            partial[blockIdx.x] = v;
            FENCE
            last = atomicInc(&tickets, gridDim.x - 1) == gridDim.x - 1;
        }
        __syncthreads();
        if (last && threadIdx.x == 0) {
            float sum = 0;
            for (int i = 0; i < gridDim.x; i++) sum += partial[i];
            *out = sum;
        }
    }"""
    x = np.arange(256, dtype=np.float32)
    args = [np.zeros(1, np.float32), np.zeros(8, np.float32), x]
    assert clean(source.replace("FENCE", "__threadfence();"), args, grid=8)[0][0] == x.sum()
    finds(source.replace("FENCE", ""), args, "race", grid=8)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_findings_are_the_same_every_time(schedule: str) -> None:
    messages = set()
    for _ in range(3):
        out = np.zeros(64, np.int32)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            launch(PAIRS.replace("SHARED", "int").replace("BODY", BODIES["write after write"][0].replace("SYNC", "")), [out],
                   block=64, schedule=schedule)  # fmt: skip
        messages.add(str(caught.value))
    assert len(messages) == 1
