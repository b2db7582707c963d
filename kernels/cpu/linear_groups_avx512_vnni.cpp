// Linear layers with a scale per group of inputs on x86 CPUs with AVX-512 VNNI, see linear_groups_body.h.
#include "linear.h"

#ifdef __x86_64__
#ifndef TARGET  // a test compiles this file for AVX2, with the other instructions in scalar code
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#endif
#include "target_begin.h"
#include "avx512.h"
#include "linear_groups_body.h"
#include "groups_avx512.h"
#include "target_end.h"
#endif

extern "C" void sensorium_group_linear_avx512_vnni(GROUP_ARGUMENTS) {
#ifdef __x86_64__
    group_linear<Looked, Looked, Quads>(GROUP_VALUES);
#endif
}
