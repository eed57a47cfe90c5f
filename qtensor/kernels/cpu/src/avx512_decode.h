// Codes to bfloat16 and float16 with AVX-512: products with one factor stand in a table; and rotated values
// rotated back. dequantize.h says what is computed; here is only speed.
#pragma once
#include "bfloat16_powers.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
template <class D>
INLINE VI to_words(VF v) {  // in the low halves
    if constexpr (D::id == BF16) return (VI)((VU)to_bfloat16_bits((VI)v) >> 16);
    return (VI)_mm512_cvtepu16_epi32((__m256i)to_half(v));
}
// The words of 64 codes that tables of low and high bytes hold, in order: the unpacks work within 128 bits.
INLINE void words_by(__m512i c, const u8 low[128], const u8 high[128], __m512i out[2]) {
    c = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), c);
    const __m512i lo = _mm512_permutex2var_epi8(_mm512_load_si512(low), c, _mm512_load_si512(low + 64));
    const __m512i hi = _mm512_permutex2var_epi8(_mm512_load_si512(high), c, _mm512_load_si512(high + 64));
    // A code of 8 bits has its sign where the word's high byte has it. Not "or": the factor may be negative.
    const __m512i signed_hi = _mm512_ternarylogic_epi32(hi, c, bytes_of(0x80), 0x78);
    out[0] = _mm512_unpacklo_epi8(lo, signed_hi);
    out[1] = _mm512_unpackhi_epi8(lo, signed_hi);
}

// Values of 8-bit codes times one factor, rounded to D.
template <class D, class E>
struct ValueTable {
    alignas(64) u8 low[128], high[128];
    explicit ValueTable(float factor) {
        for (int c = 0; c < 128; c += W) {
            const VI w = to_words<D>(load<VF>(table<E>().value + c) * all(factor));
            narrow(low + c, w);
            narrow(high + c, w >> 8);
        }
    }
};
template <class D, class E>
static void decode_by_table(const u8* codes, i64 n, const ValueTable<D, E>& t, u16* y, bool stream) {
    for (i64 i = 0; i < n; i += 64) {
        __builtin_prefetch(codes + i + AHEAD);
        const __mmask64 real = n - i < 64 ? (1ull << (n - i)) - 1 : ~0ull;
        __m512i w[2];
        words_by(_mm512_maskz_loadu_epi8(real, codes + i), t.low, t.high, w);
        if (n - i >= 64) {
            store_bytes((u8*)(y + i), (VB)w[0], stream);
            store_bytes((u8*)(y + i + 32), (VB)w[1], stream);
        } else {
            _mm512_mask_storeu_epi16(y + i, u32(real), w[0]);
            _mm512_mask_storeu_epi16(y + i + 32, u32(real >> 32), w[1]);
        }
    }
}

