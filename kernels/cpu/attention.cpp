// Softmax attention over a paged KV cache or over packed segments, for prompt chunks and decode rows alike.
// Keys are read in tiles of 64 with an online softmax (arXiv 2307.08691). A row's bits do not depend on the rest of the batch:
// it has accumulators of its own, tiles start at absolute positions, and keys that it does not attend to are not read or have
// weight 0 exactly. Slots beyond a request's length are never read.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kv_quant.h"

static const int TILE = 64;         // keys per tile
static const float LOWEST = -3e38f; // initial maximum: finite, so that differences are not NaN
static const int64_t BLOCK = 192;   // query rows that share a prepared tile
static const int64_t HEADS = 16;    // most key heads read together: a cache row holds all heads

struct Problem {
    const char *q, *k, *v;
    char* out;
    int64_t q_stride, k_stride, v_stride;  // row strides in elements
    int64_t heads, kv_heads, dim;
    float scale;                  // softmax scale times log2(e)
    const int64_t *starts, *lengths;
    const int32_t* tables;        // block tables; null: keys are the rows of the request
    int64_t width, block_size;    // row length of the tables, tokens per block
    bool causal;
    int64_t window;       // sliding window: keys up to the row's own, 0: all
    const int64_t* key_range;  // [2, rows]: first key and end of keys of each row; null: by causal and window
    int64_t rows;         // number of rows in key_range
    float cap;            // soft cap times log2(e), 0: none; scale is then the factor of 2 log2(e) score / cap
    int quant;            // format of a quantised cache, whose rows end with one scale per head; strides are then in bytes
    const float* sinks;   // [heads]: attention sinks, the logit of an extra key without a value; null: none

    int64_t first(int64_t row, int64_t position) const {
        return key_range ? key_range[row] : window && position >= window ? position + 1 - window : 0;
    }
    int64_t end(int64_t row, int64_t position, int64_t length) const {
        return key_range ? key_range[rows + row] : causal ? position + 1 : length;
    }
};

struct Work {
    int64_t request, kv_head, kv_count, first, count;  // adjacent key heads, and query rows of the request
};

struct Scratch {
    std::vector<char> memory;

    template <class T>
    static T* take(char*& at, int64_t n) {
        T* found = (T*)at;
        at += (n * sizeof(T) + 63) / 64 * 64;
        return found;
    }
};

typedef void Attend(const Problem&, const Work&, Scratch&);

#define NAMESPACE base
#define LANES 4
#ifdef __x86_64__
#define VECTORS 2  // 16 registers
#else
#define VECTORS 4  // 32 registers
#endif
#include "attention_body.h"

#if defined(__x86_64__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAMESPACE avx2
#define LANES 8
#define VECTORS 2
#include "attention_body.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define NAMESPACE avx512
#define LANES 16
#define VECTORS 4
#define WIDE
#include "attention_body.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#define NAMESPACE avx512_bf16
#define LANES 16
#define VECTORS 4
#define WIDE
#define PAIRS
#include "attention_body.h"
#pragma GCC pop_options

#ifdef HAS_AMX
#ifndef TARGET
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,amx-tile,amx-bf16"
#endif
#define PRAGMA(text) _Pragma(#text)
#define SET_TARGET(name) PRAGMA(GCC target(name))
#pragma GCC push_options
SET_TARGET(TARGET)
#define NAMESPACE amx
#define LANES 16
#define VECTORS 4
#define WIDE
#define PAIRS
#define TILES
#include "attention_body.h"
#pragma GCC pop_options
#endif

static Attend* choose(int type, int level) {
#ifdef HAS_AMX
    if (level == LEVEL_AMX && type == BFLOAT16) return amx::attend<bf16>;
#endif
    if (level == LEVEL_AVX512_BF16 && type == BFLOAT16) return avx512_bf16::attend<bf16>;
    if (level >= LEVEL_AVX512) return type == FLOAT32 ? avx512::attend<float> : avx512::attend<bf16>;
    if (level == LEVEL_AVX2) return type == FLOAT32 ? avx2::attend<float> : avx2::attend<bf16>;
    return type == FLOAT32 ? base::attend<float> : base::attend<bf16>;
}
#else
static Attend* choose(int type, int) { return type == FLOAT32 ? base::attend<float> : base::attend<bf16>; }
#endif

static thread_local Scratch scratch;  // at namespace scope: inside a function, a thread that never reaches it would not free it

