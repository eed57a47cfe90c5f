// From sums of products to scores, and from scores to weights.
#pragma once
#include "attention.h"

namespace QT_NAMESPACE {

// A row of queries: the head of q, the query, and what it sees.
struct QueryRow {
    i64 b, head, query;
    Seen seen;
};

// What is added to the scores of 16 tokens by a mask, or -inf.
static inline void add_mask(const AttentionCall& c, const QueryRow& row, i64 token, float* score) {
    const i64 at = row.b * c.mask_batch + row.head * c.mask_head + row.query * c.mask_query;
    const float log2_e = 1.4426950408889634f;
    for (int i = 0; i < TOKENS; i++) {
        if (!row.seen.covers(token + i, 1)) continue;
        const i64 place = at + (token + i) * c.mask_token;
        if (c.mask_dtype == 3) {
            if (!c.mask[place]) score[i] = -INFINITY;
            continue;
        }
        with_type(c.mask_dtype, [&](auto type) {
            using D = decltype(type);
            const float m = D::to_float(((const typename D::T*)c.mask)[place]);
            score[i] = fused_one(m, log2_e, score[i]);
        });
    }
}
INLINE VF soft_capped(VF y, VF cap) {
    const VF minus = (VF)((VI)y | all(i32(0x80000000)));
    const VF z = exp2_of(minus < all(-96.0f) ? all(-96.0f) : minus);
    const VF a = (all(1.0f) - z) / (all(1.0f) + z);
    return (y < VF{} ? -a : a) * cap;
}
// From sums of products to scores: the groups first .. end - 1 of a row, of the chunk that starts at `chunk`.
// row_factors: (CHUNK), or null.
static inline void finish_scores(const AttentionCall& c, const QueryRow& row, i64 chunk, int first, int end,
                                 const float* row_factors, float* score) {
    const VF pre = all(float(c.pre)), cap = all(float(c.cap));
    for (int i = first * TOKENS; i < end * TOKENS; i += W) {
        VF y = load<VF>(score + i);
        if (row_factors) y = y * load<VF>(row_factors + i);
        y = y * pre;
        store(score + i, c.cap != 0 ? soft_capped(y, cap) : y);
    }
    if (c.mask)
        for (int i = first; i < end; i++) add_mask(c, row, chunk + i * TOKENS, score + i * TOKENS);
    for (int i = first; i < end; i++)
        if (!row.seen.covers(chunk + i * TOKENS, TOKENS))
            for (int t = i * TOKENS; t < (i + 1) * TOKENS; t++)
                if (!row.seen.covers(chunk + t, 1)) score[t] = -INFINITY;
}
// From scores to numbers that are 1 for the largest score; zeros if there is no score.
static inline Partial soften(int first, int end, float* s) {
    VF most = all(-INFINITY);
    VI some{};
    for (int i = first * TOKENS; i < end * TOKENS; i += W) {
        const VF y = load<VF>(s + i);
        most = y > most ? y : most;
        some |= (VI)(y != all(-INFINITY));
    }
    float top = -INFINITY;
    for (int j = 0; j < W; j++) top = most[j] > top ? most[j] : top;
    if (!any(some)) {
        memset(s + first * TOKENS, 0, sizeof(float) * size_t((end - first) * TOKENS));
        return {top, 0, false};
    }
    VF lanes[PARTS] = {};
    for (int i = first * TOKENS; i < end * TOKENS; i += TOKENS)
        for (int g = 0; g < PARTS; g++) {
            const VF p = exp2_of(load<VF>(s + i + g * W) - all(top));
            store(s + i + g * W, p);
            lanes[g] = lanes[g] + p;
        }
    alignas(64) float sums[TOKENS];
    for (int g = 0; g < PARTS; g++) store(sums + g * W, lanes[g]);
    for (int half = TOKENS / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] = sums[j] + sums[j + half];
    return {top, sums[0], true};
}

// How products take weights: float32, the same rounded to bfloat16, or bfloat16.
enum class Weights { EXACT, ROUNDED, HALVES };
// The weights of a group for each block of values, (blocks, rows, TOKENS), of rows whose numbers are
// SCORE_ROW apart. factors: (blocks, TOKENS), or null. Weights below `least` count as 0.
template <Weights How>
static void scale_weights(const float* p, int rows, const float* factors, i64 blocks, float least, void* to) {
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < TOKENS; g += W) {
            const VF one = load<VF>(p + r * SCORE_ROW + g);
            for (i64 block = 0; block < blocks; block++) {
                VF v = one;
                if (factors) v = one == VF{} ? one : one * load<VF>(factors + block * TOKENS + g);
                v = v < all(least) ? VF{} : v;
                if (How != Weights::EXACT) v = bfloat16_rounded(v);
                const i64 at = (block * rows + r) * TOKENS + g;
#if QT_ISA == 512
                if (How == Weights::HALVES) {
                    store((u16*)to + at, _mm512_cvtepi32_epi16((__m512i)((VU)v >> 16)));
                    continue;
                }
#endif
                store((float*)to + at, v);
            }
        }
}

