// Products of bfloat16 x and a quantized weight by dot products of bfloat16 pairs, or by multiply-adds of
// float32 in the same order. A part of the weight is decoded in the cache, and all rows of x multiply its
// panels of columns. Sums are float32; factors, bias and one rounding follow.

#include "linear_tiles.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
#define BF16_DOT __attribute__((target("avx512bf16")))

constexpr int HEIGHT = 6;                     // rows of the result whose sums fit in the registers
constexpr i64 STRIP = 8;                      // panels whose columns are decoded together, 16 blocks of 32
constexpr i64 ONE_THREAD_PREPARES = 1 << 16;  // elements of x: waking other threads takes longer
constexpr i64 TURNED_TOGETHER = 32;           // columns of x, a line of memory of bfloat16
constexpr i64 BAND_ROWS = 256;                // rows of a strip that are decoded together
constexpr i64 LEAST_PAIRED = 3;               // rows of x for which packing a band as pairs pays
constexpr i64 LEAST_WIDENED = 129;            // rows of x for which decoding a band to float32 pays

// The sums of R rows and 16 V columns of the result. GCC keeps them in registers.
template <int R, int V>
struct Sums {
    __m512 at[R][V];
    ALWAYS_INLINE Sums(const float* sums, bool first) {
        for (int r = 0; r < R; r++)
            for (int j = 0; j < V; j++)
                at[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * PANEL + j * 16);
    }
    ALWAYS_INLINE void store(float* sums) const {
        for (int r = 0; r < R; r++)
            for (int j = 0; j < V; j++) _mm512_storeu_ps(sums + r * PANEL + j * 16, at[r][j]);
    }
    ALWAYS_INLINE void reorder(__m512i low, __m512i high) {
        for (int r = 0; r < R; r++)
            for (int j = 0; j + 1 < V; j += 2) {
                const __m512 a = at[r][j], b = at[r][j + 1];
                at[r][j] = _mm512_permutex2var_ps(a, low, b);
                at[r][j + 1] = _mm512_permutex2var_ps(a, high, b);
            }
    }
    ALWAYS_INLINE void split_columns() {  // even columns before odd ones
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        reorder(even, _mm512_add_epi32(even, _mm512_set1_epi32(1)));
    }
    ALWAYS_INLINE void join_columns() {
        const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        reorder(low, _mm512_add_epi32(low, _mm512_set1_epi32(8)));
    }
};

// Operands as bfloat16, of which two along the contraction are packed as a pair.
struct Pairs {
    using Type = Bfloat16;
    using Packed = u32;
    static constexpr i64 PACKED = 2;
    static constexpr i64 DEPTH = 2048;  // pairs of a panel, so that it stays in the second cache level
    i64 stride;                         // of x
    // Rows of a band: about as many bytes as the sums, which are read and written once a band.
    static i64 band(i64 m) {
        return m > BAND_ROWS / 2 ? smaller(2 * m, 4 * BAND_ROWS) / 128 * 128 : BAND_ROWS;
    }
    explicit Pairs(const LinearCall& c) : stride(c.stride) {}

    const u16* rows(const LinearCall& c, i64 m, i64, i64 k, i64) const {
        return (const u16*)c.x + m * c.stride + k;
    }
    const u32* panel(const u16* rows, i64 ld, i64 length, i64 count, u32* packed) const {
        pack_columns(rows, ld, length, length, count, packed);
        return packed;
    }
    // sums (R, PANEL) += x (R, length) times the first V vectors of columns of a panel.
    template <int R, int V>
    BF16_DOT void multiply(const u16* x, const u32* panel, i64 length, float* to, bool first) const {
        Sums<R, V> sums(to, first);
        i64 k = 0;
        for (; k + 1 < length; k += 2, panel += PANEL)
            for (int r = 0; r < R; r++) {
                const __m512bh a = (__m512bh)_mm512_set1_epi32(load<i32>(x + r * stride + k));
                for (int j = 0; j < V; j++) add(sums.at[r][j], a, panel + j * 16);
            }
        for (int r = 0; r < R && k < length; r++) {
            const __m512bh a = (__m512bh)_mm512_set1_epi32(x[r * stride + k]);
            for (int j = 0; j < V; j++) add(sums.at[r][j], a, panel + j * 16);
        }
        sums.store(to);
    }
    BF16_DOT ALWAYS_INLINE static void add(__m512& sum, __m512bh a, const u32* pairs) {
        sum = _mm512_dpbf16_ps(sum, a, (__m512bh)_mm512_loadu_si512(pairs));
    }
};

