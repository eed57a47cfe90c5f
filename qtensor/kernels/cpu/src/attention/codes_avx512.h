// AVX-512: codes of a group of 16 tokens to bfloat16 pairs in registers, which are multiplied at once or
// stored in tiles (attention.h).
#pragma once
#include "../transpose_avx512.h"
#include "decode.h"
#include "products.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
template <class T, int N>
struct Places {
    alignas(64) T at[N];
    template <class F>
    constexpr explicit Places(F f) : at() {
        for (int i = 0; i < N; i++) at[i] = T(f(i));
    }
};

// Two codes in a byte.
struct NibblePairs {
    static constexpr int BYTES_OF_32 = 16, PAIRS_OF_DWORD = 4, SUMS = 16;
    static constexpr bool WORDS = false;
    __m512i table_of_words, first, second, shift;
    explicit NibblePairs(const u8*) {
        static constexpr Places<u16, 32> words([](int i) { return bfloat16_of<FE2M1>(u32(i) & 15); });
        static constexpr Places<u8, 64> low([](int i) { return i / 8 + i / 2 % 2 * 16; });
        static constexpr Places<u8, 64> high([](int i) { return 8 + i / 8 + i / 2 % 2 * 16; });
        table_of_words = _mm512_load_si512(words.at);
        first = _mm512_load_si512(low.at), second = _mm512_load_si512(high.at);
        shift = _mm512_set1_epi64(0x0004000400000000);
    }
    ALWAYS_INLINE __m512i words_of(__m512i c) const { return _mm512_permutexvar_epi16(c, table_of_words); }
    // Four dwords of codes of each token: element i of eight with element i + 4.
    ALWAYS_INLINE void keys(__m512i c, __m512i d[4]) const {
        for (int i = 0; i < 4; i++) d[i] = words_of(_mm512_srli_epi16(c, unsigned(4 * i)));
    }
    // 32 elements of two tokens.
    ALWAYS_INLINE void values(const u8* a, const u8* b, __m512i d[2]) const {
        const __m512i both = _mm512_castsi256_si512(
            _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(a)), load<__m128i>(b), 1));
        const __m512i x = _mm512_permutexvar_epi8(first, both), y = _mm512_permutexvar_epi8(second, both);
        d[0] = words_of(_mm512_srlv_epi16(x, shift)), d[1] = words_of(_mm512_srlv_epi16(y, shift));
    }
};
// One code in a byte.
struct BytePairs {
    static constexpr int BYTES_OF_32 = 32, PAIRS_OF_DWORD = 2, SUMS = 8;
    static constexpr bool WORDS = true;
    __m512i low0, low1, high0, high1, sign, places;
    explicit BytePairs(const u8* t) {
        low0 = load<__m512i>(t), low1 = load<__m512i>(t + 64);
        high0 = load<__m512i>(t + 256), high1 = load<__m512i>(t + 256 + 64);
        sign = _mm512_set1_epi8(char(t[256 + 0x80]));  // 0 if the table has the signs of 6-bit codes
        static constexpr Places<u8, 64> order(
            [](int i) { return i / 16 * 4 + i / 8 % 2 * 16 + i / 2 % 4 + i % 2 * 32; });
        places = _mm512_load_si512(order.at);
    }
    ALWAYS_INLINE void keys(__m512i c, __m512i d[2]) const {
        const __m512i low = _mm512_permutex2var_epi8(low0, c, low1);
        const __m512i high = _mm512_permutex2var_epi8(high0, c, high1);
        const __m512i top = _mm512_ternarylogic_epi32(high, c, sign, 0xf8);  // high | (c & sign)
        d[0] = _mm512_unpacklo_epi8(low, top), d[1] = _mm512_unpackhi_epi8(low, top);
    }
    ALWAYS_INLINE void values(const u8* a, const u8* b, __m512i d[2]) const {
        const __m512i both =
            _mm512_inserti64x4(_mm512_castsi256_si512(load<__m256i>(a)), load<__m256i>(b), 1);
        keys(_mm512_permutexvar_epi8(places, both), d);
    }
};
struct Bfloat16Pairs {
    static constexpr int BYTES_OF_32 = 64, PAIRS_OF_DWORD = 1, SUMS = 16;
    static constexpr bool WORDS = false;
    explicit Bfloat16Pairs(const u8*) {}
    // Numbers below LEAST_VALUE count as 0.
    INLINE __m512i kept(__m512i v) {
        const __m512i magnitude = _mm512_and_si512(v, _mm512_set1_epi16(0x7fff));
        const __mmask32 large = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16((127 - 64) << 7));
        return _mm512_maskz_mov_epi16(large, v);
    }
    ALWAYS_INLINE void keys(__m512i c, __m512i d[1]) const { d[0] = kept(c); }
    ALWAYS_INLINE void values(const u8* a, const u8* b, __m512i d[2]) const {
        const __m512i x = kept(load<__m512i>(a)), y = kept(load<__m512i>(b));
        const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        d[0] = _mm512_permutex2var_epi64(low, first, high),
        d[1] = _mm512_permutex2var_epi64(low, second, high);
    }
};

