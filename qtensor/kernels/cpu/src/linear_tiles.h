// Products of bfloat16 x and a quantized weight by the tiles of AMX: 16 rows times 16 columns, 32 elements of
// the contraction at a time, with float32 sums.
#pragma once
#include "linear.h"
#include "transpose.h"
#if QT_ISA == 512
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#endif

namespace QT_NAMESPACE {

#if QT_ISA == 512
#define AMX __attribute__((target("amx-tile,amx-bf16")))

constexpr i64 TILE = 16, TILE_DEPTH = 32;  // rows or columns, and elements of the contraction
constexpr i64 TILE_SUMS = TILE * TILE;
constexpr i64 GROUP_ROWS = 2 * TILE;  // rows, or columns, whose sums are in registers together
// A band of the stored matrix is decoded at a time: as many values as fit in the second cache level. The
// codes of long rows are read faster; they fit beside few groups of x, and few sums.
constexpr i64 BAND = i64(1) << 18, LONG_ROWS = 4096;
constexpr i64 MOST_ALONG = 4, SHORT_ALONG = 2048, MOST_ACROSS = 1, SHORT_ACROSS = 512;
constexpr i64 PART = 128;  // rows across the sums that are decoded before they are packed

// Whether the CPU has these tiles, and the system gives them to this process.
static inline bool has_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    static const bool known = [] {
        u32 a, b, c, d = 0, low, high;
        constexpr u32 NEEDED = 1 << 22 | 1 << 24;  // AMX-BF16, AMX-TILE
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & NEEDED) != NEEDED) return false;
        asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        constexpr u32 STATE = 3 << 17;
        constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;
        return (low & STATE) == STATE && syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
    }();
    return known;
#else
    return false;
#endif
}

// GCC does not know that instructions of tiles read and write memory.
INLINE void memory_barrier() { asm volatile("" ::: "memory"); }

