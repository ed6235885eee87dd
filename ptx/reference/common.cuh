// What the references share. The renderer puts this text in place of #include "common.cuh".

typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 {
    unsigned short bits;
};

const u32 LANES = 32;

__device__ inline u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

__device__ inline float to_f32(float x) { return x; }
__device__ inline float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ inline unsigned short bf16_bits(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// One predicated access where an `if` would be a branch that splits the warp. Only for what no other thread writes.
__device__ inline float load_if(bool is_in, const float* x) {
    float value;
    asm("{ .reg .pred p; setp.ne.u32 p, %1, 0; mov.f32 %0, 0f00000000; @p ld.global.f32 %0, [%2]; }"
        : "=f"(value)
        : "r"((u32)is_in), "l"(x));
    return value;
}
__device__ inline float load_if(bool is_in, const bf16* x) {
    unsigned short bits;
    asm("{ .reg .pred p; setp.ne.u32 p, %1, 0; mov.u16 %0, 0; @p ld.global.u16 %0, [%2]; }"
        : "=h"(bits)
        : "r"((u32)is_in), "l"(x));
    return __uint_as_float((u32)bits << 16);
}
__device__ inline void store_if(bool is_in, float* out, float x) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.f32 [%1], %2; }" ::"r"((u32)is_in), "l"(out), "f"(x)
                 : "memory");
}
__device__ inline void store_if(bool is_in, bf16* out, float x) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u16 [%1], %2; }" ::"r"((u32)is_in), "l"(out),
                 "h"(bf16_bits(x))
                 : "memory");
}
