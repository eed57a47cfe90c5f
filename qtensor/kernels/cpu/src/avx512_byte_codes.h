// 64 elements to codes in byte lanes, with AVX-512. An element comes as a word: its sign, 8 bits of exponent
// and 7 of significand are a bfloat16, or a float32 rounded to odd, whose last bit tells whether anything was
// cut off. Those 7 bits pick the code's fraction from a table, rounding included; exponents are subtracted
// beside it. simd.h and element_codes.h say what is computed; here is only speed.
#pragma once
#include "scales.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
INLINE __m512i bytes_of(int v) { return _mm512_set1_epi8(char(v)); }

struct ByteOrder {
    alignas(64) u8 even[64], odd[64], block[8][64];
    alignas(64) u16 low[32], high[32];
    constexpr ByteOrder() : even(), odd(), block(), low(), high() {
        for (int i = 0; i < 64; i++) {
            even[i] = u8(2 * i);
            odd[i] = u8(2 * i + 1);
        }
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 64; i++) block[g][i] = u8(2 * g + i / 32);
        for (int i = 0; i < 32; i++) {
            low[i] = u16(2 * i);
            high[i] = u16(2 * i + 1);
        }
    }
};
static constexpr ByteOrder BYTES;

// Steps from the code of 2^e to that of 1.m * 2^e, both normal, by the 7 bits m behind the leading 1.
// Nearest, ties to the even code.
template <class E>
struct Fractions {
    alignas(64) u8 at[128];
    constexpr Fractions() : at() {
        for (int m = 0; m < 128; m++) at[m] = u8(rounded(m, 7 - E::mantissa));
    }
    static constexpr int rounded(int z, int shift) {
        const int q = z >> shift, rest = z & ((1 << shift) - 1), half = 1 << (shift - 1);
        return q + (rest > half || (rest == half && q % 2));
    }
};
template <class E>
static constexpr Fractions<E> FRACTIONS;

// Where the codes of values below the smallest normal one, 2^e, stand: those of 1.m * 2^(e - 1 - d), d = 0,
// 1, ..., take fewer and fewer bits and share the bytes of one or two tables. Extra: bits that a factor
// between 1 and 2 adds.
template <class E, int Extra>
struct SmallPlaces {
    static constexpr int depth = E::mantissa + 1 + Extra;  // from there on, the code is 0
    int table[depth], shift[depth], tables;
    alignas(16) u8 control[16],
        mask[16];  // by d: the shift, with the highest bit for the second table; the bits that count
    constexpr SmallPlaces() : table(), shift(), tables(1), control(), mask() {
        int used[2] = {0, 0};
        for (int d = 0; d < depth; d++) {
            const int size = E::mantissa + 1 + Extra - d;
            const int t = used[0] + size > 8;
            if (t) tables = 2;
            table[d] = t;
            shift[d] = used[t];
            used[t] += size;
            control[d] = u8(t << 7 | shift[d]);
            mask[d] = u8((1 << size) - 1);
        }
    }
};
template <class E, int Extra>
static constexpr SmallPlaces<E, Extra> SMALL_PLACES;

template <class E, int Extra>
struct SmallCodes {
    alignas(64) u8 at[SMALL_PLACES<E, Extra>.tables][128];
    constexpr void put(int d, int m, int code) {
        at[SMALL_PLACES<E, Extra>.table[d]][m] |= u8(code << SMALL_PLACES<E, Extra>.shift[d]);
    }
};
template <class E>
static constexpr SmallCodes<E, 0> small_fractions() {
    SmallCodes<E, 0> t{};
    for (int d = 0; d < SMALL_PLACES<E, 0>.depth; d++)
        for (int m = 0; m < 128; m++) t.put(d, m, Fractions<E>::rounded(128 + m, 8 - E::mantissa + d));
    return t;
}
template <class E>
static constexpr SmallCodes<E, 0> SMALL_FRACTIONS = small_fractions<E>();

template <class E>
struct Codes8 {
    static constexpr int fields =
        (E::max_bits >> 23) - E::min_exponent + 1;  // of the exponent of the largest value
    static constexpr int most =
        fields << E::mantissa | (E::max_bits >> (23 - E::mantissa) & ((1 << E::mantissa) - 1));
};
// A word of exponent e times 2^(127 - code) is normal where e > base. With a base from LEAST_BASE on, words
// of exponent 0 (zero, and subnormals, whose leading 1 is not implied) get code 0, as they should.
template <class E>
constexpr int base_of(int code) {
    return code + E::min_exponent - 128;
}
template <class E>
constexpr int LEAST_BASE = E::mantissa + 2;
template <class E>
constexpr i32 LEAST_CODE = LEAST_BASE<E> + 128 - E::min_exponent;

