// attention_*: causal attention with grouped queries, forward and backward, the textbook way: every head's T x T scores
// are written out. Scores and everything computed from them are f32; qkv, out and their gradients are f32 or bf16.
//   qkv [B * T, E]   row: H query heads, G key heads, G value heads of C channels; E = (H + 2G) * C
//   out, dout [B * T, H * C]
//   matrices [B, H, T, pitch] f32, pitch = T rounded up to 32; entry [query][key]. Only tiles on or below the diagonal
//   exist. Whatever is not a probability (key > query) is 0 there once softmax or dscores has run.
// Forward   scores, softmax, rows (out = P v)
// Backward  delta, scores, dscores, rows (dq = dS k), columns (dk = dS^T q), columns (dv = P^T dout)
// Block     (32, WARPS)
// Shared    scores, dscores: two f32 tiles of 32 rows x 128 channels, 16 KiB each; the others none
// Owner     each number has one thread, which adds in ascending order of channels (scores), keys (rows), or query heads
//           of the group and then queries (columns). softmax and delta: lane l adds every 32nd from l, then the lanes
//           meet in a butterfly. No atomics.
// Error     exp(x) = ex2.approx(x * log2(e)): 2 ulp and |x| * 2^-24, relative; log likewise, 2^-22 absolute near 1

#include "common.cuh"

__device__ inline float exp_(float x) {
    float out;
    asm("ex2.approx.f32 %0, %1;" : "=f"(out) : "f"(x * 1.44269504f));
    return out;
}
__device__ inline float log_(float x) {
    float out;
    asm("lg2.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out * 0.693147182f;
}

const u32 TILE = 32;  // queries or keys
const u32 WARPS = 4;
const u32 ROWS = TILE / WARPS;  // rows of a tile that one warp owns
const u32 CHANNELS = 128;       // the most that a head may have
const u32 EVERYONE = 0xffffffffu;
#define INFINITE __int_as_float(0x7f800000)

__device__ inline u32 whole_tiles(u32 x) { return (x + TILE - 1) / TILE * TILE; }

__device__ inline float warp_sum(float x) {
    for (u32 step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(EVERYONE, x, step);
    return x;
}
__device__ inline float warp_max(float x) {
    for (u32 step = LANES / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(EVERYONE, x, step));
    return x;
}

// tile[row * ROW + c * C] = x[first + row][c] for 32 rows; channels are 0 from head_dim up to a multiple of 32. Rows past the
// end repeat the last. ROW, C: CHANNELS, 1 for a plain tile, 1, TILE for a transposed one.
template <u32 ROW, u32 C, typename T>
__device__ inline void stage(float* tile, const T* x, u32 stride, u32 first, u32 context, u32 head_dim) {
    const u32 lane = threadIdx.x;
#pragma unroll 1
    for (u32 c = 0; c < head_dim; c += LANES) {
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            const u32 row = threadIdx.y + WARPS * i;
            const T* source = x + ((u64)smaller(first + row, context - 1) * stride + c) + lane;
            tile[row * ROW + (c + lane) * C] = load_if(c + lane < head_dim, source);
        }
    }
}

// sum[r] = x[ROWS * warp + r] . y[lane], channels ascending; x_tile is plain, y_tile transposed. head_dim is even.
__device__ inline void products(float sum[ROWS], const float* x_tile, const float* y_tile, u32 head_dim) {
    const float* x = x_tile + ROWS * threadIdx.y * CHANNELS;
    const float* y = y_tile + threadIdx.x;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) sum[r] = 0.0f;
#pragma unroll 1
    for (u32 c = 0; c < head_dim; c += 2, x += 2, y += 2 * TILE) {
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) sum[r] = fmaf(x[r * CHANNELS], y[0], sum[r]);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) sum[r] = fmaf(x[r * CHANNELS + 1], y[TILE], sum[r]);
    }
}

// scores[query][key] = (q . k) * scale for every tile on or below the diagonal; not masked.
// Grid (key tiles, H, B): a block keeps its tile of keys and walks down the queries.
template <typename T>
__device__ inline void scores_of(float* scores, const T* qkv, u32 context, u32 heads, u32 kv_heads, u32 head_dim,
                                 float scale) {
    __shared__ __align__(128) float k_tile[CHANNELS * TILE];  // transposed
    __shared__ __align__(128) float q_tile[TILE * CHANNELS];
    const u32 key0 = blockIdx.x * TILE, head = blockIdx.y, lane = threadIdx.x;
    const u32 pitch = whole_tiles(context), stride = (heads + 2 * kv_heads) * head_dim;
    const T* rows = qkv + (u64)blockIdx.z * context * stride;
    const T* q = rows + head * head_dim;
    const T* k = rows + (heads + head / (heads / kv_heads)) * head_dim;
    float* out = scores + (u64)(blockIdx.z * heads + head) * context * pitch + key0 + lane;

    stage<1, TILE>(k_tile, k, stride, key0, context, head_dim);
    for (u32 query0 = key0; query0 < context; query0 += TILE) {
        stage<CHANNELS, 1>(q_tile, q, stride, query0, context, head_dim);
        __syncthreads();
        float sum[ROWS];
        products(sum, q_tile, k_tile, head_dim);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u32 query = query0 + ROWS * threadIdx.y + r;
            if (query < context) out[(u64)query * pitch] = sum[r] * scale;
        }
        __syncthreads();
    }
}

