// Operations of linear_groups_body.h with AVX-512 VNNI.
// Sums of codes minus 8, which are looked up in a register.
struct Looked : Float32 {
    INLINE vf unpack(vi codes, int word) {
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return (vf)_mm512_permutexvar_ps((__m512i)((vu)codes >> 4 * word), table);
    }
    INLINE vf value(vf sum, vi zero, const char* inputs) { return Float32::value(sum, zero - 8, inputs); }
};

struct Quads : Integers {
    INLINE void add(vi& sum, vi inputs, vi columns) { sum = (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)columns, (__m512i)inputs); }
};
