// Products of two operands of 4- or 6-bit codes. The sum of a block is exact in integers; blocks are added in
// order, each by one fused multiply-add (docs/numerics.md, "Integer products"). So a result depends neither
// on the other rows nor on tiles, threads or the instruction set.
#include "integer_lines.h"
#ifdef __aarch64__
#include <arm_neon.h>
#endif

namespace QT_NAMESPACE {

constexpr i64 MOST_LEFT = 512;                 // rows of the left operand that are decoded together
constexpr i64 LEAST_ROWS = 16;                 // of a thread where rows are shared
constexpr int HEIGHT = QT_ISA == 512 ? 6 : 3;  // rows of the result whose sums fit in the registers

#ifdef __aarch64__
// acc + the products of four bytes of each lane, of half a vector.
INLINE int32x4_t dot(int32x4_t acc, int8x16_t left, int8x16_t right) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(acc, left, right);
#else
    // No pair of products exceeds 16 bits: 2 * 60 * 60.
    const int16x8_t low = vmull_s8(vget_low_s8(left), vget_low_s8(right));
    return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(left, right)));
#endif
}
struct Sums {
    int32x4_t low, high;
};
struct Bytes {
    int8x16_t low, high;
};
#endif

// acc + the products of four bytes of each lane.
INLINE VI dot(VI acc, VI left, VI right) {
#if QT_ISA == 512
    return (VI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)left, (__m512i)right);
#elif QT_ISA == 2
    // No pair of products exceeds 16 bits: 2 * 120 * 60.
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)left, (__m256i)right);
    return acc + (VI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__aarch64__)
    const Sums sums = bits<Sums>(acc);
    const Bytes a = bits<Bytes>(left), b = bits<Bytes>(right);
    return bits<VI>(Sums{dot(sums.low, a.low, b.low), dot(sums.high, a.high, b.high)});
#else
    for (int shift = 24; shift >= 0; shift -= 8)
        acc += ((VI)((VU)left << shift) >> 24) * ((VI)((VU)right << shift) >> 24);
    return acc;
#endif
}

// The left operand, decoded: lines of integers plus an offset, and their factors.
struct Left {
    i64 stride, blocks;
    const u8* integers;
    const float* factors;
};
// A panel of PANEL_LINES lines of the right operand: (k / 4, line, 4), and for each block and line where sums
// start, which takes off what the offset of the left adds, and the factor.
struct Panel {
    i32* integers;
    i32* starts;
    float* factors;
};

// Numbers from 2^23 * 1.5 on hold integers in their low bits: sums that start there are floats without a
// conversion.
constexpr float BASE = 12582912.0f;

// Adds to acc the products of R rows of the left, `stride` bytes apart, with a block of a panel. Fours: how
// many products of dwords 16 bits hold together; AVX2 widens their sum alone.
template <int R, int B, int Fours>
INLINE void add_block(const u8* left, i64 stride, const i32* right, VI acc[R][VECTORS_A_PANEL]) {
    constexpr int V = VECTORS_A_PANEL;
#pragma GCC unroll 8
    for (int first = 0; first < B / 4; first += Fours) {
#if QT_ISA == 2
        __m256i pairs[R][V];
#endif
#pragma GCC unroll 8
        for (int four = first; four < first + Fours; four++) {
            VI b[V];
            for (int j = 0; j < V; j++) b[j] = load<VI>(right + four * PANEL_LINES + j * W);
            for (int r = 0; r < R; r++) {
                const VI a = all(load<i32>(left + r * stride + four * 4));
                for (int j = 0; j < V; j++) {
#if QT_ISA == 2
                    const __m256i products = _mm256_maddubs_epi16((__m256i)a, (__m256i)b[j]);
                    pairs[r][j] = four == first ? products : _mm256_add_epi16(pairs[r][j], products);
#else
                    acc[r][j] = dot(acc[r][j], a, b[j]);
#endif
                }
            }
        }
#if QT_ISA == 2
        for (int r = 0; r < R; r++)
            for (int j = 0; j < V; j++) acc[r][j] += (VI)_mm256_madd_epi16(pairs[r][j], _mm256_set1_epi16(1));
#endif
    }
}

