// few_rows.h without AVX-512: four rows of the weight are decoded to float32 in the order of the sums. Up
// to four rows of x multiply them in registers, more rows a stage at a time from memory.
#pragma once
#include "few_rows_avx2_formats.h"

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

#if QT_ISA != 2
// A format on any CPU: values and factors are looked up one by one. Codes: in a group of bytes.
template <class Lanes, int Block, int Codes>
struct LookedUp : Lanes {
    static constexpr int SPAN = Lanes::SPAN, BYTES = Codes == 4 ? SPAN / 4 * 3 : SPAN / Codes;
    static constexpr int SCALES = Block == 16 || Block == 32 ? SPAN / Block : 0;
    static constexpr bool SCALED = Block > 0, NAN_IS_LEFT = false;
    static constexpr float POWER = 1;
    const float* values;
    u16 places[SPAN];
    explicit LookedUp(const FewRows& f) : values(f.values) {
        for (int v = 0, j = 0; v < Lanes::STEPS; v++)
            for (int half = 1; half >= 0; half--)
                for (int lane = 0; lane < SUMS; lane++) places[j++] = u16(Lanes::place(v, lane, half));
    }
    template <class Sink>
    ALWAYS_INLINE void span(const u8* p, VB&, const Sink& sink) const {
        alignas(64) u8 padded[BYTES + 16], codes[SPAN];
        memcpy(padded, p, BYTES);
        for (int i = 0; i < SPAN; i += GROUP) {
            const u8* from = padded + (Codes == 4 ? i / 4 * 3 : i / Codes);
            store(codes + i, Codes == 1   ? load<VB>(from)
                             : Codes == 2 ? load_nibbles(from)
                                          : load_quads(from));
        }
        for (int j = 0; j < SPAN; j += W) {
            VF w;
            for (int i = 0; i < W; i++) w[i] = values[codes[places[j + i]]];
            sink(j / SUMS, j / W % HALVES, w);
        }
    }
    ALWAYS_INLINE void factors(const u8* s, VF to[HALVES]) const {
        for (int lane = 0; lane < SUMS; lane++) {
            const int block = Lanes::place(0, lane, 0) / (Block ? Block : 1);
            to[lane / W][lane % W] = Block == 128  ? load<float>(s)
                                     : Block == 16 ? table<FE4M3>().value[s[block]]
                                                   : bits<float>(e8m0_decode_bits(s[block]));
        }
    }
};
#endif

// A set of rows of the weight.
template <class F>
struct WeightRows : RowAddresses<F, SET> {
    using RowAddresses<F, SET>::code;
    using RowAddresses<F, SET>::scale;
    const FewRows& f;
    const F& format;
    WeightRows(const FewRows& f, const F& format, i64 n, i64 end, u8* own)
        : RowAddresses<F, SET>(f, n, end, own), f(f), format(format) {}
    // Span i of a row: sink(j, h, values) gets half h of the lanes of step j. Behind the end, codes are 0.
    template <class Sink>
    ALWAYS_INLINE void span(int r, i64 i, VB& most, VF factors[HALVES], const Sink& sink) const {
        const u8 *codes = code[r] + i * F::BYTES, *s = scale[r] + i * F::SCALES;
        u8 last[F::BYTES], last_scales[16];
        if ((i + 1) * F::SPAN > f.k) {
            memset(last, 0, sizeof last), memset(last_scales, 0, sizeof last_scales);
            memcpy(last, codes, size_t(f.code_stride - i * F::BYTES));
            codes = last;
            if (F::SCALES) {
                memcpy(last_scales, s, size_t((f.k - i * F::SPAN + f.block - 1) / f.block));
                s = last_scales;
            }
        }
        format.span(codes, most, sink);
        if (F::SCALED) format.factors(F::SCALES ? s : s + 4 * i * f.scales.block_stride, factors);
    }
};
template <class F>
struct Stage {
    static constexpr int SPANS = int(STAGE) / F::SPAN;
    alignas(64) float values[SET][STAGE];
    alignas(64) float factors[SET][SPANS][SUMS];
    alignas(64) float sums[MOST_ROWS][SET][SUMS];
};
// All rows of a stage times T rows of x from m0 on, half of the lanes.
#define QT_EACH_SUM \
    _Pragma("GCC unroll 4") for (int m = 0; m < T; m++) _Pragma("GCC unroll 4") for (int r = 0; r < SET; r++)
