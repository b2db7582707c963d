// Linear layers whose weights are codes with a scale for each group of inputs, compiled once per instruction set. A file
// linear_groups_*.cpp includes target_begin.h, the file of its registers (avx2.h, avx512.h, neon.h) and this file. A register of sums
// is LANES outputs, a panel is VECTORS registers.
// value = ((v - zero) * scale + low) * factor; v is the code or its entry in `table`. Codes of 4 bits are packed as
// [panel of WIDTH outputs][step of 8 inputs][output][4 bytes]: byte j of an output has input j of the step in its low bits and input
// 4 + j in its high bits. Codes of 8 bits are [panel][step][input, in the order 0 4 1 5 2 6 3 7][output]. Numbers of groups are
// [panel][group of steps][output]. The products of a group's codes and inputs are summed first, then scaled. Each row is converted to
// 4-byte words: its numbers in the order in which `Kind` unpacks a step, the sum of each group's inputs, and the scale of an int8 row.
// Sums add inputs in order, so a row's result does not depend on the batch.

namespace {  // each instruction set has its own types

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef uint16_t v8h __attribute__((vector_size(16)));
typedef int8_t v8b __attribute__((vector_size(8)));

static const int64_t WIDTH = LANES * VECTORS;  // outputs of a panel
static const int64_t ROW_BYTES = 3 << 16;  // bytes of converted rows that stay in the cache while panels are read
static const int SETTLE = 4;               // steps after which sums in 16 bits are widened
static const int64_t AHEAD = 6144;         // bytes between the codes that are multiplied and those that are prefetched

enum ScaleType { SCALE_FLOAT32 = 0, SCALE_BFLOAT16 = 1, SCALE_FLOAT16 = 2 };

// CODES_TABLE: 4 bits; CODES_INTEGERS: the same if all entries are integers of 8 bits. CODES_FLOAT8: e4m3 without NaN.
enum CodeType { CODES_INT4 = 0, CODES_TABLE = 1, CODES_INTEGERS = 2, CODES_INT8 = 3, CODES_UINT8 = 4, CODES_FLOAT8 = 5 };

// A number of every group: `coarse` of `span` adjacent groups, times `fine` unless it is null.
struct Grid {
    const char* coarse;
    const int8_t* fine;
    int type;
    int64_t span;
};

// All arrays are padded like the outputs.
struct Weights {
    int code_type, offset;  // offset: the zero point of all groups if `zero` is null
    const char* codes;
    const float* table;
    const uint8_t* zero;
    Grid scale, low;      // low.coarse: null without
    const float *factor;  // of an output; null without
    const float *bias;
    int64_t steps, group_steps, outputs, stride;  // outputs: without padding. stride: of the result's rows, in numbers

    int64_t groups() const { return (steps + group_steps - 1) / group_steps; }
    bool plain() const { return code_type == CODES_INT4 && !low.coarse && !scale.fine && !factor && (zero || offset == 8); }
};

struct Rows {
    const char* first;
    int64_t stride;  // bytes

