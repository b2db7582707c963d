// Rotary embedding of the leading values of every head, in place. A row's bits depend on that row alone.
#include "common.h"

template <class T>
INLINE v16 load_some(const T* p, int64_t n) {
    if (n >= 16) return load(p);
    return n > 0 ? load_part(p, n) : v16{};
}

template <class T>
INLINE void store_some(T* p, v16 x, int64_t n) {
    if (n >= 16)
        store(p, x);
    else if (n > 0)
        store_part(p, x, n);
}

// Pairs (i, i + half).
template <class T>
INLINE void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t d = 0; d < half; d += 16) {
        int64_t n = half - d;
        v16 a = load_some(x + d, n), b = load_some(x + half + d, n), c = load_some(cos + d, n), s = load_some(sin + d, n);
        store_some(x + d, a * c - b * s, n);
        store_some(x + half + d, b * c + a * s, n);
    }
}

// Pairs (2i, 2i + 1).
template <class T>
INLINE void rotate_interleaved(T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t d = 0; d < half; d += 16) {
        int64_t n = half - d;
        v16 low = load_some(x + 2 * d, 2 * n), high = load_some(x + 2 * d + 16, 2 * n - 16);
        v16 a = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        v16 b = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        v16 c = load_some(cos + d, n), s = load_some(sin + d, n), even = a * c - b * s, odd = b * c + a * s;
        low = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        high = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        store_some(x + 2 * d, low, 2 * n);
        store_some(x + 2 * d + 16, high, 2 * n - 16);
    }
}

template <class T>
INLINE void one_row(T* x, int64_t apart, const float* cos, const float* sin, int64_t heads, int64_t half, int interleaved) {
    for (int64_t h = 0; h < heads; h++, x += apart) {
        if (interleaved)
            rotate_interleaved(x, cos, sin, half);
        else
            rotate_halves(x, cos, sin, half);
    }
}

INLINE void rotate(int type, char* x, int64_t stride, int64_t apart, const float* cos, const float* sin, int64_t first,
                   int64_t last, int64_t heads, int64_t half, int interleaved) {
    for (int64_t i = first; i < last; i++) {
        if (type == FLOAT32)
            one_row((float*)x + i * stride, apart, cos + i * half, sin + i * half, heads, half, interleaved);
        else
            one_row((bf16*)x + i * stride, apart, cos + i * half, sin + i * half, heads, half, interleaved);
    }
}

// x [rows, heads, 2 * half] with row stride `stride` and head stride `apart`; cos, sin float32 [rows, half].
extern "C" void sensorium_rotate(int type, char* x, int64_t stride, int64_t apart, const float* cos, const float* sin,
                                 int64_t rows, int64_t heads, int64_t half, int interleaved, int threads) {
    parallel_rows(threads, rows, heads * half * 2, [&](int64_t first, int64_t last) {
        run_best<rotate>(type, x, stride, apart, cos, sin, first, last, heads, half, interleaved);
    });
}
