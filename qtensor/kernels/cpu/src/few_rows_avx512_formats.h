// few_rows_avx512.h: how the codes and factors of each format are loaded and decoded in registers.
#pragma once
#include "few_rows.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512

// ---- formats
// A span is LOADS vectors of codes, each decoded to PER vectors of 32 bfloat16: dword i of vector v holds the
// elements place(v, lane_of(i), 0) and place(v, lane_of(i), 1).

// E8M0 codes in dwords to factors: 0 is 2^-127, 255 NaN.
INLINE __m512 e8m0_factors(__m512i c) {
    const __m512i v = _mm512_max_epu32(_mm512_slli_epi32(c, 23), _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(c, _mm512_set1_epi32(255));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(v, nan, _mm512_set1_epi32(0x7fc00000)));
}

struct FloatPair {
    __m512 second, first;
};
struct NibbleCodes {
    static constexpr int PER = 4;
    static constexpr bool SCALED = true;
    __m512i table;  // twice: vpermw looks at five bits
    __m512 values;
    explicit NibbleCodes(const FewRows& f) : values(_mm512_loadu_ps(f.values)) {
        alignas(64) u16 words[32];
        for (int i = 0; i < 32; i++) words[i] = u16(f.low[i & 15] | f.high[i & 15] << 8);
        table = _mm512_load_si512(words);
    }
    // The elements S and 4 + S of an eight, to be multiplied with an X.
    template <int S, class X>
    INLINE auto decode(const NibbleCodes& c, __m512i t) {
        if constexpr (sizeof(X) == 2) {
            return _mm512_permutexvar_epi16(S ? _mm512_srli_epi16(t, 4 * S) : t, c.table);
        } else {  // an Intel CPU takes half as long for vpermps
            return FloatPair{_mm512_permutexvar_ps(_mm512_srli_epi32(t, 16 + 4 * S), c.values),
                             _mm512_permutexvar_ps(S ? _mm512_srli_epi32(t, 4 * S) : t, c.values)};
        }
    }
};
struct Mxfp4Rows : NibbleCodes, LaneIsBlock<32> {
    static constexpr int LOADS = 4, BYTES = 256, SCALES = 16;
    using NibbleCodes::NibbleCodes;
    static constexpr int lane_of(int i) { return i % 4 * 4 + i / 4; }
    // Dword i of each of 16 blocks comes to vector i.
    INLINE void load(const u8* p, __m512i t[4]) {
        __m512i v[4];
        for (int i = 0; i < 4; i++) v[i] = _mm512_loadu_si512(p + 64 * i);
        const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
        const __m512i c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        t[0] = _mm512_unpacklo_epi64(a, b), t[1] = _mm512_unpackhi_epi64(a, b);
        t[2] = _mm512_unpacklo_epi64(c, d), t[3] = _mm512_unpackhi_epi64(c, d);
    }
    INLINE __m512 factors(const FewRows&, const u8* s, i64 span) {
        const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return e8m0_factors(
            _mm512_cvtepu8_epi32(_mm_shuffle_epi8(::QT_NAMESPACE::load<__m128i>(s + span * SCALES), order)));
    }
};
struct Nvfp4Rows : NibbleCodes, LaneIsBlock<16> {
    static constexpr int LOADS = 2, BYTES = 128, SCALES = 16;
    using NibbleCodes::NibbleCodes;
    static constexpr int lane_of(int i) { return i % 4 / 2 * 8 + i / 4 * 2 + i % 2; }
    // Dword i of each of 16 blocks of 64 bits.
    INLINE void load(const u8* p, __m512i t[2]) {
        const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 64);
        t[0] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
        t[1] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    }
    // float16 has the codes of E4M3 as 2^-8 of their values.
    INLINE __m512 factors(const FewRows&, const u8* s, i64 span) {
        const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
        const __m128i c = _mm_shuffle_epi8(::QT_NAMESPACE::load<__m128i>(s + span * SCALES), order);
        const __m256i half =
            _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(c), 7), _mm256_set1_epi16(short(0xbfff)));
        const __m128i magnitude = _mm_and_si128(c, _mm_set1_epi8(127));
        const __mmask16 nan = _mm_cmpeq_epi8_mask(magnitude, _mm_set1_epi8(127));
        const __m256i known = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
        return _mm512_mul_ps(_mm512_cvtph_ps(known), _mm512_set1_ps(256.0f));
    }
};

