// Linear layers with packed weights, for x86 CPUs with AVX2: float32, bfloat16 with sums in float32, or int8 (W8A8) with the bits
// of int8_linear_reference in kernels/int8.py.
// A weight [out, in] is packed as [panel of 16 outputs][step of inputs][16 outputs of the step]. A step is one input, or two for
// int8. A 32-bit word j of a bfloat16 step holds outputs j and j + 8, so that a shift and a mask widen them.
// Every sum adds inputs in order, so a row's bits do not depend on the rest of the batch.
#ifdef __x86_64__
#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#pragma STDC FP_CONTRACT OFF
#include "common.h"  // clang passes vectors between functions of one instruction set only
#else
#include "common.h"
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#pragma GCC optimize("fp-contract=off")
#endif

static const int64_t WIDTH = 16;           // outputs of a panel
static const int ROWS = 6;                 // rows in registers
static const int64_t ROW_BYTES = 3 << 16;  // converted rows that stay in the cache while panels pass

struct Weights {
    const char* panels;
    const float *scale, *bias;  // scale is for int8 only; both have entries for padded outputs
    int64_t steps, outputs;     // outputs without padding
};

// Each kind of weight: the type of converted rows, inputs and bytes of a step, and the arithmetic of 8 outputs.
struct Float32 {
    typedef float Row;
    typedef __m256 Sum;
    static const int INPUTS = 1, BYTES = 64;

    INLINE void columns(const char* step, Sum* two) {
        two[0] = _mm256_loadu_ps((const float*)step), two[1] = _mm256_loadu_ps((const float*)step + 8);
    }
    INLINE Sum spread(const Row* inputs) { return _mm256_broadcast_ss(inputs); }
    INLINE Sum add(Sum sum, Sum inputs, Sum columns) { return _mm256_fmadd_ps(inputs, columns, sum); }
    INLINE __m256 value(Sum sum, const Weights& w, float, int64_t at) { return sum + _mm256_loadu_ps(w.bias + at); }
};

struct Bfloat16 : Float32 {
    static const int BYTES = 32;

    INLINE void columns(const char* step, Sum* two) {
        __m256i both = _mm256_loadu_si256((const __m256i*)step);
        two[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        two[1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)));
    }
};

struct Int8 {
    typedef int16_t Row;
    typedef __m256i Sum;
    static const int INPUTS = 2, BYTES = 32;

    INLINE void columns(const char* step, Sum* two) {
        two[0] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)step));
        two[1] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)step + 1));
    }
    INLINE Sum spread(const Row* inputs) {
        int32_t pair;
        memcpy(&pair, inputs, 4);
        return _mm256_set1_epi32(pair);
    }
    INLINE Sum add(Sum sum, Sum inputs, Sum columns) { return _mm256_add_epi32(sum, _mm256_madd_epi16(inputs, columns)); }
    INLINE __m256 value(Sum sum, const Weights& w, float scale, int64_t at) {
        return _mm256_cvtepi32_ps(sum) * scale * _mm256_loadu_ps(w.scale + at) + _mm256_loadu_ps(w.bias + at);
    }
};

INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }

