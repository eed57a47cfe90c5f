// FP8 with one factor for the tensor, a row or a column.
#pragma once
#include "amax.h"

namespace QT_NAMESPACE {

constexpr i64 RUN = 4096;  // elements that stay in the first cache level between two looks

// n elements with one factor (stride 0), or with factors in the lanes' order (docs in simd.h), 4 vectors a group.
template <class D, class E, bool Safe>
static void encode_run(const typename D::T* x, i64 n, const VF* factors, int step, u8* out, bool stream) {
    using T = typename D::T;
    stream = stream && (uintptr_t(out) & (GROUP - 1)) == 0;
    i64 i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        look_ahead<GROUP * sizeof(T)>(x + i);
        store_bytes(out + i, encode_group<D, E, Safe, false>(x + i, factors + i / W * step), stream);
    }
    if (i < n) {
        T t[GROUP] = {};
        u8 codes[GROUP];
        memcpy(t, x + i, sizeof(T) * size_t(n - i));
        store(codes, encode_group<D, E, Safe, false>(t, factors + i / W * step));
        memcpy(out + i, codes, size_t(n - i));
    }
}
template <class D, class E>
INLINE void encode_any(const typename D::T* x, i64 n, const VF* factors, int step, u8* out, bool stream, bool safe) {
    if (safe)
        encode_run<D, E, true>(x, n, factors, step, out, false);
    else
        encode_run<D, E, false>(x, n, factors, step, out, stream);
}

template <class D, class E>
struct Float8Quantizer {
    using T = typename D::T;
    const Plan& p;
    const QuantizeCall& c;
    const T* x;
    const i64 begin, end;  // rows to quantize
    const bool nontemporal;

    Float8Quantizer(const Plan& plan, const QuantizeCall& call, bool stream)
        : p(plan), c(call), x((const T*)call.x), begin(call.begin), end(call.end ? call.end : call.rows), nontemporal(stream) {}

    float scale_of(i32 amax) const { return fp8_scale(all(amax), bits<float>(E::max_bits), p, FLT_MAX)[0]; }

    void run() {
        if (p.family == TENSOR)
            tensor();
        else if (p.family == ROW)
            rows();
        else
            columns();
    }

    void tensor() {
        i32 found = 0;
        float scale = c.scale ? *c.scale : 1.0f;
        const bool own = !c.scale && !c.row.given;
        if (own || c.amax_out) found = amax_tensor<D>(c, false);
        if (!c.scale) scale = scale_of(own ? found : bits<i32>(*c.row.given));
        *c.scale_inv = 1.0f / scale;
        if (c.amax_out) *c.amax_out = bits<float>(found > INF_BITS ? 0x7fc00000 : found);
        with_scale(scale, own || c.amax_out ? found >= INF_BITS : -1);
    }

    void rows() {
        i32* amax = (i32*)c.scale_inv;  // holds the maxima until the factors are known
        if (!c.scale && c.row.given) memcpy(amax, c.row.given, sizeof(i32) * size_t(c.rows));
        encode_all(nullptr, 0, amax, -1);
    }

    void columns() {
        i32* amax = (i32*)c.scale_inv;
        if (!c.scale && !c.row.given) amax_columns<D>(c, false, amax);
        if (!c.scale && c.row.given) memcpy(amax, c.row.given, sizeof(i32) * size_t(c.cols));
        const i64 groups = (c.cols + GROUP - 1) / GROUP;
        int safe = -1;
        for (i64 k = 0; c.scale && k < c.cols; k++)
            if (is_odd(c.scale[k])) safe = 1;
        VF* factors = new (std::align_val_t(64)) VF[size_t(4 * groups)];
        for (i64 g = 0; g < groups; g++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < W; i++) {
                    const i64 k = g * GROUP + position<D>(j, i);
                    factors[4 * g + j][i] = k >= c.cols ? 0.0f : c.scale ? c.scale[k] : scale_of(amax[k]);
                }
        for (i64 g = 0; g < groups; g++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < W; i++) {
                    const i64 k = g * GROUP + position<D>(j, i);
                    if (k < c.cols) c.scale_inv[k] = 1.0f / factors[4 * g + j][i];
                }
        encode_all(factors, 1, nullptr, safe);
        operator delete[](factors, std::align_val_t(64));
    }

    // A given factor that is no positive finite number: signs and NaN are those of the products.
    static bool is_odd(float scale) { return !(scale > 0 && scale <= FLT_MAX); }

