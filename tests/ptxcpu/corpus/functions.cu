// Device functions that stay functions.

struct Vec { float x, y, z; };
struct Big { double d; int n[5]; unsigned char tag; };

__device__ __noinline__ float dot(Vec a, Vec b) { return a.x * b.x + a.y * b.y + a.z * b.z; }
__device__ __noinline__ Vec cross(Vec a, Vec b) { Vec v = {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x}; return v; }

extern "C" __global__ void vectors(float* out, const Vec* a, const Vec* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Vec c = cross(a[i], b[i]);
    out[i] = dot(c, c) + dot(a[i], c);
}

__device__ __noinline__ int classify(int v) {
    if (v < 10) return 1;
    for (int k = 2; k * k <= v; k++) if (v % k == 0) return k;
    return v > 50 ? -v : 0;
}

// Called by some lanes only, and twice by others.
extern "C" __global__ void divergent_calls(int* out, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int r = 0;
    if (x[i] % 3) r = classify(x[i]);
    if (x[i] % 2) r += classify(x[i] + 1) * 100;
    out[i] = r;
}

__device__ __noinline__ Big update(Big b, int at, short step) {
    b.n[at % 5] += step;
    b.d *= 1.5;
    b.tag ^= at;
    return b;
}

__device__ __noinline__ void bump(int* where, int by) { *where += by; }

// Structures by value, addresses of local variables.
extern "C" __global__ void by_value(int* out, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Big b = {2.0, {1, 2, 3, 4, 5}, (unsigned char)x[i]};
    for (int k = 0; k < 4; k++) b = update(b, x[i] + k, (short)(k - 1));
    bump(&b.n[x[i] % 5], 1000);
    int sum = 0;
    for (int k = 0; k < 5; k++) sum += b.n[k] * (k + 1);
    out[i] = sum + (int)b.d + b.tag;
}

typedef float (*Operation)(float, float);
__device__ __noinline__ float add(float a, float b) { return a + b; }
__device__ __noinline__ float scale(float a, float b) { return a * b; }
__device__ __noinline__ float least(float a, float b) { return a < b ? a : b; }
__device__ Operation operations[3] = {add, scale, least};

extern "C" __global__ void pointers(float* out, const float* x, const int* which, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = operations[which[i]](x[i], 2.5f);
}

class Shape {
  public:
    __device__ virtual float area() const = 0;
    __device__ virtual int corners() const { return 0; }
};
class Square : public Shape {
    float side;
  public:
    __device__ Square(float s) : side(s) {}
    __device__ float area() const override { return side * side; }
    __device__ int corners() const override { return 4; }
};
class Circle : public Shape {
    float radius;
  public:
    __device__ Circle(float r) : radius(r) {}
    __device__ float area() const override { return 3.0f * radius * radius; }
};

extern "C" __global__ void virtuals(float* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Square square(x[i]);
    Circle circle(x[i] + 1);
    const Shape* shape = x[i] > 0 ? (const Shape*)&square : (const Shape*)&circle;
    out[i] = shape->area() + shape->corners();
}

template <int N> __device__ __noinline__ float power(float v) { return power<N - 1>(v) * v; }
template <> __device__ __noinline__ float power<0>(float v) { return 1; }

extern "C" __global__ void templates(float* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = power<5>(x[i]) + power<2>(x[i]);
}

extern "C" __global__ void asserting(int* out, const int* x, int limit) {
    int i = threadIdx.x;
    if (x[i] >= limit) __assertfail("x[i] < limit", "functions.cu", 100, "asserting", 1);
    if (x[i] == -12345) printf("never %d\n", i);
    out[i] = x[i] + 1;
}
