// Codes and factors back to float32, rounded once to the output's dtype.
#pragma once
#include <type_traits>

#include "avx512_decode.h"
#include "memory.h"
#include "quantize_rows.h"
#include "threads.h"
#include "transpose.h"

namespace QT_NAMESPACE {

// GROUP codes to four vectors, in the lane order of D.
template <class D, class E>
INLINE void decode_group(VB codes, const Table<E>& t, VF v[4]) {
    VH w[2];
    words<E>(codes, t, w);
    if (D::pairs) {
        for (int h = 0; h < 2; h++) {
            v[2 * h] = (VF)((VI)w[h] << 16);
            v[2 * h + 1] = (VF)((VI)w[h] & all(i32(0xffff0000)));
        }
    } else {
        u16 flat[GROUP];
        store(flat, w[0]);
        store(flat + 2 * W, w[1]);
        for (int j = 0; j < 4; j++) v[j] = (VF)Bfloat16::one(flat + j * W);
    }
}
// Four vectors in the lane order of D to GROUP outputs. Nan: they may have NaN with any bits.
template <class D, bool Nan = true>
INLINE void store_group(typename D::T* y, const VF v[4], bool stream) {
    if constexpr (D::id == BF16) {
        for (int h = 0; h < 2; h++) {
            VI even = to_bfloat16_bits<Nan>((VI)v[2 * h]), odd = to_bfloat16_bits<Nan>((VI)v[2 * h + 1]);
            store_bytes((u8*)(y + h * 2 * W), (VB)((VI)((VU)even >> 16) | odd), stream);
        }
    } else if constexpr (D::id == F16) {
        for (int j = 0; j < 4; j++) store(y + j * W, to_half(v[j]));
    } else {
        for (int j = 0; j < 4; j++) store_bytes((u8*)(y + j * W), (VB)v[j], stream);
    }
}
template <int Codes>
INLINE VB load_codes(const u8* p) {
    if (Codes == 1) return load<VB>(p);
    return Codes == 2 ? load_nibbles(p) : load_quads(p);
}
constexpr int unit_of(int codes) { return codes == 4 ? 3 : 1; }

// n codes times one factor (step 0) or factors in the lanes' order (step 1).
template <class D, class E, bool Nan>
static void decode_groups(const u8* codes, i64 n, const VF* factors, int step, typename D::T* y,
                          bool stream) {
    const Table<E>& t = table<E>();
    for (i64 i = 0; i < n; i += GROUP) {
        look_ahead<GROUP>(codes + i);
        const VF* f = factors + i / W * step;
        VF v[4];
        if (i + GROUP <= n) {
            decode_group<D, E>(load<VB>(codes + i), t, v);
            for (int j = 0; j < 4; j++) v[j] = v[j] * f[j];
            store_group<D, Nan>(y + i, v, stream);
        } else {
            u8 c[GROUP] = {};
            typename D::T out[GROUP];
            memcpy(c, codes + i, size_t(n - i));
            decode_group<D, E>(load<VB>(c), t, v);
            for (int j = 0; j < 4; j++) v[j] = v[j] * f[j];
            store_group<D>(out, v, false);
            memcpy(y + i, out, sizeof(typename D::T) * size_t(n - i));
        }
    }
}
template <class D, class E>
static void decode_run(const u8* codes, i64 n, const VF* factors, int step, typename D::T* y, bool stream) {
    stream = stream && (uintptr_t(y) & (GROUP - 1)) == 0;
    // Products with a finite factor have the NaN of the codes, which rounding leaves one.
    if (!step && !any(((VI)factors[0] & all(ABS)) >= all(INF_BITS)))
        decode_groups<D, E, false>(codes, n, factors, 0, y, stream);
    else
        decode_groups<D, E, true>(codes, n, factors, step, y, stream);
}

// Codes times one factor, which has a table where it serves many.
template <class D, class E>
struct OneDecoder {
    using T = typename D::T;
    VF four[4];
#if QT_ISA == 512
    std::conditional_t<D::id == F32, char, ValueTable<D, E>> table;
    explicit OneDecoder(float f) : four{all(f), all(f), all(f), all(f)}, table(f) {}
#else
    explicit OneDecoder(float f) : four{all(f), all(f), all(f), all(f)} {}
#endif
    void run(const u8* codes, i64 n, T* y, bool stream) const {
#if QT_ISA == 512
        if constexpr (D::id != F32)
            return decode_by_table<D, E>(codes, n, table, y, stream && (uintptr_t(y) & (GROUP - 1)) == 0);
#endif
        decode_run<D, E>(codes, n, four, 0, y, stream);
    }
};
template <class D, class E>
static void decode_one(const u8* codes, i64 n, float factor, typename D::T* y, bool stream) {
    if (n >= 512) return OneDecoder<D, E>(factor).run(codes, n, y, stream);
    const VF four[4] = {all(factor), all(factor), all(factor), all(factor)};
    decode_run<D, E>(codes, n, four, 0, y, stream);
}

// GROUP codes of row k of the rows that share bytes: 4-bit codes beside those of another row, or codes as
// they are.
template <int Joined>
INLINE VB joined_codes(VB bytes, int k) {
    if (Joined == 1) return bytes;
    const VI nibbles = (VI)(k ? (VH)bytes >> 4 : (VH)bytes) & all(0x0f0f0f0f);
    return (VB)nibbles;
}

// Factors of columns in the lanes' order; powers of two are added to exponents where that is the same.
template <class D, class E>
struct ColumnFactors {
    using T = typename D::T;
    Array<VF> lanes;
    Array<VH> steps;  // of exponents, in the columns' order, where all factors are powers of two
    bool pow2 = false;
    explicit ColumnFactors(i64 cols)
        : lanes((cols + GROUP - 1) / GROUP * 4), steps(D::id == BF16 ? (cols + GROUP - 1) / GROUP * 2 : 0) {}

