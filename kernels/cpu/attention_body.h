// Attention for one instruction set. attention.cpp includes this file once per set, so it has no include guard.
// NAMESPACE: name of the instruction set. LANES: floats of a register; compilers keep sums in wider vectors in memory. VECTORS:
// registers of columns in a product. PAIRS: multiply pairs of bfloat16 (vdpbf16ps) instead of floats. TILES: multiply these pairs with
// AMX. WIDE: transpose 16 x 16 words in registers and convert 16 bytes at once (AVX-512).
namespace NAMESPACE {

#ifdef TILES
#include "tile_shape.h"
static const int ROWS = TILE_ROWS;  // query rows that are multiplied at once
#else
struct TileShape {};        // only AMX has tiles
static const int ROWS = 6;  // query rows in registers
#endif

#ifdef PAIRS
static const int PER_WORD = 2;  // elements per 32-bit word
#else
static const int PER_WORD = 1;
#endif

typedef float Columns __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

INLINE Columns columns_at(const float* p) {
    Columns x;
    memcpy(&x, p, sizeof x);
    return x;
}

// Copy one row of `dim` elements as words, padded with zeros to `words` words.
template <class T>
INLINE void stage(float* to, const T* from, int64_t dim, int64_t words) {
    if (sizeof(T) * PER_WORD == 4) {
        memcpy(to, from, dim * sizeof(T));
        memset(to + dim / PER_WORD, 0, (words - dim / PER_WORD) * 4);
        return;
    }
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) store<Columns>(to + d, load<Columns>(from + d));
    if (d < dim) {
        store<Columns>(to + d, load_part<Columns>(from + d, dim - d));
        d += LANES;
    }
    if (d < words) memset(to + d, 0, (words - d) * 4);
}

#ifndef WIDE
// Transpose LANES vectors.
INLINE void transpose_vectors(Columns* a) {
    Columns b[LANES];
#if LANES == 8
    for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = __builtin_shufflevector(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + 2 * j + 1] = __builtin_shufflevector(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int j = 0; j < 4; j++) {
        b[j] = __builtin_shufflevector(a[j], a[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        b[j + 4] = __builtin_shufflevector(a[j], a[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int j = 0; j < 8; j++) a[j] = b[j];
#else
    for (int i = 0; i < 4; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 4, 1, 5);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 6, 3, 7);
    }
    for (int j = 0; j < 2; j++) {
        a[2 * j] = __builtin_shufflevector(b[j], b[j + 2], 0, 1, 4, 5);
        a[2 * j + 1] = __builtin_shufflevector(b[j], b[j + 2], 2, 3, 6, 7);
    }
#endif
}
#endif

// Transpose `count` rows of `depth` words, both multiples of 16, to turned[depth, TILE].
INLINE void transpose(const float* const* rows, int64_t depth, int count, float* turned) {
#ifdef WIDE
    for (int64_t d = 0; d < depth; d += 16)
        for (int key = 0; key < count; key += 16) {
            __m512i a[16], b[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[key + i] + d);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i += 2) {
                b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
                b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
            }
#pragma GCC unroll 16
            for (int i = 0; i < 16; i += 4)
                for (int j = 0; j < 2; j++) {
                    a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
                    a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
                }
#pragma GCC unroll 16
            for (int i = 0; i < 16; i += 8)
                for (int j = 0; j < 4; j++) {
                    b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
                    b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
                }
#pragma GCC unroll 16
            for (int j = 0; j < 8; j++) {
                _mm512_storeu_si512(turned + (d + j) * TILE + key, _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88));
                _mm512_storeu_si512(turned + (d + j + 8) * TILE + key, _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd));
            }
        }
#else
    for (int key = 0; key < count; key += LANES)
        for (int64_t d = 0; d < depth; d += LANES) {
            Columns a[LANES];
#pragma GCC unroll 8
            for (int i = 0; i < LANES; i++) a[i] = columns_at(rows[key + i] + d);
            transpose_vectors(a);
#pragma GCC unroll 8
            for (int i = 0; i < LANES; i++) store<Columns>(turned + (d + i) * TILE + key, a[i]);
        }
#endif
}

INLINE int up_to_16(int64_t n) { return (int)((n + 15) / 16 * 16); }

struct Tile {
    float *staged, *keys, *values;     // words [TILE, depth], [depth, TILE], [TILE / PER_WORD, wide]
    int64_t depth, wide;               // words of a key row, columns of a value row; multiples of 16
    float *k_scales, *v_scales, *own;  // scales of a quantised cache [TILE]; dequantised rows of a tile
};

