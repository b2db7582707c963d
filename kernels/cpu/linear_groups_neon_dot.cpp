// Linear layers with a scale per group of inputs on Arm CPUs with dot products, see linear_groups_body.h.
#include "linear.h"

#ifdef __aarch64__
#define TARGET "arch=armv8.2-a+dotprod"
#include "target_begin.h"
#include "neon.h"
#include "linear_groups_body.h"

struct Quads : Integers {
    INLINE void add(vi& sum, vi inputs, vi columns) { sum = (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)inputs, (int8x16_t)columns); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_group_linear_neon_dot(GROUP_ARGUMENTS) {
#ifdef __aarch64__
    group_linear<Float32, Float32, Quads>(GROUP_VALUES);
#endif
}
