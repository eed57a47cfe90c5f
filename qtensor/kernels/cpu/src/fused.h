// Fused multiply-add of vectors on every CPU.
#pragma once
#include "simd.h"
#ifdef __aarch64__
#include <arm_neon.h>
#endif

namespace QT_NAMESPACE {

// a * b + c in one rounding.
INLINE VF fused(VF a, VF b, VF c) {
#if QT_ISA == 512
    return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif QT_ISA == 2
    return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    struct Halves {
        float32x4_t low, high;
    };
    const Halves x = bits<Halves>(a), y = bits<Halves>(b), z = bits<Halves>(c);
    return bits<VF>(Halves{vfmaq_f32(z.low, x.low, y.low), vfmaq_f32(z.high, x.high, y.high)});
#elif defined(__FMA__)
    for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    // The product is exact in float64. The sum is rounded to odd there, so that the second rounding is that
    // of the exact sum.
    typedef double VD __attribute__((vector_size(W * 8)));
    typedef i64 VL __attribute__((vector_size(W * 8)));
    const VD product = __builtin_convertvector(a, VD) * __builtin_convertvector(b, VD);
    const VD addend = __builtin_convertvector(c, VD), sum = product + addend, other = sum - product;
    const VD error = (product - (sum - other)) + (addend - other);
    const VL inexact = (error > 0.0) | (error < 0.0), even = ((VL)sum & 1) - 1;
    const VL away = ((error > 0.0) ^ (sum < 0.0)) | 1;  // -1: to larger magnitudes
    return __builtin_convertvector((VD)((VL)sum - (inexact & even & away)), VF);
#endif
}

}  // namespace QT_NAMESPACE
