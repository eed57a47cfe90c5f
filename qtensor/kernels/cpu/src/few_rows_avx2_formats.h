// few_rows_lanes.h with AVX2: codes of each format to float16, in the order of the sums.
#pragma once
#include "few_rows.h"

namespace QT_NAMESPACE {

#if QT_ISA == 2
// Eight float16 to float32, from memory. In registers, they would have to cross to another 128 bits first,
// which one port alone can do: half as many a cycle.
INLINE VF value(const u16* halves) {
    VF to;
    asm("vcvtph2ps %1, %0" : "=x"(to) : "m"(*(const __m128i*)halves));
    return to;
}
INLINE VF value(const float* v) { return load<VF>(v); }
// E8M0 codes, which `places` brings to the highest bytes of dwords, to factors. 0 is 2^-127. 255, NaN,
// becomes infinity: finish_rows looks for it.
INLINE VF e8m0_factors(__m256i codes, __m256i places) {
    const __m256i exponents = _mm256_srli_epi32(_mm256_shuffle_epi8(codes, places), 1);
    return (VF)_mm256_max_epu32(exponents, _mm256_set1_epi32(0x400000));
}
// Places of the codes of eight lanes in the highest bytes of dwords.
INLINE __m256i lane_codes(int a, int b, int c, int d, int e, int f, int g, int h) {
    const __m256i codes = _mm256_setr_epi32(a, b, c, d, e, f, g, h);
    return _mm256_or_si256(_mm256_slli_epi32(codes, 24), _mm256_set1_epi32(0x808080));
}

// ---- 4-bit codes: a lane is a block
struct NibbleCodes {
    using Value = u16;
    static constexpr bool SCALED = true, NAN_IS_LEFT = false;
    static constexpr float POWER = 1;
    __m256i high;  // higher bytes of the values as float16; the lower ones are 0
    explicit NibbleCodes(const FewRows& f) {
        alignas(16) u8 bytes[16];
        for (int i = 0; i < 16; i++) bytes[i] = u8(float_to_half(f.values[i]) >> 8);
        high = _mm256_broadcastsi128_si256(load<__m128i>(bytes));
    }
    // In 128 bits: byte 0 of four blocks, byte 1 of the same blocks, and so on.
    INLINE void gather_bytes(const __m256i v[4], __m256i to[4]) {
        const __m256i ab[2] = {_mm256_unpacklo_epi8(v[0], v[1]), _mm256_unpackhi_epi8(v[0], v[1])};
        const __m256i cd[2] = {_mm256_unpacklo_epi8(v[2], v[3]), _mm256_unpackhi_epi8(v[2], v[3])};
        for (int i = 0; i < 2; i++) {
            to[2 * i] = _mm256_unpacklo_epi16(ab[i], cd[i]);
            to[2 * i + 1] = _mm256_unpackhi_epi16(ab[i], cd[i]);
        }
    }
    // `t` has, in each 128 bits, byte 2 i of eight blocks and then byte 2 i + 1, of two elements each. The
    // elements of an eight are summed in the order 4 0 5 1 6 2 7 3.
    ALWAYS_INLINE void store_bytes(__m256i t, int i, u16* to) const {
        const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
        const __m256i codes[2] = {_mm256_and_si256(t, nibble),
                                  _mm256_and_si256(_mm256_srli_epi16(t, 4), nibble)};
        u16* eight = to + i / 2 * 8 * SUMS;
        for (int odd = 0; odd < 2; odd++) {
            const __m256i v = _mm256_shuffle_epi8(high, codes[odd]);
            const int place = 1 - i % 2 + 2 * odd;
            store(eight + place * SUMS, _mm256_unpacklo_epi8(zero, v));
            store(eight + (place + 4) * SUMS, _mm256_unpackhi_epi8(zero, v));
        }
    }
};
struct Mxfp4Rows : NibbleCodes, LaneIsBlock<32> {
    static constexpr int BYTES = 256, SCALES = 16;
    using NibbleCodes::NibbleCodes;
    static constexpr int lane_of(int i) { return i % 8 * 2 + i / 8; }
    ALWAYS_INLINE void decode(const u8* p, VB&, u16* to) const {
        __m256i a[4], b[4];
        for (int i = 0; i < 4; i++) a[i] = load<__m256i>(p + 32 * i), b[i] = load<__m256i>(p + 128 + 32 * i);
        gather_bytes(a, a), gather_bytes(b, b);
        for (int i = 0; i < 4; i++) {
            store_bytes(_mm256_unpacklo_epi32(a[i], b[i]), 2 * i, to);
            store_bytes(_mm256_unpackhi_epi32(a[i], b[i]), 2 * i + 1, to);
        }
    }
    INLINE void factors(const u8* s, VF to[2]) {
        const __m256i codes = _mm256_broadcastsi128_si256(load<__m128i>(s));
        to[0] = e8m0_factors(codes, lane_codes(0, 2, 4, 6, 8, 10, 12, 14));
        to[1] = e8m0_factors(codes, lane_codes(1, 3, 5, 7, 9, 11, 13, 15));
    }
};
struct Nvfp4Rows : NibbleCodes, LaneIsBlock<16> {
    static constexpr int BYTES = 128, SCALES = 16;
    using NibbleCodes::NibbleCodes;
    static constexpr int lane_of(int i) { return i % 4 * 4 + i / 8 * 2 + i / 4 % 2; }
    ALWAYS_INLINE void decode(const u8* p, VB&, u16* to) const {
        __m256i v[4];
        for (int i = 0; i < 4; i++) v[i] = load<__m256i>(p + 32 * i);
        gather_bytes(v, v);
        for (int i = 0; i < 2; i++) {
            store_bytes(_mm256_unpacklo_epi32(v[i], v[i + 2]), 2 * i, to);
            store_bytes(_mm256_unpackhi_epi32(v[i], v[i + 2]), 2 * i + 1, to);
        }
    }
    // float16 has the codes of E4M3 as 2^-8 of their values. NaN becomes a number: finish_rows looks for it.
    INLINE void factors(const u8* s, VF to[2]) {
        const __m256i codes = _mm256_broadcastsi128_si256(load<__m128i>(s));
        const __m256i words = _mm256_shuffle_epi8(
            codes, _mm256_setr_epi8(-1, 0, -1, 4, -1, 8, -1, 12, -1, 1, -1, 5, -1, 9, -1, 13, -1, 2, -1, 6,
                                    -1, 10, -1, 14, -1, 3, -1, 7, -1, 11, -1, 15));
        const __m256i half = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(short(0xbfff)));
        to[0] = (VF)_mm256_cvtph_ps(_mm256_castsi256_si128(half)) * all(256.0f);
        to[1] = (VF)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) * all(256.0f);
    }
};

