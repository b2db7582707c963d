// Linear layers with a scale per group of inputs on x86 CPUs with AMX tiles, see linear_groups_body.h and amx.h. Weights are packed as for AVX-512.
// Codes are unpacked into tiles (minus 8 in bfloat16, 0 to 15 in 8 bits), which are multiplied with all rows of a chunk; the sums of
// a group are then scaled. Rows of float32 that are not quantised are multiplied with AVX-512.
#include "linear.h"

#include "common.h"

#ifdef HAS_AMX
#ifndef TARGET
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16"
#endif
#include "target_begin.h"
#include "avx512.h"
#include "linear_groups_body.h"
#include "groups_avx512.h"
#include "amx.h"

static const int SPAN = 4;           // tiles of inputs that are unpacked at once
static const int64_t BLOCKS = 6;     // blocks of rows of a chunk, whose sums stay in the cache
static const int64_t AHEAD = 1024;   // bytes of codes that are fetched ahead

namespace {
// -8 to 7 as pairs of bfloat16.
struct Pairs : Looked {
    typedef Bf16Row Row;

    INLINE __m512i unpack(vi codes, int word) {
        typedef uint16_t v32h __attribute__((vector_size(64)));
        const v32h table = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                            0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040,
                            0x4080, 0x40a0, 0x40c0, 0x40e0};  // twice: an index has 5 bits
        return _mm512_permutexvar_epi16((__m512i)((v32h)codes >> 4 * word), (__m512i)table);
    }
};

struct Bytes : Integers {
    INLINE __m512i unpack(vi codes, int word) { return (__m512i)Integers::unpack(codes, word); }
};

#define GROUP_DOT(sum, rows, columns)               \
    if (std::is_same<Kind, Pairs>::value) {        \
        TILE_DOT_BFLOAT16(sum, rows, columns);     \
    } else {                                       \
        TILE_DOT_SIGNED(sum, rows, columns);       \
    }

// Rows [n] as tiles of `depth` words, and for each row the sum of every group's inputs and the scale of quantised inputs.
struct Input {
    PackedRows tiles;
    char* sums;
    int64_t n, sum_bytes;
    int depth;

    int rows(int64_t block) const { return (int)(n - block * TILE_ROWS < TILE_ROWS ? n - block * TILE_ROWS : TILE_ROWS); }
};

// Return the words of a tile: the most, up to 16, that divide every group.
static int find_depth(const Weights& w, int words) {
    const int64_t group = w.group_steps * words, last = (w.steps - (w.groups() - 1) * w.group_steps) * words;
    int depth = TILE_ROWS;
    while (group % depth || last % depth || depth % words) depth--;
    return depth;
}

// Unpack a tile of inputs of a panel, as in linear_amx.cpp: [word of inputs][output].
template <class Kind>
INLINE void unpack_tile(const char* codes, int steps, char* to) {
    const int WORDS = Kind::Row::WORDS;
    for (int s = 0; s < steps; s++, codes += STEP_BYTES, to += WORDS * STEP_BYTES)
#pragma GCC unroll 4
        for (int c = 0; c < VECTORS; c++) {
            const vi raw = load_vector<vi>(codes + c * TILE_LINE);
            _mm_prefetch(codes + AHEAD + c * TILE_LINE, _MM_HINT_T0);
#pragma GCC unroll 4
            for (int i = 0; i < WORDS; i++) _mm512_store_si512(to + i * STEP_BYTES + c * TILE_LINE, Kind::unpack(raw, i));
        }
}

// A few tiles of inputs of a group: steps from `first` to `last`.
struct Part {
    int64_t group, first, last;

    bool begins(const Weights& w) const { return first == group * w.group_steps; }
    bool ends(const Weights& w) const { return last == w.steps || last == (group + 1) * w.group_steps; }
};

