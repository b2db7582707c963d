// Linear layers with 4-bit weights for x86 CPUs with AVX2: activations in float32, bfloat16 (widened) or int8.
#ifdef __x86_64__
#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#pragma STDC FP_CONTRACT OFF
#include "linear_int4_body.h"  // clang passes vectors between functions of one instruction set only
#else
#include "common.h"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#pragma GCC optimize("fp-contract=off")
#include "linear_int4_body.h"
#endif

namespace {
// Base of all types of activations. A column is 8 outputs.
struct Panels {
    typedef __m256 Floats;
    typedef __m256i Codes;
    static const int WIDTH = 16, COLUMNS = 2;

    INLINE Codes load(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }

    INLINE __m256i spread(const char* p) {
        int32_t word;
        memcpy(&word, p, 4);
        return _mm256_set1_epi32(word);
    }

    INLINE Floats load_scale(const Weights& w, int64_t at) {
        if (w.scale_type == SCALE_FLOAT32) return _mm256_loadu_ps((const float*)w.scale + at);
        const __m128i half = _mm_loadu_si128((const __m128i*)((const uint16_t*)w.scale + at));
        if (w.scale_type == SCALE_FLOAT16) return _mm256_cvtph_ps(half);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }

    INLINE __m256i zeros(const Weights& w, int64_t at) {
        return w.zero ? _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(w.zero + at))) : _mm256_set1_epi32(8);
    }
};

// Sums of codes in float32; `zero` is minus the zero point.
struct Float32 : Panels {
    typedef FloatRow Row;
    typedef __m256 Sum, Columns;
    static const int ROWS = 4;

    INLINE Floats load_zero(const Weights& w, int64_t at) {
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_setzero_si256(), zeros(w, at)));
    }
    INLINE __m256 unpack(__m256i codes, int word) {
        return _mm256_cvtepi32_ps(_mm256_and_si256((__m256i)((v8u)codes >> 4 * word), _mm256_set1_epi32(15)));
    }
    INLINE void add(Sum& sum, __m256i inputs, __m256 columns) {
        sum = _mm256_fmadd_ps(_mm256_castsi256_ps(inputs), columns, sum);
    }
    INLINE void settle(Sum&) {}
    INLINE Floats value(Sum sum, Floats zero, const char* inputs) {
        return sum + zero * _mm256_castsi256_ps(spread(inputs));
    }
};

// Sums of codes in int32. Products of two codes and inputs are at most 2 * 15 * 128, and 8 of them fit into 16 bits.
struct Int8 : Panels {
    typedef Int8Row Row;
    typedef __m256i Columns;
    static const int ROWS = 3;

    struct Sum {
        __m256i narrow, wide;
    };

    INLINE __m256i load_zero(const Weights& w, int64_t at) { return zeros(w, at); }
    INLINE __m256i unpack(__m256i codes, int word) { return (__m256i)((v8u)codes >> 4 * word & 0x0f0f0f0f); }
    INLINE void add(Sum& sum, __m256i inputs, __m256i columns) {
        sum.narrow = _mm256_add_epi16(sum.narrow, _mm256_maddubs_epi16(columns, inputs));
    }
    INLINE void settle(Sum& sum) {
        sum.wide = _mm256_add_epi32(sum.wide, _mm256_madd_epi16(sum.narrow, _mm256_set1_epi16(1)));
        sum.narrow = _mm256_setzero_si256();
    }
    INLINE Floats value(const Sum& sum, __m256i zero, const char* inputs) {
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(sum.wide, _mm256_mullo_epi32(zero, spread(inputs))));
    }
};
}
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
#include "common.h"
#endif

extern "C" {

// Only for CPUs that have the instructions: the caller checks. The arguments are those of sensorium_int4_linear.
void sensorium_int4_linear_avx2(int type, const char* x, int64_t rows, int64_t inputs, const int32_t* order, const char* codes,
                                const char* scale, int64_t scale_type, const uint8_t* zero, const float* bias, int64_t steps,
                                int64_t group_steps, int64_t outputs, int64_t stride, int64_t int8_rows, char* scratch, char* out,
                                int threads) {
#ifdef __x86_64__
    const Weights w{codes, scale, zero, bias, steps, group_steps, outputs, stride, (int)scale_type};
    if (type == FLOAT32 && int8_rows)
        multiply<Int8>(w, (const float*)x, rows, inputs, order, scratch, (float*)out, threads);
    else if (type == FLOAT32)
        multiply<Float32>(w, (const float*)x, rows, inputs, order, scratch, (float*)out, threads);
    else if (int8_rows)
        multiply<Int8>(w, (const bf16*)x, rows, inputs, order, scratch, (bf16*)out, threads);
    else
        multiply<Float32>(w, (const bf16*)x, rows, inputs, order, scratch, (bf16*)out, threads);
#endif
}
}
