// Codes to bfloat16 and float16 with AVX-512, without arithmetic on the values: products with one factor stand in a table.
// dequantize.h says what is computed; here is only speed.
#pragma once
#include "exponents.h"

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

// Four of 16 NVFP4 blocks: the 8 magnitudes of each are multiplied and rounded, then picked by the codes.
struct Magnitudes {
    alignas(64) float grid[16];
    alignas(64) u16 first[2][32];  // where a block's magnitudes begin, for each element of two blocks
    constexpr Magnitudes() : grid{0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, .5f, 1, 1.5f, 2, 3, 4, 6}, first() {
        for (int i = 0; i < 64; i++) first[i / 32][i % 32] = u16(i / 16 * 8);
    }
};
static constexpr Magnitudes MAGNITUDES;
template <class D>
INLINE __m512i words_of(VF a, VF b) {
    if constexpr (D::id == BF16) return (__m512i)high_halves(to_bfloat16_bits((VI)a), to_bfloat16_bits((VI)b));
    return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)to_half(a)), (__m256i)to_half(b), 1);
}
// Magnitudes of E2M1 are 1 and 1.5 times powers of two, and so are, rounded to bfloat16, their products with positive factors: those
// with 1 and 1.5 tell all others, unless they are too large or small.
struct NvWords {
    VI one, more;  // bfloat16 in the high halves
    bool fit;
};
INLINE NvWords nv_words(VF factor, VF global) {
    const VF one = factor * global, more = factor * all(1.5f) * global;
    return {to_bfloat16_bits((VI)one), to_bfloat16_bits((VI)more), !any((VI)((VI)one < all(4 << 23)) | (VI)((VI)one > all(250 << 23)))};
}
// Words of E2M1 (elements.h) times factors; one, more: words of the products with 1 and 1.5, for each lane.
INLINE __m512i nv_products(__m512i w, __m512i one, __m512i more) {
    const __m512i base = _mm512_mask_mov_epi16(one, _mm512_test_epi16_mask(w, _mm512_set1_epi16(0x40)), more);
    const __m512i steps = _mm512_sub_epi16(_mm512_and_si512(w, _mm512_set1_epi16(short(0xff80))), _mm512_set1_epi16(0x3f80));
    return _mm512_mask_add_epi16(w, _mm512_test_epi16_mask(w, _mm512_set1_epi16(0x7fff)), steps, base);
}
// For columns, in the lanes' order (simd.h), which become words in order.
struct NvColumns {
    __m512i one[8], more[8];
    bool fit;
    void fill(i64 cols, const VF* factors, const VF* global) {
        fit = cols <= 256;
        for (i64 v = 0; fit && v < (cols + 63) / 64 * 4; v += 2) {
            const NvWords even = nv_words(factors[v], global[v]), odd = nv_words(factors[v + 1], global[v + 1]);
            fit = even.fit && odd.fit;
            one[v / 2] = (__m512i)((VI)((VU)even.one >> 16) | odd.one), more[v / 2] = (__m512i)((VI)((VU)even.more >> 16) | odd.more);
        }
    }
};
template <class D>
INLINE void nv_blocks(VF factor, VF global, int block, const u8* codes, u16* y, bool stream) {
    const __m512i pair = _mm512_add_epi32(_mm512_srli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 3),
                                          _mm512_set1_epi32(block));
    VF v[2];
    for (int h = 0; h < 2; h++) {
        const __m512i at = _mm512_add_epi32(pair, _mm512_set1_epi32(2 * h));
        v[h] = load<VF>(MAGNITUDES.grid) * (VF)_mm512_permutexvar_ps(at, (__m512)factor) * (VF)_mm512_permutexvar_ps(at, (__m512)global);
    }
    const __m512i words = words_of<D>(v[0], v[1]), magnitude = _mm512_set1_epi16(7), sign = _mm512_set1_epi16(short(0x8000));
    for (int h = 0; h < 2; h++) {
        const __m512i byte = _mm512_cvtepu8_epi32(load<__m128i>(codes + 16 * h));
        const __m512i code = _mm512_or_si512(byte, _mm512_slli_epi32(byte, 12));  // one in the low bits of each word
        const __m512i at = _mm512_ternarylogic_epi32(_mm512_load_si512(MAGNITUDES.first[h]), code, magnitude, 0xf8);
        // Not "or": the factor may be negative.
        const __m512i w = _mm512_ternarylogic_epi32(_mm512_permutexvar_epi16(at, words), _mm512_slli_epi16(code, 12), sign, 0x78);
        store_bytes((u8*)(y + 32 * h), (VB)w, stream);
    }
}
#endif

}  // namespace QT_NAMESPACE