// Four of 16 NVFP4 blocks: the 8 magnitudes of each are multiplied and rounded, then picked by the codes.
struct Magnitudes {
    alignas(64) float grid[16];
    alignas(64) u16 first[2][32];  // where a block's magnitudes begin, for each element of two blocks
    constexpr Magnitudes() : grid{0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, .5f, 1, 1.5f, 2, 3, 4, 6}, first() {
        for (int i = 0; i < 64; i++) first[i / 32][i % 32] = u16(i / 16 * 8);
    }
};
static constexpr Magnitudes MAGNITUDES;
template <class D>
INLINE __m512i words_of(VF a, VF b) {
    if constexpr (D::id == BF16)
        return (__m512i)high_halves(to_bfloat16_bits((VI)a), to_bfloat16_bits((VI)b));
    return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)to_half(a)), (__m256i)to_half(b), 1);
}
// Magnitudes of E2M1 are 1 and 1.5 times powers of two, and so are, rounded to bfloat16, their products with
// positive factors: those with 1 and 1.5 tell all others, unless they are too large or small. Here they are
// words of 4 and 6 times the factors, or 0, from which exponents are taken away.
constexpr i32 FOUR_TIMES = 2 << 7;
INLINE bool nv_fit(VF one) { return !any((VI)((VI)one < all(4 << 23)) | (VI)((VI)one > all(247 << 23))); }
INLINE __m512i nv_words(VF one, VF more) {  // those of 16 factors, twice
    return _mm512_add_epi16((__m512i)high_halves(to_bfloat16_bits((VI)one), to_bfloat16_bits((VI)more)),
                            _mm512_set1_epi16(FOUR_TIMES));
}
// The words of all codes of E4M3 with one second factor: the exponent of a code is added to the word of its
// fraction.
struct NvTable {
    __m512i words;  // of 16 codes with 1, and with 1.5
    bool fit;
    explicit NvTable(float global) {
        const VF v = load<VF>(table<FE4M3>().value), one = v * all(global),
                 more = v * all(1.5f) * all(global);
        fit = nv_fit(all(0x1p-9f * global)) && nv_fit(all(448.0f * global));
        words = _mm512_maskz_sub_epi16(0xfffefffeu, nv_words(one, more),
                                       _mm512_maskz_set1_epi16(0xff00ff00u, 1 << 7));
    }
    // code: words of codes, below 0x7f; half: 16 in the lanes that ask for 1.5.
    INLINE __m512i of(const NvTable& t, __m512i code, __m512i half) {
        const __m512i fraction = _mm512_ternarylogic_epi32(half, code, _mm512_set1_epi16(7), 0xf8);
        const __mmask32 normal = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x78));
        const __m512i exponent = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(0x780));
        return _mm512_add_epi16(
            _mm512_permutexvar_epi16(_mm512_mask_add_epi16(fraction, normal, fraction, _mm512_set1_epi16(8)),
                                     t.words),
            exponent);
    }
};
// What to take away for each magnitude, and where blocks and magnitudes are found.
struct NvOrder {
    alignas(64) u16 block[4][32], first[2][32], less[32], column[32];
    alignas(64) u8 apart[64];
    constexpr NvOrder() : block(), first(), less(), column(), apart() {
        constexpr u16 steps[8] = {0x7fff, 3 << 7, 2 << 7, 2 << 7,
                                  1 << 7, 1 << 7, 0,      0};  // a zero ends at 0, as all do
        constexpr u8 bits[8] = {0, 60, 4, 0, 32, 28, 36, 32};
        for (int i = 0; i < 32; i++) {
            const int m = i % 8, more = m == 3 || m == 5 || m == 7;
            for (int g = 0; g < 4; g++) block[g][i] = u16(4 * g + i / 8 + 16 * more);
            for (int h = 0; h < 2; h++) first[h][i] = u16((2 * h + i / 16) * 8);
            less[i] = steps[m];
            column[i] = u16(steps[m] | more | (i & 8) << 12);
        }
        for (int i = 0; i < 64; i++) apart[i] = bits[i % 8];
    }
};
static constexpr NvOrder NV_ORDER;
// At least the first `lanes` of 16 blocks whose words `of` gives, with 1 and with 1.5.
INLINE void nv_strip_of_words(__m512i of, const u8* codes, u16* y, int lanes, bool stream) {
    const __m512i apart = _mm512_load_si512(NV_ORDER.apart), magnitude = _mm512_set1_epi16(7),
                  sign = _mm512_set1_epi16(short(0x8000));
#pragma GCC unroll 4
    for (int g = 0; 4 * g < lanes; g++) {
        __builtin_prefetch(codes + 32 * g + AHEAD);
        // The magnitudes of four blocks.
        const __m512i words =
            _mm512_subs_epu16(_mm512_permutexvar_epi16(_mm512_load_si512(NV_ORDER.block[g]), of),
                              _mm512_load_si512(NV_ORDER.less));
        for (int h = 0; h < 2; h++) {
            // Each code in the low bits of a word and its sign in the highest.
            const __m512i w = _mm512_multishift_epi64_epi8(
                apart, _mm512_cvtepu8_epi32(load<__m128i>(codes + 32 * g + 16 * h)));
            const __m512i at =
                _mm512_ternarylogic_epi32(_mm512_load_si512(NV_ORDER.first[h]), w, magnitude, 0xf8);
            const __m512i v = _mm512_ternarylogic_epi32(_mm512_permutexvar_epi16(at, words), w, sign, 0xf8);
            store_bytes((u8*)(y + 64 * g + 32 * h), (VB)v, stream);
        }
    }
}
// For columns: words in order, those of 1.5 with their last bit raised by one, which NvOrder.column takes
// away with the step.
struct NvColumns {
    __m512i one[8], more[8];
    bool fit;
    INLINE __m512i raised(__m512i w) {
        return _mm512_mask_add_epi16(w, _mm512_test_epi16_mask(w, w), w, _mm512_set1_epi16(1));
    }
    // Factors in the lanes' order (simd.h).
    void fill(i64 cols, const VF* factors, const VF* global) {
        fit = cols <= 256;
        for (i64 v = 0; fit && v < (cols + 63) / 64 * 4; v += 2) {
            const VF even = factors[v] * global[v], odd = factors[v + 1] * global[v + 1];
            const VF more_even = factors[v] * all(1.5f) * global[v],
                     more_odd = factors[v + 1] * all(1.5f) * global[v + 1];
            fit = nv_fit(even) && nv_fit(odd);
            one[v / 2] = pairs(even, odd);
            more[v / 2] = raised(pairs(more_even, more_odd));
        }
    }
    INLINE __m512i pairs(VF even, VF odd) {
        const VI w = (VI)((VU)to_bfloat16_bits((VI)even) >> 16) | to_bfloat16_bits((VI)odd);
        return _mm512_add_epi16((__m512i)w, _mm512_set1_epi16(FOUR_TIMES));
    }
    // Codes of E4M3 with one second factor.
    void fill(i64 cols, const u8* codes, const NvTable& t) {
        fit = cols <= 256 && t.fit;
        for (i64 k = 0; fit && k < cols; k += 32) {
            const __m512i c = _mm512_cvtepu8_epi16(
                _mm256_maskz_loadu_epi8(cols - k < 32 ? (1u << (cols - k)) - 1 : ~0u, codes + k));
            fit = _mm512_cmpge_epu16_mask(c, _mm512_set1_epi16(0x7f)) == 0;
            one[k / 32] = NvTable::of(t, c, _mm512_setzero_si512());
            more[k / 32] = raised(NvTable::of(t, c, _mm512_set1_epi16(16)));
        }
    }
};
INLINE __m512i nv_column_words(__m512i code, __m512i one, __m512i more) {  // the low four bits of each word
    const __m512i less = _mm512_permutexvar_epi16(code, _mm512_load_si512(NV_ORDER.column));
    const __m512i base = _mm512_mask_mov_epi16(one, _mm512_test_epi16_mask(less, _mm512_set1_epi16(1)), more);
    const __m512i v = _mm512_subs_epu16(base, _mm512_and_si512(less, _mm512_set1_epi16(0x7fff)));
    return _mm512_ternarylogic_epi32(v, less, _mm512_set1_epi16(short(0x8000)), 0xf8);
}
// n columns of two rows that share bytes; the second one is null where there is none.
INLINE void nv_two_rows(const NvColumns& q, const u8* codes, i64 n, u16* first, u16* second, bool stream) {
    i64 i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m512i c = _mm512_cvtepu8_epi16(load<__m256i>(codes + i));
        store_bytes((u8*)(first + i), (VB)nv_column_words(c, q.one[i / 32], q.more[i / 32]), stream);
        if (second)
            store_bytes((u8*)(second + i),
                        (VB)nv_column_words(_mm512_srli_epi16(c, 4), q.one[i / 32], q.more[i / 32]), stream);
    }
    if (i == n) return;
    const __mmask32 real = (1u << (n - i)) - 1;
    const __m512i c = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(real, codes + i));
    _mm512_mask_storeu_epi16(first + i, real, nv_column_words(c, q.one[i / 32], q.more[i / 32]));
    if (second)
        _mm512_mask_storeu_epi16(second + i, real,
                                 nv_column_words(_mm512_srli_epi16(c, 4), q.one[i / 32], q.more[i / 32]));
}
template <class D>
INLINE void nv_blocks(VF factor, VF global, int block, const u8* codes, u16* y, bool stream) {
    const __m512i pair = _mm512_add_epi32(
        _mm512_srli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 3),
        _mm512_set1_epi32(block));
    VF v[2];
    for (int h = 0; h < 2; h++) {
        const __m512i at = _mm512_add_epi32(pair, _mm512_set1_epi32(2 * h));
        v[h] = load<VF>(MAGNITUDES.grid) * (VF)_mm512_permutexvar_ps(at, (__m512)factor) *
               (VF)_mm512_permutexvar_ps(at, (__m512)global);
    }
    const __m512i words = words_of<D>(v[0], v[1]), magnitude = _mm512_set1_epi16(7),
                  sign = _mm512_set1_epi16(short(0x8000));
    for (int h = 0; h < 2; h++) {
        const __m512i byte = _mm512_cvtepu8_epi32(load<__m128i>(codes + 16 * h));
        const __m512i code =
            _mm512_or_si512(byte, _mm512_slli_epi32(byte, 12));  // one in the low bits of each word
        const __m512i at =
            _mm512_ternarylogic_epi32(_mm512_load_si512(MAGNITUDES.first[h]), code, magnitude, 0xf8);
        // Not "or": the factor may be negative.
        const __m512i w = _mm512_ternarylogic_epi32(_mm512_permutexvar_epi16(at, words),
                                                    _mm512_slli_epi16(code, 12), sign, 0x78);
        store_bytes((u8*)(y + 32 * h), (VB)w, stream);
    }
}

