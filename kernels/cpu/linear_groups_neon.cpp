// Linear layers with a scale per group of inputs on every 64-bit Arm CPU, see linear_groups_body.h.
#include "linear.h"

#ifdef __aarch64__
#define TARGET "arch=armv8-a"
#include "target_begin.h"
#include "neon.h"
#include "linear_groups_body.h"

// Products of two codes and inputs are at most 2 * 15 * 128, and 8 of them fit into 16 bits.
struct Pairs : Integers {
    struct Sum {
        int16x8_t narrow;
        int32x4_t wide;
    };

    INLINE void add(Sum& sum, vi inputs, vi columns) {
        const int8x16_t a = (int8x16_t)inputs, b = (int8x16_t)columns;
        const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
        sum.narrow = vaddq_s16(sum.narrow, vpaddq_s16(low, high));
    }
    INLINE void settle(Sum& sum) {
        sum.wide = vpadalq_s16(sum.wide, sum.narrow);
        sum.narrow = vdupq_n_s16(0);
    }
    INLINE vf value(const Sum& sum, vi zero, const char* inputs) { return Integers::value((vi)sum.wide, zero, inputs); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_group_linear_neon(GROUP_ARGUMENTS) {
#ifdef __aarch64__
    group_linear<Float32, Float32, Pairs>(GROUP_VALUES);
#endif
}