    // Codes of the rows with the factor of the tensor; `safe` as encode_all has it.
    void with_scale(float scale, int safe) {
        VF f[4] = {all(scale), all(scale), all(scale), all(scale)};
        encode_all(f, 0, nullptr, is_odd(scale) ? 1 : safe);
    }

    // The factor of a row: given, from a given maximum, or from its own.
    float row_scale(i64 r) const {
        i32* amax = (i32*)c.scale_inv;
        if (c.scale) return c.scale[r];
        return scale_of(c.row.given ? amax[r] : amax_run<D>(x + r * c.stride, c.cols));
    }

    // safe: 1 or 0 where it is known whether there are values that are not finite, else -1.
    void encode_all(const VF* factors, int step, i32* by_row, int safe) {
        if (!c.column.data && !by_row && !step && (c.stride == c.cols || c.rows == 1)) {
            const i64 first = begin * c.cols;
            parallel((end - begin) * c.cols, RUN, c.threads, [&](i64 a, i64 b) {
                // Backwards: what the pass for the maximum read last is still in the cache.
                constexpr i64 part = 16 * RUN;
                for (i64 at = a + (b - a - 1) / part * part; at >= a; at -= part)
                    for (i64 i = at; i < b && i < at + part; i += RUN)
                        run_of(x + first + i, b - i < RUN ? b - i : RUN, factors, 0, c.row.data + first + i, safe);
            });
            return;
        }
        constexpr i64 band = 256;
        parallel(end - begin, c.column.data ? band : 1, c.threads, [&](i64 a, i64 b) {
            u8* codes = c.column.data ? new (std::align_val_t(64)) u8[size_t(2 * band * band)] : nullptr;
            // Without a transpose a row is encoded while it is still in the cache.
            const i64 step_rows = codes ? band : 1;
            for (i64 r = a; r < b; r += step_rows)
                bands(begin + r, b - r < step_rows ? b - r : step_rows, factors, step, by_row, safe, codes);
            operator delete[](codes, std::align_val_t(64));
        });
    }

    void run_of(const T* from, i64 n, const VF* factors, int step, u8* out, int safe) {
        const bool careful = safe < 0 ? amax_run<D>(from, n) >= INF_BITS : safe;
        encode_any<D, E>(from, n, factors, step, out, nontemporal && !c.column.data, careful);
    }

    void bands(i64 row0, i64 n, const VF* factors, int step, i32* by_row, int safe, u8* codes) {
        VF of_row[256];
        for (i64 r = 0; by_row && r < n; r++) {
            const float s = row_scale(row0 + r);
            of_row[r] = all(s);
            c.scale_inv[row0 + r] = 1.0f / s;
        }
        const i64 tile = codes ? 256 : RUN;
        if (by_row && !codes && row0 + 1 < end) prefetch(x + (row0 + 1) * c.stride, 1, 0, (c.cols < 16384 ? c.cols : 16384) * i64(sizeof(T)));
        for (i64 k = 0; k < c.cols; k += tile) {
            const i64 width = c.cols - k < tile ? c.cols - k : tile;
            if (codes && k + 2 * tile <= c.cols)
                prefetch(x + row0 * c.stride + k + tile, n, c.stride * i64(sizeof(T)), tile * i64(sizeof(T)));
            for (i64 r = 0; r < n; r++) {
                const VF four[4] = {of_row[r], of_row[r], of_row[r], of_row[r]};
                const int careful = by_row && is_odd(of_row[r][0]) ? 1 : safe;
                u8* out = codes ? codes + r * 256 : c.row.data + (row0 + r) * c.cols + k;
                run_of(x + (row0 + r) * c.stride + k, width, by_row ? four : factors + k / W * step, by_row ? 0 : step, out,
                       careful);
                if (codes && c.row.data) {
                    u8* row = c.row.data + (row0 + r) * c.cols + k;
                    if (nontemporal)
                        stream_copy(row, out, width);
                    else
                        memcpy(row, out, size_t(width));
                }
            }
            if (!codes) continue;
            // Through a tile of its own, so that whole lines of memory leave at once.
            u8* turned = codes + 256 * 256;
            transpose<u8>(codes, 256, turned, 256, n, width);
            for (i64 i = 0; i < width; i++) {
                u8* out = c.column.data + (k + i) * c.rows + row0;
                if (nontemporal)
                    stream_copy(out, turned + i * 256, n);
                else
                    memcpy(out, turned + i * 256, size_t(n));
            }
        }
    }
};

}  // namespace QT_NAMESPACE