// The parts of 64 words: bytes of exponents, of low halves (the last bit of the exponent is their highest;
// tables of 128 leave it out) and of high halves.
struct WordParts {
    __m512i exponent, fraction, high;
};
INLINE WordParts parts_of(__m512i v0, __m512i v1) {
    const __m512i even = _mm512_load_si512(BYTES.even);
    return {_mm512_permutex2var_epi8(_mm512_srli_epi16(v0, 7), even, _mm512_srli_epi16(v1, 7)),
            _mm512_permutex2var_epi8(v0, even, v1),
            _mm512_permutex2var_epi8(v0, _mm512_load_si512(BYTES.odd), v1)};
}
template <class E>
INLINE __m512i fraction_of(__m512i m, const u8 table[128]) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), m, _mm512_load_si512(table + 64));
}
template <class E>
INLINE __m512i normal_codes(const WordParts& p, __m512i base, __m512i fraction) {
    __m512i e = _mm512_min_epu8(_mm512_subs_epu8(p.exponent, base), bytes_of(Codes8<E>::fields + 1));
    e = _mm512_slli_epi16(e, E::mantissa);  // no byte overflows
    return _mm512_min_epu8(_mm512_add_epi8(e, fraction), bytes_of(Codes8<E>::most));
}
template <class E>
INLINE VB with_signs(__m512i q, const WordParts& p) {
    const __m512i top = bytes_of(1 << (E::width - 1));
    return (VB)_mm512_ternarylogic_epi32(q, E::width == 8 ? p.high : _mm512_srli_epi16(p.high, 8 - E::width),
                                         top, 0xf8);
}

// q with the codes of the words at or below the base.
template <class E, int Extra>
INLINE __m512i with_small(__m512i q, const WordParts& p, __m512i base, __mmask64 small,
                          const SmallCodes<E, Extra>& t) {
    const auto& places = SMALL_PLACES<E, Extra>;
    const __m512i below = _mm512_min_epu8(_mm512_sub_epi8(base, p.exponent), bytes_of(15));
    const __m512i control = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(places.control)), below);
    const __m512i mask = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(places.mask)), below);
    __m512i v = fraction_of<E>(p.fraction, t.at[0]);
    if (places.tables == 2)
        v = _mm512_mask_mov_epi8(v, _mm512_movepi8_mask(control),
                                 fraction_of<E>(p.fraction, t.at[places.tables - 1]));
    // Each byte of eight, shifted right by its own count; bits of the next one come after those that count.
    v = _mm512_multishift_epi64_epi8(_mm512_add_epi8(control, _mm512_set1_epi64(0x3830282018100800)), v);
    return _mm512_mask_mov_epi8(q, small, _mm512_and_si512(v, mask));
}

// Codes of words times 2^(127 - code). base: bytes, base_of<E>(code). history: a bit for each group before,
// set where it had values below the smallest normal one: a branch that one in two groups takes costs more
// than the work that it saves.
template <class E>
INLINE VB codes_of_words(__m512i v0, __m512i v1, __m512i base, u32& history) {
    const WordParts p = parts_of(v0, v1);
    __m512i q = normal_codes<E>(p, base, fraction_of<E>(p.fraction, FRACTIONS<E>.at));
    const __mmask64 small = _mm512_cmple_epu8_mask(p.exponent, base);
    history = history << 1 | (small != 0);
    if (__builtin_expect((history & 0xff) != 0, 0))
        q = with_small<E, 0>(q, p, base, small, SMALL_FRACTIONS<E>);
    return with_signs<E>(q, p);
}

