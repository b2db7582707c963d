// Linear layers with 4-bit weights on x86 CPUs with AVX-512 VNNI, see linear_int4_body.h.
#include "linear.h"

#ifdef __x86_64__
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#include "target_begin.h"
#include "avx512.h"
#include "linear_int4_body.h"
#include "int4_avx512.h"
#include "target_end.h"
#endif

extern "C" void sensorium_int4_linear_avx512_vnni(INT4_ARGUMENTS) {
#ifdef __x86_64__
    int4_linear<Looked, Looked, Quads>(INT4_VALUES);
#endif
}
