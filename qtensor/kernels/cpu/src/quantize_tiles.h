// Block formats: how a tensor is cut into tiles, so that its rows and columns are quantized from one read of
// memory.
#pragma once
#include "amax.h"
#include "memory.h"
#include "quantize_rotated_columns.h"
#include "quantize_squares.h"
#include "quantize_transposed.h"

namespace QT_NAMESPACE {

template <class D, class E, int B, int Codes>
struct BlockQuantizer {
    using T = typename D::T;
    static constexpr i64 TILE = 256;  // rows and columns of a tile that is transposed
    static constexpr int unit = Codes == 4 ? 3 : 1;
    static constexpr i64 MX_TILE = 512;  // columns, of which 32 rows stay in the first cache level
    const CQuantizer& p;
    const QuantizeCall& c;
    const T* x;
    const i64 begin, end;  // rows to quantize; c.rows are those of the tensor
    Direction row, column;

    BlockQuantizer(const CQuantizer& quantizer, const QuantizeCall& call, const ScaleLayout& rows,
                   const ScaleLayout& columns, bool stream)
        : p(quantizer),
          c(call),
          x((const T*)call.x),
          begin(call.begin),
          end(call.end ? call.end : call.rows) {
        const bool half = c.dtype == F16;  // widened to float32
        const float overflow = half ? 65504.0f : D::id == BF16 ? bits<float>(0x7f7f0000) : FLT_MAX;
        const bool rotate_rows = p.rotated == ROWWISE, rotate_columns = p.rotated == COLUMNWISE;
        const Rotation how{bool(p.signs), half};
        row = {&p, rows, rotate_rows, how, 0, c.seed, {}, nullptr, overflow, rotate_rows, stream};
        column = {&p, columns, rotate_columns, how, 1, c.seed, {}, nullptr, overflow, rotate_columns, stream};
    }

    void run() {
        if constexpr (B == NV) maxima();
        encode();
    }

    // All but the maxima behind the second level. Compiled once, for all callers.
    NOINLINE void encode() {
        const bool transposed = c.column.data && p.transposed;
        if (!p.square && !c.column.data) return rows_only();
        if (transposed || (p.square && c.row.data)) tiled(transposed);
        if (c.column.data && !p.transposed) untransposed();
    }

    // Bytes of a line of n codes. A rotated side keeps whole groups.
    i64 line_bytes(i64 n, bool whole) const {
        return whole ? (n + B - 1) / B * (B * unit / Codes) : (n + Codes - 1) / Codes * unit;
    }
    Lines<T> row_lines(i64 row0, i64 rows, i64 column0, i64 cols) const {
        const i64 stride = line_bytes(c.cols, row.whole_groups),
                  total = row.rotate ? (c.cols + B - 1) / B * B : c.cols;
        return {x + row0 * c.stride + column0,
                rows,
                cols,
                c.stride,
                c.row.data + row0 * stride + column0 / Codes * unit,
                stride,
                row0,
                column0 / B,
                total};
    }
    static i64 blocks_of(const Lines<T>& m) { return m.count * ((m.length + B - 1) / B); }

    void rows_only() {
        const Lines<T> m = row_lines(begin, end - begin, 0, c.cols);
        parallel(blocks_of(m), 4 * W, c.threads,
                 [&](i64 a, i64 b) { quantize_lines<D, E, B, Codes>(m, row, a, b); });
    }

    // MX: 32 rows, and the columns of a tile. Both directions ask for half of the next tile each.
    void untransposed() {
        const i64 stride = c.cols, bands = (end - begin + MX - 1) / MX,
                  across = (c.cols + MX_TILE - 1) / MX_TILE;
        parallel(bands * across, 1, c.threads, [&](i64 a, i64 b) {
            const std::unique_ptr<ColumnQuantizer<D, E, MX, Codes>> columns(
                new ColumnQuantizer<D, E, MX, Codes>(column));
            for (i64 t = a; t < b; t++) {
                const i64 r = begin + t / across * MX, k = t % across * MX_TILE;
                const i64 n = smaller(end - r, MX), width = smaller(c.cols - k, MX_TILE);
                // Only a whole tile follows a whole tile row for row.
                const i64 r1 = begin + (t + 1) / across * MX, k1 = (t + 1) % across * MX_TILE;
                const bool whole = t + 1 < b && r1 + MX <= end && k1 + width <= c.cols,
                           rows_too = c.row.data && !p.square;
                const T* next = whole ? x + r1 * c.stride + k1 : nullptr;
                if (rows_too) {
                    const Lines<T> m = row_lines(r, n, k, width);
                    quantize_lines<D, E, B, Codes>(m, row, 0, blocks_of(m), next);
                }
                columns->run({x + r * c.stride + k, n, width, c.stride,
                              c.column.data + r / Codes * unit * stride + k, stride, k, r / MX, next,
                              rows_too});
            }
        });
    }

