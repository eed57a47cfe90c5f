// Codes to bfloat16 and float16 with AVX-512, without arithmetic on the values: products with one factor stand in a table, powers
// of two are added to exponents. dequantize.h says what is computed; here is only speed.
#pragma once
#include "nvfp4.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
template <class D>
INLINE VI to_words(VF v) {  // in the low halves
    if constexpr (D::id == BF16) return (VI)((VU)to_bfloat16_bits((VI)v) >> 16);
    return (VI)_mm512_cvtepu16_epi32((__m256i)to_half(v));
}
// The words of 64 codes that tables of low and high bytes hold, in order: the unpacks work within 128 bits.
INLINE void words_by(__m512i c, const u8 low[128], const u8 high[128], __m512i out[2]) {
    c = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), c);
    const __m512i lo = _mm512_permutex2var_epi8(_mm512_load_si512(low), c, _mm512_load_si512(low + 64));
    const __m512i hi = _mm512_permutex2var_epi8(_mm512_load_si512(high), c, _mm512_load_si512(high + 64));
    // A code of 8 bits has its sign where the word's high byte has it. Not "or": the factor may be negative.
    const __m512i turned = _mm512_ternarylogic_epi32(hi, c, bytes_of(0x80), 0x78);
    out[0] = _mm512_unpacklo_epi8(lo, turned), out[1] = _mm512_unpackhi_epi8(lo, turned);
}

// Values of 8-bit codes times one factor, rounded to D.
template <class D, class E>
struct ValueTable {
    alignas(64) u8 low[128], high[128];
    explicit ValueTable(float factor) {
        for (int c = 0; c < 128; c += W) {
            const VI w = to_words<D>(load<VF>(table<E>().value + c) * all(factor));
            narrow(low + c, w), narrow(high + c, w >> 8);
        }
    }
};
template <class D, class E>
static void decode_by_table(const u8* codes, i64 n, const ValueTable<D, E>& t, u16* y, bool stream) {
    for (i64 i = 0; i < n; i += 64) {
        __builtin_prefetch(codes + i + AHEAD);
        const __mmask64 real = n - i < 64 ? (1ull << (n - i)) - 1 : ~0ull;
        __m512i w[2];
        words_by(_mm512_maskz_loadu_epi8(real, codes + i), t.low, t.high, w);
        if (n - i >= 64) {
            store_bytes((u8*)(y + i), (VB)w[0], stream), store_bytes((u8*)(y + i + 32), (VB)w[1], stream);
        } else {
            _mm512_mask_storeu_epi16(y + i, u32(real), w[0]), _mm512_mask_storeu_epi16(y + i + 32, u32(real >> 32), w[1]);
        }
    }
}

// Whether 2^k keeps every value of an element normal, where the bits of factors are those of positive powers of two.
template <class E>
INLINE bool fits_exponents(VI factor) {
    const VI least = all((1 + 127 - (E::min_exponent - E::mantissa)) << 23), most = all((254 + 127 - (E::max_bits >> 23)) << 23);
    return !any((VI)(factor < least) | (VI)(factor > most) | (VI)((factor & all(0x7fffff)) != all(0)));
}
INLINE VI exponent_steps(VI factor) { return (factor >> 16) - all(127 << 7); }  // what is added to a bfloat16, in the low halves
// Words times powers of two; zeros, infinities and NaN stay.
template <class E>
INLINE __m512i with_exponent(__m512i w, __m512i step) {
    const __m512i k = _mm512_set1_epi16(0x7fff);
    if (!E::has_nan) return _mm512_mask_add_epi16(w, _mm512_test_epi16_mask(w, k), w, step);
    const __m512i t = _mm512_sub_epi16(_mm512_and_si512(w, k), _mm512_set1_epi16(1));
    return _mm512_mask_add_epi16(w, _mm512_cmplt_epu16_mask(t, _mm512_set1_epi16(0x7f7f)), w, step);
}
#endif

}  // namespace QT_NAMESPACE
