// Run one linear layer with a scale per group of kernels/cpu in a process of its own, for test_other_cpus.py: NAME of the function as
// a macro. stdin, as int64: type, rows and inputs of x; the weight's arguments (linear.h) from `order` to `outputs`, with the place of
// a tensor from 1 on instead of its address; int8 rows, bytes of scratch, tensors and the bytes of each. Then the tensors; x is 0.
#include <cstdio>
#include <vector>

#include "linear.h"

extern "C" void NAME(GROUP_ARGUMENTS);

int main() {
    int64_t n[24];
    if (fread(n, sizeof n, 1, stdin) != 1) return 1;
    std::vector<int64_t> sizes(n[23]);
    if (fread(sizes.data(), 8, sizes.size(), stdin) != sizes.size()) return 1;
    std::vector<std::vector<char>> data;
    for (int64_t size : sizes) {
        data.emplace_back(size);
        if (size && fread(data.back().data(), size, 1, stdin) != 1) return 1;
    }
    auto at = [&](int i) { return n[i] ? data[n[i]].data() : nullptr; };
    const int64_t outputs = n[20];
    std::vector<char> scratch(n[22]), out(n[1] * outputs * (n[0] ? 2 : 4));
    NAME((int)n[0], data[0].data(), n[1], n[2], (const int32_t*)at(3), n[4], at(5), (const float*)at(6), n[7], (const uint8_t*)at(8),
         at(9), n[10], (const int8_t*)at(11), at(12), n[13], (const int8_t*)at(14), n[15], (const float*)at(16), (const float*)at(17),
         n[18], n[19], outputs, outputs, n[21], scratch.data(), out.data(), 1);
    return fwrite(out.data(), out.size(), 1, stdout) != 1;
}
