// Quantised keys and values in the layout of kernels/kv_quant.py: 8-bit values of a head, which share one scale.
#pragma once
#include "common.h"

enum Quant { NONE = 0, INT8 = 1, E4M3 = 2 };

typedef uint8_t v16b __attribute__((vector_size(16)));

static const float LEAST = 0x1p-6f;   // smallest normal number of e4m3
static const float ONES = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
static const float STEPS = 16384.f;    // the same for steps of 2^-9, e4m3's spacing below LEAST
static const float TINY = 1e-30f;      // lower bound of a head's absmax

// Round to the nearest value of the format, ties to even; x is within its range.
INLINE v16b round_to_quant(int quant, v16 x) {
    if (quant == INT8) return __builtin_convertvector((v16u)(x + ONES) & 0xff, v16b);
    const v16u bits = (v16u)x & 0x7fffffff;
    const v16u normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    const v16u small = (v16u)((v16)bits + STEPS) - (v16u)splat(STEPS);
    return __builtin_convertvector(((v16)bits < LEAST ? small : normal) | ((v16u)x >> 24 & 0x80), v16b);
}

template <class T>
INLINE v16 load_some(const T* p, int64_t n) {
    return n < 16 ? load_part(p, n) : load(p);
}

// Quantise n values. Returns their scale, which is not finite if a value is not.
template <class T>
INLINE float quantize_head(int quant, const T* from, uint8_t* to, int64_t n) {
    v16i most = {};  // magnitudes as integers have the same order, NaN last
    for (int64_t d = 0; d < n; d += 16) {
        const v16i x = (v16i)load_some(from + d, n - d) & 0x7fffffff;
        most = x > most ? x : most;
    }
    int32_t highest = 0;
    for (int i = 0; i < 16; i++) highest = most[i] > highest ? most[i] : highest;
    float largest;
    memcpy(&largest, &highest, sizeof largest);
    const float scale = (largest < TINY ? TINY : largest) / (quant == INT8 ? 127.f : 448.f);
    for (int64_t d = 0; d < n; d += 16) {
        const v16b made = round_to_quant(quant, load_some(from + d, n - d) / scale);
        memcpy(to + d, &made, n - d < 16 ? n - d : 16);
    }
    return scale;
}
