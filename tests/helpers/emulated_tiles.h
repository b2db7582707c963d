// AMX tile instructions in scalar code, for test_other_cpus.py: included before the sources that use them.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifndef TARGET
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#endif
#define TILE_CONFIGURE emulated::configure
#define TILE_RELEASE emulated::release
#define TILE_ZERO emulated::zero
#define TILE_LOAD emulated::load
#define TILE_STORE emulated::store
#define TILE_DOT_BYTES emulated::dot_bytes
#define TILE_DOT_SIGNED emulated::dot_signed
#define TILE_DOT_BFLOAT16 emulated::dot_bfloat16

extern "C" inline int64_t emulated_products = 0;  // how many there were

namespace emulated {
struct Tile {
    int rows, bytes;
    uint8_t data[16][64];
};
static thread_local Tile tiles[8];

// What would be an invalid instruction ends the process.
static void require(bool holds) {
    if (!holds) abort();
}

static Tile& used(int t) {
    require(tiles[t].rows && tiles[t].bytes);
    return tiles[t];
}

static void configure(const void* config) {
    const uint8_t* c = (const uint8_t*)config;
    require(c[0] == 1 && !c[1]);
    for (int i = 2; i < 16; i++) require(!c[i]);
    for (int t = 0; t < 16; t++) {
        uint16_t bytes;
        memcpy(&bytes, c + 16 + 2 * t, 2);
        require(bytes <= 64 && c[48 + t] <= 16 && !bytes == !c[48 + t] && (t < 8 || !bytes));
        if (t < 8) tiles[t] = {c[48 + t], bytes, {}};
    }
}

static void release() { memset(tiles, 0, sizeof tiles); }
static void zero(int t) { memset(used(t).data, 0, sizeof tiles[t].data); }

static void load(int t, const void* p, int64_t stride) {
    zero(t);
    for (int r = 0; r < tiles[t].rows; r++) memcpy(tiles[t].data[r], (const char*)p + r * stride, tiles[t].bytes);
}

static void store(int t, void* p, int64_t stride) {
    for (int r = 0; r < used(t).rows; r++) memcpy((char*)p + r * stride, tiles[t].data[r], tiles[t].bytes);
}

template <class Sum, class Product>
static void dot(int c, int a, int b, const Product& product) {
    emulated_products++;
    require(used(c).rows == used(a).rows && tiles[c].bytes == used(b).bytes && tiles[a].bytes == 4 * tiles[b].rows);
    for (int m = 0; m < tiles[c].rows; m++)
        for (int k = 0; k < tiles[b].rows; k++)
            for (int n = 0; n < tiles[c].bytes / 4; n++) {
                Sum sum;
                memcpy(&sum, tiles[c].data[m] + 4 * n, 4);
                sum = product(sum, tiles[a].data[m] + 4 * k, tiles[b].data[k] + 4 * n);
                memcpy(tiles[c].data[m] + 4 * n, &sum, 4);
            }
}

static void dot_bytes(int c, int a, int b) {
    dot<int32_t>(c, a, b, [](int32_t sum, const uint8_t* x, const uint8_t* w) {
        for (int i = 0; i < 4; i++) sum += x[i] * (int8_t)w[i];
        return sum;
    });
}

static void dot_signed(int c, int a, int b) {
    dot<int32_t>(c, a, b, [](int32_t sum, const uint8_t* x, const uint8_t* w) {
        for (int i = 0; i < 4; i++) sum += (int8_t)x[i] * (int8_t)w[i];
        return sum;
    });
}

static float wide(const uint8_t* p) {
    uint32_t bits = (uint32_t)p[1] << 24 | p[0] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static void dot_bfloat16(int c, int a, int b) {
    dot<float>(c, a, b, [](float sum, const uint8_t* x, const uint8_t* w) {
        return sum + wide(x) * wide(w) + wide(x + 2) * wide(w + 2);
    });
}
}