// Dwords of codes, (dwords of a row, TOKENS).
template <bool Words>
static void transpose_codes(i64 bytes, const GroupCodes& g, __m512i* to) {
    for (i64 byte = 0; byte < bytes; byte += 64) {
        const __mmask64 inside = bytes - byte >= 64 ? ~0ull : (1ull << (bytes - byte)) - 1;
        const u8* row = g.at + byte;
        __m512i r[16];
#pragma GCC unroll 16
        for (int t = 0; t < TOKENS; t++, row += g.stride) r[t] = _mm512_maskz_loadu_epi8(inside, row);
        transpose_rows<Words>(r);
        const i64 dwords = std::min<i64>(16, (bytes - byte) / 4);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (i < dwords) to[byte / 4 + i] = r[i];
    }
}

static inline void code_keys(const StoredRows& s, const GroupCodes& g, __m512i* to) {
    const i64 bytes = s.element == E2M1 ? s.size / 2 : s.element == STORED_BF16 ? s.size * 2 : s.size;
    s.element <= E3M2 ? transpose_codes<true>(bytes, g, to) : transpose_codes<false>(bytes, g, to);
}

// Codes that are decoded as they are multiplied. Tile: the dwords of transpose_codes, for keys.
template <class F, class S>
struct Codes {
    using Steps = S;
    using Pair = typename Steps::Pair;
    static constexpr int PAIRS_OF_STEP = F::PAIRS_OF_DWORD, SUMS = F::SUMS;
    const F f;
    const __m512i* dwords;
    const GroupCodes codes;
    explicit Codes(const GroupRows& r) : f(r.table), dwords((const __m512i*)r.tile), codes(r.codes) {}
    ALWAYS_INLINE void keys(i64 i, int, Pair d[F::PAIRS_OF_DWORD]) const {
        __m512i v[F::PAIRS_OF_DWORD];
        f.keys(dwords[i], v);
        for (int k = 0; k < F::PAIRS_OF_DWORD; k++) d[k] = Steps::pair((VI)v[k]);
    }
    ALWAYS_INLINE void values(i64 j, i64 e, Pair d[2]) const {
        __m512i v[2];
        const i64 at = F::BYTES_OF_32 * e / 32;
        f.values(codes.row(int(2 * j)) + at, codes.row(int(2 * j + 1)) + at, v);
        d[0] = Steps::pair((VI)v[0]), d[1] = Steps::pair((VI)v[1]);
    }
};

template <class F>
__attribute__((noinline)) static void pair_keys_as(const StoredRows& s, const GroupCodes& g, const u8* table,
                                                   u32* tile) {
    alignas(64) __m512i dwords[16 * F::BYTES_OF_32 / 2];
    const F f(table);
    const i64 bytes = s.size / 32 * F::BYTES_OF_32;
    transpose_codes<F::WORDS>(bytes, g, dwords);
    for (i64 i = 0; i < bytes / 4; i++) f.keys(dwords[i], (__m512i*)tile + i * F::PAIRS_OF_DWORD);
}
template <class F>
__attribute__((noinline)) static void pair_values_as(const StoredRows& s, const GroupCodes& g,
                                                     const u8* table, u32* tile) {
    const F f(table);
    for (int pair = 0; pair < TOKENS / 2; pair++) {
        const u8 *a = g.row(2 * pair), *b = g.row(2 * pair + 1);
        for (i64 i = 0; i < s.size / 32; i++)
            f.values(a + i * F::BYTES_OF_32, b + i * F::BYTES_OF_32,
                     (__m512i*)(tile + pair * s.size + i * 32));
    }
}
// Calls f with the type of the codes of rows.
template <class F>
static void with_codes(const StoredRows& s, const F& f) {
    if (s.element == STORED_BF16) return f((Bfloat16Pairs*)nullptr);
    if (s.element == E2M1) return f((NibblePairs*)nullptr);
    f((BytePairs*)nullptr);
}
static inline void pair_keys(const StoredRows& s, const GroupCodes& g, const u8* table, u32* tile) {
    with_codes(s,
               [&](auto* type) { pair_keys_as<std::remove_pointer_t<decltype(type)>>(s, g, table, tile); });
}
static inline void pair_values(const StoredRows& s, const GroupCodes& g, const u8* table, u32* tile) {
    with_codes(s,
               [&](auto* type) { pair_values_as<std::remove_pointer_t<decltype(type)>>(s, g, table, tile); });
}
template <class S>
static Products products_of_codes(const StoredRows& s) {
    if (s.element == STORED_BF16) return products_of<Codes<Bfloat16Pairs, S>>();
    if (s.element == E2M1) return products_of<Codes<NibblePairs, S>>();
    return products_of<Codes<BytePairs, S>>();
}
#endif

}  // namespace QT_NAMESPACE
