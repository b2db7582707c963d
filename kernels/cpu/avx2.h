// Operations of products.h and linear_int4_body.h with registers of AVX2.
#define LANES 8
#define VECTORS 2

typedef float v8 __attribute__((vector_size(32)));

INLINE v8 multiply_add(v8 sum, v8 a, v8 b) { return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
INLINE v8 widen_half(const char* p) { return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE __m256i widen_bytes(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
