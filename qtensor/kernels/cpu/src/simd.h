// Vectors of W floats or ints, through the vector extension of GCC and Clang; intrinsics where it has no word
// for an operation. Compiled three times (QT_ISA 512, 2, 0), each in a namespace of its own, so that no
// inline function of one build is taken for that of another.
#pragma once
#include <cstring>

#include "structs.h"
#if QT_ISA > 0
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
// Large functions with several callers: the compiler takes seconds for each copy.
#define NOINLINE __attribute__((noinline))
#define INLINE static ALWAYS_INLINE

namespace QT_NAMESPACE {

constexpr i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

#if QT_ISA == 512
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int GROUP = 4 * W;  // elements that are encoded together

typedef float VF __attribute__((vector_size(W * 4)));
typedef i32 VI __attribute__((vector_size(W * 4)));
typedef u32 VU __attribute__((vector_size(W * 4)));
typedef u16 VH __attribute__((vector_size(W * 4)));
typedef u8 VB __attribute__((vector_size(W * 4)));
typedef u16 Half __attribute__((vector_size(W * 2)));

template <class To, class From>
INLINE To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
template <class V>
INLINE V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
INLINE void store(void* p, V v) {
    memcpy(p, &v, sizeof v);
}
INLINE VI all(i32 v) { return v - VI{}; }
#ifdef __aarch64__
INLINE VF all(float v) { return v - VF{}; }  // GCC 12 for aarch64 crashes at the other form
#else
INLINE VF all(float v) { return (VF)all(bits<i32>(v)); }
#endif
INLINE VI max(VI a, VI b) { return a > b ? a : b; }
INLINE VI min(VI a, VI b) { return a < b ? a : b; }
INLINE bool any(VI mask) {
#if QT_ISA == 512
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif QT_ISA == 2
    return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
    i32 r = 0;
    for (int i = 0; i < W; i++) r |= mask[i];
    return r != 0;
#endif
}
INLINE i32 lane_max(VI v) {
#if QT_ISA == 512
    return _mm512_reduce_max_epi32((__m512i)v);
#endif
    i32 r = v[0];
    for (int i = 1; i < W; i++) r = r > v[i] ? r : v[i];
    return r;
}
// Lanes of v, or of a and then b, in the order of `at`.
template <class V>
INLINE V shuffled(V v, VI at) {
#ifdef __clang__
    V r;
    for (int i = 0; i < W; i++) r[i] = v[at[i]];
    return r;
#else
    return __builtin_shuffle(v, at);
#endif
}
template <class V>
INLINE V shuffled(V a, V b, VI at) {
#ifdef __clang__
    V r;
    for (int i = 0; i < W; i++) r[i] = at[i] < W ? a[at[i]] : b[at[i] - W];
    return r;
#else
    return __builtin_shuffle(a, b, at);
#endif
}
constexpr i32 INF_BITS = 0x7f800000;
constexpr i32 ABS = 0x7fffffff;

// W bytes to lanes and back.
INLINE VI widen(const u8* p) {
#if QT_ISA == 512
    return (VI)_mm512_cvtepu8_epi32(load<__m128i>(p));
#elif QT_ISA == 2
    return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    VI r;
    for (int i = 0; i < W; i++) r[i] = p[i];
    return r;
#endif
}
INLINE void narrow(u8* p, VI v) {
#if QT_ISA == 512
    store(p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < W; i++) p[i] = u8(v[i]);
#endif
}

// Streaming stores keep a large output from evicting the input; the address must be aligned.
INLINE void store_bytes(u8* p, VB v, [[maybe_unused]] bool stream) {
#if QT_ISA == 512
    if (stream) return _mm512_stream_si512((__m512i*)p, (__m512i)v);
#elif QT_ISA == 2
    if (stream) return _mm256_stream_si256((__m256i*)p, (__m256i)v);
#endif
    store(p, v);
}
// n bytes, around the cache where that is asked for and the address allows it.
INLINE void put_bytes(u8* to, const u8* from, i64 n, bool stream) {
    stream = stream && (uintptr_t(to) & (GROUP - 1)) == 0;
    i64 i = 0;
    for (; i + GROUP <= n; i += GROUP) store_bytes(to + i, load<VB>(from + i), stream);
    if (i < n) memcpy(to + i, from + i, size_t(n - i));
}
// Ask for what is read AHEAD bytes later: the prefetchers of the CPU stop at page borders.
constexpr i64 AHEAD = 2048;
template <int Bytes>
INLINE void look_ahead(const void* p) {
    for (int i = 0; i < Bytes; i += 64) __builtin_prefetch((const u8*)p + AHEAD + i);
}
// Ask for rows of memory that are read soon.
INLINE void prefetch(const void* first, i64 rows, i64 stride, i64 bytes) {
    for (i64 r = 0; r < rows; r++)
        for (i64 i = 0; i < bytes; i += 64) __builtin_prefetch((const u8*)first + r * stride + i, 0, 2);
}
INLINE void fence() {
#if QT_ISA > 0
    _mm_sfence();
#endif
}

// ---- loads: GROUP elements as four vectors of float bits
// Bfloat16 elements 2i and 2i+1 are the halves
// of dword i: a shift and a mask take them apart ("pairs"), which costs half of widening. pack() undoes the
// order.
struct Float32 {
    using T = float;
    static constexpr int id = F32;
    static constexpr bool pairs = false;
    INLINE void group(const T* p, VI v[4]) {
        for (int j = 0; j < 4; j++) v[j] = load<VI>(p + j * W);
    }
    INLINE VI one(const T* p) { return load<VI>(p); }  // W elements in order
    INLINE float to_float(T x) { return x; }
};
struct Bfloat16 {
    using T = u16;
    static constexpr int id = BF16;
    static constexpr bool pairs = true;
    INLINE void group(const T* p, VI v[4]) {
        for (int h = 0; h < 2; h++) {
            VI r = load<VI>(p + h * 2 * W);
            v[2 * h] = r << 16;
            v[2 * h + 1] = r & i32(0xffff0000);
        }
    }
    INLINE VI one(const T* p) {
#if QT_ISA == 512
        return (VI)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);
#elif QT_ISA == 2
        return (VI)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(p)), 16);
