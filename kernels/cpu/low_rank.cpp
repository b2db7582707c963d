// Low-rank adapters of a step, each for its own rows, in one call per layer. A row's bits depend on that row and its adapter.
#include <algorithm>
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

const int64_t ROWS = 4, OUTPUTS = 512;  // of a piece of work; of the second product, 4 times as many rows
const int64_t RANKS = 8, FEW_ROWS = 32;  // ranks of a piece, if the rows are so few that threads have to share them

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

// low[r][k] = dot product of row r of x [R, padded inputs], whose last elements are 0, and row k of down [K, inputs].
template <int L, class T, int R, int K>
INLINE void dot_rows(const float* x, int64_t padded, const T* down, int64_t inputs, float* low, int64_t width) {
    Floats<L> sums[R][K] = {};
    const int64_t whole = inputs / L * L, rest = inputs - whole;
    for (int64_t d = 0; d < whole; d += L) {
#pragma GCC unroll 4
        for (int k = 0; k < K; k++) {
            const Floats<L> weight = load_as<L>(down + k * inputs + d);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][k] += load_as<L>(x + r * padded + d) * weight;
        }
    }
    if (rest) {
#pragma GCC unroll 4
        for (int k = 0; k < K; k++) {
            T part[L] = {};
            memcpy(part, down + k * inputs + whole, rest * sizeof(T));
            const Floats<L> weight = load_as<L>(part);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][k] += load_as<L>(x + r * padded + whole) * weight;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int k = 0; k < K; k++) low[r * width + k] = sum_halves(sums[r][k]);
}

template <int L, class T, int R, int K>
INLINE void reduce_rows(const float* x, int64_t padded, const T* down, int64_t inputs, int64_t ranks, float* low, int64_t width) {
    int64_t k = 0;
    for (; k + K <= ranks; k += K) dot_rows<L, T, R, K>(x, padded, down + k * inputs, inputs, low + k, width);
    for (; k < ranks; k++) dot_rows<L, T, R, 1>(x, padded, down + k * inputs, inputs, low + k, width);
}

// low [rows, ranks] = x @ down, of `count` rows from `first` on and of `ranks` ranks. wide: memory for ROWS rows as floats.
template <int L, class T>
INLINE void reduce(const Group& group, const T* x, int64_t stride, const T* down, int64_t inputs, int64_t ranks, float* low,
                   int64_t width, int64_t first, int64_t count, float* wide) {
    constexpr int K = L == 16 ? 4 : 2;  // so that the sums of 4 rows fit the registers
    const int64_t whole = inputs / 16 * 16, padded = (inputs + 15) / 16 * 16;
    for (int64_t i = 0; i < count; i++) {
        const T* row = x + group.row(first + i) * stride;
        float* to = wide + i * padded;
        for (int64_t d = 0; d < whole; d += L) store_as<L>(to + d, load_as<L>(row + d));
        if (whole < padded) store(to + whole, load_part(row + whole, inputs - whole));
    }
    if (count == ROWS) {
        reduce_rows<L, T, ROWS, K>(wide, padded, down, inputs, ranks, low, width);
    } else {
        for (int64_t i = 0; i < count; i++)
            reduce_rows<L, T, 1, K>(wide + i * padded, padded, down, inputs, ranks, low + i * width, width);
    }
}

template <int L>
INLINE void any_reduce(int type, const Group* group, const char* x, int64_t stride, const char* down, int64_t inputs,
                       int64_t ranks, float* low, int64_t width, int64_t first, int64_t count, float* wide) {
    if (type == FLOAT32)
        reduce<L>(*group, (const float*)x, stride, (const float*)down, inputs, ranks, low, width, first, count, wide);
    else
        reduce<L>(*group, (const bf16*)x, stride, (const bf16*)down, inputs, ranks, low, width, first, count, wide);
}

// Change 16 outputs of R rows at `o`; `to` are elements of them, for a shard that ends before the sixteenth.
template <int L, class T, int R>
INLINE void expand_panel(T* const* to, const float* const* low, const Shard& shard, int64_t o) {
    constexpr int V = 16 / L;
    const T *up = (const T*)shard.up + o * shard.ranks, *gain = (const T*)shard.gain + o, *shift = (const T*)shard.shift + o;
    Floats<L> sums[R][V] = {};
    for (int64_t k = 0; k < shard.ranks; k++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const Floats<L> weight = load_as<L>(up + k * 16 + v * L);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][v] += low[r][k] * weight;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            T* at = to[r] + v * L;
            Floats<L> value = load_as<L>(at);
            if (shard.gain) {
                store_as<L>(at, value * load_as<L>(gain + v * L));
                store_as<L>(at, load_as<L>(at) + load_as<L>(shift + v * L));
                value = load_as<L>(at);
            }
            store_as<L>(at, value + sums[r][v]);
        }
    }
}

template <int L, class T, int R>
INLINE void expand_rows(T* const* out, const float* const* low, const Shard& shard, int64_t begin, int64_t end) {
    T* to[R];
    for (int64_t o = begin; o < end; o += 16) {
        T parts[R][16] = {};
        const int64_t part = end - o;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) to[r] = part < 16 ? parts[r] : out[r] + o;
        for (int r = 0; part < 16 && r < R; r++) memcpy(parts[r], out[r] + o, part * sizeof(T));
        expand_panel<L, T, R>(to, low, shard, o);
        for (int r = 0; part < 16 && r < R; r++) memcpy(out[r] + o, parts[r], part * sizeof(T));
    }
}

