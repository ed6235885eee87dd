// Sums, maxima and statistics over blocks, by shared memory, shuffles and atomics.

extern "C" __global__ void sum_tree(float* out, const float* x, int n) {
    extern __shared__ float part[];
    int t = threadIdx.x;
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    part[t] = sum;
    __syncthreads();
    int width = 1;
    while (width < blockDim.x) width *= 2;
    for (int half = width / 2; half > 0; half /= 2) {
        if (t < half && t + half < blockDim.x) part[t] += part[t + half];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = part[0];
}

__device__ float warp_sum(float v) {
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

// Blocks of whole warps only.
extern "C" __global__ void sum_shuffle(float* out, const float* x, int n) {
    __shared__ float part[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i];
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    if (warp == 0) {
        v = lane < blockDim.x / 32 ? part[lane] : 0;
        v = warp_sum(v);
        if (lane == 0) out[blockIdx.x] = v;
    }
}

extern "C" __global__ void argmax_rows(int* where, float* most, const float* x, int width) {
    __shared__ float best[32];
    __shared__ int at[32];
    const float* row = x + (size_t)blockIdx.x * width;
    float v = -1e30f;
    int index = -1;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        if (row[i] > v) { v = row[i]; index = i; }
    for (int d = 16; d > 0; d >>= 1) {
        float other = __shfl_down_sync(0xffffffffu, v, d);
        int place = __shfl_down_sync(0xffffffffu, index, d);
        if (other > v || (other == v && place >= 0 && place < index)) { v = other; index = place; }
    }
    if (threadIdx.x % 32 == 0) { best[threadIdx.x / 32] = v; at[threadIdx.x / 32] = index; }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; w++)
            if (best[w] > v || (best[w] == v && at[w] < index)) { v = best[w]; index = at[w]; }
        where[blockIdx.x] = index;
        most[blockIdx.x] = v;
    }
}

extern "C" __global__ void sum_kahan(double* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    double sum = 0, lost = 0;
    for (int k = i; k < n; k += stride) {
        double y = (double)x[k] - lost, t = sum + y;
        lost = (t - sum) - y;
        sum = t;
    }
    out[i] = sum;
}

__device__ unsigned int blocks_done = 0;

// The last block to finish adds up what the others left.
extern "C" __global__ void sum_last_block(float* out, float* parts, const float* x, int n) {
    __shared__ bool is_last;
    __shared__ float part[256];
    int t = threadIdx.x;
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    part[t] = sum;
    __syncthreads();
    if (t == 0) {
        float total = 0;
        for (int i = 0; i < blockDim.x; i++) total += part[i];
        ((volatile float*)parts)[blockIdx.x] = total;
        __threadfence();
        is_last = atomicInc(&blocks_done, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last && t == 0) {
        float total = 0;
        for (int b = 0; b < gridDim.x; b++) total += ((volatile float*)parts)[b];
        out[0] = total;
    }
}

// Welford's mean and variance of each row, merged between lanes.
extern "C" __global__ void moments(float* mean, float* variance, const float* x, int width) {
    const float* row = x + (size_t)(blockIdx.x * blockDim.y + threadIdx.y) * width;
    float m = 0, s = 0, count = 0;
    for (int i = threadIdx.x; i < width; i += 32) {
        count += 1;
        float d = row[i] - m;
        m += d / count;
        s += d * (row[i] - m);
    }
    for (int d = 1; d < 32; d *= 2) {
        float m2 = __shfl_xor_sync(~0u, m, d), s2 = __shfl_xor_sync(~0u, s, d), c2 = __shfl_xor_sync(~0u, count, d);
        float total = count + c2, delta = m2 - m;
        if (total > 0) {
            s += s2 + delta * delta * count * c2 / total;
            m = (m * count + m2 * c2) / total;
            count = total;
        }
    }
    if (threadIdx.x == 0) {
        int at = blockIdx.x * blockDim.y + threadIdx.y;
        mean[at] = m;
        variance[at] = s / width;
    }
}
