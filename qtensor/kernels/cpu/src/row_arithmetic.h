// Arithmetic on rows of floats whose every rounding is fixed (docs/numerics.md): sums over 128 lanes, exp and
// sigmoid from multiplications and additions, one rounding on the way out.
#pragma once
#include <cmath>

#include "dequantize.h"
#include "threads.h"

namespace QT_NAMESPACE {

constexpr int CHUNK = 128;          // lanes of a sum over a row
constexpr int VECTORS = CHUNK / W;  // that hold them
constexpr i64 ROW_BLOCK =
    64;  // rows that a sum over rows adds before it adds their sum to those of other blocks

// ---- chunks in and out: Pairs is the lane order of pairs of bfloat16 (simd.h), else that of the elements
template <bool Pairs>
constexpr int lane_of(int j, int i) {
    return Pairs ? j / 4 * GROUP + position<Bfloat16>(j % 4, i) : j * W + i;
}
template <class D, bool Pairs>
INLINE void load_chunk(const typename D::T* p, VF v[VECTORS]) {
    static_assert(!Pairs || D::pairs, "pairs are of bfloat16");
    if constexpr (Pairs) {
        for (int g = 0; g < VECTORS; g += 4) {
            VI four[4];
            D::group(p + g * W, four);
            for (int j = 0; j < 4; j++) v[g + j] = (VF)four[j];
        }
    } else {
        for (int j = 0; j < VECTORS; j++) v[j] = (VF)D::one(p + j * W);
    }
}
INLINE VF one_nan(VF v) { return v == v ? v : (VF)all(0x7fc00000); }
// W floats to elements in order.
template <class D>
INLINE void store_one(typename D::T* p, VF v, bool stream) {
    if constexpr (D::id == F32) {
        store_bytes((u8*)p, (VB)one_nan(v), stream);
    } else if constexpr (D::id == F16) {
        store(p, to_half(one_nan(v)));
    } else {
        VI u = to_bfloat16_bits((VI)v);
#if QT_ISA == 512
        store(p, _mm512_cvtepi32_epi16((__m512i)((VU)u >> 16)));
#elif QT_ISA == 2
        __m256i w = _mm256_packus_epi32((__m256i)((VU)u >> 16), _mm256_setzero_si256());
        store(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(w, 0xd8)));
#else
        for (int i = 0; i < W; i++) p[i] = u16((u32)u[i] >> 16);
#endif
    }
}
template <class D, bool Pairs>
INLINE void store_vectors(typename D::T* p, const VF* v, int n, bool stream) {
    if constexpr (Pairs)
        for (int g = 0; g < n; g += 4) store_group<D>(p + g * W, v + g, stream);
    else
        for (int j = 0; j < n; j++) store_one<D>(p + j * W, v[j], stream);
}
template <class T>
INLINE bool aligned(const T* p) {
    return (uintptr_t(p) & (GROUP - 1)) == 0;
}

// ---- sums
template <int N>
INLINE VF add_upper(VF v) {  // lane i plus lane i + N
#if QT_ISA == 512
    if (N == 8) return v + (VF)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
    if (N == 4) return v + (VF)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
    if (N == 2) return v + (VF)_mm512_permute_ps((__m512)v, 0x4e);
    return v + (VF)_mm512_permute_ps((__m512)v, 0xb1);
#else
    VF u = {};
    for (int i = 0; i < W - N; i++) u[i] = v[i + N];
    return v + u;
#endif
}
INLINE VF add_lanes(VF v) {
    if (W == 16) v = add_upper<8>(v);
    v = add_upper<4>(v);
    v = add_upper<2>(v);
    return v;
}
// 128 lanes by halves.
template <bool Pairs>
INLINE float add_halves(VF acc[VECTORS]) {
    constexpr int last = Pairs ? 2 : 1;
    for (int n = VECTORS / 2; n >= last; n /= 2)
        for (int j = 0; j < n; j++) acc[j] = acc[j] + acc[j + n];
    if (Pairs) {
        // Even and odd elements apart: lane i + 1 of the pair is what lane i of either has beside it.
        VF even = add_upper<1>(add_lanes(acc[0])), odd = add_upper<1>(add_lanes(acc[1]));
        return even[0] + odd[0];
    }
    return add_upper<1>(add_lanes(acc[0]))[0];
}

