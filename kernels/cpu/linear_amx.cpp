// bfloat16 and 8-bit linear layers on x86 CPUs with AMX tiles. The weights are packed as for AVX-512 BF16 and VNNI, see products.h:
// 16 steps of a panel are four tiles of 16 outputs. Rows are packed as tiles, which adds zeros to their inputs. A sum adds tiles of
// inputs in order, and a tile's instruction adds inputs in an order that does not depend on its number of rows, so the result of a
// row does not depend on the rest of the batch.
#include "linear.h"

#include "common.h"

#ifdef HAS_AMX
#ifndef TARGET
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16"
#endif
#include "target_begin.h"
#include "avx512.h"
#include "products.h"
#include "amx.h"

static const int64_t DEPTH = 64;   // tiles of inputs that are added in registers
static const int64_t BLOCKS = 16;  // blocks of rows that stay in the cache, with DEPTH tiles each
static const int64_t PANELS = 8;   // panels that share these blocks before the next DEPTH tiles

namespace {
struct Pairs : Float32 {
    typedef bf16 Row;
    static const int INPUTS = 2, BYTES = 4 * WIDTH;
};

typedef Words<uint8_t> Quads;

#define DENSE_DOT(sum, rows, columns)              \
    if (std::is_same<Kind, Pairs>::value) {        \
        TILE_DOT_BFLOAT16(sum, rows, columns);     \
    } else {                                       \
        TILE_DOT_BYTES(sum, rows, columns);        \
    }

// Rows [n] as tiles and the scales of quantised ones.
struct Input {
    PackedRows tiles;
    const float* scale;
    int64_t n;
};

// Tiles of weights, from tile `first` of a panel to `last`. The last one may end within the panel; `rest` is its copy with zeros.
struct Columns {
    const char *panel, *next;  // next: weights that are wanted later
    const char* rest;
    int64_t first, last;

