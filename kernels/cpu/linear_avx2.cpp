// Linear layers on x86 CPUs with AVX2, FMA and F16C, see products.h.
#include "linear.h"

#ifdef __x86_64__
#define TARGET "avx2,fma,f16c"
#include "target_begin.h"
#include "avx2.h"
#include "products.h"

// int8 as pairs of 16-bit integers: a product and the sum of two products are exact. Instructions for unsigned bytes saturate.
struct Pairs : Scaled {
    typedef int16_t Row;
    typedef __m256i Column;
    static const int INPUTS = 2, BYTES = 2 * WIDTH, STREAMS = 1;

    INLINE void columns(const char* step, __m256i* two) {
        two[0] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)step));
        two[1] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)step + 1));
    }
    INLINE __m256i spread(const int16_t* inputs) { return _mm256_set1_epi32(read_word<int32_t>(inputs)); }
    INLINE vi add(vi sum, __m256i inputs, __m256i column) { return sum + (vi)_mm256_madd_epi16(inputs, column); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_avx2(LINEAR_ARGUMENTS) {
#ifdef __x86_64__
    linear<Float32, Bfloat16, Float16, Pairs>(LINEAR_VALUES);
#endif
}