// ---- codes of 4 and 6 bits, by place
// Packing takes turns by lanes of 16 bytes: what restores the order of 64 bytes, and of 128 packed codes.
template <bool Pairs>
struct PackedOrder {
    alignas(64) i32 group[16];
    alignas(64) u16 nibbles[32];
    constexpr PackedOrder() : group(), nibbles() {
        for (int i = 0; i < 16; i++) group[i] = place_of(4 * i) / 4;
        for (int i = 0; i < 32; i++) {
            const int from = place_of(i % 16 * 4);
            nibbles[i] = u16(from / 16 * 8 + i / 16 * 4 + from % 16 / 4);
        }
    }
    static constexpr int place_of(int e) {
        return Pairs ? e % 32 / 8 * 16 + e / 32 * 8 + e % 8 : e % 16 / 4 * 16 + e / 16 * 4;
    }
};
template <bool Pairs>
static constexpr PackedOrder<Pairs> PACKED;
template <bool Pairs>
INLINE VB in_order(VB packed) {
    return (VB)_mm512_permutexvar_epi32(_mm512_load_si512(PACKED<Pairs>.group), (__m512i)packed);
}
// A word without its sign, less a base, has an exponent in its high byte, 0 where all values get code 0, and
// 7 bits of fraction from bit 1 on. Its place is twice the number that its exponent and as many bits of
// fraction as decide make, plus 1 where more bits follow: ties have places of their own.
template <class E>
struct Places {
    static constexpr int depth = E::mantissa + 1;  // exponents below that of the smallest normal number
    static constexpr int shift = 7 - E::mantissa;
    static constexpr bool clamped = E::width == 4;  // others end where bytes do
    static constexpr int most = (Codes8<E>::fields + depth) << 8 | 0xff;
    static constexpr int count = clamped ? 64 : 256;
    alignas(64) u8 code[count];
    constexpr Places() : code() {
        constexpr int per_exponent = 4 << E::mantissa, top = Codes8<E>::most;
        for (int i = per_exponent; i < count; i++) {
            const int exponent = i / per_exponent - 1 - depth, fraction = i % per_exponent;
            const int c = exponent < 0 ? Fractions<E>::rounded(per_exponent + fraction, 2 - exponent)
                                       : ((exponent + 1) << E::mantissa) + Fractions<E>::rounded(fraction, 2);
            code[i] = u8(c < top ? c : top);
        }
    }
};
template <class E>
static constexpr Places<E> PLACES;
// Added to the code of a factor, the exponent below which words get code 0.
template <class E>
constexpr int LEAST_PLACE = base_of<E>(0) - Places<E>::depth;
template <class E>
INLINE __m512i places_of(__m512i w, __m512i base) {
    constexpr int shift = Places<E>::shift;
    __m512i s = _mm512_subs_epu16(_mm512_add_epi16(w, w), base);
    if (Places<E>::clamped) s = _mm512_min_epu16(s, _mm512_set1_epi16(Places<E>::most));
    const __m512i up = _mm512_add_epi16(s, _mm512_set1_epi16((1 << shift) - 1));
    return _mm512_add_epi16(_mm512_srli_epi16(s, shift), _mm512_srli_epi16(up, shift));
}
// 64 words; base0, base1: (code + LEAST_PLACE) << 8 for each of them. In the order of PackedOrder<true>.
template <class E>
INLINE VB codes_by_place(__m512i w0, __m512i w1, __m512i base0, __m512i base1) {
    const u8* table = PLACES<E>.code;
    const __m512i place = _mm512_packus_epi16(places_of<E>(w0, base0), places_of<E>(w1, base1));
    const __m512i sign = _mm512_srli_epi16(_mm512_packs_epi16(w0, w1), 8 - E::width);
    __m512i code;
    if (Places<E>::clamped)
        code = _mm512_permutexvar_epi8(place, _mm512_load_si512(table));
    else
        code = _mm512_mask_mov_epi8(fraction_of<E>(place, table), _mm512_movepi8_mask(place),
                                    fraction_of<E>(place, table + 128));
    return (VB)_mm512_ternarylogic_epi32(code, sign, bytes_of(1 << (E::width - 1)), 0xf8);
}
template <class E>
INLINE VB place_group(const u16* x, const __m512i base[2]) {
    return codes_by_place<E>(load<__m512i>(x), load<__m512i>(x + 32), base[0], base[1]);
}

// 32 floats to words, rounded to odd: in order, and where even and odd elements stand in vectors of their
// own.
INLINE __m512i odd_words(VI a, VI b) {
    const __m512i low = _mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(BYTES.low), (__m512i)b);
    const __m512i high = _mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(BYTES.high), (__m512i)b);
    return _mm512_or_si512(high, _mm512_min_epu16(low, _mm512_set1_epi16(1)));
}
INLINE __m512i odd_words_of_pairs(VI even, VI odd) {
    const __m512i upper = _mm512_set1_epi32(i32(0xffff0000));
    const __m512i high = _mm512_ternarylogic_epi32((__m512i)((VU)even >> 16), (__m512i)odd, upper, 0xf8);
    const __m512i low =
        _mm512_ternarylogic_epi32((__m512i)even, _mm512_slli_epi32((__m512i)odd, 16), upper, 0xd8);
    return _mm512_or_si512(high, _mm512_min_epu16(low, _mm512_set1_epi16(1)));
}