// The query rows that share a key head: queries in words [rows, depth], sums of weighted values [rows, wide], the running maximum
// [rows] and the sums of weights per lane [rows, 16].
struct Head {
    float *q, *out, *row_max, *sums;
    int64_t depth, wide;
};

#ifdef TILES
// scores[rows, TILE] = q[rows, depth] keys[depth, TILE]. Only columns of the first `count` keys, up to a multiple of 32, are written.
INLINE void multiply_keys(TileShape& shape, int rows, const float* q, const Head& h, const Tile& t, int count, float* scores) {
    const bool more = count > 2 * TILE_ROWS;
    shape.use(rows, 0, TILE_ROWS);
    settle_memory();
    TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    for (int64_t k = 0; k < h.depth; k += TILE_ROWS) {
        const float* keys = t.keys + k * TILE;
        TILE_LOAD(4, q + k, 4 * h.depth);
        TILE_LOAD(6, keys, 4 * TILE); TILE_DOT_BFLOAT16(0, 4, 6);
        TILE_LOAD(7, keys + 16, 4 * TILE); TILE_DOT_BFLOAT16(1, 4, 7);
        if (!more) continue;
        TILE_LOAD(6, keys + 32, 4 * TILE); TILE_DOT_BFLOAT16(2, 4, 6);
        TILE_LOAD(7, keys + 48, 4 * TILE); TILE_DOT_BFLOAT16(3, 4, 7);
    }
    TILE_STORE(0, scores, 4 * TILE); TILE_STORE(1, scores + 16, 4 * TILE);
    if (more) {
        TILE_STORE(2, scores + 32, 4 * TILE); TILE_STORE(3, scores + 48, 4 * TILE);
    }
    settle_memory();
}

// out[rows, wide] = rescale[rows] * out + weights[rows, TILE] values[TILE, wide], with the tiles of `multiply_keys`.
INLINE void add_values(int rows, float* weights, const Head& h, const Tile& t, int count, const float* rescale, float* out) {
    const int words = up_to_16(count) / 2;
    for (int r = 0; r < rows; r++) {
        if (words % TILE_ROWS) memset(weights + r * TILE / 2 + words, 0, 2 * TILE_ROWS);
        if (rescale[r] == 1) continue;
        for (int64_t d = 0; d < h.wide; d += 16) store(out + r * h.wide + d, load(out + r * h.wide + d) * rescale[r]);
    }
    const bool more = words > TILE_ROWS;
    settle_memory();
    TILE_LOAD(4, weights, 2 * TILE);
    if (more) TILE_LOAD(5, weights + TILE_ROWS, 2 * TILE);
    for (int64_t d = 0; d < h.wide; d += 16) {
        TILE_LOAD(0, out + d, 4 * h.wide);
        TILE_LOAD(6, t.values + d, 4 * h.wide); TILE_DOT_BFLOAT16(0, 4, 6);
        if (more) {
            TILE_LOAD(7, t.values + TILE_ROWS * h.wide + d, 4 * h.wide); TILE_DOT_BFLOAT16(0, 5, 7);
        }
        TILE_STORE(0, out + d, 4 * h.wide);
    }
    settle_memory();
}
#else
// acc + a * b per word.
INLINE Columns multiply_add(Columns acc, Columns a, Columns b) {
#ifdef PAIRS
    return (Columns)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    return a * b + acc;
#endif
}

// c[R, LANES N] = a[R, depth] b[depth, LANES N] + rescale[R] * c, or without c if rescale is null. a and b in words, c in floats.
template <int R, int N>
INLINE void product(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                    const float* rescale) {
    Columns acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) acc[r][n] = rescale ? columns_at(c + r * ldc + LANES * n) * rescale[r] : Columns{};
    for (int64_t k = 0; k < depth; k++) {
        Columns columns[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) columns[n] = columns_at(b + k * ldb + LANES * n);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            uint32_t word;
            memcpy(&word, a + r * lda + k, 4);
            Columns factor = (Columns)(word - Words{});
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) acc[r][n] = multiply_add(acc[r][n], factor, columns[n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) memcpy(c + r * ldc + LANES * n, &acc[r][n], sizeof(Columns));
}

