// Votes, matches and shuffles of warps.

extern "C" __global__ void votes(unsigned* out, const int* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i];
    unsigned all = __all_sync(~0u, v > 10), any = __any_sync(~0u, v > 90), ballot = __ballot_sync(~0u, v & 1);
    out[i] = all | any << 1 | (__popc(ballot) << 2) | (__uni_sync(~0u, v > 50) << 10);
}

extern "C" __global__ void matches(unsigned* any, unsigned* every, const int* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, same;
    any[i] = __match_any_sync(~0u, x[i]);
    unsigned mask = __match_all_sync(~0u, x[i] / 100, &same);
    every[i] = same ? mask : 7;
}

extern "C" __global__ void shuffles(int* out, const int* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i], lane = threadIdx.x % 32;
    int sum = __shfl_up_sync(~0u, v, 3) * 3 + __shfl_down_sync(~0u, v, 5, 16) * 5;
    sum += __shfl_xor_sync(~0u, v, 7, 8) * 7 + __shfl_sync(~0u, v, lane * 3 % 32) * 11 + __shfl_sync(~0u, v, 2, 4) * 13;
    double d = __shfl_xor_sync(~0u, (double)v, 1);
    long long l = __shfl_up_sync(~0u, (long long)v << 20, 1);
    out[i] = sum + (int)d * 17 + (int)(l >> 20) * 19;
}

extern "C" __global__ void active(unsigned* out, const int* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned mask = 0;
    if (x[i] % 3 == 0) {
        mask = __activemask();
        if (x[i] % 2 == 0) mask = __activemask();
    }
    out[i] = mask;
}

extern "C" __global__ void block_votes(int* out, const int* x, int n) {
    int i = threadIdx.x;
    bool yes = x[i] > 50;
    int count = __syncthreads_count(yes), every = __syncthreads_and(yes || i < n), some = __syncthreads_or(x[i] > 98);
    out[i] = count * 4 + (every != 0) * 2 + (some != 0);
}

extern "C" __global__ void reductions(unsigned* out, const unsigned* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    unsigned v = x[i];
    unsigned sum = __reduce_add_sync(~0u, v), least = __reduce_min_sync(~0u, v), either = __reduce_or_sync(~0u, v);
    int most = __reduce_max_sync(~0u, (int)v - 50);
    unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
    out[i] = sum + least * 3 + either * 5 + most * 7 + __reduce_xor_sync(half, v) * 11;
}

// Each group of lanes with the same key elects a leader and sums, in whatever order groups come.
extern "C" __global__ void group_sums(int* out, const int* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, key = x[i] % 5, sum = 0;
    unsigned left = ~0u;
    while (left) {
        int leader = __ffs(left) - 1, wanted = __shfl_sync(~0u, key, leader);
        unsigned members = __ballot_sync(~0u, key == wanted);
        int total = __reduce_add_sync(~0u, key == wanted ? x[i] : 0);
        if (key == wanted) sum = total * 100 + (lane == leader);
        left &= ~members;
    }
    out[i] = sum;
}