// x as float32, and panels of D. Float32 holds any factors.
template <class D>
struct Floats {
    using Type = D;
    using Packed = typename D::T;
    static constexpr i64 PACKED = 1;
    static constexpr i64 DEPTH = 128;  // rows of a panel, so that it stays in the first cache level
    static constexpr i64 stride = BAND_ROWS + 16;  // rows of x do not meet in one set of the cache
    static i64 band(i64) { return BAND_ROWS; }
    const Array<float> x;
    i64 ld = PANEL;  // of a panel
    explicit Floats(const LinearCall&) : x(HEIGHT * stride) {}

    const float* rows(const LinearCall& c, i64 m, i64 count, i64 k, i64 length) const {
        for (i64 r = 0; r < count; r++) {
            const u16* from = (const u16*)c.x + (m + r) * c.stride + k;
            for (i64 i = 0; i < length; i += W) {
                const __mmask16 mask = length - i < W ? __mmask16((1 << (length - i)) - 1) : __mmask16(-1);
                const __m512i v = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + i));
                _mm512_storeu_si512(x + r * stride + i, _mm512_slli_epi32(v, 16));
            }
        }
        return x;
    }
    // A panel is read where it lies, with what is behind the last column.
    const Packed* panel(const Packed* rows, i64 width, i64, i64, Packed*) {
        ld = width;
        return rows;
    }
    // A row of a panel; of bfloat16 with the columns of two vectors split.
    template <int V>
    ALWAYS_INLINE static void row(const Packed* panel, __m512 b[V]) {
        if constexpr (D::id == F32) {
            for (int j = 0; j < V; j++) b[j] = _mm512_loadu_ps(panel + j * 16);
        } else if constexpr (V == 1) {
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)panel));
            b[0] = (__m512)_mm512_slli_epi32(wide, 16);
        } else {
            for (int j = 0; j < V; j += 2) {
                const __m512i pairs = _mm512_loadu_si512(panel + j * 16);
                b[j] = (__m512)_mm512_slli_epi32(pairs, 16);
                b[j + 1] = (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(i32(0xffff0000)));
            }
        }
    }
    template <int R, int V>
    void multiply(const float* x, const Packed* panel, i64 length, float* to, bool first) const {
        Sums<R, V> sums(to, first);
        if (D::id == BF16) sums.split_columns();
        const auto step = [&](i64 k) __attribute__((always_inline)) {
            __m512 b[V];
            row<V>(panel + k * ld, b);
            for (int r = 0; r < R; r++) {
                const __m512 a = _mm512_set1_ps(x[r * stride + k]);
                for (int j = 0; j < V; j++) sums.at[r][j] = _mm512_fmadd_ps(a, b[j], sums.at[r][j]);
            }
        };
        i64 k = 0;
        for (; k + 1 < length; k += 2) step(k + 1), step(k);  // the order of dot products
        if (k < length) step(k);
        if (D::id == BF16) sums.join_columns();
        sums.store(to);
    }
};

template <int V, int R = HEIGHT, class Kind, class X>
static void multiply_rows(const Kind& kind, i64 rows, const X* x, const typename Kind::Packed* panel,
                          i64 length, float* sums, bool first) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_rows<V, R - 1>(kind, rows, x, panel, length, sums, first);
    }
    kind.template multiply<R, V>(x, panel, length, sums, first);
}
// sums (rows, PANEL) += rows of x (`length` elements from k on) times `count` columns of a panel.
template <class Kind>
static void multiply_panel(const Kind& kind, const LinearCall& c, const RowRange& rows, i64 k, i64 length,
                           const typename Kind::Packed* panel, i64 count, float* sums) {
    for (i64 m = rows.first; m < rows.end; m += HEIGHT, sums += HEIGHT * PANEL) {
        const i64 height = smaller(rows.end - m, HEIGHT);
        const auto* x = kind.rows(c, m, height, k, length);
        if (count <= 16)
            multiply_rows<1>(kind, height, x, panel, length, sums, k == 0);
        else if (count <= 32)
            multiply_rows<2>(kind, height, x, panel, length, sums, k == 0);
        else
            multiply_rows<4>(kind, height, x, panel, length, sums, k == 0);
    }
}

static void finish_panel(const LinearCall& c, const WeightRows& weight, const RowRange& rows,
                         const float* sums, i64 column) {
    for (i64 j = 0; j < PANEL && column + j < c.n; j += W)
        finish(c, weight, rows, sums + j, PANEL, column + j);
}

