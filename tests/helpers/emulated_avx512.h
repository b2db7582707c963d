// Instructions of AVX-512 that products use, in code for AVX2, for test_other_cpus.py: included before the sources that use them.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define TARGET "avx2,fma,f16c"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace emulated {
template <class To, class From>
static inline To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// A vector as an array of its elements.
template <class T, int size = 64>
struct Elements {
    T at[size / sizeof(T)];
};

typedef Elements<float> Floats;
typedef Elements<int32_t> Ints;
typedef Elements<uint16_t> Shorts;
typedef Elements<int8_t> Bytes;
typedef Elements<uint8_t> Unsigned;

static inline float from_bfloat16(uint16_t bits) { return as<float>((uint32_t)bits << 16); }

static inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    Floats x = as<Floats>(a), y = as<Floats>(b), sum = as<Floats>(c);
    for (int i = 0; i < 16; i++) sum.at[i] = std::fma(x.at[i], y.at[i], sum.at[i]);
    return as<__m512>(sum);
}

static inline __m512 cvtph_ps(__m256i halves) {
    __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    return as<__m512>(parts);
}

static inline __m512i cvtepu8_epi32(__m128i bytes) {
    Elements<uint8_t, 16> from = as<Elements<uint8_t, 16>>(bytes);
    Ints to;
    for (int i = 0; i < 16; i++) to.at[i] = from.at[i];
    return as<__m512i>(to);
}

static inline __m512i cvtepi8_epi32(__m128i bytes) {
    Elements<int8_t, 16> from = as<Elements<int8_t, 16>>(bytes);
    Ints to;
    for (int i = 0; i < 16; i++) to.at[i] = from.at[i];
    return as<__m512i>(to);
}

static inline __m512 loadu_ps(const float* p) {
    Floats to;
    memcpy(&to, p, sizeof to);
    return as<__m512>(to);
}

static inline __m512 permutexvar_ps(__m512i index, __m512 table) {
    Ints at = as<Ints>(index);
    Floats from = as<Floats>(table), to;
    for (int i = 0; i < 16; i++) to.at[i] = from.at[at.at[i] & 15];
    return as<__m512>(to);
}

static inline __m512i permutexvar_epi16(__m512i index, __m512i table) {
    Shorts at = as<Shorts>(index), from = as<Shorts>(table), to;
    for (int i = 0; i < 32; i++) to.at[i] = from.at[at.at[i] & 31];
    return as<__m512i>(to);
}

static inline __m512i broadcast_i32x4(__m128i part) {
    __m128i parts[4] = {part, part, part, part};
    return as<__m512i>(parts);
}

static inline __m512i shuffle_epi8(__m512i table, __m512i index) {
    Unsigned from = as<Unsigned>(table), at = as<Unsigned>(index), to;
    for (int i = 0; i < 64; i++) to.at[i] = at.at[i] & 128 ? 0 : from.at[(i & ~15) + (at.at[i] & 15)];
    return as<__m512i>(to);
}

static inline __m512i dpbusd_epi32(__m512i sums, __m512i left, __m512i right) {
    Unsigned x = as<Unsigned>(left);
    Bytes y = as<Bytes>(right);
    Ints sum = as<Ints>(sums);
    for (int i = 0; i < 64; i++) sum.at[i / 4] += (int32_t)x.at[i] * y.at[i];
    return as<__m512i>(sum);
}

static inline __m512i cvtepi8_epi16(__m256i bytes) {
    Elements<int8_t, 32> from = as<Elements<int8_t, 32>>(bytes);
    Elements<int16_t> to;
    for (int i = 0; i < 32; i++) to.at[i] = from.at[i];
    return as<__m512i>(to);
}

static inline __m512i set1_epi32(int32_t value) {
    Ints to;
    for (int& each : to.at) each = value;
    return as<__m512i>(to);
}

static inline __m512i madd_epi16(__m512i left, __m512i right) {
    Elements<int16_t> x = as<Elements<int16_t>>(left), y = as<Elements<int16_t>>(right);
    Ints sum = {};
    for (int i = 0; i < 32; i++) sum.at[i / 2] += (int32_t)x.at[i] * y.at[i];
    return as<__m512i>(sum);
}

template <class... T>
static inline __m512 setr_ps(T... values) {
    return as<__m512>(Floats{{(float)values...}});
}

// The instruction adds the product of the odd elements first, each with one rounding.
static inline __m512 dpbf16_ps(__m512 sums, __m512bh left, __m512bh right) {
    Shorts x = as<Shorts>(left), y = as<Shorts>(right);
    Floats sum = as<Floats>(sums);
    for (int i = 0; i < 16; i++) {
        for (int j = 1; j >= 0; j--) sum.at[i] = std::fma(from_bfloat16(x.at[2 * i + j]), from_bfloat16(y.at[2 * i + j]), sum.at[i]);
    }
    return as<__m512>(sum);
}
}  // namespace emulated
#pragma GCC pop_options

#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#undef _mm512_cvtepi8_epi16
#define _mm512_cvtepi8_epi16 emulated::cvtepi8_epi16
#undef _mm512_loadu_ps
#define _mm512_loadu_ps emulated::loadu_ps
#undef _mm512_permutexvar_ps
#define _mm512_permutexvar_ps emulated::permutexvar_ps
#undef _mm512_permutexvar_epi16
#define _mm512_permutexvar_epi16 emulated::permutexvar_epi16
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 emulated::set1_epi32
#undef _mm512_setr_ps
#define _mm512_setr_ps emulated::setr_ps
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 emulated::madd_epi16
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
