// Codes of a group of 16 tokens to tiles (attention.h).
#pragma once
#include "../element_codes.h"
#include "attention.h"

namespace QT_NAMESPACE {

// A group of rows.
struct GroupRows {
    const u8* codes;
    i64 stride;
    ALWAYS_INLINE const u8* row(int token) const { return codes + token * stride; }
};

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
static inline void widen_plain(const StoredRows& s, const GroupRows& g, float* to) {
    for (int t = 0; t < TOKENS; t++) {
        float* row = to + t * s.size;
        if (s.element == STORED_BF16) widen_row<Bfloat16>(g.row(t), s.size, row);
        if (s.element == STORED_F16) widen_row<Float16>(g.row(t), s.size, row);
        if (s.element == STORED_F32) widen_row<Float32>(g.row(t), s.size, row);
    }
}
// One code a byte: the rows of the group, or of `scratch` after unpacking.
static inline GroupRows unpacked(const StoredRows& s, const GroupRows& g, u8* scratch) {
    if (!s.packed) return g;
    for (int t = 0; t < TOKENS; t++) {
        unpack_quads(g.row(t), s.size, scratch + t * s.size);
    }
    return {scratch, s.size};
}
// scratch: TOKENS * size floats.
static void float_keys(const StoredRows& s, const GroupRows& group, float* scratch, float* tile) {
    if (s.plain()) {
        widen_plain(s, group, scratch);
        transpose(scratch, s.size, tile, TOKENS, TOKENS, s.size);
        return;
    }
    u8* const codes = (u8*)scratch;  // (entries, TOKENS)
    const i64 entries = s.element == E2M1 ? s.size / 2 : s.size;
    const GroupRows g = unpacked(s, group, codes + TOKENS * s.size);
    transpose(g.codes, g.stride, codes, TOKENS, TOKENS, entries);
    with_element(s.element, [&](auto type) {
        using E = decltype(type);
        for (i64 e = 0; e < entries; e++)
            for (int h = 0; h < TOKENS; h += W) {
                const VI c = widen(codes + e * TOKENS + h);
                if constexpr (E::width == 4) {
                    const i64 eight = e / 4 * 8;
                    const int first = nibble_position(int(e % 4 * 2)),
                              second = nibble_position(int(e % 4 * 2 + 1));
                    store(tile + (eight + first) * TOKENS + h, value_of<E>(c & all(15)));
                    store(tile + (eight + second) * TOKENS + h, value_of<E>(c >> 4));
                } else {
                    store(tile + e * TOKENS + h, value_of<E>(c));
                }
            }
    });
}
static void float_values(const StoredRows& s, const GroupRows& group, float* scratch, float* tile) {
    if (s.plain()) return widen_plain(s, group, tile);
    const GroupRows g = unpacked(s, group, (u8*)scratch);
    with_element(s.element, [&](auto type) {
        using E = decltype(type);
        for (int t = 0; t < TOKENS; t++) {
            const u8* row = g.row(t);
            float* to = tile + t * s.size;
            for (i64 e = 0; e < s.size; e += 2 * W) {
                if constexpr (E::width == 4) {
                    u8 codes[2 * W];
                    for (int i = 0; i < W; i++)
                        codes[2 * i] = row[e / 2 + i] & 15, codes[2 * i + 1] = row[e / 2 + i] >> 4;
                    store(to + e, value_of<E>(widen(codes)));
                    store(to + e + W, value_of<E>(widen(codes + W)));
                } else {
                    store(to + e, value_of<E>(widen(row + e)));
                    store(to + e + W, value_of<E>(widen(row + e + W)));
                }
            }
        }
    });
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
__attribute__((noinline)) static void decode_factors(const StoredRows& s, const u8* p, i64 stride,
                                                     float* to) {
    static const FactorTables tables;
    const int count = s.factor_count();
    if (s.factor_id == FACTOR_ROW) {
        for (int t = 0; t < TOKENS; t++) memcpy(to + t, p + t * stride, 4);
        return;
    }
    const float* values = s.factor_id == FACTOR_E8M0 ? tables.e8m0 : tables.e4m3;
#if QT_ISA == 512
    if (count % 4 == 0) {
        const VI lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i places = (__m512i)(lanes * all(i32(stride)));
        for (int j = 0; j < count; j += 4) {
            const VU four = (VU)_mm512_i32gather_epi32(places, p + j, 1);
            for (int i = 0; i < 4; i++) {
                const VI c = (VI)(four >> (8 * i)) & all(255);
                VF f;
                if (s.factor_id == FACTOR_E8M0)
                    f = (VF)(c == all(255) ? all(0x7fc00000) : max(c << 23, all(0x400000)));
                else
                    f = value_of<FE4M3>(c);
                store(to + (j + i) * TOKENS, f);
            }
        }
        return;
    }
#endif
    for (int t = 0; t < TOKENS; t++)
        for (int j = 0; j < count; j++) to[j * TOKENS + t] = values[p[t * stride + j]];
}

}  // namespace QT_NAMESPACE
