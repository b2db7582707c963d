// Linear layers for instructions that multiply blocks of rows, after products.h. A file that includes this one defines TILE_ROWS, the
// most rows of a block, and specialises `Tiles<Kind>::multiply(w, rows, i, n, first, sums)`, which writes the sums of n rows from row
// i on with the panel of output `first`.
typedef char Sums[TILE_ROWS][4 * WIDTH];

template <class Kind>
struct Tiles;

template <class Kind, class T>
static void tile_block(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t i, int n, int64_t first, T* out) {
    alignas(64) Sums sums;
    Tiles<Kind>::multiply(w, rows, i, n, first, sums);
    const int PART = 16 / LANES;  // registers of 16 outputs, which are stored at once
    for (int r = 0; r < n; r++)
        for (int v = 0; v < VECTORS; v += PART) {
            const int64_t at = first + v * LANES, left = w.outputs - at;
            if (left <= 0) break;
            const float scale = rows.scale ? rows.scale[i + r] : 0.f;
            vf values[PART];
            for (int j = 0; j < PART; j++)
                values[j] = Kind::value(load_vector<typename Kind::Sum>(sums[r] + (v + j) * 4 * LANES), w, scale, at + j * LANES);
            T* to = out + (i + r) * w.outputs + at;
            left < 16 ? store_part(to, load((const float*)values), left) : store(to, load((const float*)values));
        }
}

// Convert rows of another type to `scratch`, then multiply them block by block with each panel.
template <class Kind, class T>
static void multiply_tiles(const Weights& w, const char* x, int64_t n, int64_t inputs, char* scratch, char* out, int threads) {
    typedef typename Kind::Row Row;
    const int64_t panels = (w.outputs + WIDTH - 1) / WIDTH, blocks = (n + TILE_ROWS - 1) / TILE_ROWS;
    if (!n) return;
    Rows<Row> rows;
    if constexpr (std::is_same<Row, T>::value)
        rows = {(const T*)x, inputs, nullptr};
    else
        rows = convert_all<Row>((const T*)x, n, inputs, w.steps * Kind::INPUTS, scratch, threads);
    parallel_shares(threads, panels * blocks, [&](int64_t job) {
        const int64_t i = job % blocks * TILE_ROWS, left = n - i;
        tile_block<Kind>(w, rows, i, (int)(left < TILE_ROWS ? left : TILE_ROWS), job / blocks * WIDTH, (T*)out);
    });
}
