// What only NVFP4 has: the rotation, stochastic rounding and the choice of two block factors. All work on W
// blocks of 16 floats a line.
#pragma once
#include "avx512_rotation.h"

namespace QT_NAMESPACE {

constexpr int MX = 32;

// ---- rotation
// W blocks of 16: x (W, 16) @ H16 / 4, with the signs on what comes in, or, on the way back, on all that an
// output adds up: a sum of 0 has no sign to turn. The sums run over k = 0 .. 15 one by one, as those of the
// reference do; each lane is a block, and equal beginnings of sums are added up once.
template <int Rows, int Cols>
INLINE void transpose_blocks(const float* x, float* y) {
#if QT_ISA == 512
    transpose_squares<float>(x, Cols, y, Rows, false);
#else
    transpose<float>(x, Cols, y, Rows, Rows, Cols);
#endif
}
template <bool Signs, bool Back>
static void rotate_blocks(const float* x, float* y) {
    alignas(64) float t[NV * W];
    transpose_blocks<W, NV>(x, t);
    VF v[NV];
#pragma GCC unroll 16
    for (int k = 0; k < NV; k++)
        v[k] = load<VF>(t + k * W) * all(Signs && !Back && (SIGN_MASK >> k & 1) ? -0.25f : 0.25f);
#pragma GCC unroll 16
    for (int j = 0; j < NV; j++) {
        const bool negative = Signs && Back && (SIGN_MASK >> j & 1);
        VF sum = negative ? -v[0] : v[0];
#pragma GCC unroll 16
        for (int k = 1; k < NV; k++)
            sum = (__builtin_parity(unsigned(k & j)) != 0) != negative ? sum - v[k] : sum + v[k];
        store(t + j * W, sum);
    }
    transpose_blocks<NV, W>(t, y);
}
template <bool Back>
static void rotate(float* x, bool signs) {
    if (signs)
        rotate_blocks<true, Back>(x, x);
    else
        rotate_blocks<false, Back>(x, x);
}
INLINE VF flush_subnormals(VF v) { return ((VI)v & all(ABS)) < all(0x00800000) ? all(0.0f) : v; }
// W blocks to floats without NaN (0) or inf (the largest finite), rotated if asked.
template <class D>
static void to_finite(const typename D::T* x, float* y, bool rotated, Rotation how) {
#if QT_ISA == 512
    VF s[NV];
    VI amax;
    if (rotated && rotated_lanes<D>(x, how, s, amax)) return blocks_of_lanes<D::pairs>(s, AFTER<D>, y);
#endif
    for (int i = 0; i < W * NV; i += W) {
        VF v = (VF)D::one(x + i);
        store(y + i, rotated && D::id == BF16 ? flush_subnormals(v) : v);
    }
    if (rotated) rotate<false>(y, how.signs);
    for (int i = 0; i < W * NV; i += W) {
        VF v = load<VF>(y + i);
        if (rotated) v = round_to<D>(v, how.half);
        if (rotated && D::id == BF16) v = flush_subnormals(v);
        VI u = (VI)v, a = u & all(ABS), sign = u & ~all(ABS);
        a = a == all(INF_BITS) ? all(INF_BITS - 1) : a;
        store(y + i, (VF)(a > all(INF_BITS) ? all(0) : a | sign));
    }
}

// Codes one a byte to stored codes.
template <int Codes>
INLINE void pack_all(const u8* codes, u8* out) {
    for (int at = 0; at < W * NV; at += GROUP) {
        VB c = load<VB>(codes + at);
        if (Codes == 2)
            store_nibbles(out + at / 2, c);
        else
            store(out + at, c);
    }
}

// ---- stochastic rounding
constexpr u32 PHILOX[2] = {0xD2511F53u, 0xCD9E8D57u}, WEYL[2] = {0x9E3779B9u, 0xBB67AE85u};
// The keys of the ten rounds.
struct PhiloxKeys {
    u32 of[10][2];
    PhiloxKeys(i64 seed) {
        for (u32 r = 0; r < 10; r++) {
            of[r][0] = u32(seed) + r * WEYL[0];
            of[r][1] = u32(uint64_t(seed) >> 32) + r * WEYL[1];
        }
    }
};
#if QT_ISA == 512
// Philox4x32-10: 16 bytes for each of W counters, in two vectors side by side. Numbers of 32 bits lie in the
// low halves of lanes of 64, as the multiplier takes them; what the high halves hold does not count.
INLINE void philox(const i64 counter[W], int stream, const PhiloxKeys& keys, u8* out) {
    const __m512i p0 = _mm512_set1_epi64(PHILOX[0]), p1 = _mm512_set1_epi64(PHILOX[1]);
    __m512i c[2][4];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        // The last step writes lanes 0, 2, 4, 6 before the others.
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        c[h][0] = _mm512_permutexvar_epi64(order, load<__m512i>(counter + 8 * h));
        c[h][1] = _mm512_srli_epi64(c[h][0], 32);
        c[h][2] = _mm512_setzero_si512();
        c[h][3] = _mm512_set1_epi32(stream);
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const __m512i k0 = _mm512_set1_epi32(i32(keys.of[round][0])),
                      k1 = _mm512_set1_epi32(i32(keys.of[round][1]));
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const __m512i a = _mm512_mul_epu32(c[h][0], p0),
                          b = round ? _mm512_mul_epu32(c[h][2], p1) : _mm512_setzero_si512();
            c[h][0] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(b, 32), c[h][1], k0, 0x96);
            c[h][2] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(a, 32), c[h][3], k1, 0x96);
            c[h][1] = b;
            c[h][3] = a;
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const __m512i low = _mm512_mask_shuffle_epi32(c[h][0], 0xaaaa, c[h][1], _MM_PERM_ENUM(0xa0));
        const __m512i high = _mm512_mask_shuffle_epi32(c[h][2], 0xaaaa, c[h][3], _MM_PERM_ENUM(0xa0));
        store(out + 128 * h, _mm512_unpacklo_epi64(low, high));
        store(out + 128 * h + 64, _mm512_unpackhi_epi64(low, high));
    }
}
#else
// Both halves of products of 32 bits.
struct WideProducts {
    VU low, high;
};
INLINE WideProducts products(VU a, u32 b) {
#if QT_ISA == 2
    const __m256i k = _mm256_set1_epi32(i32(b)), v = (__m256i)a;
    const __m256i even = _mm256_mul_epu32(v, k), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), k);
    return {(VU)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa),
            (VU)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa)};