    // f(rows of the transposed tile as lines) for every tile of 0 .. n.
    template <class F>
    void each_tile(const F& f) {
        const i64 down = (end - begin + TILE - 1) / TILE, across = (c.cols + TILE - 1) / TILE;
        parallel(down * across, 1, c.threads, [&](i64 a, i64 b) {
            const Array<T> transposed(TILE * TILE);
            for (i64 t = a; t < b; t++) {
                const i64 r = begin + t / across * TILE, k = t % across * TILE;
                one_tile(r, smaller(end - r, TILE), k, smaller(c.cols - k, TILE), transposed, f);
            }
        });
    }
    // n rows and `width` columns, at most TILE of each; `transposed` holds their transpose.
    template <class F>
    void one_tile(i64 r, i64 n, i64 k, i64 width, T* transposed, const F& f) {
        const i64 stride = line_bytes(c.rows, column.whole_groups),
                  total = column.rotate ? (c.rows + B - 1) / B * B : c.rows;
        transpose<T>(x + r * c.stride + k, c.stride, transposed, n, n, width);
        if (k + 2 * TILE <= c.cols)
            prefetch(x + r * c.stride + k + TILE, n, c.stride * i64(sizeof(T)), TILE * i64(sizeof(T)));
        f(Lines<T>{transposed, width, n, n, c.column.data + k * stride + r / Codes * unit, stride, k, r / B,
                   total});
    }

    // Rows first .. first + n of the tensor, `width` columns from column0.
    void rows_of(i64 first, i64 n, i64 column0, i64 width, const T* next) {
        const Lines<T> m = row_lines(first, n, column0, width);
        // Of blocks of 128, the columns ask for all that comes next: measured to be faster.
        LineQuantizer<D, E, B, Codes> lines(m, row, B > GROUP ? nullptr : next);
        if (B > GROUP && width % B == 0 && n % W == 0 && lines.run_down()) return;
        lines.run(0, blocks_of(m));
    }

    // Transposed codes, and square blocks. `transposed`: there are transposed codes.
    void tiled(bool transposed) {
        using Transposed = TransposedQuantizer<D, E, B, Codes>;
        const bool served = Transposed::serves(p);
        const auto size =
            served ? Transposed::size_of(transposed, end - begin, c.cols, c.threads) : Transposed::WIDE;
        const i64 rows = size.rows, cols = size.cols;
        const i64 down = (end - begin + rows - 1) / rows, across = (c.cols + cols - 1) / cols;
        Direction columns = column;
        if (!transposed) columns.scales.base = nullptr;
        const Outputs all{c.row.data, line_bytes(c.cols, false), transposed ? c.column.data : nullptr,
                          line_bytes(c.rows, column.whole_groups)};
        parallel(down * across, 1, c.threads, [&](i64 a, i64 b) {
            const std::unique_ptr<Transposed> codes(new Transposed(row, columns, size));
            RemainderQuantizer remainder{*this, columns, all};
            for (i64 t = a; t < b; t++) {
                const i64 r = begin + t / across * rows, k = t % across * cols;
                const i64 n = smaller(end - r, rows), width = smaller(c.cols - k, cols);
                const auto rows_too = [&](i64 first, i64 count, const T* next) {
                    if (c.row.data && !p.square) rows_of(r + first, count, k, width, next);
                };
                // Only a whole tile follows a whole tile row for row.
                const i64 r1 = begin + (t + 1) / across * rows, k1 = (t + 1) % across * cols;
                const bool whole = t + 1 < b && r1 + rows <= end && k1 + width <= c.cols;
                Outputs out = all;
                if (out.row) out.row += r * out.row_stride + k / Codes * unit;
                if (out.column) out.column += k * out.column_stride + r / Codes * unit;
                i64 done = served ? Transposed::whole(p, width) : 0;
                const T* next = whole ? x + r1 * c.stride + k1 : nullptr;
                if (!done)
                    rows_too(0, n, nullptr);
                else if (!codes->run({x + r * c.stride + k, n, done, c.stride, r, k, next}, out, rows_too))
                    done = 0;
                if (done < width) remainder.run(r, n, k + done, k + width);
            }
        });
    }

    // Quantizes what TransposedQuantizer has left.
    struct RemainderQuantizer {
        using Square = SquareQuantizer<D, E, B, Codes>;
        BlockQuantizer& q;
        const Direction& columns;
        const Outputs& all;
        std::unique_ptr<Square> square;
        std::unique_ptr<Array<T>> transposed;
        RemainderQuantizer(BlockQuantizer& quantizer, const Direction& direction, const Outputs& outputs)
            : q(quantizer), columns(direction), all(outputs) {}

