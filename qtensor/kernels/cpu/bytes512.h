// 64 elements to codes in byte lanes, with AVX-512. An element comes as a word: its sign, 8 bits of exponent and 7 of significand
// are a bfloat16, or a float32 rounded to odd, whose last bit tells whether anything was cut off. Those 7 bits pick the code's
// fraction from a table, rounding included; exponents are subtracted beside it. simd.h and elements.h say what is computed;
// here is only speed.
#pragma once
#include "scales.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
INLINE __m512i bytes_of(int v) { return _mm512_set1_epi8(char(v)); }

struct ByteOrder {
    alignas(64) u8 even[64], odd[64], block[8][64];
    alignas(64) u16 low[32], high[32];
    constexpr ByteOrder() : even(), odd(), block(), low(), high() {
        for (int i = 0; i < 64; i++) even[i] = u8(2 * i), odd[i] = u8(2 * i + 1);
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 64; i++) block[g][i] = u8(2 * g + i / 32);
        for (int i = 0; i < 32; i++) low[i] = u16(2 * i), high[i] = u16(2 * i + 1);
    }
};
static constexpr ByteOrder BYTES;

// By the 7 bits m behind the leading 1: [0] the steps from the code of 2^e to that of 1.m * 2^e, both normal; [1 + d] the code of
// 1.m * 2^(e - 1 - d), where 2^e is the smallest normal value. Nearest, ties to the even code.
template <class E>
struct Fractions {
    alignas(64) u8 at[E::mantissa + 2][128];
    constexpr Fractions() : at() {
        for (int t = 0; t < E::mantissa + 2; t++)
            for (int m = 0; m < 128; m++) {
                const int z = t ? 128 + m : m, shift = 7 - E::mantissa + t, q = z >> shift, rest = z & ((1 << shift) - 1);
                const int half = 1 << (shift - 1);
                at[t][m] = u8(q + (rest > half || (rest == half && q % 2)));
            }
    }
};
template <class E>
static constexpr Fractions<E> FRACTIONS;

template <class E>
struct Codes8 {
    static constexpr int fields = (E::max_bits >> 23) - E::min_exponent + 1;  // of the exponent of the largest value
    static constexpr int most = fields << E::mantissa | (E::max_bits >> (23 - E::mantissa) & ((1 << E::mantissa) - 1));
};
// A word of exponent e times 2^(127 - code) is normal where e > base. With a base from LEAST_BASE on, words of exponent 0 (zero,
// and subnormals, whose leading 1 is not implied) get code 0, as they should.
template <class E>
constexpr int base_of(int code) { return code + E::min_exponent - 128; }
template <class E>
constexpr int LEAST_BASE = E::mantissa + 2;
template <class E>
constexpr i32 LEAST_CODE = LEAST_BASE<E> + 128 - E::min_exponent;

// The parts of 64 words: bytes of exponents, of low halves (the last bit of the exponent is their highest; tables of 128 leave it
// out) and of high halves.
struct Parts {
    __m512i exponent, fraction, high;
};
INLINE Parts parts_of(__m512i v0, __m512i v1) {
    const __m512i even = _mm512_load_si512(BYTES.even);
    return {_mm512_permutex2var_epi8(_mm512_srli_epi16(v0, 7), even, _mm512_srli_epi16(v1, 7)), _mm512_permutex2var_epi8(v0, even, v1),
            _mm512_permutex2var_epi8(v0, _mm512_load_si512(BYTES.odd), v1)};
}
template <class E>
INLINE __m512i fraction_of(__m512i m, const u8 table[128]) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), m, _mm512_load_si512(table + 64));
}
template <class E>
INLINE __m512i normal_codes(const Parts& p, __m512i base, __m512i fraction) {
    __m512i e = _mm512_min_epu8(_mm512_subs_epu8(p.exponent, base), bytes_of(Codes8<E>::fields + 1));
    e = _mm512_slli_epi16(e, E::mantissa);  // no byte overflows
    return _mm512_min_epu8(_mm512_add_epi8(e, fraction), bytes_of(Codes8<E>::most));
}
template <class E>
INLINE VB with_signs(__m512i q, const Parts& p) {
    const __m512i top = bytes_of(1 << (E::width - 1));
    return (VB)_mm512_ternarylogic_epi32(q, E::width == 8 ? p.high : _mm512_srli_epi16(p.high, 8 - E::width), top, 0xf8);
}

// q with the codes of the words at or below the base, which lie in tables 1 .. Depth.
template <class E, int Depth>
INLINE __m512i with_small(__m512i q, const Parts& p, __m512i base, __mmask64 small, const u8 tables[][128]) {
    const __m512i below = _mm512_sub_epi8(base, p.exponent);
    for (int d = 0; d < Depth; d++)
        q = _mm512_mask_mov_epi8(q, _mm512_mask_cmpeq_epi8_mask(small, below, bytes_of(d)), fraction_of<E>(p.fraction, tables[d + 1]));
    return q;
}

