// Rotary embedding in place: the first half of every head against the second. A row's bits depend on that row alone.
#include "common.h"

template <class T>
INLINE void one_row(T* x, const float* cos, const float* sin, int64_t heads, int64_t half) {
    for (int64_t h = 0; h < heads; h++, x += 2 * half) {
        int64_t d = 0;
        for (; d + 16 <= half; d += 16) {
            v16 a = load(x + d), b = load(x + half + d), c = load(cos + d), s = load(sin + d);
            store(x + d, a * c - b * s);
            store(x + half + d, b * c + a * s);
        }
        if (d < half) {
            int64_t n = half - d;
            v16 a = load_part(x + d, n), b = load_part(x + half + d, n), c = load_part(cos + d, n), s = load_part(sin + d, n);
            store_part(x + d, a * c - b * s, n);
            store_part(x + half + d, b * c + a * s, n);
        }
    }
}

CLONES static void rotate(int type, char* x, int64_t stride, const float* cos, const float* sin, int64_t first, int64_t last,
                          int64_t heads, int64_t half) {
    for (int64_t i = first; i < last; i++) {
        if (type == FLOAT32)
            one_row((float*)x + i * stride, cos + i * half, sin + i * half, heads, half);
        else
            one_row((bf16*)x + i * stride, cos + i * half, sin + i * half, heads, half);
    }
}

// x [rows, heads, 2 * half] with `stride` elements from row to row; cos, sin float32 [rows, half].
extern "C" void sensorium_rotary(int type, char* x, int64_t stride, const float* cos, const float* sin, int64_t rows,
                                 int64_t heads, int64_t half, int threads) {
    parallel_rows(threads, rows, heads * half * 2,
                  [&](int64_t first, int64_t last) { rotate(type, x, stride, cos, sin, first, last, heads, half); });
}