// ---- codes of a byte, and MXFP6 packed
// A format that multiplies its values by POWER itself, for x that cannot be multiplied.
template <class F>
struct Multiplied : F {
    using Value = float;
    static constexpr float POWER = 1;
    using F::F;
    ALWAYS_INLINE void decode(const u8* p, VB& most, float* to) const {
        alignas(32) u16 halves[F::SPAN];
        F::decode(p, most, halves);
        for (int i = 0; i < F::SPAN; i += W) store(to + i, value(halves + i) * all(F::POWER));
    }
};
// float16 holds their values divided by POWER: sign, exponent and mantissa are those of the code, shifted.
template <class E, int Codes>  // in a group of bytes
struct ByteCodes {
    using Value = u16;
    // The code of NaN of E4M3 becomes a number; other formats have none or those of float16.
    static constexpr bool NAN_IS_LEFT = std::is_same<E, FE4M3>::value;
    static constexpr float POWER = float(1 << (E::min_exponent - (127 - 14)));
    explicit ByteCodes(const FewRows&) {}
    // The second of each two codes, then the first. Packed, a word has them in its highest 12 bits.
    INLINE void store_eights(__m256i c, VB& most, u16* to) {
        if (NAN_IS_LEFT)
            most = (VB)_mm256_max_epu8((__m256i)most, _mm256_and_si256(c, _mm256_set1_epi8(0x7f)));
        constexpr int exponent = E::width - 1 - E::mantissa, right = 5 - exponent;
        __m256i second, first;  // with the signs of the codes in the highest bits, and again behind these
        if constexpr (Codes == 4) {
            second = _mm256_srai_epi16(c, right);
            first = _mm256_srai_epi16(_mm256_slli_epi16(c, E::width), right);
        } else if constexpr (right == 0) {
            second = c;
            first = _mm256_slli_epi16(c, 8);
        } else {
            const __m256i top = E::width == 8 ? c : _mm256_slli_epi16(c, 8 - E::width);
            constexpr int factor = 1 << (8 - right);
            second = _mm256_maddubs_epi16(_mm256_set1_epi16(short(factor << 8)), top);
            first = _mm256_maddubs_epi16(_mm256_set1_epi16(factor), top);
        }
        const __m256i keep =
            _mm256_set1_epi16(short(0x8000 | ((1 << (10 + exponent)) - (1 << (10 - E::mantissa)))));
        store(to, _mm256_and_si256(second, keep)), store(to + SUMS, _mm256_and_si256(first, keep));
    }
};
template <class E, int Span>
struct Fp8Lines : ByteCodes<E, 1>, LanesArePart<16, Span> {
    static constexpr int BYTES = Span, SCALES = 0;
    using ByteCodes<E, 1>::ByteCodes;
    static constexpr int lane_of(int i) { return i / 4 % 2 * 8 + i / 8 * 4 + i % 4; }
    INLINE void decode(const u8* p, VB& most, u16* to) {
        for (int i = 0; i < Span; i += 64) {
            const __m256i a = load<__m256i>(p + i), b = load<__m256i>(p + i + 32);
            ByteCodes<E, 1>::store_eights(_mm256_unpacklo_epi64(a, b), most, to + i);
            ByteCodes<E, 1>::store_eights(_mm256_unpackhi_epi64(a, b), most, to + i + 32);
        }
    }
};
// Factors that follow the sums.
template <class E>
struct Fp8Rows : Fp8Lines<E, 64> {
    using Whole = Multiplied<Fp8Rows>;
    static constexpr bool SCALED = false;
    using Fp8Lines<E, 64>::Fp8Lines;
    INLINE void factors(const u8*, VF*) {}
};
template <class E>
struct Fp8BlockRows : Fp8Lines<E, 128> {
    using Whole = Multiplied<Fp8BlockRows>;
    static constexpr bool SCALED = true;
    using Fp8Lines<E, 128>::Fp8Lines;
    INLINE void factors(const u8* s, VF to[2]) { to[0] = to[1] = all(load<float>(s)); }
};
// Four blocks of 32 codes, four lanes each.
template <class E, int Codes>
struct MxRows : ByteCodes<E, Codes>, LanesArePart<32, 128> {
    using Whole = Multiplied<MxRows>;
    static constexpr int BLOCK_BYTES = Codes == 4 ? 24 : 32, BYTES = 4 * BLOCK_BYTES, SCALES = 4;
    static constexpr bool SCALED = true;
    using ByteCodes<E, Codes>::ByteCodes;
    // One half of a block, and the same half of the block after the next.
    INLINE __m256i halves(const u8* p, int half) {
        p += half * (Codes == 4 ? 8 : 16);
        const __m256i v = _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(p)),
                                                  load<__m128i>(p + 2 * BLOCK_BYTES), 1);
        if (Codes == 1) return v;
        // Two codes are 12 bits. Words get the bytes in which these lie; every second word is 4 bits too low.
        const __m128i first = _mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11);
        const __m128i spread = half ? _mm_add_epi8(first, _mm_set1_epi8(4)) : first;
        return _mm256_mullo_epi16(_mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(spread)),
                                  _mm256_set1_epi32(0x00010010));
    }
    INLINE void decode(const u8* p, VB& most, u16* to) {
        for (int half = 0; half < 2; half++, to += 64) {
            const __m256i a = halves(p, half), b = halves(p + BLOCK_BYTES, half);
            ByteCodes<E, Codes>::store_eights(_mm256_unpacklo_epi64(a, b), most, to);
            ByteCodes<E, Codes>::store_eights(_mm256_unpackhi_epi64(a, b), most, to + 32);
        }
    }
    INLINE void factors(const u8* s, VF to[2]) {
        const __m256i codes = _mm256_set1_epi32(load<i32>(s));
        to[0] = e8m0_factors(codes, lane_codes(0, 0, 0, 0, 1, 1, 1, 1));
        to[1] = e8m0_factors(codes, lane_codes(2, 2, 2, 2, 3, 3, 3, 3));
    }
};
#endif

}  // namespace QT_NAMESPACE
