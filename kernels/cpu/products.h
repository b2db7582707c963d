// Linear layers with packed weights, compiled once per instruction set. A file linear_*.cpp includes target_begin.h, defines LANES
// (floats per register), VECTORS (registers per panel), `multiply_add` and `widen_half`, and includes this file.
// A weight [out, in] is packed as [panel of outputs][step of inputs][outputs of the panel][inputs of the step], padded with zeros;
// kernels/linear/panels.py has the sizes. A step is one input, or several that share a 32-bit word. Sums add steps in order, so
// the result of a row does not depend on the rest of the batch.

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

static const int64_t WIDTH = LANES * VECTORS;  // outputs of a panel
static const int ROWS = 6;                     // rows in registers
static const bool WIDE = VECTORS * LANES == 64;  // a panel fills the registers: chunks of rows stay in the cache, else panels
static const int64_t CHUNK = 48;               // WIDE: rows multiplied with a panel while it is in the cache
static const int64_t GROUP = 3 << 18;          // WIDE: bytes of panels that stay in the cache
static const int64_t ROW_BYTES = 3 << 16;      // else: bytes of rows that stay in the cache while panels are read
static const int64_t FEW = 24, BLOCK = 64;     // WIDE: most rows that are multiplied with BLOCK steps of the weights at a time
static const int LINES = 2;                    // WIDE: cache lines of later blocks that a tile of a few rows prefetches per step
static const int64_t AHEAD = 6144;             // bytes between the weights that are multiplied and those that are prefetched

struct Weights {
    const char* panels;
    const int32_t* shift;       // unsigned activations only: 128 times the sum of an output's weights, else null
    const float *scale, *bias;  // scale: int8 only. All three are padded like the outputs
    int64_t steps, outputs;     // outputs without padding
};

template <class T>
struct Rows {
    const T* first;
    int64_t stride;
    const float* scale;  // of int8 rows

    const T* at(int64_t i) const { return first + i * stride; }
    Rows from(int64_t i) const { return {at(i), stride, scale + i}; }
};

template <class V>
INLINE V load_vector(const void* p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}

template <class Word>
INLINE Word read_word(const void* p) {
    Word x;
    memcpy(&x, p, sizeof x);
    return x;
}

// One struct for each type of weight: the type of converted rows, inputs and bytes per step, narrow panels that a single row is
// multiplied with at once (STREAMS), and the arithmetic of LANES outputs.
struct Float32 {
    typedef float Row;
    typedef vf Sum;
    typedef vf Column;
    static const int INPUTS = 1, BYTES = 4 * WIDTH, STREAMS = LANES == 8 ? 2 : 4;

    INLINE void columns(const char* step, vf* all) {
        for (int v = 0; v < VECTORS; v++) all[v] = load_vector<vf>(step + 4 * LANES * v);
    }
    INLINE vf spread(const float* inputs) { return *inputs - vf{}; }
    INLINE vf add(vf sum, vf inputs, vf column) { return multiply_add(sum, inputs, column); }
    INLINE vf value(vf sum, const Weights& w, float, int64_t at) { return sum + load_vector<vf>(w.bias + at); }
};

// In every block of 2 LANES outputs, outputs j and j + LANES share a word: a shift and a mask widen them.
struct Bfloat16 : Float32 {
    static const int BYTES = 2 * WIDTH;

    INLINE void columns(const char* step, vf* all) {
        for (int v = 0; v < VECTORS; v += 2) {
            vu both = load_vector<vu>(step + 2 * LANES * v);
            all[v] = (vf)(both << 16), all[v + 1] = (vf)(both & 0xffff0000);
        }
    }
};

struct Float16 : Float32 {
    static const int BYTES = 2 * WIDTH;

    INLINE void columns(const char* step, vf* all) {
        for (int v = 0; v < VECTORS; v++) all[v] = widen_half(step + 2 * LANES * v);
    }
};

// Base of the int8 types: integer sums, multiplied by the scales of row and output.
struct Scaled {
    typedef vi Sum;
    static const int STREAMS = 1;

    INLINE vf value(vi sum, const Weights& w, float scale, int64_t at) {
        if (w.shift) sum -= load_vector<vi>(w.shift + at);
        return __builtin_convertvector(sum, vf) * scale * load_vector<vf>(w.scale + at) + load_vector<vf>(w.bias + at);
    }
};

// Base for instructions that multiply words of 4 int8 and add the products; activations have the type `Byte`.
template <class Byte>
struct Words : Scaled {
    typedef Byte Row;
    typedef vi Column;
    static const int INPUTS = 4, BYTES = 4 * WIDTH;

