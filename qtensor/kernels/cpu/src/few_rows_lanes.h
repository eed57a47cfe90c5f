// few_rows.h on any CPU: a stage of four rows of the weight is decoded to float32 in the order of the sums,
// then multiplied with all rows of x.
#pragma once
#include "few_rows.h"

namespace QT_NAMESPACE {

#if QT_ISA != 512
// a * b + c in one rounding.
INLINE VF fused(VF a, VF b, VF c) {
#if QT_ISA == 2
    return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__) || defined(__aarch64__)
    for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    // The product is exact in float64. The sum is rounded to odd there, so that the second rounding is that
    // of the exact sum.
    typedef double VD __attribute__((vector_size(W * 8)));
    typedef i64 VL __attribute__((vector_size(W * 8)));
    const VD product = __builtin_convertvector(a, VD) * __builtin_convertvector(b, VD);
    const VD addend = __builtin_convertvector(c, VD), sum = product + addend, other = sum - product;
    const VD error = (product - (sum - other)) + (addend - other);
    const VL inexact = (error > 0.0) | (error < 0.0), even = ((VL)sum & 1) - 1;
    const VL away = ((error > 0.0) ^ (sum < 0.0)) | 1;  // -1: to larger magnitudes
    return __builtin_convertvector((VD)((VL)sum - (inexact & even & away)), VF);
#endif
}

constexpr int SET = 4;            // rows of the weight
constexpr int HALVES = SUMS / W;  // vectors of a set of lanes
template <class F>
struct Stage {
    static constexpr int SPANS = int(STAGE) / F::SPAN;
    alignas(64) float values[SET][STAGE];
    alignas(64) float factors[SET][SPANS][SUMS];
    alignas(64) float sums[MOST_ROWS][SET][SUMS];
};

