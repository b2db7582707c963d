// Instance norm over time, followed by an activation, in one pass over each channel. A channel's bits depend on that channel alone.
#include <cmath>

#include "common.h"

enum Kind { PLAIN = 0, LEAKY = 1, SNAKE = 2 };

// sin(z)^2 with an error of about 2e-7 for |z| < 10,000; NaN for what is not finite.
template <class V>
INLINE V squared_sine(V z) {
    const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
    const V turns = (z * 0.318309886183790671538f + magic) - magic;
    V r = z - turns * 3.140625f;  // pi in parts, so that the differences are exact
    r = r - turns * 0.0009670257568359375f;
    r = r - turns * 6.2771141529083251953e-07f;
    r = r - turns * 1.2154201256553420762e-10f;
    const V s = r * r;
    V y = s * 2.6083159809786593541503e-06f - 0.0001981069071916863322258f;
    y = y * s + 0.00833307858556509017944336f;
    y = y * s - 0.166666597127914428710938f;
    y = y * s * r + r;
    return y * y;
}

template <class V>
INLINE V normed(V x, float mean, float factor, float shift, int kind, float slope) {
    const V y = (x - mean) * factor + shift;
    if (kind == LEAKY) return y < 0.f ? y * slope : y;
    return kind == SNAKE ? y + squared_sine(y * slope) * (1.f / slope) : y;
}

struct Channel {
    template <class V>
    static MEMBER void run(const float* x, float* out, int64_t time, float scale, float shift, float eps, int kind, float slope) {
        const int64_t LANES = sizeof(V) / 4, whole = time / 16 * 16;
        const int PARTS = Sums<V>::PARTS;
        Sums<V> total, squares;
        for (int64_t t = 0; t < whole; t += 16)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) total.part[p] += load<V>(x + t + p * LANES);
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            const int64_t at = whole + p * LANES, left = time - at;
            if (left > 0) total.part[p] += left < LANES ? load_part<V>(x + at, left) : load<V>(x + at);
        }
        const float mean = total.total() / (float)time;
        for (int64_t t = 0; t < whole; t += 16)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) {
                const V away = load<V>(x + t + p * LANES) - mean;
                squares.part[p] += away * away;
            }
        float square = squares.total();
        for (int64_t t = whole; t < time; t++) square += (x[t] - mean) * (x[t] - mean);
        const float factor = scale / sqrtf(square / (float)time + eps);
        int64_t t = 0;
        for (; t + LANES <= time; t += LANES) store<V>(out + t, normed(load<V>(x + t), mean, factor, shift, kind, slope));
        if (t < time) store_part(out + t, normed(load_part<V>(x + t, time - t), mean, factor, shift, kind, slope), time - t);
    }
};

// Compute the instance norm of each channel over time, then the activation `kind`. x, out [channels, time]; scale, shift
// [channels]. slopes [channels]: factors of snake, x + sin(factor x)^2 / factor; `slope`: that of leaky ReLU.
extern "C" void sensorium_channel_norm(int, int kind, const float* x, const float* scale, const float* shift, const float* slopes,
                                       float* out, int64_t channels, int64_t time, float eps, float slope, int threads) {
    parallel_for(threads, channels, [&](int64_t c) {
        run_vectors<Channel>(x + c * time, out + c * time, time, scale[c], shift[c], eps, kind, slopes ? slopes[c] : slope);
    });
}
