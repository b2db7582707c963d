// Linear layers with 4-bit weights on Arm CPUs with dot products, see linear_int4_body.h.
#include "linear.h"

#ifdef __aarch64__
#define TARGET "arch=armv8.2-a+dotprod"
#include "target_begin.h"
#include "neon.h"
#include "linear_int4_body.h"

struct Quads : Integers {
    INLINE void add(vi& sum, vi inputs, vi columns) { sum = (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)inputs, (int8x16_t)columns); }
};
#include "target_end.h"
#endif

extern "C" void sensorium_int4_linear_neon_dot(INT4_ARGUMENTS) {
#ifdef __aarch64__
    int4_linear<Float32, Float32, Quads>(INT4_VALUES);
#endif
}