struct ByteCodes {
    static constexpr int PER = 2;
    __m512i low0, low1, high0, high1, sign;  // 6-bit codes have theirs in the tables
    explicit ByteCodes(const FewRows& f)
        : low0(_mm512_loadu_si512(f.low)),
          low1(_mm512_loadu_si512(f.low + 64)),
          high0(_mm512_loadu_si512(f.high)),
          high1(_mm512_loadu_si512(f.high + 64)),
          sign(_mm512_set1_epi8(char(f.high[0x80]))) {}
    INLINE void decode_all(const ByteCodes& b, __m512i c, __m512i d[2]) {
        const __m512i lo = _mm512_permutex2var_epi8(b.low0, c, b.low1);
        const __m512i hi = _mm512_permutex2var_epi8(b.high0, c, b.high1);
        const __m512i top = _mm512_ternarylogic_epi32(hi, c, b.sign, 0x78);
        d[0] = _mm512_unpacklo_epi8(lo, top), d[1] = _mm512_unpackhi_epi8(lo, top);
    }
};
// E4M3 or E5M2, as many lines of memory at a time.
template <int LINES>
struct Fp8Lines : ByteCodes, LanesArePart<16, 64 * LINES> {
    static constexpr int LOADS = LINES, BYTES = 64 * LINES, SCALES = 0;
    using ByteCodes::ByteCodes;
    INLINE void load(const u8* p, __m512i t[LINES]) {
        for (int i = 0; i < LINES; i++) t[i] = _mm512_loadu_si512(p + 64 * i);
    }
};
// Factors that follow the sums. The order of sums is the same for any number of lines.
template <int LINES>
struct Fp8Rows : Fp8Lines<LINES> {
    static constexpr bool SCALED = false;
    using Fp8Lines<LINES>::Fp8Lines;
    INLINE __m512 factors(const FewRows&, const u8*, i64) { return _mm512_setzero_ps(); }
};
struct Fp8BlockRows : Fp8Lines<2> {
    static constexpr bool SCALED = true;
    using Fp8Lines<2>::Fp8Lines;
    INLINE __m512 factors(const FewRows& f, const u8* s, i64 span) {
        return _mm512_set1_ps(((const float*)s)[span * f.scales.block_stride]);
    }
};
// The factors of four blocks, four lanes each.
INLINE __m512 four_factors(const u8* s) {
    u32 four;
    memcpy(&four, s, 4);
    const __m128i spread = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return e8m0_factors(_mm512_cvtepu8_epi32(_mm_shuffle_epi8(_mm_cvtsi32_si128(int(four)), spread)));
}
// The same where no code is 0 or 255: the others are the exponents of float32.
INLINE __m512 four_plain_factors(const u8* s) {
    struct Spread {
        alignas(64) u8 at[64];
        constexpr Spread() : at() {
            for (int i = 0; i < 64; i++) at[i] = u8(i % 4 ? 0x80 : i / 16);
        }
    };
    static constexpr Spread spread;
    u32 four;
    memcpy(&four, s, 4);
    const __m512i codes = _mm512_shuffle_epi8(_mm512_set1_epi32(int(four)), _mm512_load_si512(spread.at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(codes, 23));
}
// Whether one of `count` codes is 0 or 255.
INLINE bool has_special_factor(const u8* s, i64 count) {
    for (i64 i = 0; i < count; i += 64) {
        const __mmask64 real = count - i >= 64 ? ~0ull : (1ull << (count - i)) - 1;
        const __m512i next = _mm512_add_epi8(_mm512_maskz_loadu_epi8(real, s + i), _mm512_set1_epi8(1));
        if (_mm512_mask_cmple_epu8_mask(real, next, _mm512_set1_epi8(1))) return true;
    }
    return false;
}
struct Mxfp8Rows : ByteCodes, LanesArePart<32, 128> {  // MXFP6 with a code a byte, too
    static constexpr int LOADS = 2, BYTES = 128, SCALES = 4;
    static constexpr bool SCALED = true;
    using ByteCodes::ByteCodes;
    // The first and the second 16 codes of four blocks.
    INLINE void load(const u8* p, __m512i t[2]) {
        const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);
        t[0] = _mm512_shuffle_i64x2(a, b, 0x88), t[1] = _mm512_shuffle_i64x2(a, b, 0xdd);
    }
    INLINE __m512 factors(const FewRows&, const u8* s, i64 span) { return four_factors(s + span * SCALES); }
};
struct Mxfp6PackedRows : LanesArePart<32, 128> {
    static constexpr int LOADS = 2, PER = 2, BYTES = 96, SCALES = 4;
    static constexpr bool SCALED = true;
    __m512i low, high;  // vpermb looks at six bits
    explicit Mxfp6PackedRows(const FewRows& f)
        : low(_mm512_loadu_si512(f.low)), high(_mm512_loadu_si512(f.high)) {}
    // Bytes of eight codes in each qword: of the first or of the second 16 codes of four blocks.
    struct Order {
        alignas(64) u8 first[64], second[64];
        constexpr Order() : first(), second() {
            for (int i = 0; i < 64; i++) {
                const int byte = i / 16 * 24 + i / 8 % 2 * 6 + (i % 8 < 6 ? i % 8 : 5);
                first[i] = u8(byte), second[i] = u8(byte + 12 - 32);
            }
        }
    };
    INLINE void load(const u8* p, __m512i t[2]) {
        static constexpr Order order;
        const __m512i a = _mm512_loadu_si512(p),
                      b = _mm512_castsi256_si512(::QT_NAMESPACE::load<__m256i>(p + 64));
        const __m512i late = _mm512_loadu_si512(p + 32);
        const __m512i bits_of = _mm512_set1_epi64(0x2a241e18120c0600);  // 0, 6, ..., 42
        t[0] = _mm512_multishift_epi64_epi8(bits_of,
                                            _mm512_permutex2var_epi8(a, _mm512_load_si512(order.first), b));
        // The second halves: bytes 12 .. 95, of which the first 20 lie before `late`.
        t[1] = _mm512_multishift_epi64_epi8(
            bits_of, _mm512_mask_permutexvar_epi8(
                         _mm512_permutexvar_epi8(
                             _mm512_add_epi8(_mm512_load_si512(order.second), _mm512_set1_epi8(32)), a),
                         ~0xffffull, _mm512_load_si512(order.second), late));
    }
    INLINE void decode_all(const Mxfp6PackedRows& f, __m512i c, __m512i d[2]) {
        const __m512i lo = _mm512_permutexvar_epi8(c, f.low), hi = _mm512_permutexvar_epi8(c, f.high);
        d[0] = _mm512_unpacklo_epi8(lo, hi), d[1] = _mm512_unpackhi_epi8(lo, hi);
    }
    INLINE __m512 factors(const FewRows&, const u8* s, i64 span) { return four_factors(s + span * SCALES); }
};
#endif

}  // namespace QT_NAMESPACE
