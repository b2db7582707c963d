// 8-bit linear layers on x86 CPUs with AVX-512 VNNI, see products.h.
#include "linear.h"

#ifdef __x86_64__
#ifndef TARGET  // a test compiles this file for AVX2, with the other instructions in scalar code
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#endif
#include "target_begin.h"
#include "avx512.h"
#include "products.h"

struct Quads : Words<uint8_t> {
    INLINE vi add(vi sum, vi inputs, vi column) {
        return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)inputs, (__m512i)column);
    }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_avx512_vnni(LINEAR_ARGUMENTS) {
#ifdef __x86_64__
    linear<void, void, void, Quads>(LINEAR_VALUES);
#endif
}
