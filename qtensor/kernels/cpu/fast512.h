// Shorter ways to the same numbers with AVX-512: maxima of bfloat16 in words, E2M1 by table. simd.h and elements.h say what they
// compute; here is only speed.
#pragma once
#include "bytes512.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
struct Order {
    alignas(64) u8 e2m1[128], nibble[64];
    alignas(64) u16 high[32], block[32];
    constexpr Order() : e2m1(), nibble(), high(), block() {
        for (int i = 0; i < 32; i++) high[i] = u16(2 * i + 1);
        for (int i = 0; i < 16; i++) block[2 * i] = u16((i & 3) * 8 + (i >> 2));
        for (int i = 0; i < 8; i++) nibble[8 * i] = u8(8 * i), nibble[8 * i + 4] = u8(8 * i + 4);
        // floor(4y) + ceil(4y), modulo 128, tells a value of E2M1 from the ties: it is odd strictly between quarters.
        constexpr int bound[] = {2, 6, 10, 14, 20, 28, 40};  // 8 * the midpoints 0.25, 0.75, ... 5
        for (int i = 0; i < 128; i++) {
            const int k = i < 64 ? i : i - 128, a = k < 0 ? -k : k;
            int code = 0;
            // A tie goes to the even code.
            for (int c = 0; c < 7; c++) code += a > bound[c] || (a == bound[c] && c % 2);
            e2m1[i] = u8(code | (k < 0 ? 8 : 0));
        }
    }
};
static constexpr Order ORDER;

// ---- maxima of 16 blocks of bfloat16, by words and without a horizontal maximum ----------------------------------------------
template <int B>
INLINE __m512i folded(const u16* x) {
    __m512i m = _mm512_and_si512(load<__m512i>(x), _mm512_set1_epi16(0x7fff));
    for (int i = 32; i < B; i += 32)
        m = _mm512_max_epu16(m, _mm512_and_si512(load<__m512i>(x + i), _mm512_set1_epi16(0x7fff)));
    return m;
}
template <int B>
INLINE VI maxima_of_pairs(const u16* x, i64 stride = B) {
    __m512i z[8], p[4], q[2];  // each z: 16 words of one block, then 16 of the next
    for (int i = 0; i < 8; i++) {
        const __m512i a = folded<B>(x + 2 * i * stride);
        if (B == 16) {
            z[i] = a;
        } else {
            const __m512i b = folded<B>(x + (2 * i + 1) * stride);
            z[i] = _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
        }
    }
    for (int i = 0; i < 4; i++)
        p[i] = _mm512_max_epu16(_mm512_shuffle_i64x2(z[2 * i], z[2 * i + 1], 0x88), _mm512_shuffle_i64x2(z[2 * i], z[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; i++)
        q[i] = _mm512_max_epu16(_mm512_unpacklo_epi16(p[2 * i], p[2 * i + 1]), _mm512_unpackhi_epi16(p[2 * i], p[2 * i + 1]));
    __m512i r = _mm512_max_epu16(_mm512_unpacklo_epi32(q[0], q[1]), _mm512_unpackhi_epi32(q[0], q[1]));
    r = _mm512_max_epu16(r, _mm512_shuffle_epi32(r, _MM_PERM_ENUM(0x4e)));
    return (VI)_mm512_slli_epi32(_mm512_maskz_permutexvar_epi16(0x55555555u, _mm512_load_si512(ORDER.block), r), 16);
}

// ---- E2M1 by table --------------------------------------------------------------------------------------------------------
// Without -0; y has no NaN. The low 7 bits count. Small: y is 4 times the value, at most 30 in magnitude, and needs no clamp.
template <bool Small>
INLINE VI e2m1_index(VF y) {
    __m512 v = (__m512)y;
    if (!Small) {
        v = _mm512_max_ps(_mm512_set1_ps(-6), _mm512_min_ps(v, _mm512_set1_ps(6)));
        v = _mm512_mul_ps(v, _mm512_set1_ps(4));
    }
    __m512i down = _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512i up = _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    return (VI)_mm512_add_epi32(down, up);
}
// The low bytes of four vectors, as pack() has them.
template <bool Pairs>
INLINE VB pack_bytes(const VI c[4]) {
    const __m512i low = _mm512_set1_epi32(0xff), even = _mm512_load_si512(BYTES.low);
    if (!Pairs) {
        const __m512i a = _mm512_permutex2var_epi16((__m512i)c[0], even, (__m512i)c[1]);
        const __m512i b = _mm512_permutex2var_epi16((__m512i)c[2], even, (__m512i)c[3]);
        return (VB)_mm512_permutex2var_epi8(a, _mm512_load_si512(BYTES.even), b);
    }
    const __m512i w0 = _mm512_ternarylogic_epi32(_mm512_slli_epi32((__m512i)c[1], 8), (__m512i)c[0], low, 0xf8);
    const __m512i w1 = _mm512_ternarylogic_epi32(_mm512_slli_epi32((__m512i)c[3], 8), (__m512i)c[2], low, 0xf8);
    return (VB)_mm512_permutex2var_epi16(w0, even, w1);
}
// 128 codes to 64 bytes.
INLINE VB nibbles_of(VB a, VB b) {
    const __m512i k = _mm512_set1_epi16(0x1001);
    return (VB)_mm512_permutex2var_epi8(_mm512_maddubs_epi16((__m512i)a, k), _mm512_load_si512(BYTES.even), _mm512_maddubs_epi16((__m512i)b, k));
}
// Which of 16 blocks of 16 elements each lane belongs to: lanes of vector j of group g.
template <class D>
struct Spread {
    alignas(64) i32 block[4][4][16];
    constexpr Spread() : block() {
        for (int g = 0; g < 4; g++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 16; i++) block[g][j][i] = (g * GROUP + position<D>(j, i)) / 16;
    }
};
template <class D>
static constexpr Spread<D> SPREAD;
INLINE VB e2m1_codes(VB index) {
    return (VB)_mm512_permutex2var_epi8(_mm512_load_si512(ORDER.e2m1), (__m512i)index, _mm512_load_si512(ORDER.e2m1 + 64));
}
// The 16 values of 8 bytes.
INLINE VF e2m1_values(const u8* p) {
    static const float grid[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    // Only the low four bits of an index count.
    __m512i nibbles = _mm512_multishift_epi64_epi8(_mm512_load_si512(ORDER.nibble), _mm512_set1_epi64(load<i64>(p)));
    return (VF)_mm512_permutexvar_ps(nibbles, _mm512_loadu_ps(grid));
}
// The high halves of 32 dwords.
INLINE VB high_halves(VI a, VI b) { return (VB)_mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(ORDER.high), (__m512i)b); }
#endif

}  // namespace QT_NAMESPACE