    // of(k): the factor of column k.
    template <class F>
    void fill(i64 cols, const F& of) {
        for (i64 g = 0; g * GROUP < cols; g++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < W; i++) {
                    const i64 k = g * GROUP + position<D>(j, i);
                    lanes[4 * g + j][i] = k < cols ? of(k) : 1.0f;
                }
        check(cols);
    }
    // Codes of E8M0 or E4M3 that lie side by side.
    template <bool Exponents>
    void fill_codes(i64 cols, const u8* codes) {
        for (i64 k = 0; k < cols; k += GROUP) {
            u8 last[GROUP] = {};
            const u8* from = codes + k;
            if (cols - k < GROUP) {
                memcpy(last, from, size_t(cols - k));
                from = last;
            }
            VF* v = lanes + k / W;
            if (Exponents) {
                VI c[4];
                widen_group<D>(from, c);
                for (int j = 0; j < 4; j++) {
                    const VI f = c[j] == all(0) ? all(0x00400000) : c[j] << 23;
                    v[j] = (VF)(c[j] == all(255) ? all(0x7fc00000) : f);
                }
            } else {
                decode_group<D, FE4M3>(load<VB>(from), table<FE4M3>(), v);
            }
        }
        if (Exponents) check(cols);
    }
    // Floats that lie side by side.
    void fill_floats(i64 cols, const float* from) {
        VI even, odd;
        for (int i = 0; i < W; i++) {
            even[i] = 2 * i;
            odd[i] = 2 * i + 1;
        }
        for (i64 k = 0; k < cols; k += GROUP) {
            alignas(64) float last[GROUP];
            const float* p = from + k;
            if (cols - k < GROUP) {
                for (i64 i = 0; i < GROUP; i++) last[i] = k + i < cols ? p[i] : 1.0f;
                p = last;
            }
            for (int h = 0; h < 2; h++) {
                const VF a = load<VF>(p + h * 2 * W), b = load<VF>(p + h * 2 * W + W);
                VF* v = lanes + k / W + 2 * h;
                v[0] = D::pairs ? shuffled(a, b, even) : a;
                v[1] = D::pairs ? shuffled(a, b, odd) : b;
            }
        }
        check(cols);
    }
    void check(i64 cols) {
        VI odd{};
        for (i64 i = 0; i < (cols + GROUP - 1) / GROUP * 4; i++) odd = odd | unfit_exponents<E>((VI)lanes[i]);
        pow2 = D::id == BF16 && !any(odd);
        // Even columns in the low halves, odd ones in the high halves, as the words have them.
        for (i64 i = 0; pow2 && i < (cols + GROUP - 1) / GROUP * 2; i++)
            steps[i] = (VH)((exponent_steps((VI)lanes[2 * i]) & all(0xffff)) |
                            exponent_steps((VI)lanes[2 * i + 1]) << 16);
    }
    // Joined: see joined_codes. Where `second` is given, values are multiplied by it, too.
    template <int Joined = 1>
    void run(const u8* codes, i64 n, T* y, bool stream, int k = 0, const VF* second = nullptr) {
        stream = stream && (uintptr_t(y) & (GROUP - 1)) == 0;
        for (i64 i = 0; i < n; i += GROUP) {
            look_ahead<GROUP>(codes + i);
            const i64 real = n - i;
            if (real >= GROUP) {
                group<Joined>(codes + i, i / W, y + i, stream, k, second);
                continue;
            }
            u8 c[GROUP] = {};
            T out[GROUP];
            memcpy(c, codes + i, size_t(real));
            group<Joined>(c, i / W, out, false, k, second);
            memcpy(y + i, out, sizeof(T) * size_t(real));
        }
    }
    template <int Joined>
    INLINE void group_of(const ColumnFactors& q, const u8* codes, i64 at, T* y, bool stream, int k,
                         const VF* second) {
        const VB c = joined_codes<Joined>(load<VB>(codes), k);
        const VF* f = q.lanes + at;
        if constexpr (D::id == BF16) {
            if (q.pow2) {
                VH w[2];
                words<E>(c, q.elements, w);
                for (int h = 0; h < 2; h++)
                    store_bytes((u8*)(y + h * 2 * W), (VB)with_exponent<E>(w[h], q.steps[at / 2 + h]),
                                stream);
                return;
            }
        }
        VF v[4];
        decode_group<D, E>(c, q.elements, v);
        for (int j = 0; j < 4; j++) v[j] = v[j] * f[j];
        for (int j = 0; second && j < 4; j++) v[j] = v[j] * second[at + j];
        store_group<D>(y, v, stream);
    }
    template <int Joined>
    void group(const u8* codes, i64 at, T* y, bool stream, int k, const VF* second) {
        group_of<Joined>(*this, codes, at, y, stream, k, second);
    }
    const Table<E>& elements = table<E>();
};

// Lines of blocks: codes of line l at codes + l * code_stride, values to y + l * stride.
template <class T>
struct DecodeLines {
    const u8* codes;
    i64 count, length, code_stride;
    T* y;
    i64 stride;
    i64 line0, block0;
};

template <class D, class E, int B, int Codes>
struct LineDecoder {
    using T = typename D::T;
    static constexpr int bytes = B * unit_of(Codes) / Codes;
    static constexpr int UNIT = B > GROUP ? B : GROUP;  // elements that kernels read and write together
    const DecodeLines<T>& m;
    const CQuantizer& p;
    const ScaleLayout& s;
    const float* amax;
    const bool rotated, nontemporal;
    const i64 blocks;
    alignas(64) u8 gathered[W * bytes];
    alignas(64) T scattered[W * B];
    alignas(64) float factor[W], global[W];
#if QT_ISA == 512
    NvTable nv{0};
    i64 known_line = -1;
#endif

