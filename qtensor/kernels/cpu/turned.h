// Columnwise codes of formats that store the transpose: quantized where the elements lie, lanes being columns; then the codes, of
// which there are fewer bytes than of elements, are transposed.
#pragma once
#include "lines.h"
#include "transpose.h"

namespace QT_NAMESPACE {

template <class D, class E, int B, int Codes>
struct TurnedQuantizer {
    using T = typename D::T;
    static constexpr bool nv = B == NV;
    static constexpr i64 ROWS = nv ? 256 : B, BLOCKS = ROWS / B, LINES = ROWS / Codes;  // of a tile; lines: of stored codes
    const Direction& d;
    const Plan& p;
    GlobalLanes global;
    alignas(64) u8 codes[LINES * GROUP];
    alignas(64) u8 narrow_factors[BLOCKS][GROUP];
    alignas(64) u8 turned_factors[GROUP][BLOCKS];

    explicit TurnedQuantizer(const Direction& direction) : d(direction), p(*direction.plan) {
        for (int b = 0; b < W; b++) global.set(b, d.global);
    }
    // What this file has no code for: what is not done element by element, or has factors by line.
    static bool serves(const Plan& p) { return !(p.rotated == COLUMNWISE || p.stochastic || p.four_over_six || p.row_scaled); }

    // Columns 0 .. cols (whole groups) of n rows (whole blocks); out: the first column's line, at these rows. False, with nothing
    // of value written, where NVFP4 meets a value that is not finite.
    bool run(const T* x, i64 stride, i64 n, i64 cols, u8* out, i64 out_stride, i64 column0, i64 block0) {
        for (i64 k = 0; k < cols; k += GROUP) {
            for (i64 b = 0; b < n / B; b++)
                if (!block(x + b * B * stride + k, stride, int(b), column0 + k, block0 + b)) return false;
            turn_bytes(codes, GROUP, out + k * out_stride, out_stride, n / Codes, GROUP, d.nontemporal);
            if (nv) put_narrow(column0 + k, block0, n / B);
        }
        return true;
    }

    INLINE void maxima(const T* x, i64 stride, VI m[4]) {
        if (D::pairs) {
            VH h[2] = {};
            for (int r = 0; r < B; r++) {
                const T* row = x + r * stride;
                __builtin_prefetch(row + GROUP), __builtin_prefetch(row + 2 * GROUP - 1);
                for (int i = 0; i < 2; i++) {
                    const VH next = load<VH>(row + 2 * W * i) & (VH)all(0x7fff7fff);
                    h[i] = h[i] > next ? h[i] : next;
                }
            }
            for (int i = 0; i < 2; i++) m[2 * i] = (VI)h[i] << 16, m[2 * i + 1] = (VI)h[i] & all(i32(0xffff0000));
            return;
        }
        for (int i = 0; i < 4; i++) m[i] = VI{};
        for (int r = 0; r < B; r++) {
            const T* row = x + r * stride;
            for (i64 i = 0; i < i64(GROUP * sizeof(T)); i += 64) __builtin_prefetch((const u8*)(row + GROUP) + i);
            for (int i = 0; i < 4; i++) m[i] = max(m[i], D::one(row + i * W) & all(ABS));
        }
    }

    bool block(const T* x, i64 stride, int b, i64 column, i64 at) {
        VI m[4], stored[4];
        VF f[4];
        maxima(x, stride, m);
        const bool finite = !any(max(max(m[0], m[1]), max(m[2], m[3])) >= all(INF_BITS));
        if (nv && !finite) return false;
        for (int j = 0; j < 4; j++) {
            const Factors found = factors_of<E>(m[j], d, global);
            f[j] = found.encode, stored[j] = found.stored;
        }
        if (nv) {
            store(narrow_factors[b], pack<D::pairs>(stored));
        } else {
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < W; i++) d.sink.put(column + position<D>(j, i), at, stored[j][i]);
        }
        encode_block(x, stride, m, f, finite, codes + b * (B / Codes) * GROUP);
        return true;
    }

    void encode_block(const T* x, i64 stride, const VI m[4], const VF f[4], bool finite, u8* out) {
        if (!finite) return rows(x, stride, out, [&](const T* row) { return encode_group<D, E, true, nv>(row, f); });
#if QT_ISA == 512
        if constexpr (nv) {
            bool small = true;
            for (int j = 0; j < 4; j++) small &= fits_quarters<D>(m[j], f[j]);
            const VF four[4] = {f[0] * all(4.0f), f[1] * all(4.0f), f[2] * all(4.0f), f[3] * all(4.0f)};
            if (small) return rows(x, stride, out, [&](const T* row) { return quarters_group<D>(row, four); });
        } else if constexpr (D::id == BF16) {
            VI code[4];
            for (int j = 0; j < 4; j++) code[j] = all(254) - (VI)((VU)(VI)f[j] >> 23);
            const VI least = min(min(code[0], code[1]), min(code[2], code[3]));
            if (p.pow2 && !any(least < all(LEAST_CODE<E>))) {
                const __m512i base = _mm512_add_epi8((__m512i)pack<true>(code), bytes_of(base_of<E>(0)));
                return rows(x, stride, out, [&](const T* row) { return pow2_group<E>(row, base); });
            }
        }
#endif
        rows(x, stride, out, [&](const T* row) { return encode_group<D, E, false, nv>(row, f); });
    }

    // Two rows of 4-bit codes share bytes.
    template <class F>
    INLINE void rows(const T* x, i64 stride, u8* out, const F& encode) {
        for (int r = 0; r < B; r += Codes, out += GROUP) {
            VB c = encode(x + r * stride);
            if (Codes == 2) c = c | encode(x + (r + 1) * stride) << 4;
            store(out, c);
        }
    }

    // Factors of a column lie side by side.
    void put_narrow(i64 column, i64 block, i64 n) {
        transpose<u8>(narrow_factors[0], GROUP, turned_factors[0], BLOCKS, BLOCKS, GROUP);
        const Sink& s = d.sink;
        for (i64 i = 0; i < GROUP; i++) {
            const u8* f = turned_factors[i];
            if (n == BLOCKS && !s.tiles) {
                memcpy(s.base + s.at(s, column + i, block), f, BLOCKS);
            } else if (n == BLOCKS && block % 4 == 0) {
                for (int b = 0; b < BLOCKS; b += 4) memcpy(s.base + s.at(s, column + i, block + b), f + b, 4);
            } else {
                for (i64 b = 0; b < n; b++) s.put(column + i, block + b, f[b]);
            }
        }
    }
};

}  // namespace QT_NAMESPACE
