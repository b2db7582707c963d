// Operations of products.h and linear_groups_body.h with registers of AVX-512.
#define LANES 16
#define VECTORS 4

INLINE v16 multiply_add(v16 sum, v16 a, v16 b) { return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
INLINE v16 widen_half(const char* p) { return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE __m512i widen_bytes(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE __m512i widen_signed(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }

// 16 numbers, which the low 4 bits of an index look up.
typedef __m512 Table;

INLINE Table load_table(const float* p) { return _mm512_loadu_ps(p); }

template <class Index>
INLINE v16 look_up(const Table& table, Index index) {
    return (v16)_mm512_permutexvar_ps((__m512i)index, table);
}

// 16 bytes, which a byte from 0 to 15 looks up.
typedef __m512i ByteTable;

INLINE ByteTable load_byte_table(const int8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }

template <class Bytes>
INLINE __m512i look_up_bytes(ByteTable table, Bytes at) {
    return _mm512_shuffle_epi8(table, (__m512i)at);
}
