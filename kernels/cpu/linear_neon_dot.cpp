// 8-bit linear layers on Arm CPUs with dot products, see products.h.
#include "linear.h"

#ifdef __aarch64__
#define TARGET "arch=armv8.2-a+dotprod"
#include "target_begin.h"
#include "neon.h"
#include "products.h"

struct Quads : Words<int8_t> {
    INLINE vi add(vi sum, vi inputs, vi column) { return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)inputs, (int8x16_t)column); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_neon_dot(LINEAR_ARGUMENTS) {
#ifdef __aarch64__
    linear<void, void, void, Quads>(LINEAR_VALUES);
#endif
}