// Change the outputs from `begin` to `end` of a shard in `count` rows from `first` on.
template <int L, class T>
INLINE void expand(const Group& group, const Shard& shard, T* out, int64_t stride, const float* low, int64_t width, int64_t first,
                   int64_t count, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < count;) {
        T* rows[ROWS];
        const float* from[ROWS];
        const int64_t some = count - i < ROWS ? 1 : ROWS;
        for (int64_t j = 0; j < some; j++) {
            rows[j] = out + group.row(first + i + j) * stride + shard.first_output;
            from[j] = low + (i + j) * width + shard.first_rank;
        }
        if (some == ROWS)
            expand_rows<L, T, ROWS>(rows, from, shard, begin, end);
        else
            expand_rows<L, T, 1>(rows, from, shard, begin, end);
        i += some;
    }
}

template <int L>
INLINE void any_expand(int type, const Group* group, const Shard* shard, char* out, int64_t stride, const float* low, int64_t width,
                       int64_t first, int64_t count, int64_t begin, int64_t end) {
    if (type == FLOAT32)
        expand<L>(*group, *shard, (float*)out, stride, low, width, first, count, begin, end);
    else
        expand<L>(*group, *shard, (bf16*)out, stride, low, width, first, count, begin, end);
}

// Run the body with the widest registers of the level in use.
template <auto wide, auto half, auto quarter, class... Args>
static void run_widest(Args... args) {
#ifdef __x86_64__
    if (sensorium_level >= LEVEL_AVX512) return on_avx512<wide>(args...);
    if (sensorium_level == LEVEL_AVX2) return on_avx2<half>(args...);
#endif
    quarter(args...);
}

// A piece of one of the two products: `count` rows of a group from `first` on, and a part of its ranks, or of a shard's outputs.
struct Piece {
    const Group* group;
    const Shard* shard;
    int64_t first, count, begin, end, low_row;
};

// Add the pieces of `rows` rows, `some` at a time, and of n ranks or outputs, `size` at a time.
void add_pieces(std::vector<Piece>& pieces, const Group& group, const Shard* shard, int64_t n, int64_t size, int64_t rows,
                int64_t some, int64_t low_row) {
    for (int64_t begin = 0; begin < n; begin += size)
        for (int64_t first = 0; first < rows; first += some)
            pieces.push_back({&group, shard, first, std::min(some, rows - first), begin, std::min(n, begin + size), low_row});
}

}  // namespace

// x [rows, inputs], out [rows, outputs] with row strides, both of `type`. Changes `out` in place.
// groups: the adapters of a step and their rows; the first number is how many there are. number: of the layer in their tables.
extern "C" void sensorium_low_rank(int type, const char* x, int64_t x_stride, char* out, int64_t out_stride, int64_t rows,
                                   int64_t inputs, int64_t number, const int64_t* groups, int threads) {
    thread_local std::vector<Piece> reduced, expanded;
    thread_local std::vector<float> low;
    reduced.clear(), expanded.clear();
    const Group* group = (const Group*)(groups + 1);
    int64_t total = 0, width = 0;
    for (int64_t g = 0; g < groups[0]; g++) {
        const Layer& layer = group[g].layers[number];
        if (!layer.down) continue;
        const int64_t own = group[g].index ? group[g].count : rows;
        width = std::max(width, layer.ranks);
        add_pieces(reduced, group[g], nullptr, layer.ranks, own < FEW_ROWS ? RANKS : layer.ranks, own, ROWS, total);
        for (int64_t s = 0; s < layer.num_shards; s++)
            add_pieces(expanded, group[g], layer.shards + s, layer.shards[s].outputs, OUTPUTS, own, 4 * ROWS, total);
        total += own;
    }
    if (!total) return;
    if ((int64_t)low.size() < total * width) low.resize(total * width);
    float* const product = low.data();
    const int64_t item = type == FLOAT32 ? 4 : 2;
    const Piece* const reductions = reduced.data();
    parallel_for(threads, (int64_t)reduced.size(), [&](int64_t i) {
        const Piece& piece = reductions[i];
        const char* down = piece.group->layers[number].down + piece.begin * inputs * item;
        float* const to = product + (piece.low_row + piece.first) * width + piece.begin;
        thread_local std::vector<float> wide;
        wide.resize(ROWS * ((inputs + 15) / 16 * 16));
        const int64_t ranks = piece.end - piece.begin;
        run_widest<any_reduce<16>, any_reduce<8>, any_reduce<4>>(type, piece.group, x, x_stride, down, inputs, ranks, to, width,
                                                                 piece.first, piece.count, wide.data());
    });
    const Piece* const expansions = expanded.data();
    parallel_for(threads, (int64_t)expanded.size(), [&](int64_t i) {
        const Piece& piece = expansions[i];
        const float* from = product + (piece.low_row + piece.first) * width;
        run_widest<any_expand<16>, any_expand<8>, any_expand<4>>(type, piece.group, piece.shard, out, out_stride, from, width,
                                                                 piece.first, piece.count, piece.begin, piece.end);
    });
}