    LineDecoder(const DecodeLines<T>& lines, const CQuantizer& quantizer, const ScaleLayout& scales,
                const float* maxima, bool rotate, bool stream)
        : m(lines),
          p(quantizer),
          s(scales),
          amax(maxima),
          rotated(rotate),
          nontemporal(stream),
          blocks((lines.length + B - 1) / B) {
        for (int b = 0; b < W; b++) global[b] = amax && !p.row_scaled ? amax[0] / p.global_divisor : 1.0f;
#if QT_ISA == 512
        if (B == NV && D::id == BF16) nv = NvTable(global[0]);
#endif
    }

    float read(i64 line, i64 block) const {
        const i64 i = s.at(m.line0 + line, m.block0 + block);
        if (p.scale == SCALE_F32) return ((const float*)s.base)[i];
        return p.scale == SCALE_E8M0 ? bits<float>(e8m0_decode_bits(s.base[i]))
                                     : table<FE4M3>().value[s.base[i]];
    }

    void run(i64 first, i64 end) {
        // Lines without gaps are decoded as one, lines of whole groups one by one, where they lie. Shorter
        // ones are gathered.
        const bool joined = m.length % B == 0 && m.code_stride == blocks * bytes && m.stride == m.length;
        const bool one_by_one = !joined && m.length % UNIT == 0 && !rotated;
        i64 line = first / blocks, block = first % blocks;
        i64 lanes = 0;
        for (i64 at = first; at < end; at += lanes, block += lanes) {
            for (; block >= blocks; block -= blocks) line++;
            lanes = smaller(end - at, one_by_one ? smaller(W, blocks - block) : W);
            const bool whole = one_by_one || (joined && lanes * B % UNIT == 0 && (!rotated || lanes == W));
            const u8* codes = m.codes + line * m.code_stride + block * bytes;
            T* y = m.y + line * m.stride + block * B;
            const bool stream = whole && nontemporal && (uintptr_t(y) & (GROUP - 1)) == 0;
            if (!whole) {
                gather(line, block, int(lanes));
                codes = gathered, y = scattered;
            }
            if (!quick(line, block, int(lanes), codes, y, stream)) {
                factors(line, block, int(lanes));
                strip(codes, y, int(lanes), stream);
            }
            if (!whole) scatter(line, block, int(lanes));
        }
    }