// In place: scores become probabilities. lse[query] = log(sum over keys of exp(score)).
// Grid (ceil(T / WARPS), H, B): one warp to a query.
extern "C" __global__ void attention_softmax(float* scores, float* lse, u32 context, u32 heads) {
    const u32 query = blockIdx.x * WARPS + threadIdx.y, lane = threadIdx.x;
    if (query >= context) return;
    const u32 head = blockIdx.z * heads + blockIdx.y;
    float* row = scores + ((u64)head * context + query) * whole_tiles(context) + lane;

    float top = -INFINITE;
    for (u32 key0 = 0; key0 <= query; key0 += LANES) {
        const float score = row[key0];
        top = fmaxf(top, key0 + lane <= query ? score : -INFINITE);
    }
    top = warp_max(top);
    float sum = 0.0f;
    for (u32 key0 = 0; key0 <= query; key0 += LANES) {
        const float p = exp_(row[key0] - top);
        const float kept = key0 + lane <= query ? p : 0.0f;  // causal: no key after the query
        row[key0] = kept;
        sum += kept;
    }
    sum = warp_sum(sum);
    for (u32 key0 = 0; key0 <= query; key0 += LANES) row[key0] = row[key0] / sum;
    if (lane == 0) lse[(u64)head * context + query] = top + log_(sum);
}

// delta[query] = sum over channels of dout * out. Grid (ceil(T / WARPS), H, B): one warp to a query.
template <typename T>
__device__ inline void delta_of(float* delta, const T* dout, const T* out, u32 context, u32 heads, u32 head_dim) {
    const u32 query = blockIdx.x * WARPS + threadIdx.y, lane = threadIdx.x;
    if (query >= context) return;
    const u64 at = ((u64)(blockIdx.z * context + query) * heads + blockIdx.y) * head_dim;
    float sum = 0.0f;
    for (u32 c0 = 0; c0 < head_dim; c0 += LANES) {
        const bool is_in = c0 + lane < head_dim;
        sum = fmaf(load_if(is_in, dout + at + c0 + lane), load_if(is_in, out + at + c0 + lane), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) delta[(u64)(blockIdx.z * heads + blockIdx.y) * context + query] = sum;
}

// probabilities (holds scores) = P = exp(score - lse); dscores = P * (dout . v - delta) * scale; both 0 above the diagonal.
// Grid (key tiles, H, B), as for scores.
template <typename T>
__device__ inline void dscores_of(float* probabilities, float* dscores, const T* dout, const T* qkv, const float* lse,
                                  const float* delta, u32 context, u32 heads, u32 kv_heads, u32 head_dim, float scale) {
    __shared__ __align__(128) float v_tile[CHANNELS * TILE];  // transposed
    __shared__ __align__(128) float dout_tile[TILE * CHANNELS];
    const u32 key0 = blockIdx.x * TILE, head = blockIdx.y, lane = threadIdx.x;
    const u32 pitch = whole_tiles(context), stride = (heads + 2 * kv_heads) * head_dim;
    const T* d = dout + ((u64)blockIdx.z * context * heads + head) * head_dim;
    const T* v = qkv + (u64)blockIdx.z * context * stride + (heads + kv_heads + head / (heads / kv_heads)) * head_dim;
    const u64 row0 = (u64)(blockIdx.z * heads + head) * context;

    stage<1, TILE>(v_tile, v, stride, key0, context, head_dim);
    for (u32 query0 = key0; query0 < context; query0 += TILE) {
        stage<CHANNELS, 1>(dout_tile, d, heads * head_dim, query0, context, head_dim);
        __syncthreads();
        float sum[ROWS];
        products(sum, dout_tile, v_tile, head_dim);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u32 query = query0 + ROWS * threadIdx.y + r;
            if (query < context) {
                const u64 row = row0 + query, at = row * pitch + key0 + lane;
                const float p = exp_(probabilities[at] - lse[row]);
                const float kept = key0 + lane <= query ? p : 0.0f;  // causal: no key after the query
                probabilities[at] = kept;
                dscores[at] = kept * (sum[r] - delta[row]) * scale;
            }
        }
        __syncthreads();
    }
}

// sum[r] += weights[r][i * i_step] * x[i * stride] for i in [first, last], ascending.
template <typename T>
__device__ inline void mix(float sum[ROWS], const float* const weights[ROWS], u32 i_step, const T* x, u32 stride,
                           u32 first, u32 last, bool is_in) {
#pragma unroll 4
    for (u32 i = first; i <= last; ++i) {
        const float value = load_if(is_in, x + (u64)i * stride);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) sum[r] = fmaf(weights[r][(u64)i * i_step], value, sum[r]);
    }
}