    INLINE void columns(const char* step, vi* all) {
        for (int v = 0; v < VECTORS; v++) all[v] = load_vector<vi>(step + 4 * LANES * v);
    }
    INLINE vi spread(const Byte* inputs) { return read_word<int32_t>(inputs) - vi{}; }
};

// Convert a row to float32.
template <class T>
static void convert(const T* x, int64_t n, float* row, int64_t, float*) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store<vf>(row + i, load<vf>(x + i));
    if (i < n) store_part(row + i, load_part<vf>(x + i, n - i), n - i);
}

// Quantise a row: its largest magnitude becomes 127. Magnitudes are compared as integers, which sorts infinity and NaN last.
// Unsigned activations are stored plus 128, and Weights.shift is subtracted from their sums.
template <class T, class Integer>
static void convert(const T* x, int64_t n, Integer* row, int64_t width, float* scale) {
    typedef Integer Integers __attribute__((vector_size(LANES * sizeof(Integer))));
    vi most = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const vi magnitude = (vi)(n - i < LANES ? load_part<vf>(x + i, n - i) : load<vf>(x + i)) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    int32_t all[LANES], bits = 0;
    memcpy(all, &most, sizeof all);
    for (int32_t one : all) bits = one > bits ? one : bits;
    float largest;
    memcpy(&largest, &bits, 4);
    if (largest < 1e-30f) largest = 1e-30f;
    *scale = largest / 127.f;
    const vf inverse = splat<vf>(1.f / largest * 127.f);
    for (int64_t i = 0; i < width; i += LANES) {
        const vf value = i + LANES <= n ? load<vf>(x + i) : i < n ? load_part<vf>(x + i, n - i) : vf{};
        const vi rounded = (vi)(value * inverse + 12582912.f);  // 1.5 * 2^23: the integer is in the low bits
        const vi integers = std::is_unsigned<Integer>::value ? (rounded ^ 0x80) & 0xff : rounded << 24 >> 24;
        const Integers converted = __builtin_convertvector(integers, Integers);
        memcpy(row + i, &converted, (width - i < LANES ? width - i : LANES) * sizeof(Integer));
    }
}

// Add the products of some steps of R rows with P panels that are `bytes` apart. AHEAD_LINES: cache lines that each step prefetches,
// from `ahead` on; 0 leaves it to the hardware where that is as fast.
template <class Kind, int R, int P, int AHEAD_LINES>
INLINE void accumulate(typename Kind::Sum (&acc)[R][P][VECTORS], const char* panel, int64_t bytes, const typename Kind::Row* row,
                       int64_t stride, int64_t steps, const char* ahead) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; k++, panel += Kind::BYTES, row += Kind::INPUTS) {
        for (int line = 0; line < AHEAD_LINES; line++) __builtin_prefetch(ahead + (k * AHEAD_LINES + line) * 64, 0, 3);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            typename Kind::Column columns[VECTORS];
            Kind::columns(panel + p * bytes, columns);
            if (!AHEAD_LINES && (!WIDE || R == 1)) __builtin_prefetch(panel + p * bytes + AHEAD, 0, 3);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                auto inputs = Kind::spread(row + r * stride);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) acc[r][p][v] = Kind::add(acc[r][p][v], inputs, columns[v]);
            }
        }
    }
}

// Write the sums of R rows, from row i on, and P panels, from output `first` on.
template <class Kind, class T, int R, int P>
INLINE void write_sums(const typename Kind::Sum (&acc)[R][P][VECTORS], const Weights& w, const Rows<typename Kind::Row>& rows,
                       int64_t i, int64_t first, T* out) {
    const int PART = 16 / LANES;  // registers of 16 outputs, which are stored at once
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v += PART) {
            const int64_t at = first + p * WIDTH + v * LANES, left = w.outputs - at;
            if (left <= 0) break;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const float scale = std::is_same<typename Kind::Sum, vi>::value ? rows.scale[i + r] : 0.f;
                vf values[PART];
#pragma GCC unroll 4
                for (int j = 0; j < PART; j++) values[j] = Kind::value(acc[r][p][v + j], w, scale, at + j * LANES);
                T* to = out + (i + r) * w.outputs + at;
                left < 16 ? store_part(to, load((const float*)values), left) : store(to, load((const float*)values));
            }
        }
}

// Multiply R rows with P panels, from the panel of output `first` on.
template <class Kind, class T, int R, int P>
static void product(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t i, int64_t first, T* out) {
    typename Kind::Sum acc[R][P][VECTORS] = {};
    const int64_t bytes = w.steps * Kind::BYTES;
    accumulate<Kind, R, P, 0>(acc, w.panels + first / WIDTH * bytes, bytes, rows.at(i), rows.stride, w.steps, nullptr);
    write_sums<Kind, T>(acc, w, rows, i, first, out);
}

