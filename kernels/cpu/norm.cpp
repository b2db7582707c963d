// RMSNorm of rows; a residual may be added first. A row's bits depend on that row alone.
#include <cmath>

#include "common.h"

// With an offset, multiply by weight + offset and round once, as models with an offset do.
template <class T, class V>
INLINE V scaled(V x, float factor, V weight, float offset) {
    return offset ? x * factor * (weight + offset) : rounded<T>(x * factor) * weight;
}

// Add a residual to n elements, unless `add` is null. Return their squares.
template <class V, class T>
INLINE V squares_of(T* x, const T* add, int64_t n) {
    const bool whole = n >= (int64_t)sizeof(V) / 4;
    V wide = whole ? load<V>(x) : load_part<V>(x, n);
    if (add) {
        wide = rounded<T>(wide + (whole ? load<V>(add) : load_part<V>(add, n)));
        whole ? store<V>(x, wide) : store_part(x, wide, n);
    }
    return wide * wide;
}

template <class V, class T>
INLINE void one_row(T* x, const T* add, const T* weight, T* out, int64_t dim, float eps, float offset) {
    const int64_t LANES = sizeof(V) / 4, whole = dim / 16 * 16;
    Sums<V> squares;
    for (int64_t at = 0; at < whole; at += 16)
#pragma GCC unroll 4
        for (int p = 0; p < Sums<V>::PARTS; p++)
            squares.part[p] += squares_of<V>(x + at + p * LANES, add ? add + at + p * LANES : nullptr, LANES);
#pragma GCC unroll 4
    for (int p = 0; p < Sums<V>::PARTS; p++) {
        const int64_t at = whole + p * LANES;
        if (at < dim) squares.part[p] += squares_of<V>(x + at, add ? add + at : nullptr, dim - at);
    }
    const float factor = 1.f / sqrtf(squares.total() / (float)dim + eps);
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) store<V>(out + d, scaled<T>(load<V>(x + d), factor, load<V>(weight + d), offset));
    if (d < dim) {
        const int64_t n = dim - d;
        store_part(out + d, scaled<T>(load_part<V>(x + d, n), factor, load_part<V>(weight + d, n), offset), n);
    }
}

struct Norm {
    template <class V>
    static MEMBER void run(int type, char* x, const char* add, const char* weight, char* out, int64_t first, int64_t last,
                           int64_t dim, float eps, float offset) {
        for (int64_t i = first; i < last; i++) {
            int64_t at = i * dim;
            if (type == FLOAT32) {
                const float* more = add ? (const float*)add + at : nullptr;
                one_row<V>((float*)x + at, more, (const float*)weight, (float*)out + at, dim, eps, offset);
            } else {
                const bf16* more = add ? (const bf16*)add + at : nullptr;
                one_row<V>((bf16*)x + at, more, (const bf16*)weight, (bf16*)out + at, dim, eps, offset);
            }
        }
    }
};

struct NormOfHeads {
    template <class V>
    static MEMBER void run(int type, char* x, int64_t stride, const char* weight, int64_t first, int64_t last, int64_t heads,
                           int64_t dim, float eps, float offset) {
        for (int64_t i = first; i < last; i++) {
            for (int64_t at = i * stride; at < i * stride + heads * dim; at += dim) {
                if (type == FLOAT32)
                    one_row<V>((float*)x + at, (const float*)nullptr, (const float*)weight, (float*)x + at, dim, eps, offset);
                else
                    one_row<V>((bf16*)x + at, (const bf16*)nullptr, (const bf16*)weight, (bf16*)x + at, dim, eps, offset);
            }
        }
    }
};

// x, add, out [rows, dim], weight [dim]: x += add unless add is null; out = x / rms(x), rounded, times weight.
extern "C" void sensorium_norm(int type, char* x, const char* add, const char* weight, char* out, int64_t rows, int64_t dim,
                               float eps, float offset, int threads) {
    parallel_rows(threads, rows, dim, [&](int64_t first, int64_t last) {
        run_vectors<Norm>(type, x, add, weight, out, first, last, dim, eps, offset);
    });
}

// x [rows, heads, dim] with row stride `stride`, weight [dim]: norm of every head in place.
extern "C" void sensorium_norm_heads(int type, char* x, int64_t stride, const char* weight, int64_t rows, int64_t heads,
                                     int64_t dim, float eps, float offset, int threads) {
    parallel_rows(threads, rows, heads * dim, [&](int64_t first, int64_t last) {
        run_vectors<NormOfHeads>(type, x, stride, weight, first, last, heads, dim, eps, offset);
    });
}