// The shapes of all eight tiles of a thread, until the end of the scope.
struct TileScope {
    AMX TileScope() {
        const struct {
            u8 palette = 1, start = 0, reserved[14] = {};
            u16 bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;
        asm volatile("" ::"r"(&shapes) : "memory");
        _tile_loadconfig(&shapes);
    }
    AMX ~TileScope() { _tile_release(); }
};

// sums += a (16 R, 32 count) @ b (32 count, 16 V); b is packed: elements of two rows side by side. Strides
// count elements of a and pairs of b. The four tiles of sums follow each other, two in a row.
template <int R, int V>
AMX static void multiply_tiles(const u16* a, i64 lda, const u32* b, i64 ldb, i64 count, float* sums,
                               bool first) {
    constexpr i64 LINE = TILE * 4;
    const i64 from_a = lda * 2, from_b = ldb * 4;
    memory_barrier();
    if (first) {
        _tile_zero(0);
        if (V > 1) _tile_zero(1);
        if (R > 1) _tile_zero(2);
        if (R > 1 && V > 1) _tile_zero(3);
    } else {
        _tile_loadd(0, sums, LINE);
        if (V > 1) _tile_loadd(1, sums + TILE_SUMS, LINE);
        if (R > 1) _tile_loadd(2, sums + 2 * TILE_SUMS, LINE);
        if (R > 1 && V > 1) _tile_loadd(3, sums + 3 * TILE_SUMS, LINE);
    }
    for (i64 i = 0; i < count; i++, a += TILE_DEPTH, b += TILE_DEPTH / 2 * ldb) {
        _tile_loadd(6, b, from_b);
        _tile_loadd(4, a, from_a);
        _tile_dpbf16ps(0, 4, 6);
        if (R > 1) {
            _tile_loadd(5, a + TILE * lda, from_a);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (V > 1) {
            _tile_loadd(7, b + TILE, from_b);
            _tile_dpbf16ps(1, 4, 7);
            if (R > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, LINE);
    if (V > 1) _tile_stored(1, sums + TILE_SUMS, LINE);
    if (R > 1) _tile_stored(2, sums + 2 * TILE_SUMS, LINE);
    if (R > 1 && V > 1) _tile_stored(3, sums + 3 * TILE_SUMS, LINE);
    memory_barrier();
}
// The same of the tiles that `rows` and `columns` need.
static inline void multiply_tiles(i64 rows, i64 columns, const u16* a, i64 lda, const u32* b, i64 ldb,
                                  i64 count, float* sums, bool first) {
    const bool tall = rows > TILE, wide = columns > TILE;
    const auto run = tall   ? wide ? multiply_tiles<2, 2> : multiply_tiles<2, 1>
                     : wide ? multiply_tiles<1, 2>
                            : multiply_tiles<1, 1>;
    run(a, lda, b, ldb, count, sums, first);
}

static inline i64 round_up(i64 count, i64 unit) { return (count + unit - 1) / unit * unit; }

// Moves rows (count, length) to rows of `width` elements, the last one first: y may be x. Behind the length
// there are zeros.
static inline void pad_rows(const u16* x, i64 stride, i64 count, i64 length, i64 width, u16* y) {
    for (i64 r = count; r-- > 0;) {
        memmove(y + r * width, x + r * stride, sizeof(u16) * size_t(length));
        memset(y + r * width + length, 0, sizeof(u16) * size_t(width - length));
    }
}

// A product by tiles. Groups of rows of x are packed once, unless their memory holds tiles already. Then a
// band of the weight at a time is decoded, and multiplied with all groups. The left tiles are those of x, and
// decoded values are packed as pairs.
// Decoded rows along the contraction are tiles as they are: they stand on the left if they are more than the
// rows of x, which then are packed as pairs, and the sums are those of the transposed result.
struct TileProduct {
    const LinearCall& c;
    const WeightRows& weight;
    const bool x_left;
    const i64 groups, in_place;  // of x; those that are not packed come first
    const i64 depth, columns;    // of a band
    const Array<u16>
        packed;  // the groups of each band: (GROUP_ROWS, depth), or pairs (depth / 2, GROUP_ROWS)

    TileProduct(const LinearCall& call, const WeightRows& rows)
        : c(call),
          weight(rows),
          x_left(c.across || c.m > c.n),
          groups((c.m + GROUP_ROWS - 1) / GROUP_ROWS),
          in_place(x_left && holds_tiles(c) ? c.m / GROUP_ROWS : 0),
          depth(smaller(c.across ? band() / row() : row(), round_up(c.k, TILE_DEPTH))),
          columns(c.across ? row() : band() / row()),
          packed((groups - in_place) * GROUP_ROWS * round_up(c.k, TILE_DEPTH)) {
        parallel(groups - in_place, 1, c.threads, [&](i64 first, i64 end) {
            const Array<u16> lines(x_left ? 0 : GROUP_ROWS * depth);
            for (i64 g = in_place + first; g < in_place + end; g++)
                for (i64 k = 0; k < c.k; k += depth) pack(g, k, lines);
        });
    }
    // Whether tiles can be loaded from x: nothing is missing, and no row of a tile lies in two cache lines.
    static bool holds_tiles(const LinearCall& c) {
        return c.k % TILE_DEPTH == 0 && c.stride % TILE_DEPTH == 0 && uintptr_t(c.x) % (2 * TILE_DEPTH) == 0;
    }
    bool is_long() const { return groups <= (c.across ? MOST_ACROSS : MOST_ALONG); }
    i64 row() const { return is_long() ? LONG_ROWS : c.across ? SHORT_ACROSS : SHORT_ALONG; }
    i64 band() const { return c.across && !is_long() ? 2 * BAND : BAND; }

    // Elements of the contraction of the band from k on: those of the weight, and with zeros behind them.
    i64 length(i64 k) const { return smaller(c.k - k, depth); }
    i64 padded(i64 k) const { return round_up(length(k), TILE_DEPTH); }
    const u16* x_from(i64 g, i64 k) const { return (const u16*)c.x + g * GROUP_ROWS * c.stride + k; }
    u16* group(i64 g, i64 k) const {
        return packed + GROUP_ROWS * ((groups - in_place) * k + (g - in_place) * padded(k));
    }

    void pack(i64 g, i64 k, u16* lines) const {
        const i64 width = padded(k), rows = smaller(c.m - g * GROUP_ROWS, GROUP_ROWS);
        const u16* x = x_from(g, k);
        i64 stride = c.stride;
        if (x_left || rows < GROUP_ROWS || length(k) < width || stride % 2) {
            u16* to = x_left ? group(g, k) : lines;
            pad_rows(x, stride, rows, length(k), width, to);
            memset(to + rows * width, 0, sizeof(u16) * size_t((GROUP_ROWS - rows) * width));
            x = to, stride = width;
        }
        if (!x_left)
            transpose_lines<float>((const float*)x, stride / 2, (float*)group(g, k), GROUP_ROWS, GROUP_ROWS,
                                   width / 2, false);
    }

    void run() const {
        share(c, BLOCK_PANELS, GROUP_ROWS, [&](i64 first, i64 end, const RowRange& m) {
            const i64 begin = m.first / GROUP_ROWS, count = (m.end + GROUP_ROWS - 1) / GROUP_ROWS - begin;
            const i64 right = smaller(end * PANEL, c.n), wide = smaller(columns, (end - first) * PANEL);
            const Array<u16> decoded(c.across ? wide * smaller(depth, PART)
                                              : depth * (x_left ? PANEL : wide));
            const Array<u32> pairs(x_left ? wide * depth / 2 : 0);
            // Where there is one band, the sums of a group are used up at once.
            const i64 kept = c.k > depth ? GROUP_ROWS : 0;
            const Array<float> sums(count * wide * kept + 4 * TILE_SUMS);
            const TileScope scope;
            for (i64 left = first * PANEL; left < right; left += columns)
                for (i64 k = 0; k < c.k; k += depth) {
                    const i64 width = smaller(right - left, columns);
                    decode(left, width, k, decoded, pairs);
                    for (i64 i = 0; i < count; i++)
                        for (i64 j = 0; j < width; j += GROUP_ROWS) {
                            float* part = sums + (i * wide + j) * kept;
                            multiply(begin + i, k, j, width, decoded, pairs, part);
                            if (k + depth >= c.k) finish_group(begin + i, left + j, part);
                        }
                }
        });
    }

    // Decodes a band: rows along the contraction, and as pairs of panels where x is on the left.
    void decode(i64 left, i64 width, i64 k, u16* decoded, u32* pairs) const {
        const i64 count = length(k), high = padded(k);
        if (c.across) return decode_across(left, width, k, decoded, pairs);
        const i64 unit = x_left ? PANEL : width;
        for (i64 i = 0; i < width; i += unit) {
            const i64 rows = smaller(width - i, unit);
            weight.decode<Bfloat16>(left + i, rows, k, count, decoded);
            if (count < high) pad_rows(decoded, count, rows, count, high, decoded);
            if (x_left)
                transpose_lines<float>((const float*)decoded, high / 2, (float*)(pairs + i * high / 2), PANEL,
                                       PANEL, high / 2, false);
        }
    }
    void decode_across(i64 left, i64 width, i64 k, u16* decoded, u32* pairs) const {
        const i64 rows = length(k), high = padded(k);
        for (i64 r = 0; r < rows; r += PART) {
            const i64 count = smaller(rows - r, PART), filled = r + count < rows ? count : high - r;
            weight.decode<Bfloat16>(k + r, count, left, width, decoded);
            for (i64 i = 0; i < width; i += PANEL)
                pack_columns(decoded + i, width, count, filled, smaller(width - i, PANEL),
                             pairs + (i * high + r * PANEL) / 2);
        }
    }

    // sums += group g times the columns of a band from its column j on.
    void multiply(i64 g, i64 k, i64 j, i64 width, const u16* decoded, const u32* pairs, float* sums) const {
        const i64 high = padded(k), rows = c.m - g * GROUP_ROWS, count = high / TILE_DEPTH;
        const bool is_packed = g >= in_place;
        const u16* x = is_packed ? group(g, k) : x_from(g, k);
        if (x_left)
            multiply_tiles(rows, width - j, x, is_packed ? high : c.stride,
                           pairs + j / PANEL * PANEL * high / 2 + j % PANEL, PANEL, count, sums, k == 0);
        else
            multiply_tiles(width - j, rows, decoded + j * high, high, (const u32*)x, GROUP_ROWS, count, sums,
                           k == 0);
    }

    void finish_group(i64 g, i64 column, const float* sums) const {
        alignas(64) float turned[TILE_SUMS];
        for (i64 low = 0; low < 2; low++)
            for (i64 right = 0; right < 2; right++) {
                const i64 row = g * GROUP_ROWS + low * TILE, at = column + right * TILE;
                if (row >= c.m || at >= c.n) continue;
                const float* tile = sums + (x_left ? 2 * low + right : 2 * right + low) * TILE_SUMS;
                if (!x_left) {
                    transpose_lines<float>(tile, TILE, turned, TILE, TILE, TILE, false);
                    tile = turned;
                }
                finish(c, weight, RowRange{row, smaller(row + TILE, c.m)}, tile, TILE, at);
            }
    }
};
#endif

}  // namespace QT_NAMESPACE
