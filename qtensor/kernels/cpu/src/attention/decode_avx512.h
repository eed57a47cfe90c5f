// AVX-512: codes of a group of 16 tokens to tiles of bfloat16 pairs (attention.h), in registers.
#pragma once
#include "decode.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
// Transposes 16 rows of 64 bytes. Dwords: vector i holds dword i of each row. Words: each quarter of vector i
// holds word 2 i of four rows, then word 2 i + 1.
template <bool Words>
INLINE void transpose_rows(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = Words ? _mm512_unpacklo_epi16(r[i], r[i + 1]) : _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = Words ? _mm512_unpackhi_epi16(r[i], r[i + 1]) : _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512i a = t[i + j], b = t[i + 2 + j];
            r[i + 2 * j] = Words ? _mm512_unpacklo_epi32(a, b) : _mm512_unpacklo_epi64(a, b);
            r[i + 2 * j + 1] = Words ? _mm512_unpackhi_epi32(a, b) : _mm512_unpackhi_epi64(a, b);
        }
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 16; h += 8) {
            t[h + i] = _mm512_shuffle_i32x4(r[h + i], r[h + 4 + i], 0x88);
            t[h + 4 + i] = _mm512_shuffle_i32x4(r[h + i], r[h + 4 + i], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    }
}
template <class F>
struct Places {
    alignas(64) u8 at[64];
    constexpr explicit Places(F f) : at() {
        for (int i = 0; i < 64; i++) at[i] = u8(f(i));
    }
};

// Two codes in a byte.
struct NibblePairs {
    static constexpr int PER_BYTE = 2, PAIRS_OF_DWORD = 4;
    static constexpr bool WORDS = false;
    __m512i table_of_words, first, second, shift;
    explicit NibblePairs(const StoredRows&) {
        alignas(64) u16 words[32];
        const auto& t = table<FE2M1>();
        for (int i = 0; i < 32; i++) words[i] = u16(t.low[i & 15] | t.high[i & 15] << 8);
        static constexpr Places low([](int i) { return i / 8 + i / 2 % 2 * 16; });
        static constexpr Places high([](int i) { return 8 + i / 8 + i / 2 % 2 * 16; });
        table_of_words = _mm512_load_si512(words);
        first = _mm512_load_si512(low.at), second = _mm512_load_si512(high.at);
        shift = _mm512_set1_epi64(0x0004000400000000);
    }
    ALWAYS_INLINE __m512i words_of(__m512i c) const { return _mm512_permutexvar_epi16(c, table_of_words); }
    // Four dwords of codes of each token: element i of eight with element i + 4.
    ALWAYS_INLINE void keys(__m512i c, u32* to) const {
        _mm512_store_si512(to, words_of(c));
        _mm512_store_si512(to + 16, words_of(_mm512_srli_epi16(c, 4)));
        _mm512_store_si512(to + 32, words_of(_mm512_srli_epi16(c, 8)));
        _mm512_store_si512(to + 48, words_of(_mm512_srli_epi16(c, 12)));
    }
    // 32 elements of two tokens.
    ALWAYS_INLINE void values(const u8* a, const u8* b, u32* to) const {
        const __m512i both = _mm512_castsi256_si512(
            _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(a)), load<__m128i>(b), 1));
        const __m512i x = _mm512_permutexvar_epi8(first, both), y = _mm512_permutexvar_epi8(second, both);
        _mm512_store_si512(to, words_of(_mm512_srlv_epi16(x, shift)));
        _mm512_store_si512(to + 16, words_of(_mm512_srlv_epi16(y, shift)));
    }
};
// One code in a byte.
struct BytePairs {
    static constexpr int PER_BYTE = 1, PAIRS_OF_DWORD = 2;
    static constexpr bool WORDS = true;
    __m512i low0, low1, high0, high1, sign, places;
    explicit BytePairs(const StoredRows& s) {
        with_element(s.element, [&](auto type) {
            const auto& t = table<decltype(type)>();
            low0 = load<__m512i>(t.low), low1 = load<__m512i>(t.low + 64);
            high0 = load<__m512i>(t.high), high1 = load<__m512i>(t.high + 64);
            sign = _mm512_set1_epi8(char(t.high[0x80]));  // 0 if the table has the signs of 6-bit codes
        });
        static constexpr Places order(
            [](int i) { return i / 16 * 4 + i / 8 % 2 * 16 + i / 2 % 4 + i % 2 * 32; });
        places = _mm512_load_si512(order.at);
    }
    ALWAYS_INLINE void decode(__m512i c, u32* to) const {
        const __m512i low = _mm512_permutex2var_epi8(low0, c, low1);
        const __m512i high = _mm512_permutex2var_epi8(high0, c, high1);
        const __m512i top = _mm512_ternarylogic_epi32(high, c, sign, 0xf8);  // high | (c & sign)
        _mm512_store_si512(to, _mm512_unpacklo_epi8(low, top));
        _mm512_store_si512(to + 16, _mm512_unpackhi_epi8(low, top));
    }
    ALWAYS_INLINE void keys(__m512i c, u32* to) const { decode(c, to); }
    ALWAYS_INLINE void values(const u8* a, const u8* b, u32* to) const {
        const __m512i both =
            _mm512_inserti64x4(_mm512_castsi256_si512(load<__m256i>(a)), load<__m256i>(b), 1);
        decode(_mm512_permutexvar_epi8(places, both), to);
    }
};
struct Bfloat16Pairs {
    static constexpr int PER_BYTE = 0, PAIRS_OF_DWORD = 1;  // two bytes a value
    static constexpr bool WORDS = false;
    explicit Bfloat16Pairs(const StoredRows&) {}
    // Numbers below LEAST_VALUE count as 0.
    INLINE __m512i kept(__m512i v) {
        const __m512i magnitude = _mm512_and_si512(v, _mm512_set1_epi16(0x7fff));
        const __mmask32 large = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16((127 - 64) << 7));
        return _mm512_maskz_mov_epi16(large, v);
    }
    ALWAYS_INLINE void keys(__m512i c, u32* to) const { _mm512_store_si512(to, kept(c)); }
    ALWAYS_INLINE void values(const u8* a, const u8* b, u32* to) const {
        const __m512i x = kept(load<__m512i>(a)), y = kept(load<__m512i>(b));
        const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_store_si512(to, _mm512_permutex2var_epi64(low, first, high));
        _mm512_store_si512(to + 16, _mm512_permutex2var_epi64(low, second, high));
    }
};

