// Half precision and brain floats, alone and in pairs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void half_axpy(__half2* y, const __half2* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __hfma2(__float2half2_rn(a), x[i], y[i]);
}

extern "C" __global__ void half_mixed(__half* out, const __half* x, const __half* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __half a = x[i], b = y[i];
    __half r = __hmul(__hadd(a, b), __hsub(a, b));
    if (__hgt(a, b)) r = __hmax(r, __float2half(0.5f));
    else if (__heq(__hneg(a), b) || __hisnan(r)) r = __int2half_rn(i);
    out[i] = __hadd(r, __habs(__hmin(a, b)));
}

extern "C" __global__ void half_functions(float* out, const __half* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __half v = x[i];
    out[4 * i] = __half2float(hexp(v));
    out[4 * i + 1] = __half2float(hsqrt(v));
    out[4 * i + 2] = __half2float(hrcp(v));
    out[4 * i + 3] = __half2float(hlog(v)) + __half2int_rn(v) + __half2uint_rz(v) + (float)__half2ll_rd(v);
}

extern "C" __global__ void bf16_swiglu(__nv_bfloat162* out, const __nv_bfloat162* gate, const __nv_bfloat162* up, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float2 g = __bfloat1622float2(gate[i]), u = __bfloat1622float2(up[i]);
    g.x = g.x / (1 + expf(-g.x)) * u.x;
    g.y = g.y / (1 + expf(-g.y)) * u.y;
    out[i] = __float22bfloat162_rn(g);
}

extern "C" __global__ void bf16_arithmetic(__nv_bfloat162* out, const __nv_bfloat162* a, const __nv_bfloat162* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __nv_bfloat162 x = a[i], y = b[i];
    __nv_bfloat162 r = __hfma2_relu(x, y, __hadd2(x, y));
    r = __hmax2(r, __hneg2(y));
    if (__hbgt2(x, y)) r = __hmin2(r, x);
    out[i] = __hadd2(r, __hgt2(x, y));
}

// Sums of pairs by shuffles of packed halves.
extern "C" __global__ void half_sums(float* out, const __half2* x) {
    __half2 v = x[blockIdx.x * 32 + threadIdx.x];
    for (int d = 16; d; d >>= 1) v = __hadd2(v, __shfl_xor_sync(~0u, v, d));
    if (threadIdx.x == 0) out[blockIdx.x] = __low2float(v) + __high2float(v);
}

extern "C" __global__ void half_atomics(__half2* sums, __nv_bfloat16* total, const __half2* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(&sums[i % 3], x[i]);
    atomicAdd(total, __float2bfloat16(1.0f));
}

extern "C" __global__ void half_comparisons(unsigned* out, const __half2* a, const __half2* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned r = __hlt2_mask(a[i], b[i]) & 0x00ff00ff;
    r |= __hbeq2(a[i], b[i]) ? 0x100 : 0;
    r |= __hbltu2(a[i], b[i]) ? 0x200 : 0;
    r |= __hge(__low2half(a[i]), __high2half(b[i])) ? 0x1000 : 0;
    out[i] = r;
}