    const char* at(int64_t k) const { return rest && k == last - 1 ? rest : panel + k * TILE_ROWS * STEP_BYTES; }
};

// Add DEPTH tiles of inputs to the sums of one block of rows, or of two: [block][tile of outputs][row][64 bytes].
template <class Kind>
static void add_block(const Input& x, int64_t block, bool two, const Columns& w, bool begin, int lines, char* sums) {
    const char *rows = x.tiles.at(block, 0), *next = w.next;
    settle_memory();
    if (!two) {
        if (begin) {
            ZERO_SUMS();
        } else {
            MOVE_SUMS(TILE_LOAD, sums, 2 * TILE_BYTES);
        }
        for (int64_t k = w.first; k < w.last; k++, next += lines * TILE_LINE) {
            const char* weights = w.at(k);
            fetch(next, lines);
            ADD_ONE_BLOCK(DENSE_DOT, rows + k * TILE_BYTES, weights);
        }
        MOVE_SUMS(TILE_STORE, sums, 2 * TILE_BYTES);
        return;
    }
    const char* more = x.tiles.at(block + 1, 0);
    for (int half = 0; half < 2; half++, sums += 2 * TILE_BYTES) {
        if (begin) {
            ZERO_SUMS();
        } else {
            MOVE_SUMS(TILE_LOAD, sums, 4 * TILE_BYTES);
        }
        for (int64_t k = w.first; k < w.last; k++, next += lines * TILE_LINE) {
            const char* weights = w.at(k) + half * 2 * TILE_LINE;
            fetch(next, lines);
            ADD_TWO_BLOCKS(DENSE_DOT, rows + k * TILE_BYTES, more + k * TILE_BYTES, weights);
        }
        MOVE_SUMS(TILE_STORE, sums, 4 * TILE_BYTES);
    }
}

// Write the results of a block of rows, whose sums are [tile of outputs][row][64 bytes].
template <class Kind, class T>
static void end_block(const Weights& w, const Input& x, int64_t block, int64_t panel, const char* sums, T* out) {
    const int64_t left_rows = x.n - block * TILE_ROWS;
    const int n = (int)(left_rows < TILE_ROWS ? left_rows : TILE_ROWS);
    for (int c = 0; c < VECTORS; c++, sums += TILE_BYTES) {
        const int64_t at = panel * WIDTH + c * LANES, left = w.outputs - at;
        if (left <= 0) break;
        for (int r = 0; r < n; r++) {
            const int64_t row = block * TILE_ROWS + r;
            const vf value = Kind::value(load_vector<typename Kind::Sum>(sums + r * TILE_LINE), w, x.scale ? x.scale[row] : 0.f, at);
            T* to = out + row * w.outputs + at;
            left < LANES ? store_part(to, value, left) : store(to, value);
        }
    }
}

// Multiply the blocks of rows from `block` to `end` with the panels from `first` to `last`.
template <class Kind, class T>
static void multiply_panels(const Weights& w, const Input& x, int64_t block, int64_t end, int64_t first, int64_t last, T* out) {
    const int64_t bytes = w.steps * STEP_BYTES, tiles = x.tiles.tiles, rest = w.steps % TILE_ROWS, each = BLOCKS * VECTORS * TILE_BYTES;
    char* sums = reserve(sum_memory, PANELS * each);
    TileShape shape;
    alignas(64) char padded[TILE_ROWS * STEP_BYTES];
    for (int64_t k = 0; k < tiles; k += DEPTH)
        for (int64_t p = first; p < last; p++) {
            const int64_t stop = k + DEPTH < tiles ? k + DEPTH : tiles;
            const bool ends = p + 1 == last;  // the next weights are those of the next inputs, or of another call of this function
            const int64_t later = ends && stop < tiles ? first : p + 1, from = !ends ? k : stop < tiles ? stop : 0;
            Columns columns{w.panels + p * bytes, w.panels + later * bytes + from * TILE_ROWS * STEP_BYTES, nullptr, k, stop};
            if (rest && stop == tiles) {
                memset(padded, 0, sizeof padded);
                memcpy(padded, columns.panel + (w.steps - rest) * STEP_BYTES, rest * STEP_BYTES);
                columns.rest = padded;
            }
            const int64_t passes = (end - block) / 2 * 2 + (end - block) % 2;
            const int lines = (int)((TILE_ROWS * VECTORS + passes - 1) / passes);
            for (int64_t b = block; b < end;) {
                const bool two = b + 1 < end;
                const int64_t left = x.n - b * TILE_ROWS, over = left - TILE_ROWS;
                shape.use((int)(left < TILE_ROWS ? left : TILE_ROWS), !two ? 0 : (int)(over < TILE_ROWS ? over : TILE_ROWS), TILE_ROWS);
                char* own = sums + (p - first) * each + (b - block) * VECTORS * TILE_BYTES;
                add_block<Kind>(x, b, two, columns, !k, lines, own);
                columns.next += (two ? 2 : 1) * lines * (stop - k) * TILE_LINE;
                for (int i = 0; stop == tiles && i < 1 + two; i++)
                    end_block<Kind>(w, x, b + i, p, own + i * VECTORS * TILE_BYTES, out);
                b += 1 + two;
            }
        }
}

template <class Kind, class T>
static void pack_row(const Input& x, const T* from, int64_t inputs, int64_t width, int64_t row) {
    if constexpr (std::is_same<typename Kind::Row, T>::value) return x.tiles.write(row, (const char*)from, inputs * sizeof(T), TILE_LINE);
    char* converted = reserve(row_memory, width);
    convert(from, inputs, (uint8_t*)converted, width, (float*)x.scale + row);
    x.tiles.write(row, converted, width, TILE_LINE);
}

// Multiply rows that are packed at once.
template <class Kind, class T>
static void multiply_some(const Weights& w, const T* x, int64_t n, int64_t inputs, T* out, int threads) {
    const int64_t tiles = (w.steps + TILE_ROWS - 1) / TILE_ROWS, panels = (w.outputs + WIDTH - 1) / WIDTH;
    const int64_t blocks = (n + TILE_ROWS - 1) / TILE_ROWS, width = w.steps * Kind::INPUTS;
    char* memory = reserve(packed_memory, blocks * TILE_ROWS * (tiles * TILE_LINE + 4));
    const Input input{{memory, tiles}, (const float*)(memory + blocks * tiles * TILE_BYTES), n};
    parallel_for(n < 8 ? 1 : threads, blocks, [&](int64_t b) {
        for (int64_t i = b * TILE_ROWS; i < n && i < (b + 1) * TILE_ROWS; i++) pack_row<Kind>(input, x + i * inputs, inputs, width, i);
    });
    const int64_t chunks = (blocks + BLOCKS - 1) / BLOCKS;
    int64_t group = panels * chunks / (4 * threads);
    group = group > PANELS ? PANELS : group < 1 ? 1 : group;
    const int64_t groups = (panels + group - 1) / group;
    parallel_shares(threads, chunks * groups, [&](int64_t job) {
        const int64_t c = job / groups, g = job % groups, first = c * blocks / chunks;
        multiply_panels<Kind>(w, input, first, (c + 1) * blocks / chunks, panels * g / groups, panels * (g + 1) / groups, out);
    });
}

template <class Kind, class T>
static void multiply_tiles(const Weights& w, const char* x, int64_t n, int64_t inputs, char* out, int threads) {
    const int64_t row = (w.steps + TILE_ROWS - 1) / TILE_ROWS * TILE_LINE, fit = PACKED_BYTES / row / TILE_ROWS * TILE_ROWS;
    const int64_t most = fit > TILE_ROWS ? fit : TILE_ROWS;
    for (int64_t i = 0; i < n; i += most)
        multiply_some<Kind>(w, (const T*)x + i * inputs, n - i < most ? n - i : most, inputs, (T*)out + i * w.outputs, threads);
}
}
#include "target_end.h"
#endif

extern "C" void sensorium_linear_amx(LINEAR_ARGUMENTS) {
#ifdef HAS_AMX
    const Weights w{panels, shift, scale, bias, steps, outputs};
    auto* run = weight_type == WEIGHT_BFLOAT16 ? multiply_tiles<Pairs, bf16>
                : type == FLOAT32              ? multiply_tiles<Quads, float>
                                               : multiply_tiles<Quads, bf16>;
    run(w, x, rows, inputs, out, threads);
#endif
}
