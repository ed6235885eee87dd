// Softmax, normalisations and activations.
#define INFINITE __int_as_float(0x7f800000)

// One block for each row, the maximum and the sum taken on the way.
extern "C" __global__ void softmax_online(float* out, const float* x, int width) {
    __shared__ float maxima[32], sums[32];
    const float* row = x + (size_t)blockIdx.x * width;
    float m = -INFINITE, s = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float v = row[i], most = fmaxf(m, v);
        s = s * expf(m - most) + expf(v - most);
        m = most;
    }
    for (int d = 16; d > 0; d >>= 1) {
        float m2 = __shfl_xor_sync(~0u, m, d), s2 = __shfl_xor_sync(~0u, s, d), most = fmaxf(m, m2);
        s = (m == -INFINITE ? 0 : s * expf(m - most)) + (m2 == -INFINITE ? 0 : s2 * expf(m2 - most));
        m = most;
    }
    int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) { maxima[threadIdx.x / 32] = m; sums[threadIdx.x / 32] = s; }
    __syncthreads();
    m = maxima[0];
    for (int w = 1; w < warps; w++) m = fmaxf(m, maxima[w]);
    s = 0;
    for (int w = 0; w < warps; w++) if (maxima[w] > -INFINITE) s += sums[w] * expf(maxima[w] - m);
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[(size_t)blockIdx.x * width + i] = expf(row[i] - m) / s;
}

// One warp for each row; blockDim.y rows a block.
extern "C" __global__ void softmax_warp(float* out, const float* x, int rows, int width) {
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    float m = -INFINITE, s = 0;
    for (int i = threadIdx.x; i < width; i += 32) m = fmaxf(m, x[row * width + i]);
    for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    for (int i = threadIdx.x; i < width; i += 32) s += __expf(x[row * width + i] - m);
    for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
    float scale = __fdividef(1.0f, s);
    for (int i = threadIdx.x; i < width; i += 32) out[row * width + i] = __expf(x[row * width + i] - m) * scale;
}

extern "C" __global__ void cross_entropy(float* loss, const float* x, const int* target, int rows, int width) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    if (target[row] < 0) { loss[row] = 0; return; }
    float m = -INFINITE, s = 0;
    for (int i = 0; i < width; i++) m = max(m, x[row * width + i]);
    for (int i = 0; i < width; i++) s += expf(x[row * width + i] - m);
    loss[row] = logf(s) + m - x[row * width + target[row]];
}

extern "C" __global__ void layer_norm(float* out, const float* x, const float* w, const float* b, int width, float eps) {
    extern __shared__ float shared[];
    const float* row = x + (size_t)blockIdx.x * width;
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += row[i];
    shared[threadIdx.x] = sum;
    __syncthreads();
    float mean = 0;
    for (int i = 0; i < blockDim.x; i++) mean += shared[i];
    mean /= width;
    __syncthreads();
    sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) { float d = row[i] - mean; sum += d * d; }
    shared[threadIdx.x] = sum;
    __syncthreads();
    float variance = 0;
    for (int i = 0; i < blockDim.x; i++) variance += shared[i];
    float r = rsqrtf(variance / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[(size_t)blockIdx.x * width + i] = (row[i] - mean) * r * w[i] + b[i];
}

extern "C" __global__ void gelu(float* out, float* tanh_form, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    out[i] = 0.5f * v * (1.0f + erff(v * 0.70710678f));
    tanh_form[i] = 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
}

extern "C" __global__ void rope(float* x, int rows, int heads, int dim) {
    int pair = threadIdx.x, head = threadIdx.y, row = blockIdx.x;
    if (pair >= dim / 2 || head >= heads) return;
    float angle = row * powf(10000.0f, -2.0f * pair / dim), s, c;
    sincosf(angle, &s, &c);
    float* at = x + (row * heads + head) * dim + 2 * pair;
    float2 v = *(float2*)at;
    *(float2*)at = make_float2(v.x * c - v.y * s, v.x * s + v.y * c);
}

extern "C" __global__ void adam(float4* p, float4* m, float4* v, const float4* g, int n, float lr, float c1, float c2) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 a = p[i], b = m[i], c = v[i], d = g[i];
    float* pa = &a.x; float* pb = &b.x; float* pc = &c.x; float* pd = &d.x;
    #pragma unroll
    for (int k = 0; k < 4; k++) {
        pb[k] = 0.9f * pb[k] + 0.1f * pd[k];
        pc[k] = 0.95f * pc[k] + 0.05f * pd[k] * pd[k];
        pa[k] -= lr * (pb[k] / c1) / (sqrtf(pc[k] / c2) + 1e-8f);
    }
    p[i] = a; m[i] = b; v[i] = c;
}
