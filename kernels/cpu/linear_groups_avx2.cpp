// Linear layers with a scale per group of inputs on x86 CPUs with AVX2, FMA and F16C, see linear_groups_body.h.
#include "linear.h"

#ifdef __x86_64__
#define TARGET "avx2,fma,f16c"
#include "target_begin.h"
#include "avx2.h"
#include "linear_groups_body.h"

// Products of two codes and inputs are at most 2 * 15 * 128, and 8 of them fit into 16 bits.
struct Pairs : Integers {
    static const int ROWS = 3, STREAMS = 1;

    struct Sum {
        __m256i narrow;
        vi wide;
    };

    INLINE void add(Sum& sum, vi inputs, vi columns) {
        sum.narrow = _mm256_add_epi16(sum.narrow, _mm256_maddubs_epi16((__m256i)columns, (__m256i)inputs));
    }
    INLINE void settle(Sum& sum) {
        sum.wide += (vi)_mm256_madd_epi16(sum.narrow, _mm256_set1_epi16(1));
        sum.narrow = _mm256_setzero_si256();
    }
    INLINE vf value(const Sum& sum, vi zero, const char* inputs) { return Integers::value(sum.wide, zero, inputs); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_group_linear_avx2(GROUP_ARGUMENTS) {
#ifdef __x86_64__
    group_linear<Float32, Float32, Pairs>(GROUP_VALUES);
#endif
}
