// Linear layers with packed weights, for x86 CPUs with AVX-512: bfloat16, float32 (tied heads), or int8 (W8A8). int8 quantises,
// multiplies and rescales rows in one call, with the bits of int8_linear_reference in kernels/int8.py.
// A weight [out, in] is packed as [panel of 64 outputs][word of inputs][64 outputs][inputs of a word], padded with zeros. One
// instruction multiplies 16 outputs by the inputs in a 32-bit word and adds. Every sum adds words in order, so a row's bits do
// not depend on the rest of the batch.
// The int8 instruction takes unsigned activations. They are therefore stored 128 too high, and `shift`, 128 times the sum of
// an output's weights, is subtracted from the result.
#ifdef __x86_64__
#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"))), apply_to = function)
#pragma STDC FP_CONTRACT OFF
#include "common.h"  // clang passes vectors between functions of one instruction set only
#else
#include "common.h"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
#pragma GCC optimize("fp-contract=off")
#endif

static const int64_t PANEL = 64;
static const int ROWS = 6;             // rows in registers
static const int64_t CHUNK = 48;       // rows that pass a panel while it is in the cache
static const int64_t GROUP = 3 << 18;  // bytes of panels that stay in the cache

typedef uint8_t v16b __attribute__((vector_size(16)));

// A panel has 256 bytes per word. Shift and scale are for int8 only. All three arrays have entries for padded outputs.
struct Weights {
    const char* panels;
    const int32_t* shift;
    const float *scale, *bias;
    int64_t words, outputs;  // words per row with padding; outputs without
};

// Rows are `stride` bytes apart; quantised rows end with their scale.
struct Rows {
    const char* first;
    int64_t stride;

    const char* at(int64_t i) const { return first + i * stride; }
};

// Words of 4 bytes: unsigned activations, signed weights.
struct Int8Quads {
    typedef v16i Sum;

    INLINE Sum add(Sum sum, __m512i inputs, __m512i columns) {
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, inputs, columns);
    }

    INLINE v16 value(Sum sum, const Weights& w, const char* row, int64_t at) {
        v16i shift;
        float scale;
        memcpy(&shift, w.shift + at, sizeof shift);
        memcpy(&scale, row + 4 * w.words, sizeof scale);
        return __builtin_convertvector(sum - shift, v16) * scale * load(w.scale + at) + load(w.bias + at);
    }
};

// Words of 2 bfloat16.
struct Bf16Pairs {
    typedef v16 Sum;

    INLINE Sum add(Sum sum, __m512i inputs, __m512i columns) {
        return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)inputs, (__m512bh)columns);
    }

    INLINE v16 value(Sum sum, const Weights& w, const char*, int64_t at) { return sum + load(w.bias + at); }
};

// Words of one float.
struct Floats {
    typedef v16 Sum;

    INLINE Sum add(Sum sum, __m512i inputs, __m512i columns) {
        return (Sum)_mm512_fmadd_ps((__m512)inputs, (__m512)columns, (__m512)sum);
    }

    INLINE v16 value(Sum sum, const Weights& w, const char*, int64_t at) { return sum + load(w.bias + at); }
};