// Add the products of some steps of R rows to `sums`; write them if they are complete.
template <class Kind, class T, int R>
static void part_of_product(typename Kind::Sum* sums, const Weights& w, const Rows<typename Kind::Row>& rows, int64_t i,
                            int64_t first, int64_t step, int64_t steps, const char* ahead, T* out) {
    typename Kind::Sum acc[R][1][VECTORS];
    memcpy(acc, sums, sizeof acc);
    const char* panel = w.panels + (first / WIDTH * w.steps + step) * Kind::BYTES;
    accumulate<Kind, R, 1, LINES>(acc, panel, 0, rows.at(i) + step * Kind::INPUTS, rows.stride, steps, ahead);
    if (step + steps < w.steps)
        memcpy(sums, acc, sizeof acc);
    else
        write_sums<Kind, T>(acc, w, rows, i, first, out);
}

// A few rows are multiplied with several narrow panels at once, so that there are enough independent sums. Weights of 8 bits are
// read as one stream on CPUs that prefetch it better than several (STREAMS is 1).
template <class Kind, class T, int R>
static void tile(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t i, int64_t first, int64_t last, T* out) {
    const int P = WIDE ? 1 : R == 1 ? Kind::STREAMS : R <= 2 && !std::is_base_of<Scaled, Kind>::value ? 2 : 1;
    int64_t p = first;
    for (; p + P <= last; p += P) product<Kind, T, R, P>(w, rows, i, p * WIDTH, out);
    for (; p < last; p++) product<Kind, T, R, 1>(w, rows, i, p * WIDTH, out);
}

// Multiply 7 to FEW rows with the panels from `first` to `last`: some steps with all rows, while the weights of the next ones arrive.
template <class Kind, class T>
static void multiply_few_rows(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t n, int64_t first, int64_t last, T* out) {
    typedef void Part(typename Kind::Sum*, const Weights&, const Rows<typename Kind::Row>&, int64_t, int64_t, int64_t, int64_t,
                      const char*, T*);
    static Part* const parts[] = {nullptr,
                                  nullptr,
                                  nullptr,
                                  part_of_product<Kind, T, 3>,
                                  part_of_product<Kind, T, 4>,
                                  part_of_product<Kind, T, 5>,
                                  part_of_product<Kind, T, 6>};
    const int64_t tiles = (n + ROWS - 1) / ROWS;
    for (int64_t p = first; p < last; p++) {
        typename Kind::Sum sums[FEW * VECTORS] = {};
        for (int64_t step = 0; step < w.steps; step += BLOCK) {
            const int64_t steps = w.steps - step < BLOCK ? w.steps - step : BLOCK;
            const char* next = w.panels + (p * w.steps + step + steps) * Kind::BYTES;
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t i = (n * tile + tiles - 1) / tiles, end = (n * (tile + 1) + tiles - 1) / tiles;
                parts[end - i](sums + i * VECTORS, w, rows, i, p * WIDTH, step, steps, next + tile * steps * 64 * LINES, out);
            }
        }
    }
}

// Multiply n rows with the panels from `first` to `last`.
template <class Kind, class T>
static void products(const Weights& w, const Rows<typename Kind::Row>& rows, int64_t n, int64_t first, int64_t last, T* out) {
    typedef void Tile(const Weights&, const Rows<typename Kind::Row>&, int64_t, int64_t, int64_t, T*);
    static Tile* const sizes[] = {nullptr,          tile<Kind, T, 1>, tile<Kind, T, 2>, tile<Kind, T, 3>,
                                  tile<Kind, T, 4>, tile<Kind, T, 5>, tile<Kind, T, 6>};
    if constexpr (WIDE)
        if (n > ROWS && n <= FEW) return multiply_few_rows<Kind>(w, rows, n, first, last, out);
    const int64_t each = WIDE || n > 3 ? 1 : last - first;  // panels per pass over the rows
    for (int64_t p = first; p < last; p += each)
        for (int64_t i = 0; i < n;) {
            int64_t left = n - i;
            int64_t now = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;  // 7 rows as 4 and 3, not as 6 and 1
            sizes[now](w, rows, i, p, p + each, out);
            i += now;
        }
}

// The rows that this thread converted last, with their call and chunk.
struct Converted {
    uint64_t call = 0;
    int64_t chunk = 0;
    std::vector<char> bytes;
};

static thread_local Converted converted;
static std::atomic<uint64_t> calls;

