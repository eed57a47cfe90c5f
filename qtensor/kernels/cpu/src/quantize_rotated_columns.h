// Columns of NVFP4 rotated and quantized where they lie, with AVX-512: 16 rows of 16 columns are 16 blocks,
// one a lane, so that nothing is transposed but the codes, 8 bytes a block.
#pragma once
#include "quantize_rows.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
// `rows` of 16 rows, `cols` of W columns; the others are 0.
template <class D>
INLINE void rows_in_lanes(const typename D::T* x, i64 stride, i64 rows, i64 cols, VF v[NV]) {
    if (rows >= NV && cols >= W) {
        for (int k = 0; k < NV; k++) v[k] = (VF)D::one(x + k * stride);
        return;
    }
    typename D::T padded[W];
    for (int k = 0; k < NV; k++) {
        memset(padded, 0, sizeof padded);
        if (k < rows) memcpy(padded, x + k * stride, sizeof(typename D::T) * size_t(cols < W ? cols : W));
        v[k] = (VF)D::one(padded);
    }
}
INLINE VF magnitudes(const VF v[NV]) {
    VF sum[2] = {(VF)((VI)v[0] & all(ABS)), (VF)((VI)v[1] & all(ABS))};
    for (int k = 2; k < NV; k++) sum[k % 2] = sum[k % 2] + (VF)((VI)v[k] & all(ABS));
    return sum[0] + sum[1];
}
// As rotated_lanes.
template <class D>
INLINE bool rotated_rows(VF v[NV], Rotation how, VF s[NV], VI& amax) {
    if constexpr (D::id == BF16) {
        VU least = (VU)all(-1);
        for (int k = 0; k < NV; k++) {
            const VU a = (VU)((VI)v[k] << 1) - (VU)all(1);
            least = a < least ? a : least;
        }
        if (any((VI)(least < (VU)all(27 << 24)))) return false;
    }
    for (int k = 0; D::id != BF16 && k < NV; k++) v[k] = v[k] * all(0.25f);
    amax = (VI)(rounded_to<D>(rotate_lanes(v, s, how.signs), how.half) * all(AFTER<D>));
    if (any(amax >= all(INF_BITS))) return false;
    for (int j = 0; j < NV; j++) s[j] = rounded_to<D>(s[j], how.half);
    return true;
}
// Whether no rotated value of 16 rows and 32 columns of bfloat16 exceeds `top`: one read of whole lines of
// memory.
INLINE bool pairs_stay_below(const u16* x, i64 stride, i32 top) {
    VF even{}, odd{};
    for (int k = 0; k < NV; k++) {
        __builtin_prefetch(x + k * stride + 256, 0, 2);
        const VI w = load<VI>(x + k * stride);
        even = even + (VF)(w << 16 & all(ABS));
        odd = odd + (VF)(w & all(0x7fff0000));
    }
    return sum_stays_below(even, top) && sum_stays_below(odd, top);
}
// The largest rotated magnitude of blocks along columns, at least `top`.
template <class D>
static i32 rotated_columns_max(const typename D::T* x, i64 stride, i64 rows, i64 cols, Rotation how,
                               i32 top) {
    for (i64 r = 0; r < rows; r += NV)
        for (i64 c = 0; c < cols; c += W) {
            VF v[NV], s[NV];
            VI amax;
            if constexpr (D::pairs) {
                if (r + NV <= rows && c + 2 * W <= cols &&
                    pairs_stay_below(x + r * stride + c, stride, top)) {
                    c += W;
                    continue;
                }
            }
            rows_in_lanes<D>(x + r * stride + c, stride, rows - r, cols - c, v);
            if (sum_stays_below(magnitudes(v), top)) continue;
            if (rotated_rows<D>(v, how, s, amax)) {
                const i32 part = lane_max(amax);
                top = top > part ? top : part;
                continue;
            }
            alignas(64) typename D::T transposed[W * NV] = {};
            alignas(64) float wide[W * NV];
            transpose<typename D::T>(x + r * stride + c, stride, transposed, NV,
                                     rows - r < NV ? rows - r : NV, cols - c < W ? cols - c : W);
            to_finite<D>(transposed, wide, true, how);
            for (int i = 0; i < W * NV; i++) {
                const i32 a = bits<i32>(wide[i]) & ABS;
                top = top > a ? top : a;
            }
        }
    return top;
}

