// Factors from maxima, and where they are stored.
#pragma once
#include <cfloat>

#include "element_codes.h"

namespace QT_NAMESPACE {

// Where the factors of one direction are stored. Blocks run along lines: rows, or columns for columnwise
// data.
struct ScaleLayout {
    u8* base;
    i64 line_stride, block_stride;  // in factors
    i64 tiles;                      // 128x4 tiles a row of tiles; 0 = plain
    int size;                       // bytes of a factor
    int shift;                      // 2^shift lines share a stored factor

    // Index of the factor of a block of a line.
    ALWAYS_INLINE i64 at(i64 line, i64 block) const {
        if (!tiles) return (line >> shift) * line_stride + block * block_stride;
        const i64 tile = (line >> 7) * tiles + (block >> 2);
        return tile * 512 + (line & 31) * 16 + (line >> 5 & 3) * 4 + (block & 3);
    }
    void put(i64 line, i64 block, i32 factor) const {
        const i64 i = at(line, block);
        if (size == 1)
            base[i] = u8(factor);
        else
            ((i32*)base)[i] = factor;
    }
};

// Factors of W blocks.
struct BlockFactors {
    VF encode;
    VI stored;  // codes, or the bits of a float
};

// amax: bits of the blocks' maxima, INF_BITS or more where a block has a value that is not finite.
INLINE VI e8m0_code(VI amax, const CQuantizer& p, i32 max_bits, i32 mantissa) {
    VI finite = amax < all(INF_BITS);
    VI code;
    if (p.mode == RCEIL) {
        // Any mantissa bit of amax / max carries into its exponent. It has one where the mantissa of amax is
        // the larger, since no quotient rounds to a power of two; that can happen below 2^-126 alone, where
        // what is at most 2^-127 counts as 0.
        const i32 top = (max_bits >> 23) - 127, fraction = max_bits & 0x7fffff;
        code = max((VI)(((VU)amax + (VU)all(0x7fffff - fraction)) >> 23) - all(top), all(0));
        if (any((VI)((VU)amax - (VU)all(1) < (VU)all((top + 3) << 23)))) {
            VI r = (VI)((VF)amax / all(bits<float>(max_bits)));
            r = r > all(0x00400000) ? r : all(0);
            code = (VI)(((VU)r + (VU)all(0x7fffff)) >> 23);
        }
    } else {
        i32 bias = 1 << (22 - mantissa);  // EVEN
        if (p.mode == FLOOR) bias = 0;
        if (p.mode == CEIL) bias = 0x7fffff;
        i32 top = (max_bits >> 23) - 127;
        code = max((VI)(((VU)amax + (VU)all(bias)) >> 23) - all(top), all(0));
    }
    return finite ? code : all(255);
}
// 2^(127 - code); 254 gives a subnormal, 255 NaN.
INLINE VI e8m0_encode_bits(VI code) {
    VI f = (all(254) - code) << 23;
    f = code == all(254) ? all(0x00400000) : f;
    return code == all(255) ? all(0x7fc00000) : f;
}
INLINE i32 e8m0_decode_bits(u32 code) {
    if (code == 255) return 0x7fc00000;
    return code == 0 ? 0x00400000 : i32(code << 23);
}

// max / amax, 1 where amax is 0 or not finite.
INLINE VF fp8_scale(VI amax, float element_max, const CQuantizer& p, float overflow) {
    VF a = (VF)amax;
    VI nan = amax > all(INF_BITS);
    if (p.epsilon > 0) a = (VI)(a < all(p.epsilon)) ? all(p.epsilon) : a;
    VI known = ((VI)a > all(0)) & ((VI)a < all(INF_BITS));
    a = known & ~nan ? a : all(element_max);
    VF s = all(element_max) / a;
    s = (VI)s >= all(INF_BITS) ? all(overflow) : s;
    if (p.pow2) s = (VF)((VI)s & all(INF_BITS));
    return s;
}

// The second level of NVFP4 for one line or the whole tensor: S, S / 6 in float32, 1 / S.
struct GlobalScale {
    float amax, scale, sixth, inverse;
};
INLINE GlobalScale nvfp4_global(float amax, float e4m3_max) {
    float top = e4m3_max * 6.0f;
    float s = top / (amax <= 0 ? top : amax);
    if (s > FLT_MAX) s = FLT_MAX;
    return {amax, s, s * (1.0f / 6.0f), 1.0f / s};
}
INLINE VF clamp_finite(VF v) { return (VI)(v > all(FLT_MAX)) ? all(FLT_MAX) : v; }
// E4M3 code of v >= 0 and the factor that encodes a block which stores it.
INLINE BlockFactors nvfp4_factors(VF v, VF inverse) {
    VI a = min((VI)v, all(FE4M3::max_bits));
    VI code = magnitude_code<FE4M3>(a);
    // The code's value: the rounded sum of magnitude_code less what was added, which is exact.
    VI e = max(a & all(INF_BITS), all(FE4M3::min_exponent << 23));
    VF c = (VF)(e + all(20 << 23));
    VF value = ((VF)a + c) - c;
    return {clamp_finite(all(1.0f) / (value * inverse)), code};
}

}  // namespace QT_NAMESPACE
