// Low-rank adapters of a step, each for its own rows, in one call per layer. A row's bits depend on that row and its adapter.
#include <algorithm>
#include <thread>
#include <type_traits>
#include <vector>

#include "common.h"

namespace {

// A part of a layer's outputs: out = out * gain + shift, where there is a gain, and out += low[first_rank ..] @ up.
struct Shard {
    int64_t first_rank, ranks, first_output, outputs;
    const char* up;  // [outputs / 16, ranks, 16], padded: read in this order, since rows a power of two apart share few cache sets
    const char *gain, *shift;  // [outputs], padded to whole panels of 16
};

// What an adapter adds to one layer. Without `down`, nothing.
struct Layer {
    const char* down;  // [ranks, inputs]
    int64_t ranks, num_shards;
    const Shard* shards;
};

// The rows of a step that use one adapter: `count` of them, with these numbers. Without `index`, all.
struct Group {
    int64_t count;
    const int64_t* index;
    const Layer* layers;

    int64_t row(int64_t i) const { return index ? index[i] : i; }
};

const int ROWS = 4, RANKS = 4;                     // rows and ranks whose sums are in registers at once
const int64_t UNIT = 16, OUTPUTS = 512;            // rows that are computed together; outputs whose matrix stays in the cache
const int64_t PART_RANKS = 8, PART_OUTPUTS = 512;  // of a piece, if there are so few rows that threads have to share them
const int64_t AHEAD = 2048;                        // bytes between the weights that are multiplied and those that are prefetched

// Vectors as wide as the registers, since gcc keeps wider ones in memory: 4, 8 or 16 floats.
template <int L>
struct Vectors;
#define VECTORS_OF(L)                                             \
    template <>                                                   \
    struct Vectors<L> {                                           \
        typedef float F __attribute__((vector_size(4 * L)));      \
        typedef uint32_t U __attribute__((vector_size(4 * L)));   \
        typedef int32_t I __attribute__((vector_size(4 * L)));    \
        typedef uint16_t H __attribute__((vector_size(2 * L)));   \
    };
VECTORS_OF(4)
VECTORS_OF(8)
VECTORS_OF(16)
template <int L>
using Floats = typename Vectors<L>::F;

template <int L>
INLINE Floats<L> load_as(const float* p) {
    Floats<L> x;
    memcpy(&x, p, sizeof x);
    return x;
}

template <int L>
INLINE Floats<L> load_as(const bf16* p) {
    typename Vectors<L>::H x;
    memcpy(&x, p, sizeof x);
    return (Floats<L>)(__builtin_convertvector(x, typename Vectors<L>::U) << 16);
}

template <int L>
INLINE void store_as(float* p, Floats<L> x) {
    memcpy(p, &x, sizeof x);
}

// As `store` in common.h.
template <int L>
INLINE void store_as(bf16* p, Floats<L> x) {
    typedef typename Vectors<L>::U U;
    typedef typename Vectors<L>::I I;
    const U bits = (U)x;
    const I is_nan = (0x7f800000 - (I)(bits & 0x7fffffff)) >> 31;
    U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = (rounded & ~(U)is_nan) | ((U)is_nan & 0x7fc0);
    const auto out = __builtin_convertvector(rounded, typename Vectors<L>::H);
    memcpy(p, &out, sizeof out);
}

INLINE float sum_halves(Floats<4> x) {
    x += __builtin_shufflevector(x, x, 2, 3, 2, 3);
    return x[0] + x[1];
}

INLINE float sum_halves(Floats<8> x) {
    return sum_halves(__builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7));
}

INLINE float sum_halves(Floats<16> x) {
    return sum_halves(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}

// How matrices are multiplied: as floats, L of them in a register.
template <int L_, class T>
struct Widened {
    typedef T Item;     // of x, out and the matrices
    typedef float Row;  // of rows that are multiplied
    static const int L = L_, STEP = L_, V = 16 / L_;  // STEP: inputs that are multiplied at once

    static MEMBER Floats<L> add(Floats<L> sum, const float* x, const T* down) { return sum + load_as<L>(x) * load_as<L>(down); }

    static MEMBER void put(T* p, Floats<L> x) { store_as<L>(p, x); }

    // sums [R][V] = low @ 16 outputs of `up`.
    template <int R>
    static MEMBER void add_ranks(Floats<L> (*sums)[V], const float* const* low, const T* up, int64_t ranks) {
        for (int64_t k = 0; k < ranks; k++) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const Floats<L> weight = load_as<L>(up + k * 16 + v * L);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) sums[r][v] += low[r][k] * weight;
            }
        }
    }
};