    bool quick([[maybe_unused]] i64 line, [[maybe_unused]] i64 block, [[maybe_unused]] int lanes,
               [[maybe_unused]] const u8* codes, [[maybe_unused]] T* y, [[maybe_unused]] bool stream) {
#if QT_ISA == 512
        if constexpr (B == NV && D::id == BF16) return nv_quick(line, block, lanes, codes, y, stream);
#endif
        return false;
    }

    // Reads factors of a byte. False if they do not lie side by side.
    bool read_codes(i64 line, i64 block, int lanes, u8 codes[W]) const {
        if (block + lanes > blocks) return false;
        const u8* from = s.base + s.at(m.line0 + line, m.block0 + block);
        if (!s.tiles) {
            if (s.block_stride != 1) return false;
            memcpy(codes, from, size_t(lanes));
            return true;
        }
        if ((m.block0 + block) % 4) return false;
        for (int b = 0; b < lanes; b += 4)
            memcpy(codes + b, s.base + s.at(m.line0 + line, m.block0 + block + b),
                   size_t(smaller(4, lanes - b)));
        return true;
    }
    bool quick_factors(i64 line, i64 block, int lanes) {
        constexpr u8 ONE_E8M0 = 127, ONE_E4M3 = 56;
        u8 codes[W];
        memset(codes, p.scale == SCALE_E8M0 ? ONE_E8M0 : ONE_E4M3, W);
        if (!read_codes(line, block, lanes, codes)) return false;
        const VI c = widen(codes);
        if (p.scale == SCALE_E8M0) {
            const VI f = c == all(0) ? all(0x00400000) : c << 23;
            store(factor, (VF)(c == all(255) ? all(0x7fc00000) : f));
            return true;
        }
        if (any(c >= all(0x7f))) return false;
        const VF small = __builtin_convertvector(c, VF) * all(0x1p-9f);
        store(factor, c < all(8) ? small : (VF)((c << 20) + all(120 << 23)));
        return true;
    }

    void factors(i64 line, i64 block, int lanes) {
        if (p.scale != SCALE_F32 && !p.row_scaled && quick_factors(line, block, lanes)) return;
        store(factor, all(1.0f));  // which every fast path takes
        for (int b = 0; b < lanes; b++) {
            factor[b] = read(line, block);
            if (p.row_scaled) global[b] = amax[m.line0 + line] / p.global_divisor;
            if (++block == blocks) {
                block = 0;
                line++;
            }
        }
    }

