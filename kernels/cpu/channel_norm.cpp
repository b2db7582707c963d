// Instance norm over time, followed by an activation, in one pass over each channel. A channel's bits depend on that channel alone.
#include <cmath>

#include "common.h"

enum Kind { PLAIN = 0, LEAKY = 1, SNAKE = 2 };

// sin(z)^2 with an error of about 2e-7 for |z| < 10,000; NaN for what is not finite.
INLINE v16 squared_sine(v16 z) {
    const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
    const v16 turns = (z * 0.318309886183790671538f + magic) - magic;
    v16 r = z - turns * 3.140625f;  // pi in parts, so that the differences are exact
    r = r - turns * 0.0009670257568359375f;
    r = r - turns * 6.2771141529083251953e-07f;
    r = r - turns * 1.2154201256553420762e-10f;
    const v16 s = r * r;
    v16 y = s * 2.6083159809786593541503e-06f - 0.0001981069071916863322258f;
    y = y * s + 0.00833307858556509017944336f;
    y = y * s - 0.166666597127914428710938f;
    y = y * s * r + r;
    return y * y;
}

INLINE v16 normed(v16 x, float mean, float factor, float shift, int kind, float slope) {
    const v16 y = (x - mean) * factor + shift;
    if (kind == LEAKY) return where_negative(y, y * slope, y);
    return kind == SNAKE ? y + squared_sine(y * slope) * (1.f / slope) : y;
}

INLINE void one_channel(const float* x, float* out, int64_t time, float scale, float shift, float eps, int kind, float slope) {
    const int64_t whole = time / 16 * 16, rest = time - whole;
    v16 total = {}, squares = {};
    for (int64_t t = 0; t < whole; t += 16) total += load(x + t);
    if (rest) total += load_part(x + whole, rest);
    const float mean = sum(total) / (float)time;
    for (int64_t t = 0; t < whole; t += 16) {
        const v16 away = load(x + t) - mean;
        squares += away * away;
    }
    float square = sum(squares);
    for (int64_t t = whole; t < time; t++) square += (x[t] - mean) * (x[t] - mean);
    const float factor = scale / sqrtf(square / (float)time + eps);
    for (int64_t t = 0; t < whole; t += 16) store(out + t, normed(load(x + t), mean, factor, shift, kind, slope));
    if (rest) store_part(out + whole, normed(load_part(x + whole, rest), mean, factor, shift, kind, slope), rest);
}

// Compute the instance norm of each channel over time, then the activation `kind`. x, out [channels, time]; scale, shift
// [channels]. slopes [channels]: factors of snake, x + sin(factor x)^2 / factor; `slope`: that of leaky ReLU.
extern "C" void sensorium_channel_norm(int, int kind, const float* x, const float* scale, const float* shift, const float* slopes,
                                       float* out, int64_t channels, int64_t time, float eps, float slope, int threads) {
    parallel_for(threads, channels, [&](int64_t c) {
        run_best<one_channel>(x + c * time, out + c * time, time, scale[c], shift[c], eps, kind, slopes ? slopes[c] : slope);
    });
}
