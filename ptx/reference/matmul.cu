// matmul_{nn,nt,tn}_{f32,bf16}: out = a @ b (+ residual), the textbook kernel with tiles in shared memory
//   out      [M, N] f32 or bf16   each one chain of fmaf over ascending k, from 0 or (accumulate) from out itself
//   a        nn, nt: [M, K]; tn: [K, M]
//   b        nn, tn: [K, N]; nt: [N, K]
//   residual [M, N] f32           added after the chain when has_residual; may be out
//   m, n, k sizes; out_bf16: 1 when out is bf16; accumulate: 1 when the chain starts at out (f32)
// Grid    (ceil(N / TILE_N), ceil(M / TILE_M))
// Block   (32, WARPS)             lane = column of the tile, warp w owns rows [ROWS * w, ROWS * (w + 1))
// Shared  a_tile 32 KiB, b_tile 8 KiB, both f32: bf16 is widened once, when it is staged
// Owner   one thread adds every product of an output from the first k to the last, so neither the tile nor a cut of k
//         into two calls changes a bit. Rows and columns past the edge are computed from repeats and not stored; k past
//         the end is never multiplied (adding 0 * 0 would turn -0 into 0).
// Speed   per k step and warp: 1 load of 32 columns, 8 broadcasts, 8 fmaf, no divergent branch

#include "common.cuh"

enum Layout { NN, NT, TN };

const u32 WARPS = 16;
const u32 ROWS = 8;  // outputs of a thread: independent chains, enough to hide an fmaf's latency
const u32 TILE_M = ROWS * WARPS;
const u32 TILE_N = LANES;
const u32 TILE_K = 64;
const u32 UNROLL = 8;

// Four numbers of one row of b, aligned, as one access.
__device__ inline void load4(float out[4], const float* x) {
    float4 v = *(const float4*)x;
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}
__device__ inline void load4(float out[4], const bf16* x) {
    uint2 v = *(const uint2*)x;
    out[0] = __uint_as_float(v.x << 16), out[1] = __uint_as_float(v.x & 0xffff0000u);
    out[2] = __uint_as_float(v.y << 16), out[3] = __uint_as_float(v.y & 0xffff0000u);
}

// A tile whose rows lie along memory: tile[row][column] = x[row0 + row][column0 + column] of an x of rows x columns.
// Rows past the end repeat the last one, columns past the end are 0.
template <u32 TILE_ROWS, u32 TILE_COLUMNS, typename T>
__device__ inline void stage(float* tile, const T* x, u32 row0, u32 column0, u32 rows, u32 columns) {
    const u32 lane = threadIdx.x, warp = threadIdx.y;
#pragma unroll
    for (u32 row = 0; row < TILE_ROWS; row += WARPS) {
        const T* source = x + ((u64)smaller(row0 + row + warp, rows - 1) * columns + column0) + lane;
        float* target = tile + ((row + warp) * TILE_COLUMNS + lane);
#pragma unroll
        for (u32 column = 0; column < TILE_COLUMNS; column += LANES)
            target[column] = load_if(column0 + column + lane < columns, source + column);
    }
}

// The tile of b^T: tile[k][column] = b[n0 + column][k0 + k]. Each lane reads along its own row of b.
template <typename T>
__device__ inline void stage_transposed(float* tile, const T* b, u32 n0, u32 k0, u32 n, u32 k) {
    const u32 lane = threadIdx.x, first = 4 * threadIdx.y;  // TILE_K = 4 * WARPS
    const T* source = b + (u64)smaller(n0 + lane, n - 1) * k + k0 + first;
    float* target = tile + first * TILE_N + lane;
    if (k % 4 == 0 && (u64)b % (4 * sizeof(T)) == 0) {
        if (k0 + first < k) {
            float v[4];
            load4(v, source);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) target[i * TILE_N] = v[i];
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (k0 + first + i < k) target[i * TILE_N] = to_f32(source[i]);
    }
}

