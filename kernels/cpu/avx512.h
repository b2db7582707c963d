// Operations of products.h and linear_int4_body.h with registers of AVX-512.
#define LANES 16
#define VECTORS 4

INLINE v16 multiply_add(v16 sum, v16 a, v16 b) { return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
INLINE v16 widen_half(const char* p) { return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE __m512i widen_bytes(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
