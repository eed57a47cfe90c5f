// Products of queries with keys, and of weights with values, of a group of tokens. The numbers come from
// tiles of decoded rows, or from codes that are decoded in registers (codes_avx512.h).
#pragma once
#include "attention.h"

namespace QT_NAMESPACE {

// ---- tasks
// What products read. Tile of keys: (positions of a row, TOKENS); of values: (TOKENS, positions). Narrow
// tiles hold bfloat16 pairs in one u32: of positions 2 i and 2 i + 1 for keys, of tokens 2 j and 2 j + 1 for
// values; the odd one is the high half and comes first in a sum.
struct GroupRows {
    const StoredRows& s;
    GroupCodes codes;
    const u8* table;   // of the values of codes
    const void* tile;  // or dwords of codes, (dwords of a row, TOKENS), for keys that are not decoded
};
// Memory that is read soon, a line with each step of a product: many requests at once would hold up loads.
struct Ahead {
    const u8* at;      // null: of no product
    const i64* lines;  // by step
    bool two;          // the line behind it, too
    Ahead for_rows(i64 first) const { return {first ? nullptr : at, lines, two}; }
    ALWAYS_INLINE void fetch(i64 step) const {
        if (!at) return;
        __builtin_prefetch(at + lines[step]);
        if (two) __builtin_prefetch(at + lines[step] + 64);
    }
};
// A block of rows is interleaved: q is float (size / 2, rows, 2) or u32 pairs (size / 2, rows).
struct ScoreTask {
    GroupRows keys;
    const float* factors;  // (pieces, TOKENS), or null
    const void* q;
    float* s;  // (rows, SCORE_ROW)
    Ahead ahead;
};
struct ValueTask {
    GroupRows values;
    const void* p;  // float (blocks, rows, TOKENS), or u32 pairs (blocks, rows, TOKENS / 2)
    float* o;       // (rows, size)
    Ahead ahead;
};
// By the number of rows: 1, 2, 4, 8.
struct Products {
    int pairs_of_step;  // of keys
    void (*scores[4])(const ScoreTask&);
    void (*values[4])(const ValueTask&);

    i64 key_steps(i64 size) const { return size / 2 / pairs_of_step; }
    static i64 value_steps(i64 size) { return size / (2 * W) * (TOKENS / 2); }
};

// One number in all lanes, in a form that compilers make an operand of the product.
INLINE VF every(const float* x) {
#if QT_ISA == 512
    return (VF)_mm512_set1_ps(*x);
#else
    return all(*x);
#endif
}

// ---- how the two numbers of a pair enter a sum: the odd one first
struct FloatSteps {
    using X = float;
    static constexpr int X_OF_PAIR = 2;
    struct Pair {
        VF low, high;
    };
    INLINE Pair pair(VI v) { return {(VF)(v << 16), (VF)(v & all(i32(0xffff0000)))}; }
    INLINE VF add(VF sum, const X* x, const Pair& d) {
        return fused(d.low, every(x), fused(d.high, every(x + 1), sum));
    }
};
#ifdef __AVX512BF16__
struct DotSteps {
    using X = u32;
    static constexpr int X_OF_PAIR = 1;
    using Pair = VI;
    INLINE Pair pair(VI v) { return v; }
    INLINE VF add(VF sum, const X* x, const Pair& d) {
        return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)all(i32(*x)), (__m512bh)d);
    }
};
#endif

// ---- tiles of decoded numbers (attention.h). keys: step i, part g of the tokens. values: tokens 2 j and
// 2 j + 1, two vectors of values from e on. SUMS are computed at once: each waits for the step before.
struct FloatTile {
    using Steps = FloatSteps;
    using Pair = Steps::Pair;
    static constexpr int PAIRS_OF_STEP = 1, SUMS = W == 16 ? 16 : 8;
    const float* at;
    i64 size;
    explicit FloatTile(const GroupRows& r) : at((const float*)r.tile), size(r.s.size) {}
    ALWAYS_INLINE void keys(i64 i, int g, Pair d[1]) const {
        d[0] = {load<VF>(at + 2 * i * TOKENS + g * W), load<VF>(at + (2 * i + 1) * TOKENS + g * W)};
    }
    ALWAYS_INLINE void values(i64 j, i64 e, Pair d[2]) const {
        const float *low = at + 2 * j * size + e, *high = low + size;
        d[0] = {load<VF>(low), load<VF>(high)}, d[1] = {load<VF>(low + W), load<VF>(high + W)};
    }
};
#if QT_ISA == 512
// Tiles of bfloat16 pairs.
template <class S>
struct PairTile {
    using Steps = S;
    using Pair = typename Steps::Pair;
    static constexpr int PAIRS_OF_STEP = 1, SUMS = 16;
    const u32* at;
    i64 size;
    explicit PairTile(const GroupRows& r) : at((const u32*)r.tile), size(r.s.size) {}
    ALWAYS_INLINE void keys(i64 i, int, Pair d[1]) const { d[0] = Steps::pair(load<VI>(at + i * TOKENS)); }
    ALWAYS_INLINE void values(i64 j, i64 e, Pair d[2]) const {
        d[0] = Steps::pair(load<VI>(at + j * size + e)), d[1] = Steps::pair(load<VI>(at + j * size + e + W));
    }
};
#endif

