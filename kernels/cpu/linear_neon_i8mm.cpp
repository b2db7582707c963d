// 8-bit linear layers on Arm CPUs with matrix products of int8, see products.h.
#include "linear.h"

#ifdef __aarch64__
#define TARGET "arch=armv8.2-a+i8mm"
#include "target_begin.h"
#include "neon.h"
#include "products.h"
#define TILE_ROWS 4
#include "tiles.h"

// A step is 8 inputs; a register has two rows, or two outputs, and the sums of two rows and two outputs.
struct Octets : Scaled {
    typedef int8_t Row;
    static const int INPUTS = 8, BYTES = 8 * WIDTH;
};

template <>
struct Tiles<Octets> {
    // Multiply one or two pairs of rows. A missing row is multiplied as the one before it.
    template <int PAIRS>
    static void multiply_pairs(const Weights& w, const int8_t* const* row, const int8_t* panel, int32x4_t (*sum)[WIDTH / 2]) {
        for (int64_t k = 0; k < w.steps; k++, panel += Octets::BYTES) {
            int8x16_t inputs[PAIRS];
            for (int p = 0; p < PAIRS; p++) inputs[p] = vcombine_s8(vld1_s8(row[2 * p] + 8 * k), vld1_s8(row[2 * p + 1] + 8 * k));
#pragma GCC unroll 8
            for (int c = 0; c < WIDTH / 2; c++) {
                const int8x16_t column = vld1q_s8(panel + 16 * c);
#pragma GCC unroll 2
                for (int p = 0; p < PAIRS; p++) sum[p][c] = vmmlaq_s32(sum[p][c], inputs[p], column);
            }
        }
    }

    static void multiply(const Weights& w, const Rows<int8_t>& rows, int64_t i, int n, int64_t first, Sums& sums) {
        const int8_t *row[TILE_ROWS], *panel = (const int8_t*)w.panels + first / WIDTH * w.steps * Octets::BYTES;
        for (int r = 0; r < TILE_ROWS; r++) row[r] = rows.at(i + (r < n ? r : n - 1));
        int32x4_t sum[TILE_ROWS / 2][WIDTH / 2] = {};
        n > 2 ? multiply_pairs<2>(w, row, panel, sum) : multiply_pairs<1>(w, row, panel, sum);
        for (int r = 0; r < n; r++)
            for (int c = 0; c < WIDTH / 2; c++) memcpy(sums[r] + 8 * c, (const char*)&sum[r / 2][c] + r % 2 * 8, 8);
    }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_neon_i8mm(LINEAR_ARGUMENTS) {
#ifdef __aarch64__
    const Weights w{panels, shift, scale, bias, steps, outputs};
    (type == FLOAT32 ? multiply_tiles<Octets, float> : multiply_tiles<Octets, bf16>)(w, x, rows, inputs, scratch, out, threads);
#endif
}
