"""CUDA C by way of NVRTC on the CPU device: against the oracle, and device functions against themselves inlined."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from ptx_text import compile_cuda

from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.parser import parse

BLOCK, GRID = 96, 2
COUNT = BLOCK * GRID

INTEGERS = r"""
struct Pair { int a; long long b; unsigned char c[4]; };
extern "C" __global__ void k(unsigned* out, const unsigned* in, Pair pair, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned x = in[i], y = in[(i * 7 + 3) % n] | 1;
    unsigned local[8];
    for (int j = 0; j < 8; j++) local[j] = x * (j + 1) ^ (y >> j);
    unsigned sum = local[x & 7] + local[y % 8];
    switch (x % 6) {
        case 0: sum += __popc(y); break;
        case 1: sum ^= __clz(x) << 3; break;
        case 2: sum -= __brev(y); break;
        case 3: sum += __byte_perm(x, y, 0x6240); break;
        case 4: {
            long long q = (long long)(int)x * (int)y / (pair.b + (i & 3));
            sum += (unsigned)q ^ (unsigned)(q >> 32);
            break;
        }
    }
    for (unsigned j = x & 15; j; j &= j - 1) {
        if (j == 9) continue;
        sum = sum * 33 + j;
        if (sum % 11 == 5) break;
    }
    short h = (short)(sum >> 3);
    signed char c = (signed char)sum;
    sum += h / 7 + c % 5 + pair.c[sum & 3] + (int)y / pair.a + max((int)x, (int)y) % 9;
    unsigned long long w = (unsigned long long)x * y % 1000003ull;
    out[i] = sum + (unsigned)w + __funnelshift_l(x, y, sum);
}
"""

WARPS = r"""
extern "C" __global__ void k(unsigned* out, const unsigned* in, int n) {
    __shared__ unsigned partial[3];
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    unsigned x = i < n ? in[i] % 1000 : 0, sum = x;
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    unsigned before = x;
    for (int d = 1; d < 32; d <<= 1) {
        unsigned up = __shfl_up_sync(0xffffffffu, before, d);
        if (lane >= d) before += up;
    }
    if (lane == 0) partial[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) before += partial[w];
    unsigned odd = __ballot_sync(0xffffffffu, x & 1);
    if (i < n) out[i] = before + __popc(odd & ((1u << lane) - 1)) * 100000;
}
"""

FLOATS = r"""
extern "C" __global__ void k(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = in[i], best = -1e30f, sum = 0.f;
    for (int j = 0; j <= (i & 15); j++) {
        float y = in[(i + j) % n];
        if (y > best) { sum *= 0.5f; best = y; }
        sum = fmaf(y, x, sum) / (1.f + fabsf(y));
    }
    double d = (double)sum * sum + best;
    out[i] = (float)sqrt(d < 0 ? -d : d) + truncf(x * 10.f) + rintf(sum) - floorf(best) + (float)(int)(x * 100.f)
             + copysignf(1.f, x) + fminf(sum, 2.f) + __fsqrt_rn(fabsf(x)) + __frcp_rn(1.f + x * x);
}
"""

FUNCTIONS = r"""
MODE float poly(float x, int n) { float s = 0.f; for (int i = 0; i < n; i++) s = fmaf(s, x, 1.f / (i + 1)); return s; }
struct Two { float a, b; int c; };
MODE Two both(Two t, float x) { t.a += poly(x, t.c); if (x > 0.f) t.b = poly(t.a, 3); else t.b -= x; t.c++; return t; }
MODE void change(float* p, int i) { p[i & 3] += 1.5f; }
MODE float divergent(float x) {
    if (x > 0.5f) return x * 2.f;
    for (int i = 0; i < 9; i++) {
        x += 0.25f;
        if (x > 1.f) return -x;
    }
    return x;
}
extern "C" __global__ void k(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Two t = {in[i], 0.f, i & 3};
    for (int j = 0; j < (i & 7); j++) t = both(t, in[(i + j) % n]);
    float local[4] = {1, 2, 3, 4};
    change(local, i);
    change(local, t.c);
    if (in[i] < 1.f) t.a += divergent(in[i]);
    out[i] = t.a + t.b + t.c + local[i & 3] + local[t.c & 3];
}
"""


@cache
def kernel(source: str, *options: str) -> str:
    return compile_cuda(source, *options)


def numbers(dtype: type) -> Any:
    rng = np.random.default_rng(3)
    if dtype is np.float32:
        return rng.normal(size=COUNT).astype(np.float32)
    return rng.integers(0, 1 << 32, COUNT, dtype=np.uint32)


def run(source: str, args: list[Any]) -> Any:
    out = np.zeros(COUNT, args[0].dtype)
    load(source).launch("k", grid=(GRID, 1, 1), block=(BLOCK, 1, 1), args=[out, *args])
    return out


PAIR = np.void(np.int32(-5).tobytes() + bytes(4) + np.int64(77).tobytes() + bytes([1, 2, 3, 250]) + bytes(4))


@pytest.mark.parametrize("options", [(), ("-lineinfo",), ("-G",)])
@pytest.mark.parametrize("name", ["integers", "warps", "floats"])
def test_against_the_oracle(name: str, options: tuple[str, ...]) -> None:
    """The same PTX by both; `-G` leaves every variable in local memory and every branch as it was written."""
    source = {"integers": INTEGERS, "warps": WARPS, "floats": FLOATS}[name]
    text = kernel(source, *options)
    dtype: type = np.float32 if name == "floats" else np.uint32
    extra = [PAIR] if name == "integers" else []
    args = [numbers(dtype), *extra, np.int32(COUNT - 5)]
    module = parse(text, Path("k.ptx"))
    if any(not f.is_entry for f in module.functions.values()):
        pytest.skip("the oracle has no calls")
    expected = np.zeros(COUNT, dtype)
    oracle.run(module, "k", (GRID, 1, 1), (BLOCK, 1, 1), [expected, *args])
    assert np.count_nonzero(expected) > COUNT / 2
    np.testing.assert_array_equal(run(text, args), expected)


def test_functions_give_what_they_give_inlined() -> None:
    inlined = kernel(FUNCTIONS.replace("MODE", "__device__ __forceinline__"), "-fmad=false")
    called = kernel(FUNCTIONS.replace("MODE", "__device__ __noinline__"), "-fmad=false")
    assert "call" in called and "call" not in inlined
    args = [numbers(np.float32), np.int32(COUNT - 5)]
    expected = run(inlined, args)
    assert np.isfinite(expected).all() and np.count_nonzero(expected) > COUNT / 2
    np.testing.assert_array_equal(run(called, args), expected)
