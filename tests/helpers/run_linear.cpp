// Run one linear layer of kernels/cpu in a process of its own, for test_other_cpus.py: NAME of the function as a macro.
// With SCRATCH, rows are converted to memory of the caller. stdin: type, weight type, rows, inputs, steps, outputs and the bytes of x, panels, shift, scale and bias as int64, then those.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "linear.h"

extern "C" void NAME(LINEAR_ARGUMENTS);

int main() {
    int64_t n[11];
    if (fread(n, sizeof n, 1, stdin) != 1) return 1;
    std::vector<char> data[5];
    char* at[5];
    for (int i = 0; i < 5; i++) {
        data[i].resize(n[6 + i]);
        if (n[6 + i] && fread(data[i].data(), n[6 + i], 1, stdin) != 1) return 1;
        at[i] = n[6 + i] ? data[i].data() : nullptr;
    }
    std::vector<char> out(n[2] * n[5] * (n[0] ? 2 : 4));
    std::vector<char> scratch(n[2] * (n[4] * 8 + 4));
#ifndef SCRATCH
#define SCRATCH nullptr
#endif
    NAME((int)n[0], (int)n[1], at[0], n[2], n[3], at[1], (const int32_t*)at[2], (const float*)at[3], (const float*)at[4], n[4], n[5],
         SCRATCH, out.data(), 1);
    return fwrite(out.data(), out.size(), 1, stdout) != 1;
}
