// few_rows.h without AVX-512: a stage of four rows of the weight is decoded in the order of the sums, as
// float16 or float32, and multiplies all rows of x.
#pragma once
#include "few_rows_float16.h"
#include "fused.h"

namespace QT_NAMESPACE {

#if QT_ISA != 512
constexpr int SET = 4;            // rows of the weight
constexpr int HALVES = SUMS / W;  // vectors of a set of lanes

#ifndef QT_FLOAT16_STAGES
INLINE VF value(const float* v) { return load<VF>(v); }
// A format on any CPU: values and factors are looked up one by one. Codes: in a group of bytes.
template <class Lanes, int Block, int Codes>
struct LookedUp : Lanes {
    static constexpr int SPAN = Lanes::SPAN, BYTES = Codes == 4 ? SPAN / 4 * 3 : SPAN / Codes;
    static constexpr int SCALES = Block == 16 || Block == 32 ? SPAN / Block : 0;
    static constexpr bool SCALED = Block > 0;
    static constexpr u8 NAN_CODE = 0, NAN_FACTOR = 0;  // NaN stays NaN
    static constexpr float POWER = 1;
    using Value = float;
    const float* values;
    u16 places[SPAN];
    explicit LookedUp(const FewRows& f) : values(f.values) {
        for (int v = 0, j = 0; v < Lanes::STEPS; v++)
            for (int half = 1; half >= 0; half--)
                for (int lane = 0; lane < SUMS; lane++) places[j++] = u16(Lanes::place(v, lane, half));
    }
    ALWAYS_INLINE void decode(const u8* p, Most&, float* to) const {
        alignas(64) u8 padded[BYTES + 16], codes[SPAN];
        memcpy(padded, p, BYTES);
        for (int i = 0; i < SPAN; i += GROUP) {
            const u8* from = padded + (Codes == 4 ? i / 4 * 3 : i / Codes);
            store(codes + i, Codes == 1   ? load<VB>(from)
                             : Codes == 2 ? load_nibbles(from)
                                          : load_quads(from));
        }
        for (int i = 0; i < SPAN; i++) to[i] = values[codes[places[i]]];
    }
    ALWAYS_INLINE void factors(const u8* s, Most&, VF to[HALVES]) const {
        for (int lane = 0; lane < SUMS; lane++) {
            const int block = Lanes::place(0, lane, 0) / (Block ? Block : 1);
            to[lane / W][lane % W] = Block == 128  ? load<float>(s)
                                     : Block == 16 ? table<FE4M3>().value[s[block]]
                                                   : bits<float>(e8m0_decode_bits(s[block]));
        }
    }
};
#endif

// A stage of a set of rows of the weight. The values are those of the codes divided by POWER.
template <class F>
struct Stage {
    static constexpr int SPANS = int(STAGE) / F::SPAN;
    alignas(64) typename F::Value values[SET][STAGE];
    alignas(64) float factors[SET][SPANS][SUMS];
    alignas(64) float sums[MOST_ROWS][SET][SUMS];
};
// `spans` of a set of rows, to the spans of a stage from `at` on. factor_step: bytes from the factors of a
// span to the next. Each span prefetches as much as it reads: all lines of a stage at once would hold up
// the loads of codes.
template <class F>
__attribute__((noinline)) static void decode_spans(const F& format, const u8* const codes[SET],
                                                   const u8* const scales[SET], i64 factor_step, int spans,
                                                   Stage<F>& stage, int at, Most& most,
                                                   Fetch<F, SET>& fetch) {
    // Stores to the stage cannot change what is this function's own.
    const F own(format);
    Most own_most(most);
    Fetch<F, SET> own_fetch(fetch);
    for (int r = 0; r < SET; r++) {
        const u8 *p = codes[r], *s = scales[r];
        for (int i = at; i < at + spans; i++, p += F::BYTES, s += factor_step) {
            own_fetch.template next_bytes<F::BYTES>();
            own.decode(p, own_most, stage.values[r] + i * F::SPAN);
            if (!F::SCALED) continue;
            VF factors[HALVES];
            own.factors(s, own_most, factors);
            for (int h = 0; h < HALVES; h++) store(stage.factors[r][i] + h * W, factors[h]);
        }
    }
    most = own_most, fetch = own_fetch;
}
// A set of rows from element e on. Behind the end, codes are 0.
template <class F>
static void decode_stage(const FewRows& f, const F& format, const RowAddresses<F, SET>& rows, i64 e,
                         Stage<F>& stage, Most& most, Fetch<F, SET>& fetch) {
    fetch.template piece_factors<int(STAGE)>(e / STAGE);
    const i64 factor_step = F::SCALES ? F::SCALES : F::SCALED ? 4 * f.scales.block_stride : 0;
    const i64 first = e / F::SPAN, whole = smaller(STAGE, f.k - e) / F::SPAN;
    const u8 *codes[SET], *scales[SET];
    const auto go_to = [&](i64 span) {
        for (int r = 0; r < SET; r++)
            codes[r] = rows.code[r] + span * F::BYTES, scales[r] = rows.scale[r] + span * factor_step;
    };
    go_to(first);
    decode_spans(format, codes, scales, factor_step, int(whole), stage, 0, most, fetch);
    if (e + STAGE <= f.k || (first + whole) * F::SPAN == f.k) return;
    go_to(first + whole);
    u8 last[SET][F::BYTES] = {}, last_scales[SET][16] = {};
    for (int r = 0; r < SET; r++) {
        memcpy(last[r], codes[r], size_t(f.code_stride - (first + whole) * F::BYTES));
        codes[r] = last[r];
        if (!F::SCALES) continue;
        memcpy(last_scales[r], scales[r], size_t((f.k - (first + whole) * F::SPAN + f.block - 1) / f.block));
        scales[r] = last_scales[r];
    }
    decode_spans(format, codes, scales, factor_step, 1, stage, int(whole), most, fetch);
}
// All rows of a stage times T rows of x from m0 on, in H vectors of the lanes from vector h on. Each step of
// a sum waits for the one before: T * SET * H = 8 sums take turns.
#define QT_EACH_SUM                                           \
    _Pragma("GCC unroll 4") for (int m = 0; m < T; m++)       \
        _Pragma("GCC unroll 4") for (int r = 0; r < SET; r++) \
            _Pragma("GCC unroll 4") for (int g = 0; g < H; g++)
template <class F, int T, int H>
__attribute__((noinline)) static void multiply_stage(Stage<F>& stage, const float* x, int spans, i64 m0,
                                                     int h) {
    VF a[T][SET][H], p[T][SET][H];
    QT_EACH_SUM a[m][r][g] = load<VF>(stage.sums[m0 + m][r] + (h + g) * W);
    for (int i = 0; i < spans; i++, x += F::SPAN) {
        QT_EACH_SUM p[m][r][g] = F::SCALED ? VF{} : a[m][r][g];
        const auto* values = stage.values[0] + i * F::SPAN + h * W;
#pragma GCC unroll 4
        for (int j = 0; j < F::SPAN; j += SUMS)
#pragma GCC unroll 4
            for (int g = 0; g < H; g++) {
                VF v[T];
                for (int m = 0; m < T; m++) v[m] = load<VF>(x + m * STAGE + j + (h + g) * W);
                for (int r = 0; r < SET; r++) {
                    const VF w = value(values + r * STAGE + j + g * W);
                    for (int m = 0; m < T; m++) p[m][r][g] = fused(v[m], w, p[m][r][g]);
                }
            }
        QT_EACH_SUM a[m][r][g] =
            F::SCALED ? fused(p[m][r][g], load<VF>(stage.factors[r][i] + (h + g) * W), a[m][r][g])
                      : p[m][r][g];
    }
    QT_EACH_SUM store(stage.sums[m0 + m][r] + (h + g) * W, a[m][r][g]);
}
#undef QT_EACH_SUM
typedef float Four __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define QT_FOUR_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define QT_FOUR_OF(a, b, ...) __builtin_shuffle(a, b, (i32 __attribute__((vector_size(16)))){__VA_ARGS__})
#endif
INLINE void transpose_fours(Four v[4]) {
    const Four low[2] = {QT_FOUR_OF(v[0], v[1], 0, 4, 1, 5), QT_FOUR_OF(v[2], v[3], 0, 4, 1, 5)};
    const Four high[2] = {QT_FOUR_OF(v[0], v[1], 2, 6, 3, 7), QT_FOUR_OF(v[2], v[3], 2, 6, 3, 7)};
    v[0] = QT_FOUR_OF(low[0], low[1], 0, 1, 4, 5), v[1] = QT_FOUR_OF(low[0], low[1], 2, 3, 6, 7);
    v[2] = QT_FOUR_OF(high[0], high[1], 0, 1, 4, 5), v[3] = QT_FOUR_OF(high[0], high[1], 2, 3, 6, 7);
}
#undef QT_FOUR_OF
// The sums of the lanes of a set of rows. The lanes are those of a format.
template <class F>
INLINE Four by_halves(const float (*lanes)[SUMS]) {
    static_assert(SET == 4, "a vector of four");
    Four s[SUMS];
#pragma GCC unroll 4
    for (int i = 0; i < SUMS; i += 4) {
        Four v[SET];
        for (int r = 0; r < SET; r++) v[r] = load<Four>(lanes[r] + i);
        transpose_fours(v);
        for (int j = 0; j < 4; j++) s[F::lane_of(i + j)] = v[j];
    }
#pragma GCC unroll 4
    for (int half = SUMS / 2; half; half /= 2)
#pragma GCC unroll 8
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
// Whether one of the codes has the magnitude `nan`, the largest one.
static bool has_nan(const u8* codes, i64 count, u8 nan) {
    u8 most = 0;
    for (i64 i = 0; i < count; i++) most = std::max(most, u8(codes[i] & nan));
    return most == nan;
}
// Rows n ... of the result from their sums, (m, SET, SUMS). A row with a NaN among its codes or factors has
// NaN in all products.
template <class F>
static void finish_rows(const FewRows& f, const RowAddresses<F, SET>& rows, const Chunk& chunk, i64 n,
                        const Most& most, const float (*sums)[SET][SUMS]) {
    const i64 count = smaller(SET, chunk.end - n);
    bool all_nan[SET] = {};
    const bool in_codes = F::NAN_CODE && has_nan((const u8*)&most.codes, GROUP, F::NAN_CODE);
    const bool in_factors = F::NAN_FACTOR && has_nan((const u8*)&most.factors, GROUP, F::NAN_FACTOR);
    for (i64 r = 0; (in_codes || in_factors) && r < count; r++)
        all_nan[r] = (in_codes && has_nan(rows.code[r], f.code_stride, F::NAN_CODE)) ||
                     (in_factors && has_nan(rows.scale[r], (f.k + f.block - 1) / f.block, F::NAN_FACTOR));
    for (i64 m = 0; m < f.m; m++) {
        const Four v = by_halves<F>(sums[m]);
        for (i64 r = 0; r < count; r++) finish(f, m, n + r, all_nan[r] ? bits<float>(0x7fc00000) : v[r]);
    }
}
// The rows of a chunk times all rows of x, which are POWER times those of the call. Inlined into the loop
// over chunks, one row of x times FP8 takes 4 to 10 % longer with GCC 12.
template <class F>
__attribute__((noinline)) static void multiply_rows(const FewRows& f, const F& format, const float* xs,
                                                    const Chunk& chunk, u8* own) {
    Stage<F> stage;
    for (i64 n = chunk.first; n < chunk.end; n += SET) {
        const RowAddresses<F, SET> rows(f, n, chunk.end, own);
        Fetch<F, SET> fetch(f, chunk, n);
        Most most;
        memset(stage.sums, 0, sizeof(float) * SET * SUMS * size_t(f.m));
        for (i64 e = 0; e < f.k; e += STAGE) {
            decode_stage(f, format, rows, e, stage, most, fetch);
            const int spans = int(smaller(Stage<F>::SPANS, (f.k - e + F::SPAN - 1) / F::SPAN));
            const float* x = xs + e * f.m;
            i64 m = 0;
            for (; f.m - m >= 2; m += 2)
                for (int h = 0; h < HALVES; h++) multiply_stage<F, 2, 1>(stage, x + m * STAGE, spans, m, h);
            for (int h = 0; m < f.m && h < HALVES; h += 2)
                multiply_stage<F, 1, 2>(stage, x + m * STAGE, spans, m, h);
        }
        finish_rows(f, rows, chunk, n, most, stage.sums);
    }
}
template <class F>
static void multiply_arranged(const FewRows& f, const float* xs) {
    const F format(f);
    by_chunks(f, [&](const Chunk& chunk) {
        const Array<u8> own(f.scales.tiles ? SET * f.scale_bytes : 0);
        multiply_rows(f, format, xs, chunk, own);
    });
}
// Multiplies x by a power of two where no element may leave the range of float32.
INLINE bool scale_up(float* x, i64 count, float power) {
    i32 most = 0;
    for (i64 i = 0; i < count; i++) most = std::max(most, bits<i32>(x[i]) & ABS);
    if (most >= (127 + 100) << 23) return false;
    for (i64 i = 0; i < count; i++) x[i] *= power;
    return true;
}
template <class F>
static void multiply_format(const FewRows& f) {
    const i64 padded = up(f.k, STAGE) * f.m;
    const Array<float> xs(padded);
    arrange_rows<float>(f, xs, [](const float* from, float* to) { arrange<F>(from, to); });
    if constexpr (F::POWER != 1)
        if (!scale_up(xs, padded, F::POWER)) return multiply_arranged<typename F::Whole>(f, xs);
    multiply_arranged<F>(f, xs);
}
#ifdef QT_FLOAT16_STAGES
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
