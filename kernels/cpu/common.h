// Shared by all CPU kernels: vectors of 16 floats, bfloat16, 2^x, threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>

// Hot loops are inlined into functions that are compiled per instruction set, so all of them are INLINE.
#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))

#ifdef __x86_64__
#define AVX2 "avx2,fma"
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,fma"
#if defined(__linux__) && (__clang_major__ >= 12 || (!defined(__clang__) && __GNUC__ >= 11))
#define HAS_AMX  // the compiler has it
#endif
#endif

// Instruction sets that all other kernels are compiled for, in rising order.
enum Level { LEVEL_BASE = 0, LEVEL_AVX2 = 1, LEVEL_AVX512 = 2, LEVEL_AVX512_BF16 = 3, LEVEL_AMX = 4 };

// Instruction sets that linear layers are compiled for, best last; kernels/native.py has their names.
enum Products {
    PRODUCTS_BASE,
    PRODUCTS_AVX2,
    PRODUCTS_AVX_VNNI,
    PRODUCTS_AVX512,
    PRODUCTS_AVX512_VNNI,
    PRODUCTS_AVX512_BF16,
    PRODUCTS_NEON,
    PRODUCTS_NEON_DOT,
    PRODUCTS_NEON_BF16,
    PRODUCTS_NEON_I8MM,
    PRODUCTS_AMX
};

// The sets in use: the best ones that the CPU has, or others set by kernels/native.py or a test.
extern "C" int sensorium_level, sensorium_products;

#ifdef __x86_64__
template <auto body, class... Args>
__attribute__((target(AVX2))) static void on_avx2(Args... args) {
    body(args...);
}

template <auto body, class... Args>
__attribute__((target(AVX512))) static void on_avx512(Args... args) {
    body(args...);
}
#endif

// Run the INLINE function `body`, compiled for the level in use.
template <auto body, class... Args>
static void run_best(Args... args) {
#ifdef __x86_64__
    if (sensorium_level >= LEVEL_AVX512) return on_avx512<body>(args...);
    if (sensorium_level == LEVEL_AVX2) return on_avx2<body>(args...);
#endif
    body(args...);
}

