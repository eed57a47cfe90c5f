// The rotation of NVFP4 with AVX-512: 16 blocks at a time, one a lane, from loads to codes without a way
// through memory. nvfp4.h says what is computed; here is only speed.
#pragma once
#include "avx512_amax_e2m1.h"
#include "transpose.h"

namespace QT_NAMESPACE {

constexpr int NV = 16;             // block, and size of the rotation
constexpr u32 SIGN_MASK = 0xD7E8;  // bit k: row k of the matrix is negated

// ---- rounding to the input's dtype
template <bool Nan = true>
INLINE VI to_bfloat16_bits(
    VI u) {  // bfloat16 in the high half, nearest even. Without Nan, NaN must have zeros in the low half
    VI r = (u + all(0x7fff) + ((VI)((VU)u >> 16) & all(1))) & all(i32(0xffff0000));
    if (!Nan) return r;
    return (u & all(ABS)) > all(INF_BITS) ? all(0x7fc00000) : r;
}
INLINE u16 float_to_half(float f) {
    u32 u = bits<u32>(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000u) return u16(sign | 0x7e00);
    if (a >= 0x477ff000u) return u16(sign | 0x7c00);
    if (a < 0x38800000u) {  // subnormal: the adder rounds
        u32 m = bits<u32>(bits<float>(a) + 0.5f) - bits<u32>(0.5f);
        return u16(sign | m);
    }
    return u16(sign | (a + 0xfff + (a >> 13 & 1) - 0x38000000u) >> 13);
}
INLINE Half to_half(VF v) {
#if QT_ISA == 512
    return (Half)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif QT_ISA == 2
    return (Half)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Half h;
    for (int i = 0; i < W; i++) h[i] = float_to_half(v[i]);
    return h;
#endif
}
// How values are rotated. half: they come from float16, and are rounded to it.
struct Rotation {
    bool signs, half;
};
template <class D>
INLINE VF round_to(VF v, bool half) {
    if (D::id == BF16) return (VF)to_bfloat16_bits((VI)v);
    if (half) {
        const Half h = to_half(v);
        return (VF)Float16::one((const u16*)&h);
    }
    return v;
}

#if QT_ISA == 512
// ---- rotation
// Which block each lane holds, and where the words of packed codes come from.
template <bool Pairs>
struct Lanes {
    alignas(64) i32 lane[16];
    alignas(64) u16 codes[2][32];
    constexpr Lanes() : lane(), codes() {
        for (int b = 0; b < 16; b++) {
            const int l = Pairs ? b / 8 * 8 + b % 2 * 4 + b / 2 % 4 : b;  // as blocks_in_lanes has them
            lane[b] = l;
            for (int q = 0; q < 4; q++)
                codes[b / 8][b % 8 * 4 + q] = u16(q / 2 * 32 + l / 4 * 8 + q % 2 * 4 + l % 4);
        }
    }
};
template <bool Pairs>
static constexpr Lanes<Pairs> LANES;

// 16 x 16 dwords.
INLINE void transpose_lanes(__m512i z[NV]) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; i += 4) transpose_parts<float, 4>(z + i);
    __m512i r[NV];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i64x2(z[i], z[4 + i], 0x44),
                      b = _mm512_shuffle_i64x2(z[i], z[4 + i], 0xee);
        const __m512i c = _mm512_shuffle_i64x2(z[8 + i], z[12 + i], 0x44),
                      d = _mm512_shuffle_i64x2(z[8 + i], z[12 + i], 0xee);
        r[i] = _mm512_shuffle_i64x2(a, c, 0x88);
        r[4 + i] = _mm512_shuffle_i64x2(a, c, 0xdd);
        r[8 + i] = _mm512_shuffle_i64x2(b, d, 0x88);
        r[12 + i] = _mm512_shuffle_i64x2(b, d, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < NV; i++) z[i] = r[i];
}
// v[k]: element k of each block. Bfloat16 come as pairs, in the lane order of Lanes<true>.
template <class D>
INLINE void blocks_in_lanes(const typename D::T* x, VF v[NV]) {
    if constexpr (D::pairs) {
        __m512i z[8];
        for (int i = 0; i < 8; i++) z[i] = load<__m512i>(x + 32 * i);
        transpose_parts<float, 4>(z);
        transpose_parts<float, 4>(z + 4);
        for (int i = 0; i < 8; i++) {
            const __m512i a = z[i % 4], b = z[4 + i % 4],
                          d = i < 4 ? _mm512_shuffle_i64x2(a, b, 0x88) : _mm512_shuffle_i64x2(a, b, 0xdd);
            v[2 * i] = (VF)((VI)d << 16);
            v[2 * i + 1] = (VF)((VI)d & all(i32(0xffff0000)));
        }
    } else {
        __m512i z[NV];
        for (int i = 0; i < NV; i++) z[i] = (__m512i)D::one(x + NV * i);
        transpose_lanes(z);
        for (int i = 0; i < NV; i++) v[i] = (VF)z[i];
    }
}

