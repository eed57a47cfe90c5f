// Square blocks: one factor for B rows and B columns, so that rowwise and columnwise data are the same codes.
#pragma once
#include "quantize_columns.h"

namespace QT_NAMESPACE {

// Codes of the tensor's rows, and of the transpose's; null where there are none.
struct Outputs {
    u8* row;
    i64 row_stride;
    u8* column;
    i64 column_stride;
};

// Fills a band of B rows. Formats whose columnwise data are the transpose get both from the same codes; MX
// fills its columns by ColumnQuantizer.
template <class D, class E, int B, int Codes>
struct SquareQuantizer {
    using T = typename D::T;
    static constexpr int blocks = B == 128 ? 2 : W;  // taken together
    static constexpr int width = blocks * B;
    const Direction &row, &column;  // column.scales.base is null where there is no transpose to fill
    const CQuantizer& p;
    alignas(64) T gathered[B * width];
    alignas(64) u8 codes[B * width];
    alignas(64) u8 transposed[width * B];
    alignas(64) float wide[B == NV ? B * width : width];
    GlobalScaleLanes global;

    SquareQuantizer(const Direction& r, const Direction& c) : row(r), column(c), p(*r.quantizer) {
        for (int b = 0; b < W; b++) global.set(b, r.global);
    }

    // Rows row0 .. row0 + rows of the tensor, columns first .. end (multiples of `width`, or the last
    // column).
    void run(const T* x, i64 stride, i64 rows, i64 row0, i64 first, i64 end, i64 total, const Outputs& out) {
        for (i64 c = first; c < end; c += width) {
            const i64 n = end - c < width ? end - c : width;
            const T* tile = x + c;
            i64 ld = stride;
            if (n < width) {
                memset(gathered, 0, sizeof gathered);
                for (i64 r = 0; r < rows; r++)
                    memcpy(gathered + r * width, x + r * stride + c, sizeof(T) * n);
                tile = gathered;
                ld = width;
            }
            VI stored = encode_tile(tile, ld, rows, row0, c, total);
            if (out.row) store_rows(out.row + c / Codes * (Codes == 4 ? 3 : 1), out.row_stride, rows, n);
            if (out.column) store_columns(out.column, out.column_stride, rows, row0, c, n);
            put(stored, rows, row0, c, n);
        }
    }

    VI maxima(const T* x, i64 ld, i64 rows) {
        VI m[W] = {};
        for (i64 r = 0; r < rows; r++)
            for (int b = 0; b < blocks; b++)
                for (int i = 0; i < B; i += W) m[b] = max(m[b], D::one(x + r * ld + b * B + i) & all(ABS));
        return column_max(m);
    }

    // Codes of the tile, one a byte; zeros in rows that are not there.
    VI encode_tile(const T* x, i64 ld, i64 rows, i64 row0, i64 column0, i64 total) {
        memset(codes + rows * width, 0, size_t((B - rows) * width));
        VI amax = maxima(x, ld, rows);
        bool safe = any(amax >= all(INF_BITS));
        if constexpr (B == NV) {
            if (safe || p.four_over_six || p.stochastic)
                return encode_special(x, ld, rows, row0, column0, total);
        }
        BlockFactors f = factors_of<E>(amax, row, global);
        alignas(64) float encode[W];
        store(encode, f.encode);
        for (i64 r = 0; r < rows; r++) {
            if (safe) {
                for (int i = 0; i < width; i++) wide[i] = D::to_float(x[r * ld + i]);
                encode_row<Float32, true>(wide, encode, codes + r * width);
            } else {
                encode_row<D, false>(x + r * ld, encode, codes + r * width);
            }
        }
        return f.stored;
    }

    template <class S, bool Safe>
    INLINE void encode_row(const typename S::T* x, const float* factors, u8* out) {
        for (int at = 0; at < width; at += GROUP) {
            VF f[4];
            for (int j = 0; j < 4; j++) f[j] = spread<S, B>(factors, at, j);
            store(out + at, encode_group<S, E, Safe, B == NV>(x + at, f));
        }
    }

    VI encode_special(const T* x, i64 ld, i64 rows, i64 row0, i64 column0, i64 total) {
        memset(wide, 0, sizeof wide);
        VI m[W] = {};
        for (i64 r = 0; r < rows; r++) {
            to_finite<D>(x + r * ld, wide + r * width, false, {});
            for (int b = 0; b < W; b++)
                for (int i = 0; i < NV; i += W)
                    m[b] = max(m[b], load<VI>(wide + r * width + b * NV + i) & all(ABS));
        }
        VI amax = column_max(m);
        if (p.four_over_six)
            return encode_4over6(wide, NV, width, codes, width, p, amax, global.amax, global.scale,
                                 global.inverse);
        BlockFactors f = factors_of<E>(amax, row, global);
        alignas(64) float encode[W];
        store(encode, f.encode);
        for (i64 r = 0; r < rows; r++) {
            if (!p.stochastic) {
                encode_row<Float32, false>(wide + r * width, encode, codes + r * width);
                continue;
            }
            i64 element[W];
            for (int b = 0; b < W; b++) element[b] = (row0 + r) * total + column0 + b * NV;
            u8 random[W * NV];
            noise(element, 0, row.seed, random);
            encode_stochastic(wide + r * width, encode, random, codes + r * width);
        }
        return f.stored;
    }

    void store_rows(u8* out, i64 stride, i64 rows, i64 n) {
        const i64 size = (n + Codes - 1) / Codes * (Codes == 4 ? 3 : 1);
        for (i64 r = 0; r < rows; r++) {
            u8 packed[width];
            const u8* c = codes + r * width;
            for (int at = 0; Codes > 1 && at < width; at += GROUP)
                store_codes<E, Codes>(packed + at * (Codes == 4 ? 3 : 1) / Codes, load<VB>(c + at), false);
            // Codes behind the last column are those of zeros: a packed group may end with them.
            put_bytes(out + r * stride, Codes > 1 ? packed : c, size, row.nontemporal);
        }
    }

    void store_columns(u8* out, i64 stride, i64 rows, i64 row0, i64 column0, i64 n) {
        transpose<u8>(codes, width, transposed, B, B, width);
        if (Codes == 1) {
            for (i64 c = 0; c < n; c++) {
                u8* to = out + (column0 + c) * stride + row0;
                put_bytes(to, transposed + c * B, rows, row.nontemporal);
            }
            return;
        }
        const i64 size = (rows + 1) / 2;
        for (i64 c = 0; c < n; c++) {
            u8 packed[B / 2];
            for (int i = 0; i < B / 2; i++)
                packed[i] = u8(transposed[c * B + 2 * i] | transposed[c * B + 2 * i + 1] << 4);
            memcpy(out + (column0 + c) * stride + row0 / 2, packed, size_t(size));
        }
    }

    // Factors of float32 are stored once a block, narrow ones once for every line.
    void put(VI stored, i64 rows, i64 row0, i64 column0, i64 n) {
        for (int b = 0; b * B < n; b++) {
            const i64 block = column0 / B + b;
            if (p.scale == SCALE_F32) {
                if (row.scales.base) row.scales.put(row0 / B, block, stored[b]);
                if (column.scales.base) column.scales.put(block, row0 / B, stored[b]);
                continue;
            }
            for (i64 r = 0; row.scales.base && r < rows; r++) row.scales.put(row0 + r, block, stored[b]);
            for (i64 c = b * B; column.scales.base && c < n && c < (b + 1) * B; c++)
                column.scales.put(column0 + c, row0 / B, stored[b]);
        }
    }
};

}  // namespace QT_NAMESPACE