template <class Row, class T>
static Rows<Row> convert_chunk(uint64_t call, int64_t chunk, const T* x, int64_t n, int64_t inputs, int64_t width) {
    const size_t bytes = n * (width * sizeof(Row) + sizeof(float));
    if (converted.bytes.size() < bytes) converted.bytes.resize(bytes);
    Row* rows = (Row*)converted.bytes.data();
    float* scales = (float*)(converted.bytes.data() + n * width * sizeof(Row));
    if (converted.call != call || converted.chunk != chunk)
        for (int64_t i = 0; i < n; i++) convert(x + i * inputs, inputs, rows + i * width, width, scales + i);
    converted.call = call, converted.chunk = chunk;
    return {rows, width, scales};
}

// Convert all rows to `scratch`: n rows, then their scales.
template <class Row, class T>
static Rows<Row> convert_all(const T* x, int64_t n, int64_t inputs, int64_t width, char* scratch, int threads) {
    const int64_t piece = 16;
    Row* rows = (Row*)scratch;
    float* scales = (float*)(scratch + n * width * sizeof(Row));
    parallel_for(threads, (n + piece - 1) / piece, [&](int64_t p) {
        for (int64_t i = p * piece; i < n && i < (p + 1) * piece; i++)
            convert(x + i * inputs, inputs, rows + i * width, width, scales + i);
    });
    return {rows, width, scales};
}

// Rows are processed in chunks, panels in groups. WIDE: each thread takes a share of adjacent panels; with many rows, a group of
// panels fits the cache. Otherwise a chunk of rows fits the cache. Rows of another type are converted first: all of them once to
// `scratch`, or, if it is null, each chunk by each thread.
template <class Kind, class T>
static void multiply(const Weights& w, const T* x, int64_t n, int64_t inputs, char* scratch, T* out, int threads) {
    typedef typename Kind::Row Row;
    if (!n) return;  // an expert without tokens
    const uint64_t call = calls.fetch_add(1, std::memory_order_relaxed) + 1;
    const int64_t width = w.steps * Kind::INPUTS, bytes = w.steps * Kind::BYTES, panels = (w.outputs + WIDTH - 1) / WIDTH;
    const int64_t fit = ROW_BYTES / (width * (int64_t)sizeof(Row) + 4) / ROWS * ROWS;
    const int64_t chunk = WIDE ? CHUNK : fit > ROWS ? fit : ROWS, chunks = (n + chunk - 1) / chunk;
    int64_t groups = (4 * threads + chunks - 1) / chunks, most = panels / 4 ? panels / 4 : 1;
    if (WIDE) {
        const int64_t share = panels * chunks / (4 * threads), wanted = GROUP / bytes < share ? GROUP / bytes : share;
        groups = chunks > 1 && wanted > 1 ? (panels + wanted - 1) / wanted : panels;
        most = panels;
    }
    if (groups > most) groups = most;
    Rows<Row> all = {};
    if constexpr (std::is_same<Row, T>::value)
        all = {x, inputs, nullptr};
    else if (scratch)
        all = convert_all<Row>(x, n, inputs, width, scratch, threads);
    parallel_shares(threads, chunks * groups, [&](int64_t i) {
        const int64_t c = WIDE ? i % chunks : i / groups, group = WIDE ? i / chunks : i % groups;
        const int64_t first = c * chunk, count = n - first < chunk ? n - first : chunk;
        Rows<Row> rows;
        if constexpr (std::is_same<Row, T>::value)
            rows = all.from(first);
        else
            rows = scratch ? all.from(first) : convert_chunk<Row>(call, c, x + first * inputs, count, inputs, width);
        products<Kind>(w, rows, count, panels * group / groups, panels * (group + 1) / groups, out + first * w.outputs);
    });
}

// Multiply with one type of weight. `void` stands for a type that the instruction set does not support; it is never called.
template <class Kind, class T>
static void multiply_as(const Weights& w, const char* x, int64_t rows, int64_t inputs, char* scratch, char* out, int threads) {
    if constexpr (!std::is_void<Kind>::value)
        if constexpr (!std::is_same<typename Kind::Row, bf16>::value || std::is_same<T, bf16>::value)
            multiply<Kind>(w, (const T*)x, rows, inputs, scratch, (T*)out, threads);
}

template <class Single, class Brain, class Half, class Byte>
static void linear(LINEAR_ARGUMENTS) {
    const Weights w{panels, shift, scale, bias, steps, outputs};
    auto* run = weight_type == WEIGHT_FLOAT32    ? multiply_as<Single, float>
                : weight_type == WEIGHT_BFLOAT16 ? type == FLOAT32 ? multiply_as<Brain, float> : multiply_as<Brain, bf16>
                : weight_type == WEIGHT_FLOAT16  ? multiply_as<Half, float>
                : type == FLOAT32                ? multiply_as<Byte, float>
                                                 : multiply_as<Byte, bf16>;
    run(w, x, rows, inputs, scratch, out, threads);
}
