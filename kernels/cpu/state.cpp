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

template <class T>
INLINE void convolve(const T* x, int64_t x_stride, const float* weight, const float* bias, T* out, int64_t rows, int64_t channels,
                     int64_t taps, const float* past, float* next, int64_t at, int64_t n) {
    // Input of row `row - back`: an earlier row of the chunk, or one that the state holds.
    auto input = [&](int64_t row) {
        if (row >= 0) return load_part(x + row * x_stride + at, n);
        return past ? load_part(past + (row + taps - 1) * channels + at, n) : v16{};
    };
    v16 begin = bias ? load_part(bias + at, n) : v16{};
    for (int64_t row = 0; row < rows; row++) {
        v16 total = begin;
        for (int64_t tap = 0; tap < taps; tap++)
            total += input(row - taps + 1 + tap) * load_part(weight + tap * channels + at, n);
        store_part(out + row * channels + at, total, n);
    }
    for (int64_t tap = 0; tap + 1 < taps; tap++) store_part(next + tap * channels + at, input(rows - taps + 1 + tap), n);
}

template <class T>
INLINE void convolve_part(const T* x, int64_t x_stride, const float* weight, const float* bias, T* out, int64_t rows, int64_t channels,
                          int64_t taps, const float* past, float* next, int64_t at, int64_t n) {
    if (n == 16) return convolve(x, x_stride, weight, bias, out, rows, channels, taps, past, next, at, 16);  // constant: whole vectors
    convolve(x, x_stride, weight, bias, out, rows, channels, taps, past, next, at, n);
}

INLINE void convolve_piece(int type, const char* x, int64_t x_stride, const float* weight, const float* bias, char* out,
                           int64_t channels, int64_t taps, const Sequences* all, int64_t i, int64_t at) {
    int64_t n = channels - at < 16 ? channels - at : 16, first = all->starts[i], rows = all->starts[i + 1] - first;
    const float* past = all->read(i);
    if (type == FLOAT32)
        convolve_part((const float*)x + first * x_stride, x_stride, weight, bias, (float*)out + first * channels, rows, channels,
                      taps, past, all->write(i), at, n);
    else
        convolve_part((const bf16*)x + first * x_stride, x_stride, weight, bias, (bf16*)out + first * channels, rows, channels,
                      taps, past, all->write(i), at, n);
}

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
                run_best<convolve_piece>(type, x, x_stride, weight, bias, out, channels, taps, (const Sequences*)&all, p / pieces,
                                         p % pieces * 16);
    });
}

struct Head {
    const float *q, *k, *v, *decay, *beta;  // of the first row; beta is null without the delta rule
    float* out;
    int64_t key_stride, value_stride, scalar_stride;  // between rows
    int64_t key_dim, value_dim;
};

// 16 columns of a head's state [key_dim, value_dim], which stay in the cache of the core for all rows.
INLINE void recur(const Head* h, int64_t rows, const float* past, float* state, int64_t at, int64_t n) {
    int64_t dim = h->value_dim;
    for (int64_t i = 0; i < h->key_dim; i++)
        store_part(state + i * dim + at, past ? load_part(past + i * dim + at, n) : v16{}, n);
    for (int64_t row = 0; row < rows; row++) {
        const float *q = h->q + row * h->key_stride, *k = h->k + row * h->key_stride;
        float decay = h->decay[row * h->scalar_stride];
        v16 value = load_part(h->v + row * h->value_stride + at, n), out[4] = {}, known[4] = {};
        if (h->beta) {
            for (int64_t i = 0; i < h->key_dim; i++) known[i % 4] += load_part(state + i * dim + at, n) * decay * k[i];
            value = (value - ((known[0] + known[1]) + (known[2] + known[3]))) * h->beta[row * h->scalar_stride];
        }
        for (int64_t i = 0; i < h->key_dim; i++) {
            v16 now = load_part(state + i * dim + at, n) * decay + value * k[i];
            store_part(state + i * dim + at, now, n);
            out[i % 4] += now * q[i];
        }
        store_part(h->out + row * h->value_stride + at, (out[0] + out[1]) + (out[2] + out[3]), n);
    }
}

INLINE void recur_head(const Head* h, int64_t rows, const float* past, float* state) {
    int64_t at = 0;
    for (; at + 16 <= h->value_dim; at += 16) recur(h, rows, past, state, at, 16);  // constant: whole vectors
    if (at < h->value_dim) recur(h, rows, past, state, at, h->value_dim - at);
}

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
        run_best<recur_head>((const Head*)&own, starts[i + 1] - first, past ? past + head * size : nullptr,
                             all.write(i) + head * size);
    });
}