#else
        VI r;
        for (int i = 0; i < W; i++) r[i] = i32(u32(p[i]) << 16);
        return r;
#endif
    }
    INLINE float to_float(T x) { return bits<float>(u32(x) << 16); }
};
INLINE float half_to_float(u16 h) {
    u32 sign = u32(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
    if (e == 31) return bits<float>(sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0u));
    if (e == 0) {
        float v = float(m) * 0x1p-24f;
        return bits<float>(bits<u32>(v) | sign);
    }
    return bits<float>(sign | ((e + 112) << 23) | (m << 13));
}
struct Float16 {
    using T = u16;
    static constexpr int id = F16;
    static constexpr bool pairs = false;
    INLINE VI one(const T* p) {
#if QT_ISA == 512
        return (VI)_mm512_cvtph_ps(load<__m256i>(p));
#elif QT_ISA == 2
        return (VI)_mm256_cvtph_ps(load<__m128i>(p));
#else
        VF r;
        for (int i = 0; i < W; i++) r[i] = half_to_float(p[i]);
        return (VI)r;
#endif
    }
    INLINE void group(const T* p, VI v[4]) {
        for (int j = 0; j < 4; j++) v[j] = one(p + j * W);
    }
    INLINE float to_float(T x) { return half_to_float(x); }
};
// Calls f with a value of the type of a dtype and returns its result.
template <class F>
static auto with_type(i64 dtype, const F& f) {
    switch (dtype) {
        case F32:
            return f(Float32{});
        case BF16:
            return f(Bfloat16{});
        default:
            return f(Float16{});
    }
}
// Which element of a group lane `lane` of vector `j` holds.
template <class D>
constexpr int position(int j, int lane) {
    return D::pairs ? (j / 2) * 2 * W + 2 * lane + j % 2 : j * W + lane;
}

// GROUP bytes to four vectors, in the lane order of D.
template <class D>
INLINE void widen_group(const u8* p, VI v[4]) {
    if (!D::pairs) {
        for (int j = 0; j < 4; j++) v[j] = widen(p + j * W);
        return;
    }
    for (int h = 0; h < 2; h++) {
#if QT_ISA == 512
        const VI w = (VI)_mm512_cvtepu8_epi16(load<__m256i>(p + h * 2 * W));
#elif QT_ISA == 2
        const VI w = (VI)_mm256_cvtepu8_epi16(load<__m128i>(p + h * 2 * W));
#else
        VH words;
        for (int i = 0; i < 2 * W; i++) words[i] = p[h * 2 * W + i];
        const VI w = (VI)words;
#endif
        v[2 * h] = w & all(0xffff);
        v[2 * h + 1] = (VI)((VU)w >> 16);
    }
}

