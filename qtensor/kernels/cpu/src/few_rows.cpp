// Few rows of x times a quantized weight, in float32 or by the bfloat16 dot products of
// few_rows_bfloat16.cpp.
#include "few_rows_avx512.h"
#include "few_rows_lanes.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
bool few_rows_bfloat16(const CQuantizer& p, const FewRows& f);

// Bits of magnitudes of x: the least except for 0, and the largest. least is 0 if bfloat16 does not hold x.
struct Range {
    i32 least, most;
};
static Range range_of(const LinearCall& c) {
    return with_type(c.x_dtype, [&](auto type) {
        using D = decltype(type);
        VI least = all(ABS), most{}, inexact{};
        for (i64 m = 0; m < c.m; m++) {
            const auto* x = (const typename D::T*)c.x + m * c.stride;
            for (i64 k = 0; k < c.k; k += W) {
                typename D::T last[W] = {};
                if (k + W > c.k) memcpy(last, x + k, sizeof(typename D::T) * size_t(c.k - k));
                const VI v = D::one(k + W > c.k ? last : x + k), magnitude = v & all(ABS);
                inexact |= v & all(0xffff);
                least = min(least, magnitude ? magnitude : all(ABS));
                most = max(most, magnitude);
            }
            if (any(inexact != all(0))) return Range{0, 0};
        }
        return Range{-lane_max(-least), lane_max(most)};
    });
}
// Whether the dot products of bfloat16 give the bits of float32: they hold each value, and no sum of products
// can be subnormal, which dot products take for 0. Values of 2^-96 or more are multiples of 2^-103, those of
// codes of 2^-16.
static bool bfloat16_serves(const Range& x) { return x.least >= 31 << 23; }
// Exponents of factors with which that holds also for codes times factors, and no sum of eight products
// overflows, with the factor or without it. Codes are less than 2^16.
static void set_folds(FewRows& f, const Range& x) {
    const i32 least = x.least >> 23, most = x.most >> 23;
    f.folds_from = std::max(127 - 110, 127 - 126 + 16 + 7 + 127 - least);
    const i32 to = most > 127 + 106 ? 0 : std::min(127 + 110, 127 + 106 + 127 - most);
    f.folds_count = std::max(0, to - f.folds_from + 1);
}
#endif

template <class E>
static void set_values(FewRows& f) {
    f.low = table<E>().low;
    f.high = table<E>().high;
    f.values = table<E>().value;
}

bool few_rows(const CQuantizer& p, const LinearCall& c) {
    if (c.m > MOST_ROWS || p.family == COLUMN || p.rotated == ROWWISE) return false;
    FewRows f{c,  c.m, c.k,     c.n, p.block, c.weight.data, (c.k + p.codes - 1) / p.codes * p.bytes,
              {}, 0,   nullptr, 0};
    const i64 lines = p.row_scaled ? c.n : 1;
    const Array<float> global(c.weight.amax ? lines : 0);
    if (p.family != BLOCK) {
        f.factors = c.scale_inv;
        f.factor_step = p.family == ROW;
    } else {
        f.scales = stored_scale_layout_of(p, c.weight, c.n, c.k, false);
        f.scale_bytes = up((c.k + p.block - 1) / p.block, 4);
        for (i64 i = 0; c.weight.amax && i < lines; i++) global[i] = c.weight.amax[i] / p.global_divisor;
        if (c.weight.amax) f.factors = global;
        f.factor_step = p.row_scaled;
    }
    if (p.element == E4M3) set_values<FE4M3>(f);
    if (p.element == E5M2) set_values<FE5M2>(f);
    if (p.element == E2M3) set_values<FE2M3>(f);
    if (p.element == E3M2) set_values<FE3M2>(f);
    if (p.element == E2M1) set_values<FE2M1>(f);
#if QT_ISA == 512
    // One row waits for memory, and pairs need fewer instructions.
    if (uses_pairs(c.pairs < 0 && c.m == 1 ? 1 : c.pairs)) {
        const Range x = range_of(c);
        set_folds(f, x);
        if (bfloat16_serves(x)) return few_rows_bfloat16(p, f);
    }
    return multiply_few_rows<float>(p, f);
#else
    return multiply_few_rows(p, f);
#endif
}

}  // namespace QT_NAMESPACE
