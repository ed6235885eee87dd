// cross_entropy_{forward,backward}_{f32,bf16}: the twin of cross_entropy_forward.ptx and cross_entropy_backward.ptx
//   lse = log(sum(exp(logits))), loss = lse - logits[target]; gradient (exp(logits - lse) - onehot(target)) * scale, in place
//   loss, lse [N] f32; logits [N, V] f32 or bf16; targets [N] i32, ignored below 0; scalars[3] is the scale
// Grid    (ceil(N / 32))
// Block   (32)             one thread to a row
// Shared  none
// Owner   one thread adds a row's exponentials in order
// Source  log-sum-exp shifted by its maximum; expf and logf are CUDA's own

#include "common.cuh"

const u32 GRAD_SCALE = 3;

template <typename T>
__device__ inline void forward(float* loss, float* lse, const T* logits, const int* targets, u32 rows, u32 vocab) {
    const u32 row = blockIdx.x * LANES + threadIdx.x;
    if (row >= rows) return;
    const T* x = logits + (u64)row * vocab;
    float top = to_f32(x[0]);
    for (u32 i = 1; i < vocab; ++i) top = fmaxf(top, to_f32(x[i]));
    float sum = 0.0f;
    for (u32 i = 0; i < vocab; ++i) sum += expf(to_f32(x[i]) - top);
    lse[row] = top + logf(sum);
    loss[row] = targets[row] < 0 ? 0.0f : lse[row] - to_f32(x[targets[row]]);
}

template <typename T>
__device__ inline void backward(T* logits, const float* lse, const int* targets, const float* scalars, u32 rows,
                                u32 vocab) {
    const u32 row = blockIdx.x * LANES + threadIdx.x;
    if (row >= rows) return;
    T* x = logits + (u64)row * vocab;
    for (u32 i = 0; i < vocab; ++i) {
        const float p = expf(to_f32(x[i]) - lse[row]);
        const float hot = (int)i == targets[row] ? 1.0f : 0.0f;
        store_if(true, x + i, targets[row] < 0 ? 0.0f : (p - hot) * scalars[GRAD_SCALE]);
    }
}

#define ENTRIES(SUFFIX, T)                                                                                        \
    extern "C" __global__ void cross_entropy_forward_##SUFFIX(float* loss, float* lse, const T* logits,           \
                                                              const int* targets, u32 rows, u32 vocab) {          \
        forward(loss, lse, logits, targets, rows, vocab);                                                         \
    }                                                                                                             \
    extern "C" __global__ void cross_entropy_backward_##SUFFIX(T* logits, const float* lse, const int* targets,   \
                                                               const float* scalars, u32 rows, u32 vocab) {       \
        backward(logits, lse, targets, scalars, rows, vocab);                                                     \
    }

ENTRIES(f32, float)
ENTRIES(bf16, bf16)
