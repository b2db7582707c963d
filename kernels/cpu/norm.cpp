// RMSNorm of rows, with the residual added first where there is one. A row's bits depend on that row alone.
#include <cmath>

#include "common.h"

template <class T>
INLINE void one_row(T* x, const T* add, const T* weight, T* out, int64_t dim, float eps) {
    v16 squares = {};
    int64_t whole = dim / 16 * 16, rest = dim - whole;
    for (int64_t d = 0; d < whole; d += 16) {
        v16 wide = load(x + d);
        if (add) {
            wide = rounded<T>(wide + load(add + d));
            store(x + d, wide);
        }
        squares += wide * wide;
    }
    if (rest) {
        v16 wide = load_part(x + whole, rest);
        if (add) {
            wide = rounded<T>(wide + load_part(add + whole, rest));
            store_part(x + whole, wide, rest);
        }
        squares += wide * wide;
    }
    float factor = 1.f / sqrtf(sum(squares) / (float)dim + eps);
    for (int64_t d = 0; d < whole; d += 16) store(out + d, rounded<T>(load(x + d) * factor) * load(weight + d));
    if (rest) store_part(out + whole, rounded<T>(load_part(x + whole, rest) * factor) * load_part(weight + whole, rest), rest);
}

CLONES static void norm(int type, char* x, const char* add, const char* weight, char* out, int64_t first, int64_t last,
                        int64_t dim, float eps) {
    for (int64_t i = first; i < last; i++) {
        int64_t at = i * dim;
        if (type == FLOAT32)
            one_row((float*)x + at, add ? (const float*)add + at : nullptr, (const float*)weight, (float*)out + at, dim, eps);
        else
            one_row((bf16*)x + at, add ? (const bf16*)add + at : nullptr, (const bf16*)weight, (bf16*)out + at, dim, eps);
    }
}

// x, add, out [rows, dim], weight [dim]: x += add unless add is null, out = x / rms(x), rounded, times weight.
extern "C" void sensorium_rms_norm(int type, char* x, const char* add, const char* weight, char* out, int64_t rows, int64_t dim,
                                   float eps, int threads) {
    parallel_rows(threads, rows, dim, [&](int64_t first, int64_t last) { norm(type, x, add, weight, out, first, last, dim, eps); });
}
