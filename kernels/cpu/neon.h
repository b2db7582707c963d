// Operations of products.h and linear_groups_body.h with registers of Arm's NEON.
#define LANES 4
#define VECTORS 4

typedef float v4 __attribute__((vector_size(16)));

INLINE v4 multiply_add(v4 sum, v4 a, v4 b) { return (v4)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b); }
INLINE v4 widen_half(const char* p) {
    float16x4_t half;
    memcpy(&half, p, sizeof half);
    return (v4)vcvt_f32_f16(half);
}
INLINE uint32x4_t widen_bytes(const void* p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
INLINE int32x4_t widen_signed(const void* p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u64(vcreate_u64(four)))));
}

// 16 numbers, which the low 4 bits of an index look up.
typedef uint8x16x4_t Table;

INLINE Table load_table(const float* p) { return vld1q_u8_x4((const uint8_t*)p); }

template <class Index>
INLINE v4 look_up(const Table& table, Index index) {
    const uint32x4_t first = vmulq_n_u32(vandq_u32((uint32x4_t)index, vdupq_n_u32(15)), 0x04040404);
    return (v4)vqtbl4q_u8(table, (uint8x16_t)vaddq_u32(first, vdupq_n_u32(0x03020100)));
}

// 16 bytes, which a byte from 0 to 15 looks up.
typedef int8x16_t ByteTable;

INLINE ByteTable load_byte_table(const int8_t* p) { return vld1q_s8(p); }

template <class Bytes>
INLINE int8x16_t look_up_bytes(ByteTable table, Bytes at) {
    return vqtbl1q_s8(table, (uint8x16_t)at);
}
