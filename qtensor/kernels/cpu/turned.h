// Codes that are stored transposed, and those of square blocks, which both directions share: quantized where the elements lie, lanes
// being columns; then the codes, of which there are fewer bytes than of elements, are transposed.
#pragma once
#include "square.h"
#include "transpose.h"

namespace QT_NAMESPACE {

template <class D, class E, int B, int Codes>
struct TurnedQuantizer {
    using T = typename D::T;
    static constexpr bool nv = B == NV;
    static constexpr int unit = Codes == 4 ? 3 : 1;
    static constexpr i64 ROWS = nv ? 256 : B, BLOCKS = ROWS / B;                  // of a tile
    static constexpr i64 COLS = B == 128 ? 2048 / i64(sizeof(T)) : COLUMN_TILE;  // whose rows and codes the second cache level holds
    static constexpr i64 LD = COLS + 64;                                          // rows of codes do not meet in one set of the cache
    const Direction &row, &column;  // square blocks: of both; without column.sink.base, nothing is transposed
    const Plan& p;
    ColumnQuantizer<D, E, B, Codes> quantizer;
    alignas(64) u8 codes[ROWS / Codes * unit * LD];
    alignas(64) u8 plain[Codes > 1 ? B * LD : 64];  // one a byte
    alignas(64) u8 narrow_factors[BLOCKS][COLS];
    alignas(64) u8 turned_factors[GROUP][BLOCKS];

    TurnedQuantizer(const Direction& r, const Direction& c) : row(r), column(c), p(*c.plan), quantizer(c.plan->square ? r : c) {}
    // What this file has no code for: what is not done element by element, or has factors by line.
    static bool serves(const Plan& p) { return !(p.rotated == COLUMNWISE || p.stochastic || p.four_over_six || p.row_scaled); }
    // Columns that run() takes come in whole groups and blocks.
    static i64 whole(const Plan& p, i64 cols) {
        const i64 piece = p.square && B > GROUP ? B : GROUP;
        return cols / piece * piece;
    }

    // Columns 0 .. cols of n rows; out: the first row and the first column's line, at these. False, with nothing of value written,
    // where NVFP4 meets a value that is not finite. next: what is read after these rows, or null.
    bool run(const T* x, i64 stride, i64 n, i64 cols, const Outputs& out, i64 row0, i64 column0, const T* next) {
        for (i64 b = 0; b * B < n; b++) {
            const i64 rows = n - b * B < B ? n - b * B : B;
            u8* joined = codes + b * (B / Codes * unit) * LD;
            u8* to = p.square && Codes > 1 ? plain : joined;
            const bool done = quantizer.tile({x + b * B * stride, rows, cols, stride, to, LD, column0, row0 / B + b,
                                              next ? next + b * B * stride : nullptr}, false, p.square);
            if (!done) return false;
            if (p.square) {
                if (out.row) store_rows(to, out.row + b * B * out.row_stride, out.row_stride, rows, cols);
                if (Codes > 1 && out.column) join(rows, cols, joined);
                put_square(row0 + b * B, rows, column0, cols);
            }
            put_factors_of(b, row0 / B + b, column0, cols);
        }
        if (!out.column) return true;
        turn_bytes(codes, LD, out.column, out.column_stride, (n + Codes - 1) / Codes, cols, column.nontemporal);
        for (i64 k = 0; nv && k < cols; k += GROUP) put_narrow(k, column0 + k, row0 / B, (n + B - 1) / B);
        return true;
    }

    void store_rows(const u8* from, u8* to, i64 stride, i64 rows, i64 cols) {
        alignas(64) u8 packed[COLS];
        for (i64 r = 0; r < rows; r++) {
            const u8* c = from + r * LD;
            for (i64 at = 0; Codes > 1 && at < cols; at += GROUP) store_codes<E, Codes>(packed + at * unit / Codes, load<VB>(c + at), false);
            put_bytes(to + r * stride, Codes > 1 ? packed : c, cols / Codes * unit, row.nontemporal);
        }
    }
    // Two rows of 4-bit codes share bytes.
    void join(i64 rows, i64 cols, u8* to) {
        for (i64 r = 0; r < rows; r += 2, to += LD)
            for (i64 k = 0; k < cols; k += GROUP) {
                VB c = load<VB>(plain + r * LD + k);
                if (r + 1 < rows) c = c | load<VB>(plain + (r + 1) * LD + k) << 4;
                store(to + k, c);
            }
    }

    // ---- factors: narrow ones of a column lie side by side, those of float32 are stored once a block ----------------------------
    void put_factors_of(i64 b, i64 block, i64 column0, i64 cols) {
        if (!column.sink.base || (p.square && !nv)) return;
        for (i64 k = 0; k < cols; k += GROUP) {
            const VI* f = quantizer.stored + k / W;
            if (nv)
                store(narrow_factors[b] + k, pack<D::pairs>(f));
            else
                for (int j = 0; j < 4; j++)
                    for (int i = 0; i < W; i++) column.sink.put(column0 + k + position<D>(j, i), block, f[j][i]);
        }
    }
    void put_narrow(i64 k, i64 column0, i64 block, i64 n) {
        transpose<u8>(narrow_factors[0] + k, COLS, turned_factors[0], BLOCKS, BLOCKS, GROUP);
        const Sink& s = column.sink;
        for (i64 i = 0; i < GROUP; i++) {
            const u8* f = turned_factors[i];
            if (n == BLOCKS && !s.tiles) {
                memcpy(s.base + s.at(s, column0 + i, block), f, BLOCKS);
            } else if (n == BLOCKS && block % 4 == 0) {
                for (int b = 0; b < BLOCKS; b += 4) memcpy(s.base + s.at(s, column0 + i, block + b), f + b, 4);
            } else {
                for (i64 b = 0; b < n; b++) s.put(column0 + i, block + b, f[b]);
            }
        }
    }
    // Square blocks: factors of rows, and, of float32, of both.
    void put_square(i64 row0, i64 rows, i64 column0, i64 cols) {
        if (p.scale == SCALE_F32) {
            for (i64 k = 0; k < cols; k += B) {
                const i32 f = quantizer.stored[k / W][0];
                if (row.sink.base) row.sink.put(row0 / B, (column0 + k) / B, f);
                if (column.sink.base) column.sink.put((column0 + k) / B, row0 / B, f);
            }
            return;
        }
        if (!row.sink.base) return;
        u8 all_columns[COLS], t[COLS / B];
        for (i64 k = 0; k < cols; k += GROUP) store(all_columns + k, pack<D::pairs>(quantizer.stored + k / W));
        const i64 n = cols / B, block0 = column0 / B;
        for (i64 b = 0; b < n; b++) t[b] = all_columns[b * B];
        const Sink& s = row.sink;
        for (i64 r = row0; r < row0 + rows; r++) {
            if (!s.tiles)
                memcpy(s.base + s.at(s, r, block0), t, size_t(n));
            else
                for (i64 b = 0; b < n; b++) s.put(r, block0 + b, t[b]);
        }
    }
};

}  // namespace QT_NAMESPACE
