// Transposes in registers.
#pragma once
#include "simd.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
// Transposes 16 rows of 64 bytes. Dwords: vector i holds dword i of each row. Words: each quarter of vector i
// holds word 2 i of four rows, then word 2 i + 1.
template <bool Words>
INLINE void transpose_rows(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = Words ? _mm512_unpacklo_epi16(r[i], r[i + 1]) : _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = Words ? _mm512_unpackhi_epi16(r[i], r[i + 1]) : _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512i a = t[i + j], b = t[i + 2 + j];
            r[i + 2 * j] = Words ? _mm512_unpacklo_epi32(a, b) : _mm512_unpacklo_epi64(a, b);
            r[i + 2 * j + 1] = Words ? _mm512_unpackhi_epi32(a, b) : _mm512_unpackhi_epi64(a, b);
        }
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 16; h += 8) {
            t[h + i] = _mm512_shuffle_i32x4(r[h + i], r[h + 4 + i], 0x88);
            t[h + 4 + i] = _mm512_shuffle_i32x4(r[h + i], r[h + 4 + i], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    }
}
#endif

}  // namespace QT_NAMESPACE