#else
    WideProducts p;
    for (int i = 0; i < W; i++) {
        const uint64_t full = uint64_t(a[i]) * b;
        p.low[i] = u32(full);
        p.high[i] = u32(full >> 32);
    }
    return p;
#endif
}
// Philox4x32-10: 16 bytes for each of W counters.
INLINE void philox(const i64 counter[W], int stream, const PhiloxKeys& keys, u8* out) {
    u32 low[W], high[W], words[4][W];
    for (int b = 0; b < W; b++) {
        low[b] = u32(counter[b]);
        high[b] = u32(uint64_t(counter[b]) >> 32);
    }
    VU c0 = load<VU>(low), c1 = load<VU>(high), c2{}, c3 = (VU)all(stream);
    for (int round = 0; round < 10; round++) {
        const WideProducts a = products(c0, PHILOX[0]), b = products(c2, PHILOX[1]);
        c0 = b.high ^ c1 ^ (VU)all(i32(keys.of[round][0]));
        c2 = a.high ^ c3 ^ (VU)all(i32(keys.of[round][1]));
        c1 = b.low;
        c3 = a.low;
    }
    store(words[0], c0);
    store(words[1], c1);
    store(words[2], c2);
    store(words[3], c3);
    for (int b = 0; b < W; b++)
        for (int k = 0; k < 4; k++) memcpy(out + b * NV + 4 * k, &words[k][b], 4);
}
#endif
// 16 random bytes for each of W blocks, whose first elements have the numbers `element`.
INLINE void noise(const i64 element[W], int stream, const PhiloxKeys& keys, u8* bytes) {
    alignas(64) i64 group[W];
    i64 within = 0;
    for (int b = 0; b < W; b++) {
        within |= element[b];
        group[b] = element[b] >> 4;
    }
    philox(group, stream, keys, bytes);
    if ((within & 15) == 0) return;
    alignas(64) u8 next[W * NV];
    for (int b = 0; b < W; b++) group[b]++;
    philox(group, stream, keys, next);
    for (int b = 0; b < W; b++) {
        u8 both[2 * NV];
        memcpy(both, bytes + b * NV, NV);
        memcpy(both + NV, next + b * NV, NV);
        memcpy(bytes + b * NV, both + (element[b] & 15), NV);
    }
}
// Codes of W blocks, rounded up with a probability equal to the distance from the lower neighbour.
INLINE void encode_stochastic(const float* x, const float* factors, const u8* random, u8* codes) {
    for (int i = 0; i < W * NV; i += W) {
        VF y = load<VF>(x + i) * all(factors[i / NV]);
        VF a = (VF)min((VI)y & all(ABS), all(FE2M1::max_bits));
        VF step = a < all(4.0f) ? all(1.0f) : all(2.0f);
        step = a < all(2.0f) ? all(0.5f) : step;
        VF r = __builtin_convertvector(widen(random + i), VF) * all(1.0f / 256.0f);
        VF raised = a + r * step;
        // Cut off: from 1 on, exponent and one bit of fraction are the code; below, 0.5 is 1.
        VI code = max((VI)((VU)(VI)raised >> 22) - all(252), (VI)(raised >= all(0.5f)) & all(1));
        code = code | ((VI)(y < all(0.0f)) & all(8));
        narrow(codes + i, code);
    }
}

