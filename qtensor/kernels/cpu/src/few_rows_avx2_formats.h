// few_rows_lanes.h with AVX2: codes of each format to float32 in registers, in the order of the sums.
#pragma once
#include "few_rows.h"

namespace QT_NAMESPACE {

#if QT_ISA == 2
// 16 E8M0 codes to factors: 0 is 2^-127, 255 NaN.
INLINE void e8m0_factors(__m128i codes, VF to[2]) {
    const __m256i wide[2] = {_mm256_cvtepu8_epi32(codes), _mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8))};
    for (int h = 0; h < 2; h++) {
        const __m256i v = _mm256_max_epu32(_mm256_slli_epi32(wide[h], 23), _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_cmpeq_epi32(wide[h], _mm256_set1_epi32(255));
        to[h] = (VF)_mm256_or_si256(v, _mm256_and_si256(nan, _mm256_set1_epi32(0x400000)));
    }
}

// ---- 4-bit codes
struct NibbleCodes {
    static constexpr bool SCALED = true, NAN_IS_LEFT = false;
    static constexpr float POWER = 1;
    __m256i low, high;  // bytes of the values as bfloat16
    explicit NibbleCodes(const FewRows& f)
        : low(_mm256_broadcastsi128_si256(load<__m128i>(f.low))),
          high(_mm256_broadcastsi128_si256(load<__m128i>(f.high))) {}
    INLINE VF first(__m256i w) {  // of the two bfloat16 in a dword
        return (VF)_mm256_and_si256(w, _mm256_set1_epi32(i32(0xffff0000)));
    }
    INLINE VF second(__m256i w) { return (VF)_mm256_slli_epi32(w, 16); }
    // Eight elements of each lane, a dword, in the order 4 0 5 1 6 2 7 3, from step j on.
    template <class Sink>
    ALWAYS_INLINE void eights(__m256i t, int j, int h, const Sink& sink) const {
        const __m256i nibble = _mm256_set1_epi8(15), even = _mm256_set1_epi16(255);
        const __m256i codes[2] = {_mm256_and_si256(t, nibble),
                                  _mm256_and_si256(_mm256_srli_epi16(t, 4), nibble)};
        __m256i pairs[4];  // of elements (4, 0), (5, 1), (6, 2), (7, 3)
        for (int i = 0; i < 2; i++) {
            const __m256i lo = _mm256_shuffle_epi8(low, codes[i]), hi = _mm256_shuffle_epi8(high, codes[i]);
            pairs[i] = _mm256_or_si256(_mm256_slli_epi16(hi, 8), _mm256_and_si256(lo, even));
            pairs[2 + i] = _mm256_or_si256(_mm256_andnot_si256(even, hi), _mm256_srli_epi16(lo, 8));
        }
        for (int i = 0; i < 4; i++)
            sink(j + 2 * i, h, first(pairs[i])), sink(j + 2 * i + 1, h, second(pairs[i]));
    }
};
struct Mxfp4Rows : NibbleCodes, LaneIsBlock<32> {
    static constexpr int BYTES = 256, SCALES = 16;
    using NibbleCodes::NibbleCodes;
    static constexpr int lane_of(int i) { return i / 8 * 8 + i % 4 * 2 + i / 4 % 2; }
    // Dword i of each of eight blocks comes to vector i. The halves take turns: each step of a sum waits for
    // the one before.
    template <class Sink>
    ALWAYS_INLINE void span(const u8* p, VB&, const Sink& sink) const {
        __m256i t[4][2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++, p += 128) {
            __m256i v[4];
            for (int i = 0; i < 4; i++) v[i] = load<__m256i>(p + 32 * i);
            const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
            const __m256i c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
            t[0][h] = _mm256_unpacklo_epi64(a, b), t[1][h] = _mm256_unpackhi_epi64(a, b);
            t[2][h] = _mm256_unpacklo_epi64(c, d), t[3][h] = _mm256_unpackhi_epi64(c, d);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) eights(t[i][0], 8 * i, 0, sink), eights(t[i][1], 8 * i, 1, sink);
    }
    INLINE void factors(const u8* s, VF to[2]) {
        const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        e8m0_factors(_mm_shuffle_epi8(load<__m128i>(s), order), to);
    }
};
struct Nvfp4Rows : NibbleCodes, LaneIsBlock<16> {
    static constexpr int BYTES = 128, SCALES = 16;
    using NibbleCodes::NibbleCodes;
    static constexpr int lane_of(int i) { return i / 8 * 8 + i % 4 / 2 * 4 + i / 4 % 2 * 2 + i % 2; }
    template <class Sink>
    ALWAYS_INLINE void span(const u8* p, VB&, const Sink& sink) const {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++, p += 64) {
            const __m256 a = load<__m256>(p), b = load<__m256>(p + 32);
            eights(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0, h, sink);
            eights(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 8, h, sink);
        }
    }
    // float16 has the codes of E4M3 as 2^-8 of their values.
    INLINE void factors(const u8* s, VF to[2]) {
        const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        const __m128i c = _mm_shuffle_epi8(load<__m128i>(s), order), magnitude = _mm_set1_epi8(127);
        const __m256i nan = _mm256_cvtepi8_epi16(_mm_cmpeq_epi8(_mm_and_si128(c, magnitude), magnitude));
        const __m256i half =
            _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(c), 7), _mm256_set1_epi16(short(0xbfff)));
        const __m256i known = _mm256_or_si256(half, nan);
        to[0] = (VF)_mm256_cvtph_ps(_mm256_castsi256_si128(known)) * all(256.0f);
        to[1] = (VF)_mm256_cvtph_ps(_mm256_extracti128_si256(known, 1)) * all(256.0f);
    }
};

