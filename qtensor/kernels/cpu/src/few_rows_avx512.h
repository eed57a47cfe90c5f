// few_rows.h with AVX-512: codes are decoded in registers and multiplied at once, in float32 by fused
// multiply-adds or, where bfloat16 holds x, by vdpbf16ps, which is two such steps: the high half of a dword
// first.
#pragma once
#include "few_rows_avx512_formats.h"
#include "transpose_avx512.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
// ---- x in the order in which decoded vectors have it

// A stage of x, whose elements behind the end are 0.
template <class F>
static void arrange(const u16* x, u16* out) {
    for (i64 first = 0; first < STAGE; first += F::SPAN, x += F::SPAN, out += F::SPAN) {
        if constexpr (F::PER == 4) {  // pairs (8 i + s, 8 i + 4 + s); then lanes become vectors
            constexpr int block = F::SPAN / SUMS;
            alignas(64) static constexpr u16 pairs[32] = {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,
                                                          13, 10, 14, 11, 15, 16, 20, 17, 21, 18, 22,
                                                          19, 23, 24, 28, 25, 29, 26, 30, 27, 31};
            __m512i r[16];
            for (int i = 0; i < SUMS; i++) {
                const u16* from = x + F::lane_of(i) * block;
                const __m512i b =
                    block == 32 ? _mm512_loadu_si512(from) : _mm512_castsi256_si512(load<__m256i>(from));
                r[i] = _mm512_permutexvar_epi16(_mm512_load_si512(pairs), b);
            }
            transpose_rows<false>(r);
            for (int v = 0; v < F::STEPS; v++) _mm512_store_si512(out + 32 * v, r[v]);
        } else {
            for (int v = 0; v < F::STEPS; v++)
                for (int four = 0; four < 4; four++)
                    memcpy(out + 32 * v + 8 * four, x + F::eight(v, four), 16);
        }
    }
}
// ---- products
#ifdef __AVX512BF16__
INLINE __m512 multiply(__m512 p, const u16* x, __m512i d) {
    return _mm512_dpbf16_ps(p, (__m512bh)_mm512_load_si512(x), (__m512bh)d);
}
#endif
INLINE __m512 multiply(__m512 p, const float* x, __m512i d) {
    const __m512i high = _mm512_and_si512(d, _mm512_set1_epi32(i32(0xffff0000)));
    p = _mm512_fmadd_ps(_mm512_load_ps(x), _mm512_castsi512_ps(high), p);
    return _mm512_fmadd_ps(_mm512_load_ps(x + SUMS), _mm512_castsi512_ps(_mm512_slli_epi32(d, 16)), p);
}
INLINE __m512 multiply(__m512 p, const float* x, FloatPair d) {
    p = _mm512_fmadd_ps(_mm512_load_ps(x), d.second, p);
    return _mm512_fmadd_ps(_mm512_load_ps(x + SUMS), d.first, p);
}
template <class F>
struct LaneOrder {
    alignas(64) int at[SUMS];
    constexpr LaneOrder() : at() {
        for (int i = 0; i < SUMS; i++) at[F::lane_of(i)] = i;
    }
};
// Elements n .. n + count of a row of the result from their sums, at most 16.
INLINE void finish_vector(const FewRows& f, i64 m, i64 n, i64 count, __m512 sum) {
    const LinearCall& c = f.call;
    const __mmask16 real = __mmask16((1u << count) - 1);
    const float own = c.row_factors ? c.row_factors[m * c.row_factor_step] : 1.0f;
    const float* factors = f.factors;
    VF v = (VF)sum;
    if (!factors)
        v = v * all(own);
    else
        v = v * (all(own) * (f.factor_step ? (VF)_mm512_maskz_loadu_ps(real, factors + n) : all(*factors)));
    if (c.bias) v = v + (VF)_mm512_maskz_loadu_ps(real, c.bias + n);
    v = (VI)(v == v) ? v : (VF)all(0x7fc00000);  // the bits of a NaN depend on the order of operands
    const i64 at = m * f.n + n;
    if (c.dtype == F32) return _mm512_mask_storeu_ps((float*)c.y + at, real, (__m512)v);
    const __m256i narrow = c.dtype == F16
                               ? (__m256i)to_half(v)
                               : _mm512_cvtepi32_epi16((__m512i)((VU)to_bfloat16_bits((VI)v) >> 16));
    _mm256_mask_storeu_epi16((u16*)c.y + at, real, narrow);
}
// Eight elements of the result from their lanes: halves are added, 8, 4, 2, 1.
template <class F>
INLINE void finish_eight(const FewRows& f, i64 m, i64 n, i64 count, __m512 v[8]) {
    if constexpr (F::PER == 4) {
        static constexpr LaneOrder<F> order;
        for (int i = 0; i < 8; i++) v[i] = _mm512_permutexvar_ps(_mm512_load_si512(order.at), v[i]);
    }
    __m512 a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
    for (int i = 0; i < 2; i++)
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    const __m512d b0 = _mm512_castps_pd(b[0]), b1 = _mm512_castps_pd(b[1]);
    const __m512 c = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(b0, b1)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(b0, b1)));
    const __m512 d = _mm512_add_ps(c, _mm512_permute_ps(c, 0xb1));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
    finish_vector(f, m, n, count, _mm512_permutexvar_ps(order, d));
}