INLINE __m256 load8(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

template <class T>
INLINE __m256 load8_part(const T* p, int64_t n) {
    T all[8] = {};
    memcpy(all, p, n * sizeof(T));
    return load8(all);
}

INLINE float widen(const float* p) { return *p; }

INLINE float widen(const bf16* p) {
    uint32_t bits = (uint32_t)p->bits << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Convert a row to float32.
template <class T>
static void convert(const T* x, int64_t n, float* row, int64_t, float*) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(row + i, load8(x + i));
    for (; i < n; i++) row[i] = widen(x + i);
}

// Quantise a row: its absmax becomes 127. Magnitudes as integers have the same order, with infinity and NaN last.
template <class T>
static void convert(const T* x, int64_t n, int16_t* row, int64_t width, float* scale) {
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8) {
        __m256i bits = _mm256_castps_si256(n - i < 8 ? load8_part(x + i, n - i) : load8(x + i));
        most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    int32_t all[8], bits = 0;
    _mm256_storeu_si256((__m256i*)all, most);
    for (int32_t one : all) bits = one > bits ? one : bits;
    float largest;
    memcpy(&largest, &bits, 4);
    if (largest < 1e-30f) largest = 1e-30f;
    *scale = largest / 127.f;
    const __m256 inverse = _mm256_set1_ps(1.f / largest * 127.f), magic = _mm256_set1_ps(12582912.f);  // 1.5 * 2^23
    for (int64_t i = 0; i < width; i += 8) {
        __m256 value = i + 8 <= n ? load8(x + i) : i < n ? load8_part(x + i, n - i) : _mm256_setzero_ps();
        __m256i rounded = _mm256_castps_si256(value * inverse + magic);  // the integer is in the low bits
        __m256i extended = _mm256_srai_epi32(_mm256_slli_epi32(rounded, 24), 24);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(extended), _mm256_extracti128_si256(extended, 1));
        memcpy(row + i, &words, (width - i < 8 ? width - i : 8) * sizeof(int16_t));
    }
}

template <class T>
struct Rows {
    const T* first;
    int64_t stride;
    const float* scale;  // of int8 rows

    const T* at(int64_t i) const { return first + i * stride; }
};

// Multiply R rows with P panels, from the panel of output `first` on.
template <class Kind, class T, int R, int P>
static void product(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t i, int64_t first, T* out) {
    typename Kind::Sum acc[R][P][2] = {};
    const int64_t bytes = w.steps * Kind::BYTES;
    const char* panel = w.panels + first / WIDTH * bytes;
    const typename Kind::Row* row = rows.at(i);
#pragma GCC unroll 2
    for (int64_t k = 0; k < w.steps; k++, panel += Kind::BYTES, row += Kind::INPUTS) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            typename Kind::Sum columns[2];
            Kind::columns(panel + p * bytes, columns);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                typename Kind::Sum inputs = Kind::spread(row + r * rows.stride);
                acc[r][p][0] = Kind::add(acc[r][p][0], inputs, columns[0]);
                acc[r][p][1] = Kind::add(acc[r][p][1], inputs, columns[1]);
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int64_t at = first + p * WIDTH, left = w.outputs - at;
            const float scale = std::is_same<Kind, Int8>::value ? rows.scale[i + r] : 0.f;
            float values[16];
            _mm256_storeu_ps(values, Kind::value(acc[r][p][0], w, scale, at));
            _mm256_storeu_ps(values + 8, Kind::value(acc[r][p][1], w, scale, at + 8));
            T* to = out + (i + r) * w.outputs + at;
            left < 16 ? store_part(to, load(values), left) : store(to, load(values));
        }
}

// Few rows take several panels at once, so that enough sums are independent.
template <class Kind, class T, int R>
static void tile(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t i, int64_t first, int64_t last, T* out) {
    const int P = R == 1 ? 4 : R <= 3 ? 2 : 1;
    int64_t p = first;
    for (; p + P <= last; p += P) product<Kind, T, R, P>(w, rows, i, p * WIDTH, out);
    for (; p < last; p++) product<Kind, T, R, 1>(w, rows, i, p * WIDTH, out);
}

// Multiply n rows with the panels from `first` to `last`.
template <class Kind, class T>
static void products(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t n, int64_t first, int64_t last, T* out) {
    typedef void Tile(const Weights&, const Rows<typename Kind::Row>&, int64_t, int64_t, int64_t, T*);
    static Tile* const sizes[] = {nullptr,          tile<Kind, T, 1>, tile<Kind, T, 2>, tile<Kind, T, 3>,
                                  tile<Kind, T, 4>, tile<Kind, T, 5>, tile<Kind, T, 6>};
    const int64_t each = n <= 3 ? last - first : 1;  // panels that pass all rows
    for (int64_t p = first; p < last; p += each)
        for (int64_t i = 0; i < n;) {
            int64_t left = n - i;
            int64_t now = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;  // 7 rows as 4 and 3, not as 6 and 1
            sizes[now](w, rows, i, p, p + each, out);
            i += now;
        }
}

