// x @ weight.T for bfloat16 x and a quantized weight: panels of 64 rows of the weight are decoded to bfloat16
// in the cache and multiplied with the CPU's bfloat16 dot products, accumulated in float32; factors, bias and
// one rounding at the end.

#include "dequantize.h"
#include "scale_layout.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
#define BF16_DOT __attribute__((target("avx512bf16")))

constexpr i64 PANEL = 64;    // rows of the weight, columns of the result
constexpr i64 DEPTH = 4096;  // of the contraction, so that a panel stays in the second cache level
constexpr int HEIGHT = 6;    // rows of the result whose sums fit in the registers

// sums (rows, PANEL) += x (rows, 2 * pairs) times the packed panel (pairs, PANEL) of pairs.
template <int R>
BF16_DOT static void multiply(const u32* x, i64 ldx, const u32* panel, i64 pairs, float* sums, bool first) {
    __m512 acc[R][4];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++)
            acc[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * PANEL + j * 16);
    for (i64 k = 0; k < pairs; k++) {
        __m512bh b[4];
        for (int j = 0; j < 4; j++) b[j] = (__m512bh)_mm512_loadu_si512(panel + k * PANEL + j * 16);
        for (int r = 0; r < R; r++) {
            const __m512bh a = (__m512bh)_mm512_set1_epi32(i32(x[r * ldx + k]));
            for (int j = 0; j < 4; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], a, b[j]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + r * PANEL + j * 16, acc[r][j]);
}
static void multiply_rows(i64 rows, const u32* x, i64 ldx, const u32* panel, i64 pairs, float* sums,
                          bool first) {
    switch (rows) {
        case 1:
            return multiply<1>(x, ldx, panel, pairs, sums, first);
        case 2:
            return multiply<2>(x, ldx, panel, pairs, sums, first);
        case 3:
            return multiply<3>(x, ldx, panel, pairs, sums, first);
        case 4:
            return multiply<4>(x, ldx, panel, pairs, sums, first);
        case 5:
            return multiply<5>(x, ldx, panel, pairs, sums, first);
        default:
            return multiply<HEIGHT>(x, ldx, panel, pairs, sums, first);
    }
}

// A row of the result: sums times factors, plus bias, rounded once.
static void finish(const LinearCall& c, const float* sums, i64 row, i64 column, i64 count,
                   const float* factors) {
    alignas(64) float v[PANEL];
    const float own = c.row_factors ? c.row_factors[row * c.row_factor_step] : 1.0f;
    for (i64 i = 0; i < PANEL; i++) v[i] = sums[i] * (own * factors[i]);
    for (i64 i = 0; c.bias && i < count; i++) v[i] += c.bias[column + i];
    const i64 at = row * c.n + column;
    if (c.dtype == F32) {
        memcpy((float*)c.y + at, v, sizeof(float) * size_t(count));
        return;
    }
    u16 narrow[PANEL];
    for (i64 i = 0; i < PANEL; i += W) {
        const VF f = load<VF>(v + i);
        if (c.dtype == F16)
            store(narrow + i, to_half(f));
        else
            store(narrow + i, _mm512_cvtepi32_epi16((__m512i)((VU)to_bfloat16_bits((VI)f) >> 16)));
    }
    memcpy((u16*)c.y + at, narrow, sizeof(u16) * size_t(count));
}

// decode(first row, rows, out): rows of the weight as bfloat16, without the factors that follow the product.
template <class F>
static void by_panels(const LinearCall& c, const F& decode, const float* factors, i64 factor_step) {
    const i64 pairs = c.k / 2;
    parallel((c.n + PANEL - 1) / PANEL, 1, c.threads, [&](i64 a, i64 b) {
        const Array<u16> rows(PANEL * c.k);
        const Array<u32> packed(PANEL * (pairs < DEPTH / 2 ? pairs : DEPTH / 2));
        const Array<float> sums(c.m * PANEL);
        for (i64 p = a; p < b; p++) {
            const i64 n0 = p * PANEL, count = c.n - n0 < PANEL ? c.n - n0 : PANEL;
            memset(rows + count * c.k, 0, sizeof(u16) * size_t((PANEL - count) * c.k));
            decode(n0, count, rows);
            float f[PANEL] = {};
            for (i64 i = 0; i < count; i++) f[i] = factors ? factors[(n0 + i) * factor_step] : 1.0f;
            for (i64 k = 0; k < pairs; k += DEPTH / 2) {
                const i64 depth = pairs - k < DEPTH / 2 ? pairs - k : DEPTH / 2;
                transpose<float>((const float*)(u16*)rows + k, pairs, (float*)(u32*)packed, PANEL, PANEL,
                                 depth);
                for (i64 m = 0; m < c.m; m += HEIGHT)
                    multiply_rows(c.m - m < HEIGHT ? c.m - m : HEIGHT, (const u32*)c.x + m * pairs + k, pairs,
                                  packed, depth, sums + m * PANEL, k == 0);
            }
            for (i64 m = 0; m < c.m; m++) finish(c, sums + m * PANEL, m, n0, count, f);
        }
    });
}

template <class E>
static void linear_float8(const CQuantizer& p, const LinearCall& c) {
    const VF one[4] = {all(1.0f), all(1.0f), all(1.0f), all(1.0f)};
    by_panels(
        c,
        [&](i64 first, i64 count, u16* out) {
            decode_run<Bfloat16, E>(c.weight.data + first * c.k, count * c.k, one, 0, out, false);
        },
        c.scale_inv, p.family == ROW);
}

template <class E, int B, int Codes>
static void linear_blocks(const CQuantizer& p, const LinearCall& c) {
    const ScaleLayout s = stored_scale_layout_of(p, c.weight, c.n, c.k, false);
    const i64 stride = (c.k + Codes - 1) / Codes * unit_of(Codes);
    const i64 lines = p.row_scaled ? c.n : 1;
    const bool scaled = c.weight.amax;
    const Array<float> global(scaled ? lines : 0);
    for (i64 i = 0; scaled && i < lines; i++) global[i] = c.weight.amax[i] / p.global_divisor;
    CQuantizer local = p;
    local.row_scaled = 0;
    by_panels(
        c,
        [&](i64 first, i64 count, u16* out) {
            const DecodeLines<u16> m{c.weight.data + first * stride, count, c.k, stride, out, c.k, first, 0};
            LineDecoder<Bfloat16, E, B, Codes>(m, local, s, nullptr, false, false)
                .run(0, count * ((c.k + B - 1) / B));
        },
        scaled ? (const float*)global : nullptr, p.row_scaled);
}
#endif

bool linear(const CQuantizer& p, const LinearCall& c) {
#if QT_ISA == 512
    if (!__builtin_cpu_supports("avx512bf16") || c.k % 2 || p.family == COLUMN || p.rotated == ROWWISE)
        return false;
#define QT_CALL(E, B, CODES) linear_blocks<E, B, CODES>(p, c)
#define QT_FLOAT8(E) linear_float8<E>(p, c)
#include "formats.inc"
    return true;
#else
    (void)p, (void)c;
    return false;
#endif
}

}  // namespace QT_NAMESPACE
