// Tiles of linear_amx.cpp and linear_int4_amx.cpp: AMX instructions, their configuration, and rows packed as tiles. A tile has up to
// 16 rows of 64 bytes. Included between target_begin.h and target_end.h; a test replaces the instructions by functions.
#ifndef TILE_LOAD
#define TILE_CONFIGURE _tile_loadconfig
#define TILE_RELEASE _tile_release
#define TILE_ZERO _tile_zero
#define TILE_LOAD _tile_loadd
#define TILE_STORE _tile_stored
#define TILE_DOT_BYTES _tile_dpbusd
#define TILE_DOT_SIGNED _tile_dpbssd
#define TILE_DOT_BFLOAT16 _tile_dpbf16ps
#endif

static const int TILE_ROWS = 16, TILE_LINE = 64, TILE_BYTES = TILE_ROWS * TILE_LINE;
static const int64_t STEP_BYTES = 4 * WIDTH;         // one row of the four tiles of a panel
static const int64_t PACKED_BYTES = 16 << 20;        // packed rows that a thread keeps

// The tiles in use. Sums are 0 to 3: of one block of rows and four tiles of outputs, or of two blocks and two tiles each. Rows are in
// 4 and 5, weights in 6 and 7.
struct TileShape {
    int first = -1, second = 0, depth = 0;  // rows of the blocks (second 0: one block), 4-byte words of a row

    void use(int rows, int more, int words) {
        if (first == rows && second == more && depth == words) return;
        first = rows, second = more, depth = words;
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};  // of a row
            uint8_t rows[16] = {};
        } config;
        for (int t = 0; t < 8; t++) {
            config.rows[t] = t > 5 ? words : (t == 2 || t == 3 || t == 5) && more ? more : rows;
            config.bytes[t] = t == 4 || t == 5 ? 4 * words : TILE_LINE;
        }
        TILE_CONFIGURE(&config);
    }
    ~TileShape() {
        if (first >= 0) TILE_RELEASE();
    }
};

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
