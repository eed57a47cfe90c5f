// Bytes turned and written to where they belong, 64 x 64 at a time.
#pragma once
#include "simd.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
// N vectors of which 4 parts of 16 bytes are transposed side by side: 16 rows to 16 columns of each part.
INLINE void turn_parts(__m512i a[16]) {
    __m512i b[16];
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            b[2 * i] = _mm512_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm512_unpackhi_epi8(a[i], a[i + 8]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) a[i] = b[i];
    }
}
static void turn_64(const u8* x, i64 ldx, u8* y, i64 ldy, bool stream) {
    alignas(64) u8 turned[64 * 64];  // line i: columns i, 16 + i, 32 + i, 48 + i of 16 rows
    for (int part = 0; part < 4; part++) {
        __m512i a[16];
        for (int i = 0; i < 16; i++) a[i] = load<__m512i>(x + (16 * part + i) * ldx);
        turn_parts(a);
        for (int i = 0; i < 16; i++) store(turned + (4 * i + part) * 64, a[i]);
    }
    for (int i = 0; i < 16; i++) {
        __m512i a[4], b[4];
        for (int k = 0; k < 4; k++) a[k] = load<__m512i>(turned + (4 * i + k) * 64);
        for (int k = 0; k < 2; k++) {
            b[2 * k] = _mm512_shuffle_i64x2(a[2 * k], a[2 * k + 1], 0x44);
            b[2 * k + 1] = _mm512_shuffle_i64x2(a[2 * k], a[2 * k + 1], 0xee);
        }
        for (int k = 0; k < 2; k++) {
            store_bytes(y + (32 * k + i) * ldy, (VB)_mm512_shuffle_i64x2(b[k], b[2 + k], 0x88), stream);
            store_bytes(y + (32 * k + 16 + i) * ldy, (VB)_mm512_shuffle_i64x2(b[k], b[2 + k], 0xdd), stream);
        }
    }
}
#endif

// x (rows, cols) to y (cols, rows); `scratch`: rows * cols bytes.
static void turn_bytes(const u8* x, i64 ldx, u8* y, i64 ldy, i64 rows, i64 cols, bool stream, u8* scratch) {
    i64 r = 0;
#if QT_ISA == 512
    const bool aligned = stream && ((uintptr_t(y) | uintptr_t(ldy)) & 63) == 0;
    for (; r + 64 <= rows; r += 64) {
        i64 c = 0;
        for (; c + 64 <= cols; c += 64) turn_64(x + r * ldx + c, ldx, y + c * ldy + r, ldy, aligned);
        if (c < cols) transpose<u8>(x + r * ldx + c, ldx, y + c * ldy + r, ldy, 64, cols - c);
    }
#endif
    if (r == rows) return;
    // Through a tile of its own, so that whole lines of memory leave at once.
    rows -= r, y += r;
    transpose<u8>(x + r * ldx, ldx, scratch, rows, rows, cols);
    for (i64 i = 0; i < cols; i++) {
        put_bytes(y + i * ldy, scratch + i * rows, rows, stream);
    }
}

}  // namespace QT_NAMESPACE