// ---- floats times a factor
template <class D, class E>
INLINE VB codes_of_products(const typename D::T* x, const VF f[4], u32& history) {
    VI v[4];
    D::group(x, v);
    for (int j = 0; j < 4; j++) v[j] = (VI)((VF)v[j] * f[j]);
    const __m512i w0 = D::pairs ? odd_words_of_pairs(v[0], v[1]) : odd_words(v[0], v[1]);
    const __m512i w1 = D::pairs ? odd_words_of_pairs(v[2], v[3]) : odd_words(v[2], v[3]);
    if constexpr (E::width < 8) {
        const __m512i base = _mm512_set1_epi16(short((127 + LEAST_PLACE<E>) << 8));
        return in_order<true>(codes_by_place<E>(w0, w1, base, base));
    } else {
        return codes_of_words<E>(w0, w1, bytes_of(base_of<E>(127)), history);
    }
}
template <class D, class E>
INLINE VB codes_of_products(const typename D::T* x, const VF f[4]) {
    u32 none = 0;
    return codes_of_products<D, E>(x, f, none);
}

// ---- bfloat16 times powers of two
template <class E>
INLINE VB pow2_group(const u16* x, __m512i base) {
    u32 none = 0;
    return codes_of_words<E>(load<__m512i>(x), load<__m512i>(x + 32), base, none);
}

// ---- bfloat16 times one factor: the products of all significands in a table
struct Significands {
    alignas(64) u32 at[128];  // of the bfloat16 from 1 to 2, as floats
    constexpr Significands() : at() {
        for (u32 m = 0; m < 128; m++) at[m] = 127u << 23 | m << 16;
    }
};
static constexpr Significands SIGNIFICANDS;

// As Fractions and SmallCodes; the latter where `deep`.
template <class E>
struct FactorTable {
    alignas(64) u8 at[128];
    SmallCodes<E, 1> small;
    int base;
    bool usable, deep;

    // count: elements that it will serve.
    FactorTable(float factor, i64 count) : deep(count > 8192) {
        const i32 u = bits<i32>(factor), one = 127 << 23, significand = u & 0x7fffff;
        base = base_of<E>(127 + 127 - (u >> 23));
        usable = count >= 512 && u >= 0x00800000 && u < INF_BITS && base >= LEAST_BASE<E>;
        if (!usable) return;
        fill(at, significand | one, encode<E, false, false>(all(1.0f)));
        if (!deep) return;
        constexpr auto& places = SMALL_PLACES<E, 1>;
        memset(small.at, 0, sizeof small.at);
        for (int d = 0; d < places.depth; d++) {
            alignas(64) u8 row[128];
            fill(row, significand | (E::min_exponent - 1 - d) << 23, VI{});
            u8* to = small.at[places.table[d]];
            for (int m = 0; m < 128; m++) to[m] = u8(to[m] | row[m] << places.shift[d]);
        }
    }
    static void fill(u8* row, i32 factor, VI less) {
        for (int m = 0; m < 128; m += W) {
            const VF x = load<VF>(SIGNIFICANDS.at + m);
            narrow(row + m, encode<E, false, false>(x * (VF)all(factor)) - less);
        }
    }
};
template <class E>
INLINE VB codes_of_table(const u16* x, const FactorTable<E>& t, const VF f[4], u32& history) {
    const WordParts p = parts_of(load<__m512i>(x), load<__m512i>(x + 32));
    const __m512i base = bytes_of(t.base);
    __m512i q = normal_codes<E>(p, base, fraction_of<E>(p.fraction, t.at));
    const __mmask64 small = _mm512_cmple_epu8_mask(p.exponent, base);
    history = history << 1 | (small != 0);
    if (__builtin_expect((history & 0xff) != 0, 0)) {
        if (t.deep)
            q = with_small<E, 1>(q, p, base, small, t.small);
        else if (_mm512_mask_test_epi8_mask(small, p.exponent, p.exponent))  // more than zeros
            return codes_of_products<Bfloat16, E>(x, f);
        else
            q = _mm512_maskz_mov_epi8(~small, q);
    }
    return with_signs<E>(q, p);
}
#endif

}  // namespace QT_NAMESPACE