// Codes of words times 2^(127 - code). base: bytes, base_of<E>(code).
template <class E>
INLINE VB codes_of_words(__m512i v0, __m512i v1, __m512i base) {
    const Parts p = parts_of(v0, v1);
    __m512i q = normal_codes<E>(p, base, fraction_of<E>(p.fraction, FRACTIONS<E>.at[0]));
    const __mmask64 small = _mm512_cmple_epu8_mask(p.exponent, base);
    // Few values of an 8-bit element are subnormal, many of a narrower one.
    if (E::width < 8 || __builtin_expect(small != 0, 0)) {
        q = _mm512_maskz_mov_epi8(~small, q);
        q = with_small<E, E::mantissa + 1>(q, p, base, small, FRACTIONS<E>.at);
    }
    return with_signs<E>(q, p);
}

// 32 floats to words, rounded to odd: in order, and where even and odd elements stand in vectors of their own.
INLINE __m512i odd_words(VI a, VI b) {
    const __m512i low = _mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(BYTES.low), (__m512i)b);
    const __m512i high = _mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(BYTES.high), (__m512i)b);
    return _mm512_or_si512(high, _mm512_min_epu16(low, _mm512_set1_epi16(1)));
}
INLINE __m512i odd_words_of_pairs(VI even, VI odd) {
    const __m512i upper = _mm512_set1_epi32(i32(0xffff0000));
    const __m512i high = _mm512_ternarylogic_epi32((__m512i)((VU)even >> 16), (__m512i)odd, upper, 0xf8);
    const __m512i low = _mm512_ternarylogic_epi32((__m512i)even, _mm512_slli_epi32((__m512i)odd, 16), upper, 0xd8);
    return _mm512_or_si512(high, _mm512_min_epu16(low, _mm512_set1_epi16(1)));
}

// ---- floats times a factor ------------------------------------------------------------------------------------------------------
template <class D, class E>
INLINE VB codes_of_products(const typename D::T* x, const VF f[4]) {
    VI v[4];
    D::group(x, v);
    for (int j = 0; j < 4; j++) v[j] = (VI)((VF)v[j] * f[j]);
    const __m512i base = bytes_of(base_of<E>(127));
    if (D::pairs) return codes_of_words<E>(odd_words_of_pairs(v[0], v[1]), odd_words_of_pairs(v[2], v[3]), base);
    return codes_of_words<E>(odd_words(v[0], v[1]), odd_words(v[2], v[3]), base);
}

// ---- bfloat16 times powers of two --------------------------------------------------------------------------------------------------
template <class E>
INLINE VB pow2_group(const u16* x, __m512i base) {
    return codes_of_words<E>(load<__m512i>(x), load<__m512i>(x + 32), base);
}

// ---- bfloat16 times one factor: the products of all significands in a table ---------------------------------------------------------
struct Significands {
    alignas(64) u32 at[128];  // of the bfloat16 from 1 to 2, as floats
    constexpr Significands() : at() {
        for (u32 m = 0; m < 128; m++) at[m] = 127u << 23 | m << 16;
    }
};
static constexpr Significands SIGNIFICANDS;

// at[0] as in Fractions. at[1 + d], where `deep`: the code of 1.m * 2^(e - 1 - d) times the factor's significand, 2^e being the
// smallest normal value; from d = mantissa bits + 2 on, it is 0.
template <class E>
struct FactorTable {
    static constexpr int depth = E::mantissa + 2;
    alignas(64) u8 at[1 + depth][128];
    int base;
    bool usable, deep;

    // count: elements that it will serve.
    FactorTable(float factor, i64 count) : deep(count > 8192) {
        const i32 u = bits<i32>(factor), one = 127 << 23, significand = u & 0x7fffff;
        base = base_of<E>(127 + 127 - (u >> 23));
        usable = count >= 512 && u >= 0x00800000 && u < INF_BITS && base >= LEAST_BASE<E>;
        if (!usable) return;
        fill(at[0], significand | one, encode<E, false, false>(all(1.0f)));
        for (int d = 0; deep && d < depth; d++) fill(at[1 + d], significand | (E::min_exponent - 1 - d) << 23, VI{});
    }
    static void fill(u8* row, i32 factor, VI less) {
        for (int m = 0; m < 128; m += W) {
            const VF x = load<VF>(SIGNIFICANDS.at + m);
            narrow(row + m, encode<E, false, false>(x * (VF)all(factor)) - less);
        }
    }
};
template <class E>
INLINE VB codes_of_table(const u16* x, const FactorTable<E>& t, const VF f[4]) {
    const Parts p = parts_of(load<__m512i>(x), load<__m512i>(x + 32));
    const __m512i base = bytes_of(t.base);
    __m512i q = normal_codes<E>(p, base, fraction_of<E>(p.fraction, t.at[0]));
    const __mmask64 small = _mm512_cmple_epu8_mask(p.exponent, base);
    if (__builtin_expect(small != 0, 0)) {
        q = _mm512_maskz_mov_epi8(~small, q);
        if (t.deep)
            q = with_small<E, FactorTable<E>::depth>(q, p, base, small, t.at);
        else if (_mm512_mask_test_epi8_mask(small, p.exponent, p.exponent))  // more than zeros
            return codes_of_products<Bfloat16, E>(x, f);
    }
    return with_signs<E>(q, p);
}
#endif

}  // namespace QT_NAMESPACE
