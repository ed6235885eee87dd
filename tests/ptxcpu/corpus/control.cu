// Branches, loops and returns that lanes take differently.

extern "C" __global__ void switch_dense(int* out, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i], r;
    switch (v & 15) {
        case 0: r = v * 3; break;
        case 1: r = v - 7;
        case 2: r = v ^ 0x55; break;
        case 3: r = v << 2; break;
        case 4: r = -v; break;
        case 5: out[i] = 12345; return;
        case 6: r = v * v; break;
        case 7: r = v / 3; break;
        case 8: r = v % 7; break;
        case 9: r = ~v; break;
        case 10: r = v | 1024;
        case 11: r = v & 0xff; break;
        default: r = 99; break;
    }
    out[i] = r + 1;
}

extern "C" __global__ void switch_sparse(int* out, const int* x, int which, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i];
    switch (which) {
        case 1: v += 1; break;
        case 10: v *= 2;
        case 100: v -= 3; break;
        case 1000: if (v > 50) { v = 0; break; } v = 7; break;
        default: v = -1;
    }
    switch (v) {
        case -1: v = 500; break;
        case 7: v = 600; break;
        case 1000000: v = 700; break;
    }
    out[i] = v;
}

extern "C" __global__ void nested_loops(int* out, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i], total = 0;
    for (int a = 0; a < v % 7 + 2; a++) {
        if ((a + v) % 5 == 3) continue;
        for (int b = a; b < 12; b++) {
            if (b * a > v) break;
            if ((b ^ v) & 1) continue;
            int c = b;
            while (c > 0) {
                total += c;
                c -= 3;
                if (total > 300) goto out;
            }
        }
        total -= 1;
    }
out:
    out[i] = total;
}

extern "C" __global__ void collatz(int* steps, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        long long v = x[i] + 1;
        int count = 0;
        while (v != 1) {
            v = v & 1 ? 3 * v + 1 : v / 2;
            count++;
        }
        steps[i] = count;
    }
}

extern "C" __global__ void early_returns(int* out, const int* x, int n) {
    __shared__ int seen;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) seen = 0;
    __syncthreads();
    if (i >= n) return;
    if (x[i] < 10) { out[i] = -1; return; }
    for (int k = 0; k < 20; k++) {
        if (x[i] == 30 + k) { out[i] = k; return; }
        if (x[i] > 90 - k) break;
    }
    atomicAdd(&seen, 1);
    if (x[i] & 1) return;
    out[i] = x[i] * 2;
}

// Jumps into the middle of a loop.
extern "C" __global__ void irreducible(int* out, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i], k = v % 9, total = 0;
    if (v & 1) goto middle;
top:
    total += k;
    if (total > 60) goto end;
middle:
    k += 2;
    total += 1;
    if (k < 20 + (v & 3)) {
        if (k & 4) goto middle;
        goto top;
    }
end:
    out[i] = total * 100 + k;
}

extern "C" __global__ void mandelbrot(int* out, int w, int h, int limit) {
    int px = blockIdx.x * blockDim.x + threadIdx.x, py = blockIdx.y * blockDim.y + threadIdx.y;
    if (px >= w || py >= h) return;
    float cr = __fsub_rn(__fdiv_rn(__fmul_rn(3.0f, (float)px), (float)w), 2.0f);
    float ci = __fsub_rn(__fdiv_rn(__fmul_rn(2.0f, (float)py), (float)h), 1.0f), a = 0, b = 0;
    int k = 0;
    for (; k < limit; k++) {
        float aa = __fmul_rn(a, a), bb = __fmul_rn(b, b);
        if (__fadd_rn(aa, bb) > 4.0f) break;
        b = __fadd_rn(__fmul_rn(__fmul_rn(2.0f, a), b), ci);
        a = __fadd_rn(__fsub_rn(aa, bb), cr);
    }
    out[py * w + px] = k;
}

extern "C" __global__ void bisect(int* out, const int* sorted, int m, const int* keys, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int low = 0, high = m;
    while (low < high) {
        int mid = (low + high) >> 1;
        if (sorted[mid] < keys[i]) low = mid + 1; else high = mid;
    }
    out[i] = low;
}

extern "C" __global__ void newton(double* out, int* rounds, const double* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double v = x[i], r = v > 1 ? v : 1.0;
    int k = 0;
    do {
        double next = 0.5 * (r + v / r);
        if (fabs(next - r) <= 1e-12 * next) break;
        r = next;
    } while (++k < 100);
    out[i] = r;
    rounds[i] = k;
}

extern "C" __global__ void loop_with_barrier(int* out, const int* x, int rounds) {
    __shared__ int a[256];
    int t = threadIdx.x, n = blockDim.x;
    a[t] = x[blockIdx.x * n + t];
    __syncthreads();
    for (int r = 0; r < rounds; r++) {
        int left = a[(t + n - 1) % n], v = a[t];
        if (left > v) v = (v * 3 + r) & 1023;
        else if (left == v) { for (int k = 0; k < (v & 3); k++) v += k; }
        __syncthreads();
        a[t] = v;
        __syncthreads();
        if (r == 5 && rounds > 7) continue;
    }
    out[blockIdx.x * n + t] = a[t];
}