#ifdef __x86_64__
typedef Vectors<16>::I Words;  // of two bfloat16

INLINE Floats<16> add_pairs(Floats<16> sum, Words a, Words b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

template <class T>
INLINE T read(const bf16* p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}

// The first product as pairs of bfloat16, two of them in a lane; the second one as floats.
struct Pairs {
    typedef bf16 Item, Row;
    static const int L = 16, STEP = 32, V = 1;

    static MEMBER Floats<16> add(Floats<16> sum, const bf16* x, const bf16* down) {
        return add_pairs(sum, read<Words>(x), read<Words>(down));
    }

    static MEMBER void put(bf16* p, Floats<16> x) {
        Vectors<16>::H rounded;
        asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
        memcpy(p, &rounded, sizeof rounded);
    }

    template <int R>
    static MEMBER void add_ranks(Floats<16> (*sums)[1], const float* const* low, const bf16* up, int64_t ranks) {
        int64_t k = 0;
        for (; k + 2 <= ranks; k += 2) {
            typedef uint16_t Halves __attribute__((vector_size(64)));
            const Halves two = read<Halves>(up + k * 16);  // both ranks of an output share a word from here on
            const Words words = (Words)__builtin_shufflevector(two, two, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8,
                                                               24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            const Floats<16> first = (Floats<16>)(words << 16), second = (Floats<16>)(words & (int32_t)0xffff0000);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][0] = sums[r][0] + low[r][k] * first + low[r][k + 1] * second;
        }
        if (k == ranks) return;
        const Floats<16> last = load_as<16>(up + k * 16);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sums[r][0] += low[r][k] * last;
    }
};
#endif

// low[r][k] = dot product of row r of x and row k of down [K, inputs]. The result of a row does not depend on R and K.
template <class Kind, int R, int K>
INLINE void dot_rows(const typename Kind::Row* const* x, const typename Kind::Item* down, int64_t inputs, float* low,
                     int64_t width) {
    typedef typename Kind::Item T;
    Floats<Kind::L> sums[R][K] = {};
    const int64_t whole = inputs / Kind::STEP * Kind::STEP, rest = inputs - whole;
    for (int64_t d = 0; d < whole; d += Kind::STEP) {
#pragma GCC unroll 4
        for (int k = 0; k < K; k++) {
            if (R == 1) __builtin_prefetch(down + (K + k) * inputs + d);  // the hardware prefetches such short rows too late
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][k] = Kind::add(sums[r][k], x[r] + d, down + k * inputs + d);
        }
    }
    if (rest) {
        typename Kind::Row inputs_left[R][Kind::STEP] = {};
        for (int r = 0; r < R; r++) memcpy(inputs_left[r], x[r] + whole, rest * sizeof(typename Kind::Row));
#pragma GCC unroll 4
        for (int k = 0; k < K; k++) {
            T part[Kind::STEP] = {};
            memcpy(part, down + k * inputs + whole, rest * sizeof(T));
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][k] = Kind::add(sums[r][k], inputs_left[r], part);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int k = 0; k < K; k++) low[r * width + k] = sum_halves(sums[r][k]);
    }
}

template <class Kind, int R, int K>
INLINE void dot_all(const typename Kind::Row* const* x, int64_t rows, const typename Kind::Item* down, int64_t inputs,
                    float* low, int64_t width) {
    int64_t i = 0;
    for (; i + R <= rows; i += R) dot_rows<Kind, R, K>(x + i, down, inputs, low + i * width, width);
    for (; i < rows; i++) dot_rows<Kind, 1, K>(x + i, down, inputs, low + i * width, width);
}

// What all pieces of a call share; see sensorium_low_rank.
struct Call {
    const char* x;
    int64_t x_stride;
    char* out;
    int64_t out_stride, inputs, number;
    float* low;  // [rows of all groups, width]: the first product
    int64_t width;

    int64_t row_floats() const { return (inputs + 15) / 16 * 16; }
};

// A part of the work: `ranks` ranks of the first product, and the outputs from `begin` to `end` of some shards, of rows of a group.
struct Piece {
    const Group* group;
    int64_t first, count, low_row;
    int64_t first_rank, ranks;
    const Shard* shards;
    int64_t num_shards, begin, end;
};