// R rows of the left times a panel. Based: sums start at BASE.
template <int R, int B, int Fours, bool Based>
static void multiply(const Left& left, i64 row, const Panel& p, VF sums[R][VECTORS_A_PANEL]) {
    constexpr int V = VECTORS_A_PANEL;
    for (int r = 0; r < R; r++)
        for (int j = 0; j < V; j++) sums[r][j] = VF{};
    const u8* x = left.integers + row * left.stride;
    const float* factors = left.factors + row * left.blocks;
    for (i64 block = 0; block < left.blocks; block++) {
        VI acc[R][V];
        VF scale[V];
        for (int j = 0; j < V; j++) {
            const VI start = load<VI>(p.starts + block * PANEL_LINES + j * W);
            scale[j] = load<VF>(p.factors + block * PANEL_LINES + j * W);
            for (int r = 0; r < R; r++) acc[r][j] = start;
        }
        add_block<R, B, Fours>(x + block * B, left.stride, p.integers + block * (B / 4) * PANEL_LINES, acc);
        VF base[V];
        for (int j = 0; j < V; j++) base[j] = scale[j] * all(-BASE);
        for (int r = 0; r < R; r++) {
            const VF own = all(factors[r * left.blocks + block]);
            for (int j = 0; j < V; j++) {
                // Both are exact: a sum has at most 17 bits, a factor of E4M3 four.
                const VF product = Based ? fused((VF)acc[r][j], scale[j], base[j])
                                         : __builtin_convertvector(acc[r][j], VF) * scale[j];
                sums[r][j] = fused(product, own, sums[r][j]);
            }
        }
    }
}

// What is written of the result.
struct Result {
    const IntegerArguments& call;
    // A row of a panel from column `n` on: sums times factors, plus bias, rounded once.
    void put(i64 m, i64 n, const VF sums[VECTORS_A_PANEL]) const {
        const i64 count = smaller(PANEL_LINES, call.n - n);
        const float* factors[2] = {call.a.factors, call.b.factors};
        for (int j = 0; j < VECTORS_A_PANEL && j * W < count; j++) {
            const i64 first = n + j * W, width = smaller(W, call.n - first);
            VF v = sums[j];
            VF factor = all(factors[0] ? factors[0][m * call.a.factor_step] : 1.0f);
            if (factors[1])
                factor *= call.b.factor_step ? part(factors[1] + first, width) : all(factors[1][0]);
            if (factors[0] || factors[1]) v *= factor;
            if (call.bias) v += part(call.bias + first, width);
            with_type(call.dtype, [&](auto type) {
                using D = decltype(type);
                auto* y = (typename D::T*)call.y + m * call.n + first;
                if (width == W) return store_one<D>(y, v, false);
                typename D::T all_of_them[W];
                store_one<D>(all_of_them, v, false);
                memcpy(y, all_of_them, sizeof(typename D::T) * size_t(width));
            });
        }
    }
    static VF part(const float* p, i64 count) {
        if (count == W) return load<VF>(p);
        VF v{};
        memcpy(&v, p, sizeof(float) * size_t(count));
        return v;
    }
};

template <int R, int B, int Fours>
static void multiply_rows(const Left& left, i64 row, i64 m, const Panel& p, i64 n, bool based,
                          const Result& y) {
    VF sums[R][VECTORS_A_PANEL];
    if (based)
        multiply<R, B, Fours, true>(left, row, p, sums);
    else
        multiply<R, B, Fours, false>(left, row, p, sums);
    for (int r = 0; r < R; r++) y.put(m + r, n, sums[r]);
}
// The rows first .. end, R at a time, and what is left half as many at a time.
template <int B, int Fours, int R = HEIGHT>
static void multiply_panel(const Left& left, i64 first, i64 end, i64 m0, const Panel& p, i64 n, bool based,
                           const Result& y) {
    for (; first + R <= end; first += R) multiply_rows<R, B, Fours>(left, first, m0 + first, p, n, based, y);
    if constexpr (R > 1) multiply_panel<B, Fours, (R == 6 ? 4 : R / 2)>(left, first, end, m0, p, n, based, y);
}

