// Counters, locks and histograms.

extern "C" __global__ void histogram(unsigned* out, const unsigned char* x, int n) {
    __shared__ unsigned bins[64];
    for (int i = threadIdx.x; i < 64; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i] & 63], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < 64; i += blockDim.x)
        if (bins[i]) atomicAdd(&out[i], bins[i]);
}

// Lanes with the same key add once, by their leader.
extern "C" __global__ void histogram_matched(unsigned* out, const unsigned char* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int key = x[i] & 7;
    unsigned active = __activemask(), same = __match_any_sync(active, key);
    if (__ffs(same) - 1 == (threadIdx.x & 31)) atomicAdd(&out[key], __popc(same));
}

__device__ float atomic_max_float(float* at, float v) {
    int* p = (int*)at;
    int old = *p, assumed;
    do {
        assumed = old;
        if (__int_as_float(assumed) >= v) break;
        old = atomicCAS(p, assumed, __float_as_int(v));
    } while (old != assumed);
    return __int_as_float(old);
}

extern "C" __global__ void maxima(float* out, const float* x, int n, int groups) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomic_max_float(&out[i % groups], x[i]);
}

// A lock that one thread of each warp's lanes holds at a time.
extern "C" __global__ void locked_sum(int* lock, double* total, int* rounds) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            *(volatile double*)total = *(volatile double*)total + 1.5;
            *(volatile int*)rounds += 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}

// A lock that lanes of one warp wait for outside of the critical section.
extern "C" __global__ void spinning_sum(int* lock, int* total) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    *(volatile int*)total += threadIdx.x;
    __threadfence();
    atomicExch(lock, 0);
}

extern "C" __global__ void tickets(unsigned* order, unsigned* counter, unsigned long long* sum, long long* least) {
    unsigned ticket = atomicInc(counter, 1000000);
    order[ticket] = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(sum, (unsigned long long)ticket << 20);
    atomicMin(least, -(long long)ticket * 3000000000ll);
    atomicOr(&order[0], 0u);
    atomicXor(counter, 0u);
}

// Work items from a queue; warps of a block share what they draw.
extern "C" __global__ void queue(int* owner_sum, int* next, int n) {
    __shared__ int item;
    int mine = 0;
    while (true) {
        if (threadIdx.x == 0) item = atomicAdd(next, 1);
        __syncthreads();
        int got = item;
        __syncthreads();
        if (got >= n) break;
        mine += got;
    }
    atomicAdd(&owner_sum[threadIdx.x], mine);
}
