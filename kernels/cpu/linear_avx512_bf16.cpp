// bfloat16 linear layers on x86 CPUs with AVX-512 BF16, see products.h.
#include "linear.h"

#ifdef __x86_64__
#ifndef TARGET  // a test compiles this file for AVX2, with the other instructions in scalar code
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"
#endif
#include "target_begin.h"
#include "avx512.h"
#include "products.h"

// A word is two bfloat16.
struct Pairs : Float32 {
    typedef bf16 Row;
    typedef vi Column;
    static const int INPUTS = 2;

    INLINE void columns(const char* step, vi* all) { Words<uint8_t>::columns(step, all); }
    INLINE vi spread(const bf16* inputs) { return read_word<int32_t>(inputs) - vi{}; }
    INLINE vf add(vf sum, vi inputs, vi column) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)inputs, (__m512bh)column);
    }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_avx512_bf16(LINEAR_ARGUMENTS) {
#ifdef __x86_64__
    linear<void, Pairs, void, void>(LINEAR_VALUES);
#endif
}