template <class D, class E>
struct RotatedColumns {
    using T = typename D::T;
    static constexpr i64 ROWS = 256, COLS = 256, BLOCKS = ROWS / NV, LINE = ROWS / 2;
    const Direction& d;
    alignas(64) u8 codes[COLS][LINE];
    alignas(64) u8 factors[BLOCKS][COLS], transposed[COLS][BLOCKS];
    bool failed[COLS / W];

    explicit RotatedColumns(const Direction& direction) : d(direction) {}
    static bool serves(const CQuantizer& p) {
        return p.rotated == COLUMNWISE && !p.stochastic && !p.four_over_six;
    }

    // n rows, `width` columns, from row `row` and column `column` of the tensor. Groups of W columns that
    // have failed, and the last columns of less than a group, are not written.
    void run(const T* x, i64 stride, i64 n, i64 width, i64 row, i64 column, u8* out, i64 out_stride) {
        GlobalScaleLanes global;
        for (int b = 0; b < W; b++) global.set(b, d.global);
        const i64 groups = width / W, blocks = (n + NV - 1) / NV;
        memset(failed, 0, sizeof failed);
        for (i64 b = 0; b < blocks; b++)
            for (i64 g = 0; g < groups; g++) {
                if (g % 2 == 0 && (b + 2) * NV <= n)
                    prefetch(x + (b + 1) * NV * stride + g * W, NV, stride * i64(sizeof(T)), 64);
                if (!failed[g])
                    failed[g] = !strip(x + b * NV * stride + g * W, stride, n - b * NV, global, b, g);
            }
        transpose<u8>(factors[0], COLS, transposed[0], BLOCKS, blocks, groups * W);
        for (i64 c = 0; c < groups * W; c++) {
            if (failed[c / W]) continue;
            put_bytes(out + c * out_stride, codes[c], blocks * (NV / 2), d.nontemporal);
            put(column + c, row / NV, transposed[c], blocks);
        }
    }
    INLINE void put_lane(RotatedColumns& q, i64 b, i64 g, const u8* packed) {
        for (int c = 0; c < W; c++) memcpy(q.codes[g * W + c] + b * (NV / 2), packed + c * (NV / 2), NV / 2);
    }
    bool strip(const T* x, i64 stride, i64 rows, const GlobalScaleLanes& global, i64 b, i64 g) {
        VF v[NV], s[NV];
        VI top;
        rows_in_lanes<D>(x, stride, rows, W, v);
        if (!rotated_rows<D>(v, d.rotation, s, top)) return false;
        const BlockFactors f = factors_of<E>(top, d, global);
        const VF encode = useful_factor(top, f.encode);
        if (!fits_quarters<D, false>(top, encode)) return false;
        alignas(64) u8 packed[W * NV / 2];
        encode_lanes<false>(s, encode * all(4.0f * AFTER<D>), packed);
        put_lane(*this, b, g, packed);
        narrow(factors[b] + g * W, f.stored);
        return true;
    }
    void put(i64 line, i64 block, const u8* from, i64 n) {
        const ScaleLayout& s = d.scales;
        if (!s.tiles && s.block_stride == 1) {
            memcpy(s.base + s.at(line, block), from, size_t(n));
        } else if (s.tiles && block % 4 == 0 && n % 4 == 0) {
            for (i64 b = 0; b < n; b += 4) memcpy(s.base + s.at(line, block + b), from + b, 4);
        } else {
            for (i64 b = 0; b < n; b++) s.put(line, block + b, from[b]);
        }
    }
};
#endif

}  // namespace QT_NAMESPACE
