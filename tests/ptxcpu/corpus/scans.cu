// Prefix sums, compaction, sorting.

// Blelloch's scan, exclusive, of 2 * blockDim.x numbers (a power of two).
extern "C" __global__ void scan_tree(int* out, const int* x) {
    extern __shared__ int s[];
    int t = threadIdx.x, n = 2 * blockDim.x, base = blockIdx.x * n, offset = 1;
    s[2 * t] = x[base + 2 * t];
    s[2 * t + 1] = x[base + 2 * t + 1];
    for (int d = n >> 1; d > 0; d >>= 1) {
        __syncthreads();
        if (t < d) s[offset * (2 * t + 2) - 1] += s[offset * (2 * t + 1) - 1];
        offset *= 2;
    }
    if (t == 0) s[n - 1] = 0;
    for (int d = 1; d < n; d *= 2) {
        offset >>= 1;
        __syncthreads();
        if (t < d) {
            int i = offset * (2 * t + 1) - 1, j = offset * (2 * t + 2) - 1, v = s[i];
            s[i] = s[j];
            s[j] += v;
        }
    }
    __syncthreads();
    out[base + 2 * t] = s[2 * t];
    out[base + 2 * t + 1] = s[2 * t + 1];
}

__device__ int scan_in_warp(int v, int lane) {
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, v, d);
        if (lane >= d) v += other;
    }
    return v;
}

extern "C" __global__ void scan_shuffle(int* out, const int* x, int n) {
    __shared__ int totals[32];
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int v = scan_in_warp(i < n ? x[i] : 0, lane);
    if (lane == 31) totals[warp] = v;
    __syncthreads();
    if (warp == 0) {
        int total = lane < blockDim.x / 32 ? totals[lane] : 0;
        totals[lane] = scan_in_warp(total, lane);
    }
    __syncthreads();
    if (warp > 0) v += totals[warp - 1];
    if (i < n) out[i] = v;
}

// Each block waits for the sum of the one before it.
extern "C" __global__ void scan_chained(int* out, volatile int* sums, volatile int* flags, const int* x, int n) {
    __shared__ int before;
    __shared__ int totals[32];
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int v = scan_in_warp(i < n ? x[i] : 0, lane);
    if (lane == 31) totals[warp] = v;
    __syncthreads();
    for (int w = 0; w < warp; w++) v += totals[w];
    if (threadIdx.x == blockDim.x - 1) {
        int sum = 0;
        if (blockIdx.x > 0) {
            while (flags[blockIdx.x - 1] == 0) {}
            __threadfence();
            sum = sums[blockIdx.x - 1];
        }
        before = sum;
        sums[blockIdx.x] = sum + v;
        __threadfence();
        flags[blockIdx.x] = 1;
    }
    __syncthreads();
    if (i < n) out[i] = v + before;
}

// Segments start where a flag is set.
extern "C" __global__ void scan_segments(float* out, const float* x, const unsigned char* starts, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    bool start = i < n && (starts[i] != 0 || lane == 0);
    unsigned heads = __ballot_sync(~0u, start) | 1u;
    int first = 31 - __clz(heads & (0xffffffffu >> (31 - lane)));
    float v = i < n ? x[i] : 0;
    for (int d = 1; d < 32; d *= 2) {
        float other = __shfl_up_sync(~0u, v, d);
        if (lane - d >= first) v += other;
    }
    if (i < n) out[i] = v;
}

extern "C" __global__ void compact(int* out, int* count, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
    bool keep = i < n && x[i] % 3 == 0;
    unsigned votes = __ballot_sync(~0u, keep);
    int base = 0;
    if (lane == 0 && votes) base = atomicAdd(count, __popc(votes));
    base = __shfl_sync(~0u, base, 0);
    if (keep) out[base + __popc(votes & ((1u << lane) - 1))] = x[i];
}

extern "C" __global__ void sort_bitonic(unsigned* x, int n) {
    extern __shared__ unsigned keys[];
    int t = threadIdx.x;
    for (int i = t; i < n; i += blockDim.x) keys[i] = x[blockIdx.x * n + i];
    for (int k = 2; k <= n; k *= 2)
        for (int j = k / 2; j > 0; j /= 2) {
            __syncthreads();
            for (int i = t; i < n; i += blockDim.x) {
                int other = i ^ j;
                if (other > i && (keys[i] > keys[other]) == ((i & k) == 0)) {
                    unsigned swap = keys[i];
                    keys[i] = keys[other];
                    keys[other] = swap;
                }
            }
        }
    __syncthreads();
    for (int i = t; i < n; i += blockDim.x) x[blockIdx.x * n + i] = keys[i];
}

// One bit a round, stable, within a block.
extern "C" __global__ void sort_radix(unsigned* x) {
    __shared__ unsigned keys[1024];
    __shared__ int zeros_of[32];
    int t = threadIdx.x, lane = t % 32, warp = t / 32, warps = blockDim.x / 32;
    unsigned key = x[blockIdx.x * blockDim.x + t];
    for (int bit = 0; bit < 12; bit++) {
        bool zero = !(key >> bit & 1);
        unsigned votes = __ballot_sync(~0u, zero);
        if (lane == 0) zeros_of[warp] = __popc(votes);
        __syncthreads();
        int before = 0, zeros = 0;
        for (int w = 0; w < warps; w++) {
            if (w < warp) before += zeros_of[w];
            zeros += zeros_of[w];
        }
        int rank = before + __popc(votes & ((1u << lane) - 1));
        keys[zero ? rank : zeros + t - rank] = key;
        __syncthreads();
        key = keys[t];
        __syncthreads();
    }
    x[blockIdx.x * blockDim.x + t] = key;
}