// Decodes the left rows m0 + first .. m0 + end to the rows first .. end of `integers` and `factors`.
static void decode_left(const Codes& c, i64 m0, i64 first, i64 end, u8* integers, float* factors) {
    const VB offset = VB{} + u8(UNSIGNED_LEFT ? c.table.largest : 0);
    const Array<u8> across(c.across_bytes(end - first)), turned((end - first) * up(c.blocks, 4));
    const Rows rows = rows_of(c, m0 + first, end - first, across);
    with_codes(c.quantizer, [&](auto six_bits, auto packed) {
        for (i64 r = first; r < end; r++)
            for (i64 k = 0; k < c.length; k += PIECE)
                decode_piece<six_bits, packed>(c, rows.first + (r - first) * rows.stride, k, offset,
                                               integers + r * c.stride + k);
    });
    i64 ld = 0;
    const u8* codes = factor_codes(c, m0 + first, end - first, true, ld, turned);
    for (i64 r = first; r < end; r++)
        decode_factors(c, codes + (r - first) * ld, c.blocks, 1.0f, factors + r * c.blocks);
}

// Memory of a thread for a panel.
struct PanelMemory {
    Array<u8> across, turned;
    Array<i32> integers, starts;
    Array<float> factors;
    explicit PanelMemory(const Codes& c)
        : across(c.across_bytes(PANEL_LINES)),
          turned(PANEL_LINES * up(c.blocks, 4)),
          integers(PANEL_LINES * c.padded / 4),
          starts(PANEL_LINES * c.padded / c.quantizer.block),
          factors(PANEL_LINES * c.blocks) {}
};

// Packs a piece of 16 lines to dwords out (k / 4, line), and stores where the sums of its blocks start.
template <int B>
static void pack_square(const u8* square, i32* out, i32* starts, i32 offset) {
#if QT_ISA == 512
    __m512i rows[16];
    for (int i = 0; i < 16; i++) rows[i] = load<__m512i>(square + i * PIECE);
    transpose_rows<false>(rows);
    for (int i = 0; i < 16; i++) store(out + i * PANEL_LINES, rows[i]);
#else
    transpose<float>((const float*)square, PIECE / 4, (float*)out, PANEL_LINES, 16, PIECE / 4);
#endif
    for (int block = 0; block < PIECE / B; block++)
        for (int j = 0; j < 16; j += W) {
            VI sum{};
            for (int four = 0; four < B / 4; four++)
                sum = dot(sum, all(0x01010101), load<VI>(out + (block * (B / 4) + four) * PANEL_LINES + j));
            store(starts + block * PANEL_LINES + j, sum * -offset + all(bits<i32>(BASE)));
        }
}
// Packs lines n .. n + PANEL_LINES of the right operand; lines behind its end are zeros. `unit`: of products
// of integers. Returns whether sums may start at BASE.
template <int B>
static bool pack(const Codes& c, i64 n, i64 end, float unit, i32 offset, PanelMemory& to) {
    const i64 count = smaller(PANEL_LINES, end - n);
    const Rows rows = rows_of(c, n, count, to.across);
    // The rows of the next panel are asked for while these are decoded.
    const i64 next = !c.lies_across() && n + 2 * PANEL_LINES <= end ? PANEL_LINES * rows.stride : 0;
    with_codes(c.quantizer, [&](auto six_bits, auto packed) {
        alignas(64) u8 square[16][PIECE];
        for (i64 line = 0; line < PANEL_LINES; line += 16) {
            const i64 full = std::max<i64>(0, smaller(16, count - line));
            memset(square[full], 0, size_t((16 - full) * PIECE));
            const u8* from = rows.first + line * rows.stride;
            for (i64 k = 0; k < c.length; k += PIECE) {
                for (i64 i = 0; i < full; i++) {
                    __builtin_prefetch(from + i * rows.stride + next + k / PIECE * piece_bytes(packed), 0, 2);
                    decode_piece<six_bits, packed>(c, from + i * rows.stride, k, VB{}, square[i]);
                }
                pack_square<B>(square[0], to.integers + k / 4 * PANEL_LINES + line,
                               to.starts + k / B * PANEL_LINES + line, offset);
            }
        }
    });
    i64 ld = 0;
    const u8* codes = factor_codes(c, n, count, false, ld, to.turned);
    VI most{};
    for (i64 b = 0; b < c.blocks; b++) {
        float* factors = to.factors + b * PANEL_LINES;
        memset(factors + count, 0, sizeof(float) * size_t(PANEL_LINES - count));
        most = max(most, decode_factors(c, codes + b * ld, count, 1.0f / unit, factors));
    }
    // BASE times a factor must be finite.
    const bool based = lane_max(most) < bits<i32>(0x1p100f);
    for (i64 i = 0; !based && i < PANEL_LINES * c.blocks; i++) to.starts[i] -= bits<i32>(BASE);
    return based;
}