// R rows of the weight.
template <class F, int R>
struct WeightRows : RowAddresses<F, R> {
    using RowAddresses<F, R>::code;
    using RowAddresses<F, R>::scale;
    const FewRows& f;
    bool special = false;  // whether a factor of E8M0 is not a plain power of two
    WeightRows(const FewRows& f, i64 n, i64 end, u8* own) : RowAddresses<F, R>(f, n, end, own), f(f) {
        for (int r = 0; F::SCALES == 4 && r < R; r++)
            special |= has_special_factor(scale[r], f.k / F::SPAN * F::SCALES);
    }
    ALWAYS_INLINE void whole(int r, i64 span, __m512i t[F::LOADS], __m512& s) const {
        F::load(code[r] + span * F::BYTES, t);
        if constexpr (F::SCALES == 4)
            s = special ? F::factors(f, scale[r], span) : four_plain_factors(scale[r] + span * F::SCALES);
        else if constexpr (F::SCALED)
            s = F::factors(f, scale[r], span);
    }
    // The last span, filled up with codes and factors of zero bytes.
    void part(int r, i64 span, __m512i t[F::LOADS], __m512& s) const {
        u8 codes[F::BYTES] = {}, scales[16] = {};
        memcpy(codes, code[r] + span * F::BYTES, size_t(f.code_stride - span * F::BYTES));
        F::load(codes, t);
        if constexpr (F::SCALES > 0) {
            const i64 left = (f.k - span * F::SPAN) * F::SCALES;
            memcpy(scales, scale[r] + span * F::SCALES, size_t((left + F::SPAN - 1) / F::SPAN));
            s = F::factors(f, scales, 0);
        } else if constexpr (F::SCALED) {
            s = F::factors(f, scale[r], span);
        }
    }
};

constexpr int SET = 4, SETS = 2;  // rows of the weight
constexpr auto no_fetch = [](int) {};
// 1. R rows of the weight times M rows of x, with everything in registers. Between the products, calls of
// fetch(n) prefetch n lines each: as many in all as R spans have.
template <class F, int R, int M, class X, class Fetching>
INLINE void span_sums(const F& codes, const __m512i t[R][F::LOADS], const __m512 s[R], const X* x,
                      __m512 acc[R][M], const Fetching& fetch) {
    constexpr int LINES = R * F::BYTES / 64;
    const auto fetch_before = [&](int step, int steps) {
        fetch(LINES * (step + 1) / steps - LINES * step / steps);
    };
    __m512 p[R][M];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) p[r][m] = F::SCALED ? _mm512_setzero_ps() : acc[r][m];
