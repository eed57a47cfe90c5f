// Block formats along lines: W blocks at a time, from maxima to stored codes. A line is a row of the matrix
// that is given: of the tensor, or of the transpose that quantize_columns.h makes of a tile.
#pragma once
#include "encode_strips.h"

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

    const T* const next;  // a tile that is read after these lines, row for row, or null

    LineQuantizer(const Lines<T>& lines, const Direction& direction, const T* following = nullptr)
        : m(lines),
          d(direction),
          p(*direction.quantizer),
          strips(lines),
          special(nv && (d.rotate || p.stochastic || p.four_over_six)),
          keys(d.seed),
          next(following) {
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
        i64 ahead = (line < m.count ? strips.source(line, block) : source[n - 1] + strip) - source[0];
        if (next) ahead = next - m.x;
        const int count = next ? strip / 2 : strip;  // ColumnQuantizer asks for the others
        for (int s = 0; s < n; s++)
            codes(source[s], s, target[s], d.nontemporal && (uintptr_t(target[s]) & (GROUP - 1)) == 0,
                  {source[s] + ahead, count});
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
                codes_to(*this, source[0], 0, strips.target(line, block), stream, m.stride, m.out_stride, {});
            }
        return true;
    }

    void quantize_strip(i64 line, i64 block, i64 at, int lanes) {
        const bool direct_in = lanes == W && strips.direct(line, block, strips.flat_in);
        const bool direct = lanes == W && strips.direct(line, block, strips.flat_out);
        if (!direct_in) strips.gather(line, block, gathered);
        const T* x = direct_in ? strips.source(line, block) : gathered;
        if (special && direct_in) look_ahead<int(sizeof(T)) * strip>(x);
        u8* out = direct ? strips.target(line, block) : scattered;
        const bool stream = direct && d.nontemporal && (uintptr_t(out) & (GROUP - 1)) == 0;
        if (d.line_amax) set_global(at, lanes);
        const VI stored = strip_of(x, out, at, stream);
        if (!direct) strips.scatter(line, block, scattered, d.whole_groups, d.nontemporal);
        put_factors(d.scales, stored, line, block, strips.blocks, lanes, m.line0, m.block0);
    }

    // Codes of a strip of finite values whose maxima and factors are known.
    void codes(const T* x, int s, u8* target, bool stream, const Soon<T>& soon) {
        // Packed codes leave in pieces too small to go around the cache one by one.
        u8* out = stream && Codes > 1 ? scattered : target;
        // What went around the cache takes long to read back.
        codes_to(*this, x, s, out, stream && out == target, B, B, soon);
        if (out != target) put_bytes(target, out, W * strips.bytes, true);
    }
    INLINE void codes_to(const LineQuantizer& q, const T* x, int s, u8* out, bool stream, i64 stride,
                         i64 out_stride, const Soon<T>& soon) {
#if QT_ISA == 512
        const VF f = useful_factor(q.amax[s], load<VF>(q.encode[s]));
        if (encode_small<D, E, B, Codes>(x, q.amax[s], f, out, stream, soon)) return;
        if ((q.p.scale == SCALE_E8M0 || q.p.pow2) &&
            encode_pow2<D, E, B, Codes>(x, (VI)f, out, stream, stride, out_stride, soon))
            return;
#endif
        encode_strip<D, E, B, Codes, false>(x, q.encode[s], out, stream, stride, out_stride, soon);
    }

    VI strip_of(const T* x, u8* out, i64 at, bool stream) {
        if (special) return special_strip(x, out, at);
        amax[0] = strip_maxima<D, B>(x);
        const bool finite = !any(amax[0] >= all(INF_BITS));
        if (nv && !finite) return special_strip(x, out, at);
        const BlockFactors f = factors_of<E>(amax[0], d, global);
        store(encode[0], f.encode);
        if (finite) {
            codes(x, 0, out, stream, {});
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
static void quantize_lines(const Lines<typename D::T>& m, const Direction& d, i64 first, i64 end,
                           const typename D::T* next = nullptr) {
    LineQuantizer<D, E, B, Codes>(m, d, next).run(first, end);
}

}  // namespace QT_NAMESPACE