template <typename T>
__device__ inline void store(T* out, const float sum[ROWS], u32 row0, u32 column, u32 m, u32 n) {
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r)
        if (row0 + r < m) store_if(column < n, out + (u64)(row0 + r) * n + column, sum[r]);
}

template <Layout LAYOUT, typename T>
__device__ inline void matmul(float* out, const T* a, const T* b, const float* residual, u32 m, u32 n, u32 k,
                              u32 out_bf16, u32 accumulate, u32 has_residual) {
    __shared__ __align__(16) float a_tile[TILE_M * TILE_K];  // [row][k], tn: [k][row]
    __shared__ __align__(16) float b_tile[TILE_K * TILE_N];  // [k][column]
    const u32 lane = threadIdx.x, warp = threadIdx.y;
    const u32 m0 = blockIdx.y * TILE_M, n0 = blockIdx.x * TILE_N;
    const u32 row0 = m0 + ROWS * warp, column = n0 + lane;
    const bool is_row = row0 < m;  // whether this warp has any

    float sum[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) sum[r] = 0.0f;
    if (accumulate) {
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) sum[r] = load_if(column < n, out + (u64)smaller(row0 + r, m - 1) * n + column);
    }

    const u32 a_row = LAYOUT == TN ? 1 : TILE_K, a_k = LAYOUT == TN ? TILE_M : 1;
    const float* a_mine = a_tile + ROWS * warp * a_row;
    const float* b_mine = b_tile + lane;
    for (u32 k0 = 0; k0 < k; k0 += TILE_K) {
        if (LAYOUT == TN)
            stage<TILE_K, TILE_M>(a_tile, a, k0, m0, k, m);
        else
            stage<TILE_M, TILE_K>(a_tile, a, m0, k0, m, k);
        if (LAYOUT == NT)
            stage_transposed(b_tile, b, n0, k0, n, k);
        else
            stage<TILE_K, TILE_N>(b_tile, b, k0, n0, k, n);
        __syncthreads();
        if (is_row) {
            const u32 steps = smaller(TILE_K, k - k0);
            u32 i = 0;
            for (; i + UNROLL <= steps; i += UNROLL) {
#pragma unroll
                for (u32 u = 0; u < UNROLL; ++u) {
                    const float y = b_mine[(i + u) * TILE_N];
#pragma unroll
                    for (u32 r = 0; r < ROWS; ++r) sum[r] = fmaf(a_mine[r * a_row + (i + u) * a_k], y, sum[r]);
                }
            }
#pragma unroll 1
            for (; i < steps; ++i) {
                const float y = b_mine[i * TILE_N];
#pragma unroll
                for (u32 r = 0; r < ROWS; ++r) sum[r] = fmaf(a_mine[r * a_row + i * a_k], y, sum[r]);
            }
        }
        __syncthreads();
    }

    if (has_residual) {
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) sum[r] += load_if(column < n, residual + (u64)smaller(row0 + r, m - 1) * n + column);
    }
    if (out_bf16)
        store((bf16*)out, sum, row0, column, m, n);
    else
        store(out, sum, row0, column, m, n);
}

#define ENTRY(NAME, LAYOUT, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(LANES* WARPS)                                                    \
        NAME(float* out, const T* a, const T* b, const float* residual, u32 m, u32 n, u32 k, u32 out_bf16,        \
             u32 accumulate, u32 has_residual) {                                                                  \
        matmul<LAYOUT>(out, a, b, residual, m, n, k, out_bf16, accumulate, has_residual);                         \
    }

ENTRY(matmul_nn_f32, NN, float)
ENTRY(matmul_nt_f32, NT, float)
ENTRY(matmul_tn_f32, TN, float)
ENTRY(matmul_nn_bf16, NN, bf16)
ENTRY(matmul_nt_bf16, NT, bf16)
ENTRY(matmul_tn_bf16, TN, bf16)
