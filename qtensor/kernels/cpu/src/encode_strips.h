// W blocks that lie side by side: their maxima, and their codes once their factors are known.
#pragma once
#include "block_strips.h"
#include "nvfp4.h"

namespace QT_NAMESPACE {

// Where element `at` of a strip lies, whose blocks begin `stride` apart: one behind the other but for those
// of many groups.
template <int B>
INLINE i64 place(int at, i64 stride) {
    return B > GROUP ? at / B * stride + at % B : at;
}

template <class D, int B>
INLINE VI strip_maxima(const typename D::T* x, i64 stride = B) {
#if QT_ISA == 512
    if constexpr (D::id == BF16) return maxima_of_pairs<B>(x, stride);
#endif
    VI m[W];
    for (int b = 0; b < W; b++) {
        const typename D::T* p = x + b * stride;
        if (D::pairs && B * 2 % (W * 4) == 0) {
            VH h = load<VH>(p) & (VH)all(0x7fff7fff);
            for (int i = 1; i < B / (2 * W); i++) {
                VH next = load<VH>(p + i * 2 * W) & (VH)all(0x7fff7fff);
                h = h > next ? h : next;
            }
            m[b] = max((VI)h << 16, (VI)h & all(i32(0xffff0000)));
        } else {
            m[b] = D::one(p) & all(ABS);
            for (int i = W; i < B; i += W) m[b] = max(m[b], D::one(p + i) & all(ABS));
        }
    }
    return column_max(m);
}

// Which bit of a group's number tells the second half of what LineQuantizer takes of a line at once.
template <int B>
constexpr int SECOND_HALF = W * B / GROUP / 2;

// The factor of every lane of vector j of the group that starts at element `at` of a strip.
template <class D, int B>
INLINE VF spread(const float* factors, int at, int j) {
    if (D::pairs && 2 * W > B) {
        const int b = (at + j / 2 * 2 * W) / B;  // two blocks in a vector
#if QT_ISA == 512
        return (VF)_mm512_mask_broadcastss_ps((__m512)all(factors[b]), 0xff00, _mm_load_ss(factors + b + 1));
#else
        VF f = all(factors[b]);
        for (int i = W / 2; i < W; i++) f[i] = factors[b + 1];
        return f;
#endif
    }
    int element = D::pairs ? j / 2 * 2 * W : j * W;
    return all(factors[(at + element) / B]);
}

template <class E, int Codes>
INLINE void store_codes(u8* out, VB codes, bool stream) {
    if (Codes == 1)
        store_bytes(out, codes, stream);
    else if (Codes == 2)
        store_nibbles(out, codes);
    else
        store_quads(out, codes);
}

// GROUP elements times their factors to codes, one a byte.
template <class D, class E, bool Safe, bool Unsigned>
INLINE VB encode_group(const typename D::T* x, const VF f[4]) {
#if QT_ISA == 512
    if constexpr (!Safe && !Unsigned) return codes_of_products<D, E>(x, f);
#endif
    VI v[4], c[4];
    D::group(x, v);
#if QT_ISA == 512
    if constexpr (E::width == 4 && Unsigned && !Safe) {
        for (int j = 0; j < 4; j++) c[j] = e2m1_index<false>((VF)v[j] * f[j]);
        return in_order<D::pairs>(e2m1_codes(packed_bytes<D::pairs>(c)));
    }
#endif
    for (int j = 0; j < 4; j++) c[j] = encode<E, Safe, Unsigned>((VF)v[j] * f[j]);
    return pack<D::pairs>(c);
}

// Elements that are asked for little by little, while as many others are encoded: many at once would fill the
// queue for misses, and the others would wait for memory.
template <class T>
struct Soon {
    const T* x;
    int count;
    ALWAYS_INLINE void ask(int at) const {
        if (at < count) prefetch(x + at, 1, 0, GROUP * i64(sizeof(T)));
    }
};

// W blocks, nearest rounding.
template <class D, class E, int B, int Codes, bool Safe>
INLINE void encode_strip(const typename D::T* x, const float* factors, u8* out, bool stream, i64 stride = B,
                         i64 out_stride = B, const Soon<typename D::T>& soon = {}) {
    for (int at = 0; at < W * B; at += GROUP) {
        soon.ask(at);
        VF f[4];
        for (int j = 0; j < 4; j++) f[j] = spread<D, B>(factors, at, j);
        VB codes = encode_group<D, E, Safe, B == NV>(x + place<B>(at, stride), f);
        store_codes<E, Codes>(out + place<B>(at, out_stride) * (Codes == 4 ? 3 : 1) / Codes, codes, stream);
    }
}

#if QT_ISA == 512
// 4-bit codes of W blocks, but for MX of bfloat16.
template <class D, class E, int B, int Codes>
INLINE bool encode_small(const typename D::T* x, VI amax, VF encode, u8* out, bool stream,
                         const Soon<typename D::T>& soon = {}) {
    if constexpr (E::width == 4 && (B == NV || !D::pairs)) {
        if (!fits_quarters<D, B == MX>(amax, encode)) return false;
        const VF factors = encode * all(4.0f);
        alignas(64) float in_memory[W];
        store(in_memory, factors);
        asm("" : "+m"(in_memory));  // or GCC would shuffle what a load broadcasts for nothing
        for (int at = 0; at < W * B; at += 2 * GROUP) {
            VB codes[2];
            for (int h = 0; h < 2; h++) {
                const int g = at / GROUP + h;
                soon.ask(g * GROUP);
                VF f[4];
                for (int j = 0; j < 4; j++)
                    if constexpr (D::pairs)
                        f[j] = (VF)_mm512_permutexvar_ps(_mm512_load_si512(SPREAD<D>.block[g][j / 2 * 2]),
                                                         (__m512)factors);
                    else
                        f[j] = all(in_memory[(g * GROUP + j * W) / B]);
                codes[h] = quarters_group<D, B == MX>(x + g * GROUP, f);
            }
            store_bytes(out + at / Codes, nibbles_of<D::pairs>(codes[0], codes[1]), stream);
        }
        return true;
    }
    return false;
}

// The same for bfloat16 with factors 2^(127 - code), where every code allows it.
template <class D, class E, int B, int Codes>
INLINE bool encode_pow2(const typename D::T* x, VI encode, u8* out, bool stream, i64 stride, i64 out_stride,
                        const Soon<typename D::T>& soon) {
    if constexpr (D::id == BF16 && B >= 2 * W) {
        VI code = all(254) - (VI)((VU)encode >> 23);
        if (any(code < all(LEAST_CODE<E>))) return false;
        if constexpr (E::width < 8) {
            constexpr int groups = Codes == 2 ? 2 : 1;
            alignas(64) i32 of_block[W];
            store(of_block, (VI)((VU)(code + all(LEAST_PLACE<E>)) * (VU)all(0x01000100)));
            asm("" : "+m"(of_block));  // as above
#pragma GCC unroll 1
            for (int at = 0; at < W * B; at += groups * GROUP) {
                VB codes[groups];
                for (int h = 0; h < groups; h++) {
                    const int block = at / B + 2 * h;
                    soon.ask(at + h * GROUP);
                    const __m512i bases[2] = {_mm512_set1_epi32(of_block[block]),
                                              _mm512_set1_epi32(of_block[block + 1])};
                    codes[h] = place_group<E>(x + at + h * GROUP, bases);
                }
                if constexpr (Codes == 2)
                    store_bytes(out + at / 2, nibbles_of<true>(codes[0], codes[1]), stream);
                else
                    store_codes<E, Codes>(out + at * (Codes == 4 ? 3 : 1) / Codes, in_order<true>(codes[0]),
                                          stream);
            }
            return true;
        }
        const __m512i bases =
            _mm512_castsi128_si512(_mm512_cvtepi32_epi8((__m512i)(code + all(base_of<E>(0)))));
        for (int at = 0; at < W * B; at += GROUP) {
            soon.ask(at);
            const __m512i block = B == MX ? _mm512_load_si512(BYTES.block[at / GROUP % 8]) : bytes_of(at / B);
            const __m512i base = _mm512_permutexvar_epi8(block, bases);
            VB codes = pow2_group<E>(x + place<B>(at, stride), base);
            store_codes<E, Codes>(out + place<B>(at, out_stride) * (Codes == 4 ? 3 : 1) / Codes, codes,
                                  stream);
        }
        return true;
    }
    return false;
}
#endif

}  // namespace QT_NAMESPACE
