// Codes that are stored transposed, and those of square blocks, which both directions share: quantized where
// the elements lie, lanes being columns; then the codes, of which there are fewer bytes than of elements, are
// transposed.
#pragma once
#include "quantize_squares.h"
#include "scale_layout.h"
#include "transpose.h"

namespace QT_NAMESPACE {

// Rows of a tensor and the columns of them that are taken at once, and what is read after these, or null.
template <class T>
struct TileSource {
    const T* x;
    i64 rows, cols, stride;
    i64 row0, column0;
    const T* next;
};

template <class D, class E, int B, int Codes>
struct TransposedQuantizer {
    using T = typename D::T;
    static constexpr bool nv = B == NV;
    static constexpr int unit = Codes == 4 ? 3 : 1;
    struct Size {
        i64 rows, cols;
        constexpr i64 blocks() const { return rows / B; }
        constexpr i64 ld() const { return cols + 64; }  // rows of codes do not meet in one set of the cache
        constexpr i64 bytes() const { return rows / Codes * unit * ld(); }
    };
    // Codes that leave transposed do so in long runs, from tiles that the second cache level holds; rows want
    // width. Tiles of blocks of 128 were measured: wider ones are up to a fifth slower.
    static constexpr Size SQUARE = {B, B == 128 ? 128 : COLUMN_TILE};
    static constexpr Size TALL = nv ? Size{512, 512} : SQUARE;
    static constexpr Size WIDE = nv ? Size{256, COLUMN_TILE} : SQUARE;
    // Of a tensor of these rows and columns: low enough that all threads have some.
    static Size size_of(bool column_codes, i64 rows, i64 cols, i64 threads) {
        Size s = column_codes ? TALL : WIDE;
        while (s.rows > WIDE.rows && up(rows, s.rows) / s.rows * (up(cols, s.cols) / s.cols) < 2 * threads)
            s.rows /= 2;
        return s;
    }
    static constexpr i64 greater(i64 a, i64 b) { return a > b ? a : b; }
    const Direction &row,
        &column;  // square blocks: of both; without column.scales.base, nothing is transposed
    const CQuantizer& p;
    const Size size;
    ColumnQuantizer<D, E, B, Codes> quantizer;
    alignas(64) u8 codes[greater(TALL.bytes(), WIDE.bytes())];
    alignas(64) u8 plain[Codes > 1 ? B * WIDE.ld() : 64];  // one a byte
    alignas(64) u8 narrow_factors[TALL.blocks() * TALL.cols];

    TransposedQuantizer(const Direction& r, const Direction& c, const Size& s)
        : row(r), column(c), p(*c.quantizer), size(s), quantizer(c.quantizer->square ? r : c) {}
    // What this file has no code for: what is not done element by element, or has factors by line.
    static bool serves(const CQuantizer& p) {
        return !(p.rotated == COLUMNWISE || p.stochastic || p.four_over_six || p.row_scaled);
    }
    // Columns that run() takes come in whole groups and blocks.
    static i64 whole(const CQuantizer& p, i64 cols) {
        const i64 piece = p.square && B > GROUP ? B : GROUP;
        return cols / piece * piece;
    }

    // out: the first row and the first column's line, at these. rows(first, n) comes before the codes of each
    // band of B rows. False, with nothing of value written but by `rows`, where NVFP4 meets a value that is
    // not finite.
    template <class F>
    bool run(const TileSource<T>& m, const Outputs& out, const F& rows) {
        const i64 blocks = (m.rows + B - 1) / B, ahead = nv ? 4 : blocks;
        bool done = true;
        for (i64 b = 0; b < blocks; b++) {
            const i64 n = m.rows - b * B < B ? m.rows - b * B : B;
            const i64 after = b + ahead;
            const T* next = nullptr;
            if (after < blocks)
                next = m.x + after * B * m.stride;
            else if (m.next)
                next = m.next + (after - blocks) * B * m.stride;
            rows(b * B, n, next);
            done = done && band(m, b, n, out, next);
        }
        if (!done || !out.column) return done;
        transpose_bytes(codes, size.ld(), out.column, out.column_stride, (m.rows + Codes - 1) / Codes, m.cols,
                        column.nontemporal);
        if (nv) put_narrow(m.column0, m.cols, m.row0 / B, blocks);
        return true;
    }
    // n rows from the b-th band on.
    bool band(const TileSource<T>& m, i64 b, i64 n, const Outputs& out, const T* next) {
        u8* joined = codes + b * (B / Codes * unit) * size.ld();
        u8* to = p.square && Codes > 1 ? plain : joined;
        const bool done =
            quantizer.tile({m.x + b * B * m.stride, n, m.cols, m.stride, to, size.ld(), m.column0,
                            m.row0 / B + b, next, out.row && !p.square && B <= GROUP},
                           false, p.square);
        if (!done) return false;
        if (p.square) {
            if (out.row) store_rows(to, out.row + b * B * out.row_stride, out.row_stride, n, m.cols);
            if (Codes > 1 && out.column) join(n, m.cols, joined);
            put_square(m.row0 + b * B, n, m.column0, m.cols);
        }
        put_factors_of(b, m.row0 / B + b, m.column0, m.cols);
        return true;
    }