// Codes of a span, one a byte; those behind the end of the row are 0.
template <class F, int Codes>
static void span_codes(const FewRows& f, const u8* row, i64 span, u8* codes) {
    constexpr int bytes = Codes == 4 ? F::SPAN / 4 * 3 : F::SPAN / Codes;
    u8 last[F::SPAN + 16] = {};
    memcpy(last, row + span * bytes, size_t(smaller(bytes, f.code_stride - span * bytes)));
    for (int i = 0; i < F::SPAN; i += GROUP) {
        const u8* from = last + (Codes == 4 ? i / 4 * 3 : i / Codes);
        store(codes + i, Codes == 1 ? load<VB>(from) : Codes == 2 ? load_nibbles(from) : load_quads(from));
    }
}
template <class F>
static float factor_of(const FewRows& f, i64 n, i64 block) {
    const ScaleLayout& s = f.scales;
    const i64 at = s.at(n, block);
    if (s.size == 4) return ((const float*)s.base)[at];
    if (f.block == 16) return table<FE4M3>().value[s.base[at]];
    return bits<float>(e8m0_decode_bits(s.base[at]));
}
// The values and factors of a stage of rows n ... of the weight.
template <class F, int Codes>
static void decode_stage(const FewRows& f, i64 n, i64 end, i64 e, int spans, const u16* places,
                         Stage<F>& stage) {
    for (int r = 0; r < SET; r++) {
        const i64 row = smaller(n + r, end - 1);
        for (int i = 0; i < spans; i++) {
            const i64 span = e / F::SPAN + i;
            alignas(64) u8 codes[F::SPAN];
            span_codes<F, Codes>(f, f.codes + row * f.code_stride, span, codes);
            float* to = stage.values[r] + i * F::SPAN;
            for (int j = 0; j < F::SPAN; j++) to[j] = f.values[codes[places[j]]];
            for (int lane = 0; f.block && lane < SUMS; lane++) {
                const i64 k = span * F::SPAN + F::place(0, lane, 0);
                stage.factors[r][i][lane] = k < f.k ? factor_of<F>(f, row, k / f.block) : 0.0f;
            }
        }
    }
}
// R rows of the weight times T rows of x.
template <class F, bool Scaled, int R, int T>
INLINE void multiply_stage(Stage<F>& stage, const float* x, int spans, i64 m0, int r0) {
    VF p[T][R][HALVES];
    for (int i = 0; i < spans; i++) {
        for (int m = 0; m < T; m++)
            for (int r = 0; r < R; r++)
                for (int h = 0; h < HALVES; h++)
                    p[m][r][h] = Scaled ? VF{}
                                 : i    ? p[m][r][h]
                                        : load<VF>(stage.sums[m0 + m][r0 + r] + h * W);
        const float* values = stage.values[r0] + i * F::SPAN;
        const float* from = x + m0 * STAGE + i * F::SPAN;
        for (int j = 0; j < F::SPAN; j += SUMS)
            for (int h = 0; h < HALVES; h++)
                for (int r = 0; r < R; r++) {
                    const VF w = load<VF>(values + r * STAGE + j + h * W);
                    for (int m = 0; m < T; m++)
                        p[m][r][h] = fused(load<VF>(from + m * STAGE + j + h * W), w, p[m][r][h]);
                }
        for (int m = 0; m < T; m++)
            for (int r = 0; r < R; r++)
                for (int h = 0; h < HALVES; h++) {
                    float* sum = stage.sums[m0 + m][r0 + r] + h * W;
                    if (Scaled)
                        store(sum,
                              fused(p[m][r][h], load<VF>(stage.factors[r0 + r][i] + h * W), load<VF>(sum)));
                    else if (i == spans - 1)
                        store(sum, p[m][r][h]);
                }
    }
}
INLINE float by_halves(float lanes[SUMS]) {
    for (int half = SUMS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
INLINE void finish(const FewRows& f, i64 m, i64 n, float v) {
    const LinearCall& c = f.call;
    const float own = c.row_factors ? c.row_factors[m * c.row_factor_step] : 1.0f;
    v *= own * (f.factors ? f.factors[n * f.factor_step] : 1.0f);
    if (c.bias) v += c.bias[n];
    if (v != v) v = bits<float>(0x7fc00000);  // the bits of a NaN depend on the order of operands
    const i64 at = m * f.n + n;
    if (c.dtype == F32)
        ((float*)c.y)[at] = v;
    else if (c.dtype == BF16)
        ((u16*)c.y)[at] =
            v != v ? u16(0x7fc0) : u16((bits<u32>(v) + 0x7fff + (bits<u32>(v) >> 16 & 1)) >> 16);
    else
        ((u16*)c.y)[at] = float_to_half(v);
}
template <class F, bool Scaled, int Codes>
static void multiply_format(const FewRows& f) {
    const Array<float> xs(up(f.k, STAGE) * f.m);
    arrange_rows<float>(f, xs, [](const float* from, float* to) { arrange<F>(from, to); });
    u16 places[F::SPAN];
    for (int v = 0, j = 0; v < F::STEPS; v++)
        for (int half = 1; half >= 0; half--)
            for (int lane = 0; lane < SUMS; lane++) places[j++] = u16(F::place(v, lane, half));
    by_chunks(f, [&](const Chunk& chunk) {
        const Array<Stage<F>> own(1);
        Stage<F>& stage = *(Stage<F>*)own;
        for (i64 n = chunk.first; n < chunk.end; n += SET) {
            memset(stage.sums, 0, sizeof(float) * SET * SUMS * size_t(f.m));
            for (i64 e = 0; e < f.k; e += STAGE) {
                const int spans = int(smaller(Stage<F>::SPANS, (f.k - e + F::SPAN - 1) / F::SPAN));
                decode_stage<F, Codes>(f, n, chunk.end, e, spans, places, stage);
                const float* x = xs + e * f.m;
                i64 m = 0;
                for (; m + 2 <= f.m; m += 2)
                    for (int r = 0; r < SET; r += 2) multiply_stage<F, Scaled, 2, 2>(stage, x, spans, m, r);
                if (m < f.m) multiply_stage<F, Scaled, SET, 1>(stage, x, spans, m, 0);
            }
            for (i64 m = 0; m < f.m; m++)
                for (i64 r = 0; r < SET && n + r < chunk.end; r++)
                    finish(f, m, n + r, by_halves(stage.sums[m][r]));
        }
    });
}
static bool multiply_few_rows(const CQuantizer& p, const FewRows& f) {
    if (p.family != BLOCK)
        multiply_format<LanesArePart<16, 64>, false, 1>(f);
    else if (p.block == 128)
        multiply_format<LanesArePart<16, 128>, true, 1>(f);
    else if (p.codes == 4)
        multiply_format<LanesArePart<32, 128>, true, 4>(f);
    else if (p.codes == 1)
        multiply_format<LanesArePart<32, 128>, true, 1>(f);
    else if (p.block == 32)
        multiply_format<LaneIsBlock<32>, true, 2>(f);
    else
        multiply_format<LaneIsBlock<16>, true, 2>(f);
    return true;
}
#endif

}  // namespace QT_NAMESPACE
