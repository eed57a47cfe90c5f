// Element codes: float lanes to codes and back (docs/numerics.md).
#pragma once
#include "simd.h"

namespace QT_NAMESPACE {

template <int Exponent, int Mantissa, u32 MaxBits, bool HasNan>
struct ElementFormat {
    static constexpr int mantissa = Mantissa;
    static constexpr int width = 1 + Exponent + Mantissa;
    static constexpr i32 min_exponent = 127 + 2 - (1 << (Exponent - 1));  // biased
    static constexpr i32 max_bits = i32(MaxBits);                         // of the largest finite value
    static constexpr bool has_nan = HasNan;
};
using FE4M3 = ElementFormat<4, 3, 0x43e00000, true>;
using FE5M2 = ElementFormat<5, 2, 0x47600000, true>;
using FE2M3 = ElementFormat<2, 3, 0x40f00000, false>;
using FE3M2 = ElementFormat<3, 2, 0x41e00000, false>;
using FE2M1 = ElementFormat<2, 1, 0x40c00000, false>;

// Codes of y without the sign. Adding 2^(e + 23 - mantissa bits) makes the float adder round to nearest even;
// the smallest exponent makes subnormals the same case. a = |y| as bits, at most the largest finite value.
template <class E>
INLINE VI magnitude_code(VI a) {
    constexpr int shift = 23 - E::mantissa;
    VI e = max(a & all(INF_BITS), all(E::min_exponent << 23));
    VI c = e + all(shift << 23);
    VI sum = (VI)((VF)a + (VF)c);
    return sum - c + ((VI)((VU)e >> shift) - all(E::min_exponent << E::mantissa));
}
// Unsigned: 0 has no sign (NVFP4).
template <class E, bool Unsigned>
INLINE VI sign_code(VF y) {
    constexpr i32 top = 1 << (E::width - 1);
    if (Unsigned) return (VI)(y < VF{}) & all(top);
    return (VI)((VU)(VI)y >> (32 - E::width)) & all(top);
}
// Saturating. NaN: with Safe the code 0x7F (FP8) or 0, else anything.
template <class E, bool Safe, bool Unsigned = false>
INLINE VI encode(VF y) {
    VI a = (VI)y & all(ABS);
    VI q = magnitude_code<E>(min(a, all(E::max_bits))) | sign_code<E, Unsigned>(y);
    if (Safe) q = a > all(INF_BITS) ? all(E::has_nan ? 0x7f : 0) : q;
    return q;
}
INLINE i32 encode_e4m3(float y) {  // y >= 0
    constexpr int shift = 20;
    i32 a = bits<i32>(y);
    if (a > FE4M3::max_bits) a = FE4M3::max_bits;
    i32 e = a & INF_BITS;
    if (e < FE4M3::min_exponent << 23) e = FE4M3::min_exponent << 23;
    i32 c = e + (shift << 23);
    return bits<i32>(bits<float>(a) + bits<float>(c)) - c + (e >> shift) - (FE4M3::min_exponent << 3);
}

// ---- decode
// Every value of every element is a bfloat16, so a code is decoded by looking up 16 bits.
template <class E>
constexpr u16 bfloat16_of(u32 code) {
    u32 sign = (code >> (E::width - 1) & 1) << 15, m = code & ((1u << (E::width - 1)) - 1);
    u32 field = m >> E::mantissa, fraction = m & ((1u << E::mantissa) - 1);
    if (E::has_nan && (E::mantissa == 3 ? m == 0x7f : m >= 0x7c))
        return u16(E::mantissa == 2 && m == 0x7c ? sign | 0x7f80 : 0x7fc0);
    if (field) return u16(sign | (field - 1 + E::min_exponent) << 7 | fraction << (7 - E::mantissa));
    if (!fraction) return u16(sign);
    i32 e = E::min_exponent;
    while (!(fraction >> E::mantissa)) {
        fraction <<= 1;
        e--;
    }
    return u16(sign | u32(e) << 7 | (fraction & ((1u << E::mantissa) - 1)) << (7 - E::mantissa));
}
template <class E>
struct Table {
    alignas(64) u8 low[256], high[256];
    alignas(64) float value[256];
    constexpr Table() : low(), high(), value() {}
};
template <class E>
static const Table<E>& table() {
    static const Table<E> built = [] {
        Table<E> t;
        for (u32 c = 0; c < 256; c++) {
            u16 v = bfloat16_of<E>(c & ((1u << E::width) - 1));
            t.low[c] = u8(v);
            t.high[c] = u8(v >> 8);
            t.value[c] = bits<float>(u32(v) << 16);
        }
        return t;
    }();
    return built;
}

// GROUP codes, one a byte, to bfloat16 words: words[h] holds elements h * 2W ... in order.
template <class E>
INLINE void words(VB codes, const Table<E>& t, VH out[2]) {
#if QT_ISA == 512
    // The unpacks below work within 128 bits; this order makes their results those of 32 consecutive codes.
    __m512i c = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), (__m512i)codes);
    __m512i lo, hi;
    if (E::width == 8) {
        __m512i sign = _mm512_and_si512(c, _mm512_set1_epi8(char(0x80)));
        lo = _mm512_permutex2var_epi8(_mm512_load_si512(t.low), c, _mm512_load_si512(t.low + 64));
        hi = _mm512_permutex2var_epi8(_mm512_load_si512(t.high), c, _mm512_load_si512(t.high + 64));
        hi = _mm512_or_si512(hi, sign);
    } else {
        lo = _mm512_permutexvar_epi8(c, _mm512_load_si512(t.low));
        hi = _mm512_permutexvar_epi8(c, _mm512_load_si512(t.high));
    }
    out[0] = (VH)_mm512_unpacklo_epi8(lo, hi);
    out[1] = (VH)_mm512_unpackhi_epi8(lo, hi);