// ---- pack: four vectors of codes (one a dword) to GROUP bytes in element order
template <bool Pairs>
INLINE VB pack(const VI c[4]) {
#if QT_ISA == 512
    if (Pairs) {
        __m512i w0 = (__m512i)(c[0] | c[1] << 8), w1 = (__m512i)(c[2] | c[3] << 8);
        static const struct Even {
            alignas(64) u16 at[32];
            constexpr Even() : at() {
                for (int i = 0; i < 32; i++) at[i] = u16(2 * i);
            }
        } even;
        return (VB)_mm512_permutex2var_epi16(w0, _mm512_load_si512(even.at), w1);
    }
    __m512i a = _mm512_packus_epi32((__m512i)c[0], (__m512i)c[1]);
    __m512i b = _mm512_packus_epi32((__m512i)c[2], (__m512i)c[3]);
    __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (VB)_mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
#elif QT_ISA == 2
    if (Pairs) {
        __m256i w0 = (__m256i)(c[0] | c[1] << 8), w1 = (__m256i)(c[2] | c[3] << 8);
        return (VB)_mm256_permute4x64_epi64(_mm256_packus_epi32(w0, w1), 0xd8);
    }
    __m256i a = _mm256_packus_epi32((__m256i)c[0], (__m256i)c[1]);
    __m256i b = _mm256_packus_epi32((__m256i)c[2], (__m256i)c[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return (VB)_mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order);
#else
    VB r;
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < W; i++) r[Pairs ? (j / 2) * 2 * W + 2 * i + j % 2 : j * W + i] = u8(c[j][i]);
    return r;
#endif
}
// GROUP codes to GROUP / 2 bytes, the even index in the low nibble.
INLINE void store_nibbles(u8* p, VB c) {
#if QT_ISA == 512
    store(p, _mm512_cvtepi16_epi8(_mm512_maddubs_epi16((__m512i)c, _mm512_set1_epi16(0x1001))));
#elif QT_ISA == 2
    __m256i w = _mm256_maddubs_epi16((__m256i)c, _mm256_set1_epi16(0x1001));
    store(p, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
#else
    for (int i = 0; i < GROUP / 2; i++) p[i] = u8(c[2 * i] | c[2 * i + 1] << 4);
#endif
}
// GROUP 6-bit codes to GROUP * 3 / 4 bytes: code i of four in bits 6i..6i+5, little-endian.
INLINE void store_quads(u8* p, VB c) {
#if QT_ISA == 512
    static const struct Kept {
        alignas(64) u8 at[64];
        constexpr Kept() : at() {
            for (int i = 0; i < 48; i++) at[i] = u8(i / 3 * 4 + i % 3);
        }
    } kept;
    __m512i w = _mm512_maddubs_epi16((__m512i)c, _mm512_set1_epi16(0x4001));
    w = _mm512_madd_epi16(w, _mm512_set1_epi32(0x10000001));
    _mm512_mask_storeu_epi8(p, 0xffffffffffffull, _mm512_permutexvar_epi8(_mm512_load_si512(kept.at), w));
#elif QT_ISA == 2
    __m256i w = _mm256_maddubs_epi16((__m256i)c, _mm256_set1_epi16(0x4001));
    w = _mm256_madd_epi16(w, _mm256_set1_epi32(0x10000001));
    // Three bytes of each dword, 12 of each half.
    const __m256i kept =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    w = _mm256_shuffle_epi8(w, kept);
    u8 t[32];
    store(t, w);
    memcpy(p, t, 12);
    memcpy(p + 12, t + 16, 12);
#else
    u8 t[GROUP];
    store(t, c);
    for (int i = 0; i < GROUP / 4; i++) {
        u32 w = t[4 * i] | u32(t[4 * i + 1]) << 6 | u32(t[4 * i + 2]) << 12 | u32(t[4 * i + 3]) << 18;
        p[3 * i] = u8(w);
        p[3 * i + 1] = u8(w >> 8);
        p[3 * i + 2] = u8(w >> 16);
    }
#endif
}

// ---- W vectors to one: lane b is the maximum of vector b
INLINE VI column_max(const VI v[W]) {
#if QT_ISA == 512
    __m512i p[8], q[4], r[2];
    const __m512i* z = (const __m512i*)v;
    for (int i = 0; i < 8; i++)
        p[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(z[2 * i], z[2 * i + 1]),
                                _mm512_unpackhi_epi32(z[2 * i], z[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        q[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(p[2 * i], p[2 * i + 1]),
                                _mm512_unpackhi_epi64(p[2 * i], p[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        r[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(q[2 * i], q[2 * i + 1], 0x88),
                                _mm512_shuffle_i32x4(q[2 * i], q[2 * i + 1], 0xdd));
    return (VI)_mm512_max_epi32(_mm512_shuffle_i32x4(r[0], r[1], 0x88),
                                _mm512_shuffle_i32x4(r[0], r[1], 0xdd));
#elif QT_ISA == 2
    __m256i p[4], q[2];
    const __m256i* z = (const __m256i*)v;
    for (int i = 0; i < 4; i++)
        p[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(z[2 * i], z[2 * i + 1]),
                                _mm256_unpackhi_epi32(z[2 * i], z[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        q[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(p[2 * i], p[2 * i + 1]),
                                _mm256_unpackhi_epi64(p[2 * i], p[2 * i + 1]));
    return (VI)_mm256_max_epi32(_mm256_permute2x128_si256(q[0], q[1], 0x20),
                                _mm256_permute2x128_si256(q[0], q[1], 0x31));
#else
    VI r;
    for (int b = 0; b < W; b++) r[b] = lane_max(v[b]);
    return r;
#endif
}

// ---- transposes
// N x N
// elements of 16 bytes / N each, by log2(N) rounds of interleaving row i with row i + N/2.
typedef u8 Row8 __attribute__((vector_size(16)));
typedef u16 Row16 __attribute__((vector_size(16)));
typedef u32 Row32 __attribute__((vector_size(16)));
INLINE Row8 low(Row8 a, Row8 b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
INLINE Row8 high(Row8 a, Row8 b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
INLINE Row16 low(Row16 a, Row16 b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE Row16 high(Row16 a, Row16 b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
INLINE Row32 low(Row32 a, Row32 b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
INLINE Row32 high(Row32 a, Row32 b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
template <class V, class T>
INLINE void transpose_square(const T* x, i64 ldx, T* y, i64 ldy) {
    constexpr int N = 16 / sizeof(T);
    V a[N], b[N];
    for (int i = 0; i < N; i++) a[i] = load<V>(x + i * ldx);
#pragma GCC unroll 4
    for (int round = 1; round < N; round *= 2) {
        for (int i = 0; i < N / 2; i++) {
            b[2 * i] = low(a[i], a[i + N / 2]);
            b[2 * i + 1] = high(a[i], a[i + N / 2]);
        }
        for (int i = 0; i < N; i++) a[i] = b[i];
    }
    for (int i = 0; i < N; i++) store(y + i * ldy, a[i]);
}
template <class T>
struct RowOf {
    using V = Row8;
};
template <>
struct RowOf<u16> {
    using V = Row16;
};
template <>
struct RowOf<float> {
    using V = Row32;
};
// x (rows, cols) to y (cols, rows).
template <class T>
static void transpose(const T* x, i64 ldx, T* y, i64 ldy, i64 rows, i64 cols) {
    constexpr int N = 16 / sizeof(T);
    i64 r = 0;
    for (; r + N <= rows; r += N) {
        i64 c = 0;
        for (; c + N <= cols; c += N)
            transpose_square<typename RowOf<T>::V>(x + r * ldx + c, ldx, y + c * ldy + r, ldy);
        for (; c < cols; c++)
            for (int i = 0; i < N; i++) y[c * ldy + r + i] = x[(r + i) * ldx + c];
    }
    for (; r < rows; r++)
        for (i64 c = 0; c < cols; c++) y[c * ldy + r] = x[r * ldx + c];
}

}  // namespace QT_NAMESPACE