#pragma GCC unroll 4
    for (int i = 0; i < F::LOADS; i++) {
        if constexpr (F::PER == 4) {
#define QT_STEP(S)                                                                                    \
    fetch_before(i * 4 + S, F::LOADS * 4);                                                            \
    for (int r = 0; r < R; r++) {                                                                     \
        const auto d = F::template decode<S, X>(codes, t[r][i]);                                      \
        for (int m = 0; m < M; m++) p[r][m] = multiply(p[r][m], x + m * STAGE + (i * 4 + S) * 32, d); \
    }
            QT_STEP(0) QT_STEP(1) QT_STEP(2) QT_STEP(3)
#undef QT_STEP
        } else {
            constexpr int G = sizeof(X) == 2 && M > 2 ? R : 1;  // rows that share a load of x
            for (int r0 = 0; r0 < R; r0 += G) {
                fetch_before(i * (R / G) + r0 / G, F::LOADS * (R / G));
                __m512i d[G][F::PER];
                for (int r = 0; r < G; r++) F::decode_all(codes, t[r0 + r][i], d[r]);
                for (int v = 0; v < F::PER; v++)
                    for (int m = 0; m < M; m++)
                        for (int r = 0; r < G; r++)
                            p[r0 + r][m] =
                                multiply(p[r0 + r][m], x + m * STAGE + (i * F::PER + v) * 32, d[r][v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++)
            acc[r][m] = F::SCALED ? _mm512_fmadd_ps(p[r][m], s[r], acc[r][m]) : p[r][m];
}
// Store the sums of rows n .. n + R of the weight as sums[row of x][row of the weight]. Not inlined, so that
// the compiler keeps all sums in registers.
template <class F, int R, int M, class X>
__attribute__((noinline)) static void sums_of_rows(const FewRows& f, const F& codes, const X* xs,
                                                   const Chunk& chunk, i64 n, u8* own, __m512 (*sums)[8]) {
    const WeightRows<F, R> rows(f, n, chunk.end, own);
    Fetch<F, R> fetch(f, chunk, n);
    const auto lines = [&](int count) { fetch.template next_lines<M <= 2 ? 3 : 2>(count); };
    const auto x_of = [&](i64 i) { return xs + i * F::SPAN / STAGE * STAGE * M + i * F::SPAN % STAGE; };
    const i64 spans = f.k / F::SPAN;
    __m512 acc[R][M], s[R];
    __m512i t[R][F::LOADS];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) acc[r][m] = _mm512_setzero_ps();
    fetch.starts(f, chunk, n);
    for (i64 i = 0; i < spans; i++) {
        fetch.template piece_factors<F::SPAN>(i);
        if constexpr (F::PER == 4 && M > 2)  // measured: the CPU's own prefetcher is too late here
            for (int r = 0; r < R; r++) fetch_span<F>(rows.code[r] + (i + 1) * F::BYTES);
        for (int r = 0; r < R; r++) rows.whole(r, i, t[r], s[r]);
        span_sums<F, R, M, X>(codes, t, s, x_of(i), acc, lines);
    }
    if (spans * F::SPAN < f.k) {
        for (int r = 0; r < R; r++) rows.part(r, spans, t[r], s[r]);
        span_sums<F, R, M, X>(codes, t, s, x_of(spans), acc, no_fetch);
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sums[m][r] = acc[r][m];
}
// R is 2 because the CPU's prefetcher predicts the addresses of more rows badly.
template <class F, int M, int R = 2, class X>
static void rows_in_registers(const FewRows& f, const F& codes, const X* xs, const Chunk& chunk, u8* own) {
    for (i64 n = chunk.first; n < chunk.end; n += 8) {
        __m512 sums[M][8] = {};
        const i64 count = smaller(8, chunk.end - n);
        for (i64 r = 0; r < count; r += R)
            sums_of_rows<F, R, M, X>(f, codes, xs, chunk, n + r, own, (__m512(*)[8])(&sums[0][r]));
        for (int m = 0; m < M; m++) finish_eight<F>(f, m, n, count, sums[m]);
    }
}

// The same in float32: few rows of x are larger than the first cache level, so they are read a stage at a
// time for two sets of rows of the weight.
template <class F, int M>
static void float_rows_in_registers(const FewRows& f, const F& codes, const float* xs, const Chunk& chunk,
                                    u8* own) {
    constexpr int ROWS = SET * SETS, R = 2;
    for (i64 n = chunk.first; n < chunk.end; n += ROWS) {
        const WeightRows<F, ROWS> rows(f, n, chunk.end, own);
        Fetch<F, ROWS> fetch(f, chunk, n);
        __m512 sums[M][ROWS] = {};
        for (i64 e = 0; e < f.k; e += STAGE) {
            fetch.template begin<int(STAGE)>(e / STAGE);
            const i64 end = smaller(e + STAGE, f.k);
            for (int r0 = 0; r0 < ROWS; r0 += R) {
                __m512 acc[R][M], s[R];
                __m512i t[R][F::LOADS];
                for (int r = 0; r < R; r++)
                    for (int m = 0; m < M; m++) acc[r][m] = sums[m][r0 + r];
                const float* x = xs + e * M;
                i64 i = e / F::SPAN;
                for (; (i + 1) * F::SPAN <= end; i++, x += F::SPAN) {
                    fetch.lines(R * F::BYTES / 64);
                    for (int r = 0; r < R; r++) rows.whole(r0 + r, i, t[r], s[r]);
                    span_sums<F, R, M, float>(codes, t, s, x, acc, no_fetch);
                }
                if (i * F::SPAN < end) {
                    for (int r = 0; r < R; r++) rows.part(r0 + r, i, t[r], s[r]);
                    span_sums<F, R, M, float>(codes, t, s, x, acc, no_fetch);
                }
                for (int r = 0; r < R; r++)
                    for (int m = 0; m < M; m++) sums[m][r0 + r] = acc[r][m];
            }
        }
        for (int m = 0; m < M; m++) finish_eight<F>(f, m, n, smaller(ROWS, chunk.end - n), sums[m]);
    }
}

// 2. More rows of x: two sets of four rows of the weight, a stage at a time, with tiles of T rows of x.
template <class F>
struct Stage {
    static constexpr int SPANS = int(STAGE) / F::SPAN;
    // Sums stay in registers where factors follow every few products.
    static constexpr bool KEEP = F::SCALED && F::STEPS <= 4;
    // Codes of a byte are decoded once for all rows of x. 4-bit codes are decoded again for each tile, which
    // costs less than to store and load their values.
    static constexpr bool DECODED = F::PER == 2;
    static constexpr int VECTORS = DECODED ? F::STEPS : F::LOADS;
    alignas(64) __m512i t[SETS][SPANS][VECTORS][SET];  // codes or values
    alignas(64) __m512 s[SETS][SPANS][SET];
    alignas(64) __m512 acc[SETS][MOST_ROWS][SET];
};
// GCC keeps an array of sums in registers only if it unrolls the loops over it early.
#define QT_EACH_SUM \
    _Pragma("GCC unroll 8") for (int m = 0; m < T; m++) _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
// A factor that is a power of two may multiply decoded values instead of sums of products: the bits are the
// same unless a number leaves the range of its type, which FewRows::folds_from and folds_count exclude. The
// sum of a block is then added to its lane. vaddps runs beside vdpbf16ps; a multiply-add takes its place.
constexpr i64 LEAST_FOLDED = 16;  // rows of x for which this pays
INLINE __mmask16 can_fold(const FewRows& f, __m512 s) {
    // The bits of the number behind sign and exponent come first, so that all but powers of two are large.
    const __m512i from = _mm512_set1_epi32(f.folds_from), count = _mm512_set1_epi32(f.folds_count);
    return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(_mm512_rol_epi32(_mm512_castps_si512(s), 9), from),
                                   count);
}
// Words to add to values that are multiplied by the powers of two of their lanes.
INLINE __m512i exponents_of(__m512 s) {
    const __m512i high = _mm512_set1_epi32(0x03020302),
                  each = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    const __m512i words = _mm512_shuffle_epi8(_mm512_castps_si512(s), _mm512_add_epi32(high, each));
    return _mm512_sub_epi16(words, _mm512_set1_epi16(127 << 7));
}
INLINE __m512i times_powers(__m512i values, __m512i exponents) {  // but 0, infinities and NaN
    const __m512i next = _mm512_sub_epi16(_mm512_add_epi16(values, values), _mm512_set1_epi16(1));
    const __mmask32 number = _mm512_cmplt_epu16_mask(next, _mm512_set1_epi16(short(0xfeff)));
    return _mm512_mask_add_epi16(values, number, values, exponents);
}
// T rows of x times R rows of the weight, from row r0 of a set on. Not inlined, so that the compiler keeps
// all sums in registers; it loads each vector once, as a vdpbf16ps with an operand in memory takes longer.
template <class F, int R, int T, bool Folded, class X>
__attribute__((noinline)) static void tile(const F& codes, const X* x, Stage<F>& stage, int set, int spans,
                                           int r0, i64 m0) {
    constexpr bool keep = Stage<F>::KEEP;
    __m512(*acc)[SET] = stage.acc[set] + m0;
    __m512 a[T][R], p[T][R];
    QT_EACH_SUM {
        if (keep) a[m][r] = acc[m][r0 + r];
        if (!F::SCALED) p[m][r] = acc[m][r0 + r];
    }
#pragma GCC unroll 1
    for (int i = 0; i < spans; i++, x += F::SPAN) {
        if (F::SCALED) QT_EACH_SUM p[m][r] = _mm512_setzero_ps();
        const auto& stored = stage.t[set][i];
        if constexpr (Stage<F>::DECODED) {
#pragma GCC unroll 4
            for (int v = 0; v < F::STEPS; v++) {
                __m512i d[R];
                for (int r = 0; r < R; r++) d[r] = stored[v][r0 + r];
                QT_EACH_SUM p[m][r] = multiply(p[m][r], x + m * STAGE + v * 32, d[r]);
            }
        } else {
#pragma GCC unroll 1
            for (int l = 0; l < F::LOADS; l++) {
                const X* from = x + l * F::PER * 32;
#define QT_STEP(S)                                                                                    \
    {                                                                                                 \
        decltype(F::template decode<S, X>(codes, __m512i{})) d[R];                                    \
        for (int r = 0; r < R; r++) d[r] = F::template decode<S, X>(codes, stored[l][r0 + r]);        \
        for (int m = 0; m < T; m++)                                                                   \
            for (int r = 0; r < R; r++) p[m][r] = multiply(p[m][r], from + m * STAGE + S * 32, d[r]); \
    }
                QT_STEP(0) QT_STEP(1) QT_STEP(2) QT_STEP(3)
#undef QT_STEP
            }
        }
        if (F::SCALED) QT_EACH_SUM {
                __m512& to = keep ? a[m][r] : acc[m][r0 + r];
                to = Folded ? _mm512_add_ps(p[m][r], to)
                            : _mm512_fmadd_ps(p[m][r], stage.s[set][i][r0 + r], to);
            }
    }
    QT_EACH_SUM {
        if (keep) acc[m][r0 + r] = a[m][r];
        if (!F::SCALED) acc[m][r0 + r] = p[m][r];
    }
}
#undef QT_EACH_SUM
template <class F, int T, bool Folded, class X>
static void tiles(const F& codes, const X* x, Stage<F>& stage, int spans, i64 m0, Fetch<F, SETS * SET>& fetch,
                  int lines) {
    constexpr int R = Stage<F>::KEEP ? 2 : 4;
    for (int set = 0; set < SETS; set++)
        for (int r = 0; r < SET; r += R) {
            fetch.lines(lines * T * R);
            tile<F, R, T, Folded, X>(codes, x, stage, set, spans, r, m0);
        }
}
template <class F, bool Folded, class X>
static void tiles_of_stage(const F& codes, const X* x, Stage<F>& stage, int spans, i64 count,
                           Fetch<F, SETS * SET>& fetch) {
    // Lines of memory for each product of two rows, so that all tiles fetch alike.
    const int lines = int((STAGE / F::SPAN * F::BYTES / 64 + count - 1) / count);
    i64 m = 0;
    // Formats that keep both kinds of sums in registers have two rows of the weight in a tile. With four rows
    // of x, eight sums are too few to hide the latency of a dot product.
    if constexpr (Stage<F>::KEEP)
        for (; count - m >= 6; m += 6)
            tiles<F, 6, Folded>(codes, x + m * STAGE, stage, spans, m, fetch, lines);
    for (; count - m >= 4; m += 4) tiles<F, 4, Folded>(codes, x + m * STAGE, stage, spans, m, fetch, lines);
    if (count - m == 3) tiles<F, 3, Folded>(codes, x + m * STAGE, stage, spans, m, fetch, lines);
    if (count - m == 2) tiles<F, 2, Folded>(codes, x + m * STAGE, stage, spans, m, fetch, lines);
    if (count - m == 1) tiles<F, 1, Folded>(codes, x + m * STAGE, stage, spans, m, fetch, lines);
}
// The codes or values of a stage. Folded: returns false if a factor cannot be folded.
template <class F, bool Folded>
static bool fill_stage(const FewRows& f, const F& codes, const WeightRows<F, SETS * SET>& rows, i64 e,
                       int spans, Stage<F>& stage) {
    __mmask16 folds = 0xffff;
    for (int q = 0; q < SETS * SET; q++)
        for (int i = 0; i < spans; i++) {
            __m512i t[F::LOADS], exponents;
            auto& s = stage.s[q / SET][i][q % SET];
            if (e + (i + 1) * F::SPAN <= f.k)
                rows.whole(q, e / F::SPAN + i, t, s);
            else
                rows.part(q, e / F::SPAN + i, t, s);
            if constexpr (Folded) folds &= can_fold(f, s), exponents = exponents_of(s);
            auto& to = stage.t[q / SET][i];
            for (int l = 0; l < F::LOADS; l++) {
                if constexpr (Stage<F>::DECODED) {
                    __m512i d[F::PER];
                    F::decode_all(codes, t[l], d);
                    for (int v = 0; v < F::PER; v++)
                        to[l * F::PER + v][q % SET] = Folded ? times_powers(d[v], exponents) : d[v];
                } else {
                    to[l][q % SET] = t[l];
                }
            }
        }
    return folds == 0xffff;
}
// All rows of x times rows of the weight from n on.
template <class F, class X>
static void rows_by_tiles(const FewRows& f, const F& codes, const X* xs, const Chunk& chunk, i64 n, u8* own,
                          Stage<F>& stage, bool& folds) {
    constexpr int R = SETS * SET, SPANS = Stage<F>::SPANS;
    const WeightRows<F, R> rows(f, n, chunk.end, own);
    Fetch<F, R> fetch(f, chunk, n);
    for (int set = 0; set < SETS; set++)
        for (i64 m = 0; m < f.m; m++)
            for (int r = 0; r < SET; r++) stage.acc[set][m][r] = _mm512_setzero_ps();
    for (i64 e = 0; e < f.k; e += STAGE) {
        if (e + STAGE <= f.k) fetch.template begin<int(STAGE)>(e / STAGE);
        const int spans = int(smaller(SPANS, (f.k - e + F::SPAN - 1) / F::SPAN));
        if constexpr (Stage<F>::DECODED && F::SCALED && sizeof(X) == 2) {
            if (folds && fill_stage<F, true>(f, codes, rows, e, spans, stage)) {
                tiles_of_stage<F, true>(codes, xs + e * f.m, stage, spans, f.m, fetch);
                continue;
            }
            folds = folds && e + STAGE > f.k;  // what lies behind the end has other factors
        }
        fill_stage<F, false>(f, codes, rows, e, spans, stage);
        tiles_of_stage<F, false>(codes, xs + e * f.m, stage, spans, f.m, fetch);
    }
    for (i64 m = 0; m < f.m; m++) {
        __m512 v[R];
        for (int q = 0; q < R; q++) v[q] = stage.acc[q / SET][m][q % SET];
        finish_eight<F>(f, m, n, smaller(R, chunk.end - n), v);
    }
}

// Few: the format as up to four rows of x read it.
template <class F, class Few, class X>
static void multiply_chunk(const FewRows& f, const X* xs, const Chunk& chunk, u8* own) {
    const Few few(f);
    if constexpr (std::is_same<X, float>::value) {
        if (f.m == 1) return float_rows_in_registers<Few, 1>(f, few, xs, chunk, own);
        if (f.m == 2) return float_rows_in_registers<Few, 2>(f, few, xs, chunk, own);
        if (f.m == 3) return float_rows_in_registers<Few, 3>(f, few, xs, chunk, own);
        if (f.m == 4) return float_rows_in_registers<Few, 4>(f, few, xs, chunk, own);
    } else {
        // If x does not fit the first cache level, tiles are faster, because they read it a stage at a time.
        // Formats that load four vectors of codes have fewer registers left for sums.
        const i64 bytes = f.m * f.k * i64(sizeof(X));
        const int most = (bytes <= 32 << 10 ? 4 : 2) - (Few::LOADS == 4);
        if (f.m == 1) return rows_in_registers<Few, 1>(f, few, xs, chunk, own);
        if (f.m == 2 && most >= 2) return rows_in_registers<Few, 2>(f, few, xs, chunk, own);
        if (f.m == 3 && most >= 3) return rows_in_registers<Few, 3>(f, few, xs, chunk, own);
        if constexpr (Few::LOADS < 4) {
            if (f.m == 4 && most == 4) {
                // Where x fills the first cache level, four rows of the weight read it half as often.
                if constexpr (!F::SCALED)
                    if (bytes > first_cache_bytes() * 3 / 4)
                        return rows_in_registers<Few, 4, 4>(f, few, xs, chunk, own);
                return rows_in_registers<Few, 4>(f, few, xs, chunk, own);
            }
        }
    }
    const F codes(f);
    Stage<F> stage;
    bool folds = f.m >= LEAST_FOLDED && f.folds_count > 0;
    for (i64 n = chunk.first; n < chunk.end; n += SETS * SET)
        rows_by_tiles<F>(f, codes, xs, chunk, n, own, stage, folds);
}
template <class X, class F, class Few = F>
static void multiply_format(const FewRows& f) {
    const Array<X> xs(up(f.k, STAGE) * f.m);
    arrange_rows<X>(f, xs, [](const X* from, X* to) { arrange<F>(from, to); });
    by_chunks(f, [&](const Chunk& chunk) {
        const Array<u8> own(f.scales.tiles ? SET * SETS * f.scale_bytes : 0);
        multiply_chunk<F, Few>(f, (const X*)xs, chunk, own);
    });
}
// X: u16 for bfloat16, else float.
template <class X>
static bool multiply_few_rows(const CQuantizer& p, const FewRows& f) {
    if (p.family != BLOCK)
        multiply_format<X, Fp8Rows<1>, Fp8Rows<2>>(f);
    else if (p.block == 128)
        multiply_format<X, Fp8BlockRows>(f);
    else if (p.codes == 4)
        multiply_format<X, Mxfp6PackedRows>(f);
    else if (p.codes == 1)
        multiply_format<X, Mxfp8Rows>(f);
    else if (p.block == 32)
        multiply_format<X, Mxfp4Rows>(f);
    else
        multiply_format<X, Nvfp4Rows>(f);
    return true;
}
#endif

}  // namespace QT_NAMESPACE
