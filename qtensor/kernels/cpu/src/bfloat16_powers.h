// Words of bfloat16 times powers of two: added to exponents, where that is the same.
#pragma once
#include "nvfp4.h"

namespace QT_NAMESPACE {

// Factors that are not positive powers of two which keep every value of an element normal.
template <class E>
INLINE VI unfit_exponents(VI factor) {
    const VI least = all((1 + 127 - (E::min_exponent - E::mantissa)) << 23),
             most = all((254 + 127 - (E::max_bits >> 23)) << 23);
    return (VI)(factor < least) | (VI)(factor > most) | (VI)((factor & all(0x7fffff)) != all(0));
}
template <class E>
INLINE bool fits_exponents(VI factor) {
    return !any(unfit_exponents<E>(factor));
}
INLINE VI exponent_steps(VI factor) {
    return (factor >> 16) - all(127 << 7);
}  // what is added to a bfloat16, in the low halves

// Zeros, infinities and NaN stay.
template <class E>
INLINE VH with_exponent(VH words, VH steps) {
#if QT_ISA == 512
    const __m512i w = (__m512i)words, step = (__m512i)steps, k = _mm512_set1_epi16(0x7fff);
    if (!E::has_nan) return (VH)_mm512_mask_add_epi16(w, _mm512_test_epi16_mask(w, k), w, step);
    const __m512i t = _mm512_sub_epi16(_mm512_and_si512(w, k), _mm512_set1_epi16(1));
    return (VH)_mm512_mask_add_epi16(w, _mm512_cmplt_epu16_mask(t, _mm512_set1_epi16(0x7f7f)), w, step);
#else
    typedef short Signed __attribute__((vector_size(W * 4)));
    const Signed m = (Signed)words & (Signed)all(0x7fff7fff);
    VH moves = (VH)(m > Signed{});
    if (E::has_nan) moves = moves & (VH)(m < (Signed)all(0x7f807f80));
    return words + (steps & moves);
#endif
}

}  // namespace QT_NAMESPACE