// s[j]: the sum over k = 0 .. 15, one by one, of v[k] with the signs of H16, those of the rows in Negated
// negated. The first 2^n terms of outputs that differ by a multiple of 2^n are the same, and added once.
// Every other sum goes to the multipliers, which round alike.
template <u32 Negated>
INLINE void add_up(const VF v[NV], VF s[NV]) {
    static_assert(Negated % 2 == 0, "the first term stays as it is");
    const __m512 one = _mm512_set1_ps(1);
    s[0] = v[0];
#pragma GCC unroll 16
    for (int k = 1; k < NV; k++) {
        int known = 8;  // the largest power of two up to k
        if (k < 8) known = 4;
        if (k < 4) known = 2;
        if (k < 2) known = 1;
#pragma GCC unroll 16
        for (int j = 2 * known - 1; j >= 0; j--) {
            const VF from = k == known ? s[j % known] : s[j];
            const bool minus = (__builtin_parity(unsigned(k & j)) != 0) != ((Negated >> k & 1) != 0);
            if (k % 2)
                s[j] = minus ? from - v[k] : from + v[k];
            else
                s[j] = (VF)(minus ? _mm512_fnmadd_ps((__m512)v[k], one, (__m512)from)
                                  : _mm512_fmadd_ps((__m512)v[k], one, (__m512)from));
        }
    }
}
// Rotated but for the factor of 1/4, and the largest magnitude of each block.
INLINE VF rotate_lanes(const VF v[NV], VF s[NV], bool signs) {
    if (signs)
        add_up<SIGN_MASK>(v, s);
    else
        add_up<0>(v, s);
    VF m[2] = {(VF)((VI)s[0] & all(ABS)), (VF)((VI)s[1] & all(ABS))};
    // Where a block has a NaN, all sums are NaN.
    for (int j = 2; j < NV; j++) m[j % 2] = (VF)_mm512_range_ps((__m512)m[j % 2], (__m512)s[j], 0x0b);
    return (VF)_mm512_range_ps((__m512)m[0], (__m512)m[1], 0x0b);
}
template <class D>
INLINE VF rounded_to(VF v, bool half = false) {  // no NaN
    if constexpr (D::id == BF16) {
        // Up from a half; a tie, whose low half is then 0, down to even.
        const __m512i up = _mm512_add_epi32((__m512i)v, _mm512_set1_epi32(0x8000));
        const __m512i r = _mm512_and_si512(up, _mm512_set1_epi32(i32(0xffff0000)));
        return (VF)_mm512_mask_and_epi32(r, _mm512_testn_epi32_mask(up, _mm512_set1_epi32(0xffff)), r,
                                         _mm512_set1_epi32(i32(0xfffe0000)));
    }
    return round_to<D>(v, half);
}
// Whether bfloat16 have values, other than 0, so small that a rotated one might be subnormal: that counts as
// 0.
INLINE bool has_tiny(const u16* x) {
    __mmask32 small = 0;
    for (int i = 0; i < 8; i++)
        small |= _mm512_testn_epi16_mask(load<__m512i>(x + 32 * i), _mm512_set1_epi16(0x6000));
    if (!small) return false;
    __m512i least = _mm512_set1_epi16(-1);
    for (int i = 0; i < 8; i++) {
        const __m512i w = load<__m512i>(x + 32 * i);
        least = _mm512_min_epu16(least, _mm512_sub_epi16(_mm512_add_epi16(w, w), _mm512_set1_epi16(1)));
    }
    return _mm512_cmplt_epu16_mask(least, _mm512_set1_epi16(27 << 8)) != 0;
}
// W blocks rotated and rounded to their dtype, in the lane order of Lanes<D::pairs>, and their maxima; false
// where they are not all finite, or too small. Bfloat16, of which then none is subnormal, are not multiplied
// by AFTER<D> yet.
template <class D>
constexpr float AFTER = D::id == BF16 ? 0.25f : 1.0f;
template <class D>
INLINE bool rotated_lanes(const typename D::T* x, Rotation how, VF s[NV], VI& amax) {
    if constexpr (D::id == BF16) {
        if (has_tiny(x)) return false;
    }
    VF v[NV];
    blocks_in_lanes<D>(x, v);
    for (int k = 0; D::id != BF16 && k < NV; k++) v[k] = v[k] * all(0.25f);
    const VF top = rounded_to<D>(rotate_lanes(v, s, how.signs), how.half);
    amax = (VI)(top * all(AFTER<D>));
    if (any(amax >= all(INF_BITS))) return false;
    for (int j = 0; j < NV; j++) s[j] = rounded_to<D>(s[j], how.half);
    return true;
}
// Blocks one behind the other.
template <bool Pairs>
INLINE void blocks_of_lanes(const VF s[NV], float factor, float* y) {
    __m512i z[NV];
    for (int j = 0; j < NV; j++) z[j] = (__m512i)(s[j] * all(factor));
    transpose_lanes(z);
    for (int b = 0; b < NV; b++) store(y + b * NV, z[LANES<Pairs>.lane[b]]);
}
// Packed codes of W blocks of which none is far beyond the grid. f: four times the factors.
template <bool Pairs>
INLINE void encode_lanes(const VF s[NV], VF f, u8* out) {
    const __m512i low = _mm512_set1_epi32(0xff);
    __m512i pairs[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        __m512i w = (__m512i)e2m1_index<true>(s[4 * g + 3] * f);
#pragma GCC unroll 3
        for (int j = 2; j >= 0; j--)
            w = _mm512_ternarylogic_epi32(_mm512_slli_epi32(w, 8),
                                          (__m512i)e2m1_index<true>(s[4 * g + j] * f), low, 0xf8);
        pairs[g] = _mm512_maddubs_epi16((__m512i)e2m1_codes(w), _mm512_set1_epi16(0x1001));
    }
    const __m512i a = _mm512_packus_epi16(pairs[0], pairs[1]), b = _mm512_packus_epi16(pairs[2], pairs[3]);
    for (int h = 0; h < 2; h++)
        store(out + 64 * h, _mm512_permutex2var_epi16(a, _mm512_load_si512(LANES<Pairs>.codes[h]), b));
}
INLINE bool sum_stays_below(VF sum, i32 top) {
    // The sums are rounded, and so are quarters of subnormal numbers.
    const VF bound = sum * all(0.25f + 0x1p-18f) + all(0x1p-140f);
    return !any(~(VI)(bound <= (VF)all(top)));
}
// Whether no rotated value of W blocks exceeds `top`: none does where a quarter of the sum of their
// magnitudes does not.
template <class D>
INLINE bool stays_below(const typename D::T* x, i32 top) {
    VF p[NV];
    if constexpr (D::pairs) {
        __m512i q[4];
        for (int i = 0; i < 4; i++) {
            VF z[2];
            for (int h = 0; h < 2; h++) {
                const VI w = load<VI>(x + 32 * (2 * i + h));
                z[h] = (VF)(w << 16 & all(ABS)) + (VF)(w & all(0x7fff0000));
            }
            q[i] = (__m512i)((VF)_mm512_shuffle_f32x4((__m512)z[0], (__m512)z[1], 0x88) +
                             (VF)_mm512_shuffle_f32x4((__m512)z[0], (__m512)z[1], 0xdd));
        }
        for (int i = 0; i < 4; i++) p[i] = (VF)q[i];
    } else {
        // Sums of four lanes each, of four blocks.
        for (int i = 0; i < 4; i++) {
            __m512 z[4];
            for (int h = 0; h < 4; h++) z[h] = (__m512)(D::one(x + NV * (4 * i + h)) & all(ABS));
            const VF a =
                (VF)_mm512_shuffle_f32x4(z[0], z[1], 0x88) + (VF)_mm512_shuffle_f32x4(z[0], z[1], 0xdd);
            const VF b =
                (VF)_mm512_shuffle_f32x4(z[2], z[3], 0x88) + (VF)_mm512_shuffle_f32x4(z[2], z[3], 0xdd);
            p[i] = (VF)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88) +
                   (VF)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd);
        }
    }
    VF q[2];
    for (int i = 0; i < 2; i++)
        q[i] = (VF)_mm512_unpacklo_ps((__m512)p[2 * i], (__m512)p[2 * i + 1]) +
               (VF)_mm512_unpackhi_ps((__m512)p[2 * i], (__m512)p[2 * i + 1]);
    const VF sum = (VF)_mm512_unpacklo_pd((__m512d)q[0], (__m512d)q[1]) +
                   (VF)_mm512_unpackhi_pd((__m512d)q[0], (__m512d)q[1]);
    return sum_stays_below(sum, top);
}
#endif

}  // namespace QT_NAMESPACE