typedef float v4 __attribute__((vector_size(16)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

enum Type { FLOAT32 = 0, BFLOAT16 = 1 };

#ifdef __x86_64__
template <class Body, class... Args>
__attribute__((target(AVX2))) static void vectors_avx2(Args... args) {
    Body::template run<v8>(args...);
}

template <class Body, class... Args>
__attribute__((target(AVX512))) static void vectors_avx512(Args... args) {
    Body::template run<v16>(args...);
}
#endif

// Run the MEMBER function `Body::run<V>`, compiled for the level in use; V is a vector as wide as its registers. Compilers keep
// wider vectors in memory, and an element that was written in parts cannot be forwarded to a read of the whole.
template <class Body, class... Args>
static void run_vectors(Args... args) {
#ifdef __x86_64__
    if (sensorium_level >= LEVEL_AVX512) return vectors_avx512<Body>(args...);
    if (sensorium_level == LEVEL_AVX2) return vectors_avx2<Body>(args...);
#endif
    Body::template run<v4>(args...);
}

// The integers of a vector of floats.
template <class V>
struct IntegersOf {
    typedef int32_t Signed __attribute__((vector_size(sizeof(V))));
    typedef uint32_t Unsigned __attribute__((vector_size(sizeof(V))));
    typedef uint16_t Halves __attribute__((vector_size(sizeof(V))));
    typedef uint16_t Half __attribute__((vector_size(sizeof(V) / 2)));
};

template <class V = v16>
INLINE V splat(float x) {
    return x - V{};
}

INLINE v16 load(const float* p) {
    v16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE v16 load(const bf16* p) {
    v16h x;
    memcpy(&x, p, sizeof x);
    return (v16)(__builtin_convertvector(x, v16u) << 16);
}

INLINE void store(float* p, v16 x) { memcpy(p, &x, sizeof x); }

// Round to nearest, ties to even; NaN stays NaN.
INLINE void store(bf16* p, v16 x) {
    v16u bits = (v16u)x;
    const v16i is_nan = (0x7f800000 - (v16i)(bits & 0x7fffffff)) >> 31;
    v16u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = (rounded & ~(v16u)is_nan) | ((v16u)is_nan & 0x7fc0);
    v16h out = __builtin_convertvector(rounded, v16h);
    memcpy(p, &out, sizeof out);
}

// The same for V of run_vectors: shuffles and comparisons are single instructions there.
template <class V>
INLINE V load(const float* p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}

template <class V>
INLINE V load(const bf16* p) {
    typedef typename IntegersOf<V>::Half Half;
    const Half none = {};
    Half x;
    memcpy(&x, p, sizeof x);
    if constexpr (sizeof(V) == 64)
        return (V)__builtin_shufflevector(none, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11,
                                          27, 12, 28, 13, 29, 14, 30, 15, 31);
    else if constexpr (sizeof(V) == 32)
        return (V)__builtin_shufflevector(none, x, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    else
        return (V)__builtin_shufflevector(none, x, 0, 4, 1, 5, 2, 6, 3, 7);
}

// Round to the bits of bfloat16, in the upper half of each number.
template <class V>
INLINE auto round_bits(V x) {
    typedef typename IntegersOf<V>::Unsigned Unsigned;
    const Unsigned bits = (Unsigned)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return x == x ? rounded : Unsigned{} + 0x7fc00000;
}

template <class V>
INLINE void store(float* p, V x) {
    memcpy(p, &x, sizeof x);
}

template <class V>
INLINE void store(bf16* p, V x) {
    const auto all = (typename IntegersOf<V>::Halves)round_bits(x);
    typename IntegersOf<V>::Half out;
    if constexpr (sizeof(V) == 64)
        out = __builtin_shufflevector(all, all, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    else if constexpr (sizeof(V) == 32)
        out = __builtin_shufflevector(all, all, 1, 3, 5, 7, 9, 11, 13, 15);
    else
        out = __builtin_shufflevector(all, all, 1, 3, 5, 7);
    memcpy(p, &out, sizeof out);
}

// Load or store the first n elements, fewer than V has; the others read as 0 and are not written.
template <class V = v16, class T>
INLINE V load_part(const T* p, int64_t n) {
    T all[sizeof(V) / 4] = {};
    memcpy(all, p, n * sizeof(T));
    return load<V>(all);
}

template <class T, class V>
INLINE void store_part(T* p, V x, int64_t n) {
    T all[sizeof(V) / 4];
    store<V>(all, x);
    memcpy(p, all, n * sizeof(T));
}

// Round to T and back to float.
template <class T, class V>
INLINE V rounded(V x) {
    return sizeof(T) == sizeof(float) ? x : (V)(round_bits(x) & 0xffff0000);
}

template <class V>
INLINE V larger(V a, V b) {
    return a > b ? a : b;
}

// Add halves recursively, so that the order of additions is the same on every machine.
INLINE float sum(v16 x) {
    float part[16];
    store(part, x);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

// 16 sums, of elements i, i + 16, ..., in as many registers as V needs.
template <class V>
struct Sums {
    static const int PARTS = 16 * 4 / sizeof(V), LANES = sizeof(V) / 4;
    V part[PARTS] = {};

    MEMBER float total() const {
        float all[16];
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) store(all + p * LANES, part[p]);
        return sum(load(all));
    }
};

INLINE float largest(v16 x) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), b = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    a = a > b ? a : b;
    v4 c = __builtin_shufflevector(a, a, 0, 1, 2, 3), d = __builtin_shufflevector(a, a, 4, 5, 6, 7);
    c = c > d ? c : d;
    d = __builtin_shufflevector(c, c, 2, 3, 2, 3);
    c = c > d ? c : d;
    return c[0] > c[1] ? c[0] : c[1];
}

// The largest element of a shorter vector.
template <class V>
INLINE float largest(V x) {
    float part[sizeof(V) / 4];
    memcpy(part, &x, sizeof x);
    for (int half = sizeof(V) / 8; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
}

// 2^x with an error of about 2e-7 for -126 <= x <= 127. V is a vector of floats.
template <class V>
INLINE V normal_exp2(V x) {
    typedef decltype(x < x) Integers;
    const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const V shifted = x + magic, f = x - (shifted - magic), f2 = f * f;
    const V high = f * 1.3264666e-3f + 9.6715126e-3f, middle = f * 5.5507339e-2f + 2.4022242e-1f;  // three short chains
    const V y = (high * f2 + middle) * f2 + (f * 6.9314698e-1f + 1.f);
    return (V)((Integers)y + ((Integers)shifted << 23));
}

// The same for x <= 127: 0 below the smallest normal number, NaN for NaN.
template <class V>
INLINE V exp2(V x) {
    return x < -126.f ? V{} : normal_exp2(x);
}

// Use the threads of the OpenMP runtime that torch has loaded, so that the process has one pool only. Weak symbols: without a
// runtime, everything runs on the calling thread.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
extern "C" int omp_get_thread_num() __attribute__((weak));

// Call f(i) for i in [0, n), each on one thread, in any order.
template <class F>
static void parallel_for(int threads, int64_t n, const F& f) {
    struct Job {
        std::atomic<int64_t> next;
        int64_t n;
        const F* f;
    } job{{0}, n, &f};
    auto run = [](void* data) {
        Job& own = *(Job*)data;
        for (int64_t i; (i = own.next.fetch_add(1, std::memory_order_relaxed)) < own.n;) (*own.f)(i);
    };
    if (threads > n) threads = (int)n;
    if (threads > 1 && GOMP_parallel)
        GOMP_parallel(run, &job, (unsigned)threads, 0);
    else
        run(&job);
}

// Call f(i) for i in [0, n). Each thread works through its own share in order, and then takes what is left of the others' shares.
template <class F>
static void parallel_shares(int threads, int64_t n, const F& f) {
    struct Share {
        alignas(64) std::atomic<int64_t> next;
    };
    const int64_t most = 256, wanted = threads < n ? threads : n;
    struct Job {
        Share shares[most];
        int64_t threads, n;
        const F* f;

        int64_t start(int64_t t) const { return n * t / threads; }
    } job;
    job.threads = !GOMP_parallel || !omp_get_thread_num || wanted < 1 ? 1 : wanted < most ? wanted : most;
    job.n = n, job.f = &f;
    for (int64_t t = 0; t < job.threads; t++) job.shares[t].next.store(job.start(t), std::memory_order_relaxed);
    auto run = [](void* data) {
        Job& own = *(Job*)data;
        int64_t me = own.threads > 1 ? omp_get_thread_num() : 0;
        for (int64_t k = 0; k < own.threads; k++) {
            int64_t t = (me + k) % own.threads, end = own.start(t + 1);
            for (int64_t i; (i = own.shares[t].next.fetch_add(1, std::memory_order_relaxed)) < end;)
                (*own.f)(i);
        }
    };
    if (job.threads > 1)
        GOMP_parallel(run, &job, (unsigned)job.threads, 0);
    else
        run(&job);
}

// Call f(first, last) for pieces of `rows` rows. Few rows are one piece, which stays on the calling thread.
template <class F>
static void parallel_rows(int threads, int64_t rows, int64_t width, const F& f) {
    int64_t piece = width < 8192 ? 8192 / width : 1;
    parallel_for(threads, (rows + piece - 1) / piece, [&](int64_t i) {
        int64_t last = (i + 1) * piece;
        f(i * piece, last < rows ? last : rows);
    });
}