// ---- codes of a byte, and MXFP6 packed
// float16 holds their values divided by POWER: sign, exponent and mantissa are those of the code, shifted.
template <class E>
struct ByteCodes {
    // The code of NaN of E4M3 becomes a number; other formats have none or those of float16.
    static constexpr bool NAN_IS_LEFT = std::is_same<E, FE4M3>::value;
    static constexpr float POWER = float(1 << (E::min_exponent - (127 - 14)));
    explicit ByteCodes(const FewRows&) {}
    // 32 codes, two in each word, as float16: the second of each two, then the first. They come to the top of
    // the word by shifts of Second and First bits.
    template <int Second, int First>
    INLINE void halves(__m256i c, VB& most, __m256i v[2]) {
        if (NAN_IS_LEFT)
            most = (VB)_mm256_max_epu8((__m256i)most, _mm256_and_si256(c, _mm256_set1_epi8(0x7f)));
        constexpr int exponent = E::width - 1 - E::mantissa, right = 5 - exponent;
        const __m256i keep =
            _mm256_set1_epi16(short(0x8000 | ((1 << (10 + exponent)) - (1 << (10 - E::mantissa)))));
        v[0] = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(c, Second), right), keep);
        v[1] = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(c, First), right), keep);
    }
    // Steps j and j + 1 from the lower or the upper half of `v`.
    template <int Upper, class Sink>
    INLINE void eight(const __m256i v[2], int j, int h, const Sink& sink) {
        for (int i = 0; i < 2; i++)
            sink(j + i, h,
                 (VF)_mm256_cvtph_ps(Upper ? _mm256_extracti128_si256(v[i], 1)
                                           : _mm256_castsi256_si128(v[i])));
    }
};
template <class E, int Span>
struct Fp8Lines : ByteCodes<E>, LanesArePart<16, Span> {
    static constexpr int BYTES = Span, SCALES = 0;
    using ByteCodes<E>::ByteCodes;
    template <class Sink>
    INLINE void span(const u8* p, VB& most, const Sink& sink) {
#pragma GCC unroll 4
        for (int i = 0; i < Span / 32; i++) {
            __m256i v[2];
            ByteCodes<E>::template halves<0, 8>(_mm256_permute4x64_epi64(load<__m256i>(p + 32 * i), 0xd8),
                                                most, v);
            ByteCodes<E>::template eight<0>(v, i / 2 * 4, i % 2, sink);
            ByteCodes<E>::template eight<1>(v, i / 2 * 4 + 2, i % 2, sink);
        }
    }
};
// Factors that follow the sums.
template <class E>
struct Fp8Rows : Fp8Lines<E, 64> {
    static constexpr bool SCALED = false;
    using Fp8Lines<E, 64>::Fp8Lines;
    INLINE void factors(const u8*, VF*) {}
};
template <class E>
struct Fp8BlockRows : Fp8Lines<E, 128> {
    static constexpr bool SCALED = true;
    using Fp8Lines<E, 128>::Fp8Lines;
    INLINE void factors(const u8* s, VF to[2]) { to[0] = to[1] = all(load<float>(s)); }
};
// Four blocks of 32 codes, four lanes each. Codes: in a group of bytes.
template <class E, int Codes>
struct MxRows : ByteCodes<E>, LanesArePart<32, 128> {
    static constexpr int BYTES = Codes == 4 ? 96 : 128, SCALES = 4;
    static constexpr int SECOND = Codes == 4 ? 0 : 8 - E::width, FIRST = Codes == 4 ? 6 : SECOND + 8;
    static constexpr bool SCALED = true;
    using ByteCodes<E>::ByteCodes;
    INLINE __m256i block(const u8* p) {
        if (Codes == 1) return load<__m256i>(p);
        // Two codes are 12 bits. Words get the bytes in which these lie; every second word is 4 bits too low.
        const __m256i loaded =
            _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(p)), load<__m128i>(p + 8), 1);
        const __m256i spread = _mm256_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11, 4, 5, 5, 6,
                                                7, 8, 8, 9, 10, 11, 11, 12, 13, 14, 14, 15);
        return _mm256_mullo_epi16(_mm256_shuffle_epi8(loaded, spread), _mm256_set1_epi32(0x00010010));
    }
    template <class Sink>
    INLINE void span(const u8* p, VB& most, const Sink& sink) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++, p += BYTES / 2) {
            const __m256i a = block(p), b = block(p + BYTES / 4);
            __m256i even[2], odd[2];  // eights
            ByteCodes<E>::template halves<SECOND, FIRST>(_mm256_unpacklo_epi64(a, b), most, even);
            ByteCodes<E>::template halves<SECOND, FIRST>(_mm256_unpackhi_epi64(a, b), most, odd);
            ByteCodes<E>::template eight<0>(even, 0, h, sink),
                ByteCodes<E>::template eight<0>(odd, 2, h, sink);
            ByteCodes<E>::template eight<1>(even, 4, h, sink),
                ByteCodes<E>::template eight<1>(odd, 6, h, sink);
        }
    }
    INLINE void factors(const u8* s, VF to[2]) {
        const __m128i spread = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        e8m0_factors(_mm_shuffle_epi8(_mm_cvtsi32_si128(load<i32>(s)), spread), to);
    }
};
#endif

}  // namespace QT_NAMESPACE
