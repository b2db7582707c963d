// Linear layers with a scale per group of inputs on x86 CPUs with AVX-VNNI (256 bits), see linear_groups_body.h.
#include "linear.h"

#ifdef __x86_64__
#ifndef TARGET  // a test compiles this file for AVX-512 VNNI, which has the same instruction
#define TARGET "avx2,fma,f16c,avxvnni"
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif
#include "target_begin.h"
#include "avx2.h"
#include "linear_groups_body.h"

struct Quads : Integers {
    INLINE void add(vi& sum, vi inputs, vi columns) { sum = (vi)DPBUSD((__m256i)sum, (__m256i)columns, (__m256i)inputs); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_group_linear_avx_vnni(GROUP_ARGUMENTS) {
#ifdef __x86_64__
    group_linear<Float32, Float32, Quads>(GROUP_VALUES);
#endif
}
