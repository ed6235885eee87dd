// Matrix products, transposes, stencils.

extern "C" __global__ void matmul_naive(float* c, const float* a, const float* b, int m, int n, int k) {
    int row = blockIdx.y * blockDim.y + threadIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;
    float sum = 0;
    for (int i = 0; i < k; i++) sum += a[row * k + i] * b[i * n + col];
    c[row * n + col] = sum;
}

extern "C" __global__ void matmul_tiled(float* c, const float* a, const float* b, int m, int n, int k) {
    const int T = 16;
    __shared__ float sa[T][T], sb[T][T + 1];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * T + ty, col = blockIdx.x * T + tx;
    float sum = 0;
    for (int base = 0; base < k; base += T) {
        sa[ty][tx] = row < m && base + tx < k ? a[row * k + base + tx] : 0;
        sb[ty][tx] = col < n && base + ty < k ? b[(base + ty) * n + col] : 0;
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < T; i++) sum += sa[ty][i] * sb[i][tx];
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = sum;
}

// Each of 64 threads owns 4 x 4 results of a 32 x 32 tile.
extern "C" __global__ void matmul_registers(float* c, const float* a, const float* b, int m, int n, int k) {
    __shared__ float sa[8][32], sb[8][32];
    int t = threadIdx.x, tx = t % 8, ty = t / 8, row0 = blockIdx.y * 32, col0 = blockIdx.x * 32;
    float acc[4][4] = {};
    for (int base = 0; base < k; base += 8) {
        for (int i = t; i < 256; i += 64) {
            int r = i / 8, q = i % 8;
            sa[q][r] = row0 + r < m && base + q < k ? a[(row0 + r) * k + base + q] : 0;
            int p = i / 32, s = i % 32;
            sb[p][s] = base + p < k && col0 + s < n ? b[(base + p) * n + col0 + s] : 0;
        }
        __syncthreads();
        for (int q = 0; q < 8; q++) {
            float4 x = *(float4*)&sa[q][ty * 4], y = *(float4*)&sb[q][tx * 4];
            float u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] = fmaf(u[i], v[j], acc[i][j]);
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (row0 + ty * 4 + i < m && col0 + tx * 4 + j < n) c[(row0 + ty * 4 + i) * n + col0 + tx * 4 + j] = acc[i][j];
}

extern "C" __global__ void transpose(float* out, const float* x, int rows, int cols) {
    __shared__ float tile[32][33];
    int col = blockIdx.x * 32 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += blockDim.y) {
        int row = blockIdx.y * 32 + j;
        if (row < rows && col < cols) tile[j][threadIdx.x] = x[row * cols + col];
    }
    __syncthreads();
    int col2 = blockIdx.y * 32 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += blockDim.y) {
        int row = blockIdx.x * 32 + j;
        if (row < cols && col2 < rows) out[row * rows + col2] = tile[threadIdx.x][j];
    }
}

__constant__ float weights[3][3] = {{1, 2, 1}, {2, -4, 2}, {1, 2, 1}};

extern "C" __global__ void convolve(float* out, const float* x, int h, int w) {
    int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (col >= w || row >= h) return;
    float sum = 0;
    for (int dy = -1; dy <= 1; dy++) {
        if (row + dy < 0 || row + dy >= h) continue;
        for (int dx = -1; dx <= 1; dx++) {
            if (col + dx < 0 || col + dx >= w) continue;
            sum += weights[dy + 1][dx + 1] * x[(row + dy) * w + col + dx];
        }
    }
    out[row * w + col] = sum;
}

extern "C" __global__ void matvec(double* y, const double* a, const double* x, int m, int n) {
    int row = blockIdx.x;
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += 32) sum += a[(size_t)row * n + i] * x[i];
    for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(~0u, sum, d);
    if (threadIdx.x == 0) y[row] = sum;
}