// Return the part from step `first` on, of at most `most` steps.
INLINE Part part_at(const Weights& w, int64_t first, int64_t most) {
    const int64_t group = first / w.group_steps, end = (group + 1) * w.group_steps, stop = end < w.steps ? end : w.steps;
    return {group, first, first + most < stop ? first + most : stop};
}

// A unit of tile products has four tiles of sums: of one block of rows and four tiles of outputs (`more` = 0), or of two blocks and
// two tiles of outputs from `half` on.
struct Unit {
    int64_t block;
    int more, half;

    int64_t next() const { return more ? VECTORS * TILE_BYTES : 2 * TILE_BYTES; }
};

// Multiply the unpacked tiles of a part, and add them to the group's sums: [tile][row][64 bytes].
template <class Kind>
INLINE void add_part(const Input& x, const Unit& u, const char* unpacked, int64_t first, int count, bool begin, char* sums) {
    const int64_t each = x.depth * STEP_BYTES;
    const char *rows = x.tiles.at(u.block, first), *more = x.tiles.at(u.block + u.more, first);
    settle_memory();
    if (begin) {
        ZERO_SUMS();
    } else {
        MOVE_SUMS(TILE_LOAD, sums, 2 * TILE_BYTES);
    }
    unpacked += u.half * TILE_LINE;
    if (u.more)
        for (int k = 0; k < count; k++, unpacked += each) {
            ADD_TWO_BLOCKS(GROUP_DOT, rows + k * TILE_BYTES, more + k * TILE_BYTES, unpacked);
        }
    else
        for (int k = 0; k < count; k++, unpacked += each) {
            ADD_ONE_BLOCK(GROUP_DOT, rows + k * TILE_BYTES, unpacked);
        }
    MOVE_SUMS(TILE_STORE, sums, 2 * TILE_BYTES);
}

// Add the scaled sums of a group to the totals of a unit: [block][tile of outputs][row][64 bytes].
template <class Kind, bool ZEROS>
INLINE void scale_unit(const Weights& w, const Input& x, const Unit& u, int64_t panel, int64_t g, const char* sums, char* totals) {
    for (int t = 0; t < 4; t++, sums += TILE_BYTES) {
        const int64_t block = u.block + (u.more ? t / 2 : 0), c = u.more ? u.half + t % 2 : t;
        const int64_t at = (panel * w.groups() + g) * WIDTH + c * LANES;
        const char* inputs = x.sums + block * TILE_ROWS * x.sum_bytes + 4 * g;
        const vf scale = load_grid(w, w.scale, panel, g, c * LANES);
        const vi zero = ZEROS ? load_zero(w, at) : vi{} + 8;
        char* to = totals + (block * VECTORS + c) * TILE_BYTES;
        const int n = x.rows(block);
#pragma GCC unroll 4
        for (int r = 0; r < n; r++, to += TILE_LINE) {
            const auto sum = load_vector<typename Kind::Sum>(sums + r * TILE_LINE);
            vf value;
            if constexpr (ZEROS || Kind::Row::WORDS == 2)
                value = Kind::value(sum, zero, inputs + r * x.sum_bytes);
            else
                value = sum;
            store((float*)to, (g ? load_vector<vf>(to) : vf{}) + value * scale);
        }
    }
}

// Write the results of a block of rows.
template <class Kind, class T>
static void end_block(const Weights& w, const Input& x, int64_t block, int64_t panel, const char* totals, T* out) {
    const int n = x.rows(block);
    for (int c = 0; c < VECTORS; c++) {
        const int64_t at = panel * WIDTH + c * LANES, left = w.outputs - at, place = (block * VECTORS + c) * TILE_BYTES;
        if (left <= 0) break;
        for (int r = 0; r < n; r++) {
            const int64_t row = block * TILE_ROWS + r;
            vf value = load_vector<vf>(totals + place + r * TILE_LINE);
            if (Kind::Row::WORDS == 2) value = value * (vf)spread(x.sums + row * x.sum_bytes + 4 * w.groups());
            value = value + load_vector<vf>(w.bias + at);
            T* to = out + row * w.stride + at;
            left < LANES ? store_part(to, value, left) : store(to, value);
        }
    }
}