// Compute the first product of a piece. wide: memory for UNIT rows as floats.
template <class Kind>
INLINE void reduce(const Call& call, const Piece& piece, float* wide) {
    typedef typename Kind::Item T;
    const int64_t inputs = call.inputs, whole = inputs / 16 * 16, padded = call.row_floats();
    const typename Kind::Row* rows[UNIT];
    for (int64_t i = 0; i < piece.count; i++) {
        const T* row = (const T*)call.x + piece.group->row(piece.first + i) * call.x_stride;
        if constexpr (std::is_same<typename Kind::Row, T>::value) {
            rows[i] = row;
        } else {
            float* to = wide + i * padded;
            for (int64_t d = 0; d < whole; d += Kind::L) store_as<Kind::L>(to + d, load_as<Kind::L>(row + d));
            if (whole < padded) store(to + whole, load_part(row + whole, inputs - whole));
            rows[i] = to;
        }
    }
    constexpr int K = Kind::L == 16 ? RANKS : 2;  // so that the sums of 4 rows fit the registers
    const T* down = (const T*)piece.group->layers[call.number].down + piece.first_rank * inputs;
    float* low = call.low + piece.low_row * call.width + piece.first_rank;
    int64_t k = 0;
    for (; k + K <= piece.ranks; k += K) dot_all<Kind, ROWS, K>(rows, piece.count, down + k * inputs, inputs, low + k, call.width);
    for (; k < piece.ranks; k++) dot_all<Kind, ROWS, 1>(rows, piece.count, down + k * inputs, inputs, low + k, call.width);
}

// Change 16 outputs of R rows at `o`; `to` are elements of them, for a shard that ends before the sixteenth.
template <class Kind, int R>
INLINE void expand_panel(typename Kind::Item* const* to, const float* const* low, const Shard& shard, int64_t o) {
    typedef typename Kind::Item T;
    constexpr int L = Kind::L;
    const T *up = (const T*)shard.up + o * shard.ranks, *gain = (const T*)shard.gain + o, *shift = (const T*)shard.shift + o;
    Floats<L> sums[R][Kind::V] = {};
    Kind::template add_ranks<R>(sums, low, up, shard.ranks);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Kind::V; v++) {
            T* at = to[r] + v * L;
            Floats<L> value = load_as<L>(at);
            if (shard.gain) {
                Kind::put(at, value * load_as<L>(gain + v * L));
                Kind::put(at, load_as<L>(at) + load_as<L>(shift + v * L));
                value = load_as<L>(at);
            }
            Kind::put(at, value + sums[r][v]);
        }
    }
}

template <class Kind, int R>
INLINE void expand_rows(typename Kind::Item* const* out, const float* const* low, const Shard& shard, int64_t begin,
                        int64_t end) {
    typedef typename Kind::Item T;
    const int64_t whole = begin + (end - begin) / 16 * 16, part = end - whole;
    T* to[R];
    for (int64_t o = begin; o < whole; o += 16) {
        if (R == 1) __builtin_prefetch(shard.up + o * shard.ranks * sizeof(T) + AHEAD);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) to[r] = out[r] + o;
        expand_panel<Kind, R>(to, low, shard, o);
    }
    if (!part) return;
    T parts[R][16] = {};
    for (int r = 0; r < R; r++) memcpy(to[r] = parts[r], out[r] + whole, part * sizeof(T));
    expand_panel<Kind, R>(to, low, shard, whole);
    for (int r = 0; r < R; r++) memcpy(out[r] + whole, parts[r], part * sizeof(T));
}

// Change the outputs of a piece.
template <class Kind>
INLINE void expand(const Call& call, const Piece& piece) {
    typedef typename Kind::Item T;
    for (int64_t s = 0; s < piece.num_shards; s++) {
        const Shard& shard = piece.shards[s];
        T* rows[UNIT];
        const float* from[UNIT];
        for (int64_t i = 0; i < piece.count; i++) {
            rows[i] = (T*)call.out + piece.group->row(piece.first + i) * call.out_stride + shard.first_output;
            from[i] = call.low + (piece.low_row + i) * call.width + shard.first_rank;
        }
        for (int64_t o = piece.begin, last = std::min(piece.end, shard.outputs); o < last; o += OUTPUTS) {
            const int64_t end = std::min(last, o + OUTPUTS);
            int64_t i = 0;
            for (; i + ROWS <= piece.count; i += ROWS) expand_rows<Kind, ROWS>(rows + i, from + i, shard, o, end);
            for (; i < piece.count; i++) expand_rows<Kind, 1>(rows + i, from + i, shard, o, end);
        }
    }
}

