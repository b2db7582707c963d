// Convolutions over time with half as many multiplications (minimal filtering, arXiv 1509.09308).
//
// Four results in a row, of four taps, take seven multiplications instead of sixteen: input, kernel and result are polynomials,
// which are multiplied by their values at 0, 1, -1, 2, -2, 1/2 and infinity. Longer kernels are sums of kernels of four taps.
// The tiles of four inputs of all phases of a dilated convolution follow one another, and are divided into blocks of 48 tiles.
#include <algorithm>
#include <vector>

#include "common.h"

static const int64_t POINTS = 7, TILE = 4, BLOCK = 48, WIDTH = 64, OUTPUTS = 8;  // WIDTH: of a row of a block, with its overlap

struct Convolution {
    const float *x, *weight, *bias, *add;
    float* out;
    int64_t inner, outer, time, chunks, dilation, before;  // before: taps before a result
    int64_t tiles, slots, phases;                          // tiles with results and all tiles of a phase; phases with results

    int64_t blocks() const { return (phases * slots + BLOCK - 1) / BLOCK; }

    // Return the blocks in the order of time, so that the phases of a cache line are computed soon after one another.
    std::vector<int64_t> order() const {
        std::vector<int64_t> found(blocks());
        for (size_t i = 0; i < found.size(); i++) found[i] = (int64_t)i;
        std::sort(found.begin(), found.end(), [&](int64_t a, int64_t b) {
            const int64_t first = a * BLOCK % slots, second = b * BLOCK % slots;
            return first != second ? first < second : a < b;
        });
        return found;
    }

    // Call f(t, left, at, time) for each run of tiles of one phase among `count` tiles from `tile` on. t: number of the run's first
    // tile among them; left: tiles of the run; at: number of its first tile in the phase; time: of this tile's first element,
    // shifted by `shift` elements. Tiles after the last phase are left out.
    template <class F>
    MEMBER void for_runs(int64_t tile, int64_t count, int64_t shift, const F& f) const {
        for (int64_t t = 0; t < count;) {
            const int64_t phase = (tile + t) / slots, at = (tile + t) % slots;
            const int64_t left = slots - at < count - t ? slots - at : count - t;
            if (phase >= phases) return;
            f(t, left, at, phase + dilation * (TILE * at + shift));
            t += left;
        }
    }
};

// Transform the seven inputs from each tile's first element on to a value per point. u: element i of all tiles in row i.
INLINE void transform_input(const float* u, float* values, int64_t stride) {
    for (int64_t at = 0; at < WIDTH; at += 16) {
        const v16 a = load(u + at), b = load(u + WIDTH + at), c = load(u + 2 * WIDTH + at), d = load(u + 3 * WIDTH + at);
        const v16 e = load(u + at + 1), f = load(u + WIDTH + at + 1), g = load(u + 2 * WIDTH + at + 1);
        float* to = values + at;
        store(to, f - 2.f * a + 4.f * b + 2.5f * c - 5.f * d - 0.5f * e);
        store(to + stride, f + 2.f * b - 2.f * c - 4.5f * d + 0.5f * e);
        store(to + 2 * stride, f - 2.f * b + 6.f * c - 3.5f * d - 1.5f * e);
        store(to + 3 * stride, f + b - 1.5f * c - 2.f * d + 1.5f * e);
        store(to + 4 * stride, f - b + 2.5f * c - 2.5f * e);
        store(to + 5 * stride, f + 4.f * b - 5.f * d);
        store(to + 6 * stride, g - 2.f * b + 4.f * c + 2.5f * d - 5.f * e - 0.5f * f);
    }
}

// sums [OUTPUTS, BLOCK] of the products of weights [chunks, inner, OUTPUTS] and values [inner, WIDTH].
INLINE void multiply(const float* weight, const float* values, int64_t inner, int64_t chunks, float* sums) {
    v16 sum[OUTPUTS][3] = {};
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const float* row = values + chunk;
        for (int64_t c = 0; c < inner; c++, row += WIDTH, weight += OUTPUTS) {
            const v16 first = load(row), second = load(row + 16), third = load(row + 32);
#pragma GCC unroll 8
            for (int o = 0; o < OUTPUTS; o++) {
                const v16 factor = splat(weight[o]);
                sum[o][0] += factor * first;
                sum[o][1] += factor * second;
                sum[o][2] += factor * third;
            }
        }
    }
#pragma GCC unroll 8
    for (int o = 0; o < OUTPUTS; o++)
        for (int i = 0; i < 3; i++) store(sums + o * BLOCK + 16 * i, sum[o][i]);
}

