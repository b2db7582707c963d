// bfloat16 and 8-bit linear layers on x86 CPUs with AMX tiles. The weights are packed as for AVX-512 BF16 and VNNI, see products.h:
// 16 steps of a panel are four tiles of 16 outputs. This file has run with emulated tile instructions only.
#include "linear.h"

#include "common.h"

#ifdef HAS_AMX
#ifndef TILE_LOAD  // a test defines these macros
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16"
#define TILE_CONFIGURE _tile_loadconfig
#define TILE_RELEASE _tile_release
#define TILE_ZERO _tile_zero
#define TILE_LOAD _tile_loadd
#define TILE_STORE _tile_stored
#define TILE_DOT_BYTES _tile_dpbusd
#define TILE_DOT_BFLOAT16 _tile_dpbf16ps
#endif
#include "target_begin.h"
#include "avx512.h"
#include "products.h"

#define TILE_ROWS 16
#include "tiles.h"

static const int TILE_BYTES = 64;

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};
};

struct Pairs : Float32 {
    typedef bf16 Row;
    static const int INPUTS = 2, BYTES = 4 * WIDTH;
};

typedef Words<uint8_t> Quads;

#define TILE_DOT(sum, rows, columns)               \
    if (std::is_same<Kind, Pairs>::value)          \
        TILE_DOT_BFLOAT16(sum, rows, columns);     \
    else                                           \
        TILE_DOT_BYTES(sum, rows, columns);

// Multiply the steps of a tile of rows with the four tiles of a panel. The columns are loaded one tile after another.
#define TILE_STEPS(rows, columns)                                                                        \
    TILE_LOAD(rows, row, stride);                                                                        \
    TILE_LOAD(columns, panel, Kind::BYTES); TILE_DOT(0, rows, columns)                                   \
    TILE_LOAD(columns, panel + TILE_BYTES, Kind::BYTES); TILE_DOT(1, rows, columns)                      \
    TILE_LOAD(columns, panel + 2 * TILE_BYTES, Kind::BYTES); TILE_DOT(2, rows, columns)                  \
    TILE_LOAD(columns, panel + 3 * TILE_BYTES, Kind::BYTES); TILE_DOT(3, rows, columns)

template <class Kind>
struct Tiles {
    static void multiply(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t i, int n, int64_t first, Sums& sums) {
        const int rest = (int)(w.steps % TILE_ROWS);
        TileConfig config;
        for (int tile = 0; tile < 5; tile++) config.rows[tile] = n, config.bytes[tile] = TILE_BYTES;  // sums: 0 to 3, rows: 4
        config.rows[5] = TILE_ROWS, config.bytes[5] = TILE_BYTES;                                     // columns
        if (rest) config.rows[6] = n, config.bytes[6] = 4 * rest, config.rows[7] = rest, config.bytes[7] = TILE_BYTES;
        TILE_CONFIGURE(&config);
        const char *row = (const char*)rows.at(i), *panel = w.panels + first / WIDTH * w.steps * Kind::BYTES;
        const int64_t stride = rows.stride * sizeof(typename Kind::Row);
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int64_t k = 0; k < w.steps / TILE_ROWS; k++, row += TILE_BYTES, panel += TILE_ROWS * Kind::BYTES) {
            TILE_STEPS(4, 5)
        }
        if (rest) {
            TILE_STEPS(6, 7)
        }
        TILE_STORE(0, sums[0], sizeof sums[0]);
        TILE_STORE(1, sums[0] + TILE_BYTES, sizeof sums[0]);
        TILE_STORE(2, sums[0] + 2 * TILE_BYTES, sizeof sums[0]);
        TILE_STORE(3, sums[0] + 3 * TILE_BYTES, sizeof sums[0]);
        TILE_RELEASE();
    }
};
#include "target_end.h"
#endif

extern "C" void sensorium_linear_amx(LINEAR_ARGUMENTS) {
#ifdef HAS_AMX
    const Weights w{panels, shift, scale, bias, steps, outputs};
    auto* run = weight_type == WEIGHT_BFLOAT16 ? multiply_tiles<Pairs, bf16>
                : type == FLOAT32              ? multiply_tiles<Quads, float>
                                               : multiply_tiles<Quads, bf16>;
    run(w, x, rows, inputs, scratch, out, threads);
#endif
}
