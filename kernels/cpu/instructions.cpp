// The instruction sets of this CPU, see common.h.
#include "common.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#ifdef __x86_64__
static bool bit(unsigned leaf, unsigned part, int which, int at) {
    unsigned r[4] = {};
    return __get_cpuid_count(leaf, part, &r[0], &r[1], &r[2], &r[3]) && r[which] >> at & 1;
}
#endif

// Return the sets that the CPU has, one bit each.
static unsigned find_products() {
    unsigned found = 1 << PRODUCTS_BASE;
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !bit(1, 0, 2, 29)) return found;  // F16C
    found |= 1 << PRODUCTS_AVX2;
    if (bit(7, 1, 0, 4)) found |= 1 << PRODUCTS_AVX_VNNI;
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return found;
    found |= 1 << PRODUCTS_AVX512;
    if (!__builtin_cpu_supports("avx512vnni")) return found;
    found |= 1 << PRODUCTS_AVX512_VNNI;
    if (!__builtin_cpu_supports("avx512bf16")) return found;
    found |= 1 << PRODUCTS_AVX512_BF16;
#ifdef HAS_AMX
    const bool tiles = bit(7, 0, 3, 22) && bit(7, 0, 3, 24) && bit(7, 0, 3, 25);  // AMX-BF16, AMX-TILE, AMX-INT8
    const int request = 0x1023, tile_data = 18;                                   // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (tiles && !syscall(SYS_arch_prctl, request, tile_data)) found |= 1 << PRODUCTS_AMX;
#endif
#elif defined(__aarch64__)
    found |= 1 << PRODUCTS_NEON;
#if defined(__linux__)
    const bool dot = getauxval(AT_HWCAP) >> 20 & 1, brain = getauxval(AT_HWCAP2) >> 14 & 1;  // ASIMDDP, BF16
    const bool matrix = getauxval(AT_HWCAP2) >> 13 & 1;                                      // I8MM
#elif defined(__APPLE__)
    auto has = [](const char* name) {
        int value = 0;
        size_t size = sizeof value;
        return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
    };
    const bool dot = has("hw.optional.arm.FEAT_DotProd"), brain = has("hw.optional.arm.FEAT_BF16");
    const bool matrix = has("hw.optional.arm.FEAT_I8MM");
#else
    const bool dot = false, brain = false, matrix = false;
#endif
    if (dot) found |= 1 << PRODUCTS_NEON_DOT;
    if (dot && brain) found |= 1 << PRODUCTS_NEON_BF16;
    if (dot && brain && matrix) found |= 1 << PRODUCTS_NEON_I8MM;
#endif
    return found;
}

static int best_level(unsigned found) {
    return found >> PRODUCTS_AMX & 1           ? LEVEL_AMX
           : found >> PRODUCTS_AVX512_BF16 & 1 ? LEVEL_AVX512_BF16
           : found >> PRODUCTS_AVX512 & 1      ? LEVEL_AVX512
           : found >> PRODUCTS_AVX2 & 1        ? LEVEL_AVX2
                                               : LEVEL_BASE;
}

extern "C" {
// Increase this number, and ABI in kernels/native.py, when a function's arguments or the layout of its data change.
int sensorium_abi = 5;

int sensorium_found = (int)find_products();
int sensorium_level = best_level((unsigned)sensorium_found);
int sensorium_products = 31 - __builtin_clz((unsigned)sensorium_found);
}
