// Maxima of magnitudes: of a tensor, its rows, its columns; as bits of a float. INF_BITS or more: not finite,
// as in the input. The finite ones count NaN as 0 and inf as the largest finite number (NVFP4).
#pragma once
#include "quantize_rows.h"
#include "threads.h"

namespace QT_NAMESPACE {

INLINE i32 finite_bits(i32 a) {
    if (a > INF_BITS) return 0;
    return a == INF_BITS ? INF_BITS - 1 : a;
}

template <class D>
static i32 amax_run(const typename D::T* x, i64 n) {
    VI m[4] = {};
    i64 i = 0;
    if (D::pairs) {
        VH h[4] = {};
        for (; i + 8 * W <= n; i += 8 * W) {
            look_ahead<16 * W>(x + i);
            for (int k = 0; k < 4; k++) {
                VH next = load<VH>(x + i + 2 * W * k) & (VH)all(0x7fff7fff);
                h[k] = h[k] > next ? h[k] : next;
            }
        }
        for (int k = 0; k < 4; k++) m[k] = max((VI)h[k] << 16, (VI)h[k] & all(i32(0xffff0000)));
    } else {
        for (; i + GROUP <= n; i += GROUP) {
            look_ahead<GROUP* int(sizeof(typename D::T))>(x + i);
            for (int k = 0; k < 4; k++) m[k] = max(m[k], D::one(x + i + k * W) & all(ABS));
        }
    }
    i32 top = lane_max(max(max(m[0], m[1]), max(m[2], m[3])));
    for (; i < n; i++) {
        i32 a = bits<i32>(D::to_float(x[i])) & ABS;
        top = top > a ? top : a;
    }
    return top;
}
template <class D>
static i32 amax_run_finite(const typename D::T* x, i64 n) {
    i32 top = amax_run<D>(x, n);
    if (top < INF_BITS) return top;
    top = 0;
    for (i64 i = 0; i < n; i++) {
        i32 a = finite_bits(bits<i32>(D::to_float(x[i])) & ABS);
        top = top > a ? top : a;
    }
    return top;
}

template <class D>
static i32 amax_tensor(const QuantizeCall& c, bool finite) {
    using T = typename D::T;
    const T* x = (const T*)c.x;
    auto run = finite ? amax_run_finite<D> : amax_run<D>;
    if (c.stride == c.cols || c.rows == 1)
        return parallel_max(c.rows * c.cols, 4096, c.threads,
                            [&](i64 a, i64 b) { return run(x + a, b - a); });
    return parallel_max(c.rows, 1, c.threads, [&](i64 a, i64 b) {
        i32 top = 0;
        for (i64 r = a; r < b; r++) {
            i32 m = run(x + r * c.stride, c.cols);
            top = top > m ? top : m;
        }
        return top;
    });
}
template <class D>
static void amax_rows(const QuantizeCall& c, bool finite, i32* out) {
    using T = typename D::T;
    auto run = finite ? amax_run_finite<D> : amax_run<D>;
    parallel(c.rows, 1, c.threads, [&](i64 a, i64 b) {
        for (i64 r = a; r < b; r++) out[r] = run((const T*)c.x + r * c.stride, c.cols);
    });
}
// Largest magnitudes of 2 * W columns, `rows` of them at `stride`, as bits of floats. Finite: NaN count as 0.
template <class D, bool Finite>
INLINE void largest_of_rows(const typename D::T* x, i64 rows, i64 stride, VI top[2]) {
    if constexpr (D::pairs) {
        const VH inf = (VH)all(INF_BITS | INF_BITS >> 16);
        VH words{};
        for (i64 r = 0; r < rows; r++) {
            VH w = load<VH>(x + r * stride) & (VH)all(0x7fff7fff);
            if (Finite) w = w > inf ? VH{} : w;
            words = words > w ? words : w;
        }
        typename D::T in_order[2 * W];
        store(in_order, words);
        for (int h = 0; h < 2; h++) top[h] = D::one(in_order + h * W);
        return;
    }
    top[0] = top[1] = VI{};
    for (i64 r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) {
            VI v = D::one(x + r * stride + h * W) & all(ABS);
            if (Finite) v = v > all(INF_BITS) ? VI{} : v;
            top[h] = max(top[h], v);
        }
}
// Threads take columns, so that each writes its own.
template <class D, bool Finite>
static void amax_columns_as(const QuantizeCall& c, i32* out) {
    using T = typename D::T;
    constexpr i64 ROWS = 8;  // between two visits of a maximum; more lines of memory at once cost more
    parallel(c.cols, 1024, c.threads, [&](i64 a, i64 b) {
        memset(out + a, 0, sizeof(i32) * size_t(b - a));
        for (i64 r = 0; r < c.rows; r += ROWS) {
            const T* x = (const T*)c.x + r * c.stride;
            const i64 n = smaller(c.rows - r, ROWS);
            i64 i = a;
            for (; i + 2 * W <= b; i += 2 * W) {
                VI top[2];
                largest_of_rows<D, Finite>(x + i, n, c.stride, top);
                for (int h = 0; h < 2; h++) {
                    if (Finite) top[h] = min(top[h], all(INF_BITS - 1));
                    store(out + i + h * W, max(load<VI>(out + i + h * W), top[h]));
                }
            }
            for (; i < b; i++)
                for (i64 k = 0; k < n; k++) {
                    i32 m = bits<i32>(D::to_float(x[k * c.stride + i])) & ABS;
                    if (Finite) m = finite_bits(m);
                    out[i] = out[i] > m ? out[i] : m;
                }
        }
    });
}
template <class D>
static void amax_columns(const QuantizeCall& c, bool finite, i32* out) {
    finite ? amax_columns_as<D, true>(c, out) : amax_columns_as<D, false>(c, out);
}

}  // namespace QT_NAMESPACE
