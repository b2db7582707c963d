// Activation functions, and activation(gate) * up. An element's bits depend only on its inputs, not on its position.
#include "common.h"

enum Kind { SILU = 0, GELU = 1, QUICK_GELU = 2, TANH_GELU = 3, CLAMPED_SWIGLU = 4 };

// 2^x for x up to 126, and 2^126 beyond; 0 below the smallest normal number. For NaN it is any of these.
INLINE v16 bounded_exp2(v16 x) {
    const v16 most = where_negative(126.f - x, splat(126.f), x);
    return where_negative(x + 126.f, v16{}, normal_exp2(most));
}

// 1 + exp(-x); the caller divides x by it, so that NaN stays NaN.
INLINE v16 divisor(v16 x) { return bounded_exp2(x * -1.44269504f) + 1.f; }

// x times the normal CDF of x, by the complementary error function of Abramowitz and Stegun 7.1.26.
INLINE v16 gelu(v16 x) {
    v16 z = (v16)((v16i)x & 0x7fffffff) * 0.70710678f, t = 1.f / (z * 0.3275911f + 1.f);
    v16 y = t * 1.061405429f - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    v16 beyond = y * t * bounded_exp2(z * z * -1.44269504f) * x * 0.5f;
    return where_negative(x + 0.f, beyond, x - beyond);  // -0 is not negative
}

// x * (1 + tanh(u)) / 2 = x / (1 + exp(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
INLINE v16 tanh_gelu(v16 x) { return x / divisor((x * x * x * 0.044715f + x) * 1.59576912f); }

// quick_gelu rounds after each step, as published models do.
template <class T>
INLINE v16 activate(int kind, v16 x) {
    if (kind == SILU) return x / divisor(x);
    if (kind == GELU) return gelu(x);
    if (kind == TANH_GELU) return tanh_gelu(x);
    return rounded<T>(splat(1.f) / divisor(rounded<T>(x * 1.702f))) * x;
}

template <class T>
INLINE void piece(int kind, const T* x, T* out, int64_t n) {
    int64_t d = 0;
    for (; d + 16 <= n; d += 16) store(out + d, activate<T>(kind, load(x + d)));
    if (d < n) store_part(out + d, activate<T>(kind, load_part(x + d, n - d)), n - d);
}

INLINE void activation(int type, int kind, const char* x, char* out, int64_t first, int64_t last) {
    if (type == FLOAT32)
        piece(kind, (const float*)x + first, (float*)out + first, last - first);
    else
        piece(kind, (const bf16*)x + first, (bf16*)out + first, last - first);
}

// activation(gate) is rounded before the product, as in published models.
template <class T>
INLINE v16 product(int kind, v16 gate, v16 up) {
    if (kind == CLAMPED_SWIGLU) {
        gate = gate > 7.f ? splat(7.f) : gate;
        up = up > 7.f ? splat(7.f) : up < -7.f ? splat(-7.f) : up;
        kind = QUICK_GELU, up += 1.f;
    }
    return rounded<T>(activate<T>(kind, gate)) * up;
}

template <class T>
INLINE void one_row(int kind, const T* gate, T* out, int64_t inner) {
    const T* up = gate + inner;
    int64_t d = 0;
    for (; d + 16 <= inner; d += 16) store(out + d, product<T>(kind, load(gate + d), load(up + d)));
    if (d < inner) {
        int64_t n = inner - d;
        store_part(out + d, product<T>(kind, load_part(gate + d, n), load_part(up + d, n)), n);
    }
}

INLINE void gate(int type, int kind, const char* x, char* out, int64_t first, int64_t last, int64_t inner) {
    for (int64_t i = first; i < last; i++) {
        if (type == FLOAT32)
            one_row(kind, (const float*)x + 2 * i * inner, (float*)out + i * inner, inner);
        else
            one_row(kind, (const bf16*)x + 2 * i * inner, (bf16*)out + i * inner, inner);
    }
}

extern "C" void sensorium_activation(int type, int kind, const char* x, char* out, int64_t count, int threads) {
    parallel_rows(threads, count, 1, [&](int64_t first, int64_t last) { run_best<activation>(type, kind, x, out, first, last); });
}

// x [rows, gate | up, inner] -> out [rows, inner].
extern "C" void sensorium_gated(int type, int kind, const char* x, char* out, int64_t rows, int64_t inner, int threads) {
    parallel_rows(threads, rows, inner, [&](int64_t first, int64_t last) { run_best<gate>(type, kind, x, out, first, last, inner); });
}
