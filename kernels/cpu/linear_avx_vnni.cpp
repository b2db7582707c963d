// 8-bit linear layers on x86 CPUs with AVX-VNNI (256 bits), see products.h.
#include "linear.h"

#ifdef __x86_64__
#ifndef TARGET  // a test compiles this file for AVX-512 VNNI, which has the same instruction
#define TARGET "avx2,fma,f16c,avxvnni"
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif
#include "target_begin.h"
#include "avx2.h"
#include "products.h"

struct Quads : Words<uint8_t> {
    INLINE vi add(vi sum, vi inputs, vi column) {
        return (vi)DPBUSD((__m256i)sum, (__m256i)inputs, (__m256i)column);
    }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_avx_vnni(LINEAR_ARGUMENTS) {
#ifdef __x86_64__
    linear<void, void, void, Quads>(LINEAR_VALUES);
#endif
}