        void quantize_transpose(i64 r, i64 n, i64 k, i64 width) {
#if QT_ISA == 512
            if constexpr (B == NV && Codes == 2) {
                if (Rotated::serves(q.p) && !given_up) return rotated(r, n, k, width);
            }
#endif
            if (!transposed) transposed.reset(new Array<T>(TILE * TILE));
            q.one_tile(r, n, k, width, *transposed, [&](const Lines<T>& m) {
                quantize_lines<D, E, B, Codes>(m, q.column, 0, blocks_of(m));
            });
        }
#if QT_ISA == 512
        using Rotated = RotatedColumns<D, E>;
        std::unique_ptr<Rotated> columns16;
        bool given_up = false;  // within a tile whose columns have failed
        void rotated(i64 r, i64 n, i64 k, i64 width) {
            if (!columns16) columns16.reset(new Rotated(q.column));
            const i64 stride = q.line_bytes(q.c.rows, true), known = width / W * W;
            columns16->run(q.x + r * q.c.stride + k, q.c.stride, n, width, r, k,
                           q.c.column.data + k * stride + r / Codes, stride);
            given_up = true;
            for (i64 c = 0; c < known; c += W)
                if (columns16->failed[c / W]) quantize_transpose(r, n, k + c, W);
            if (known < width) quantize_transpose(r, n, k + known, width - known);
            given_up = false;
        }
#endif

        // n rows from row r, columns first .. last.
        void run(i64 r, i64 n, i64 first, i64 last) {
            if (!q.p.square) {
                for (i64 at = r; at < r + n; at += TILE)
                    for (i64 k = first; k < last; k += TILE)
                        quantize_transpose(at, smaller(r + n - at, TILE), k, smaller(last - k, TILE));
                return;
            }
            if (!square) square.reset(new Square(q.row, columns));
            for (i64 b = r; b < r + n; b += B) {
                Outputs o = all;
                if (o.row) o.row += b * o.row_stride;
                square->run(q.x + b * q.c.stride, q.c.stride, smaller(r + n - b, B), b, first, last, q.c.cols,
                            o);
            }
        }
    };

    // ---- NVFP4: the maxima behind the second level
    // -----------------------------------------------------------------------
    void maxima() {
        if (p.square) {
            // One maximum serves both: that of either direction.
            Buffers both = c.row.amax ? c.row : c.column;
            find(both, row, false);
            column.global = row.global;
            if (c.row.amax && c.column.amax) *c.column.amax = c.column.given ? *c.column.given : *c.row.amax;
            return;
        }
        if (c.row.data) find(c.row, row, false);
        if (c.column.data) {
            if (c.row.data && !c.row.given && !c.column.given && !p.row_scaled && !p.rotated) {
                *c.column.amax = *c.row.amax;
                column.global = row.global;
            } else {
                find(c.column, column, true);
            }
        }
    }

    void find(const Buffers& side, Direction& d, bool columnwise) {
        i64 maxima = 1;
        if (p.row_scaled) maxima = columnwise ? c.cols : c.rows;
        if (side.given)
            memcpy(side.amax, side.given, sizeof(float) * size_t(maxima));
        else if (p.row_scaled && columnwise)
            amax_columns<D>(c, true, (i32*)side.amax);
        else if (p.row_scaled)
            amax_rows<D>(c, true, (i32*)side.amax);
        else
            *(i32*)side.amax = d.rotate ? rotated(columnwise) : amax_tensor<D>(c, true);
        if (p.row_scaled)
            d.line_amax = side.amax;
        else
            d.global = nvfp4_global(*side.amax, p.e4m3_max);
    }

    i32 rotated(bool columnwise) {
        if (!columnwise) {
            const Lines<T> m = row_lines(begin, end - begin, 0, c.cols);
            return parallel_max(blocks_of(m), W, c.threads,
                                [&](i64 a, i64 b) { return rotated_lines(m, a, b, 0); });
        }
#if QT_ISA == 512
        // Bands of 16 rows.
        return parallel_max(end - begin, NV, c.threads, [&](i64 a, i64 b) {
            return rotated_columns_max<D>(x + (begin + a) * c.stride, c.stride, b - a, c.cols,
                                          column.rotation, 0);
        });
#else
        i32 top = 0;
        each_tile([&](const Lines<T>& m) { raise(&top, rotated_lines(m, 0, blocks_of(m), 0)); });
        return top;
#endif
    }
    // At least `top`.
    i32 rotated_lines(const Lines<T>& m, i64 first, i64 end, i32 top) {
        StripLayout<D, B, Codes> strips(m);
        alignas(64) T gathered[W * B];
        alignas(64) float wide[W * B];
        for (i64 at = first; at < end; at += W) {
            const i64 line = at / strips.blocks, block = at % strips.blocks;
            const bool direct = strips.direct(line, block, strips.flat_in);
            if (!direct) strips.gather(line, block, gathered);
            const T* from = direct ? strips.source(line, block) : gathered;
            if (direct) look_ahead<int(sizeof(T)) * W * B>(from);
#if QT_ISA == 512
            if constexpr (B == NV) {
                if (stays_below<D>(from, top)) continue;
                VF s[NV];
                VI amax;
                if (rotated_lanes<D>(from, row.rotation, s, amax)) {
                    const i32 part = lane_max(amax);
                    top = top > part ? top : part;
                    continue;
                }
            }
#endif
            to_finite<D>(from, wide, true, row.rotation);
            const i32 part = amax_run<Float32>(wide, W * NV);
            top = top > part ? top : part;
        }
        return top;
    }
};

}  // namespace QT_NAMESPACE
