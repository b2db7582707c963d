// Linear layers with 4-bit weights for x86 CPUs with AVX-512 BF16 and VNNI: activations in float32, bfloat16 or int8.
#ifdef __x86_64__
#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"))), apply_to = function)
#pragma STDC FP_CONTRACT OFF
#include "linear_int4_body.h"  // clang passes vectors between functions of one instruction set only
#else
#include "common.h"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
#pragma GCC optimize("fp-contract=off")
#include "linear_int4_body.h"
#endif

namespace {
// Base of all types of activations. A column is 16 outputs.
struct Panels {
    typedef __m512 Floats;
    typedef __m512i Codes, Columns;
    static const int WIDTH = 64, COLUMNS = 4, ROWS = 6;

    INLINE Codes load(const char* p) { return _mm512_loadu_si512(p); }

    INLINE __m512i spread(const char* p) {
        int32_t word;
        memcpy(&word, p, 4);
        return _mm512_set1_epi32(word);
    }

    INLINE Floats load_scale(const Weights& w, int64_t at) {
        if (w.scale_type == SCALE_FLOAT32) return _mm512_loadu_ps((const float*)w.scale + at);
        const __m256i half = _mm256_loadu_si256((const __m256i*)((const uint16_t*)w.scale + at));
        if (w.scale_type == SCALE_FLOAT16) return _mm512_cvtph_ps(half);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }

    INLINE __m512i zeros(const Weights& w, int64_t at) {
        return w.zero ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zero + at))) : _mm512_set1_epi32(8);
    }
};

// Sums of (code - 8) in float32; `zero` is 8 - the zero point.
struct FloatSums : Panels {
    typedef __m512 Sum;

    INLINE Floats load_zero(const Weights& w, int64_t at) {
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(8), zeros(w, at)));
    }
    INLINE void settle(Sum&) {}
    INLINE Floats value(Sum sum, Floats zero, const char* inputs) {
        return sum + zero * _mm512_castsi512_ps(spread(inputs));
    }
};

struct Float32 : FloatSums {
    typedef FloatRow Row;

    INLINE __m512i unpack(__m512i codes, int word) {
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return _mm512_castps_si512(_mm512_permutexvar_ps((__m512i)((v16u)codes >> 4 * word), table));
    }
    INLINE void add(Sum& sum, __m512i inputs, __m512i columns) {
        sum = _mm512_fmadd_ps(_mm512_castsi512_ps(inputs), _mm512_castsi512_ps(columns), sum);
    }
};

struct Bfloat16 : FloatSums {
    typedef Bf16Row Row;

    INLINE __m512i unpack(__m512i codes, int word) {
        typedef uint16_t v32h __attribute__((vector_size(64)));
        const v32h table = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                            0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040,
                            0x4080, 0x40a0, 0x40c0, 0x40e0};  // -8 to 7, twice: an index has 5 bits
        return _mm512_permutexvar_epi16((__m512i)((v32h)codes >> 4 * word), (__m512i)table);
    }
    INLINE void add(Sum& sum, __m512i inputs, __m512i columns) {
        sum = _mm512_dpbf16_ps(sum, (__m512bh)inputs, (__m512bh)columns);
    }
};

// Sums of codes in int32.
struct Int8 : Panels {
    typedef Int8Row Row;
    typedef __m512i Sum;

    INLINE __m512i load_zero(const Weights& w, int64_t at) { return zeros(w, at); }
    INLINE __m512i unpack(__m512i codes, int word) {
        return (__m512i)((v16u)codes >> 4 * word & 0x0f0f0f0f);
    }
    INLINE void add(Sum& sum, __m512i inputs, __m512i columns) { sum = _mm512_dpbusd_epi32(sum, columns, inputs); }
    INLINE void settle(Sum&) {}
    INLINE Floats value(Sum sum, __m512i zero, const char* inputs) {
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_mullo_epi32(zero, spread(inputs))));
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

// Only for CPUs that have the instructions: the caller checks.

// x [rows, inputs] -> out [rows, outputs] in x's type, with `stride` numbers from row to row.
// order: the input of each column, or null. scratch: rows * (bytes of a converted row).
void sensorium_int4_linear(int type, const char* x, int64_t rows, int64_t inputs, const int32_t* order, const char* codes,
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
        multiply<Bfloat16>(w, (const bf16*)x, rows, inputs, order, scratch, (bf16*)out, threads);
#endif
}
}
