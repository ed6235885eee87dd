// Arrays of each thread, indexed by numbers known when run.

extern "C" __global__ void local_histogram(int* out, const unsigned char* x, int per_thread) {
    int bins[16];
    for (int b = 0; b < 16; b++) bins[b] = 0;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < per_thread; k++) bins[x[i * per_thread + k] & 15]++;
    int best = 0;
    for (int b = 1; b < 16; b++) if (bins[b] > bins[best]) best = b;
    out[i] = best * 1000 + bins[best];
}

extern "C" __global__ void sort_insertion(int* x, int per_thread) {
    int a[24];
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = per_thread - (i & 3);
    for (int k = 0; k < n; k++) a[k] = x[i * per_thread + k];
    for (int k = 1; k < n; k++) {
        int v = a[k], j = k;
        while (j > 0 && a[j - 1] > v) { a[j] = a[j - 1]; j--; }
        a[j] = v;
    }
    for (int k = 0; k < n; k++) x[i * per_thread + k] = a[k];
}

// Quicksort with a stack of its own.
extern "C" __global__ void sort_quick(short* x, int per_thread) {
    short a[32];
    signed char stack[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x, top = 0;
    for (int k = 0; k < per_thread; k++) a[k] = x[i * per_thread + k];
    stack[top++] = 0;
    stack[top++] = per_thread - 1;
    while (top > 0) {
        int high = stack[--top], low = stack[--top];
        if (low >= high) continue;
        short pivot = a[(low + high) / 2];
        int p = low, q = high;
        while (p <= q) {
            while (a[p] < pivot) p++;
            while (a[q] > pivot) q--;
            if (p <= q) { short s = a[p]; a[p++] = a[q]; a[q--] = s; }
        }
        stack[top++] = low; stack[top++] = q;
        stack[top++] = p; stack[top++] = high;
    }
    for (int k = 0; k < per_thread; k++) x[i * per_thread + k] = a[k];
}

// Gauss elimination with row exchanges.
extern "C" __global__ void solve4(double* out, const double* a, const double* b) {
    double m[4][5];
    int i = blockIdx.x * blockDim.x + threadIdx.x, row[4] = {0, 1, 2, 3};
    for (int r = 0; r < 4; r++) {
        for (int c = 0; c < 4; c++) m[r][c] = a[i * 16 + r * 4 + c];
        m[r][4] = b[i * 4 + r];
    }
    #pragma unroll 1
    for (int c = 0; c < 4; c++) {
        int best = c;
        for (int r = c + 1; r < 4; r++) if (fabs(m[row[r]][c]) > fabs(m[row[best]][c])) best = r;
        int swap = row[c]; row[c] = row[best]; row[best] = swap;
        for (int r = c + 1; r < 4; r++) {
            double f = m[row[r]][c] / m[row[c]][c];
            for (int k = c; k < 5; k++) m[row[r]][k] -= f * m[row[c]][k];
        }
    }
    for (int r = 3; r >= 0; r--) {
        double v = m[row[r]][4];
        for (int k = r + 1; k < 4; k++) v -= m[row[r]][k] * out[i * 4 + k];
        out[i * 4 + r] = v / m[row[r]][r];
    }
}

struct Item { float weight; int index; unsigned char tag; };

extern "C" __global__ void structs(int* out, const int* x, int per_thread) {
    Item items[8];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < per_thread; k++) {
        Item item = {x[i * per_thread + k] * 0.5f, k, (unsigned char)(x[i * per_thread + k] >> 2)};
        items[(k * 3 + i) & 7] = item;
    }
    Item* at = &items[(per_thread * 5 + i) & 7];
    for (int k = 0; k < per_thread; k++) if (items[(k * 3 + i) & 7].weight > 20) at = &items[(k * 3 + i) & 7];
    at->tag += 1;
    int sum = 0;
    for (int k = 0; k < per_thread; k++) sum += items[(k * 3 + i) & 7].tag * (items[(k * 3 + i) & 7].index + 1);
    out[i] = sum;
}

extern "C" __global__ void reverse_text(unsigned char* text, const int* lengths, int width) {
    unsigned char line[48];
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = lengths[i];
    for (int k = 0; k < n; k++) line[k] = text[i * width + k];
    for (int k = 0; k < n; k++) {
        unsigned char c = line[n - 1 - k];
        if (c >= 'a' && c <= 'z') c -= 32;
        text[i * width + k] = c;
    }
}
