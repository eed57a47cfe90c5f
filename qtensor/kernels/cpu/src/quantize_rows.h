// Block formats along lines: W blocks at a time, from maxima to stored codes. A line is a row of the matrix
// that is given: of the tensor, or of the transpose that quantize_columns.h makes of a tile.
#pragma once
#include "block_strips.h"
#include "nvfp4.h"

namespace QT_NAMESPACE {

// What is fixed for one direction of a call.
struct Direction {
    const CQuantizer* quantizer;
    ScaleLayout scales;
    bool rotate;
    Rotation rotation;
    int stream;  // of random bytes
    i64 seed;
    GlobalScale global;      // NVFP4 with one maximum
    const float* line_amax;  // NVFP4 with one for each line
    float overflow;          // factor where float32 has none (fp8_blockwise)
    bool whole_groups;       // codes of padding are stored too (rotated data)
    bool nontemporal;
};

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

// W blocks, nearest rounding.
template <class D, class E, int B, int Codes, bool Safe>
INLINE void encode_strip(const typename D::T* x, const float* factors, u8* out, bool stream, i64 stride = B,
                         i64 out_stride = B) {
    for (int at = 0; at < W * B; at += GROUP) {
        VF f[4];
        for (int j = 0; j < 4; j++) f[j] = spread<D, B>(factors, at, j);
        VB codes = encode_group<D, E, Safe, B == NV>(x + place<B>(at, stride), f);
        store_codes<E, Codes>(out + place<B>(at, out_stride) * (Codes == 4 ? 3 : 1) / Codes, codes, stream);
    }
}

#if QT_ISA == 512
// 4-bit codes of W blocks, but for MX of bfloat16.
template <class D, class E, int B, int Codes>
INLINE bool encode_small(const typename D::T* x, VI amax, VF encode, u8* out, bool stream) {
    if constexpr (E::width == 4 && (B == NV || !D::pairs)) {
        if (!fits_quarters<D, B == MX>(amax, encode)) return false;
        const VF factors = encode * all(4.0f);
        alignas(64) float in_memory[W];
        store(in_memory, factors);
        for (int at = 0; at < W * B; at += 2 * GROUP) {
            VB codes[2];
            for (int h = 0; h < 2; h++) {
                const int g = at / GROUP + h;
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
INLINE bool encode_pow2(const typename D::T* x, VI encode, u8* out, bool stream, i64 stride = B,
                        i64 out_stride = B) {
    if constexpr (D::id == BF16 && B >= 2 * W) {
        VI code = all(254) - (VI)((VU)encode >> 23);
        if (any(code < all(LEAST_CODE<E>))) return false;
        if constexpr (Codes == 2) {
            alignas(64) VI base[1] = {(code + all(LEAST_PLACE)) * all(0x01000100)};
            const i32* of_block = (const i32*)base;
            for (int at = 0; at < W * B; at += 2 * GROUP) {
                VB codes[2];
                for (int h = 0; h < 2; h++) {
                    const int block = at / B + 2 * h;
                    const __m512i bases[2] = {_mm512_set1_epi32(of_block[block]),
                                              _mm512_set1_epi32(of_block[block + 1])};
                    codes[h] = e2m1_group(x + at + h * GROUP, bases);
                }
                store_bytes(out + at / Codes, nibbles_of<true>(codes[0], codes[1]), stream);
            }
            return true;
        }
        const __m512i bases =
            _mm512_castsi128_si512(_mm512_cvtepi32_epi8((__m512i)(code + all(base_of<E>(0)))));
        for (int at = 0; at < W * B; at += GROUP) {
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

// The second level of NVFP4 for W blocks.
struct GlobalScaleLanes {
    VF amax, scale, sixth, inverse;
    void set(int lane, const GlobalScale& g) {
        amax[lane] = g.amax;
        scale[lane] = g.scale;
        sixth[lane] = g.sixth;
        inverse[lane] = g.inverse;
    }
};

template <class E>
INLINE BlockFactors factors_of(VI amax, const Direction& d, const GlobalScaleLanes& g) {
    const CQuantizer& p = *d.quantizer;
    if (p.scale == SCALE_E8M0) {
        VI code = e8m0_code(amax, p, E::max_bits, E::mantissa);
        return {(VF)e8m0_encode_bits(code), code};
    }
    if (p.scale == SCALE_F32) {
        VF s = fp8_scale(amax, bits<float>(E::max_bits), p, d.overflow);
        return {s, (VI)(all(1.0f) / s)};
    }
    return nvfp4_factors((VF)amax * g.sixth, g.inverse);
}

// Store the factors of a strip; `lanes` of them are real.
INLINE void put_factors(const ScaleLayout& s, VI stored, i64 line, i64 block, i64 blocks, int lanes,
                        i64 line0, i64 block0) {
    if (s.size == 1 && lanes == W && block + W <= blocks &&
        (s.tiles ? (block0 + block) % 4 == 0 : s.block_stride == 1)) {
        u8 codes[W];
        if (!s.tiles) {
            narrow(s.base + s.at(line0 + line, block0 + block), stored);
        } else {
            narrow(codes, stored);
            for (int b = 0; b < W; b += 4)
                memcpy(s.base + s.at(line0 + line, block0 + block + b), codes + b, 4);
        }
        return;
    }
    for (int b = 0; b < lanes; b++) {
        s.put(line0 + line, block0 + block, stored[b]);
        if (++block == blocks) {
            block = 0;
            line++;
        }
    }
}

// Blocks first .. end of some lines.
template <class D, class E, int B, int Codes>
struct LineQuantizer {
    using T = typename D::T;
    static constexpr int strip = W * B,
                         batch = 8192 / int(sizeof(T)) / strip > 1 ? 8192 / int(sizeof(T)) / strip : 1;
    const Lines<T>& m;
    const Direction& d;
    const CQuantizer& p;
    StripLayout<D, B, Codes> strips;
    static constexpr bool nv = B == NV;
    const bool special;
    const PhiloxKeys keys;
    GlobalScaleLanes global;
    i64 global_line = -1;
    alignas(64) T gathered[strip];
    alignas(64) u8 scattered[strip];
    alignas(64) u8 unpacked[strip];
    alignas(64) float wide[strip];
    alignas(64) float encode[batch][W];
    VI amax[batch];
    const T* source[batch];
    u8* target[batch];

    LineQuantizer(const Lines<T>& lines, const Direction& direction)
        : m(lines),
          d(direction),
          p(*direction.quantizer),
          strips(lines),
          special(nv && (d.rotate || p.stochastic || p.four_over_six)),
          keys(d.seed) {
        for (int b = 0; b < W; b++) global.set(b, d.global);
    }

    void run(i64 first, i64 end) {
        i64 line = first / strips.blocks, block = first % strips.blocks;
        for (i64 at = first; at < end;) {
            for (; block >= strips.blocks; block -= strips.blocks) line++;
            int n = special ? 0 : find_batch(line, block, end - at);
            if (n < 1 || !quantize_batch(line, block, at, n)) {
                quantize_strip(line, block, at, int(end - at < W ? end - at : W));
                n = 1;
            }
            at += n * W;
            block += n * W;
        }
    }

    // The next strips among `left` blocks whose elements, and codes, lie one behind the other; how many.
    int find_batch(i64 line, i64 block, i64 left) {
        const bool flat = strips.flat_in && strips.flat_out;
        const i64 full =
            flat ? (m.count - line) * strips.blocks : m.length / B;  // blocks from the start of the line
        const T* x = strips.source(line, block);
        u8* out = strips.target(line, block);
        int n = 0;
        for (; n < batch && (n + 1) * W <= left && block + W <= full;
             n++, x += strip, out += W * strips.bytes) {
            source[n] = x;
            target[n] = out;
            if ((block += W) < strips.blocks || flat) continue;
            block = 0;
            line++;
            x = strips.source(line, -W);
            out = strips.target(line, -W);
        }
        return n;
    }

    // The second level of NVFP4 where each line has its own.
    void set_global(i64 at, int lanes) {
        const i64 line = at / strips.blocks, last = (at + lanes - 1) / strips.blocks;
        if (line == last && line == global_line) return;
        global_line = line == last ? line : -1;
        GlobalScale g{};
        for (i64 b = 0, known = -1; b < W; b++) {
            const i64 l = b < lanes ? (at + b) / strips.blocks : line;
            if (l != known) g = nvfp4_global(d.line_amax[m.line0 + (known = l)], p.e4m3_max);
            global.set(int(b), g);
        }
    }

    // n strips, in three loops: within one strip, each step waits for the step before.
    bool quantize_batch(i64 line, i64 block, i64 at, int n) {
        if (!find_maxima<false>(n)) return false;
        for (int s = 0; s < n; s++) {
            if (d.line_amax) set_global(at + s * W, W);
            const BlockFactors f = factors_of<E>(amax[s], d, global);
            store(encode[s], f.encode);
            put_factors(d.scales, f.stored, line, block, strips.blocks, W, m.line0, m.block0);
            for (block += W; block >= strips.blocks; block -= strips.blocks) line++;
        }
        // What comes after them, in their order.
        const i64 ahead = (line < m.count ? strips.source(line, block) : source[n - 1] + strip) - source[0];
        for (int s = 0; s < n; s++) {
            prefetch(source[s] + ahead, 1, 0, i64(sizeof(T)) * strip);
            codes(source[s], s, target[s], d.nontemporal && (uintptr_t(target[s]) & (GROUP - 1)) == 0);
        }
        return true;
    }
    // False where one of them is not finite. Down: the blocks of a strip lie in lines of their own.
    template <bool Down>
    bool find_maxima(int n) {
        VI top{};
        for (int s = 0; s < n; s++) {
            amax[s] = strip_maxima<D, B>(source[s], Down ? m.stride : B);
            top = max(top, amax[s]);
        }
        return !any(top >= all(INF_BITS));
    }

    // Strips of the same block of W lines, for blocks of many groups in lines that hold few of them. False,
    // with nothing of value written, where a value is not finite.
    bool run_down() {
        const bool stream =
            d.nontemporal && ((uintptr_t(m.out) | uintptr_t(m.out_stride)) & (GROUP - 1)) == 0;
        for (i64 line = 0; line < m.count; line += W)
            for (i64 block = 0; block < strips.blocks; block++) {
                source[0] = strips.source(line, block);
                if (!find_maxima<true>(1)) return false;
                const BlockFactors f = factors_of<E>(amax[0], d, global);
                store(encode[0], f.encode);
                const ScaleLayout& s = d.scales;
                store(s.base + 4 * s.at(m.line0 + line, m.block0 + block), f.stored);
                codes_to(*this, source[0], 0, strips.target(line, block), stream, m.stride, m.out_stride);
            }
        return true;
    }

    void quantize_strip(i64 line, i64 block, i64 at, int lanes) {
        const bool direct_in = lanes == W && strips.direct(line, block, strips.flat_in);
        const bool direct = lanes == W && strips.direct(line, block, strips.flat_out);
        if (!direct_in) strips.gather(line, block, gathered);
        const T* x = direct_in ? strips.source(line, block) : gathered;
        u8* out = direct ? strips.target(line, block) : scattered;
        const bool stream = direct && d.nontemporal && (uintptr_t(out) & (GROUP - 1)) == 0;
        if (d.line_amax) set_global(at, lanes);
        const VI stored = strip_of(x, out, at, stream);
        if (!direct) strips.scatter(line, block, scattered, d.whole_groups, d.nontemporal);
        put_factors(d.scales, stored, line, block, strips.blocks, lanes, m.line0, m.block0);
    }

    // Codes of a strip of finite values whose maxima and factors are known.
    void codes(const T* x, int s, u8* target, bool stream) {
        // Packed codes leave in pieces too small to go around the cache one by one.
        u8* out = stream && Codes > 1 ? scattered : target;
        codes_to(*this, x, s, out,
                 stream && out == target);  // what went around the cache takes long to read back
        if (out != target) put_bytes(target, out, W * strips.bytes, true);
    }
    INLINE void codes_to(const LineQuantizer& q, const T* x, int s, u8* out, bool stream, i64 stride = B,
                         i64 out_stride = B) {
#if QT_ISA == 512
        const VF f = useful_factor(q.amax[s], load<VF>(q.encode[s]));
        if (encode_small<D, E, B, Codes>(x, q.amax[s], f, out, stream)) return;
        if ((q.p.scale == SCALE_E8M0 || q.p.pow2) &&
            encode_pow2<D, E, B, Codes>(x, (VI)f, out, stream, stride, out_stride))
            return;
#endif
        encode_strip<D, E, B, Codes, false>(x, q.encode[s], out, stream, stride, out_stride);
    }

    VI strip_of(const T* x, u8* out, i64 at, bool stream) {
        if (special) return special_strip(x, out, at);
        amax[0] = strip_maxima<D, B>(x);
        const bool finite = !any(amax[0] >= all(INF_BITS));
        if (nv && !finite) return special_strip(x, out, at);
        const BlockFactors f = factors_of<E>(amax[0], d, global);
        store(encode[0], f.encode);
        if (finite) {
            codes(x, 0, out, stream);
        } else {
            for (int i = 0; i < strip; i++) wide[i] = D::to_float(x[i]);
            encode_strip<Float32, E, B, Codes, true>(wide, encode[0], out, false);
        }
        return f.stored;
    }

    // NVFP4 with a rotation, random rounding, two candidates, or values that are not finite.
    __attribute__((noinline)) VI special_strip(const T* x, u8* out, i64 at) {
        if constexpr (B != NV) return VI{};
#if QT_ISA == 512
        VI known;
        if (p.stochastic && !d.rotate && stochastic_small<D>(x, out, at, known)) return known;
        if (d.rotate && !p.stochastic && !p.four_over_six && rotated_small(x, out, known)) return known;
#endif
        to_finite<D>(x, wide, d.rotate, d.rotation);
        const VI amax = strip_maxima<Float32, NV>(wide);
        if (p.four_over_six) {
            VI stored =
                encode_4over6(wide, 1, 0, unpacked, 0, p, amax, global.amax, global.scale, global.inverse);
            pack_all<Codes>(unpacked, out);
            return stored;
        }
#if QT_ISA == 512
        if (p.stochastic && stochastic_small<Float32>(wide, out, at, known)) return known;
#endif
        BlockFactors f = factors_of<E>(amax, d, global);
        store(encode[0], f.encode);
        if (!p.stochastic) {
#if QT_ISA == 512
            if (encode_small<Float32, E, B, Codes>(wide, amax, f.encode, out, false)) return f.stored;
#endif
            encode_strip<Float32, E, B, Codes, false>(wide, encode[0], out, false);
            return f.stored;
        }
        alignas(64) u8 random[W * NV];
        noise_of(at, random);
        encode_stochastic(wide, encode[0], random, unpacked);
        pack_all<Codes>(unpacked, out);
        return f.stored;
    }
    void noise_of(i64 at, u8* random) {
        i64 line = at / strips.blocks, block = at % strips.blocks;
        alignas(64) i64 element[W];
        const i64 first = (m.line0 + line) * m.total + (m.block0 + block) * NV;
        for (int b = 0; b < W; b++) element[b] = first + b * NV;
        if (block + W > strips.blocks)
            for (int b = 0; b < W; b++) {
                element[b] = (m.line0 + line) * m.total + (m.block0 + block) * NV;
                if (++block == strips.blocks) {
                    block = 0;
                    line++;
                }
            }
        noise(element, d.stream, keys, random);
    }
#if QT_ISA == 512
    // Finite values whose factors allow the short way to random rounding.
    template <class S>
    bool stochastic_small(const typename S::T* from, u8* out, i64 at, VI& stored) {
        if constexpr (Codes == 2) {
            const VI top = strip_maxima<S, B>(from);
            if (any(top >= all(INF_BITS))) return false;
            const BlockFactors f = factors_of<E>(top, d, global);
            const VF encode = useful_factor(top, f.encode);
            if (!fits_places<S>(top, encode)) return false;
            alignas(64) u8 random[W * NV];
            noise_of(at, random);
            stochastic_strip<S>(from, encode, random, out);
            stored = f.stored;
            return true;
        }
        return false;
    }
    // The same for rotated values and nearest rounding. The second level is one for all blocks here.
    bool rotated_small(const T* x, u8* out, VI& stored) {
        if constexpr (Codes == 2 && B == NV) {
            VF s[NV];
            VI top;
            if (!rotated_lanes<D>(x, d.rotation, s, top)) return false;
            const BlockFactors f = factors_of<E>(top, d, global);
            const VF encode = useful_factor(top, f.encode);
            if (!fits_quarters<D, false>(top, encode)) return false;
            encode_lanes<D::pairs>(s, encode * all(4.0f * AFTER<D>), out);
            stored = (VI)_mm512_permutexvar_epi32(_mm512_load_si512(LANES<D::pairs>.lane), (__m512i)f.stored);
            return true;
        }
        return false;
    }
#endif
};

template <class D, class E, int B, int Codes>
static void quantize_lines(const Lines<typename D::T>& m, const Direction& d, i64 first, i64 end) {
    LineQuantizer<D, E, B, Codes>(m, d).run(first, end);
}

}  // namespace QT_NAMESPACE
