// Integers of all widths, bits and carries.
typedef unsigned long long u64;
typedef unsigned int u32;

extern "C" __global__ void products(u64* high, u64* low, long long* signed_high, const u64* a, const u64* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    high[i] = __umul64hi(a[i], b[i]);
    low[i] = a[i] * b[i] + (u64)__umulhi((u32)a[i], (u32)b[i]);
    signed_high[i] = __mul64hi((long long)a[i], (long long)b[i]) + __mulhi((int)a[i], (int)b[i]);
}

__device__ u64 modmul(u64 a, u64 b, u64 m) {
    u64 high = __umul64hi(a, b) % m, low = a * b;
    for (int k = 0; k < 64; k++) {
        u64 top = high >> 63;
        high = high << 1 | low >> 63;
        low <<= 1;
        if (top || high >= m) high -= m;
    }
    return high;
}

extern "C" __global__ void modpow(u64* out, const u64* base, const u32* power, u64 m, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 r = 1, b = base[i] % m;
    for (u32 e = power[i]; e; e >>= 1) {
        if (e & 1) r = modmul(r, b, m);
        b = modmul(b, b, m);
    }
    out[i] = r;
}

extern "C" __global__ void quotients(long long* out, const long long* a, const long long* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    long long x = a[i], y = b[i];
    out[8 * i] = x / y;
    out[8 * i + 1] = x % y;
    out[8 * i + 2] = (long long)((u64)x / (u64)y);
    out[8 * i + 3] = (long long)((u64)x % (u64)y);
    out[8 * i + 4] = (int)x / ((int)y | 1);
    out[8 * i + 5] = (u32)x % ((u32)y | 1);
    out[8 * i + 6] = (short)x / (short)(y | 1);
    out[8 * i + 7] = (unsigned char)x % ((unsigned char)(y) | 1);
}

extern "C" __global__ void bits(u32* out, const u32* a, const u32* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 x = a[i], y = b[i];
    u32 r[10] = {__brev(x), (u32)__popc(x ^ y), (u32)__clz(x), (u32)__ffs(x), __byte_perm(x, y, 0x3625),
                 __funnelshift_l(x, y, y), __funnelshift_rc(x, y, y & 63), (u32)__popcll((u64)x << 32 | y),
                 (u32)__clzll((u64)(x & 1) << 40 | y), (u32)(__brevll((u64)x << 32 | y) >> 11)};
    for (int k = 0; k < 10; k++) out[i * 10 + k] = r[k];
}

extern "C" __global__ void media(int* out, const int* a, const int* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int x = a[i], y = b[i];
    out[8 * i] = __sad(x, y, 7);
    out[8 * i + 1] = __usad(x, y, 9);
    out[8 * i + 2] = __hadd(x, y);
    out[8 * i + 3] = __rhadd(x, y);
    out[8 * i + 4] = __mul24(x, y);
    out[8 * i + 5] = __umul24(x, y);
    out[8 * i + 6] = __dp4a(x, y, 100);
    out[8 * i + 7] = __dp2a_lo(x, y, 5) ^ (int)__dp2a_hi((u32)x, (u32)y, 6u);
}

__constant__ u32 crc_table[16] = {
    0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
    0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};

extern "C" __global__ void crc32(u32* out, const unsigned char* text, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    u32 c = ~0u;
    for (int k = 0; k < width; k++) {
        c ^= text[i * width + k];
        c = crc_table[c & 15] ^ c >> 4;
        c = crc_table[c & 15] ^ c >> 4;
    }
    out[i] = ~c;
}

extern "C" __global__ void gcd(u64* out, const u64* a, const u64* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 x = a[i], y = b[i];
    while (y) { u64 r = x % y; x = y; y = r; }
    out[i] = x;
}

// 256-bit sums and differences by carry chains.
extern "C" __global__ void wide_sums(u32* sum, u32* difference, const u32* a, const u32* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const u32 *x = a + 8 * i, *y = b + 8 * i;
    u32 s[9], d[9];
    asm("add.cc.u32 %0, %9, %17;\n addc.cc.u32 %1, %10, %18;\n addc.cc.u32 %2, %11, %19;\n addc.cc.u32 %3, %12, %20;\n"
        "addc.cc.u32 %4, %13, %21;\n addc.cc.u32 %5, %14, %22;\n addc.cc.u32 %6, %15, %23;\n addc.cc.u32 %7, %16, %24;\n"
        "addc.u32 %8, 0, 0;"
        : "=r"(s[0]), "=r"(s[1]), "=r"(s[2]), "=r"(s[3]), "=r"(s[4]), "=r"(s[5]), "=r"(s[6]), "=r"(s[7]), "=r"(s[8])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7]),
          "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]), "r"(y[4]), "r"(y[5]), "r"(y[6]), "r"(y[7]));
    asm("sub.cc.u32 %0, %9, %17;\n subc.cc.u32 %1, %10, %18;\n subc.cc.u32 %2, %11, %19;\n subc.cc.u32 %3, %12, %20;\n"
        "subc.cc.u32 %4, %13, %21;\n subc.cc.u32 %5, %14, %22;\n subc.cc.u32 %6, %15, %23;\n subc.cc.u32 %7, %16, %24;\n"
        "subc.u32 %8, 0, 0;"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]), "=r"(d[4]), "=r"(d[5]), "=r"(d[6]), "=r"(d[7]), "=r"(d[8])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7]),
          "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]), "r"(y[4]), "r"(y[5]), "r"(y[6]), "r"(y[7]));
    for (int k = 0; k < 9; k++) { sum[9 * i + k] = s[k]; difference[9 * i + k] = d[k]; }
}

extern "C" __global__ void wide_product(u64* out, const u64* a, const u64* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 r[4] = {0, 0, 0, 0};
    const u64 *x = a + 2 * i, *y = b + 2 * i;
    asm("mul.lo.u64 %0, %4, %6;\n mul.hi.u64 %1, %4, %6;\n mad.lo.cc.u64 %1, %4, %7, %1;\n madc.hi.u64 %2, %4, %7, 0;\n"
        "mad.lo.cc.u64 %1, %5, %6, %1;\n madc.hi.cc.u64 %2, %5, %6, %2;\n addc.u64 %3, 0, 0;\n"
        "mad.lo.cc.u64 %2, %5, %7, %2;\n madc.hi.u64 %3, %5, %7, %3;"
        : "+l"(r[0]), "+l"(r[1]), "+l"(r[2]), "+l"(r[3]) : "l"(x[0]), "l"(x[1]), "l"(y[0]), "l"(y[1]));
    for (int k = 0; k < 4; k++) out[4 * i + k] = r[k];
}

extern "C" __global__ void generator(u32* out, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    u32 x = 123456789u + i, y = 362436069u ^ i, z = 521288629u * (i + 1), w = 88675123u;
    for (int k = 0; k < rounds; k++) {
        u32 t = x ^ x << 11;
        x = y; y = z; z = w;
        w = w ^ w >> 19 ^ (t ^ t >> 8);
        z = z << 13 | z >> 19;
    }
    out[i] = w + z;
}