// Rotated blocks of NVFP4, 16 at a time, each in a lane of its own (avx512_rotation.h), rotated back; half:
// codes 0 .. 7 and 8 .. 15 of each. False where a block is all zeros, whose signs would count, or factors are
// not of the usual size.
INLINE bool back_in_lanes(const __m512i half[2], VF factor, VF global, bool signs, VF s[NV]) {
    const VI nonzero = (VI)_mm512_and_si512(_mm512_or_si512(half[0], half[1]), _mm512_set1_epi32(0x77777777));
    // Products are normal, and so are all sums.
    const VI fits = (VI)(factor >= all(0x1p-9f)) & (VI)(global >= all(0x1p-80f)) &
                    (VI)(global <= all(0x1p80f)) & (VI)(nonzero != all(0));
    if (any(~fits)) return false;
    const __m512 grid = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    VF v[NV];
#pragma GCC unroll 16
    for (int k = 0; k < NV; k++)
        v[k] = (VF)_mm512_permutexvar_ps(_mm512_srli_epi32(half[k / 8], 4 * (k % 8)), grid) * factor *
               (global * all(0.25f));
    add_up<0>(v, s);
    // What is not all zeros adds up to +0 or to a value with a sign, as its opposite does.
    for (int j = 0; signs && j < NV; j++)
        if (SIGN_MASK >> j & 1) s[j] = all(0.0f) - s[j];
    return true;
}
template <class D>
INLINE bool rotated_back(const u8* codes, VF factor, VF global, bool signs, typename D::T* y) {
    const __m512i a = load<__m512i>(codes), b = load<__m512i>(codes + 64);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i half[2] = {_mm512_permutex2var_epi32(a, even, b),
                             _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b)};
    VF s[NV];
    if (!back_in_lanes(half, factor, global, signs, s)) return false;
    if constexpr (D::id == BF16) {
        __m512i d[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            d[i] = (__m512i)((VI)((VU)(VI)rounded_to<D>(s[2 * i]) >> 16) | (VI)rounded_to<D>(s[2 * i + 1]));
        transpose_parts<float, 4>(d);
        transpose_parts<float, 4>(d + 4);
        // Lane i of 128 bits of d[c] and d[4 + c]: the halves of block 4 i + c.
        alignas(64) u16 blocks[W * NV];
        for (int c = 0; c < 4; c++)
            for (int h = 0; h < 2; h++) {
                const __m512i w = d[4 * h + c];
                store(blocks + c * NV + 8 * h, _mm512_castsi512_si128(w));
                store(blocks + (4 + c) * NV + 8 * h, _mm512_extracti32x4_epi32(w, 1));
                store(blocks + (8 + c) * NV + 8 * h, _mm512_extracti32x4_epi32(w, 2));
                store(blocks + (12 + c) * NV + 8 * h, _mm512_extracti32x4_epi32(w, 3));
            }
        memcpy(y, blocks, sizeof blocks);
    } else {
        __m512i z[NV];
        for (int j = 0; j < NV; j++) z[j] = (__m512i)s[j];
        transpose_lanes(z);
        for (int i = 0; i < NV; i++) {
            if constexpr (D::id == F16)
                store(y + NV * i, to_half((VF)z[i]));
            else
                store(y + NV * i, z[i]);
        }
    }
    return true;
}
// 128 rows of as many columns as fill a line of memory, of which the codes lie transposed. stored: their
// factors, a line for 16 rows.
template <class D>
INLINE bool rotated_rows_back(const u8* codes, i64 stride, const u8* stored, VF global, bool signs,
                              typename D::T* y, i64 ld, bool stream) {
    constexpr int parts = D::id == F32 ? 1 : 2;
    __m512i z[parts][NV];
    for (int p = 0; p < parts; p++) {
        for (int i = 0; i < W; i++) z[p][i] = load<__m512i>(codes + (p * W + i) * stride);
        transpose_lanes(z[p]);  // two dwords are a block
    }
    for (int b = 0; b < 8; b++) {
        VF s[parts][NV];
        for (int p = 0; p < parts; p++) {
            const VI c = widen(stored + (b * parts + p) * W);
            if (any(c >= all(0x7f))) return false;
            const VF small = __builtin_convertvector(c, VF) * all(0x1p-9f),
                     factor = c < all(8) ? small : (VF)((c << 20) + all(120 << 23));
            if (!back_in_lanes(z[p] + 2 * b, factor, global, signs, s[p])) return false;
        }
        for (int j = 0; j < NV; j++) {
            typename D::T* to = y + (b * NV + j) * ld;
            if constexpr (D::id == F32)
                store_bytes((u8*)to, (VB)s[0][j], stream);
            else if constexpr (D::id == BF16)
                store_bytes((u8*)to, high_halves((VI)rounded_to<D>(s[0][j]), (VI)rounded_to<D>(s[1][j])),
                            stream);
            else
                store_bytes((u8*)to, (VB)words_of<D>(s[0][j], s[1][j]), stream);
        }
    }
    return true;
}
#endif

}  // namespace QT_NAMESPACE
