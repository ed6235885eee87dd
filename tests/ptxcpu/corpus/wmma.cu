// Products on the tensor cores by the warp matrix functions.
#include <cuda_bf16.h>
#include <mma.h>
using namespace nvcuda;

extern "C" __global__ void wmma_half(float* c, const __half* a, const __half* b, int n, int k) {
    int row = blockIdx.y * 16, col = blockIdx.x * 16;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::row_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    for (int i = 0; i < k; i += 16) {
        wmma::load_matrix_sync(fa, a + row * k + i, k);
        wmma::load_matrix_sync(fb, b + i * n + col, n);
        wmma::mma_sync(fc, fa, fb, fc);
    }
    for (int i = 0; i < fc.num_elements; i++) fc.x[i] *= 0.5f;
    wmma::store_matrix_sync(c + row * n + col, fc, n, wmma::mem_row_major);
}

// b is stored by columns; tiles go through shared memory.
extern "C" __global__ void wmma_bf16(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b, int n, int k) {
    __shared__ __nv_bfloat16 sa[16 * 16], sb[16 * 16];
    int row = blockIdx.y * 16, col = blockIdx.x * 16, t = threadIdx.x;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::load_matrix_sync(fc, c + row * n + col, n, wmma::mem_row_major);
    for (int i = 0; i < k; i += 16) {
        for (int e = t; e < 256; e += 32) {
            sa[e] = a[(row + e / 16) * k + i + e % 16];
            sb[e] = b[(col + e / 16) * k + i + e % 16];
        }
        __syncwarp();
        wmma::load_matrix_sync(fa, sa, 16);
        wmma::load_matrix_sync(fb, sb, 16);
        wmma::mma_sync(fc, fa, fb, fc);
        __syncwarp();
    }
    wmma::store_matrix_sync(c + row * n + col, fc, n, wmma::mem_row_major);
}

extern "C" __global__ void wmma_wide(__half* c, const __half* a, const __half* b, int n, int k) {
    int row = blockIdx.y * 32, col = blockIdx.x * 8;
    wmma::fragment<wmma::matrix_a, 32, 8, 16, __half, wmma::col_major> fa;
    wmma::fragment<wmma::matrix_b, 32, 8, 16, __half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 32, 8, 16, __half> fc;
    wmma::fill_fragment(fc, __float2half(0.0f));
    for (int i = 0; i < k; i += 16) {
        wmma::load_matrix_sync(fa, a + i * 32 * gridDim.y + row, 32 * gridDim.y);
        wmma::load_matrix_sync(fb, b + col * k + i, k);
        wmma::mma_sync(fc, fa, fb, fc);
    }
    wmma::store_matrix_sync(c + row * n + col, fc, n, wmma::mem_row_major);
}
