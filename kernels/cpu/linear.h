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

// Arguments of the linear layers with 4-bit weights (linear_int4_*.cpp).
// x [rows, inputs] -> out [rows, outputs] in x's type, with `stride` numbers from row to row.
// order: the input of each column, or null. scratch: rows * (bytes of a converted row).
#define INT4_ARGUMENTS                                                                                                            \
    int type, const char *x, int64_t rows, int64_t inputs, const int32_t *order, const char *codes, const char *scale,             \
        int64_t scale_type, const uint8_t *zero, const float *bias, int64_t steps, int64_t group_steps, int64_t outputs,           \
        int64_t stride, int64_t int8_rows, char *scratch, char *out, int threads
#define INT4_VALUES                                                                                                               \
    type, x, rows, inputs, order, codes, scale, scale_type, zero, bias, steps, group_steps, outputs, stride, int8_rows, scratch,  \
        out, threads
