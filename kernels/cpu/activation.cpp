// silu(gate) * up of packed rows. An element's bits depend on its gate and its up alone.
#include "common.h"

// Rounded between the two factors as the published models do.
template <class T>
INLINE v16 gated(v16 gate, v16 up) {
    v16 power = gate * -1.44269504f;
    T half[16];
    store(half, gate / (exp2(power > 126.f ? splat(126.f) : power) + 1.f));
    return load(half) * up;
}

template <class T>
INLINE void one_row(const T* gate, T* out, int64_t inner) {
    const T* up = gate + inner;
    int64_t d = 0;
    for (; d + 16 <= inner; d += 16) store(out + d, gated<T>(load(gate + d), load(up + d)));
    if (d < inner) store_part(out + d, gated<T>(load_part(gate + d, inner - d), load_part(up + d, inner - d)), inner - d);
}

CLONES static void swiglu(int type, const char* x, char* out, int64_t first, int64_t last, int64_t inner) {
    for (int64_t i = first; i < last; i++) {
        if (type == FLOAT32)
            one_row((const float*)x + 2 * i * inner, (float*)out + i * inner, inner);
        else
            one_row((const bf16*)x + 2 * i * inner, (bf16*)out + i * inner, inner);
    }
}

// x [rows, gate | up, inner] -> out [rows, inner].
extern "C" void sensorium_silu_mul(int type, const char* x, char* out, int64_t rows, int64_t inner, int threads) {
    parallel_rows(threads, rows, inner, [&](int64_t first, int64_t last) { swiglu(type, x, out, first, last, inner); });
}