// Memory of a thread: two buffers of unpacked tiles, the totals of a chunk, and a group's sums of each unit. If a group is one part,
// two units take turns.
struct Work {
    char *unpacked, *totals, *sums;
    static const int64_t UNPACKED = SPAN * VECTORS * TILE_BYTES, TOTALS = BLOCKS * VECTORS * TILE_BYTES;

    Work() : unpacked(reserve(sum_memory, 2 * UNPACKED + 2 * TOTALS)), totals(unpacked + 2 * UNPACKED), sums(totals + TOTALS) {}
};

// Multiply a chunk of rows with one panel. Products of tiles take time during which the next part is unpacked and the last unit's
// sums are scaled.
template <class Kind, class T, bool ZEROS>
static void multiply_panel(const Weights& w, const Input& x, int64_t panel, TileShape& shape, const Work& work, T* out) {
    const int64_t blocks = (x.n + TILE_ROWS - 1) / TILE_ROWS, steps = x.depth / Kind::Row::WORDS, most = SPAN * steps;
    const char* codes = w.codes + panel * w.steps * STEP_BYTES;
    auto unpack = [&](const Part& part, char* to) {
        for (int64_t k = part.first; k < part.last; k += steps, to += x.depth * STEP_BYTES) unpack_tile<Kind>(codes + k * STEP_BYTES, (int)steps, to);
    };
    struct {
        Unit unit;
        int64_t group = -1;
        char* sums;
    } done;
    auto settle = [&] {
        if (done.group >= 0) scale_unit<Kind, ZEROS>(w, x, done.unit, panel, done.group, done.sums, work.totals);
    };
    Part part = part_at(w, 0, most);
    const bool turns = w.group_steps <= most;
    unpack(part, work.unpacked);
    for (int64_t i = 0, u = 0; part.first < w.steps; i++) {
        const Part next = part_at(w, part.last, most);
        if (part.last < w.steps) unpack(next, work.unpacked + (i + 1) % 2 * Work::UNPACKED);
        if (!turns) u = 0;
        for (Unit unit{0, blocks > 1, 0}; unit.block < blocks; u++) {
            shape.use(x.rows(unit.block), unit.more ? x.rows(unit.block + 1) : 0, x.depth);
            char* sums = work.sums + (turns ? u % 2 : u) * 4 * TILE_BYTES;
            const int count = (int)((part.last - part.first) / steps);
            add_part<Kind>(x, unit, work.unpacked + i % 2 * Work::UNPACKED, part.first / steps, count, part.begins(w), sums);
            if (part.ends(w)) settle(), done.unit = unit, done.group = part.group, done.sums = sums;
            if (unit.more && !unit.half)
                unit.half = 2;
            else
                unit = {unit.block + 1 + unit.more, unit.block + 2 + unit.more < blocks, 0};
        }
        part = next;
        if (!turns) settle(), done.group = -1;
    }
    settle();
    for (int64_t b = 0; b < blocks; b++) end_block<Kind>(w, x, b, panel, work.totals, out);
}

template <class Kind, class T>
static void pack_row(const Weights& w, const Input& x, const T* from, int64_t inputs, const int32_t* order, int64_t row) {
    const int64_t bytes = w.steps * Kind::Row::WORDS * 4;
    char* converted = reserve(row_memory, bytes + x.sum_bytes);
    convert<typename Kind::Row>(w, from, inputs, order, converted);
    x.tiles.write(row, converted, bytes, 4 * x.depth);
    memcpy(x.sums + row * x.sum_bytes, converted + bytes, x.sum_bytes);
}