// Operands with blocks of B.
template <int B, int Fours>
static void multiply_all(const IntegerArguments& call, const Codes& a, const Codes& b) {
    const Result y{call};
    const i64 most = smaller(call.m, MOST_LEFT), panels = (call.n + PANEL_LINES - 1) / PANEL_LINES;
    const Array<u8> integers(most * a.stride);
    const Array<float> factors(most * a.blocks);
    const i32 offset = UNSIGNED_LEFT ? a.table.largest : 0;
    const float unit = a.table.unit * b.table.unit;
    const Left left{a.stride, a.blocks, integers, factors};
    const int threads = int(call.threads);
    for (i64 m0 = 0; m0 < call.m; m0 += MOST_LEFT) {
        const i64 rows = smaller(MOST_LEFT, call.m - m0);
        const auto run = [&](i64 panel, i64 end, i64 row, i64 last) {
            PanelMemory memory(b);
            for (; panel < end; panel++) {
                const i64 n = panel * PANEL_LINES;
                const bool based = pack<B>(b, n, call.n, unit, offset, memory);
                const Panel p{memory.integers, memory.starts, memory.factors};
                multiply_panel<B, Fours>(left, row, last, m0, p, n, based, y);
            }
        };
        if (panels < 4 * threads && rows >= LEAST_ROWS * threads) {
            // Rows are dealt out: each thread packs all panels, and reads nothing that another one has made.
            parallel(rows, HEIGHT, threads, [&](i64 row, i64 last) {
                decode_left(a, m0, row, last, integers, factors);
                run(0, panels, row, last);
            });
        } else {
            parallel(rows, 16, threads,
                     [&](i64 row, i64 last) { decode_left(a, m0, row, last, integers, factors); });
            parallel(panels, 1, threads, [&](i64 panel, i64 end) { run(panel, end, 0, rows); });
        }
    }
}

bool integer_products(const IntegerArguments& call) {
    const Codes a(*call.a_quantizer, call.a, call.k), b(*call.b_quantizer, call.b, call.k);
    if (a.quantizer.block != b.quantizer.block) return false;
    if (a.quantizer.block == 16) multiply_all<16, 4>(call, a, b);
#if QT_ISA == 2
    else if (4 * a.table.largest * b.table.largest * 8 > INT16_MAX)
        multiply_all<32, 2>(call, a, b);
#endif
    else
        multiply_all<32, 8>(call, a, b);
    return true;
}

}  // namespace QT_NAMESPACE
