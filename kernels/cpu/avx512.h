// Operations of products.h with registers of AVX-512.
#define LANES 16
#define VECTORS 4
#define PREFETCH 1

INLINE v16 multiply_add(v16 sum, v16 a, v16 b) { return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
INLINE v16 widen_half(const char* p) { return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
