"""PTX for the front end's tests: one file with every construct, and what NVRTC makes of CUDA C."""

from __future__ import annotations

from functools import cache

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"

EVERYTHING = """// Every construct of the language once.
.version 8.8
.target sm_90a, debug
.address_size 64
.file 1 "a b.cu", 0, 0
.extern .shared .align 16 .b8 dynamic[];
.extern .func (.param .b32 result) vprintf (.param .b64 format, .param .b64 values);
.visible .global .align 4 .u32 grid[2][3] = {{1, 2}, {4}};
.const .f32 floats[] = {1.0, 0f3F800000, -2.5e3};
.global .u64 pointers[3] = {grid, generic(grid)+8, 0};
.global .v4 .f32 quad = {1.0, 2.0, 3.0, 4.0};
.global .attribute(.managed) .align 1 .b8 $str[6] = {104, 101, 108, 108, 111, 0};
.const .s8 negative = -(3*2)+1;
.weak .func (.reg .u32 out) device (.reg .u32 a, .param .align 8 .b8 s[16])
{ add.u32 out, a, 1; ret; }
.visible .entry k(
    .param .u64 .ptr .global .align 16 a, .param .align 4 .b8 p[16], .param .f32 x)
.maxntid 128, 1, 1
.minnctapersm 2
.pragma "nounroll";
{
    .reg .b32 %r<10>, lone; .reg .pred %p<3>; .reg .b64 %rd<5>; .reg .f32 %f<4>;
    .reg .b16 %rs<4>; .reg .v2 .b16 pair; .reg .v4 .f32 four;
    .shared .align 8 .b64 tile[4], other;
    .local .align 4 .b8 depot[64];
    .loc 1 10 3, function_name $L__info0, inlined_at 1 10 3
targets: .branchtargets L1, L2;
proto: .callprototype (.param .b32 _) _ (.param .b64 _, .param .b64 _) ;
    ld.param.u64 %rd1, [ a + 0 ];
    ld.param.b32 %r1, [p+4];
    { .reg .b32 %r1; mov.u32 %r1, %tid.x; L1: bra L1;
      { .reg .b32 %r1; mov.b32 %r1, %laneid; L1: @%p1 bra.uni L1; } }
    @!%p1 bra L1;
    mov.b32 {%rs1, %rs2}, %r1;
    { mov.b32 %f1, {0, %rs1};}
    mov.b64 {_, %r2}, %rd1;
    shfl.sync.down.b32 %r2|%p1, %r1, 0x1, 0b11111, 0xffffffff;
    setp.eq.and.s32 %p1|%p2, %r1, 3U, !%p2;
    ld.global.nc.L2::128B.v4.f32 {%f0,%f1,%f2,%f3}, [%rd1+-16];
    ld.global.v4.f32 {four.x, four.y, four.z, four.w}, [ %rd1 + 4*4 ];
    ld.global.L1::no_allocate.v2.b16 pair, [%rd1];
    mov.f32 %f0, four.z;
    st.shared.u8 [dynamic + 3*4], lone;
    ld.shared.u32 %r1, [0123];
    { .param .b32 out1; .param .b64 in1; .param .b64 in2;
      st.param.b64 [in1+0], %rd1;
      call.uni (out1), vprintf, (in1, in2);
      call (out1), %rd1, (in1, in2), proto; }
    { .param .b64 in1; st.param.b64 [in1], %rd1; }
L1: mov.u64 %rd2, tile+8;
L2: brx.idx %r1, targets;
    mov.u32 %r1, WARP_SZ;
    mov.b32 %r1, (1<<4)|3;
    mov.f32 %f2, 0F3f800000;
    mov.f64 %rd3, 0d3FF0000000000000;
    ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%r1,%r2,%r3,%r4}, [%r5];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3};
    cp.async.cg.shared.global.L2::128B [%r1], [%rd1 + 16], 16, %r2;
    cp.async.commit_group;
    cp.async.wait_group 0;
    /* a
       comment */ ret; // done
}
.section .debug_str { .b8 1,2,3
$L__info0: .b8 0 }
"""

CUDA = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
__constant__ float table[4] = {1.f, 2.f, 3.f, 4.f};
__device__ int counter = 3;
__device__ int* pointers[2] = {&counter, nullptr};
struct S { int a; double b; char c[5]; };
__device__ __noinline__ float helper(float x, S s) { return sinf(x) + s.a + powf(x, 2.5f) + (float)s.b; }
extern "C" __global__ void first(float* out, const float* a, S s, int n) {
    extern __shared__ float dynamic[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = i < n ? helper(a[i], s) : 0.f;
    v += __shfl_down_sync(-1, v, 1);
    dynamic[threadIdx.x] = v;
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(out, dynamic[0]);
    switch (n & 7) {
        case 0: out[1] = 1; break;
        case 1: out[2] = table[i & 3]; break;
        case 2: out[3] = logf(v); break;
        case 3: out[4] = tanhf(v); break;
        case 4: out[5] = erff(v); break;
        case 5: out[6] = *pointers[0]; break;
        case 6: printf("%d %f\n", i, v);
    }
    __half2 h = __floats2half2_rn(v, v);
    out[7] = __low2float(h * h + h);
    __nv_bfloat162 b = __floats2bfloat162_rn(v, v);
    out[8] = __low2float(__hfma2(b, b, b));
    double d = exp((double)v);
    out[9] = (float)(d / 3.0) + (float)(long long)d + (unsigned char)v;
    float local[16];
    for (int j = 0; j < 16; j++) local[j] = a[j];
    out[12] = local[n & 15];
    out[13] = __fdividef(v, 3.f) + rsqrtf(v) + sqrtf(v) + fminf(v, 2.f) + __expf(v) + cosf(v);
    unsigned u = __ballot_sync(-1, v > 0);
    out[14] = __popc(u) + __clz(u) + __ffs(u) + __brev(u) + __byte_perm(u, u, 0x3120) + __any_sync(-1, v > 1);
    out[15] = ((long long)n * n) / (i + 1) % 7 + __funnelshift_l(u, u, 3) + __mulhi(n, i);
    out[16] = atomicCAS((int*)out, 1, 2) + __reduce_add_sync(-1, n) + __match_any_sync(-1, n) + clock64();
    __threadfence();
}
extern "C" __global__ void second(float* c, int n) {
    __shared__ __align__(16) float s[256];
    unsigned r0, r1, r2, r3;
    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    unsigned at = (unsigned)__cvta_generic_to_shared(s);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(c));
    asm volatile("cp.async.commit_group; cp.async.wait_group 0;");
    asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(at));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(r0), "r"(r1), "r"(r2), "r"(r3), "r"(r0), "r"(r1));
    c[threadIdx.x] = d0 + d1 + d2 + d3 + s[threadIdx.x];
}
"""


def compile_cuda(source: str, *options: str) -> str:
    """PTX of CUDA C for sm_80. Needs no GPU and no driver."""
    import nvidia.cuda_runtime
    from cupy.cuda import nvrtc

    include = f"{next(iter(nvidia.cuda_runtime.__path__))}/include"
    program = nvrtc.createProgram(source, "test.cu", [], [])
    try:
        nvrtc.compileProgram(program, ["-arch=compute_80", f"-I{include}", "-default-device", *options])
    except nvrtc.NVRTCError as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    text = nvrtc.getPTX(program)
    return (text if isinstance(text, str) else text.decode()).rstrip("\0")


@cache
def nvrtc_ptx(*options: str) -> str:
    """What NVRTC makes of `CUDA`."""
    return compile_cuda(CUDA, *options)