// The rows that this thread converted last, and the call and chunk that they belong to.
struct Converted {
    uint64_t call = 0;
    int64_t chunk = 0;
    std::vector<char> bytes;
};

static thread_local Converted converted;
static std::atomic<uint64_t> calls;

template <class Row, class T>
static Rows<Row> convert_chunk(uint64_t call, int64_t chunk, const T* x, int64_t n, int64_t inputs, int64_t width) {
    const size_t bytes = n * (width * sizeof(Row) + sizeof(float));
    if (converted.bytes.size() < bytes) converted.bytes.resize(bytes);
    Row* rows = (Row*)converted.bytes.data();
    float* scales = (float*)(converted.bytes.data() + n * width * sizeof(Row));
    if (converted.call != call || converted.chunk != chunk)
        for (int64_t i = 0; i < n; i++) convert(x + i * inputs, inputs, rows + i * width, width, scales + i);
    converted.call = call, converted.chunk = chunk;
    return {rows, width, scales};
}

// Chunks of rows stay in the cache while a thread's panels pass; a thread converts each of its chunks once.
template <class Kind, class T>
static void multiply(const Weights& w, const T* x, int64_t n, int64_t inputs, T* out, int threads) {
    typedef typename Kind::Row Row;
    if (!n) return;  // an expert without tokens
    const uint64_t call = calls.fetch_add(1, std::memory_order_relaxed) + 1;
    const int64_t width = w.steps * Kind::INPUTS, fit = ROW_BYTES / (width * (int64_t)sizeof(Row) + 4) / ROWS * ROWS;
    const int64_t chunk = fit > ROWS ? fit : ROWS, chunks = (n + chunk - 1) / chunk, panels = (w.outputs + WIDTH - 1) / WIDTH;
    const int64_t wanted = (4 * threads + chunks - 1) / chunks, pieces = wanted < panels / 4 ? wanted : panels / 4 ? panels / 4 : 1;
    parallel_shares(threads, chunks * pieces, [&](int64_t i, int64_t, int64_t, int64_t) {
        const int64_t c = i / pieces, piece = i % pieces, first = c * chunk, count = n - first < chunk ? n - first : chunk;
        Rows<Row> rows;
        if constexpr (std::is_same<Row, T>::value)
            rows = {x + first * inputs, inputs, nullptr};
        else
            rows = convert_chunk<Row>(call, c, x + first * inputs, count, inputs, width);
        products<Kind>(w, rows, count, panels * piece / pieces, panels * (piece + 1) / pieces, out + first * w.outputs);
    });
}
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
#include "common.h"
#endif

extern "C" {

// Only for CPUs that have the instructions: the caller checks.

// x [rows, inputs] -> out [rows, outputs]; weights and results have x's type.
void sensorium_linear_avx2(int type, const char* x, int64_t rows, const char* panels, const float* bias, int64_t inputs,
                           int64_t outputs, char* out, int threads) {
#ifdef __x86_64__
    Weights weights{panels, nullptr, bias, inputs, outputs};
    if (type == FLOAT32)
        multiply<Float32>(weights, (const float*)x, rows, inputs, (float*)out, threads);
    else
        multiply<Bfloat16>(weights, (const bf16*)x, rows, inputs, (bf16*)out, threads);
#endif
}

// x [rows, inputs] -> out [rows, outputs].
void sensorium_int8_linear_avx2(int type, const char* x, int64_t rows, int64_t inputs, const char* panels, const float* scale,
                                const float* bias, int64_t steps, int64_t outputs, char* out, int threads) {
#ifdef __x86_64__
    Weights weights{panels, scale, bias, steps, outputs};
    if (type == FLOAT32)
        multiply<Int8>(weights, (const float*)x, rows, inputs, (float*)out, threads);
    else
        multiply<Int8>(weights, (const bf16*)x, rows, inputs, (bf16*)out, threads);
#endif
}
}
