// Softmax attention over keys in blocks of a paged cache, or over packed segments; prompt chunks and decode rows alike.
//
// Keys are taken in tiles of 64 from the first key on, softmax runs along (arXiv 2307.08691). The arithmetic of a row is the
// same in every company: each row has accumulators of its own, tiles start at absolute positions, and keys a row does not
// see are not read or weigh exactly 0. Slots beyond a request's length are never read.
#include <cmath>
#include <vector>

#include "codes.h"

static const int TILE = 64;         // keys taken at once
static const int ROWS = 6;          // query rows in registers
static const float LOWEST = -3e38f; // maximum of no scores: its difference from another is a number
static const int64_t BLOCK = 192;   // query rows that share a tile once it is laid out

struct Problem {
    const char *q, *k, *v;
    char* out;
    int64_t q_stride, k_stride, v_stride;  // elements from a row to the next
    int64_t heads, kv_heads, dim;
    float scale;                  // of the scores, times log2(e)
    const int64_t *starts, *lengths;
    const int32_t* tables;        // null: the keys of a request are the rows of its queries
    int64_t width, block_size;    // of the tables, of a block
    bool causal;
    int64_t window;       // keys that a row sees up to its own, 0: all
    const int64_t* seen;  // first key of every row, then the ends; null: as causal and window say
    int64_t rows;         // of seen
    float cap;            // of the scores, times log2(e), 0: none; scale is then that of 2 log2(e) score / cap
    int codes;            // of keys and values; a row ends with a scale of each head, and strides count bytes

    int64_t first(int64_t row, int64_t position) const {
        return seen ? seen[row] : window && position >= window ? position + 1 - window : 0;
    }
    int64_t end(int64_t row, int64_t position, int64_t length) const {
        return seen ? seen[rows + row] : causal ? position + 1 : length;
    }
};

struct Work {
    int64_t request, kv_head, first, count;  // query rows of the request
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
#define VECTORS 1
#include "attention_body.h"

#if defined(__x86_64__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAMESPACE avx2
#define VECTORS 1
#include "attention_body.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define NAMESPACE avx512
#define VECTORS 4
#define WIDE
#include "attention_body.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#define NAMESPACE avx512_bf16
#define VECTORS 4
#define WIDE
#define PAIRS
#include "attention_body.h"
#pragma GCC pop_options

static int best() {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static Attend* choose(int type, int level) {
    if (level == 3 && type == BFLOAT16) return avx512_bf16::attend<bf16>;
    if (level >= 2) return type == FLOAT32 ? avx512::attend<float> : avx512::attend<bf16>;
    if (level == 1) return type == FLOAT32 ? avx2::attend<float> : avx2::attend<bf16>;
    return type == FLOAT32 ? base::attend<float> : base::attend<bf16>;
}
#else
static int best() { return 0; }

static Attend* choose(int type, int) { return type == FLOAT32 ? base::attend<float> : base::attend<bf16>; }
#endif

extern "C" int sensorium_level = best();  // instruction set in use, 0 the plainest; tests lower it

static thread_local Scratch scratch;  // not in a function: a thread that does not pass its declaration would never free it

static void run(int type, Problem problem, int64_t requests, int threads) {
    problem.scale *= problem.cap ? 2 * 1.44269504f / problem.cap : 1.44269504f;
    problem.cap *= 1.44269504f;
    int64_t group = problem.heads / problem.kv_heads, step = BLOCK / group > 0 ? BLOCK / group : 1;
    std::vector<Work> work;
    for (int64_t i = 0; i < requests; i++)
        for (int64_t head = 0; head < problem.kv_heads; head++)
            for (int64_t n = problem.starts[i + 1] - problem.starts[i], first = 0; first < n; first += step)
                work.push_back({i, head, first, n - first < step ? n - first : step});
    Attend* attend = choose(type, sensorium_level);
    // heads of a request on one thread: their keys lie side by side
    parallel_shares(threads, (int64_t)work.size(), [&](int64_t i, int64_t, int64_t, int64_t) {
        attend(problem, work[work.size() - 1 - i], scratch);
    });
}

CLONES static void encode_row(int type, int codes, const char* from, char* to, int64_t row, int64_t heads, int64_t dim) {
    for (int64_t h = 0; h < heads; h++) {
        uint8_t* made = (uint8_t*)to + h * dim;
        const float scale = type == FLOAT32 ? encode(codes, (const float*)from + h * dim, made, dim)
                                            : encode(codes, (const bf16*)from + h * dim, made, dim);
        memcpy(to + row + (h - heads) * sizeof scale, &scale, sizeof scale);
    }
}

// Rows of keys or values, `stride` bytes apart, to their slots of `row` bytes.
static void write(int type, int codes, const char* from, int64_t stride, char* cache, int64_t row, const int64_t* slots,
                  int64_t n, int64_t heads, int64_t dim, int threads) {
    const int64_t piece = 64;
    parallel_for(threads, (n + piece - 1) / piece, [&](int64_t p) {
        for (int64_t i = p * piece; i < n && i < (p + 1) * piece; i++) {
            if (codes)
                encode_row(type, codes, from + i * stride, cache + slots[i] * row, row, heads, dim);
            else
                memcpy(cache + slots[i] * row, from + i * stride, row);
        }
    });
}

extern "C" {

// q [rows, heads, dim]; k, v [written, kv_heads, dim]; rows of q, k, v may be apart. cache [2, slots, cache_row], where v is
// null [1, ...]: keys are values. A row is kv_heads * dim numbers, or codes with their scales.
void sensorium_paged_attention(int type, const char* q, int64_t q_stride, const char* k, int64_t k_stride, const char* v,
                               int64_t v_stride, char* cache, int64_t cache_slots, int64_t cache_row, int codes, char* out,
                               int64_t heads, int64_t kv_heads, int64_t dim, float scale, float cap, const int64_t* starts, const int64_t* lengths,
                               int64_t requests, const int32_t* tables, int64_t width, int64_t block_size,
                               const int64_t* slots, int64_t written, int causal, int64_t window, const int64_t* seen,
                               int64_t rows, int threads) {
    int64_t size = type == FLOAT32 ? 4 : 2, row = cache_row * (codes ? 1 : size);  // in bytes
    char* values = v ? cache + cache_slots * row : cache;
    write(type, codes, k, k_stride * size, cache, row, slots, written, kv_heads, dim, threads);
    if (v) write(type, codes, v, v_stride * size, values, row, slots, written, kv_heads, dim, threads);
    Problem problem{q,       cache,  values, out,        q_stride,    cache_row, cache_row, heads, kv_heads, dim,  scale, starts,
                    lengths, tables, width,  block_size, causal != 0, window,    seen,      rows,  cap,      codes};
    run(type, problem, requests, threads);
}

// q [rows, heads, dim], k, v [rows, kv_heads, dim], rows may be apart; segment i is the rows [starts[i], starts[i + 1]).
void sensorium_varlen_attention(int type, const char* q, int64_t q_stride, const char* k, int64_t k_stride, const char* v,
                                int64_t v_stride, char* out, int64_t heads, int64_t kv_heads, int64_t dim, float scale,
                                const int64_t* starts, const int64_t* lengths, int64_t segments, int threads) {
    Problem problem{q,      k,       v,       out, q_stride, k_stride, v_stride, heads,   kv_heads, dim, scale,
                    starts, lengths, nullptr, 0,   1,        false,    0,        nullptr, 0,        0,   NONE};
    run(type, problem, segments, threads);
}
}