    // Bytes of the codes that a line has in a block.
    i64 stored(i64 block) const {
        const i64 n = m.length - block * B;
        return n >= B || rotated ? bytes : (n + Codes - 1) / Codes * unit_of(Codes);
    }
    void gather(i64 line, i64 block, int lanes) {
        memset(gathered, 0, size_t(lanes * bytes));
        for (int b = 0; b < lanes; b++) {
            memcpy(gathered + b * bytes, m.codes + line * m.code_stride + block * bytes,
                   size_t(stored(block)));
            if (++block == blocks) {
                block = 0;
                line++;
            }
        }
    }
    void scatter(i64 line, i64 block, int lanes) {
        for (int b = 0; b < lanes; b++) {
            const i64 n = m.length - block * B;
            memcpy(m.y + line * m.stride + block * B, scattered + b * B, sizeof(T) * size_t(n < B ? n : B));
            if (++block == blocks) {
                block = 0;
                line++;
            }
        }
    }

#if QT_ISA == 512
    // NVFP4 to bfloat16 by the words of stored factors; false where these do not allow it.
    bool nv_quick(i64 line, i64 block, int lanes, const u8* codes, T* y, bool stream) {
        if (p.row_scaled && line != known_line)
            nv = NvTable(amax[m.line0 + (known_line = line)] / p.global_divisor);
        if (!nv.fit || rotated || (p.row_scaled && block + lanes > blocks)) return false;
        alignas(16) u8 stored[W] = {};
        if (!read_codes(line, block, lanes, stored)) {
            for (int b = 0; b < lanes; b++) {
                stored[b] = s.base[s.at(m.line0 + line, m.block0 + block)];
                if (++block == blocks) {
                    block = 0;
                    line++;
                }
            }
        }
        const __m512i c = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(load<__m128i>(stored)));
        if (_mm512_cmpge_epu16_mask(c, _mm512_set1_epi16(0x7f))) return false;
        nv_strip_of_words(NvTable::of(nv, c, _mm512_maskz_set1_epi16(0xffff0000u, 16)), codes, y, lanes,
                          stream);
        return true;
    }
    INLINE void nv_strip(LineDecoder& q, const u8* codes, T* y, int lanes, bool stream) {
        if constexpr (D::id != F32) {
            const VF f = load<VF>(q.factor), g = load<VF>(q.global);
            for (int b = 0; b < lanes; b += 4) nv_blocks<D>(f, g, b, codes + b * bytes, y + b * B, stream);
            return;
        }
        // A block is a vector.
        for (int b = 0; b < lanes; b++) {
            const VF v = e2m1_values(codes + b * bytes) * all(q.factor[b]) * all(q.global[b]);
            store_bytes((u8*)(y + b * B), (VB)v, stream);
        }
    }
#endif
    INLINE void pow2_strip(VI steps, const u8* codes, T* y, int lanes, bool stream) {
        alignas(64) i32 pairs[W];
        store(pairs, (steps & all(0xffff)) | steps << 16);
        for (int at = 0; at < lanes * B; at += GROUP) {
            look_ahead<GROUP>(codes + at);
            VH w[2];
            words<E>(load_codes<Codes>(codes + at * unit_of(Codes) / Codes), table<E>(), w);
            for (int h = 0; h < 2; h++)
                store_bytes((u8*)(y + at + h * 2 * W),
                            (VB)with_exponent<E>(w[h], (VH)all(pairs[(at + h * 2 * W) / B])), stream);
        }
    }

    // At least the first `lanes` blocks of a strip.
    INLINE void strip_of(LineDecoder& q, const u8* codes, T* y, int lanes, bool stream) {
#if QT_ISA == 512
        if constexpr (B == NV) return nv_strip(q, codes, y, lanes, stream);
#endif
        const Table<E>& t = table<E>();
        if constexpr (D::id == BF16 && B != NV) {
            const VI f = load<VI>(q.factor);
            if (fits_exponents<E>(f)) return pow2_strip(exponent_steps(f), codes, y, lanes, stream);
        }
        for (int at = 0; at < lanes * B; at += GROUP) {
            VF v[4];
            decode_group<D, E>(load_codes<Codes>(codes + at * unit_of(Codes) / Codes), t, v);
            for (int j = 0; j < 4; j++) {
                v[j] = v[j] * spread<D, B>(q.factor, at, j);
                if (B == NV) v[j] = v[j] * spread<D, B>(q.global, at, j);
            }
            store_group<D>(y + at, v, stream);
        }
    }
    void strip(const u8* codes, T* y, int lanes, bool stream) {
        if constexpr (B == NV) {
            if (rotated) return rotated_strip(codes, y);
        }
        strip_of(*this, codes, y, lanes, stream);
    }
    void rotated_strip(const u8* codes, T* y) {
#if QT_ISA == 512
        if (Codes == 2 && rotated_back<D>(codes, load<VF>(factor), load<VF>(global), p.signs, y)) return;
#endif
        const Table<E>& t = table<E>();
        alignas(64) float wide[W * B];
        for (int at = 0; at < W * B; at += GROUP) {
            VF v[4];
            decode_group<Float32, E>(load_codes<Codes>(codes + at / Codes), t, v);
            for (int j = 0; j < 4; j++)
                store(wide + at + j * W,
                      v[j] * spread<Float32, B>(factor, at, j) * spread<Float32, B>(global, at, j));
        }
        rotate<true>(wide, p.signs);
#if QT_ISA == 512
        if constexpr (D::id != F32) {
            for (int at = 0; at < W * B; at += 2 * W)
                store(y + at, words_of<D>(load<VF>(wide + at), load<VF>(wide + at + W)));
            return;
        }
#endif
        for (int at = 0; at < W * B; at += GROUP) {
            VF v[4];
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < W; i++) v[j][i] = wide[at + position<D>(j, i)];
            store_group<D>(y + at, v, false);
        }
    }
};

}  // namespace QT_NAMESPACE