    const char* at(int64_t i) const { return first + i * stride; }
};

template <class V>
INLINE V load_vector(const void* p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE vi spread(const char* p) { return load_vector<int32_t>(p) - vi{}; }

INLINE vf load_numbers(const char* p, int type, int64_t at) {
    if (type == SCALE_FLOAT32) return load_vector<vf>(p + 4 * at);
    if (type == SCALE_FLOAT16) return widen_half(p + 2 * at);
    return (vf)(__builtin_convertvector(load_vector<vh>(p + 2 * at), vu) << 16);
}

// Return the numbers of group `g` for LANES outputs from `lane` of a panel on.
INLINE vf load_grid(const Weights& w, const Grid& grid, int64_t panel, int64_t g, int64_t lane) {
    const int64_t groups = w.groups(), spans = (groups + grid.span - 1) / grid.span;
    const vf coarse = load_numbers(grid.coarse, grid.type, (panel * spans + g / grid.span) * WIDTH + lane);
    if (!grid.fine) return coarse;
    return __builtin_convertvector((vi)widen_signed(grid.fine + (panel * groups + g) * WIDTH + lane), vf) * coarse;
}

INLINE vi load_zero(const Weights& w, int64_t at) {
    return w.zero ? (vi)widen_bytes(w.zero + at) : vi{} + w.offset;
}

INLINE void widen(const float* p, v8* x) { memcpy(x, p, sizeof *x); }

INLINE void widen(const bf16* p, v8* x) {
    v8h bits;
    memcpy(&bits, p, sizeof bits);
    *x = (v8)(__builtin_convertvector(bits, v8u) << 16);
}

// Copy 8 inputs, from input `k` of the weight's order; zeros after the last one.
template <class T>
INLINE void gather(const T* x, int64_t k, int64_t inputs, const int32_t* order, T* eight) {
    const int64_t n = inputs - k < 8 ? inputs - k : 8;
    if (n == 8 && !order) return (void)memcpy(eight, x + k, 8 * sizeof(T));
    memset(eight, 0, 8 * sizeof(T));
    for (int64_t i = 0; i < n; i++) eight[i] = x[order ? order[k + i] : k + i];
}

template <class V>
INLINE auto total(V x) {
    auto sum = x[0];
    for (int i = 1; i < 8; i++) sum += x[i];
    return sum;
}

// Words of one float.
struct FloatRow {
    static const int WORDS = 8;

    template <class T>
    INLINE v8 write(const T* eight, float, char* to) {
        v8 x;
        widen(eight, &x);
        v8 mixed = __builtin_shufflevector(x, x, 0, 4, 1, 5, 2, 6, 3, 7);
        memcpy(to, &mixed, sizeof mixed);
        return x;
    }
};

// Words of two bfloat16.
struct Bf16Row {
    static const int WORDS = 4;

    INLINE v8 write(const bf16* eight, float, char* to) {
        v8h bits;
        memcpy(&bits, eight, sizeof bits);
        bits = __builtin_shufflevector(bits, bits, 0, 2, 4, 6, 1, 3, 5, 7);
        memcpy(to, &bits, sizeof bits);
        v8 x;
        widen(eight, &x);
        return x;
    }
};

// Words of four int8, quantised with the bits of int8.quantize_rows.
struct Int8Row {
    static const int WORDS = 2;

    template <class T>
    INLINE v8i write(const T* eight, float inverse, char* to) {
        v8 x;
        widen(eight, &x);
        v8i rounded = (v8i)(x * inverse + 12582912.f) << 24 >> 24;  // 1.5 * 2^23: the integer is in the low bits
        v8b bytes = __builtin_convertvector(rounded, v8b);
        memcpy(to, &bytes, sizeof bytes);
        return rounded;
    }
};

// Sums of codes in float32. BYTES: of the codes of an output and step. UNIT: between the codes of adjacent outputs. ROWS: rows in
// registers. STREAMS: panels that a single row is multiplied with at once.
struct Float32 {
    typedef FloatRow Row;
    typedef vf Sum;
    typedef vf Columns;
    typedef vi Raw;
    static const int BYTES = 4, UNIT = 4, ROWS = LANES == 16 ? 6 : 4, STREAMS = LANES == 16 ? 1 : 2;

    INLINE void prepare(const Weights&) {}
    INLINE vi read(const char* codes) { return load_vector<vi>(codes); }
    INLINE vf unpack(vi codes, int word) { return __builtin_convertvector((vi)((vu)codes >> 4 * word & 15), vf); }
    INLINE void add(vf& sum, vi inputs, vf columns) { sum = multiply_add(sum, (vf)inputs, columns); }
    INLINE void settle(vf&) {}
    INLINE vf value(vf sum, vi zero, const char* inputs) { return sum - __builtin_convertvector(zero, vf) * (vf)spread(inputs); }
    INLINE vf total_of(const char* inputs) { return (vf)spread(inputs); }
};

// Codes of 4 bits that are looked up in a table of float32.
struct Tabled : Float32 {
    Table table;

    MEMBER void prepare(const Weights& w) { table = load_table(w.table); }
    MEMBER vf unpack(vi codes, int word) const { return look_up(table, (vi)((vu)codes >> 4 * word)); }
    INLINE vf value(vf sum, vi, const char*) { return sum; }
};

// Codes of 4 bits that are looked up in a table of int8, four or more at once.
struct TabledIntegers : Float32 {
    ByteTable table;
    struct Raw {
        vi low, high;  // the entries of inputs 0 to 3 and 4 to 7
    };

    MEMBER void prepare(const Weights& w) {
        int8_t entries[16];
        for (int i = 0; i < 16; i++) entries[i] = (int8_t)w.table[i];
        table = load_byte_table(entries);
    }
    MEMBER Raw read(const char* codes) const {
        const vi raw = load_vector<vi>(codes);
        return {(vi)look_up_bytes(table, raw & 0x0f0f0f0f), (vi)look_up_bytes(table, (vi)((vu)raw >> 4 & 0x0f0f0f0f))};
    }
    INLINE vf unpack(const Raw& raw, int word) {  // words are inputs 0 4 1 5 2 6 3 7
        return __builtin_convertvector((word & 1 ? raw.high : raw.low) << 24 - word / 2 * 8 >> 24, vf);
    }
    INLINE vf value(vf sum, vi, const char*) { return sum; }
};

// Base of codes of 8 bits.
struct Bytes8 : Float32 {
    typedef const char* Raw;
    static const int BYTES = 8, UNIT = 1;

    INLINE const char* read(const char* codes) { return codes; }
};

struct Signed8 : Bytes8 {
    INLINE vf unpack(const char* codes, int word) { return __builtin_convertvector((vi)widen_signed(codes + word * WIDTH), vf); }
};

struct Unsigned8 : Bytes8 {
    INLINE vf unpack(const char* codes, int word) { return __builtin_convertvector((vi)widen_bytes(codes + word * WIDTH), vf); }
};

// e4m3: its exponent and fraction are those of a float32 whose exponent is 120 too small.
struct Float8 : Bytes8 {
    INLINE vf unpack(const char* codes, int word) {
        return (vf)((vi)widen_signed(codes + word * WIDTH) << 20 & (int32_t)0x87f00000) * 0x1p120f;
    }
    INLINE vf value(vf sum, vi, const char*) { return sum; }
};

// Base of the int8 types: sums of codes in int32.
struct Integers {
    typedef Int8Row Row;
    typedef vi Sum;
    typedef vi Columns;
    typedef vi Raw;
    static const int BYTES = 4, UNIT = 4, ROWS = LANES == 16 ? 6 : 4, STREAMS = 1;

    INLINE void prepare(const Weights&) {}
    INLINE vi read(const char* codes) { return load_vector<vi>(codes); }
    INLINE vi unpack(vi codes, int word) { return (vi)((vu)codes >> 4 * word & 0x0f0f0f0f); }
    INLINE void settle(vi&) {}
    INLINE vf value(vi sum, vi zero, const char* inputs) { return __builtin_convertvector(sum - zero * spread(inputs), vf); }
    INLINE vf total_of(const char* inputs) { return __builtin_convertvector(spread(inputs), vf); }
};

// Return the largest magnitude, in an order that ends with infinity and NaN.
template <class T>
static float find_largest(const T* x, int64_t n) {
    v8i most = {};
    for (int64_t i = 0; i < n; i += 8) {
        T eight[8];
        gather(x, i, n, nullptr, eight);
        v8 wide;
        widen(eight, &wide);
        v8i magnitude = (v8i)wide & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    int32_t bits = 0;
    for (int i = 0; i < 8; i++) bits = most[i] > bits ? most[i] : bits;
    float found;
    memcpy(&found, &bits, 4);
    return found < 1e-30f ? 1e-30f : found;
}

template <class Row, class T>
static void convert(const Weights& w, const T* x, int64_t inputs, const int32_t* order, char* row) {
    const bool quantised = Row::WORDS == 2;
    const float largest = quantised ? find_largest(x, inputs) : 1.f, inverse = 1.f / largest * 127.f, scale = largest / 127.f;
    char* sums = row + w.steps * Row::WORDS * 4;
    for (int64_t first = 0; first < w.steps; first += w.group_steps, sums += 4) {
        const int64_t last = first + w.group_steps < w.steps ? first + w.group_steps : w.steps;
        decltype(Row::write((const T*)nullptr, 0.f, (char*)nullptr)) sum = {};
        for (int64_t k = first; k < last; k++) {
            T eight[8];
            gather(x, 8 * k, inputs, order, eight);
            sum += Row::write(eight, inverse, row + k * Row::WORDS * 4);
        }
        auto all = total(sum);
        memcpy(sums, &all, 4);
    }
    memcpy(sums, &scale, 4);
}

template <class T>
INLINE void store_lanes(T* to, const float* values) {
    if (LANES == 16) return store(to, load(values));
    T all[16];
    store(all, load(values));
    memcpy(to, all, LANES * sizeof(T));
}

// Multiply R rows with P panels, from panel `first` on.
template <class Kind, class T, int R, int P>
static void product(const Weights& w, Rows rows, int64_t first, T* out) {
    const int C = P * VECTORS, WORDS = Kind::Row::WORDS;
    const int64_t step = WIDTH * Kind::BYTES, bytes = w.steps * step, groups = w.groups();
    Kind kind;
    kind.prepare(w);
    const char *codes = w.codes + first * bytes, *sums = rows.at(0) + w.steps * WORDS * 4;
    vf totals[R][C] = {};
    for (int64_t g = 0, k = 0; g < groups; g++) {
        typename Kind::Sum acc[R][C] = {};
        const int64_t last = k + w.group_steps < w.steps ? k + w.group_steps : w.steps;
        while (k < last) {
            for (const int64_t stop = k + SETTLE < last ? k + SETTLE : last; k < stop; k++) {
                typename Kind::Raw raw[C];
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    const char* at = codes + c / VECTORS * bytes + k * step + c % VECTORS * LANES * Kind::UNIT;
                    raw[c] = kind.read(at);
                    if (c % VECTORS == 0)
#pragma GCC unroll 4
                        for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(at + AHEAD + line, 0, 3);
                }
#pragma GCC unroll 8
                for (int s = 0; s < WORDS; s++) {
                    typename Kind::Columns columns[C];
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) columns[c] = kind.unpack(raw[c], s);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        auto inputs = spread(rows.at(r) + (k * WORDS + s) * 4);
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) Kind::add(acc[r][c], inputs, columns[c]);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) Kind::settle(acc[r][c]);
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const int64_t panel = first + c / VECTORS, lane = c % VECTORS * LANES;
            const vf scale = load_grid(w, w.scale, panel, g, lane);
            const vi zero = load_zero(w, (panel * groups + g) * WIDTH + lane);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                totals[r][c] = totals[r][c] + Kind::value(acc[r][c], zero, sums + r * rows.stride + 4 * g) * scale;
            if (w.low.coarse) {
                const vf low = load_grid(w, w.low, panel, g, lane);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) totals[r][c] = totals[r][c] + Kind::total_of(sums + r * rows.stride + 4 * g) * low;
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
        const int64_t at = first * WIDTH + c * LANES, left = w.outputs - at;
        if (left <= 0) break;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            float scale, bias[LANES], values[16] = {};
            memcpy(&scale, sums + r * rows.stride + 4 * groups, 4);
            vf result = totals[r][c];
            if (WORDS == 2) result = result * scale;
            if (w.factor) result = result * load_vector<vf>(w.factor + at);
            memcpy(bias, w.bias + at, sizeof bias);
            memcpy(values, &result, sizeof result);
            for (int i = 0; i < LANES; i++) values[i] += bias[i];
            T* to = out + r * w.stride + at;
            left < LANES ? store_part(to, load(values), left) : store_lanes(to, values);
        }
    }
}

// A single row is multiplied with several narrow panels at once if one alone has too few independent sums, or if the CPU prefetches
// several streams of weights better than one.
template <class Kind, class T, int R>
static void tile(const Weights& w, Rows rows, int64_t first, int64_t last, T* out) {
    const int P = R == 1 ? Kind::STREAMS : 1;
    int64_t p = first;
    for (; p + P <= last; p += P) product<Kind, T, R, P>(w, rows, p, out);
    for (; p < last; p++) product<Kind, T, R, 1>(w, rows, p, out);
}

// Multiply n rows with the panels from `first` to `last`.
template <class Kind, class T>
static void products(const Weights& w, Rows rows, int64_t n, int64_t first, int64_t last, T* out) {
    typedef void Tile(const Weights&, Rows, int64_t, int64_t, T*);
    const int ROWS = Kind::ROWS;
    static Tile* const sizes[] = {nullptr,
                                  tile<Kind, T, 1>,
                                  tile<Kind, T, 2>,
                                  tile<Kind, T, 3>,
                                  tile<Kind, T, ROWS < 4 ? 3 : 4>,
                                  tile<Kind, T, ROWS < 5 ? 3 : 5>,
                                  tile<Kind, T, ROWS < 6 ? 3 : 6>};
    const int64_t each = n <= ROWS ? last - first : 1;  // panels per pass over the rows
    for (int64_t p = first; p < last; p += each)
        for (int64_t i = 0; i < n;) {
            const int64_t left = n - i;
            const int64_t now = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;  // 7 rows as 4 and 3, not as 6 and 1
            sizes[now](w, {rows.at(i), rows.stride}, p, p + each, out + i * w.stride);
            i += now;
        }
}

// Convert n rows to `scratch`, then multiply them chunk by chunk; a chunk stays in the cache while a thread reads its panels.
template <class Kind, class T>
static void multiply(const Weights& w, const T* x, int64_t n, int64_t inputs, const int32_t* order, char* scratch, T* out, int threads) {
    const int64_t piece = 8, stride = w.steps * Kind::Row::WORDS * 4 + 4 * w.groups() + 4;
    parallel_for(threads, (n + piece - 1) / piece, [&](int64_t p) {
        for (int64_t i = p * piece; i < n && i < (p + 1) * piece; i++)
            convert<typename Kind::Row>(w, x + i * inputs, inputs, order, scratch + i * stride);
    });
    if (!n) return;
    const int64_t fit = ROW_BYTES / stride / Kind::ROWS * Kind::ROWS, chunk = fit > Kind::ROWS ? fit : Kind::ROWS;
    const int64_t chunks = (n + chunk - 1) / chunk, panels = (w.outputs + WIDTH - 1) / WIDTH;
    const int64_t wanted = (4 * threads + chunks - 1) / chunks, pieces = wanted < panels / 2 ? wanted : panels / 2 ? panels / 2 : 1;
    parallel_shares(threads, chunks * pieces, [&](int64_t i) {
        const int64_t c = i / pieces, part = i % pieces, first = c * chunk, count = n - first < chunk ? n - first : chunk;
        const Rows rows{scratch + first * stride, stride};
        products<Kind>(w, rows, count, panels * part / pieces, panels * (part + 1) / pieces, out + first * w.stride);
    });
}

// Multiply with codes that are not those of CODES_INT4.
template <class T>
static void multiply_coded(const Weights& w, const T* x, int64_t n, int64_t inputs, const int32_t* order, char* scratch, T* out, int threads) {
    auto* run = w.code_type == CODES_TABLE      ? multiply<Tabled, T>
                : w.code_type == CODES_INTEGERS ? multiply<TabledIntegers, T>
                : w.code_type == CODES_INT8     ? multiply<Signed8, T>
                : w.code_type == CODES_UINT8    ? multiply<Unsigned8, T>
                                                : multiply<Float8, T>;
    run(w, x, n, inputs, order, scratch, out, threads);
}

// Single, Brain: types that multiply float32 and bfloat16 rows with CODES_INT4. Byte: rows quantised to int8.
template <class Single, class Brain, class Byte>
static void group_linear(GROUP_ARGUMENTS) {
    const Weights w GROUP_WEIGHTS;
    const float* single = (const float*)x;
    const bf16* brain = (const bf16*)x;
    if (w.code_type != CODES_INT4)
        type == FLOAT32 ? multiply_coded(w, single, rows, inputs, order, scratch, (float*)out, threads)
                        : multiply_coded(w, brain, rows, inputs, order, scratch, (bf16*)out, threads);
    else if (type == FLOAT32 && int8_rows)
        multiply<Byte>(w, single, rows, inputs, order, scratch, (float*)out, threads);
    else if (type == FLOAT32)
        multiply<Single>(w, single, rows, inputs, order, scratch, (float*)out, threads);
    else if (int8_rows)
        multiply<Byte>(w, brain, rows, inputs, order, scratch, (bf16*)out, threads);
    else
        multiply<Brain>(w, brain, rows, inputs, order, scratch, (bf16*)out, threads);
}
}
