// Linear layers on every 64-bit Arm CPU, see products.h.
#include "linear.h"

#ifdef __aarch64__
#define TARGET "arch=armv8-a"
#include "target_begin.h"
#include "neon.h"
#include "products.h"

// int8 as pairs of 16-bit integers: a product and the sum of two products are exact.
struct Pairs : Scaled {
    typedef int16_t Row;
    typedef int16x8_t Column;
    static const int INPUTS = 2, BYTES = 2 * WIDTH;

    INLINE void columns(const char* step, int16x8_t* all) {
        for (int v = 0; v < VECTORS; v++) all[v] = vmovl_s8(vld1_s8((const int8_t*)step + 8 * v));
    }
    INLINE int16x8_t spread(const int16_t* inputs) { return vreinterpretq_s16_s32(vdupq_n_s32(read_word<int32_t>(inputs))); }
    INLINE vi add(vi sum, int16x8_t inputs, int16x8_t column) {
        int32x4_t low = vmull_s16(vget_low_s16(inputs), vget_low_s16(column)), high = vmull_high_s16(inputs, column);
        return sum + (vi)vpaddq_s32(low, high);
    }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_neon(LINEAR_ARGUMENTS) {
#ifdef __aarch64__
    linear<Float32, Bfloat16, Float16, Pairs>(LINEAR_VALUES);
#endif
}