#elif QT_ISA == 2
    __m256i c = _mm256_permute4x64_epi64((__m256i)codes, 0xd8);
    __m256i nibble = _mm256_set1_epi8(15);
    if (E::width == 4) {
        __m256i l = _mm256_broadcastsi128_si256(load<__m128i>(t.low)),
                h = _mm256_broadcastsi128_si256(load<__m128i>(t.high));
        __m256i lo = _mm256_shuffle_epi8(l, c), hi = _mm256_shuffle_epi8(h, c);
        out[0] = (VH)_mm256_unpacklo_epi8(lo, hi);
        out[1] = (VH)_mm256_unpackhi_epi8(lo, hi);
        return;
    }
    // Subnormals (magnitudes below 8) from a table of 16, the others by moving the exponent into its place.
    __m256i zero = _mm256_setzero_si256();
    __m256i l = _mm256_broadcastsi128_si256(load<__m128i>(t.low)),
            h = _mm256_broadcastsi128_si256(load<__m128i>(t.high));
    __m256i small_lo = _mm256_shuffle_epi8(l, _mm256_and_si256(c, nibble));
    __m256i small_hi = _mm256_shuffle_epi8(h, _mm256_and_si256(c, nibble));
    for (int k = 0; k < 2; k++) {
        __m256i w = k ? _mm256_unpackhi_epi8(c, zero) : _mm256_unpacklo_epi8(c, zero);
        __m256i small =
            k ? _mm256_unpackhi_epi8(small_lo, small_hi) : _mm256_unpacklo_epi8(small_lo, small_hi);
        constexpr int top = 1 << (E::width - 1);
        __m256i m = _mm256_and_si256(w, _mm256_set1_epi16(top - 1));
        __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(top)), 16 - E::width);
        __m256i big = _mm256_add_epi16(_mm256_slli_epi16(m, 7 - E::mantissa),
                                       _mm256_set1_epi16(short((E::min_exponent - 1) << 7)));
        __m256i v = _mm256_blendv_epi8(big, small, _mm256_cmpgt_epi16(_mm256_set1_epi16(16), m));
        v = _mm256_or_si256(v, sign);
        if (E::has_nan) {
            __m256i nan = _mm256_cmpgt_epi16(m, _mm256_set1_epi16(E::mantissa == 3 ? 0x7e : 0x7c));
            v = _mm256_blendv_epi8(v, _mm256_set1_epi16(0x7fc0), nan);
            if (E::mantissa == 2) {
                __m256i inf = _mm256_cmpeq_epi16(m, _mm256_set1_epi16(0x7c));
                v = _mm256_blendv_epi8(v, _mm256_or_si256(_mm256_set1_epi16(0x7f80), sign), inf);
            }
        }
        out[k] = (VH)v;
    }