template <int R>
static void products(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                     int64_t columns, const float* rescale) {
    const int64_t wide = VECTORS * LANES;
    int64_t n = 0;
    for (; n + wide <= columns; n += wide) product<R, VECTORS>(a, lda, b + n, ldb, depth, c + n, ldc, rescale);
    for (; n < columns; n += LANES) product<R, 1>(a, lda, b + n, ldb, depth, c + n, ldc, rescale);
}

static void multiply(int rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                     int64_t columns, const float* rescale) {
    typedef void Products(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, int64_t, const float*);
    static Products* const by_rows[ROWS] = {products<1>, products<2>, products<3>, products<4>, products<5>, products<6>};
    by_rows[rows - 1](a, lda, b, ldb, depth, c, ldc, columns, rescale);
}

INLINE void multiply_keys(TileShape&, int rows, const float* q, const Head& h, const Tile& t, int count, float* scores) {
    multiply(rows, q, h.depth, t.keys, TILE, h.depth, scores, TILE, up_to_16(count), nullptr);
}

INLINE void add_values(int rows, float* weights, const Head& h, const Tile& t, int count, const float* rescale, float* out) {
    multiply(rows, weights, TILE / PER_WORD, t.values, h.wide, (count + PER_WORD - 1) / PER_WORD, out, h.wide, h.wide, rescale);
}
#endif

// Find the slots of up to a tile of keys from `start` on. Read one byte of each cache line of their rows from the `skip`th on, in the
// order of memory: the hardware prefetches such reads, but not those of one head after another. Returns the number of keys.
template <class T>
INLINE int find_slots(const Problem& p, const Work& w, int64_t start, int64_t end, int skip, int64_t* slots) {
    const int count = (int)(end - start < TILE ? end - start : TILE);
    const int32_t* table = p.tables ? p.tables + w.request * p.width + start / p.block_size : nullptr;
    int64_t offset = start % p.block_size;
    for (int i = 0; i < count; i++) {
        slots[i] = table ? *table * p.block_size + offset : p.starts[w.request] + start + i;
        if (++offset == p.block_size) offset = 0, table += table != nullptr;
    }
    const int64_t size = p.quant ? 1 : sizeof(T), bytes = w.kv_count * p.dim * size, first = w.kv_head * p.dim * size;
    for (int plane = 0; plane < 2; plane++)
        for (int i = skip; i < count; i++) {
            const char* row = (plane ? p.v : p.k) + slots[i] * (plane ? p.v_stride : p.k_stride) * size + first;
            for (int64_t at = 0; at < bytes; at += 64) (void)*(const volatile char*)(row + at);
        }
    return count;
}

#ifdef PAIRS
// Interleave two rows of `dim` bfloat16 to pairs.
INLINE void pair_rows(const bf16* even, const bf16* odd, int64_t dim, float* pairs) {
    const v16u lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16u pairs_of = lanes * 0x10001 + (32 << 16);  // element i of both rows
    const __m512i first = (__m512i)pairs_of, second = (__m512i)(pairs_of + 16 * 0x10001);
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
        const __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
        _mm512_storeu_si512(pairs + d, _mm512_permutex2var_epi16(a, first, b));
        _mm512_storeu_si512(pairs + d + 16, _mm512_permutex2var_epi16(a, second, b));
    }
    for (; d < dim; d += 16) {  // memory after the last row may not be mapped
        const __mmask16 there = dim - d < 16 ? (1 << (dim - d)) - 1 : 0xffff;
        const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, even + d));
        const __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, odd + d));
        _mm512_storeu_si512(pairs + d, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
}
#endif

// Convert quantised values without their scale, which is exact.
INLINE v16 to_float(int quant, v16b x) {
#ifdef WIDE
    if (quant == INT8) return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
    const v16u bits = (v16u)_mm512_cvtepu8_epi32((__m128i)x);
#else
    typedef int8_t v16c __attribute__((vector_size(16)));
    if (quant == INT8) return __builtin_convertvector(__builtin_convertvector((v16c)x, v16i), v16);
    const v16u bits = __builtin_convertvector(x, v16u);
#endif
    const v16u rest = (bits & 0x7f) << 20;
    const v16 normal = (v16)(rest + (120u << 23)), small = (v16)(rest + (121u << 23)) - LEAST;
    return (v16)((v16u)((bits & 0x78) != 0 ? normal : small) | (bits & 0x80) << 24);
}

INLINE void put(float* p, v16 x) { store(p, x); }

INLINE void put(bf16* p, v16 x) {
#ifdef PAIRS
    const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &half, sizeof half);
