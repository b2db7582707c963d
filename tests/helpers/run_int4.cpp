// Run one linear layer with 4-bit weights of kernels/cpu in a process of its own, for test_other_cpus.py: NAME of the function as a
// macro. stdin: type, rows, inputs, type of scales, steps, steps of a group, outputs, int8 rows, bytes of scratch and the bytes of
// x, order, codes, scales, zero points and bias as int64, then those.
#include <cstdio>
#include <vector>

#include "linear.h"

extern "C" void NAME(INT4_ARGUMENTS);

int main() {
    int64_t n[15];
    if (fread(n, sizeof n, 1, stdin) != 1) return 1;
    std::vector<char> data[6];
    char* at[6];
    for (int i = 0; i < 6; i++) {
        data[i].resize(n[9 + i]);
        if (n[9 + i] && fread(data[i].data(), n[9 + i], 1, stdin) != 1) return 1;
        at[i] = n[9 + i] ? data[i].data() : nullptr;
    }
    std::vector<char> scratch(n[8]), out(n[1] * n[6] * (n[0] ? 2 : 4));
    NAME((int)n[0], at[0], n[1], n[2], (const int32_t*)at[1], at[2], at[3], n[3], (const uint8_t*)at[4], (const float*)at[5], n[4], n[5],
         n[6], n[6], n[7], scratch.data(), out.data(), 1);
    return fwrite(out.data(), out.size(), 1, stdout) != 1;
}
