// Warps and blocks that work together: flags, named barriers, addresses of any kind of memory, module variables.

// Warps pass a number on by flags in shared memory.
extern "C" __global__ void relay(int* out, int rounds) {
    __shared__ volatile int turn;
    __shared__ volatile int value;
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (threadIdx.x == 0) { turn = 0; value = blockIdx.x; }
    __syncthreads();
    for (int r = 0; r < rounds; r++) {
        if (threadIdx.x % 32 == 0) {
            while (turn % warps != warps - 1 - warp) {}
            value = value * 2 + warp;
            __threadfence_block();
            turn = turn + 1;
        }
        __syncwarp();
    }
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

// The whole warp waits on a flag that another warp sets.
extern "C" __global__ void wait_for_flag(int* out, const int* x) {
    __shared__ int data[32];
    __shared__ int ready;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (warp == blockDim.x / 32 - 1) {
        data[lane] = x[lane] * 3;
        __threadfence_block();
        __syncwarp();
        if (lane == 0) atomicExch(&ready, 1);
    }
    while (atomicAdd(&ready, 0) == 0) { __nanosleep(10); }
    __threadfence_block();
    out[threadIdx.x] = ((volatile int*)data)[lane];
}

// Pairs of warps meet at barriers of their own.
extern "C" __global__ void pairs(int* out, const int* x) {
    __shared__ int a[256];
    int t = threadIdx.x, pair = t / 64;
    a[t] = x[t];
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
    int v = a[t ^ 32];
    asm volatile("bar.sync %0, %1;" ::"r"(pair + 1), "r"(64) : "memory");
    a[t] = v + 1;
    __syncthreads();
    out[t] = a[(t + 64) % blockDim.x];
}

// One warp produces, the others consume.
extern "C" __global__ void pipeline(int* out, int rounds) {
    __shared__ int slot[2][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = blockDim.x, sum = 0;
    for (int r = 0; r < rounds; r++) {
        int b = r & 1;
        if (warp == 0) {
            if (r >= 2) asm volatile("bar.sync %0, %1;" ::"r"(3 + b), "r"(n) : "memory");
            slot[b][lane] = r * 100 + lane;
            __threadfence_block();
            asm volatile("bar.arrive %0, %1;" ::"r"(1 + b), "r"(n) : "memory");
        } else {
            asm volatile("bar.sync %0, %1;" ::"r"(1 + b), "r"(n) : "memory");
            sum += slot[b][(lane + warp) % 32];
            if (r + 2 < rounds) asm volatile("bar.arrive %0, %1;" ::"r"(3 + b), "r"(n) : "memory");
        }
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void life(unsigned char* out, const unsigned char* x, int w, int h) {
    __shared__ unsigned char tile[10][18];
    int tx = threadIdx.x, ty = threadIdx.y, col = blockIdx.x * 16 + tx, row = blockIdx.y * 8 + ty;
    for (int i = ty * 16 + tx; i < 180; i += 128) {
        int r = (blockIdx.y * 8 + i / 18 - 1 + h) % h, c = (blockIdx.x * 16 + i % 18 - 1 + w) % w;
        tile[i / 18][i % 18] = x[r * w + c];
    }
    __syncthreads();
    int n = 0;
    for (int dy = 0; dy < 3; dy++) for (int dx = 0; dx < 3; dx++) if (dx != 1 || dy != 1) n += tile[ty + dy][tx + dx];
    if (col < w && row < h) out[row * w + col] = n == 3 || (n == 2 && tile[ty + 1][tx + 1]);
}

extern "C" __global__ void stencil(float* out, const float* x, int n, int radius) {
    extern __shared__ float line[];
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x + radius;
    line[t] = i < n ? x[i] : 0;
    if (threadIdx.x < radius) {
        int left = i - radius, right = i + blockDim.x;
        line[threadIdx.x] = left >= 0 ? x[left] : 0;
        line[t + blockDim.x] = right < n ? x[right] : 0;
    }
    __syncthreads();
    float sum = 0;
    for (int k = -radius; k <= radius; k++) sum += line[t + k] * (k + 2);
    if (i < n) out[i] = sum;
}

// A fast Fourier transform of 64 points a block.
extern "C" __global__ void fourier(float2* x) {
    __shared__ float2 a[64];
    int t = threadIdx.x;
    for (int i = t; i < 64; i += 32) a[__brev(i) >> 26] = x[blockIdx.x * 64 + i];
    for (int half = 1; half < 64; half *= 2) {
        __syncthreads();
        int group = t / half, at = t % half, i = group * 2 * half + at, j = i + half;
        float s, c;
        sincospif(-(float)at / half, &s, &c);
        float2 u = a[i], v = make_float2(a[j].x * c - a[j].y * s, a[j].x * s + a[j].y * c);
        __syncthreads();
        a[i] = make_float2(u.x + v.x, u.y + v.y);
        a[j] = make_float2(u.x - v.x, u.y - v.y);
    }
    __syncthreads();
    for (int i = t; i < 64; i += 32) x[blockIdx.x * 64 + i] = a[i];
}

__device__ int calls = 5;
__device__ float table[6] = {1, 2, 4, 8, 16, 32};
__device__ float* middle = &table[2];
__constant__ short steps[4] = {1, -1, 2, -2};

extern "C" __global__ void variables(int* out, float* seen) {
    int i = threadIdx.x;
    if (i == 0) { calls += 2; out[0] = calls; }
    if (i < 4) seen[i] = middle[steps[i]];
    if (i == 5) table[5] += 1;
    if (i == 6) seen[4] = table[4];
}

__device__ __noinline__ float pick(const float* from, int i) { return from[i]; }

// One pointer to shared, local, global or constant memory.
extern "C" __global__ void anywhere(float* out, const float* x) {
    __shared__ float s[64];
    float local[4];
    int t = threadIdx.x;
    s[t] = x[t] * 2;
    for (int k = 0; k < 4; k++) local[(k + t) & 3] = x[t] + k;
    __syncthreads();
    const float* from = t % 4 == 0 ? s : t % 4 == 1 ? local : t % 4 == 2 ? x : table;
    int at = t % 4 == 1 || t % 4 == 3 ? t / 4 % 4 : t ^ 1;
    out[t] = pick(from, at) + (__isShared(from) ? 1000 : 0) + (__isLocal(from) ? 2000 : 0) + (__isGlobal(from) ? 4000 : 0);
}

struct Settings { float scale[6]; int order[6]; double shift; };

// A structure of parameters, indexed when run.
extern "C" __global__ void settings(double* out, Settings s, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = s.scale[s.order[i % 6]] * i + s.shift;
}

// Two arrays in one piece of dynamic shared memory.
extern "C" __global__ void carved(double* out, const float* x, int n) {
    extern __shared__ double first[];
    unsigned char* second = (unsigned char*)(first + n);
    int t = threadIdx.x;
    if (t < n) { first[t] = x[t]; second[t] = (unsigned char)(t * 7); }
    __syncthreads();
    if (t < n) out[t] = first[n - 1 - t] + second[(t * 3) % n];
}
