// Linear layers on x86 CPUs with AVX-512, without its extensions for bfloat16 and 8 bits, see products.h.
#include "linear.h"

#ifdef __x86_64__
#ifndef TARGET  // a test compiles this file for AVX2, with the other instructions in scalar code
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl"
#endif
#include "target_begin.h"
#include "avx512.h"
#include "products.h"

// int8 as pairs of 16-bit integers: a product and the sum of two products are exact.
struct Pairs : Scaled {
    typedef int16_t Row;
    typedef __m512i Column;
    static const int INPUTS = 2, BYTES = 2 * WIDTH;

    INLINE void columns(const char* step, __m512i* all) {
        for (int v = 0; v < VECTORS; v++) all[v] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)step + v));
    }
    INLINE __m512i spread(const int16_t* inputs) { return _mm512_set1_epi32(read_word<int32_t>(inputs)); }
    INLINE vi add(vi sum, __m512i inputs, __m512i column) { return sum + (vi)_mm512_madd_epi16(inputs, column); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_avx512(LINEAR_ARGUMENTS) {
#ifdef __x86_64__
    linear<Float32, Bfloat16, Float16, Pairs>(LINEAR_VALUES);
#endif
}
