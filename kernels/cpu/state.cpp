// Layers with a state per sequence: causal convolution and linear recurrence. A row's bits depend only on its sequence, not on
// the batch or on where the sequence is cut into chunks.
#include "common.h"

// The sequences of a batch: sequence i has rows starts[i] to starts[i + 1], reads the state tables[i][0] and writes
// tables[i][1]. It begins with zeros if lens[i], its tokens after this step, are just these rows.
struct Sequences {
    const int64_t *starts, *lens;
    const int32_t* tables;
    int64_t count, width;
    float* states;
    int64_t stride;  // numbers between two states

    const float* read(int64_t i) const {
        return lens[i] > starts[i + 1] - starts[i] ? states + tables[i * width] * stride : nullptr;
    }
    float* write(int64_t i) const { return states + tables[i * width + 1] * stride; }
};

// `n` channels of a sequence, at most as many as V has lanes.
template <class V, class T>
struct Channels {
    const T* x;         // of the first row
    const float* past;  // null: zeros
    int64_t x_stride, channels, taps, n;

    // Return the input of a row: an earlier one of the chunk, or one that the state holds.
    MEMBER V input(int64_t row) const {
        if (row >= 0) return read(x + row * x_stride);
        return past ? read(past + (row + taps - 1) * channels) : V{};
    }
    template <class S>
    MEMBER V read(const S* p) const {
        return n == sizeof(V) / 4 ? load<V>(p) : load_part<V>(p, n);
    }
    template <class S>
    MEMBER void write(S* p, V values) const {
        n == sizeof(V) / 4 ? store<V>(p, values) : store_part(p, values, n);
    }
};

template <class V, class T>
INLINE void convolve(const Channels<V, T>& c, const float* weight, const float* bias, T* out, int64_t rows, float* next) {
    const V begin = bias ? c.read(bias) : V{};
    for (int64_t row = 0; row < rows; row++) {
        V total = begin;
        for (int64_t tap = 0; tap < c.taps; tap++) total += c.input(row - c.taps + 1 + tap) * c.read(weight + tap * c.channels);
        c.write(out + row * c.channels, total);
    }
    for (int64_t tap = 0; tap + 1 < c.taps; tap++) c.write(next + tap * c.channels, c.input(rows - c.taps + 1 + tap));
}

struct Convolution {
    // 16 channels of sequence i, from channel `first` on.
    template <class V>
    static MEMBER void run(int type, const char* x, int64_t x_stride, const float* weight, const float* bias, char* out,
                           int64_t channels, int64_t taps, const Sequences* all, int64_t i, int64_t first) {
        if (type == FLOAT32)
            pieces<V>((const float*)x, x_stride, weight, bias, (float*)out, channels, taps, all, i, first);
        else
            pieces<V>((const bf16*)x, x_stride, weight, bias, (bf16*)out, channels, taps, all, i, first);
    }

    template <class V, class T>
    static MEMBER void pieces(const T* x, int64_t x_stride, const float* weight, const float* bias, T* out, int64_t channels,
                              int64_t taps, const Sequences* all, int64_t i, int64_t first) {
        const int64_t LANES = sizeof(V) / 4, start = all->starts[i], rows = all->starts[i + 1] - start;
        const float* past = all->read(i);
        float* next = all->write(i);
        for (int64_t at = first; at < first + 16 && at < channels; at += LANES) {
            Channels<V, T> c{x + start * x_stride + at, past ? past + at : nullptr, x_stride, channels, taps, LANES};
            const float* add = bias ? bias + at : nullptr;
            if (channels - at >= LANES) {  // a constant number: whole vectors
                convolve(c, weight + at, add, out + start * channels + at, rows, next + at);
            } else {
                c.n = channels - at;
                convolve(c, weight + at, add, out + start * channels + at, rows, next + at);
            }
        }
    }
};

// x [rows, channels] with row stride x_stride, weight [taps, channels], bias [channels] or null, out [rows, channels].
// A state holds the last taps - 1 inputs, [taps - 1, channels].
extern "C" void sensorium_causal_conv(int type, const char* x, int64_t x_stride, const float* weight, const float* bias, char* out,
                                      int64_t channels, int64_t taps, const int64_t* starts, const int64_t* lens,
                                      const int32_t* tables, int64_t width, int64_t count, float* states, int64_t stride,
                                      int threads) {
    Sequences all{starts, lens, tables, count, width, states, stride};
    int64_t pieces = (channels + 15) / 16, step = count * pieces > 64 ? (count * pieces + 63) / 64 : 1;
    parallel_for(count * pieces > 8 ? threads : 1, (count * pieces + step - 1) / step, [&](int64_t part) {
        for (int64_t p = part * step; p < (part + 1) * step && p < count * pieces; p++)
            if (lens[p / pieces])
                run_vectors<Convolution>(type, x, x_stride, weight, bias, out, channels, taps, (const Sequences*)&all, p / pieces,
                                         p % pieces * 16);
    });
}