template <class F>
__attribute__((noinline)) static void pair_keys_as(const StoredRows& s, const GroupRows& g, u32* tile) {
    const F f(s);
    const i64 bytes = F::PER_BYTE == 2 ? s.size / 2 : F::PER_BYTE == 1 ? s.size : s.size * 2;
    for (i64 byte = 0; byte < bytes; byte += 64) {
        const __mmask64 inside = bytes - byte >= 64 ? ~0ull : (1ull << (bytes - byte)) - 1;
        const u8* row = g.codes + byte;
        __m512i r[16];
#pragma GCC unroll 16
        for (int t = 0; t < TOKENS; t++, row += g.stride) r[t] = _mm512_maskz_loadu_epi8(inside, row);
        transpose_rows<F::WORDS>(r);
        const i64 dwords = std::min<i64>(16, (bytes - byte) / 4);
        u32* to = tile + byte / 4 * F::PAIRS_OF_DWORD * TOKENS;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (i < dwords) f.keys(r[i], to + i * F::PAIRS_OF_DWORD * TOKENS);
    }
}
template <class F>
__attribute__((noinline)) static void pair_values_as(const StoredRows& s, const GroupRows& g, u32* tile) {
    const F f(s);
    constexpr i64 unit = F::PER_BYTE == 2 ? 16 : F::PER_BYTE == 1 ? 32 : 64;  // bytes of 32 elements
    for (int pair = 0; pair < TOKENS / 2; pair++) {
        const u8 *a = g.row(2 * pair), *b = g.row(2 * pair + 1);
        for (i64 i = 0; i < s.size / 32; i++) {
            f.values(a + i * unit, b + i * unit, tile + pair * s.size + i * 32);
        }
    }
}
static inline void pair_keys(const StoredRows& s, const GroupRows& group, u8* scratch, u32* tile) {
    if (s.element == STORED_BF16) return pair_keys_as<Bfloat16Pairs>(s, group, tile);
    if (s.element == E2M1) return pair_keys_as<NibblePairs>(s, group, tile);
    pair_keys_as<BytePairs>(s, unpacked(s, group, scratch), tile);
}
static inline void pair_values(const StoredRows& s, const GroupRows& group, u8* scratch, u32* tile) {
    if (s.element == STORED_BF16) return pair_values_as<Bfloat16Pairs>(s, group, tile);
    if (s.element == E2M1) return pair_values_as<NibblePairs>(s, group, tile);
    pair_values_as<BytePairs>(s, unpacked(s, group, scratch), tile);
}
#endif

}  // namespace QT_NAMESPACE