// Write the elements of the tiles of a block to u, element i of each tile in row i, and zeros outside of the input.
INLINE void read_inputs(const Convolution& c, const float* x, int64_t tile, float* u) {
    c.for_runs(tile, BLOCK + c.chunks, -c.before, [&](int64_t t, int64_t count, int64_t, int64_t start) {
        const int64_t step = TILE * c.dilation;
        for (int64_t i = 0; i < TILE; i++) {
            const int64_t first = start + c.dilation * i;
            float* to = u + i * WIDTH + t;
            int64_t from = first < 0 ? (-first + step - 1) / step : 0, end = first < c.time ? (c.time - first + step - 1) / step : 0;
            from = from < count ? from : count, end = end < count ? end : count;
            for (int64_t k = 0; k < from; k++) to[k] = 0.f;
            const float* place = x + first;
            for (int64_t k = from; k < end; k++) to[k] = place[k * step];
            for (int64_t k = end > from ? end : from; k < count; k++) to[k] = 0.f;
        }
    });
}

INLINE void write_results(const Convolution& c, const float* sums, int64_t output, int64_t tile) {
    const float bias = c.bias ? c.bias[output] : 0.f;
    float results[TILE][BLOCK];
    for (int64_t at = 0; at < BLOCK; at += 16) {
        v16 p[POINTS];
        for (int64_t point = 0; point < POINTS; point++) p[point] = load(sums + point * OUTPUTS * BLOCK + at);
        const v16 ones = p[1] + p[2], odd = p[1] - p[2], twos = p[3] + p[4], odd_twos = p[3] - p[4];
        store(results[0] + at, p[0] + ones + twos + p[5] + bias);
        store(results[1] + at, odd + 2.f * odd_twos + 0.5f * p[5] + bias);
        store(results[2] + at, ones + 4.f * twos + 0.25f * p[5] + bias);
        store(results[3] + at, odd + 8.f * odd_twos + 0.125f * p[5] + p[6] + bias);
    }
    c.for_runs(tile, BLOCK, 0, [&](int64_t t, int64_t count, int64_t at, int64_t start) {
        const int64_t step = TILE * c.dilation, own = c.tiles - at < count ? c.tiles - at : count;
        for (int64_t i = 0; i < TILE; i++) {
            const int64_t first = start + c.dilation * i, end = first < c.time ? (c.time - first + step - 1) / step : 0;
            const int64_t stop = end < own ? end : own;
            const float *from = results[i] + t, *add = c.add + output * c.time + first;
            float* to = c.out + output * c.time + first;
            if (c.add)
                for (int64_t k = 0; k < stop; k++) to[k * step] = from[k] + add[k * step];
            else
                for (int64_t k = 0; k < stop; k++) to[k * step] = from[k];
        }
    });
}

INLINE void one_block(const Convolution* made, int64_t block, float* buffer) {
    const Convolution& c = *made;
    float *u = buffer, *values = buffer + 5 * WIDTH;
    memset(u, 0, 5 * WIDTH * sizeof(float));
    for (int64_t channel = 0; channel < c.inner; channel++) {
        read_inputs(c, c.x + channel * c.time, block * BLOCK, u);
        transform_input(u, values + channel * WIDTH, c.inner * WIDTH);
    }
    const int64_t size = c.chunks * c.inner * OUTPUTS;
    float sums[POINTS * OUTPUTS * BLOCK];
    for (int64_t first = 0; first < c.outer; first += OUTPUTS) {
        const float* weight = c.weight + first / OUTPUTS * POINTS * size;
        for (int64_t point = 0; point < POINTS; point++)
            multiply(weight + point * size, values + point * c.inner * WIDTH, c.inner, c.chunks, sums + point * OUTPUTS * BLOCK);
        for (int64_t o = 0; o < OUTPUTS; o++) write_results(c, sums + o * BLOCK, first + o, block * BLOCK);
    }
}

// x, out [channels, time]; weight [outer / 8, points, chunks, inner, 8]; bias [outer] and add, of out's shape, may be null. x is
// padded with zeros. The bits of a result depend on its inputs and its position.
extern "C" void sensorium_convolution(int, const char* x, const char* weight, const char* bias, const char* add, char* out,
                                      int64_t inner, int64_t outer, int64_t time, int64_t taps, int64_t dilation, int threads) {
    Convolution c{(const float*)x, (const float*)weight, (const float*)bias, (const float*)add, (float*)out};
    c.inner = inner, c.outer = outer, c.time = time, c.dilation = dilation, c.before = taps / 2;
    c.chunks = (taps + TILE - 1) / TILE, c.phases = dilation < time ? dilation : time;
    c.tiles = ((time + dilation - 1) / dilation + TILE - 1) / TILE, c.slots = c.tiles + c.chunks;
    const std::vector<int64_t> order = c.order();
    parallel_for(threads, c.blocks(), [&](int64_t i) {
        static thread_local std::vector<float> buffer;
        buffer.resize(5 * WIDTH + POINTS * inner * WIDTH);
        run_best<one_block>((const Convolution*)&c, order[i], buffer.data());
    });
}