#else
    store(p, x);
#endif
}

// Convert n quantised values of a head.
template <class T>
INLINE void widen(int quant, const uint8_t* from, T* to, int64_t n) {
    v16b some = {};
    int64_t d = 0;
    for (; d + 16 <= n; d += 16) {
        memcpy(&some, from + d, sizeof some);
        put(to + d, to_float(quant, some));
    }
    if (d < n) {
        memcpy(&some, from + d, n - d);
        store_part(to + d, to_float(quant, some), n - d);
    }
}

// Find one head's row at each slot from the `skip`th on: its address; in a quantised cache, its values converted into `own`, and
// its scale (0 for skipped slots).
template <class T>
INLINE void load_heads(const Problem& p, int64_t kv_head, const char* base, int64_t stride, const int64_t* slots, int skip, int count,
                    const T** found, float* scales, T* own) {
    if (!p.quant) {
        for (int i = skip; i < count; i++) found[i] = (const T*)base + slots[i] * stride + kv_head * p.dim;
        return;
    }
    memset(scales, 0, TILE * sizeof(float));
    for (int i = skip; i < count; i++) {
        const char* row = base + slots[i] * stride;
        memcpy(scales + i, row + stride + (kv_head - p.kv_heads) * sizeof(float), sizeof(float));
        widen(p.quant, (const uint8_t*)row + kv_head * p.dim, own + i * p.dim, p.dim);
        found[i] = own + i * p.dim;
    }
}

// Prepare the keys and values of one head at `count` slots. Keys are transposed; the first `skip` keys and those up to a multiple
// of 16 are zeros. Keys that fill whole words and vectors are read in place.
template <class T>
static void load_tile(const Problem& p, int64_t kv_head, const int64_t* slots, int skip, int count, const Tile& t) {
    const T *k[TILE], *v[TILE + 1];
    if (skip) memset(t.staged, 0, t.depth * 4);
    for (int i = 0; i < skip; i++) k[i] = v[i] = (const T*)t.staged;
    load_heads<T>(p, kv_head, p.k, p.k_stride, slots, skip, count, k, t.k_scales, (T*)t.own);
    const bool whole = sizeof(T) * PER_WORD == 4 && p.dim == t.depth * PER_WORD;
    const float* rows[TILE];
    for (int i = 0; i < count; i++) {
        rows[i] = whole ? (const float*)k[i] : t.staged + (i < skip ? 0 : i) * t.depth;
        if (!whole && i >= skip) stage(t.staged + i * t.depth, k[i], p.dim, t.depth);
    }
    if (count % 16) memset(t.staged + count * t.depth, 0, t.depth * 4);
    for (int i = count; i < up_to_16(count); i++) rows[i] = t.staged + count * t.depth;
    transpose(rows, t.depth, up_to_16(count), t.keys);
    load_heads<T>(p, kv_head, p.v, p.v_stride, slots, skip, count, v, t.v_scales, (T*)t.own);
#ifdef PAIRS
    v[count] = (const T*)(t.staged + count % TILE * t.depth);  // zeros, as after the keys
    for (int i = 0; i < count; i += 2) pair_rows((const bf16*)v[i], (const bf16*)v[i + 1], p.dim, t.values + i / 2 * t.wide);
#ifdef TILES
    const int pairs = (count + 1) / 2, rest = -pairs & (TILE_ROWS - 1);  // whole tiles of weights are multiplied
    memset(t.values + pairs * t.wide, 0, rest * t.wide * 4);
#endif
#else
    for (int i = 0; i < count; i++) stage(t.values + i * t.wide, v[i], p.dim, t.wide);
#endif
}

// cap * tanh(score / cap), times log2(e); x is score times 2 log2(e) / cap.
INLINE Columns capped(Columns x, float cap) {
    const Columns most = 100 - Columns{};
    x = x > most ? most : x < -most ? -most : x;
    return cap - cap * 2 / (exp2(x) + 1);
}

#ifdef PAIRS
// 2^x as exp2, with an error of about 3e-6, which is small beside the rounding of weights to bfloat16.
INLINE Columns power(Columns x) {
    const float magic = 12582912.f;
    Columns shifted = x + magic, f = x - (shifted - magic);
    Columns y = f * 9.5827800e-3f + 5.5906290e-2f;
    y = y * f + 2.4024099e-1f;
    y = y * f + 6.9312421e-1f;
    y = y * f + 1.f;
    Columns scaled = (Columns)((v16i)y + ((v16i)shifted << 23));
    return x < -126.f ? Columns{} : scaled;
}
#else
INLINE Columns power(Columns x) { return exp2(x); }
#endif