    void store_rows(const u8* from, u8* to, i64 stride, i64 rows, i64 cols) {
        alignas(64) u8 packed[WIDE.cols];
        for (i64 r = 0; r < rows; r++) {
            const u8* c = from + r * size.ld();
            for (i64 at = 0; Codes > 1 && at < cols; at += GROUP)
                store_codes<E, Codes>(packed + at * unit / Codes, load<VB>(c + at), false);
            put_bytes(to + r * stride, Codes > 1 ? packed : c, cols / Codes * unit, row.nontemporal);
        }
    }
    // Two rows of 4-bit codes share bytes.
    void join(i64 rows, i64 cols, u8* to) {
        for (i64 r = 0; r < rows; r += 2, to += size.ld())
            for (i64 k = 0; k < cols; k += GROUP) {
                VB c = load<VB>(plain + r * size.ld() + k);
                if (r + 1 < rows) c = c | load<VB>(plain + (r + 1) * size.ld() + k) << 4;
                store(to + k, c);
            }
    }

    // ---- factors: narrow ones of a column lie side by side, those of float32 are stored once a block
    // ----------------------------
    void put_factors_of(i64 b, i64 block, i64 column0, i64 cols) {
        if (!column.scales.base || (p.square && !nv)) return;
        for (i64 k = 0; k < cols; k += GROUP) {
            const VI* f = quantizer.stored + k / W;
            if (nv)
                store(narrow_factors + b * cols + k, pack<D::pairs>(f));
            else
                for (int h = 0; h < 4; h += 2)
                    put_in_order(f + h,
                                 column.scales.base + 4 * column.scales.at(column0 + k + h * W, block));
        }
    }
    // Two vectors of float32, whose columns lie side by side.
    INLINE void put_in_order(const VI f[2], u8* to) {
        for (int v = 0; v < 2; v++) {
            VI t = f[v];
            for (int i = 0; D::pairs && i < W; i++) t[i] = f[(v * W + i) % 2][(v * W + i) / 2];
            store(to + 4 * v * W, t);
        }
    }
    void put_narrow(i64 column0, i64 cols, i64 block, i64 n) {
        const ScaleLayout& s = column.scales;
        if (!s.tiles) {
            transpose_bytes(narrow_factors, cols, s.base + s.at(column0, block), s.line_stride, n, cols,
                            column.nontemporal);
            return;
        }
        alignas(64) u8 transposed[GROUP * TALL.blocks()];
        for (i64 k = 0; k < cols; k += GROUP) {
            transpose<u8>(narrow_factors + k, cols, transposed, n, n, GROUP);
            for (i64 i = 0; i < GROUP; i++) {
                const u8* f = transposed + i * n;
                i64 b = 0;
                for (; block % 4 == 0 && b + 4 <= n; b += 4)
                    memcpy(s.base + s.at(column0 + k + i, block + b), f + b, 4);
                for (; b < n; b++) s.put(column0 + k + i, block + b, f[b]);
            }
        }
    }
    // Square blocks: factors of rows, and, of float32, of both.
    void put_square(i64 row0, i64 rows, i64 column0, i64 cols) {
        if (p.scale == SCALE_F32) {
            for (i64 k = 0; k < cols; k += B) {
                const i32 f = quantizer.stored[k / W][0];
                if (row.scales.base) row.scales.put(row0 / B, (column0 + k) / B, f);
                if (column.scales.base) column.scales.put((column0 + k) / B, row0 / B, f);
            }
            return;
        }
        if (!row.scales.base) return;
        u8 all_columns[WIDE.cols], t[WIDE.cols / B];
        for (i64 k = 0; k < cols; k += GROUP)
            store(all_columns + k, pack<D::pairs>(quantizer.stored + k / W));
        const i64 n = cols / B, block0 = column0 / B;
        for (i64 b = 0; b < n; b++) t[b] = all_columns[b * B];
        const ScaleLayout& s = row.scales;
        for (i64 r = row0; r < row0 + rows; r++) {
            if (!s.tiles)
                memcpy(s.base + s.at(r, block0), t, size_t(n));
            else
                for (i64 b = 0; b < n; b++) s.put(r, block0 + b, t[b]);
        }
    }
};

}  // namespace QT_NAMESPACE
