// Products of bfloat16 x and a quantized weight by the CPU's bfloat16 dot products. A part of the weight is
// decoded to bfloat16 in the cache and packed as panels of pairs along the contraction, which all rows of x
// multiply. Sums are float32; factors, bias and one rounding follow.

#include <cstring>

#include "avx512_rotation.h"
#include "calls.h"
#include "memory.h"
#include "threads.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
#define BF16_DOT __attribute__((target("avx512bf16")))

constexpr i64 PANEL = 64;            // columns of the result
constexpr i64 DEPTH = 4096;          // of the contraction, so that a panel stays in the second cache level
constexpr int HEIGHT = 6;            // rows of the result whose sums fit in the registers
constexpr i64 BAND_BYTES = 1 << 20;  // least bytes of a band of rows that the next cache level keeps
constexpr i64 BAND_ROWS = 128;       // blocks begin at multiples of it

// x (m, k) whose rows have a whole number of pairs.
struct PairedRows {
    const Array<u16> padded;
    const u16* data;
    i64 stride;

    explicit PairedRows(const LinearCall& c)
        : padded(c.k % 2 ? c.m * (c.k + 1) : 0), data((const u16*)c.x), stride(c.stride) {
        if (!padded) return;
        for (i64 i = 0; i < c.m; i++) {
            memcpy(padded + i * (c.k + 1), data + i * stride, sizeof(u16) * size_t(c.k));
            padded[i * (c.k + 1) + c.k] = 0;
        }
        data = padded, stride = c.k + 1;
    }
};

