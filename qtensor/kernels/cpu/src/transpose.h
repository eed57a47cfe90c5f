// Bytes transposed and written to where they belong, 64 x 64 at a time.
#pragma once
#include "simd.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
template <class T>
INLINE __m512i low_of(__m512i a, __m512i b) {
    if (sizeof(T) == 1) return _mm512_unpacklo_epi8(a, b);
    if (sizeof(T) == 2) return _mm512_unpacklo_epi16(a, b);
    return _mm512_unpacklo_epi32(a, b);
}
template <class T>
INLINE __m512i high_of(__m512i a, __m512i b) {
    if (sizeof(T) == 1) return _mm512_unpackhi_epi8(a, b);
    if (sizeof(T) == 2) return _mm512_unpackhi_epi16(a, b);
    return _mm512_unpackhi_epi32(a, b);
}
// N vectors of which 4 parts of 16 bytes are transposed side by side: N rows to N columns of each part.
template <class T, int N>
INLINE void transpose_parts(__m512i a[N]) {
    __m512i b[N];
#pragma GCC unroll 4
    for (int round = 1; round < N; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < N / 2; i++) {
            b[2 * i] = low_of<T>(a[i], a[i + N / 2]);
            b[2 * i + 1] = high_of<T>(a[i], a[i + N / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) a[i] = b[i];
    }
}
// Count squares, whose rows are vectors, one below the other: lines of memory of y that lie side by side
// leave together.
template <class T, int Count = 1>
static void transpose_squares(const T* x, i64 ldx, T* y, i64 ldy, bool stream) {
    constexpr int N = 16 / sizeof(T);
    alignas(64) u8 transposed[N][Count][4][64];  // [i]: columns i, N + i, 2 N + i, 3 N + i of N rows
    for (int part = 0; part < 4 * Count; part++) {
        __m512i a[N];
        for (int i = 0; i < N; i++) a[i] = load<__m512i>(x + (N * part + i) * ldx);
        transpose_parts<T, N>(a);
        for (int i = 0; i < N; i++) store(transposed[i][part / 4][part % 4], a[i]);
    }
    for (int i = 0; i < N; i++) {
        VB line[4][Count];
        for (int s = 0; s < Count; s++) {
            __m512i a[4], b[4];
            for (int k = 0; k < 4; k++) a[k] = load<__m512i>(transposed[i][s][k]);
            for (int k = 0; k < 2; k++) {
                b[2 * k] = _mm512_shuffle_i64x2(a[2 * k], a[2 * k + 1], 0x44);
                b[2 * k + 1] = _mm512_shuffle_i64x2(a[2 * k], a[2 * k + 1], 0xee);
            }
            for (int k = 0; k < 2; k++) {
                line[2 * k][s] = (VB)_mm512_shuffle_i64x2(b[k], b[2 + k], 0x88);
                line[2 * k + 1][s] = (VB)_mm512_shuffle_i64x2(b[k], b[2 + k], 0xdd);
            }
        }
        for (int k = 0; k < 4; k++)
            for (int s = 0; s < Count; s++)
                store_bytes((u8*)(y + (N * k + i) * ldy + 4 * N * s), line[k][s], stream);
    }
}
#endif

// x (rows, cols) to y (cols, rows), whole lines of y at a time.
template <class T>
static void transpose_lines(const T* x, i64 ldx, T* y, i64 ldy, i64 rows, i64 cols,
                            [[maybe_unused]] bool stream) {
    constexpr int N = 64 / sizeof(T);
    i64 r = 0, c = 0;
#if QT_ISA == 512
    stream = stream && ((uintptr_t(y) | uintptr_t(ldy * i64(sizeof(T)))) & 63) == 0;
    for (; r + N <= rows; r += N) {
        for (c = 0; c + N <= cols; c += N)
            transpose_squares<T>(x + r * ldx + c, ldx, y + c * ldy + r, ldy, stream);
        if (c < cols) transpose<T>(x + r * ldx + c, ldx, y + c * ldy + r, ldy, N, cols - c);
    }
#endif
    for (c = 0; c < cols; c += N)
        transpose<T>(x + r * ldx + c, ldx, y + c * ldy + r, ldy, rows - r, cols - c < N ? cols - c : N);
}

// x (rows, cols) to y (cols, rows), which leaves in whole lines of memory.
static inline void transpose_bytes(const u8* x, i64 ldx, u8* y, i64 ldy, i64 rows, i64 cols,
                                   [[maybe_unused]] bool stream) {
    constexpr i64 HIGH = 256, WIDE = 64;
    i64 r = 0;
#if QT_ISA == 512
    const bool aligned = stream && ((uintptr_t(y) | uintptr_t(ldy)) & 63) == 0;
    const i64 high = rows / 64 * 64, wide = cols / 64 * 64;
    for (i64 c = 0; c < wide; c += 64) {
        const u8* from = x + c;
        u8* to = y + c * ldy;
        for (r = 0; r + 256 <= high; r += 256)
            transpose_squares<u8, 4>(from + r * ldx, ldx, to + r, ldy, aligned);
        if (high & 128) {
            transpose_squares<u8, 2>(from + r * ldx, ldx, to + r, ldy, aligned);
            r += 128;
        }
        if (high & 64) transpose_squares<u8>(from + r * ldx, ldx, to + r, ldy, aligned);
    }
    if (wide < cols) transpose<u8>(x + wide, ldx, y + wide * ldy, ldy, high, cols - wide);
    r = high;
#endif
    // Through a tile of its own.
    alignas(64) u8 tile[HIGH * WIDE];
    for (; r < rows; r += HIGH)
        for (i64 c = 0; c < cols; c += WIDE) {
            const i64 n = smaller(rows - r, HIGH), width = smaller(cols - c, WIDE);
            transpose<u8>(x + r * ldx + c, ldx, tile, n, n, width);
            for (i64 i = 0; i < width; i++) put_bytes(y + (c + i) * ldy + r, tile + i * n, n, stream);
        }
}

}  // namespace QT_NAMESPACE
