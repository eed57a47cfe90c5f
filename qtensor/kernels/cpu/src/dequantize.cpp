// Which kernel decodes: formats to template arguments; tiles of tensors whose data lie transposed.
#include "dequantize.h"

#include "calls.h"
#include "quantize_columns.h"
#include "scale_layout.h"

namespace QT_NAMESPACE {

constexpr i64 TILE = 256;

// f(y, ld, line0, lines, first, length): decode lines line0 .. of the transpose, their elements first .. ,
// into y. quick(line0, lines, first, length): do all of it, or return false.
template <class T, class Q, class F>
static void by_transposed_tiles(const DequantizeCall& c, bool stream, const Q& quick, const F& f) {
    constexpr i64 WIDE =
        64 / i64(sizeof(T));  // a line of memory of each row; the tile stays in the first cache level
    const i64 down = (c.count + TILE - 1) / TILE, across = (c.cols + WIDE - 1) / WIDE;
    parallel(down * across, 1, c.threads, [&](i64 a, i64 b) {
        alignas(64) T transposed[WIDE * TILE];
        for (i64 t = a; t < b; t++) {
            const i64 r = t / across * TILE, k = t % across * WIDE;
            const i64 n = c.count - r < TILE ? c.count - r : TILE,
                      width = c.cols - k < WIDE ? c.cols - k : WIDE;
            if (quick(k, width, r, n)) continue;
            f(transposed, n, k, width, r, n);
            transpose_lines<T>(transposed, n, (T*)c.y + r * c.cols + k, c.cols, width, n, stream);
        }
    });
}

// f(codes, row, first column, columns): decode a part of the rows that share bytes; the codes are those of a
// tile, transposed.
template <int Codes, class F>
static void by_transposed_codes(const DequantizeCall& c, i64 a, i64 b, const F& f) {
    const i64 across = (c.cols + TILE - 1) / TILE, stride = (c.rows + Codes - 1) / Codes;
    constexpr i64 LD = TILE + 64;  // rows do not meet in one set of the cache
    const auto tile = [&](i64 t) {
        return c.column.data + t % across * TILE * stride + (c.first + t / across * TILE) / Codes;
    };
    const Array<u8> codes(TILE * LD);
    for (i64 t = a; t < b; t++) {
        const i64 r = t / across * TILE, k = t % across * TILE;
        const i64 n = smaller(c.count - r, TILE), width = smaller(c.cols - k, TILE);
        transpose_bytes(tile(t), stride, codes, LD, width, (n + Codes - 1) / Codes, false);
        const u8* next = t + 1 < b ? tile(t + 1) : nullptr;
        for (i64 i = 0; i < n; i += Codes) {
            if (next) prefetch(next + i * stride, Codes, stride, TILE / Codes);
            f(codes + i / Codes * LD, r + i, k, width);
        }
    }
}
static i64 tiles_of(const DequantizeCall& c) {
    return (c.count + TILE - 1) / TILE * ((c.cols + TILE - 1) / TILE);
}

// Rows of FP8 with factors of their own, whose codes lie transposed: their tables serve all tiles of a band.
template <class D, class E>
static void transposed_rows(const DequantizeCall& c, bool stream) {
    using T = typename D::T;
    using Decoder = OneDecoder<D, E>;
    parallel(tiles_of(c), 1, c.threads, [&](i64 a, i64 b) {
        const Array<Decoder> rows(TILE);
        i64 known = -1;  // the band
        by_transposed_codes<1>(c, a, b, [&](const u8* codes, i64 r, i64 k, i64 n) {
            if (r / TILE != known) {
                known = r / TILE;
                for (i64 i = 0; i < TILE && r + i < c.count; i++)
                    new (rows + i) Decoder(c.scale_inv[c.first + r + i]);
            }
            rows[r % TILE].run(codes, n, (T*)c.y + r * c.cols + k, stream);
        });
    });
}

template <class D, class E>
static void float8(const CQuantizer& p, const DequantizeCall& c, bool stream) {
    using T = typename D::T;
    T* y = (T*)c.y;
    if (p.family == TENSOR) {
        if (c.row.data && c.width == c.cols) {
            const u8* codes = c.row.data + c.first * c.cols;
            parallel(c.count * c.cols, 4096, c.threads,
                     [&](i64 a, i64 b) { decode_one<D, E>(codes + a, b - a, *c.scale_inv, y + a, stream); });
            return;
        }
        const OneDecoder<D, E> one(*c.scale_inv);
        if (c.row.data)
            return parallel(c.count, 1, c.threads, [&](i64 a, i64 b) {
                for (i64 r = a; r < b; r++)
                    one.run(c.row.data + (c.first + r) * c.cols + c.left, c.width, y + r * c.width, stream);
            });
        parallel(tiles_of(c), 1, c.threads, [&](i64 a, i64 b) {
            by_transposed_codes<1>(c, a, b, [&](const u8* codes, i64 r, i64 k, i64 n) {
                one.run(codes, n, y + r * c.cols + k, stream);
            });
        });
        return;
    }
    if (p.family == ROW && !c.row.data) return transposed_rows<D, E>(c, stream);
    ColumnFactors<D, E> factors(p.family == COLUMN ? c.width : 1);
    if (p.family == COLUMN) factors.fill(c.width, [&](i64 k) { return c.scale_inv[c.left + k]; });
    const auto decode = [&](const u8* codes, i64 r, i64 k, i64 n) {
        if (p.family == ROW)
            decode_one<D, E>(codes, n, c.scale_inv[c.first + r], y + r * c.width + k, stream);
        else
            decode_run<D, E>(codes, n, factors.lanes + k / W, 1, y + r * c.width + k, stream);
    };
    if (!c.row.data)
        parallel(tiles_of(c), 1, c.threads, [&](i64 a, i64 b) { by_transposed_codes<1>(c, a, b, decode); });
    else
        parallel(c.count, 1, c.threads, [&](i64 a, i64 b) {
            for (i64 r = a; r < b; r++) decode(c.row.data + (c.first + r) * c.cols + c.left, r, 0, c.width);
        });
}

// Row k of the 4 rows whose 6-bit codes share bytes; each sum of shifts is one loop, which compilers
// vectorise.
static void unpack_row(const u8* line, i64 stride, i64 n, int k, u8* codes) {
    const u8 *second = line + stride, *third = second + stride;
    if (k == 0) {
        for (i64 i = 0; i < n; i++) codes[i] = line[i] & 63;
    } else if (k == 1) {
        for (i64 i = 0; i < n; i++) codes[i] = u8((line[i] >> 6 | second[i] << 2) & 63);
    } else if (k == 2) {
        for (i64 i = 0; i < n; i++) codes[i] = u8((second[i] >> 4 | third[i] << 4) & 63);
    } else {
        for (i64 i = 0; i < n; i++) codes[i] = third[i] >> 2;
    }
}

// MX columnwise: rows share the factors of their band.
template <class D, class E, int Codes>
static void mx_columns(const CQuantizer& p, const DequantizeCall& c, bool stream) {
    using T = typename D::T;
    const ScaleLayout s = scale_layout_of(p, c.column, c.cols, c.rows, true);
    const i64 bands = (c.count + MX - 1) / MX;
    parallel(bands, 1, c.threads, [&](i64 a, i64 b) {
        ColumnFactors<D, E> factors(c.width);
        const Array<u8> codes(c.width);
        for (i64 band = a; band < b; band++) {
            const i64 row0 = c.first + band * MX, n = c.count - band * MX < MX ? c.count - band * MX : MX;
            if (!s.tiles && s.line_stride == 1)
                factors.template fill_codes<true>(c.width, s.base + s.at(c.left, row0 / MX));
            else
                factors.fill(c.width, [&](i64 k) {
                    return bits<float>(e8m0_decode_bits(s.base[s.at(c.left + k, row0 / MX)]));
                });
            for (i64 r = row0; r < row0 + n; r++) {
                const u8* line = c.column.data + r / Codes * unit_of(Codes) * c.cols + c.left;
                const int k = int(r % Codes);
                if (Codes == 4) {
                    unpack_row(line, c.cols, c.width, k, codes);
                    line = codes;
                }
                factors.template run<Codes == 2 ? 2 : 1>(line, c.width, (T*)c.y + (r - c.first) * c.width,
                                                         stream, k);
            }
        }
    });
}

// FP8 in blocks of 128 rows whose codes lie transposed.
template <class D, class E>
static void transposed_blocks(const DequantizeCall& c, const ScaleLayout& s, bool stream) {
    using T = typename D::T;
    parallel(tiles_of(c), 1, c.threads, [&](i64 a, i64 b) {
        ColumnFactors<D, E> factors(TILE);
        i64 known_block = -1, known_column = -1;
        by_transposed_codes<1>(c, a, b, [&](const u8* codes, i64 r, i64 k, i64 n) {
            const i64 block = (c.first + r) / 128;
            if (block != known_block || k != known_column)
                s.line_stride == 1 && !s.tiles && !s.shift
                    ? factors.fill_floats(n, (const float*)s.base + s.at(k, block))
                    : factors.fill(n, [&](i64 i) { return ((const float*)s.base)[s.at(k + i, block)]; });
            known_block = block;
            known_column = k;
            factors.run(codes, n, (T*)c.y + r * c.cols + k, stream);
        });
    });
}

// NVFP4 whose codes lie transposed, but for rotated ones. Its two factors are multiplied one after the other.
template <class D, class E>
struct TransposedNvfp4 {
    using T = typename D::T;
    static constexpr i64 BLOCKS = TILE / NV;
    const CQuantizer& p;
    const DequantizeCall& c;
    const ScaleLayout& s;
    const bool stream;
    const ColumnFactors<D, E>& global;
    ColumnFactors<D, E> factors{TILE};
    alignas(64) u8 lines[TILE * BLOCKS], transposed[BLOCKS * TILE];
#if QT_ISA == 512
    NvColumns words;
    const NvTable one{p.row_scaled ? 0.0f : global.lanes[0][0]};
#endif