static void run(int type, Problem problem, int64_t requests, int threads) {
    problem.scale *= problem.cap ? 2 * 1.44269504f / problem.cap : 1.44269504f;
    problem.cap *= 1.44269504f;
    const int64_t group = problem.heads / problem.kv_heads, step = BLOCK / group > 0 ? BLOCK / group : 1;
    const int64_t shared = problem.kv_heads * requests / (2 * threads);  // leaves work for every thread
    std::vector<Work> work;
    for (int64_t i = 0; i < requests; i++) {
        const int64_t n = problem.starts[i + 1] - problem.starts[i];
        if (!n) continue;
        const int64_t together = std::max<int64_t>(1, std::min({HEADS, shared, BLOCK / (n * group)}));
        for (int64_t head = 0; head < problem.kv_heads; head += together)
            for (int64_t first = 0; first < n; first += step)
                work.push_back({i, head, std::min(together, problem.kv_heads - head), first, std::min(step, n - first)});
    }
    Attend* attend = choose(type, sensorium_level);
    // one thread handles the heads of a request, whose keys are adjacent in memory
    parallel_shares(threads, (int64_t)work.size(), [&](int64_t i) {
        attend(problem, work[work.size() - 1 - i], scratch);
    });
}

INLINE void quantize_row(int type, int quant, const char* from, char* to, int64_t row, int64_t heads, int64_t dim) {
    for (int64_t h = 0; h < heads; h++) {
        uint8_t* made = (uint8_t*)to + h * dim;
        const float scale = type == FLOAT32 ? quantize_head(quant, (const float*)from + h * dim, made, dim)
                                            : quantize_head(quant, (const bf16*)from + h * dim, made, dim);
        memcpy(to + row + (h - heads) * sizeof scale, &scale, sizeof scale);
    }
}

// Write rows of keys or values, `stride` bytes apart, to their slots of `row` bytes, quantised if the cache is.
static void write(int type, int quant, const char* from, int64_t stride, char* cache, int64_t row, const int64_t* slots,
                  int64_t n, int64_t heads, int64_t dim, int threads) {
    const int64_t piece = 64;
    parallel_for(threads, (n + piece - 1) / piece, [&](int64_t p) {
        for (int64_t i = p * piece; i < n && i < (p + 1) * piece; i++) {
            if (quant)
                run_best<quantize_row>(type, quant, from + i * stride, cache + slots[i] * row, row, heads, dim);
            else
                memcpy(cache + slots[i] * row, from + i * stride, row);
        }
    });
}

extern "C" {

// q [rows, heads, dim]; k, v [written, kv_heads, dim]; rows of q, k, v may be strided. cache [2, slots, cache_row], or [1, ...]
// if v is null and keys are also the values. A cache row is kv_heads * dim values or, if quantised, values and scales.
// sinks [heads] or null.
void sensorium_paged_attention(int type, const char* q, int64_t q_stride, const char* k, int64_t k_stride, const char* v,
                               int64_t v_stride, char* cache, int64_t cache_slots, int64_t cache_row, int quant, char* out,
                               int64_t heads, int64_t kv_heads, int64_t dim, float scale, float cap, const int64_t* starts, const int64_t* lengths,
                               int64_t requests, const int32_t* tables, int64_t width, int64_t block_size,
                               const int64_t* slots, int64_t written, int causal, int64_t window, const int64_t* key_range,
                               int64_t rows, const float* sinks, int threads) {
    int64_t size = type == FLOAT32 ? 4 : 2, row = cache_row * (quant ? 1 : size);  // in bytes
    char* values = v ? cache + cache_slots * row : cache;
    write(type, quant, k, k_stride * size, cache, row, slots, written, kv_heads, dim, threads);
    if (v) write(type, quant, v, v_stride * size, values, row, slots, written, kv_heads, dim, threads);
    Problem problem{q,       cache,  values, out,        q_stride,    cache_row, cache_row, heads, kv_heads, dim,  scale, starts,
                    lengths, tables, width,  block_size, causal != 0, window,    key_range,      rows,  cap,      quant,
                    sinks};
    run(type, problem, requests, threads);
}

// q [rows, heads, dim], k, v [rows, kv_heads, dim], rows may be strided; segment i is the rows [starts[i], starts[i + 1]).
void sensorium_varlen_attention(int type, const char* q, int64_t q_stride, const char* k, int64_t k_stride, const char* v,
                                int64_t v_stride, char* out, int64_t heads, int64_t kv_heads, int64_t dim, float scale,
                                const int64_t* starts, const int64_t* lengths, int64_t segments, int threads) {
    Problem problem{q,      k,       v,       out, q_stride, k_stride, v_stride, heads,   kv_heads, dim, scale,
                    starts, lengths, nullptr, 0,   1,        false,    0,        nullptr, 0,        0,   NONE,
                    nullptr};
    run(type, problem, segments, threads);
}
}