// out[query] = sum over keys <= query of weights[query][key] * x[key]; x is a key or value head, from channel x_first.
// Grid (query tiles, H, B): lane = channel, a warp owns 8 queries.
template <typename T>
__device__ inline void rows_of(T* out, const float* weights, const T* x, u32 context, u32 heads, u32 kv_heads,
                               u32 head_dim, u32 out_stride, u32 out_first, u32 x_stride, u32 x_first) {
    const u32 head = blockIdx.y, query0 = blockIdx.x * TILE + ROWS * threadIdx.y;
    if (query0 >= context) return;
    const u32 pitch = whole_tiles(context), last = smaller(query0 + ROWS - 1, context - 1);
    const float* w[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r)
        w[r] = weights + ((u64)(blockIdx.z * heads + head) * context + smaller(query0 + r, last)) * pitch;
    const u64 row0 = (u64)blockIdx.z * context;
    const T* source = x + row0 * x_stride + x_first + head / (heads / kv_heads) * head_dim;
    T* target = out + (row0 + query0) * out_stride + out_first + head * head_dim;

    for (u32 c0 = 0; c0 < head_dim; c0 += LANES) {
        const u32 c = c0 + threadIdx.x;
        float sum[ROWS] = {};
        mix(sum, w, 1, source + c, x_stride, 0, last, c < head_dim);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r)
            if (query0 + r <= last) store_if(c < head_dim, target + (u64)r * out_stride + c, sum[r]);
    }
}

// out[key] = sum over the query heads of its group, and over queries >= key, of weights[query][key] * x[query].
// Grid (key tiles, G, B): lane = channel, a warp owns 8 keys.
template <typename T>
__device__ inline void columns_of(T* out, const float* weights, const T* x, u32 context, u32 heads, u32 kv_heads,
                                  u32 head_dim, u32 out_stride, u32 out_first, u32 x_stride) {
    const u32 kv_head = blockIdx.y, key0 = blockIdx.x * TILE + ROWS * threadIdx.y, group = heads / kv_heads;
    if (key0 >= context) return;
    const u32 pitch = whole_tiles(context);
    const u64 row0 = (u64)blockIdx.z * context;
    T* target = out + (row0 + key0) * out_stride + out_first + kv_head * head_dim;

    for (u32 c0 = 0; c0 < head_dim; c0 += LANES) {
        const u32 c = c0 + threadIdx.x;
        float sum[ROWS] = {};
        for (u32 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            const float* w[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r)
                w[r] = weights + (u64)(blockIdx.z * heads + head) * context * pitch + key0 + r;
            mix(sum, w, pitch, x + row0 * x_stride + head * head_dim + c, x_stride, key0, context - 1, c < head_dim);
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r)
            if (key0 + r < context) store_if(c < head_dim, target + (u64)r * out_stride + c, sum[r]);
    }
}

#define ENTRIES(SUFFIX, T)                                                                                          \
    extern "C" __global__ void attention_scores_##SUFFIX(float* scores, const T* qkv, u32 context, u32 heads,       \
                                                         u32 kv_heads, u32 head_dim, float scale) {                 \
        scores_of(scores, qkv, context, heads, kv_heads, head_dim, scale);                                          \
    }                                                                                                               \
    extern "C" __global__ void attention_delta_##SUFFIX(float* delta, const T* dout, const T* out, u32 context,     \
                                                        u32 heads, u32 head_dim) {                                  \
        delta_of(delta, dout, out, context, heads, head_dim);                                                       \
    }                                                                                                               \
    extern "C" __global__ void attention_dscores_##SUFFIX(                                                          \
        float* probabilities, float* dscores, const T* dout, const T* qkv, const float* lse, const float* delta,    \
        u32 context, u32 heads, u32 kv_heads, u32 head_dim, float scale) {                                          \
        dscores_of(probabilities, dscores, dout, qkv, lse, delta, context, heads, kv_heads, head_dim, scale);       \
    }                                                                                                               \
    extern "C" __global__ void attention_rows_##SUFFIX(T* out, const float* weights, const T* x, u32 context,       \
                                                       u32 heads, u32 kv_heads, u32 head_dim, u32 out_stride,       \
                                                       u32 out_first, u32 x_stride, u32 x_first) {                  \
        rows_of(out, weights, x, context, heads, kv_heads, head_dim, out_stride, out_first, x_stride, x_first);     \
    }                                                                                                               \
    extern "C" __global__ void attention_columns_##SUFFIX(T* out, const float* weights, const T* x, u32 context,    \
                                                          u32 heads, u32 kv_heads, u32 head_dim, u32 out_stride,    \
                                                          u32 out_first, u32 x_stride) {                            \
        columns_of(out, weights, x, context, heads, kv_heads, head_dim, out_stride, out_first, x_stride);           \
    }

ENTRIES(f32, float)
ENTRIES(bf16, bf16)