    TransposedNvfp4(const CQuantizer& quantizer, const DequantizeCall& call, const ScaleLayout& scales,
                    bool nontemporal, const ColumnFactors<D, E>& second)
        : p(quantizer), c(call), s(scales), stream(nontemporal), global(second) {}

    // Factors of a tile: n columns from column k, rows from row r.
    void read(i64 r, i64 k, i64 n) {
        const i64 block = (c.first + r) / NV, left = (c.rows + NV - 1) / NV - block,
                  count = left < BLOCKS ? left : BLOCKS;
        for (i64 i = 0; i < n; i++) {
            u8* line = lines + i * BLOCKS;
            if (!s.tiles)
                memcpy(line, s.base + s.at(k + i, block), size_t(count));
            else if (block % 4 == 0)  // tiles are whole
                for (i64 j = 0; j < count; j += 4) memcpy(line + j, s.base + s.at(k + i, block + j), 4);
            else
                for (i64 j = 0; j < count; j++) line[j] = s.base[s.at(k + i, block + j)];
        }
        transpose<u8>(lines, BLOCKS, transposed, TILE, n, BLOCKS);
    }
    // Rows r and r + 1.
    __attribute__((always_inline)) void run(const u8* codes, i64 r, i64 k, i64 n) {
        if (r % TILE == 0) read(r, k, n);
        const VF* second = global.lanes + (p.row_scaled ? k / W : 0);
        const u8* stored = transposed + r % TILE / NV * TILE;
        T* y = (T*)c.y + r * c.cols + k;
        const bool two = r + 1 < c.count;
        // What read() will ask for in the next tile.
        for (i64 i = k + TILE + r % TILE; i < k + TILE + r % TILE + 2 && i < c.cols; i++)
            __builtin_prefetch(s.base + s.at(i, (c.first + r / TILE * TILE) / NV), 0, 2);
#if QT_ISA == 512
        if constexpr (D::id == BF16) {
            if (r % NV == 0) {
                if (!p.row_scaled) words.fill(n, stored, one);
                if (p.row_scaled || !words.fit) factors.template fill_codes<false>(n, stored);
                if (p.row_scaled) words.fill(n, factors.lanes, second);
            }
            const bool whole = ((uintptr_t(y) | uintptr_t(c.cols * i64(sizeof(T)))) & (GROUP - 1)) == 0;
            if (words.fit)
                return nv_two_rows(words, codes, n, y, two ? y + c.cols : nullptr, stream && whole);
        } else
#endif
            if (r % NV == 0)
            factors.template fill_codes<false>(n, stored);
        factors.template run<2>(codes, n, y, stream, 0, second);
        if (two) factors.template run<2>(codes, n, y + c.cols, stream, 1, second);
    }
};
template <class D, class E>
static void transposed_nvfp4(const CQuantizer& p, const DequantizeCall& c, const ScaleLayout& s,
                             bool stream) {
    const float* amax = c.column.amax;
    ColumnFactors<D, E> global(p.row_scaled ? c.cols : TILE);
    global.fill(p.row_scaled ? c.cols : TILE,
                [&](i64 k) { return amax ? amax[p.row_scaled ? k : 0] / p.global_divisor : 1.0f; });
    parallel(tiles_of(c), 1, c.threads, [&](i64 a, i64 b) {
        TransposedNvfp4<D, E> tiles(p, c, s, stream, global);
        by_transposed_codes<2>(c, a, b,
                               [&](const u8* codes, i64 r, i64 k, i64 n) { tiles.run(codes, r, k, n); });
    });
}

// A tile of rotated NVFP4 whose codes lie transposed; false where that needs more than quick ways.
template <class D>
static bool rotated_tile([[maybe_unused]] const CQuantizer& p, [[maybe_unused]] const DequantizeCall& c,
                         [[maybe_unused]] const ScaleLayout& s, [[maybe_unused]] i64 k,
                         [[maybe_unused]] i64 width, [[maybe_unused]] i64 r, [[maybe_unused]] i64 n,
                         [[maybe_unused]] bool stream) {
#if QT_ISA == 512
    using T = typename D::T;
    constexpr i64 WIDE = 64 / i64(sizeof(T)), BLOCKS = TILE / NV, ROWS = 128;
    if (width != WIDE || n % ROWS || c.first % NV) return false;
    alignas(64) u8 lines[WIDE * BLOCKS], transposed[BLOCKS * WIDE];
    const i64 block = (c.first + r) / NV, stride = (c.rows + NV - 1) / NV * (NV / 2);
    for (i64 i = 0; i < WIDE; i++) {
        u8* line = lines + i * BLOCKS;
        if (!s.tiles)
            memcpy(line, s.base + s.at(k + i, block), size_t(n / NV));
        else
            for (i64 b = 0; b < n / NV; b++) line[b] = s.base[s.at(k + i, block + b)];
    }
    transpose<u8>(lines, BLOCKS, transposed, WIDE, WIDE, BLOCKS);
    T* y = (T*)c.y + r * c.cols + k;
    stream = stream && ((uintptr_t(y) | uintptr_t(c.cols * i64(sizeof(T)))) & 63) == 0;
    const VF global = all(c.column.amax ? *c.column.amax / p.global_divisor : 1.0f);
    for (i64 i = 0; i < n; i += ROWS) {
        const u8* codes = c.column.data + k * stride + (c.first + r + i) / 2;
        if (k + 2 * WIDE <= c.cols) prefetch(codes + WIDE * stride, WIDE, stride, 64);
        if (!rotated_rows_back<D>(codes, stride, transposed + i / NV * WIDE, global, p.signs, y + i * c.cols,
                                  c.cols, stream))
            return false;
    }
    return true;
#else
    return false;
#endif
}

template <class D, class E, int B, int Codes>
static void blocks(const CQuantizer& p, const DequantizeCall& c, bool stream) {
    using T = typename D::T;
    using Decoder = LineDecoder<D, E, B, Codes>;
    auto line_bytes = [&](i64 n, bool whole) {
        return whole ? (n + B - 1) / B * Decoder::bytes : (n + Codes - 1) / Codes * unit_of(Codes);
    };
    if (c.row.data) {
        const bool rotated = p.rotated == ROWWISE;
        const ScaleLayout s = stored_scale_layout_of(p, c.row, c.rows, c.cols, false);
        const i64 stride = line_bytes(c.cols, rotated);
        const u8* codes = c.row.data + c.first * stride + c.left / B * Decoder::bytes;
        // Elements left .. left + length of all lines, counted from the first of a block on.
        const auto decode = [&](i64 left, i64 length) {
            const DecodeLines<T> m{codes + left / B * Decoder::bytes,
                                   c.count,
                                   length,
                                   stride,
                                   (T*)c.y + left,
                                   c.width,
                                   c.first,
                                   (c.left + left) / B};
            parallel(m.count * ((m.length + B - 1) / B), 4 * W, c.threads,
                     [&](i64 a, i64 b) { Decoder(m, p, s, c.row.amax, rotated, stream).run(a, b); });
        };
        const i64 rest = rotated || (c.width % B == 0 && c.width == c.cols) ? 0 : c.width % Decoder::UNIT;
        if (c.width > rest) decode(0, c.width - rest);
        if (rest) decode(c.width - rest, rest);
    } else if (p.transposed) {
        const bool rotated = p.rotated == COLUMNWISE;
        const ScaleLayout s = stored_scale_layout_of(p, c.column, c.cols, c.rows, true);
        if constexpr (B == 128) return transposed_blocks<D, E>(c, s, stream);
        if constexpr (B == NV) {
            if (!rotated) return transposed_nvfp4<D, E>(p, c, s, stream);
        }
        const i64 stride = line_bytes(c.rows, rotated);
        const auto quick = [&](i64 k, i64 width, i64 r, i64 n) {
            return B == NV && Codes == 2 && rotated_tile<D>(p, c, s, k, width, r, n, stream);
        };
        by_transposed_tiles<T>(c, stream, quick, [&](T* out, i64 ld, i64 line, i64 lines, i64 first, i64 n) {
            const i64 at = c.first + first;
            const DecodeLines<T> m{c.column.data + line * stride + at / Codes * unit_of(Codes),
                                   lines,
                                   n,
                                   stride,
                                   out,
                                   ld,
                                   line,
                                   at / B};
            Decoder(m, p, s, c.column.amax, rotated, false).run(0, lines * ((n + B - 1) / B));
        });
    } else {
        mx_columns<D, E, Codes>(p, c, stream);
    }
}

template <class D>
bool dequantize_as(const CQuantizer& p, const DequantizeCall& c) {
    const bool stream = c.count * c.width > STREAMED;
#define QT_CALL(E, B, CODES) blocks<D, E, B, CODES>(p, c, stream)
#define QT_FLOAT8(E) float8<D, E>(p, c, stream)
#include "formats.inc"
    fence();
    return true;
}

template bool dequantize_as<QT_DTYPE>(const CQuantizer&, const DequantizeCall&);

}  // namespace QT_NAMESPACE
