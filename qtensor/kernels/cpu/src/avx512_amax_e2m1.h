// Shorter ways to the same numbers with AVX-512: maxima of bfloat16 in words, E2M1 by table. simd.h and
// element_codes.h say what they compute; here is only speed.
#pragma once
#include "avx512_byte_codes.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
struct Order {
    alignas(64) u8 e2m1[128], nibble[64];
    alignas(64) u16 high[32], block[32];
    constexpr Order() : e2m1(), nibble(), high(), block() {
        for (int i = 0; i < 32; i++) high[i] = u16(2 * i + 1);
        for (int i = 0; i < 16; i++) block[2 * i] = u16((i & 3) * 8 + (i >> 2));
        for (int i = 0; i < 8; i++) {
            nibble[8 * i] = u8(8 * i);
            nibble[8 * i + 4] = u8(8 * i + 4);
        }
        // floor(4y) + ceil(4y), modulo 128, tells a value of E2M1 from the ties: it is odd strictly between
        // quarters.
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

// ---- maxima of 16 blocks of bfloat16, by words and without a horizontal maximum
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
        p[i] = _mm512_max_epu16(_mm512_shuffle_i64x2(z[2 * i], z[2 * i + 1], 0x88),
                                _mm512_shuffle_i64x2(z[2 * i], z[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; i++)
        q[i] = _mm512_max_epu16(_mm512_unpacklo_epi16(p[2 * i], p[2 * i + 1]),
                                _mm512_unpackhi_epi16(p[2 * i], p[2 * i + 1]));
    __m512i r = _mm512_max_epu16(_mm512_unpacklo_epi32(q[0], q[1]), _mm512_unpackhi_epi32(q[0], q[1]));
    r = _mm512_max_epu16(r, _mm512_shuffle_epi32(r, _MM_PERM_ENUM(0x4e)));
    return (VI)_mm512_slli_epi32(
        _mm512_maskz_permutexvar_epi16(0x55555555u, _mm512_load_si512(ORDER.block), r), 16);
}

// ---- E2M1 by table
// Without -0; y has no NaN. The low 7 bits count. Small: y is 4 times the value, at most 30 in magnitude, and
// needs no clamp.
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
// Four vectors of signed bytes, not in order yet.
template <bool Pairs>
INLINE __m512i packed_bytes(const VI c[4]) {
    const __m512i* z = (const __m512i*)c;
    if (!Pairs) return _mm512_packs_epi16(_mm512_packs_epi32(z[0], z[1]), _mm512_packs_epi32(z[2], z[3]));
    const __m512i even = _mm512_packs_epi32(z[0], z[2]), odd = _mm512_packs_epi32(z[1], z[3]);
    return _mm512_ternarylogic_epi32(_mm512_slli_epi16(odd, 8), even, _mm512_set1_epi16(0xff), 0xf8);
}
// 128 codes, not in order, to 64 bytes, in order.
template <bool Pairs>
INLINE VB nibbles_of(VB a, VB b) {
    const __m512i k = _mm512_set1_epi16(0x1001);
    return (VB)_mm512_permutexvar_epi16(
        _mm512_load_si512(PACKED<Pairs>.nibbles),
        _mm512_packus_epi16(_mm512_maddubs_epi16((__m512i)a, k), _mm512_maddubs_epi16((__m512i)b, k)));
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
INLINE VB e2m1_codes(__m512i index) {
    return (VB)_mm512_permutex2var_epi8(_mm512_load_si512(ORDER.e2m1), index,
                                        _mm512_load_si512(ORDER.e2m1 + 64));
}
// The same with the signs of `sign`.
INLINE VB e2m1_codes(__m512i index, __m512i sign) {
    const __m512i code = _mm512_permutexvar_epi8(_mm512_abs_epi8(index), _mm512_load_si512(ORDER.e2m1));
    return (VB)_mm512_ternarylogic_epi32(code, _mm512_srli_epi16(sign, 4), bytes_of(8), 0xf8);
}
// The 16 values of 8 bytes.
INLINE VF e2m1_values(const u8* p) {
    static const float grid[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    // Only the low four bits of an index count.
    __m512i nibbles =
        _mm512_multishift_epi64_epi8(_mm512_load_si512(ORDER.nibble), _mm512_set1_epi64(load<i64>(p)));
    return (VF)_mm512_permutexvar_ps(nibbles, _mm512_loadu_ps(grid));
}

// Blocks of zeros, whose factors are extreme, have the same codes with any factor.
INLINE VF useful_factor(VI amax, VF encode) { return amax == all(0) ? all(1.0f) : encode; }

// ---- E2M1 of products, by quarters
// Whether four times these factors serve quarters_group. Signed: zeros keep their signs, as in MX, whose
// factors leave no value beyond 8.
template <class D, bool Signed>
INLINE bool fits_quarters(VI amax, VF encode) {
    if (Signed) return !any((VI)(encode > all(0x1p120f)));
    // Below it a product could underflow to -0, whose sign is dropped, where four times it would not.
    const VF least = all(D::id == F32 ? 1.0f : 0x1p-14f);
    return !any(
        ~((VI)((VF)amax * encode <= all(7.5f)) & (VI)(encode >= least) & (VI)(encode <= all(0x1p120f))));
}
// GROUP elements of which none is far beyond the grid, in the order of packed_bytes(). f: four times the
// factors.
template <class D, bool Signed>
INLINE VB quarters_group(const typename D::T* x, const VF f[4]) {
    static_assert(!Signed || !D::pairs,
                  "a dword that saturates keeps its sign, the lower of a pair does not");
    VI v[4], c[4];
    D::group(x, v);
    for (int j = 0; j < 4; j++) c[j] = e2m1_index<true>((VF)v[j] * f[j]);
    const __m512i index = packed_bytes<D::pairs>(c);
    return Signed ? e2m1_codes(index, packed_bytes<D::pairs>(v)) : e2m1_codes(index);
}

// ---- stochastic rounding of NVFP4
// The grid of
// E2M1 is stretched until its codes lie 256 apart: a value's place is its code and, behind it, how much of
// the way to the next one it has gone. A random byte is added, and the code is cut off.
template <class D>
INLINE bool fits_places(VI amax, VF encode) {
    const VF least = all(
        D::id == F32 ? 1.0f : 0x1p-14f);  // below it a product could underflow to -0, whose sign is dropped
    return !any(
        ~((VI)((VF)amax * encode <= all(7.5f)) & (VI)(encode >= least) & (VI)(encode <= all(0x1p100f))));
}
// Codes of 32 elements in the high bytes of words. f: 512 times the factors of even and odd elements, or of
// each half. Below 0.25, sums that round to 0.5 count as such: the random byte is added to a float32 there.
template <class D>
INLINE __m512i stochastic_codes(const typename D::T* x, __m512 f0, __m512 f1, const u8* random) {
    // Just below 2^-17, which would be half a unit of the sums from 0.25 on.
    const __m512 rounded = _mm512_set1_ps(0x1.fffffep-18f);
    __m512i place;
    __mmask32 negative;
    if constexpr (D::pairs) {
        const __m512i w = load<__m512i>(x), a = _mm512_and_si512(w, _mm512_set1_epi16(0x7fff)),
                      high = _mm512_set1_epi32(i32(0xffff0000));
        const __m512 even = _mm512_mul_ps((__m512)_mm512_slli_epi32(a, 16), f0);
        const __m512 odd =
            _mm512_mul_ps((__m512)_mm512_and_si512(a, high), _mm512_mul_ps(f1, _mm512_set1_ps(65536)));
        const __m512i high_place = _mm512_cvttps_epi32(_mm512_add_ps(odd, _mm512_set1_ps(0x1.fffffep-2f)));
        place = _mm512_ternarylogic_epi32(_mm512_cvttps_epi32(_mm512_add_ps(even, rounded)), high_place, high,
                                          0xf8);
        negative = _mm512_cmpgt_epu16_mask(w, _mm512_set1_epi16(short(0x8000)));
    } else {
        const __m512 v0 = (__m512)D::one(x), v1 = (__m512)D::one(x + W);
        const __m512i p0 = _mm512_cvttps_epi32(_mm512_add_ps(_mm512_mul_ps(_mm512_abs_ps(v0), f0), rounded));
        const __m512i p1 = _mm512_cvttps_epi32(_mm512_add_ps(_mm512_mul_ps(_mm512_abs_ps(v1), f1), rounded));
        place = _mm512_permutex2var_epi16(p0, _mm512_load_si512(BYTES.low), p1);
        const __m512 zero = _mm512_setzero_ps();
        negative = __mmask32(_mm512_cmp_ps_mask(v0, zero, _CMP_LT_OQ)) |
                   __mmask32(_mm512_cmp_ps_mask(v1, zero, _CMP_LT_OQ)) << 16;
    }
    // 512 a up to 2, from there on 256 a + 512, from 4 on 128 a + 1024, and no more than 6: the least of all.
    const __m512i from2 = _mm512_avg_epu16(place, _mm512_set1_epi16(1023)),
                  from4 = _mm512_avg_epu16(from2, _mm512_set1_epi16(1535));
    place =
        _mm512_min_epu16(_mm512_min_epu16(place, from2), _mm512_min_epu16(from4, _mm512_set1_epi16(7 << 8)));
    place = _mm512_add_epi16(place, _mm512_cvtepu8_epi16(load<__m256i>(random)));
    return _mm512_mask_add_epi16(place, negative, place, _mm512_set1_epi16(8 << 8));
}
// 16 blocks, packed, two a byte.
template <class D>
INLINE void stochastic_strip(const typename D::T* x, VF encode, const u8* random, u8* out) {
    const __m512 factors = (__m512)(encode * all(512.0f));
    const auto of = [&](int g, int j) {
        return _mm512_permutexvar_ps(_mm512_load_si512(SPREAD<D>.block[g][j]), factors);
    };
    for (int g = 0; g < 4; g += 2) {
        __m512i codes[2];
        for (int h = 0; h < 2; h++) {
            const int at = (g + h) * GROUP;
            const __m512i a = stochastic_codes<D>(x + at, of(g + h, 0), of(g + h, 1), random + at);
            const __m512i b = stochastic_codes<D>(x + at + 32, of(g + h, 2), of(g + h, 3), random + at + 32);
            codes[h] = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        }
        store(out + g * GROUP / 2, nibbles_of<true>((VB)codes[0], (VB)codes[1]));
    }
}
// The high halves of 32 dwords.
INLINE VB high_halves(VI a, VI b) {
    return (VB)_mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(ORDER.high), (__m512i)b);
}
#endif

}  // namespace QT_NAMESPACE