template <class Kind>
INLINE void run(const Call* call, const Piece* piece, float* wide) {
    if (piece->ranks) reduce<Kind>(*call, *piece, wide);
    if (piece->num_shards) expand<Kind>(*call, *piece);
}

// Run a piece with the widest registers of the level in use.
template <class T>
void run_widest(const Call* call, const Piece* piece, float* wide) {
#ifdef __x86_64__
    if constexpr (std::is_same<T, bf16>::value)
        if (sensorium_level >= LEVEL_AVX512_BF16) return on_avx512<run<Pairs>>(call, piece, wide);
    if (sensorium_level >= LEVEL_AVX512) return on_avx512<run<Widened<16, T>>>(call, piece, wide);
    if (sensorium_level == LEVEL_AVX2) return on_avx2<run<Widened<8, T>>>(call, piece, wide);
#endif
    run<Widened<4, T>>(call, piece, wide);
}

// Wait until other threads have counted to n. They may wait for a CPU themselves.
void wait_for(const std::atomic<int64_t>& count, int64_t n) {
    for (int64_t tries = 0; count.load(std::memory_order_acquire) < n; tries++)
        if (tries > 10000) std::this_thread::yield();
}

}  // namespace

// x [rows, inputs], out [rows, outputs] with row strides, both of `type`. Changes `out` in place.
// groups: the adapters of a step and their rows; the first number is how many there are. number: of the layer in their tables.
extern "C" void sensorium_low_rank(int type, const char* x, int64_t x_stride, char* out, int64_t out_stride, int64_t rows,
                                   int64_t inputs, int64_t number, const int64_t* groups, int threads) {
    thread_local std::vector<Piece> units, pieces;
    thread_local std::vector<float> low;
    units.clear(), pieces.clear();
    const Group* group = (const Group*)(groups + 1);
    int64_t total = 0, width = 0;
    for (int64_t g = 0; g < groups[0]; g++) {
        const Layer& layer = group[g].layers[number];
        const int64_t own = !layer.down ? 0 : group[g].index ? group[g].count : rows;
        for (int64_t first = 0; first < own; first += UNIT)
            units.push_back({group + g, first, std::min(UNIT, own - first), total + first, 0, layer.ranks, layer.shards,
                             layer.num_shards, 0, INT64_MAX});
        if (own) width = std::max(width, layer.ranks);
        total += own;
    }
    if (!total) return;
    const bool divide = (int64_t)units.size() < 2 * threads && threads > 1;
    int64_t reductions = 0;
    if (divide) {  // first products come first, so that other threads already compute those for which a thread waits
        for (const Piece& unit : units)
            for (int64_t k = 0; k < unit.ranks; k += PART_RANKS)
                pieces.push_back({unit.group, unit.first, unit.count, unit.low_row, k, std::min(PART_RANKS, unit.ranks - k)});
        reductions = (int64_t)pieces.size();
        for (const Piece& unit : units)
            for (int64_t s = 0; s < unit.num_shards; s++)
                for (int64_t begin = 0; begin < unit.shards[s].outputs; begin += PART_OUTPUTS)
                    pieces.push_back({unit.group, unit.first, unit.count, unit.low_row, 0, 0, unit.shards + s, 1, begin,
                                      begin + PART_OUTPUTS});
    }
    if ((int64_t)low.size() < total * width) low.resize(total * width);
    const Call call{x, x_stride, out, out_stride, inputs, number, low.data(), width};
    const std::vector<Piece>& all = divide ? pieces : units;
    const Piece* const first = all.data();
    auto* const run_piece = type == FLOAT32 ? run_widest<float> : run_widest<bf16>;
    std::atomic<int64_t> reduced{0};
    parallel_for(threads, (int64_t)all.size(), [&](int64_t i) {
        thread_local std::vector<float> wide;
        wide.resize(UNIT * call.row_floats());
        if (divide && i >= reductions) wait_for(reduced, reductions);
        run_piece(&call, first + i, wide.data());
        if (i < reductions) reduced.fetch_add(1, std::memory_order_release);
    });
}
