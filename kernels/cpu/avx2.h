// Operations of products.h and linear_groups_body.h with registers of AVX2.
#define LANES 8
#define VECTORS 2

typedef float v8 __attribute__((vector_size(32)));

INLINE v8 multiply_add(v8 sum, v8 a, v8 b) { return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
INLINE v8 widen_half(const char* p) { return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE __m256i widen_bytes(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE __m256i widen_signed(const void* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }

// 16 numbers, which the low 4 bits of an index look up.
struct Table {
    v8 low, high;
};

INLINE Table load_table(const float* p) { return {(v8)_mm256_loadu_ps(p), (v8)_mm256_loadu_ps(p + 8)}; }

template <class Index>
INLINE v8 look_up(const Table& table, Index index) {
    const __m256i at = (__m256i)index;
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table.low, at), high = _mm256_permutevar8x32_ps((__m256)table.high, at);
    return (v8)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28));
}

// 16 bytes, which a byte from 0 to 15 looks up.
typedef __m256i ByteTable;

INLINE ByteTable load_byte_table(const int8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }

template <class Bytes>
INLINE __m256i look_up_bytes(ByteTable table, Bytes at) {
    return _mm256_shuffle_epi8(table, (__m256i)at);
}