// A float16, rounded to nearest even.
static u16 float16_of(float v) {
    const u32 b = bits<u32>(v), sign = b >> 16 & 0x8000, m = b & ABS;
    if (m > u32(INF_BITS)) return 0x7e00;
    if (m >= 0x47800000 - 0x1000) return u16(sign | 0x7c00);
    if (m < 0x38800000) return u16(sign | (bits<u32>(bits<float>(m) + 0.5f) - 0x3f000000));
    return u16(sign | ((m + 0xfff + (m >> 13 & 1)) - 0x38000000) >> 13);
}
// Writes what is known of a row before the division.
static inline void write_part(const AttentionCall& c, i64 place, const Partial& part, const float* sums) {
    c.sums[2 * place] = part.some ? part.most : -INFINITY;
    c.sums[2 * place + 1] = part.some ? part.sum : 0;
    float* out = (float*)c.out + place * c.v.stored;
    for (i64 e = 0; e < c.v.stored; e += W) {
        const VF v = load<VF>(sums + e) * all(float(c.post)) + VF{}, kept = v == v ? v : all(NAN);
        alignas(64) float value[W];
        store(value, !part.some ? VF{} : kept);
        memcpy(out + e, value, sizeof(float) * size_t(std::min<i64>(W, c.v.stored - e)));
    }
}
// Divides sums by the sum of weights, after a sink joined it, and writes the result of a row.
static inline void write_result(const AttentionCall& c, const QueryRow& row, const Partial& part,
                                const float* sums) {
    const i64 place_of_row = (row.b * c.groups * c.heads + row.head) * c.queries + row.query;
    if (c.sums) return write_part(c, place_of_row, part, sums);
    const i64 size = c.v.stored, at = place_of_row * size;
    float scale = 1, total = part.sum;
    if (c.sinks && part.some) {
        const i64 place = row.b * c.sink_batch + row.head * c.sink_head + row.query * c.sink_query;
        const float sink = c.sinks[place] * 1.4426950408889634f;
        const float most = part.most < sink ? sink : part.most;
        scale = exp2_of(part.most - most);
        total = fused_one(total, scale, sink == sink ? exp2_of(sink - most) : sink);
    }
    with_type(c.q_dtype, [&](auto type) {
        using D = decltype(type);
        auto* out = (typename D::T*)c.out + at;
        alignas(64) float value[W];
        alignas(64) u32 rounded[W];
        for (i64 e = 0; e < size; e += W) {
            VF v = load<VF>(sums + e) * all(scale) / all(total) * all(float(c.post)) + VF{};
            v = !part.some ? VF{} : v == v ? v : all(NAN);
            store(value, v), store(rounded, (VU)bfloat16_rounded(v) >> 16);
            const int count = int(std::min<i64>(W, size - e));
            for (int i = 0; i < count; i++) {
                if (D::id == F32) out[e + i] = typename D::T(value[i]);
                if (D::id == BF16) out[e + i] = typename D::T(rounded[i]);
                if (D::id == F16) out[e + i] = float16_of(value[i]);
            }
        }
    });
}

}  // namespace QT_NAMESPACE
