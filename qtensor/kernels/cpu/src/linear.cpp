// Products of bfloat16 x and a quantized weight by the CPU's bfloat16 dot products. A part of the weight is
// decoded to bfloat16 in the cache and packed as panels of pairs along the contraction, which all rows of x
// multiply. Sums are float32; factors, bias and one rounding follow.

#include "linear_tiles.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
#define BF16_DOT __attribute__((target("avx512bf16")))

constexpr i64 DEPTH = 4096;  // of the contraction, so that a panel stays in the second cache level
constexpr int HEIGHT = 6;    // rows of the result whose sums fit in the registers
constexpr i64 STRIP = 8;     // panels whose columns are decoded together, 16 blocks of 32
constexpr i64 ONE_THREAD_PREPARES = 1 << 16;       // elements of x: waking other threads takes longer
constexpr i64 TURNED_TOGETHER = 32;                // columns of x, a line of memory of bfloat16
constexpr i64 LEAST_BAND = 256, MOST_BAND = 1024;  // rows of a strip, in the second cache level

// sums (R, PANEL) += x (R, length) times the first V vectors of columns of a packed panel of pairs.
template <int R, int V>
BF16_DOT static void multiply(const u16* x, i64 ldx, const u32* panel, i64 length, float* sums, bool first) {
    __m512 acc[R][V];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < V; j++)
            acc[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * PANEL + j * 16);
    i64 k = 0;
    for (; k + 1 < length; k += 2, panel += PANEL)
        for (int r = 0; r < R; r++) {
            const __m512bh a = (__m512bh)_mm512_set1_epi32(load<i32>(x + r * ldx + k));
            for (int j = 0; j < V; j++)
                acc[r][j] = _mm512_dpbf16_ps(acc[r][j], a, (__m512bh)_mm512_loadu_si512(panel + j * 16));
        }
    for (int r = 0; r < R && k < length; r++) {
        const __m512bh a = (__m512bh)_mm512_set1_epi32(x[r * ldx + k]);
        for (int j = 0; j < V; j++)
            acc[r][j] = _mm512_dpbf16_ps(acc[r][j], a, (__m512bh)_mm512_loadu_si512(panel + j * 16));
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < V; j++) _mm512_storeu_ps(sums + r * PANEL + j * 16, acc[r][j]);
}
template <int V, int R = HEIGHT>
static void multiply_rows(i64 rows, const u16* x, i64 ldx, const u32* panel, i64 length, float* sums,
                          bool first) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_rows<V, R - 1>(rows, x, ldx, panel, length, sums, first);
    }
    multiply<R, V>(x, ldx, panel, length, sums, first);
}
// sums (rows, PANEL) += rows of x (`length` elements from k on) times `count` columns of a packed panel.
static void multiply_panel(const LinearCall& c, const RowRange& rows, i64 k, i64 length, const u32* panel,
                           i64 count, float* sums) {
    const auto run = count <= 16 ? multiply_rows<1> : count <= 32 ? multiply_rows<2> : multiply_rows<4>;
    for (i64 m = rows.first; m < rows.end; m += HEIGHT)
        run(smaller(rows.end - m, HEIGHT), (const u16*)c.x + m * c.stride + k, c.stride, panel, length,
            sums + (m - rows.first) * PANEL, k == 0);
}

static void finish_panel(const LinearCall& c, const WeightRows& weight, const RowRange& rows,
                         const float* sums, i64 column) {
    for (i64 j = 0; j < PANEL && column + j < c.n; j += W)
        finish(c, weight, rows, sums + j, PANEL, column + j);
}

// A weight (n, k): each panel is decoded from the rows of its columns, and transposed.
static void along(const LinearCall& c, const WeightRows& weight) {
    const i64 pairs = (c.k + 1) / 2, length = 2 * pairs;
    share(c, 1, 1, [&](i64 first, i64 end, const RowRange& m) {
        const Array<u16> rows(PANEL * length);
        const Array<u32> packed(PANEL * smaller(pairs, DEPTH / 2));
        const Array<float> sums((m.end - m.first) * PANEL);
        for (i64 p = first; p < end; p++) {
            const i64 n0 = p * PANEL, count = smaller(c.n - n0, PANEL);
            weight.decode(n0, count, 0, c.k, rows);
            for (i64 i = count; length > c.k && i-- > 0;) {
                memmove(rows + i * length, rows + i * c.k, sizeof(u16) * size_t(c.k));
                rows[i * length + c.k] = 0;
            }
            memset(rows + count * length, 0, sizeof(u16) * size_t((PANEL - count) * length));
            for (i64 k = 0; k < pairs; k += DEPTH / 2) {
                const i64 depth = smaller(pairs - k, DEPTH / 2);
                transpose<float>((const float*)(u16*)rows + k, pairs, (float*)(u32*)packed, PANEL, PANEL,
                                 depth);
                multiply_panel(c, m, 2 * k, smaller(c.k - 2 * k, 2 * depth), packed, count, sums);
            }
            finish_panel(c, weight, m, sums, n0);
        }
    });
}