// R rows times a group of keys, B pieces at a time.
template <class Source, int R, int B>
ALWAYS_INLINE void score_pieces(const ScoreTask& t, const Source& keys, i64 piece, VF total[R][PARTS]) {
    using Steps = typename Source::Steps;
    constexpr int PAIRS = Source::PAIRS_OF_STEP, X = Steps::X_OF_PAIR;
    const i64 steps = t.keys.s.piece() / 2 / PAIRS;
    const auto* q = (const typename Steps::X*)t.q + piece * steps * PAIRS * R * X;
    VF sums[B][R][PARTS] = {};
    for (i64 i = 0; i < steps; i++)
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) {
            t.ahead.fetch(piece * steps + i * B + b);
            typename Source::Pair d[PARTS][PAIRS];
            for (int g = 0; g < PARTS; g++) keys.keys((piece + b) * steps + i, g, d[g]);
            const auto* x = q + (b * steps + i) * PAIRS * R * X;
#pragma GCC unroll 4
            for (int e = 0; e < PAIRS; e++)
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    for (int g = 0; g < PARTS; g++)
                        sums[b][r][g] = Steps::add(sums[b][r][g], x + (e * R + r) * X, d[g][e]);
        }
    for (int b = 0; b < B; b++)
        for (int g = 0; g < PARTS; g++) {
            if (t.factors) {
                const VF factor = load<VF>(t.factors + (piece + b) * TOKENS + g * W);
                for (int r = 0; r < R; r++) total[r][g] = fused(sums[b][r][g], factor, total[r][g]);
            } else {
                for (int r = 0; r < R; r++) total[r][g] = total[r][g] + sums[b][r][g];
            }
        }
}
template <class Source, int R>
static void scores(const ScoreTask& t) {
    constexpr int B = std::max(1, std::min(4, Source::SUMS / (R * PARTS)));
    const Source keys(t.keys);
    VF total[R][PARTS] = {};
    const i64 pieces = t.keys.s.pieces;
    i64 piece = 0;
    for (; piece + B <= pieces; piece += B) score_pieces<Source, R, B>(t, keys, piece, total);
    if (B > 1)
        for (; piece < pieces; piece++) score_pieces<Source, R, 1>(t, keys, piece, total);
    for (int r = 0; r < R; r++)
        for (int g = 0; g < PARTS; g++) store(t.s + r * SCORE_ROW + g * W, total[r][g]);
}

// U times two vectors of results from value e on.
template <class Source, int R, int U>
ALWAYS_INLINE void add_values(const ValueTask& t, const Source& values, i64 e) {
    using Steps = typename Source::Steps;
    constexpr int X = Steps::X_OF_PAIR;
    const i64 size = t.values.s.size, block = t.values.s.block;
    const int shift = block == 16 ? 4 : 5;  // blocks have 16 or 32 values
    float* const o = t.o + e;
    const Ahead ahead{t.ahead.at, t.ahead.lines + e / (2 * W) * (TOKENS / 2), t.ahead.two};
    VF sums[R][2 * U];
    const typename Steps::X* p[2 * U];
    for (int u = 0; u < 2 * U; u++) {
        const i64 first = e + (W == 16 ? u : u / 2 * 2) * W;
        p[u] = (const typename Steps::X*)t.p + (block ? first >> shift : 0) * (R * TOKENS / 2 * X);
        for (int r = 0; r < R; r++) sums[r][u] = load<VF>(o + r * size + u * W);
    }
#pragma GCC unroll 1
    for (int j = 0; j < TOKENS / 2; j++)
#pragma GCC unroll 4
        for (int u = 0; u < 2 * U; u += 2) {
            ahead.fetch(u / 2 * (TOKENS / 2) + j);
            typename Source::Pair d[2];
            values.values(j, e + u * W, d);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++)
                    sums[r][u + h] = Steps::add(sums[r][u + h], p[u + h] + (r * TOKENS / 2 + j) * X, d[h]);
        }
    for (int u = 0; u < 2 * U; u++)
        for (int r = 0; r < R; r++) store(o + r * size + u * W, sums[r][u]);
}
template <class Source, int R>
static void values(const ValueTask& t) {
    constexpr int U = std::max(1, std::min(4, Source::SUMS / (2 * R))), STEP = U * 2 * W;
    const Source source(t.values);
    const i64 size = t.values.s.size;
    i64 e = 0;
    for (; e + STEP <= size; e += STEP) add_values<Source, R, U>(t, source, e);
    if (U > 1)
        for (; e < size; e += 2 * W) add_values<Source, R, 1>(t, source, e);
}

template <class Source>
constexpr Products products_of() {
    if constexpr (MOST_ROWS == 8)
        return {Source::PAIRS_OF_STEP,
                {scores<Source, 1>, scores<Source, 2>, scores<Source, 4>, scores<Source, 8>},
                {values<Source, 1>, values<Source, 2>, values<Source, 4>, values<Source, 8>}};
    else
        return {Source::PAIRS_OF_STEP,
                {scores<Source, 1>, scores<Source, 2>, scores<Source, 4>, nullptr},
                {values<Source, 1>, values<Source, 2>, values<Source, 4>, nullptr}};
}

}  // namespace QT_NAMESPACE