// Which lanes of a row's last, partial chunk are elements.
template <bool Pairs>
INLINE void tail_masks(i64 cols, VI mask[VECTORS]) {
    const int n = int(cols % CHUNK);
    for (int j = 0; j < VECTORS; j++)
        for (int i = 0; i < W; i++) mask[j][i] = lane_of<Pairs>(j, i) < n ? -1 : 0;
}
INLINE i64 whole_chunks(i64 cols) { return (cols + CHUNK - 1) / CHUNK; }

inline void put_element(void* p, i64 i, int dtype, float v) {
    if (v != v) v = bits<float>(0x7fc00000);
    if (dtype == F32)
        ((float*)p)[i] = v;
    else if (dtype == BF16)
        ((u16*)p)[i] = u16((u32)to_bfloat16_bits(all(bits<i32>(v)))[0] >> 16);
    else
        ((u16*)p)[i] = float_to_half(v);
}

// Sums of blocks of rows (blocks, width) to (cols) elements; width = cols in whole chunks.
template <bool Pairs>
static void add_blocks(const float* partial, i64 blocks, i64 cols, void* out, int dtype, int threads) {
    const i64 width = whole_chunks(cols) * CHUNK;
    parallel(width, CHUNK, threads, [&](i64 a, i64 b) {
        for (i64 k = a; k < b; k += CHUNK) {
            VF total[VECTORS] = {};
            for (i64 block = 0; block < blocks; block++)
                for (int j = 0; j < VECTORS; j++)
                    total[j] = total[j] + load<VF>(partial + block * width + k + j * W);
            for (int j = 0; j < VECTORS; j++)
                for (int i = 0; i < W; i++) {
                    const i64 at = k + lane_of<Pairs>(j, i);
                    if (at < cols) put_element(out, at, dtype, total[j][i]);
                }
        }
    });
}

// ---- exp and sigmoid
// x,
// or the bound where x is below it; NaN stays.
INLINE VF at_least(VF x, float bound) {
#if QT_ISA == 512
    return (VF)_mm512_max_ps((__m512)all(bound), (__m512)x);
#elif QT_ISA == 2
    return (VF)_mm256_max_ps((__m256)all(bound), (__m256)x);
#else
    return x < all(bound) ? all(bound) : x;
#endif
}
INLINE VF exp_nonpositive(VF v) {
    v = at_least(v, -104.0f);
    const VF magic = all(12582912.0f);
    const VF shifted = v * all(1.4426950216293335f) + magic, n = shifted - magic;
    const VF r = (v - n * all(0.693359375f)) - n * all(-0.00021219444170128554f);
    const VF s = r * r, low = r * all(0.1666652113199234f) + all(0.4999999403953552f);
    const VF high =
        s * all(0.0013814596459269524f) + (r * all(0.0083687175065279f) + all(0.04166838899254799f));
    const VF p = ((high * s + low) * s + r) + all(1.0f);
#if QT_ISA == 512
    // The same as two products: the first of them is exact.
    return (VF)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const VI e = (VI)((VU)shifted - (VU)magic), half = e >> 1;
    const VF first = (VF)(((VU)half + (VU)all(127)) << 23),
             second = (VF)(((VU)e - (VU)half + (VU)all(127)) << 23);
    return p * first * second;
#endif
}
struct Sigmoid {
    VF value, slope;
};
INLINE Sigmoid sigmoid(VF v) {
    const VF z = exp_nonpositive((VF)((VI)v | all(i32(0x80000000))));
    const VF above = all(1.0f) / (all(1.0f) + z), below = z * above;
    return {v < VF{} ? below : above, below * above};
}

}  // namespace QT_NAMESPACE