// ---- 4over6
// Code and value of y on the grid of E2M1; 0 has no sign.
INLINE void round_e2m1(VF y, VI& code, VF& value) {
    VI u = (VI)y, a = min(u & all(ABS), all(FE2M1::max_bits));
    VF c = (VF)(max(a & all(INF_BITS), all(FE2M1::min_exponent << 23)) + all(22 << 23));
    code = magnitude_code<FE2M1>(a) | sign_code<FE2M1, true>(y);
    value = (VF)((VI)(((VF)a + c) - c) | (u & ~all(ABS)));
}
// W blocks of `rows` x 16 (the lines `stride` floats apart): codes one a byte and the stored factors. Lanes
// are blocks. Errors are summed in one order: the 16 columns, then rows by halves.
static inline VI encode_4over6(const float* x, int rows, i64 stride, u8* codes, i64 code_stride,
                               const CQuantizer& p, VI amax, VF A, VF scale, VF inverse) {
    VF base = (VF)amax / all(6.0f) * scale;
    VF divisor = all(6.0f * p.e4m3_max);
    BlockFactors f[2] = {nvfp4_factors(base, inverse), nvfp4_factors(base * all(1.5f), inverse)};
    VF stored[2];
    for (int k = 0; k < 2; k++) {
        for (int b = 0; b < W; b++) stored[k][b] = table<FE4M3>().value[f[k].stored[b]];
    }
    alignas(64) float t[NV * W];
    static thread_local VI both[2][NV * NV];
    VF errors[2][NV];
    for (int r = 0; r < rows; r++) {
        transpose<float>(x + r * stride, NV, t, W, W, NV);
        for (int k = 0; k < 2; k++)
            for (int e = 0; e < NV; e++) {
                VF v = load<VF>(t + e * W), value;
                round_e2m1(v * f[k].encode, both[k][r * NV + e], value);
                VF d = value * stored[k] * A / divisor - v;
                VF term = p.squared_error ? d * d : (VF)((VI)d & all(ABS));
                errors[k][r] = e ? errors[k][r] + term : term;
            }
    }
    for (int half = rows / 2; half; half /= 2)
        for (int k = 0; k < 2; k++)
            for (int r = 0; r < half; r++) errors[k][r] = errors[k][r] + errors[k][r + half];
    VI to_4 = (VI)(errors[1][0] < errors[0][0]);
    for (int r = 0; r < rows; r++) {
        u8 transposed[NV * W];
        for (int e = 0; e < NV; e++)
            narrow(transposed + e * W, to_4 ? both[1][r * NV + e] : both[0][r * NV + e]);
        transpose<u8>(transposed, W, codes + r * code_stride, NV, NV, W);
    }
    return to_4 ? f[1].stored : f[0].stored;
}

}  // namespace QT_NAMESPACE
