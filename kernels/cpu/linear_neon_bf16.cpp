// bfloat16 linear layers on Arm CPUs with bfloat16 dot products, see products.h.
#include "linear.h"

#ifdef __aarch64__
#define TARGET "arch=armv8.2-a+bf16"
#include "target_begin.h"
#include "neon.h"
#include "products.h"

// A word is two bfloat16.
struct Pairs : Float32 {
    typedef bf16 Row;
    typedef vi Column;
    static const int INPUTS = 2;

    INLINE void columns(const char* step, vi* all) { Words<int8_t>::columns(step, all); }
    INLINE vi spread(const bf16* inputs) { return read_word<int32_t>(inputs) - vi{}; }
    INLINE vf add(vf sum, vi inputs, vi column) {
        return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)inputs, (bfloat16x8_t)column);
    }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_neon_bf16(LINEAR_ARGUMENTS) {
#ifdef __aarch64__
    linear<void, Pairs, void, void>(LINEAR_VALUES);
#endif
}
