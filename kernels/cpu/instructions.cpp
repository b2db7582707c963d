// The instruction set of this CPU, see common.h.
#include "common.h"

static int best() {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return __builtin_cpu_supports("avx512bf16") ? LEVEL_AVX512_BF16 : LEVEL_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return LEVEL_AVX2;
#endif
    return LEVEL_BASE;
}

extern "C" {
// Raise this number, and ABI in kernels/native.py, when a function's arguments or the layout of its data change.
int sensorium_abi = 1;

int sensorium_level = best();
}
