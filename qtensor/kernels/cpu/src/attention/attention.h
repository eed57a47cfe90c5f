// Attention over rows of keys and values as they are stored: what all instruction sets share. The order of
// the sums is part of the result (docs/numerics.md, "Attention").
#pragma once
#include <algorithm>
#include <cmath>

#include "../fused.h"
#include "calls.h"

namespace QT_NAMESPACE {

constexpr int TOKENS = 16;  // a group: lanes of scores
constexpr int CHUNK = 256;  // tokens that share a maximum
constexpr int GROUPS = CHUNK / TOKENS;
constexpr int SCORE_ROW = CHUNK + TOKENS;   // floats from row to row; a power of two would share cache sets
constexpr i64 SEGMENT = 4 * CHUNK;          // tokens whose results are merged first
constexpr int PARTS = TOKENS / W;           // vectors of a group
constexpr int MOST_ROWS = W == 16 ? 8 : 4;  // that are multiplied at once
constexpr float LEAST_VALUE = 0x1p-64f;     // of plain rows; smaller ones count as 0

// The codes of a group of tokens.
struct GroupCodes {
    const u8* at;
    i64 stride;
    ALWAYS_INLINE const u8* row(int token) const { return at + token * stride; }
};

// What a row of queries sees: tokens lo .. hi.
struct Seen {
    i64 lo, hi;
    bool none() const { return lo > hi; }
    bool misses(i64 first, i64 count) const { return none() || first > hi || first + count <= lo; }
    bool covers(i64 first, i64 count) const { return first >= lo && first + count - 1 <= hi; }
};
INLINE Seen seen_by(const AttentionCall& c, i64 b, i64 query) {
    Seen s{0, c.lengths[b] - 1};
    const i64 at = c.positions ? c.positions[b * c.queries + query] : c.lengths[b] - c.queries + query;
    if (c.causal) s.hi = std::min(s.hi, at);
    if (c.window) s.lo = std::max(s.lo, at - c.window + 1);
    if (c.first) s.lo = std::max(s.lo, c.first[b]);
    return s;
}

// 2^x for x <= 0: 0 below -96, NaN for NaN.
INLINE VF exp2_of(VF x) {
    const VF least = all(-96.0f), magic = all(0x1.8p23f);
    const VF inside = x < least ? least : x;
    const VF shifted = inside + magic, f = inside - (shifted - magic);
    VF y = all(0.00015353356138803065f);
    for (const float c : {0.0013398876180872321f, 0.009618437848985195f, 0.055503323674201965f,
                          0.24022647738456726f, 0.6931471824645996f, 1.0f})
        y = fused(y, f, all(c));
    const VF power = (VF)((VI)y + (((VI)shifted - all(0x4b400000)) << 23));
    return x < least ? VF{} : x == x ? power : x;
}
static inline float exp2_of(float x) { return exp2_of(all(x))[0]; }

INLINE VF bfloat16_rounded(VF v) {
    const VI b = (VI)v, rounded = (b + all(0x7fff) + ((VI)((VU)b >> 16) & all(1))) & all(i32(0xffff0000));
    return v == v ? (VF)rounded : v;
}
static inline float fused_one(float a, float b, float c) { return fused(all(a), all(b), all(c))[0]; }

// The result of a row over some tokens. `some`: there is a score above -inf.
struct Partial {
    float most, sum;
    bool some;
};
// Merges v of `next` into o of `done`, which come before.
static inline void merge(Partial& done, float* o, const Partial& next, const float* v, i64 size) {
    if (!next.some) return;
    if (!done.some) {
        done = next;
        memcpy(o, v, sizeof(float) * size_t(size));
        return;
    }
    const float most = std::max(done.most, next.most);
    const float a = exp2_of(done.most - most), b = exp2_of(next.most - most);
    done = {most, fused_one(done.sum, a, next.sum * b), true};
    for (i64 i = 0; i < size; i += W) store(o + i, fused(load<VF>(o + i), all(a), load<VF>(v + i) * all(b)));
}

}  // namespace QT_NAMESPACE