// sums (R, PANEL) += x (R, 2 * pairs) times the packed panel (pairs, PANEL) of pairs.
template <int R>
BF16_DOT static void multiply(const u16* x, i64 ldx, const u32* panel, i64 pairs, float* sums, bool first) {
    __m512 acc[R][4];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++)
            acc[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * PANEL + j * 16);
    for (i64 k = 0; k < pairs; k++) {
        __m512bh b[4];
        for (int j = 0; j < 4; j++) b[j] = (__m512bh)_mm512_loadu_si512(panel + k * PANEL + j * 16);
        for (int r = 0; r < R; r++) {
            const __m512bh a = (__m512bh)_mm512_set1_epi32(load<i32>(x + r * ldx + 2 * k));
            for (int j = 0; j < 4; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], a, b[j]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + r * PANEL + j * 16, acc[r][j]);
}
static void multiply_rows(i64 rows, const u16* x, i64 ldx, const u32* panel, i64 pairs, float* sums,
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
// sums (m, PANEL) += x (m, elements from k on) times a packed panel.
static void multiply_panel(const LinearCall& c, const PairedRows& x, i64 k, const u32* panel, i64 pairs,
                           float* sums) {
    for (i64 m = 0; m < c.m; m += HEIGHT)
        multiply_rows(c.m - m < HEIGHT ? c.m - m : HEIGHT, x.data + m * x.stride + k, x.stride, panel, pairs,
                      sums + m * PANEL, k == 0);
}

// Decodes rows of the weight to bfloat16, without the factors that follow the sums.
struct WeightRows {
    CQuantizer quantizer;
    DequantizeCall call{};
    const Array<float> global;
    const float* factors = nullptr;  // that follow the sums, of the columns of the result; null: 1
    i64 factor_step = 0;
    const float one = 1.0f;

    WeightRows(const CQuantizer& p, const LinearCall& c)
        : quantizer(p), global(c.weight.amax ? p.row_scaled ? c.n : 1 : 0) {
        call.dtype = BF16, call.threads = 1;
        call.rows = c.across ? c.k : c.n, call.cols = c.across ? c.n : c.k;
        Buffers& side = c.across == COLUMNWISE ? call.column : call.row;
        side = c.weight, side.amax = nullptr;
        if (p.family == BLOCK) {
            quantizer.row_scaled = 0;
            factors = global, factor_step = p.row_scaled;
            for (i64 i = 0; factors && i < (p.row_scaled ? c.n : 1); i++)
                global[i] = c.weight.amax[i] / p.global_divisor;
        } else {
            quantizer.family = TENSOR, call.scale_inv = &one;
            factors = c.scale_inv, factor_step = p.family != TENSOR;
        }
    }
    WeightRows(const WeightRows&) = delete;

    void decode(i64 first, i64 count, u16* out) const {
        DequantizeCall part = call;
        part.first = first, part.count = count, part.y = out;
        dequantize_as<Bfloat16>(quantizer, part);
    }
};

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
static void finish_panel(const LinearCall& c, const WeightRows& weight, const float* sums, i64 column) {
    const i64 count = smaller(c.n - column, PANEL);
    float f[PANEL] = {};
    for (i64 i = 0; i < count; i++)
        f[i] = weight.factors ? weight.factors[(column + i) * weight.factor_step] : 1.0f;
    for (i64 m = 0; m < c.m; m++) finish(c, sums + m * PANEL, m, column, count, f);
}

// A weight (n, k): each panel is decoded from the rows of its columns, and transposed.
static void along(const LinearCall& c, const WeightRows& weight, const PairedRows& x) {
    const i64 pairs = (c.k + 1) / 2, length = 2 * pairs;
    parallel((c.n + PANEL - 1) / PANEL, 1, c.threads, [&](i64 a, i64 b) {
        const Array<u16> rows(PANEL * length);
        const Array<u32> packed(PANEL * smaller(pairs, DEPTH / 2));
        const Array<float> sums(c.m * PANEL);
        for (i64 p = a; p < b; p++) {
            const i64 n0 = p * PANEL, count = smaller(c.n - n0, PANEL);
            weight.decode(n0, count, rows);
            for (i64 i = count; length > c.k && i-- > 0;) {
                memmove(rows + i * length, rows + i * c.k, sizeof(u16) * size_t(c.k));
                rows[i * length + c.k] = 0;
            }
            memset(rows + count * length, 0, sizeof(u16) * size_t((PANEL - count) * length));
            for (i64 k = 0; k < pairs; k += DEPTH / 2) {
                const i64 depth = smaller(pairs - k, DEPTH / 2);
                transpose<float>((const float*)(u16*)rows + k, pairs, (float*)(u32*)packed, PANEL, PANEL,
                                 depth);
                multiply_panel(c, x, 2 * k, packed, depth, sums);
            }
            finish_panel(c, weight, sums, n0);
        }
    });
}

// Packs `count` columns of rows (depth, ld): each row beside the next one; behind the last one there are
// zeros.
static void pack_columns(const u16* rows, i64 ld, i64 depth, i64 count, u32* packed) {
    alignas(64) u16 order[2][32];
    for (int i = 0; i < 32; i++) order[0][i] = u16(i / 2 + i % 2 * 32), order[1][i] = u16(order[0][i] + 16);
    const __m512i low = load<__m512i>(order[0]), high = load<__m512i>(order[1]);
    const auto mask = [&](i64 first) {
        return count >= first + 32 ? ~u32(0) : count > first ? (u32(1) << (count - first)) - 1 : 0;
    };
    const __mmask32 masks[2] = {mask(0), mask(32)};
    for (i64 k = 0; k < depth; k += 2, rows += 2 * ld, packed += PANEL)
        for (int j = 0; j < 2; j++) {
            const __m512i even = _mm512_maskz_loadu_epi16(masks[j], rows + 32 * j);
            const __m512i odd = _mm512_maskz_loadu_epi16(k + 1 < depth ? masks[j] : 0, rows + ld + 32 * j);
            _mm512_storeu_si512(packed + 32 * j, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(packed + 32 * j + 16, _mm512_permutex2var_epi16(even, high, odd));
        }
}

// A weight (k, n): all threads decode a band of its rows, then each multiplies panels of columns with it. A
// band has as many bytes as the sums, which are read and written once a band.
static void across(const LinearCall& c, const WeightRows& weight, const PairedRows& x) {
    const i64 panels = (c.n + PANEL - 1) / PANEL;
    const i64 wanted = (BAND_BYTES > 4 * c.m * c.n ? BAND_BYTES : 4 * c.m * c.n) / (2 * c.n);
    const i64 height = smaller(smaller(wanted, DEPTH) / BAND_ROWS * BAND_ROWS + BAND_ROWS, c.k);
    const Array<u16> band(height * c.n);
    const Array<float> sums(panels * c.m * PANEL);
    for (i64 k = 0; k < c.k; k += height) {
        const i64 depth = smaller(c.k - k, height);
        parallel(depth, BAND_ROWS / 4, c.threads,
                 [&](i64 a, i64 b) { weight.decode(k + a, b - a, band + a * c.n); });
        parallel(panels, 1, c.threads, [&](i64 a, i64 b) {
            const Array<u32> packed(PANEL * ((depth + 1) / 2));
            for (i64 p = a; p < b; p++) {
                const i64 n0 = p * PANEL;
                pack_columns(band + n0, c.n, depth, smaller(c.n - n0, PANEL), packed);
                multiply_panel(c, x, k, packed, (depth + 1) / 2, sums + p * c.m * PANEL);
                if (k + depth == c.k) finish_panel(c, weight, sums + p * c.m * PANEL, n0);
            }
        });
    }
}

static bool serves(const CQuantizer& p, const LinearCall& c) {
    if (p.rotated == (c.across == COLUMNWISE ? COLUMNWISE : ROWWISE)) return false;
    // Factors of rows of (k, n) do not follow the sums.
    return p.family != (c.across ? ROW : COLUMN) && !(c.across == ROWWISE && p.row_scaled);
}
#endif

bool linear([[maybe_unused]] const CQuantizer& p, [[maybe_unused]] const LinearCall& c) {
#if QT_ISA == 512
    if (!__builtin_cpu_supports("avx512bf16") || !serves(p, c)) return false;
    (c.across ? across : along)(c, WeightRows(p, c), PairedRows(c));
    return true;
#else
    return false;
#endif
}

}  // namespace QT_NAMESPACE