#else
    for (int i = 0; i < GROUP; i++)
        out[i / (2 * W)][i % (2 * W)] = u16(t.low[codes[i]] | t.high[codes[i]] << 8);
#endif
}
// GROUP / 2 bytes to GROUP codes.
INLINE VB load_nibbles(const u8* p) {
#if QT_ISA == 512
    __m512i w = _mm512_cvtepu8_epi16(load<__m256i>(p));
    w = _mm512_or_si512(w, _mm512_slli_epi16(w, 4));
    return (VB)_mm512_and_si512(w, _mm512_set1_epi8(15));
#elif QT_ISA == 2
    __m256i w = _mm256_cvtepu8_epi16(load<__m128i>(p));
    w = _mm256_or_si256(w, _mm256_slli_epi16(w, 4));
    return (VB)_mm256_and_si256(w, _mm256_set1_epi8(15));
#else
    VB c;
    for (int i = 0; i < GROUP / 2; i++) {
        c[2 * i] = p[i] & 15;
        c[2 * i + 1] = p[i] >> 4;
    }
    return c;
#endif
}
// GROUP * 3 / 4 bytes to GROUP 6-bit codes.
INLINE VB load_quads(const u8* p) {
#if QT_ISA == 512
    static const struct Spread {
        alignas(64) u8 at[64];
        constexpr Spread() : at() {
            for (int i = 0; i < 64; i++) at[i] = u8(i / 4 * 3 + (i % 4 < 3 ? i % 4 : 2));
        }
    } spread;
    __m512i w =
        _mm512_permutexvar_epi8(_mm512_load_si512(spread.at), _mm512_maskz_loadu_epi8(0xffffffffffffull, p));
    // Each dword holds 24 bits in its low three bytes; every byte of it picks 6 of them by its own shift.
    __m512i at = _mm512_set1_epi64(0x322c2620120c0600);  // bits 0, 6, 12, 18 and 32, 38, 44, 50
    return (VB)_mm512_and_si512(_mm512_multishift_epi64_epi8(at, w), _mm512_set1_epi8(0x3f));
#elif QT_ISA == 2
    // Bytes 0 .. 11 and 12 .. 23, three to a dword; the second load begins 8 bytes on, so that it ends with
    // the codes.
    const __m256i loaded =
        _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(p)), load<__m128i>(p + 8), 1);
    const __m256i spread = _mm256_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1, 4, 5, 6, -1,
                                            7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1);
    const __m256i w = _mm256_shuffle_epi8(loaded, spread);
    __m256i r = _mm256_and_si256(w, _mm256_set1_epi32(0x3f));
    r = _mm256_or_si256(r, _mm256_and_si256(_mm256_slli_epi32(w, 2), _mm256_set1_epi32(0x3f00)));
    r = _mm256_or_si256(r, _mm256_and_si256(_mm256_slli_epi32(w, 4), _mm256_set1_epi32(0x3f0000)));
    return (VB)_mm256_or_si256(r, _mm256_and_si256(_mm256_slli_epi32(w, 6), _mm256_set1_epi32(0x3f000000)));
#else
    u8 t[GROUP];
    for (int i = 0; i < GROUP / 4; i++) {
        u32 w = p[3 * i] | u32(p[3 * i + 1]) << 8 | u32(p[3 * i + 2]) << 16;
        for (int k = 0; k < 4; k++) t[4 * i + k] = u8(w >> 6 * k & 63);
    }
    return load<VB>(t);
#endif
}

}  // namespace QT_NAMESPACE