// Quantise a row: its absmax becomes 127. Magnitudes as integers have the same order, with infinity and NaN last.
template <class T>
static void quantize(const T* x, int64_t n, char* row, int64_t width) {
    v16i most = {};
    int64_t i = 0;
    for (; i < n; i += 16) {
        v16i magnitude = (v16i)(n - i < 16 ? load_part(x + i, n - i) : load(x + i)) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    int32_t bits = _mm512_reduce_max_epi32((__m512i)most);
    float largest;
    memcpy(&largest, &bits, 4);
    if (largest < 1e-30f) largest = 1e-30f;
    float scale = largest / 127.f;
    v16 inverse = splat(1.f / largest * 127.f);
    for (i = 0; i < width; i += 16) {
        v16 value = i + 16 <= n ? load(x + i) : i < n ? load_part(x + i, n - i) : v16{};
        v16u rounded = (v16u)(value * inverse + 12582912.f);  // 1.5 * 2^23: the integer is in the low bits
        v16b bytes = __builtin_convertvector((rounded ^ 0x80) & 0xff, v16b);
        memcpy(row + i, &bytes, width - i < 16 ? width - i : 16);
    }
    memcpy(row + width, &scale, 4);
}

// Multiply R rows with the panel of output `first`, and prefetch from `ahead` on, 4 * pace bytes per word.
template <class Kind, class T, int R>
static void product(const Weights& w, Rows rows, int64_t first, const char* ahead, int64_t pace, T* out) {
    typename Kind::Sum acc[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) acc[r][c] = typename Kind::Sum{};
    const char* panel = w.panels + first * w.words * 4;
    for (int64_t k = 0; k < 4 * w.words; k += 4, panel += 4 * PANEL) {
        __m512i columns[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++, ahead += pace) {
            columns[c] = _mm512_loadu_si512(panel + 64 * c);
            _mm_prefetch(ahead, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t word;
            memcpy(&word, rows.at(r) + k, 4);
            __m512i inputs = _mm512_set1_epi32(word);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) acc[r][c] = Kind::add(acc[r][c], inputs, columns[c]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        int64_t at = first + 16 * c, left = w.outputs - at;
        if (left <= 0) break;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            v16 value = Kind::value(acc[r][c], w, rows.at(r), at);
            T* to = out + r * w.outputs + at;
            left < 16 ? store_part(to, value, left) : store(to, value);
        }
    }
}

// Multiply n rows with one panel. Each tile of rows prefetches an equal share of the memory at `ahead`, which is needed next.
template <class Kind, class T>
static void products(const Weights& w, Rows rows, int64_t n, int64_t first, const char* ahead, T* out) {
    typedef void Product(const Weights&, Rows, int64_t, const char*, int64_t, T*);
    static Product* const sizes[] = {nullptr,
                                     product<Kind, T, 1>,
                                     product<Kind, T, 2>,
                                     product<Kind, T, 3>,
                                     product<Kind, T, 4>,
                                     product<Kind, T, 5>,
                                     product<Kind, T, 6>};
    const int64_t tiles = (n + ROWS - 1) / ROWS, pace = (PANEL + tiles - 1) / tiles;
    for (int64_t i = 0; i < n; ahead += 4 * pace * w.words) {
        int64_t left = n - i;
        int64_t now = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;  // 7 rows as 4 and 3, not as 6 and 1
        sizes[now](w, {rows.at(i), rows.stride}, first, ahead, pace, out + i * w.outputs);
        i += now;
    }
}

// A model uses its weights in the same order in every step: the weight that followed this one last time will follow it again.
struct NextWeight {
    const char *weights, *next;
    int64_t panels, bytes;  // of the next weight: its panels, and bytes of each
};

static thread_local NextWeight next_weights[1024], *latest = next_weights;

static NextWeight predict_next(const char* weights, int64_t panels, int64_t bytes) {
    latest->next = weights, latest->panels = panels, latest->bytes = bytes;
    latest = next_weights + ((uintptr_t)weights / 64 * 0x9e3779b97f4a7c15u >> 54);
    if (latest->weights != weights) *latest = {weights, weights, 0, 0};
    return *latest;
}

// A thread takes adjacent panels. With few rows, each panel prefetches the next one, and the last of a share prefetches the same
// share of the next weight. With many rows, panels are taken in groups that fit the cache.
template <class Kind, class T>
static void multiply(const Weights& w, Rows rows, int64_t n, T* out, int threads) {
    const int64_t chunks = (n + CHUNK - 1) / CHUNK, panels = (w.outputs + PANEL - 1) / PANEL, bytes = 4 * PANEL * w.words;
    const int64_t fit = GROUP / bytes, share = panels * chunks / (4 * threads), wanted = fit < share ? fit : share;
    const int64_t group = chunks > 1 && wanted > 1 ? wanted : 1, groups = (panels + group - 1) / group;
    const NextWeight then = predict_next(w.panels, panels, bytes);
    parallel_shares(threads, groups * chunks, [&](int64_t i, int64_t end, int64_t t, int64_t shares) {
        const int64_t first = i % chunks * CHUNK, count = n - first < CHUNK ? n - first : CHUNK;
        const char* next = i + 1 < end ? w.panels + (i + 1) / chunks * group * bytes
                                       : then.next + then.panels * t / shares * then.bytes;
        for (int64_t p = i / chunks * group, stop = p + group < panels ? p + group : panels; p < stop; p++) {
            const char* ahead = p + 1 < stop ? w.panels + (p + 1) * bytes : next;
            products<Kind>(w, {rows.at(first), rows.stride}, count, p * PANEL, ahead, out + first * w.outputs);
        }
    });
}

template <class T>
static void int8_linear(const Weights& w, const T* x, int64_t n, int64_t inputs, char* bytes, T* out, int threads) {
    const int64_t piece = 16, width = 4 * w.words, stride = width + 4;
    parallel_for(threads, (n + piece - 1) / piece, [&](int64_t p) {
        for (int64_t i = p * piece; i < n && i < (p + 1) * piece; i++)
            quantize(x + i * inputs, inputs, bytes + i * stride, width);
    });
    multiply<Int8Quads>(w, {bytes, stride}, n, out, threads);
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

// x [rows, inputs] -> out [rows, outputs]; scratch: rows * (4 * words + 4) bytes.
void sensorium_int8_linear(int type, const char* x, int64_t rows, int64_t inputs, const char* panels, const int32_t* shift,
                           const float* scale, const float* bias, int64_t words, int64_t outputs, char* scratch, char* out,
                           int threads) {
#ifdef __x86_64__
    Weights weights{panels, shift, scale, bias, words, outputs};
    if (type == FLOAT32)
        int8_linear(weights, (const float*)x, rows, inputs, scratch, (float*)out, threads);
    else
        int8_linear(weights, (const bf16*)x, rows, inputs, scratch, (bf16*)out, threads);
#endif
}

// x [rows, words of 2 bfloat16 or 1 float] -> out [rows, outputs] of the same type.
void sensorium_linear(int type, const char* x, int64_t rows, const char* panels, const float* bias, int64_t words, int64_t outputs,
                      char* out, int threads) {
#ifdef __x86_64__
    Weights weights{panels, nullptr, nullptr, bias, words, outputs};
    if (type == FLOAT32)
        multiply<Floats>(weights, {x, 4 * words}, rows, (float*)out, threads);
    else
        multiply<Bf16Pairs>(weights, {x, 4 * words}, rows, (bf16*)out, threads);
#endif
}
}
