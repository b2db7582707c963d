// Activation functions, and activation(gate) * up. An element's bits depend only on its inputs, not on its position.
#include "common.h"

enum Kind { SILU = 0, GELU = 1, QUICK_GELU = 2, TANH_GELU = 3, CLAMPED_SWIGLU = 4 };

// 2^x for x up to 126, and 2^126 beyond; 0 below the smallest normal number. For NaN it is any of these.
template <class V>
INLINE V bounded_exp2(V x) {
    const V most = splat<V>(126.f), y = normal_exp2(x < most ? x : most);
    return x < -126.f ? V{} : y;
}

// 1 + exp(-x); the caller divides x by it, so that NaN stays NaN.
template <class V>
INLINE V divisor(V x) { return bounded_exp2(x * -1.44269504f) + 1.f; }

// x times the normal CDF of x: max(x, 0) - |x| CDF(-|x|). A polynomial has the CDF's logarithm to base 2 for |x| <= 12, with an error
// of at most 1e-7 / (|x| CDF(-|x|)); the product is below 1e-31 beyond.
template <class V>
INLINE V gelu(V x) {
    const V size = (V)((typename IntegersOf<V>::Signed)x & 0x7fffffff), square = size * size;
    const V high = size * 3.1775735e-5f - 7.5692326e-4f, middle = size * 8.0369983e-3f - 5.333744e-2f;
    const V low = size * -4.5883430e-1f - 1.1511771f;
    const V beyond = size * normal_exp2(((high * square + middle) * square + low) * size - 0.9999963f);
    return (x < 0.f ? V{} : x) - (size > 12.f ? V{} : beyond);
}

// x * (1 + tanh(u)) / 2 = x / (1 + exp(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class V>
INLINE V tanh_gelu(V x) { return x / (bounded_exp2(x * (x * x * -0.10294324f - 2.3022082f)) + 1.f); }

// quick_gelu rounds after each step, as published models do.
template <Kind KIND, class T, class V>
INLINE V activate(V x) {
    if (KIND == SILU) return x / divisor(x);
    if (KIND == GELU) return gelu(x);
    if (KIND == TANH_GELU) return tanh_gelu(x);
    return rounded<T>(splat<V>(1.f) / divisor(rounded<T>(x * 1.702f))) * x;
}

template <Kind KIND, class V, class T>
INLINE void piece(const T* x, T* out, int64_t n) {
    const int64_t LANES = sizeof(V) / 4;
    int64_t d = 0;
    for (; d + LANES <= n; d += LANES) store<V>(out + d, activate<KIND, T>(load<V>(x + d)));
    if (d < n) store_part(out + d, activate<KIND, T>(load_part<V>(x + d, n - d)), n - d);
}

template <Kind KIND>
struct Activation {
    template <class V>
    static MEMBER void run(int type, const char* x, char* out, int64_t first, int64_t last) {
        if (type == FLOAT32)
            piece<KIND, V>((const float*)x + first, (float*)out + first, last - first);
        else
            piece<KIND, V>((const bf16*)x + first, (bf16*)out + first, last - first);
    }
};

// activation(gate) is rounded before the product, as in published models.
template <Kind KIND, class T, class V>
INLINE V product(V gate, V up) {
    if (KIND == CLAMPED_SWIGLU) {
        gate = gate > 7.f ? splat<V>(7.f) : gate;
        up = (up > 7.f ? splat<V>(7.f) : up < -7.f ? splat<V>(-7.f) : up) + 1.f;
    }
    return rounded<T>(activate<KIND, T>(gate)) * up;
}

template <Kind KIND, class V, class T>
INLINE void one_row(const T* gate, T* out, int64_t inner) {
    const T* up = gate + inner;
    const int64_t LANES = sizeof(V) / 4;
    int64_t d = 0;
    for (; d + LANES <= inner; d += LANES) store<V>(out + d, product<KIND, T>(load<V>(gate + d), load<V>(up + d)));
    if (d < inner) {
        int64_t n = inner - d;
        store_part(out + d, product<KIND, T>(load_part<V>(gate + d, n), load_part<V>(up + d, n)), n);
    }
}

template <Kind KIND>
struct Gate {
    template <class V>
    static MEMBER void run(int type, const char* x, char* out, int64_t first, int64_t last, int64_t inner) {
        for (int64_t i = first; i < last; i++) {
            if (type == FLOAT32)
                one_row<KIND, V>((const float*)x + 2 * i * inner, (float*)out + i * inner, inner);
            else
                one_row<KIND, V>((const bf16*)x + 2 * i * inner, (bf16*)out + i * inner, inner);
        }
    }
};

// Call run_vectors with the `Body` of an activation, so that the loops have no branches.
template <template <Kind> class Body, class... Args>
static void run_kind(int kind, Args... args) {
    if (kind == SILU) return run_vectors<Body<SILU>>(args...);
    if (kind == GELU) return run_vectors<Body<GELU>>(args...);
    if (kind == QUICK_GELU) return run_vectors<Body<QUICK_GELU>>(args...);
    if (kind == TANH_GELU) return run_vectors<Body<TANH_GELU>>(args...);
    run_vectors<Body<CLAMPED_SWIGLU>>(args...);
}

extern "C" void sensorium_activation(int type, int kind, const char* x, char* out, int64_t count, int threads) {
    parallel_rows(threads, count, 1, [&](int64_t first, int64_t last) { run_kind<Activation>(kind, type, x, out, first, last); });
}

// x [rows, gate | up, inner] -> out [rows, inner].
extern "C" void sensorium_gated(int type, int kind, const char* x, char* out, int64_t rows, int64_t inner, int threads) {
    parallel_rows(threads, rows, inner, [&](int64_t first, int64_t last) { run_kind<Gate>(kind, type, x, out, first, last, inner); });
}