// A weight (n, k): each panel is decoded from the rows of its columns, and transposed.
template <class Kind>
static void along(const LinearCall& c, const WeightRows& weight) {
    using T = typename Kind::Type::T;
    using Packed = typename Kind::Packed;
    constexpr i64 PACKED = Kind::PACKED, DEPTH = Kind::DEPTH;
    const i64 width = (c.k + PACKED - 1) / PACKED, length = PACKED * width;
    share(c, 1, 1, [&](i64 first, i64 end, const RowRange& m) {
        const Array<T> rows(PANEL * length);
        const Array<Packed> packed(PANEL * smaller(width, DEPTH));
        const Array<float> sums((m.end - m.first) * PANEL);
        const Kind kind(c);
        for (i64 p = first; p < end; p++) {
            const i64 n0 = p * PANEL, count = smaller(c.n - n0, PANEL);
            weight.decode<typename Kind::Type>(n0, count, 0, c.k, rows);
            for (i64 i = count; length > c.k && i-- > 0;) {
                memmove(rows + i * length, rows + i * c.k, sizeof(T) * size_t(c.k));
                rows[i * length + c.k] = 0;
            }
            memset(rows + count * length, 0, sizeof(T) * size_t((PANEL - count) * length));
            for (i64 k = 0; k < width; k += DEPTH) {
                const i64 depth = smaller(width - k, DEPTH);
                transpose<float>((const float*)(T*)rows + k, width, (float*)(Packed*)packed, PANEL, PANEL,
                                 depth);
                multiply_panel(kind, c, m, PACKED * k, smaller(c.k - PACKED * k, PACKED * depth),
                               (Packed*)packed, count, sums);
            }
            finish_panel(c, weight, m, sums, n0);
        }
    });
}

// A weight (k, n): bands of the rows of a strip of panels are decoded, and multiplied a panel at a time.
template <class Kind>
static void across(const LinearCall& c, const WeightRows& weight) {
    using T = typename Kind::Type::T;
    using Packed = typename Kind::Packed;
    const i64 height = smaller(Kind::band(c.m), c.k);
    share(c, BLOCK_PANELS, 1, [&](i64 first, i64 end, const RowRange& m) {
        const i64 rows = m.end - m.first, most = smaller(STRIP, end - first);
        const Array<T> band(height * most * PANEL + PANEL);
        const Array<Packed> packed(Kind::PACKED > 1 ? PANEL * ((height + 1) / Kind::PACKED) : 0);
        const Array<float> sums(most * rows * PANEL);
        Kind kind(c);
        for (i64 p = first; p < end; p += STRIP) {
            const i64 panels = smaller(end - p, STRIP), left = p * PANEL;
            const i64 width = smaller(c.n - left, panels * PANEL);
            for (i64 k = 0; k < c.k; k += height) {
                const i64 depth = smaller(c.k - k, height);
                weight.decode<typename Kind::Type>(k, depth, left, width, band);
                for (i64 i = 0; i < panels; i++) {
                    const i64 count = smaller(width - i * PANEL, PANEL);
                    const Packed* panel = kind.panel(band + i * PANEL, width, depth, count, (Packed*)packed);
                    multiply_panel(kind, c, m, k, depth, panel, count, sums + i * rows * PANEL);
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
    return c.across != COLUMNWISE || !p.transposed;  // these codes lie along the contraction
}

// Whether bfloat16 holds the values of the weight without the factors that follow the sums.
static bool bfloat16_holds(const CQuantizer& p, const LinearCall& c) {
    return WeightRows::factors_follow(p, c.across) && (p.family != BLOCK || p.scale != SCALE_F32 || p.pow2);
}
#endif

bool linear([[maybe_unused]] const CQuantizer& p, [[maybe_unused]] const LinearCall& c) {
#if QT_ISA == 512
    if (!serves(p, c)) return false;
    const DecodedCall x(c);
    if (!x.done) return false;
    const WeightRows weight(p, x.call);
    const bool pairs = uses_pairs(c.pairs), exact = bfloat16_holds(p, c);
    if (exact && c.across && c.m < (pairs ? LEAST_PAIRED : LEAST_WIDENED))
        across<Floats<Bfloat16>>(x.call, weight);
    else if (exact && pairs)
        (c.across ? across<Pairs> : along<Pairs>)(x.call, weight);
    else
        (c.across ? across<Floats<Float32>> : along<Floats<Float32>>)(x.call, weight);
    return true;
#else
    return false;
#endif
}

bool linear_by_tiles([[maybe_unused]] const CQuantizer& p, [[maybe_unused]] const LinearCall& c) {
#if QT_ISA == 512
    if (!has_tiles() || !serves(p, c) || !bfloat16_holds(p, c)) return false;
    const DecodedCall x(c);
    const WeightRows weight(p, x.call);
    if (x.done) TileProduct(x.call, weight).run();
    return x.done;
#else
    return false;
#endif
}

}  // namespace QT_NAMESPACE