static const float LANE[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Online softmax: turn the first `count` of scores[rows, TILE] into weights (in words), and update the running maximum and the
// sums per lane. rescale: factor of the older sums. Scales of a quantised cache are multiplied into scores and weights. A row
// attends to the keys from first_key[row] to end_key[row].
INLINE void online_softmax(int rows, int count, float* scores, const int* first_key, const int* end_key, const Problem& p, const Tile& t,
                   float* row_max, float* sums, float* weights, float* rescale) {
    const float cap = p.cap;
    const bool late = !p.quant && !cap && p.scale > 0;  // scores are scaled with the subtraction of the maximum
    const float scale = late ? 1 : p.scale, late_scale = late ? p.scale : 1;
    const Columns none = -INFINITY - Columns{}, lanes = columns_at(LANE);
    v16 change = {};
    for (int r = 0; r < rows; r++) {
        Columns most = none;
        const bool whole = late && !first_key[r] && end_key[r] == count && count % LANES == 0;
        for (int n = 0; whole && n < count; n += LANES) most = larger(columns_at(scores + r * TILE + n), most);
        for (int n = 0; !whole && n < count; n += LANES) {
            Columns x = columns_at(scores + r * TILE + n) * scale;
            if (p.quant) x *= columns_at(t.k_scales + n);
            if (cap) x = capped(x, cap);
            if (end_key[r] < n + LANES) x = lanes < (float)(end_key[r] - n) - Columns{} ? x : none;
            if (first_key[r] > n) x = lanes < (float)(first_key[r] - n) - Columns{} ? none : x;
            memcpy(scores + r * TILE + n, &x, sizeof x);
            most = larger(x, most);
        }
        float highest = largest(most) * late_scale;
        highest = highest > row_max[r] ? highest : row_max[r];
        change[r] = row_max[r] - highest;
        row_max[r] = highest;
    }
    store(rescale, exp2(change));
    for (int r = 0; r < rows; r++) {
        Columns total = columns_at(sums + 16 * r);
        for (int n = 0; n < count; n += LANES) {
            Columns x = power(columns_at(scores + r * TILE + n) * late_scale - row_max[r]);
            total = n ? total + x : total * rescale[r] + x;
            if (p.quant) x *= columns_at(t.v_scales + n);
#ifdef PAIRS
            __m256bh half = _mm512_cvtneps_pbh((__m512)x);
            memcpy(weights + (r * TILE + n) / 2, &half, sizeof half);
#else
            memcpy(weights + r * TILE + n, &x, sizeof x);
#endif
        }
        memcpy(sums + 16 * r, &total, sizeof total);
    }
}

template <class T>
static void begin_head(const Problem& p, const Work& w, int64_t kv_head, const Head& h) {
    const int64_t group = p.heads / p.kv_heads, rows = w.count * group, base = p.starts[w.request] + w.first;
    for (int64_t r = 0; r < rows; r++)
        stage(h.q + r * h.depth, (const T*)p.q + (base + r / group) * p.q_stride + (kv_head * group + r % group) * p.dim, p.dim, h.depth);
    memset(h.out, 0, rows * h.wide * 4);
    memset(h.sums, 0, rows * 16 * 4);
    for (int64_t r = 0; r < rows; r++) {
        h.row_max[r] = p.sinks ? p.sinks[kv_head * group + r % group] * 1.44269504f : LOWEST;
        if (p.sinks) h.sums[16 * r] = 1;
    }
}

// Attend with the rows of one head to a tile of `count` keys from `start` on. `position`: of the first row.
INLINE void attend_tile(const Problem& p, const Work& w, const Head& h, const Tile& tile, int64_t start, int64_t count,
                        int64_t position, TileShape& shape, float* scores, float* weights, float* rescale) {
    const int64_t group = p.heads / p.kv_heads, rows = w.count * group, length = p.lengths[w.request], base = p.starts[w.request] + w.first;
    const bool plain = p.causal && !p.key_range;  // later rows attend to more keys
    int64_t skipped = plain && start > position ? (start - position) * group : 0;  // rows before the tile's first key
    for (int64_t r = skipped; r < rows; r += ROWS) {
        int n = (int)(rows - r < ROWS ? rows - r : ROWS), first_key[ROWS], end_key[ROWS];
        for (int i = 0; i < n; i++) {
            int64_t row = (r + i) / group, sees = p.end(base + row, position + row, length) - start;
            int64_t hides = p.first(base + row, position + row) - start;
            end_key[i] = (int)(sees < 0 ? 0 : sees < count ? sees : count);
            first_key[i] = (int)(hides < 0 ? 0 : hides < count ? hides : count);
        }
        multiply_keys(shape, n, h.q + r * h.depth, h, tile, (int)count, scores);
        online_softmax(n, (int)count, scores, first_key, end_key, p, tile, h.row_max + r, h.sums + 16 * r, weights, rescale);
        add_values(n, weights, h, tile, (int)count, rescale, h.out + r * h.wide);
    }
}

template <class T>
static void end_head(const Problem& p, const Work& w, int64_t kv_head, const Head& h) {
    const int64_t group = p.heads / p.kv_heads, rows = w.count * group, base = p.starts[w.request] + w.first;
    for (int64_t r = 0; r < rows; r++) {
        T* to = (T*)p.out + ((base + r / group) * p.heads + kv_head * group + r % group) * p.dim;
        float inverse = 1.f / sum(load(h.sums + 16 * r));
        int64_t d = 0;
        for (; d + LANES <= p.dim; d += LANES) store<Columns>(to + d, columns_at(h.out + r * h.wide + d) * inverse);
        if (d < p.dim) store_part(to + d, columns_at(h.out + r * h.wide + d) * inverse, p.dim - d);
    }
}

template <class T>
static void attend(const Problem& p, const Work& w, Scratch& scratch) {
    const int64_t rows = w.count * (p.heads / p.kv_heads), depth = (p.dim / PER_WORD + 15) / 16 * 16, wide = (p.dim + 15) / 16 * 16;
    const int64_t length = p.lengths[w.request], base = p.starts[w.request] + w.first, quant_rows = p.quant ? TILE : 0;
    const int64_t position = length - (p.starts[w.request + 1] - p.starts[w.request]) + w.first;  // of the first row
    scratch.memory.resize(4 * (w.kv_count * (rows * (depth + wide + 17) + 64) + TILE * (2 * depth + wide) + quant_rows * (wide + 2) +
                               2 * ROWS * TILE + 64) + 16 * 64);
    char* at = scratch.memory.data() + (64 - (uintptr_t)scratch.memory.data() % 64);
    Head heads[HEADS];
    for (int64_t i = 0; i < w.kv_count; i++) {
        float *q = Scratch::take<float>(at, rows * depth), *out = Scratch::take<float>(at, rows * wide);
        float *row_max = Scratch::take<float>(at, rows), *sums = Scratch::take<float>(at, rows * 16);
        begin_head<T>(p, w, w.kv_head + i, heads[i] = {q, out, row_max, sums, depth, wide});
    }
    float *scores = Scratch::take<float>(at, ROWS * TILE), *weights = Scratch::take<float>(at, ROWS * TILE);
    float* rescale = Scratch::take<float>(at, 16);
    Tile tile{Scratch::take<float>(at, TILE * depth), Scratch::take<float>(at, TILE * depth), Scratch::take<float>(at, TILE * wide), depth, wide,
              Scratch::take<float>(at, quant_rows), Scratch::take<float>(at, quant_rows), Scratch::take<float>(at, quant_rows * wide)};
    int64_t begin = length, end = 0;  // keys that any of the rows attends to
    for (int64_t i = 0; i < w.count; i++) {
        int64_t first = p.first(base + i, position + i), last = p.end(base + i, position + i, length);
        begin = first < begin ? first : begin, end = last > end ? last : end;
    }
    int64_t slots[TILE];
    TileShape shape;
    for (int64_t start = begin / TILE * TILE; start < end; start += TILE) {
        const int skip = (int)(begin > start ? begin - start : 0), count = find_slots<T>(p, w, start, end, skip, slots);
        for (int64_t i = 0; i < w.kv_count; i++) {
            load_tile<T>(p, w.kv_head + i, slots, skip, count, tile);
            attend_tile(p, w, heads[i], tile, start, count, position, shape, scores, weights, rescale);
        }
    }
    for (int64_t i = 0; i < w.kv_count; i++) end_head<T>(p, w, w.kv_head + i, heads[i]);
}

}  // namespace NAMESPACE
#undef NAMESPACE
#undef LANES
#undef VECTORS
#undef WIDE
#undef PAIRS
#undef TILES