// Multiply rows that are packed at once.
template <class Kind, class T>
static void multiply_some(const Weights& w, const T* x, int64_t n, int64_t inputs, const int32_t* order, T* out, int threads) {
    const int depth = find_depth(w, Kind::Row::WORDS);
    const int64_t tiles = w.steps * Kind::Row::WORDS / depth, blocks = (n + TILE_ROWS - 1) / TILE_ROWS, each = 4 * w.groups() + 4;
    char* memory = reserve(packed_memory, blocks * TILE_ROWS * (tiles * TILE_LINE + each));
    const Input all{{memory, tiles}, memory + blocks * tiles * TILE_BYTES, n, each, depth};
    const int64_t piece = n < 64 ? 4 : TILE_ROWS;
    parallel_for(n < 4 ? 1 : threads, (n + piece - 1) / piece, [&](int64_t p) {
        for (int64_t i = p * piece; i < n && i < (p + 1) * piece; i++) pack_row<Kind>(w, all, x + i * inputs, inputs, order, i);
    });
    const int64_t chunks = (blocks + BLOCKS - 1) / BLOCKS, panels = (w.outputs + WIDTH - 1) / WIDTH;
    int64_t pieces = (4 * threads + chunks - 1) / chunks;
    pieces = pieces < panels ? pieces : panels;
    parallel_shares(threads, chunks * pieces, [&](int64_t job) {
        const int64_t c = job / pieces, part = job % pieces, b = c * blocks / chunks, end = (c + 1) * blocks / chunks * TILE_ROWS;
        const Input own{{all.tiles.at(b, 0), tiles}, all.sums + b * TILE_ROWS * each, (end < n ? end : n) - b * TILE_ROWS, each, depth};
        const Work work;
        TileShape shape;
        auto* run = w.zero ? multiply_panel<Kind, T, true> : multiply_panel<Kind, T, false>;
        for (int64_t p = panels * part / pieces; p < panels * (part + 1) / pieces; p++)
            run(w, own, p, shape, work, out + b * TILE_ROWS * w.stride);
    });
}

template <class Kind, class T>
static void multiply_tiles(const Weights& w, const T* x, int64_t n, int64_t inputs, const int32_t* order, T* out, int threads) {
    const int64_t row = w.steps * Kind::Row::WORDS / find_depth(w, Kind::Row::WORDS) * TILE_LINE, fit = PACKED_BYTES / row / TILE_ROWS * TILE_ROWS;
    const int64_t most = fit > TILE_ROWS ? fit : TILE_ROWS;
    for (int64_t i = 0; i < n; i += most)
        multiply_some<Kind>(w, x + i * inputs, n - i < most ? n - i : most, inputs, order, out + i * w.stride, threads);
}
}
#include "target_end.h"
#endif

extern "C" void sensorium_group_linear_amx(GROUP_ARGUMENTS) {
#ifdef HAS_AMX
    const Weights w GROUP_WEIGHTS;
    const float* single = (const float*)x;
    const bf16* brain = (const bf16*)x;
    if (w.code_type != CODES_INT4)
        type == FLOAT32 ? multiply_coded(w, single, rows, inputs, order, scratch, (float*)out, threads)
                        : multiply_coded(w, brain, rows, inputs, order, scratch, (bf16*)out, threads);
    else if (type == FLOAT32 && int8_rows && w.plain())
        multiply_tiles<Bytes>(w, single, rows, inputs, order, (float*)out, threads);
    else if (type == FLOAT32)
        multiply<Looked>(w, single, rows, inputs, order, scratch, (float*)out, threads);
    else if (!w.plain())
        multiply<Looked>(w, brain, rows, inputs, order, scratch, (bf16*)out, threads);
    else if (int8_rows)
        multiply_tiles<Bytes>(w, brain, rows, inputs, order, (bf16*)out, threads);
    else
        multiply_tiles<Pairs>(w, brain, rows, inputs, order, (bf16*)out, threads);
#endif
}
