// AMX instructions and the configuration of tiles, for linear layers and attention. A tile has up to 16 rows of 64 bytes. Included in
// code that is compiled for AMX; a test replaces the instructions by functions.
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

// Intrinsics of tiles do not tell the compiler that they read memory (GCC 12: 8 bytes of a configuration): it must not move stores
// across them.
INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }

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
        settle_memory();
        TILE_CONFIGURE(&config);
    }
    ~TileShape() {
        if (first >= 0) TILE_RELEASE();
    }
};
