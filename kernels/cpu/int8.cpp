// Rows times packed 8-bit weights, for x86 CPUs with AVX-512 VNNI: rows are quantised, multiplied and scaled back in one call,
// with the bits of int8_linear_reference in kernels/int8.py.
//
// A weight [out, in] lies as [panel of 64 outputs][in / 4][64 outputs][4 inputs], zeros beyond its edges: one instruction
// multiplies 16 outputs by 4 inputs and adds. It wants rows without a sign, so these are stored 128 too high, and `shift`,
// 128 times the sum of an output's weights, is taken off the result.
#include "common.h"

#if defined(__x86_64__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#pragma GCC optimize("fp-contract=off")

static const int64_t PANEL = 64;
static const int ROWS = 6;           // rows in registers, times a panel
static const int64_t CHUNK = 96;     // rows that pass a panel while it is in the cache

typedef uint8_t v16b __attribute__((vector_size(16)));

struct Weights {
    const int8_t* panels;
    const int32_t* shift;
    const float *scale, *bias;
    int64_t width, outputs;  // inputs and their padding, a multiple of 4; outputs without padding
};

// Where a quantised row starts: its bytes, then its scale.
static uint8_t* row_at(uint8_t* rows, int64_t i, int64_t width) { return rows + i * (width + 4); }

static float scale_of(const uint8_t* row, int64_t width) {
    float scale;
    memcpy(&scale, row + width, 4);
    return scale;
}

// The largest magnitude becomes 127. As integers the bits of magnitudes are in order, infinity and NaN above all numbers.
template <class T>
static void quantize(const T* x, int64_t n, uint8_t* row, int64_t width) {
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

// R rows times one panel, from its output `first` on. Meanwhile `ahead` is fetched, 4 * pace bytes for every 4 inputs.
template <class T, int R>
static void product(const Weights& w, const uint8_t* rows, int64_t first, const int8_t* ahead, int64_t pace, T* out) {
    v16i acc[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) acc[r][c] = v16i{};
    const int8_t* panel = w.panels + first * w.width;
    for (int64_t k = 0; k < w.width; k += 4, panel += 4 * PANEL) {
        __m512i columns[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++, ahead += pace) {
            columns[c] = _mm512_loadu_si512(panel + 64 * c);
            _mm_prefetch((const char*)ahead, _MM_HINT_T1);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t four;
            memcpy(&four, rows + r * (w.width + 4) + k, 4);
            __m512i inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) acc[r][c] = (v16i)_mm512_dpbusd_epi32((__m512i)acc[r][c], inputs, columns[c]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        int64_t at = first + 16 * c, left = w.outputs - at;
        if (left <= 0) break;
        v16i shift;
        memcpy(&shift, w.shift + at, sizeof shift);
        v16 scale = load(w.scale + at), bias = load(w.bias + at);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            v16 sum = __builtin_convertvector(acc[r][c] - shift, v16);
            v16 value = sum * scale_of(rows + r * (w.width + 4), w.width) * scale + bias;
            T* to = out + r * w.outputs + at;
            left < 16 ? store_part(to, value, left) : store(to, value);
        }
    }
}

// n rows times one panel. The next panel comes from memory while this one is used, an even share for each tile of rows.
template <class T>
static void products(const Weights& w, uint8_t* rows, int64_t n, int64_t first, T* out) {
    typedef void Product(const Weights&, const uint8_t*, int64_t, const int8_t*, int64_t, T*);
    static Product* const sizes[] = {nullptr,       product<T, 1>, product<T, 2>, product<T, 3>,
                                     product<T, 4>, product<T, 5>, product<T, 6>};
    const int64_t tiles = (n + ROWS - 1) / ROWS, pace = PANEL / tiles;
    const int8_t* ahead = w.panels + (first + PANEL) * w.width;
    for (int64_t i = 0; i < n; ahead += pace * w.width) {
        int64_t left = n - i;
        int64_t now = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;  // 7 as 4 and 3, not as 6 and 1
        sizes[now](w, row_at(rows, i, w.width), first, ahead, pace, out + i * w.outputs);
        i += now;
    }
}

template <class T>
static void run(const T* x, int64_t n, int64_t inputs, const Weights& w, uint8_t* rows, T* out, int threads) {
    const int64_t piece = 16, chunks = (n + CHUNK - 1) / CHUNK, panels = (w.outputs + PANEL - 1) / PANEL;
    parallel_for(threads, (n + piece - 1) / piece, [&](int64_t p) {
        for (int64_t i = p * piece; i < n && i < (p + 1) * piece; i++)
            quantize(x + i * inputs, inputs, row_at(rows, i, w.width), w.width);
    });
    // few rows: neighbouring panels on one thread, which fetches them ahead
    const int64_t group = chunks > 1 ? 1 : (panels + 2 * threads - 1) / (2 * threads), groups = (panels + group - 1) / group;
    parallel_for(threads, groups * chunks, [&](int64_t i) {
        int64_t first = i % chunks * CHUNK, count = n - first < CHUNK ? n - first : CHUNK;
        for (int64_t p = i / chunks * group; p < panels && p < (i / chunks + 1) * group; p++)
            products(w, row_at(rows, first, w.width), count, p * PANEL, out + first * w.outputs);
    });
}
#pragma GCC pop_options
#endif

extern "C" {

// Only for CPUs that have the instruction: who calls asks first. x [rows, inputs] -> out [rows, outputs]; scratch: rows * (width + 4) bytes. panels, shift, scale and bias are padded.
void sensorium_int8_linear(int type, const char* x, int64_t rows, int64_t inputs, const int8_t* panels, const int32_t* shift,
                           const float* scale, const float* bias, int64_t width, int64_t outputs, uint8_t* scratch, char* out,
                           int threads) {
#if defined(__x86_64__) && !defined(__clang__)
    Weights weights{panels, shift, scale, bias, width, outputs};
    if (type == FLOAT32)
        run((const float*)x, rows, inputs, weights, scratch, (float*)out, threads);
    else
        run((const bf16*)x, rows, inputs, weights, scratch, (bf16*)out, threads);
#endif
}
}
