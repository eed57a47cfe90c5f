// What products of bfloat16 x and a quantized weight share: how threads divide them, the decoded weight, and
// the end of the sums.
#pragma once
#include <cstring>

#include "avx512_rotation.h"
#include "calls.h"
#include "cpu.h"
#include "memory.h"
#include "threads.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
constexpr i64 PANEL = 64;        // columns of the result
constexpr i64 BLOCK_PANELS = 2;  // the panels of the largest block
constexpr i64 LEAST_ROWS = 32;   // of a thread where rows are shared: each decodes the weight anew

struct RowRange {
    i64 first, end;
};

// f(first panel, end, rows) in each thread. Panels are dealt out in whole units. Where they are few, rows are
// dealt out instead, and each thread decodes all panels.
template <class F>
static void share(const LinearCall& c, i64 unit, i64 row_unit, const F& f) {
    const i64 panels = (c.n + PANEL - 1) / PANEL, vectors = (c.n + 15) / 16;
    const i64 units = (panels + unit - 1) / unit, of_the_slowest = (units + c.threads - 1) / c.threads * unit;
    const bool uneven = smaller(of_the_slowest * (PANEL / 16), vectors) * c.threads * 5 > vectors * 6;
    if (uneven && c.m >= LEAST_ROWS * c.threads)
        parallel(c.m, row_unit, c.threads, [&](i64 a, i64 b) { f(0, panels, RowRange{a, b}); });
    else
        parallel(panels, unit, c.threads, [&](i64 a, i64 b) { f(a, b, RowRange{0, c.m}); });
}

// Decodes rows of the weight, without the factors that follow the sums.
struct WeightRows {
    CQuantizer quantizer;
    DequantizeCall call{};
    const Array<float> global;
    const float* factors = nullptr;  // that follow the sums, of the columns of the result; null: 1
    i64 factor_step = 0;
    const float one = 1.0f;

    WeightRows(const CQuantizer& p, const LinearCall& c)
        : quantizer(p), global(c.weight.amax ? p.row_scaled ? c.n : 1 : 0) {
        call.threads = 1;
        call.rows = c.across ? c.k : c.n, call.cols = c.across ? c.n : c.k;
        Buffers& side = c.across == COLUMNWISE ? call.column : call.row;
        side = c.weight, side.amax = nullptr;
        if (!factors_follow(p, c.across)) {
            side.amax = c.weight.amax, call.scale_inv = c.scale_inv;
        } else if (p.family == BLOCK) {
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

    // Whether factors of lines of the weight are those of columns of the result.
    static bool factors_follow(const CQuantizer& p, i32 across) {
        return p.family != (across ? ROW : COLUMN) && !(across == ROWWISE && p.row_scaled);
    }
    // Rows first .. of the stored matrix, their columns left .. , as values of the type D.
    template <class D>
    void decode(i64 first, i64 count, i64 left, i64 width, typename D::T* out) const {
        DequantizeCall part = call;
        part.dtype = D::id, part.y = out;
        part.first = first, part.count = count, part.left = left, part.width = width;
        dequantize_as<D>(quantizer, part);
    }
};

// Packs `count` columns of rows (length, ld): each row beside the next one. Behind the last ones there are
// zeros; rows up to `depth`.
static void pack_columns(const u16* rows, i64 ld, i64 length, i64 depth, i64 count, u32* packed) {
    alignas(64) u16 order[2][32];
    for (int i = 0; i < 32; i++) order[0][i] = u16(i / 2 + i % 2 * 32), order[1][i] = u16(order[0][i] + 16);
    const __m512i low = load<__m512i>(order[0]), high = load<__m512i>(order[1]);
    const auto mask = [&](i64 first) {
        return count >= first + 32 ? ~u32(0) : count > first ? (u32(1) << (count - first)) - 1 : 0;
    };
    const __mmask32 masks[2] = {mask(0), mask(32)};
    i64 k = 0;
    for (; k < length; k += 2, rows += 2 * ld, packed += PANEL)
        for (int j = 0; j < 2; j++) {
            const __m512i even = _mm512_maskz_loadu_epi16(masks[j], rows + 32 * j);
            const __m512i odd = _mm512_maskz_loadu_epi16(k + 1 < length ? masks[j] : 0, rows + ld + 32 * j);
            _mm512_storeu_si512(packed + 32 * j, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(packed + 32 * j + 16, _mm512_permutex2var_epi16(even, high, odd));
        }
    for (; k < depth; k += 2, packed += PANEL) memset(packed, 0, sizeof(u32) * PANEL);
}

// Up to 16 columns of the result: sums (rows, ld) times factors, plus bias, rounded once.
static void finish(const LinearCall& c, const WeightRows& weight, const RowRange& rows, const float* sums,
                   i64 ld, i64 column) {
    const i64 count = smaller(c.n - column, W), n = c.n, step = c.row_factor_step;
    const __mmask16 mask = __mmask16((1 << count) - 1);
    const i32 dtype = c.dtype;
    const float *own = c.row_factors, *added = c.bias;
    const auto values = [&](const float* of) { return (VF)_mm512_maskz_loadu_ps(mask, of + column); };
    const VF factors =
        weight.factor_step ? values(weight.factors) : VF{} + (weight.factors ? *weight.factors : 1.0f);
    const VF bias = added ? values(added) : VF{};
    for (i64 m = rows.first; m < rows.end; m++, sums += ld) {
        VF v = load<VF>(sums) * (own ? own[m * step] * factors : factors);
        if (added) v += bias;
        if (dtype == F32) {
            _mm512_mask_storeu_ps((float*)c.y + m * n + column, mask, (__m512)v);
        } else {
            const __m512i bits = (__m512i)((VU)to_bfloat16_bits((VI)v) >> 16);
            const __m256i narrow = dtype == F16 ? (__m256i)to_half(v) : _mm512_cvtepi32_epi16(bits);
            _mm256_mask_storeu_epi16((u16*)c.y + m * n + column, mask, narrow);
        }
    }
}
#endif

}  // namespace QT_NAMESPACE