// A weight (k, n): bands of the rows of a strip of panels are decoded, and packed a panel at a time.
static void across(const LinearCall& c, const WeightRows& weight) {
    // A band has about as many bytes as the sums, which are read and written once a band.
    const i64 height =
        smaller(c.m > LEAST_BAND / 2 ? smaller(2 * c.m, MOST_BAND) / 128 * 128 : LEAST_BAND, c.k);
    share(c, BLOCK_PANELS, 1, [&](i64 first, i64 end, const RowRange& m) {
        const i64 rows = m.end - m.first, most = smaller(STRIP, end - first);
        const Array<u16> band(height * most * PANEL);
        const Array<u32> packed(PANEL * ((height + 1) / 2));
        const Array<float> sums(most * rows * PANEL);
        for (i64 p = first; p < end; p += STRIP) {
            const i64 panels = smaller(end - p, STRIP), left = p * PANEL;
            const i64 width = smaller(c.n - left, panels * PANEL);
            for (i64 k = 0; k < c.k; k += height) {
                const i64 depth = smaller(c.k - k, height);
                weight.decode(k, depth, left, width, band);
                for (i64 i = 0; i < panels; i++) {
                    const i64 count = smaller(width - i * PANEL, PANEL);
                    pack_columns(band + i * PANEL, width, depth, depth, count, packed);
                    multiply_panel(c, m, k, depth, packed, count, sums + i * rows * PANEL);
                }
            }
            for (i64 i = 0; i < panels; i++)
                finish_panel(c, weight, m, sums + i * rows * PANEL, left + i * PANEL);
        }
    });
}

// A call whose x is in memory, by rows along the contraction.
class DecodedCall {
    const Array<u16> decoded, turned;

public:
    LinearCall call;
    bool done = true;
    explicit DecodedCall(const LinearCall& c)
        : decoded(c.quantized_x ? c.m * c.k : 0), turned(c.turned ? c.m * c.k : 0), call(c) {
        const int threads = c.m * c.k > ONE_THREAD_PREPARES ? c.threads : 1;
        if (c.quantized_x) {
            DequantizeCall values = call_of(*c.quantized_x);
            values.y = decoded, values.dtype = BF16, values.threads = threads;
            done = dequantize_as<Bfloat16>(*c.quantized_x->quantizer, values);
            call.x = decoded, call.stride = values.cols;
        }
        if (!c.turned) return;
        const auto* lines = (const u16*)call.x;
        parallel(c.m, TURNED_TOGETHER, threads, [&](i64 first, i64 end) {
            transpose_lines<u16>(lines + first, call.stride, turned + first * c.k, c.k, c.k, end - first,
                                 false);
        });
        call.x = turned, call.stride = c.k;
    }
};

static bool serves(const CQuantizer& p, const LinearCall& c) {
    if (p.rotated == (c.across == COLUMNWISE ? COLUMNWISE : ROWWISE)) return false;
    if (c.across == COLUMNWISE && p.transposed) return false;  // these codes lie along the contraction
    // Factors of rows of (k, n) do not follow the sums.
    return p.family != (c.across ? ROW : COLUMN) && !(c.across == ROWWISE && p.row_scaled);
}
#endif

bool linear([[maybe_unused]] const CQuantizer& p, [[maybe_unused]] const LinearCall& c) {
#if QT_ISA == 512
    if (!__builtin_cpu_supports("avx512bf16") || !serves(p, c)) return false;
    const DecodedCall x(c);
    if (x.done) (c.across ? across : along)(x.call, WeightRows(p, x.call));
    return x.done;
#else
    return false;
#endif
}

bool linear_by_tiles([[maybe_unused]] const CQuantizer& p, [[maybe_unused]] const LinearCall& c) {
#if QT_ISA == 512
    if (!has_tiles() || !serves(p, c)) return false;
    const DecodedCall x(c);
    const WeightRows weight(p, x.call);
    if (x.done) TileProduct(x.call, weight).run();
    return x.done;
#else
    return false;
#endif
}

}  // namespace QT_NAMESPACE
