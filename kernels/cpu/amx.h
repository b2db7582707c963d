// Tiles of linear_amx.cpp and linear_groups_amx.cpp: rows packed as tiles, and the products of tiles. Included between target_begin.h and
// target_end.h.
#include "tile_shape.h"

static const int64_t STEP_BYTES = 4 * WIDTH;         // one row of the four tiles of a panel
static const int64_t PACKED_BYTES = 16 << 20;        // packed rows that a thread keeps

// Rows as tiles: [block of 16 rows][tile of inputs][row][64 bytes].
struct PackedRows {
    char* first;
    int64_t tiles;  // of inputs
    char* at(int64_t block, int64_t tile) const { return first + (block * tiles + tile) * TILE_BYTES; }

    // Distribute a row of n bytes to its tiles, `depth` bytes each.
    void write(int64_t row, const char* from, int64_t n, int64_t depth) const {
        char* to = at(row / TILE_ROWS, 0) + row % TILE_ROWS * TILE_LINE;
        for (; n >= TILE_LINE && depth == TILE_LINE; n -= TILE_LINE, from += TILE_LINE, to += TILE_BYTES) memcpy(to, from, TILE_LINE);
        for (; n > 0; n -= depth, from += depth, to += TILE_BYTES) {
            if (n < depth) memset(to, 0, depth);
            memcpy(to, from, n < depth ? n : depth);
        }
    }
};

// Memory that belongs to the calling thread and is reused by its next call.
static char* reserve(std::vector<char>& memory, int64_t bytes) {
    if ((int64_t)memory.size() < bytes + 64) memory.resize(bytes + 64);
    return memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
}

static thread_local std::vector<char> packed_memory, row_memory, sum_memory;

INLINE void fetch(const char* p, int lines) {
    for (int i = 0; i < lines; i++) _mm_prefetch(p + i * TILE_LINE, _MM_HINT_T1);
}

// The four tiles of sums: zeros, or in memory. `next`: bytes to the sums of the third tile.
#define ZERO_SUMS() TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3)
#define MOVE_SUMS(MOVE, at, next)                                                                    \
    MOVE(0, at, TILE_LINE); MOVE(1, (at) + TILE_BYTES, TILE_LINE); MOVE(2, (at) + (next), TILE_LINE); \
    MOVE(3, (at) + (next) + TILE_BYTES, TILE_LINE)

// Add the products of one tile of inputs: of one block of rows with four tiles of weights, or of two blocks with two tiles.
#define ADD_ONE_BLOCK(DOT, rows, weights)                                       \
    TILE_LOAD(4, rows, TILE_LINE);                                              \
    TILE_LOAD(6, weights, STEP_BYTES); DOT(0, 4, 6);                            \
    TILE_LOAD(7, (weights) + TILE_LINE, STEP_BYTES); DOT(1, 4, 7);              \
    TILE_LOAD(6, (weights) + 2 * TILE_LINE, STEP_BYTES); DOT(2, 4, 6);          \
    TILE_LOAD(7, (weights) + 3 * TILE_LINE, STEP_BYTES); DOT(3, 4, 7)
#define ADD_TWO_BLOCKS(DOT, rows, more, weights)                                \
    TILE_LOAD(4, rows, TILE_LINE); TILE_LOAD(6, weights, STEP_BYTES); DOT(0, 4, 6); \
    TILE_LOAD(7, (weights) + TILE_LINE, STEP_BYTES); DOT(1, 4, 7);              \
    TILE_LOAD(5, more, TILE_LINE); DOT(2, 5, 6); DOT(3, 5, 7)
