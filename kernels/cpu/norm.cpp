// RMSNorm of rows; a residual may be added first. A row's bits depend on that row alone.
#include <cmath>

#include "common.h"

// With an offset, multiply by weight + offset and round once, as models with an offset do.
template <class T>
INLINE v16 scaled(v16 x, float factor, v16 weight, float offset) {
    return offset ? x * factor * (weight + offset) : rounded<T>(x * factor) * weight;
}

template <class T>
INLINE void one_row(T* x, const T* add, const T* weight, T* out, int64_t dim, float eps, float offset) {
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
    for (int64_t d = 0; d < whole; d += 16) store(out + d, scaled<T>(load(x + d), factor, load(weight + d), offset));
    if (rest) {
        v16 wide = scaled<T>(load_part(x + whole, rest), factor, load_part(weight + whole, rest), offset);
        store_part(out + whole, wide, rest);
    }
}

INLINE void norm(int type, char* x, const char* add, const char* weight, char* out, int64_t first, int64_t last,
                 int64_t dim, float eps, float offset) {
    for (int64_t i = first; i < last; i++) {
        int64_t at = i * dim;
        if (type == FLOAT32) {
            const float* more = add ? (const float*)add + at : nullptr;
            one_row((float*)x + at, more, (const float*)weight, (float*)out + at, dim, eps, offset);
        } else {
            const bf16* more = add ? (const bf16*)add + at : nullptr;
            one_row((bf16*)x + at, more, (const bf16*)weight, (bf16*)out + at, dim, eps, offset);
        }
    }
}

INLINE void heads_of_rows(int type, char* x, int64_t stride, const char* weight, int64_t first, int64_t last,
                          int64_t heads, int64_t dim, float eps, float offset) {
    for (int64_t i = first; i < last; i++) {
        for (int64_t at = i * stride; at < i * stride + heads * dim; at += dim) {
            if (type == FLOAT32)
                one_row((float*)x + at, (const float*)nullptr, (const float*)weight, (float*)x + at, dim, eps, offset);
            else
                one_row((bf16*)x + at, (const bf16*)nullptr, (const bf16*)weight, (bf16*)x + at, dim, eps, offset);
        }
    }
}

// x, add, out [rows, dim], weight [dim]: x += add unless add is null; out = x / rms(x), rounded, times weight.
extern "C" void sensorium_norm(int type, char* x, const char* add, const char* weight, char* out, int64_t rows, int64_t dim,
                               float eps, float offset, int threads) {
    parallel_rows(threads, rows, dim, [&](int64_t first, int64_t last) {
        run_best<norm>(type, x, add, weight, out, first, last, dim, eps, offset);
    });
}

// x [rows, heads, dim] with row stride `stride`, weight [dim]: norm of every head in place.
extern "C" void sensorium_norm_heads(int type, char* x, int64_t stride, const char* weight, int64_t rows, int64_t heads,
                                     int64_t dim, float eps, float offset, int threads) {
    parallel_rows(threads, rows, heads * dim, [&](int64_t first, int64_t last) {
        run_best<heads_of_rows>(type, x, stride, weight, first, last, heads, dim, eps, offset);
    });
}
