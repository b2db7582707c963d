// Begins the part of a file that is compiled for the instruction set TARGET; target_end.h ends it. No include guard.
// The standard headers come first: their inline functions may be shared with code for every CPU.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PRAGMA_(text) _Pragma(#text)
#define PRAGMA(text) PRAGMA_(text)

// Without fused multiply-add, int8 results are bit-equal to torch's.
#ifdef __clang__
PRAGMA(clang attribute push(__attribute__((target(TARGET))), apply_to = function))
#pragma STDC FP_CONTRACT OFF
#include "common.h"  // clang passes vectors between functions of one instruction set only
#else
#include "common.h"
PRAGMA(GCC push_options)
PRAGMA(GCC target(TARGET))
#pragma GCC optimize("fp-contract=off")
#endif
