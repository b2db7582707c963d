// Operations of products.h and linear_int4_body.h with registers of Arm's NEON.
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
