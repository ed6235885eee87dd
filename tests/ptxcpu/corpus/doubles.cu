// Double precision, the mathematical library, rounding and conversions.

extern "C" __global__ void double_math(double* out, const double* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double v = x[i];
    out[8 * i] = sqrt(v);
    out[8 * i + 1] = exp(-v);
    out[8 * i + 2] = log(v);
    out[8 * i + 3] = sin(v) * cos(v);
    out[8 * i + 4] = pow(v, 1.7);
    out[8 * i + 5] = rsqrt(v) + cbrt(v);
    out[8 * i + 6] = tanh(v) + atan(v);
    out[8 * i + 7] = fmod(v, 0.7) + floor(v) + erf(v);
}

extern "C" __global__ void float_math(float* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    out[10 * i] = sqrtf(v) + 1.0f / v;
    out[10 * i + 1] = expf(-v);
    out[10 * i + 2] = logf(v);
    out[10 * i + 3] = sinf(v);
    out[10 * i + 4] = cosf(v);
    out[10 * i + 5] = powf(v, 1.7f);
    out[10 * i + 6] = rsqrtf(v) + cbrtf(v);
    out[10 * i + 7] = tanhf(v) + atan2f(v, 2.0f);
    out[10 * i + 8] = exp2f(v) + log2f(v) + exp10f(v * 0.1f) + log1pf(v);
    out[10 * i + 9] = fmodf(v, 0.7f) + floorf(v) + ceilf(v) + rintf(v) + truncf(v);
}

struct Body { double x, y, z, mass; };

extern "C" __global__ void gravity(double* force, const Body* bodies, int n) {
    __shared__ Body tile[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    Body me = bodies[i < n ? i : 0];
    double fx = 0, fy = 0, fz = 0;
    for (int base = 0; base < n; base += blockDim.x) {
        if (base + threadIdx.x < n) tile[threadIdx.x] = bodies[base + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < blockDim.x && base + j < n; j++) {
            double dx = tile[j].x - me.x, dy = tile[j].y - me.y, dz = tile[j].z - me.z;
            double r2 = dx * dx + dy * dy + dz * dz + 1e-3, inverse = tile[j].mass / (r2 * sqrt(r2));
            fx += dx * inverse; fy += dy * inverse; fz += dz * inverse;
        }
        __syncthreads();
    }
    if (i < n) { force[3 * i] = fx; force[3 * i + 1] = fy; force[3 * i + 2] = fz; }
}

// Down, up and towards zero: each result must lie on its side of the one to nearest.
extern "C" __global__ void roundings(float* f, double* d, const float* a, const float* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = a[i], y = b[i];
    f[12 * i] = __fadd_rd(x, y); f[12 * i + 1] = __fadd_ru(x, y); f[12 * i + 2] = __fadd_rz(x, y);
    f[12 * i + 3] = __fmul_rd(x, y); f[12 * i + 4] = __fmul_ru(x, y); f[12 * i + 5] = __fmul_rz(x, y);
    f[12 * i + 6] = __fdiv_rd(x, y); f[12 * i + 7] = __fdiv_ru(x, y); f[12 * i + 8] = __fsqrt_rd(fabsf(x));
    f[12 * i + 9] = __fsqrt_ru(fabsf(x)); f[12 * i + 10] = __frcp_rz(y); f[12 * i + 11] = __fmaf_rz(x, y, x);
    double u = x, v = (double)y * 1.1;
    d[8 * i] = __dadd_rd(u, v); d[8 * i + 1] = __dadd_ru(u, v); d[8 * i + 2] = __dmul_rd(u, v);
    d[8 * i + 3] = __dmul_ru(u, v); d[8 * i + 4] = __ddiv_rd(u, v); d[8 * i + 5] = __ddiv_ru(u, v);
    d[8 * i + 6] = __fma_rd(u, v, 1.0); d[8 * i + 7] = __dsqrt_ru(fabs(u));
}

extern "C" __global__ void conversions(int* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    double w = v * 1000003.0;
    int* o = out + 12 * i;
    o[0] = (int)v; o[1] = (unsigned)fabsf(v); o[2] = (short)v; o[3] = (unsigned char)(int)fabsf(v);
    o[4] = __float2int_rn(v); o[5] = __float2int_ru(v); o[6] = __float2int_rd(v);
    o[7] = (int)((long long)w >> 3); o[8] = (int)(unsigned long long)fabs(w);
    o[9] = __float_as_int((float)(long long)w); o[10] = __float_as_int(__ll2float_rz((long long)w + 7));
    o[11] = __double2hiint((double)(long long)w) ^ __double2loint(w);
}
