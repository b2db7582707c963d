// Linear layers with a scale per group of inputs on x86 CPUs with AVX-512 VNNI and BF16, see linear_groups_body.h.
#include "linear.h"

#ifdef __x86_64__
#ifndef TARGET  // a test compiles this file for AVX2, with the other instructions in scalar code
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"
#endif
#include "target_begin.h"
#include "avx512.h"
#include "linear_groups_body.h"
#include "groups_avx512.h"

struct Bfloat16 : Looked {
    typedef Bf16Row Row;
    typedef __m512i Columns;

    INLINE __m512i unpack(vi codes, int word) {
        typedef uint16_t v32h __attribute__((vector_size(64)));
        const v32h table = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                            0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040,
                            0x4080, 0x40a0, 0x40c0, 0x40e0};  // -8 to 7, twice: an index has 5 bits
        return _mm512_permutexvar_epi16((__m512i)((v32h)codes >> 4 * word), (__m512i)table);
    }
    INLINE void add(vf& sum, vi inputs, __m512i columns) { sum = (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)inputs, (__m512bh)columns); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_group_linear_avx512_bf16(GROUP_ARGUMENTS) {
#ifdef __x86_64__
    group_linear<Looked, Bfloat16, Quads>(GROUP_VALUES);
#endif
}
