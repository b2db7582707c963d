// Arguments of the linear layers of every instruction set (linear_*.cpp).
// x [rows, inputs] -> out [rows, outputs] of x's `type`, FLOAT32 or BFLOAT16. `shift`, `scale` and `scratch` may be null;
// scratch has the bytes of converted rows and a float for each.
#pragma once
#include <cstdint>

#define LINEAR_ARGUMENTS                                                                                                          \
    int type, int weight_type, const char *x, int64_t rows, int64_t inputs, const char *panels, const int32_t *shift,              \
        const float *scale, const float *bias, int64_t steps, int64_t outputs, char *scratch, char *out, int threads
#define LINEAR_VALUES                                                                                                             \
    type, weight_type, x, rows, inputs, panels, shift, scale, bias, steps, outputs, scratch, out, threads

enum WeightType { WEIGHT_FLOAT32 = 0, WEIGHT_BFLOAT16 = 1, WEIGHT_FLOAT16 = 2, WEIGHT_INT8 = 3 };

// Arguments of the linear layers with a scale per group of inputs (linear_groups_*.cpp; linear_groups_body.h says what they are).
// x [rows, inputs] -> out [rows, outputs] in x's type, with `stride` numbers from row to row.
// order: the input of each column, or null. scratch: rows * (bytes of a converted row).
#define GROUP_ARGUMENTS                                                                                                           \
    int type, const char *x, int64_t rows, int64_t inputs, const int32_t *order, int64_t code_type, const char *codes,             \
        const float *table, int64_t offset, const uint8_t *zero, const char *scale, int64_t scale_type, const int8_t *fine_scale, \
        const char *low, int64_t low_type, const int8_t *fine_low, int64_t span, const float *factor, const float *bias,          \
        int64_t steps, int64_t group_steps, int64_t outputs, int64_t stride, int64_t int8_rows, char *scratch, char *out,          \
        int threads
#define GROUP_VALUES                                                                                                              \
    type, x, rows, inputs, order, code_type, codes, table, offset, zero, scale, scale_type, fine_scale, low, low_type, fine_low,  \
        span, factor, bias, steps, group_steps, outputs, stride, int8_rows, scratch, out, threads
#define GROUP_WEIGHTS                                                                                                             \
    {                                                                                                                             \
        (int)code_type, (int)offset, codes, table, zero, {scale, fine_scale, (int)scale_type, span},                              \
            {low, fine_low, (int)low_type, span}, factor, bias, steps, group_steps, outputs, stride                               \
    }
