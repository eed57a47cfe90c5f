// Products of queries with decoded keys, and of weights with decoded values.
#pragma once
#include "attention.h"

namespace QT_NAMESPACE {

// One number in all lanes, in a form that compilers make an operand of the product.
INLINE VF every(const float* x) {
#if QT_ISA == 512
    return (VF)_mm512_set1_ps(*x);
#else
    return all(*x);
#endif
}

// Tiles of float32.
struct FloatTile {
    using X = float;
    static constexpr int X_OF_PAIR = 2;
    const float* at;
    explicit FloatTile(const void* p) : at((const float*)p) {}
    // Step i of keys, part g of the tokens; step j of values, `size` values a token, from value e on.
    struct Pair {
        VF low, high;
    };
    ALWAYS_INLINE Pair key(i64 i, int g) const {
        return {load<VF>(at + 2 * i * TOKENS + g * W), load<VF>(at + (2 * i + 1) * TOKENS + g * W)};
    }
    ALWAYS_INLINE Pair value(i64 j, i64 size, i64 e) const {
        return {load<VF>(at + 2 * j * size + e), load<VF>(at + (2 * j + 1) * size + e)};
    }
    INLINE VF add(VF sum, const X* x, const Pair& d) {
        return fused(d.low, every(x), fused(d.high, every(x + 1), sum));
    }
};
#if QT_ISA == 512
// Tiles of bfloat16 pairs, multiplied in float32.
struct PairTile {
    using X = float;
    static constexpr int X_OF_PAIR = 2;
    using Pair = FloatTile::Pair;
    const u32* at;
    explicit PairTile(const void* p) : at((const u32*)p) {}
    INLINE Pair split(VI v) { return {(VF)(v << 16), (VF)(v & all(i32(0xffff0000)))}; }
    ALWAYS_INLINE Pair key(i64 i, int) const { return split(load<VI>(at + i * TOKENS)); }
    ALWAYS_INLINE Pair value(i64 j, i64 size, i64 e) const { return split(load<VI>(at + j * size + e)); }
    INLINE VF add(VF sum, const X* x, const Pair& d) { return FloatTile::add(sum, x, d); }
};
#ifdef __AVX512BF16__
struct DotTile {
    using X = u32;
    static constexpr int X_OF_PAIR = 1;
    using Pair = VI;
    const u32* at;
    explicit DotTile(const void* p) : at((const u32*)p) {}
    ALWAYS_INLINE Pair key(i64 i, int) const { return load<VI>(at + i * TOKENS); }
    ALWAYS_INLINE Pair value(i64 j, i64 size, i64 e) const { return load<VI>(at + j * size + e); }
    INLINE VF add(VF sum, const X* x, const Pair& d) {
        return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)all(i32(*x)), (__m512bh)d);
    }
};
#endif
#endif

// R rows times a group of keys, B pieces at a time: each sum waits for the step before.
template <class Tile, int R, int B>
ALWAYS_INLINE void score_pieces(const ScoreTask& t, const Tile& tile, i64 piece, VF total[R][PARTS]) {
    using X = typename Tile::X;
    const i64 row = t.size / 2 * Tile::X_OF_PAIR, pairs = t.piece / 2;
    const X* q = (const X*)t.q + piece * pairs * Tile::X_OF_PAIR;
    VF sums[B][R][PARTS] = {};
    for (i64 i = 0; i < pairs; i += 4) {
        t.ahead->step();
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++)
#pragma GCC unroll 4
            for (int b = 0; b < B; b++)
#pragma GCC unroll 2
                for (int g = 0; g < PARTS; g++) {
                    const auto d = tile.key((piece + b) * pairs + i + step, g);
                    const X* x = q + (b * pairs + i + step) * Tile::X_OF_PAIR;
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) sums[b][r][g] = Tile::add(sums[b][r][g], x + r * row, d);
                }
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
template <class Tile, int R>
static void scores(const ScoreTask& t) {
    constexpr int B = std::max(1, std::min(4, (W == 16 ? 16 : 8) / (R * PARTS)));
    const Tile tile(t.tile);
    VF total[R][PARTS] = {};
    const i64 pieces = t.size / t.piece;
    i64 piece = 0;
    for (; piece + B <= pieces; piece += B) score_pieces<Tile, R, B>(t, tile, piece, total);
    if (B > 1)
        for (; piece < pieces; piece++) score_pieces<Tile, R, 1>(t, tile, piece, total);
    for (int r = 0; r < R; r++)
        for (int g = 0; g < PARTS; g++) store(t.s + r * SCORE_ROW + g * W, total[r][g]);
}

// U vectors of results from value e on.
template <class Tile, int R, int U>
ALWAYS_INLINE void add_values(const ValueTask& t, const Tile& tile, i64 e) {
    using X = typename Tile::X;
    VF sums[R][U];
    const X* p[U];
    for (int u = 0; u < U; u++) {
        p[u] = (const X*)t.p + (t.block ? (e + u * W) / t.block : 0) * (TOKENS / 2 * Tile::X_OF_PAIR);
        for (int r = 0; r < R; r++) sums[r][u] = load<VF>(t.o + r * t.size + e + u * W);
    }
    for (int j = 0; j < TOKENS / 2; j++) {
        t.ahead->step();
#pragma GCC unroll 8
        for (int u = 0; u < U; u++) {
            const auto d = tile.value(j, t.size, e + u * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                sums[r][u] = Tile::add(sums[r][u], p[u] + r * t.p_row + j * Tile::X_OF_PAIR, d);
        }
    }
    for (int u = 0; u < U; u++)
        for (int r = 0; r < R; r++) store(t.o + r * t.size + e + u * W, sums[r][u]);
}
template <class Tile, int R>
static void values(const ValueTask& t) {
    constexpr int U = std::max(2, std::min(8, (W == 16 ? 16 : 8) / R));
    const Tile tile(t.tile);
    i64 e = 0;
    for (; e + U * W <= t.size; e += U * W) add_values<Tile, R, U>(t, tile, e);
    if (U > 2)
        for (; e < t.size; e += 2 * W) add_values<Tile, R, 2>(t, tile, e);
}

template <class Tile>
constexpr Products products_of() {
    if constexpr (MOST_ROWS == 8)
        return {{scores<Tile, 1>, scores<Tile, 2>, scores<Tile, 4>, scores<Tile, 8>},
                {values<Tile, 1>, values<Tile, 2>, values<Tile, 4>, values<Tile, 8>}};
    else
        return {{scores<Tile, 1>, scores<Tile, 2>, scores<Tile, 4>, nullptr},
                {values<Tile, 1>, values<Tile, 2>, values<Tile, 4>, nullptr}};
}

}  // namespace QT_NAMESPACE