struct Head {
    const float *q, *k, *v, *decay, *beta;  // of the first row; beta is null without the delta rule
    float* out;
    int64_t key_stride, value_stride, scalar_stride;  // between rows
    int64_t key_dim, value_dim;
};

struct Recurrence {
    template <class V>
    static MEMBER void run(const Head* h, int64_t rows, const float* past, float* state) {
        const int64_t LANES = sizeof(V) / 4;
        int64_t at = 0;
        for (; at + LANES <= h->value_dim; at += LANES) columns<V>(h, rows, past, state, at, LANES);  // constant: whole vectors
        if (at < h->value_dim) columns<V>(h, rows, past, state, at, h->value_dim - at);
    }

    // n columns of a head's state [key_dim, value_dim], which stay in the cache of the core for all rows.
    template <class V>
    static MEMBER void columns(const Head* h, int64_t rows, const float* past, float* state, int64_t at, int64_t n) {
        const int64_t dim = h->value_dim;
        const bool whole = n == sizeof(V) / 4;
        for (int64_t i = 0; i < h->key_dim; i++) {
            const V begin = !past ? V{} : whole ? load<V>(past + i * dim + at) : load_part<V>(past + i * dim + at, n);
            whole ? store<V>(state + i * dim + at, begin) : store_part(state + i * dim + at, begin, n);
        }
        for (int64_t row = 0; row < rows; row++) {
            const float *q = h->q + row * h->key_stride, *k = h->k + row * h->key_stride;
            const float decay = h->decay[row * h->scalar_stride], *v = h->v + row * h->value_stride + at;
            V value = whole ? load<V>(v) : load_part<V>(v, n), out[4] = {}, known[4] = {};
            if (h->beta) {
                for (int64_t i = 0; i < h->key_dim; i++) {
                    const float* p = state + i * dim + at;
                    known[i % 4] += (whole ? load<V>(p) : load_part<V>(p, n)) * decay * k[i];
                }
                value = (value - ((known[0] + known[1]) + (known[2] + known[3]))) * h->beta[row * h->scalar_stride];
            }
            for (int64_t i = 0; i < h->key_dim; i++) {
                float* p = state + i * dim + at;
                const V now = (whole ? load<V>(p) : load_part<V>(p, n)) * decay + value * k[i];
                whole ? store<V>(p, now) : store_part(p, now, n);
                out[i % 4] += now * q[i];
            }
            const V result = (out[0] + out[1]) + (out[2] + out[3]);
            float* to = h->out + row * h->value_stride + at;
            whole ? store<V>(to, result) : store_part(to, result, n);
        }
    }
};

// q, k [rows, key_heads, key_dim], v, out [rows, heads, value_dim], decay, beta [rows, heads]; beta may be null.
// A state is [heads, key_dim, value_dim].
extern "C" void sensorium_linear_recurrence(int, const float* q, const float* k, const float* v, const float* decay,
                                            const float* beta, float* out, int64_t key_heads, int64_t heads, int64_t key_dim,
                                            int64_t value_dim, const int64_t* starts, const int64_t* lens, const int32_t* tables,
                                            int64_t width, int64_t count, float* states, int64_t stride, int threads) {
    Sequences all{starts, lens, tables, count, width, states, stride};
    parallel_for(threads, count * heads, [&](int64_t task) {
        int64_t i = task / heads, head = task % heads, first = starts[i], size = key_dim * value_dim;
        int64_t key = (first * key_heads + head / (heads / key_heads)) * key_dim, value = (first * heads + head) * value_dim;
        if (!lens[i]) return;
        Head own{q + key,           k + key,           v + value, decay + first * heads + head, beta ? beta + first * heads + head : nullptr,
                 out + value,       key_heads * key_dim, heads * value_dim, heads, key_dim, value_dim};
        const float* past = all.read(i);
        run_vectors<Recurrence>((const Head*)&own, starts[i + 1] - first, past ? past + head * size : nullptr,
                             all.write(i) + head * size);
    });
}