template <class F, int T>
__attribute__((noinline)) static void multiply_stage(Stage<F>& stage, const float* x, int spans, i64 m0,
                                                     int h) {
    VF a[T][SET], p[T][SET];
    QT_EACH_SUM a[m][r] = load<VF>(stage.sums[m0 + m][r] + h * W);
    for (int i = 0; i < spans; i++, x += F::SPAN) {
        QT_EACH_SUM p[m][r] = F::SCALED ? VF{} : a[m][r];
        const float* values = stage.values[0] + i * F::SPAN + h * W;
        for (int j = 0; j < F::SPAN; j += SUMS) {
            VF v[T];
            for (int m = 0; m < T; m++) v[m] = load<VF>(x + m * STAGE + j + h * W);
            for (int r = 0; r < SET; r++) {
                const VF w = load<VF>(values + r * STAGE + j);
                for (int m = 0; m < T; m++) p[m][r] = fused(v[m], w, p[m][r]);
            }
        }
        QT_EACH_SUM a[m][r] =
            F::SCALED ? fused(p[m][r], load<VF>(stage.factors[r][i] + h * W), a[m][r]) : p[m][r];
    }
    QT_EACH_SUM store(stage.sums[m0 + m][r] + h * W, a[m][r]);
}
#undef QT_EACH_SUM
// The sum of the lanes, which are those of a format.
template <class F>
INLINE float by_halves(const float* lanes) {
    float s[SUMS / 2];
    for (int i = 0; i < SUMS / 2; i++) s[F::lane_of(i)] = lanes[i] + lanes[i + SUMS / 2];
    for (int half = SUMS / 4; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
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
// Whether a row of E4M3 has a NaN, which makes all its products NaN.
static bool row_has_nan(const FewRows& f, i64 n) {
    const u8* codes = f.codes + n * f.code_stride;
    return std::any_of(codes, codes + f.code_stride, [](u8 c) { return (c & 0x7f) == 0x7f; });
}
// Rows n ... of the result from their sums, (m, SET, SUMS).
template <class F>
static void finish_rows(const FewRows& f, const Chunk& chunk, i64 n, VB most, const float* sums) {
    bool nan = false;
    for (int i = 0; F::NAN_IS_LEFT && i < GROUP; i++) nan |= most[i] == 0x7f;
    for (i64 r = 0; r < SET && n + r < chunk.end; r++) {
        const bool all_nan = nan && row_has_nan(f, n + r);
        for (i64 m = 0; m < f.m; m++)
            finish(f, m, n + r,
                   all_nan ? bits<float>(0x7fc00000) : by_halves<F>(sums + (m * SET + r) * SUMS));
    }
}
// Up to four rows of x, which are POWER times those of the call.
template <class F, int M>
static void rows_in_registers(const FewRows& f, const F& format, const float* xs, const Chunk& chunk,
                              u8* own) {
    constexpr int R = M == 1 ? 4 : M == 2 ? 2 : 1;  // rows of the weight in registers
    for (i64 n = chunk.first; n < chunk.end; n += SET) {
        const WeightRows<F> rows(f, format, n, chunk.end, own);
        Fetch<F, SET> fetch(f, chunk, n);
        VB most{};
        alignas(64) VF sums[M][SET][HALVES] = {};
        for (i64 e = 0; e < f.k; e += STAGE) {
            fetch.template begin<int(STAGE)>(e / STAGE);
            const i64 end = smaller((e + STAGE) / F::SPAN, (f.k + F::SPAN - 1) / F::SPAN);
            for (int r0 = 0; r0 < SET; r0 += R) {
                VF a[R][M][HALVES];
                for (int r = 0; r < R; r++)
                    for (int m = 0; m < M; m++)
                        for (int h = 0; h < HALVES; h++) a[r][m][h] = sums[m][r0 + r][h];
                const float* x = xs + e * M;
                for (i64 i = e / F::SPAN; i < end; i++, x += F::SPAN)
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        VF p[M][HALVES], factors[HALVES];
                        for (int m = 0; m < M; m++)
                            for (int h = 0; h < HALVES; h++) p[m][h] = F::SCALED ? VF{} : a[r][m][h];
                        fetch.lines((F::BYTES + 63) / 64);
                        rows.span(r0 + r, i, most, factors, [&](int j, int h, VF w) {
                            for (int m = 0; m < M; m++)
                                p[m][h] = fused(load<VF>(x + m * STAGE + j * SUMS + h * W), w, p[m][h]);
                        });
                        for (int m = 0; m < M; m++)
                            for (int h = 0; h < HALVES; h++)
                                a[r][m][h] = F::SCALED ? fused(p[m][h], factors[h], a[r][m][h]) : p[m][h];
                    }
                for (int r = 0; r < R; r++)
                    for (int m = 0; m < M; m++)
                        for (int h = 0; h < HALVES; h++) sums[m][r0 + r][h] = a[r][m][h];
            }
        }
        finish_rows<F>(f, chunk, n, most, (const float*)sums);
    }
}
template <class F>
static void rows_by_stages(const FewRows& f, const F& format, const float* xs, const Chunk& chunk, u8* own) {
    const Array<Stage<F>> memory(1);
    Stage<F>& stage = *(Stage<F>*)memory;
    for (i64 n = chunk.first; n < chunk.end; n += SET) {
        const WeightRows<F> rows(f, format, n, chunk.end, own);
        Fetch<F, SET> fetch(f, chunk, n);
        VB most{};
        memset(stage.sums, 0, sizeof(float) * SET * SUMS * size_t(f.m));
        for (i64 e = 0; e < f.k; e += STAGE) {
            fetch.template piece<int(STAGE)>(e / STAGE);
            const int spans = int(smaller(Stage<F>::SPANS, (f.k - e + F::SPAN - 1) / F::SPAN));
            for (int r = 0; r < SET; r++)
                for (int i = 0; i < spans; i++) {
                    float* to = stage.values[r] + i * F::SPAN;
                    VF factors[HALVES];
                    rows.span(r, e / F::SPAN + i, most, factors, [&](int j, int h, VF w) {
                        store(to + j * SUMS + h * W, F::POWER == 1 ? w : w * all(F::POWER));
                    });
                    for (int h = 0; F::SCALED && h < HALVES; h++)
                        store(stage.factors[r][i] + h * W, factors[h]);
                }
            const float* x = xs + e * f.m;
            for (int h = 0; h < HALVES; h++) {
                i64 m = 0;
                for (; f.m - m >= 3; m += 3) multiply_stage<F, 3>(stage, x + m * STAGE, spans, m, h);
                if (f.m - m == 2) multiply_stage<F, 2>(stage, x + m * STAGE, spans, m, h);
                if (f.m - m == 1) multiply_stage<F, 1>(stage, x + m * STAGE, spans, m, h);
            }
        }
        finish_rows<F>(f, chunk, n, most, stage.sums[0][0]);
    }
}
// Multiplies x by a power of two where no element may leave the range of float32.
static bool scale_up(float* x, i64 count, float power) {
    i32 most = 0;
    for (i64 i = 0; i < count; i++) most = std::max(most, bits<i32>(x[i]) & ABS);
    if (most >= (127 + 100) << 23) return false;
    for (i64 i = 0; i < count; i++) x[i] *= power;
    return true;
}
template <class F>
static void multiply_format(const FewRows& f) {
    const F format(f);
    const i64 padded = up(f.k, STAGE) * f.m;
    const Array<float> xs(padded);
    arrange_rows<float>(f, xs, [](const float* from, float* to) { arrange<F>(from, to); });
    const bool few = f.m <= 4 && (F::POWER == 1 || scale_up(xs, padded, F::POWER));
    const auto rows = !few       ? rows_by_stages<F>
                      : f.m == 1 ? rows_in_registers<F, 1>
                      : f.m == 2 ? rows_in_registers<F, 2>
                      : f.m == 3 ? rows_in_registers<F, 3>
                                 : rows_in_registers<F, 4>;
    by_chunks(f, [&](const Chunk& chunk) {
        const Array<u8> own(f.scales.tiles ? SET * f.scale_bytes : 0);
        rows(f, format, xs, chunk, own);
    });
}
#if QT_ISA == 2
template <class E>
static void multiply_bytes(const CQuantizer& p, const FewRows& f) {
    if (p.family != BLOCK)
        multiply_format<Fp8Rows<E>>(f);
    else if (p.block == 128)
        multiply_format<Fp8BlockRows<E>>(f);
    else
        multiply_format<MxRows<E, 1>>(f);
}
static bool multiply_few_rows(const CQuantizer& p, const FewRows& f) {
    if (p.element == E2M1)
        p.block == 32 ? multiply_format<Mxfp4Rows>(f) : multiply_format<Nvfp4Rows>(f);
    else if (p.element == E4M3)
        multiply_bytes<FE4M3>(p, f);
    else if (p.element == E5M2)
        multiply_bytes<FE5M2>(p, f);
    else if (p.element == E2M3)
        p.codes == 4 ? multiply_format<MxRows<FE2M3, 4>>(f) : multiply_format<MxRows<FE2M3, 1>>(f);
    else
        p.codes == 4 ? multiply_format<MxRows<FE3M2, 4>>(f) : multiply_format<MxRows<FE3M2, 1>>(f);
    return true;
}
#else
static bool multiply_few_rows(const CQuantizer& p, const FewRows& f) {
    if (p.family != BLOCK)
        multiply_format<LookedUp<LanesArePart<16, 64>, 0, 1>>(f);
    else if (p.block == 128)
        multiply_format<LookedUp<LanesArePart<16, 128>, 128, 1>>(f);
    else if (p.codes == 4)
        multiply_format<LookedUp<LanesArePart<32, 128>, 32, 4>>(f);
    else if (p.codes == 1)
        multiply_format<LookedUp<LanesArePart<32, 128>, 32, 1>>(f);
    else if (p.block == 32)
        multiply_format<LookedUp<LaneIsBlock<32>, 32, 2>>(f);
    else
        multiply_format<LookedUp<LaneIsBlock<16>, 16, 2>>(f);
    return true;
}
#endif
#endif

}  // namespace QT_NAMESPACE
