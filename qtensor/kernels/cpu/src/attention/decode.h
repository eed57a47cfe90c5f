// Codes of a group of 16 tokens to tiles (attention.h).
#pragma once
#include "../element_codes.h"
#include "attention.h"

namespace QT_NAMESPACE {

// ---- float tiles
// 4-bit codes are multiplied in the order 4 0 5 1 6 2 7 3 of eight: element i has this position.
constexpr int nibble_position(int i) { return i % 8 < 4 ? 2 * (i % 4) : 2 * (i % 4) + 1; }

// W codes, one a dword, to values.
template <class E>
INLINE VF value_of(VI c) {
    // A code without its sign, as the upper bits of a float32, has the exponent field of the code; `base`
    // moves it. Where that field is 0, the leading one of the float32 must go.
    constexpr i32 bias = 128 - E::min_exponent;  // E::min_exponent is biased by 127
    constexpr i32 base = (127 - bias) << 23, normal = 1 << E::mantissa;
    const VI m = c & all((1 << (E::width - 1)) - 1);
    const VF v = (VF)((m << (23 - E::mantissa)) + all(base));
    const VF small = (v - all(bits<float>(base))) * all(2.0f);
    VI r = m >= all(normal) ? (VI)v : (VI)small;
    if (E::has_nan && E::mantissa == 3) r = m == all(0x7f) ? all(0x7fc00000) : r;
    if (E::has_nan && E::mantissa == 2)
        r = m > all(0x7c) ? all(0x7fc00000) : m == all(0x7c) ? all(INF_BITS) : r;
    return (VF)(r | (c << (32 - E::width) & all(i32(0x80000000))));
}
// Calls f with the type of an element.
template <class F>
static void with_element(i64 element, const F& f) {
    switch (element) {
        case E4M3:
            return f(FE4M3{});
        case E5M2:
            return f(FE5M2{});
        case E2M3:
            return f(FE2M3{});
        case E3M2:
            return f(FE3M2{});
        default:
            return f(FE2M1{});
    }
}
// Rows of packed 6-bit codes to one a byte.
static inline void unpack_quads(const u8* p, i64 size, u8* to) {
    for (i64 i = 0; i < size / 4; i++, p += 3, to += 4) {
        const u32 word = p[0] | u32(p[1]) << 8 | u32(p[2]) << 16;
        for (int j = 0; j < 4; j++) to[j] = word >> (6 * j) & 63;
    }
}
// Plain numbers to float32; those below `least` count as 0.
template <class D>
static void widen_row(const u8* from, i64 size, float* to, float least = LEAST_VALUE) {
    for (i64 i = 0; i < size; i += W) {
        const VF v = (VF)D::one((const typename D::T*)from + i);
        const VF magnitude = (VF)((VI)v & all(ABS));
        store(to + i, magnitude < all(least) ? VF{} : v);
    }
}
static inline void widen_plain(const StoredRows& s, const GroupCodes& g, float* to) {
    for (int t = 0; t < TOKENS; t++) {
        float* row = to + t * s.size;
        if (s.element == STORED_BF16) widen_row<Bfloat16>(g.row(t), s.size, row);
        if (s.element == STORED_F16) widen_row<Float16>(g.row(t), s.size, row);
        if (s.element == STORED_F32) widen_row<Float32>(g.row(t), s.size, row);
    }
}
// One code a byte: the rows of the group, or of `scratch` after unpacking.
static inline GroupCodes unpacked(const StoredRows& s, const GroupCodes& g, u8* scratch) {
    if (!s.packed) return g;
    for (int t = 0; t < TOKENS; t++) {
        unpack_quads(g.row(t), s.size, scratch + t * s.size);
    }
    return {scratch, s.size};
}
#if QT_ISA != 512  // which has codes_avx512.h
// 2 W bfloat16 words to float32.
INLINE void store_words(VH words, float* to) {
    alignas(64) u16 w[2 * W];
    store(w, words);
    for (int i = 0; i < 2 * W; i += W) store(to + i, (VF)Bfloat16::one(w + i));
}
// GROUP codes, one a byte, to float32: the first half and the second half.
template <class E>
INLINE void store_values(VB codes, const Table<E>& t, float* first, float* second) {
    VH w[2];
    words<E>(codes, t, w);
    store_words(w[0], first), store_words(w[1], second);
}
static inline void code_keys(const StoredRows& s, const GroupCodes& group, float* scratch, float* tile) {
    u8* const codes = (u8*)scratch;  // (entries, TOKENS)
    const i64 entries = s.element == E2M1 ? s.size / 2 : s.size;
    const GroupCodes g = unpacked(s, group, codes + TOKENS * s.size);
    transpose(g.at, g.stride, codes, TOKENS, TOKENS, entries);
    with_element(s.element, [&](auto type) {
        using E = decltype(type);
        const Table<E>& t = table<E>();
        for (i64 e = 0; e < entries; e += 2) {  // Two entries of 16 tokens are GROUP codes.
            const VB c = load<VB>(codes + e * TOKENS);
            if constexpr (E::width == 4) {
                float* const eight = tile + e / 4 * 8 * TOKENS;
                const auto place = [&](i64 i) { return eight + nibble_position(int(i % 8)) * TOKENS; };
                store_values<E>(c & 15, t, place(2 * e), place(2 * e + 2));
                store_values<E>(c >> 4, t, place(2 * e + 1), place(2 * e + 3));
            } else {
                store_values<E>(c, t, tile + e * TOKENS, tile + (e + 1) * TOKENS);
            }
        }
    });
}
static inline void code_values(const StoredRows& s, const GroupCodes& group, float* scratch, float* tile) {
    const GroupCodes g = unpacked(s, group, (u8*)scratch);
    with_element(s.element, [&](auto type) {
        using E = decltype(type);
        const Table<E>& t = table<E>();
        for (int token = 0; token < TOKENS; token++) {
            const u8* row = g.row(token);
            float* const to = tile + token * s.size;
            for (i64 e = 0; e < s.size; e += GROUP) {
                const VB c = E::width == 4 ? load_nibbles(row + e / 2) : load<VB>(row + e);
                store_values<E>(c, t, to + e, to + e + GROUP / 2);
            }
        }
    });
}
#endif
// scratch: TOKENS * size floats.
static inline void float_keys(const StoredRows& s, const GroupCodes& g, float* scratch, float* tile) {
#if QT_ISA != 512
    if (!s.plain()) return code_keys(s, g, scratch, tile);
#endif
    widen_plain(s, g, scratch);
    transpose(scratch, s.size, tile, TOKENS, TOKENS, s.size);
}
static inline void float_values(const StoredRows& s, const GroupCodes& g, [[maybe_unused]] float* scratch,
                                float* tile) {
#if QT_ISA != 512
    if (!s.plain()) return code_values(s, g, scratch, tile);
#endif
    widen_plain(s, g, tile);
}

// ---- factors of a group, as (blocks, TOKENS)
struct FactorTables {
    float e8m0[256], e4m3[256];
    FactorTables() {
        for (int c = 0; c < 256; c++) {
            e8m0[c] = c == 255 ? NAN : std::ldexp(1.0f, c - 127);
            e4m3[c] = table<FE4M3>().value[c];
        }
    }
};
#if QT_ISA == 512
// Four factors, one in each byte of a lane.
template <class F>
INLINE void four_factors(VU codes, float* to, const F& value) {
    for (int i = 0; i < 4; i++) store(to + i * TOKENS, value((VI)(codes >> (8 * i)) & all(255)));
}
// Factors j .. j + 3 of 16 tokens, one in each byte of a lane. `dense`: a token's follow those of the last.
INLINE VU factors_of_tokens(const u8* p, i64 stride, i64 j, bool dense) {
    const VI lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (dense && stride == 2) return (VU)_mm512_cvtepu16_epi32(load<__m256i>(p));
    if (dense && stride == 4) return load<VU>(p);
    if (dense && stride == 8) {
        const __m512i places = (__m512i)(lanes * all(2) + all(i32(j / 4)));
        return (VU)_mm512_permutex2var_epi32(load<__m512i>(p), places, load<__m512i>(p + 64));
    }
    return (VU)_mm512_i32gather_epi32((__m512i)(lanes * all(i32(stride))), p + j, 1);
}
INLINE void gather_factors(i64 factor_id, i64 count, const u8* p, i64 stride, float* to) {
    for (i64 j = 0; j < count; j += 4) {
        const VU codes = factors_of_tokens(p, stride, j, stride == count);
        if (factor_id == FACTOR_E8M0)
            four_factors(codes, to + j * TOKENS, [](VI c) {
                return (VF)(c == all(255) ? all(0x7fc00000) : max(c << 23, all(0x400000)));
            });
        else
            four_factors(codes, to + j * TOKENS, value_of<FE4M3>);
    }
}
#endif
// to: (factors, rounded up to a multiple of 4; TOKENS).
static inline void decode_factors(const StoredRows& s, const u8* p, i64 stride, float* to) {
    static const FactorTables tables;
    const i64 count = s.factor_count;
    if (s.factor_id == FACTOR_ROW) {
        if (stride == 4)
            memcpy(to, p, 4 * TOKENS);
        else
            for (int t = 0; t < TOKENS; t++) memcpy(to + t, p + t * stride, 4);
        return;
    }
#if QT_ISA == 512
    if (count % 4 == 0 || (count == 2 && stride == 2))
        return gather_factors(s.factor_id, count, p, stride, to);
#endif
    const float* values = s.factor_id == FACTOR_E8M0 ? tables.e8m0 : tables.e4m3;
    for (int t = 0; t < TOKENS; t++)
        for (int j = 0; j < count; j++) to[j * TOKENS + t] = values[p[t * stride + j]];
}

}  // namespace QT_NAMESPACE
