// FP8 with one factor for the tensor, a row or a column.
#pragma once
#include "amax.h"
#include "memory.h"
#include "scale_layout.h"
#include "transpose.h"

namespace QT_NAMESPACE {

constexpr i64 RUN = 4096;  // elements that stay in the first cache level between two looks

// One factor for many elements.
template <class D, class E>
struct OneFactor {
    using T = typename D::T;
    VF four[4];
#if QT_ISA == 512
    FactorTable<E> table;
    OneFactor(float f, i64 count)
        : four{all(f), all(f), all(f), all(f)}, table(f, D::id == BF16 ? count : 0) {}
#else
    OneFactor(float f, i64) : four{all(f), all(f), all(f), all(f)} {}
#endif
    template <bool Safe>
    INLINE VB codes(const OneFactor& o, const T* x, i64, [[maybe_unused]] u32& history) {
#if QT_ISA == 512
        if constexpr (D::id == BF16 && !Safe)
            if (o.table.usable) return codes_of_table<E>(x, o.table, o.four, history);
        if constexpr (!Safe) return codes_of_products<D, E>(x, o.four, history);
#endif
        return encode_group<D, E, Safe, false>(x, o.four);
    }
};
// Factors in the lanes' order (position() in simd.h), 4 vectors a group.
template <class D, class E>
struct LaneFactors {
    const VF* f;
    template <bool Safe>
    INLINE VB codes(const LaneFactors& o, const typename D::T* x, i64 i, [[maybe_unused]] u32& history) {
#if QT_ISA == 512
        if constexpr (!Safe) return codes_of_products<D, E>(x, o.f + i / W, history);
#endif
        return encode_group<D, E, Safe, false>(x, o.f + i / W);
    }
};

// n elements to codes; asks for the elements `ahead` bytes on.
template <class D, class E, bool Safe, class F>
static void encode_run(const typename D::T* x, i64 n, const F& factors, u8* out, bool stream, i64 ahead) {
    using T = typename D::T;
    stream = stream && (uintptr_t(out) & (GROUP - 1)) == 0;
    i64 i = 0;
    u32 history = 0;
    for (; i + GROUP <= n; i += GROUP) {
        prefetch((const u8*)(x + i) + ahead, 1, 0, GROUP * sizeof(T));
        store_bytes(out + i, F::template codes<Safe>(factors, x + i, i, history), stream);
    }
    if (i < n) {
        T t[GROUP] = {};
        u8 codes[GROUP];
        memcpy(t, x + i, sizeof(T) * size_t(n - i));
        store(codes, F::template codes<Safe>(factors, t, i, history));
        memcpy(out + i, codes, size_t(n - i));
    }
}
template <class D, class E, class F>
static void encode_any(const typename D::T* x, i64 n, const F& factors, u8* out, bool stream, bool safe,
                       i64 ahead = AHEAD) {
    if (safe)
        encode_run<D, E, true>(x, n, factors, out, false, ahead);
    else
        encode_run<D, E, false>(x, n, factors, out, stream, ahead);
}

template <class D, class E>
struct Float8Quantizer {
    using T = typename D::T;
    const CQuantizer& p;
    const QuantizeCall& c;
    const T* x;
    const i64 begin, end;  // rows to quantize
    const bool nontemporal;

    Float8Quantizer(const CQuantizer& quantizer, const QuantizeCall& call, bool stream)
        : p(quantizer),
          c(call),
          x((const T*)call.x),
          begin(call.begin),
          end(call.end ? call.end : call.rows),
          nontemporal(stream) {}

    // Decides which elements take the slow, safe way: those that may not be finite, and those whose factor
    // makes signs and NaN those of the products.
    struct FiniteCheck {
        bool always_safe;  // all elements take it
        bool scans;        // looks for such elements, and for the largest magnitude
        i32 largest = 0;   // magnitude that the scans have met
        bool needs_safe(const T* from, i64 n) {
            if (!scans) return always_safe;
            const i32 amax = amax_run<D>(from, n);
            largest = largest > amax ? largest : amax;
            return always_safe || amax >= INF_BITS;
        }
        void merge_into(i32* total) const { raise(total, largest); }
    };

    float scale_of(i32 amax) const { return fp8_scale(all(amax), bits<float>(E::max_bits), p, FLT_MAX)[0]; }

    void run() {
        if (p.family == TENSOR)
            tensor();
        else if (p.family == ROW)
            rows();
        else
            columns();
    }

    void tensor() {
        i32 found = 0;
        float scale = c.scale ? *c.scale : 1.0f;
        const bool own = !c.scale && !c.row.given;
        if (own) found = amax_tensor<D>(c, false);
        if (!c.scale) scale = scale_of(own ? found : bits<i32>(*c.row.given));
        *c.scale_inv = 1.0f / scale;
        const FiniteCheck check{is_odd(scale) || found >= INF_BITS, !own};
        const i32 met = with_factor(OneFactor<D, E>(scale, c.rows * c.cols), check, own);
        if (!own) found = met;
        if (c.amax_out) *c.amax_out = bits<float>(found > INF_BITS ? 0x7fc00000 : found);
    }

    // Codes with the factor of the tensor. Returns the largest magnitude that was met where the check scans;
    // `again`: for the second time, all of the tensor has been read.
    i32 with_factor(const OneFactor<D, E>& f, const FiniteCheck& check, bool again) {
        if (c.column.data || (c.stride != c.cols && c.rows > 1))
            return tiles(check, again, [&](i64) -> const OneFactor<D, E>& { return f; });
        return flat(f, check, again);
    }

    void rows() {
        given_rows();
        encode_rows();
    }

    // The place of the factors holds the maxima until they are known.
    void given_rows() {
        if (!c.scale && c.row.given) memcpy(c.scale_inv, c.row.given, sizeof(i32) * size_t(c.rows));
    }

    void encode_rows() {
        if (c.column.data) return transposed_rows();
        parallel(end - begin, 1, c.threads, [&](i64 a, i64 b) {
            for (i64 r = begin + a; r < begin + b; r++) {
                const Scaled s = row_scale(r);
                const OneFactor<D, E> f(s.scale, c.cols);
                // A row that stays in the cache while it is read twice; the next one comes meanwhile.
                const i64 next = c.stride * i64(sizeof(T));
                encode_any<D, E>(x + r * c.stride, c.cols, f, c.row.data + r * c.cols, nontemporal, s.safe,
                                 next < 1 << 16 ? next : AHEAD);
            }
        });
    }

    void columns() {
        const bool own = !c.scale && !c.row.given;
        if (own) amax_columns<D>(c, false, (i32*)c.scale_inv);
        encode_columns(ColumnScales(*this), own);
    }

    // What encodes each column, from given factors, given maxima, or the maxima that are where the inverse
    // factors will be, which it stores.
    struct ColumnScales {
        const Array<VF> lanes;
        bool odd = false;

        explicit ColumnScales(const Float8Quantizer& q) : lanes((q.c.cols + GROUP - 1) / GROUP * 4) {
            const QuantizeCall& c = q.c;
            i32* amax = (i32*)c.scale_inv;
            if (!c.scale && c.row.given) memcpy(amax, c.row.given, sizeof(i32) * size_t(c.cols));
            for (i64 k = 0; c.scale && k < c.cols; k++) odd |= is_odd(c.scale[k]);
            for (i64 g = 0; g * GROUP < c.cols; g++)
                for (int j = 0; j < 4; j++)
                    for (int i = 0; i < W; i++) {
                        const i64 k = g * GROUP + position<D>(j, i);
                        float factor = 0.0f;
                        if (k < c.cols) factor = c.scale ? c.scale[k] : q.scale_of(amax[k]);
                        lanes[4 * g + j][i] = factor;
                        if (k < c.cols) c.scale_inv[k] = 1.0f / factor;
                    }
        }
    };
    void encode_columns(const ColumnScales& scales, bool again) {
        tiles(FiniteCheck{scales.odd, !scales.odd}, again,
              [&](i64 k) { return LaneFactors<D, E>{scales.lanes + k / W}; });
    }

    // A given factor that is no positive finite number: signs and NaN are those of the products.
    static bool is_odd(float scale) { return !(scale > 0 && scale <= FLT_MAX); }

    // The factor of a row: given, from a given maximum, or from its own. Stores its inverse.
    struct Scaled {
        float scale;
        bool safe;  // signs and NaN need the safe way
    };
    Scaled row_scale(i64 r) const {
        const i32 own = amax_run<D>(x + r * c.stride, c.cols), given = ((i32*)c.scale_inv)[r];
        const float scale = c.scale ? c.scale[r] : scale_of(c.row.given ? given : own);
        c.scale_inv[r] = 1.0f / scale;
        return {scale, own >= INF_BITS || is_odd(scale)};
    }

    // Parts of 0 .. n in the order in which the cache still has them.
    static i64 cache_order(i64 i, i64 n, bool again) { return again ? n - 1 - i : i; }

    i32 flat(const OneFactor<D, E>& f, const FiniteCheck& check, bool again) {
        const T* from = x + begin * c.cols;
        u8* out = c.row.data + begin * c.cols;
        i32 met = 0;
        parallel((end - begin) * c.cols, RUN, c.threads, [&](i64 a, i64 b) {
            constexpr i64 part = 16 * RUN;
            FiniteCheck thread_check = check;
            const i64 parts = (b - a + part - 1) / part;
            for (i64 p = 0; p < parts; p++) {
                const i64 at = a + cache_order(p, parts, again) * part;
                for (i64 i = at; i < b && i < at + part; i += RUN) {
                    const i64 n = b - i < RUN ? b - i : RUN;
                    const bool safe = thread_check.needs_safe(from + i, n);
                    // A run that is read twice stays in the cache; the next one comes meanwhile.
                    encode_any<D, E>(from + i, n, f, out + i, nontemporal, safe,
                                     check.scans ? RUN * i64(sizeof(T)) : AHEAD);
                }
            }
            thread_check.merge_into(&met);
        });
        return met;
    }

    // Rows that are transposed at once: whole lines of memory of the transpose. Their codes, up to WIDE
    // columns of them, stay in the second cache level; PAD keeps rows from meeting in one set of it.
    static constexpr i64 LINES = 128, WIDE = 16384, PAD = 64;

    // Codes leave as they are and transposed. encode(r, i, k, n, out): n codes from column k of row r, the
    // i-th of its band; k = 0 comes first.
    template <class F>
    void transposed(i64 first, i64 last, bool again, const F& encode) const {
        const i64 part = smaller(c.cols, WIDE), ld = up(part, GROUP) + PAD,
                  count = (last - first + LINES - 1) / LINES;
        const Array<u8> codes(LINES * ld);
        for (i64 band = 0; band < count; band++) {
            const i64 r = first + cache_order(band, count, again) * LINES, n = smaller(last - r, LINES);
            for (i64 k = 0; k < c.cols; k += part) {
                const i64 width = smaller(c.cols - k, part);
                for (i64 i = 0; i < n; i++) {
                    encode(r + i, i, k, width, codes + i * ld);
                    if (c.row.data)
                        put_bytes(c.row.data + (r + i) * c.cols + k, codes + i * ld, width, nontemporal);
                }
                transpose_bytes(codes, ld, c.column.data + k * c.rows + r, c.rows, n, width, nontemporal);
            }
        }
    }

    // Rows with factors of their own: each is encoded while the cache has it from the search for its maximum,
    // but for the later parts of very wide ones.
    void transposed_rows() {
        using Factor = OneFactor<D, E>;
        parallel(end - begin, LINES, c.threads, [&](i64 a, i64 b) {
            const Array<Factor> factors(LINES);
            bool safe[LINES];
            transposed(begin + a, begin + b, false, [&](i64 r, i64 i, i64 k, i64 n, u8* out) {
                if (!k) {
                    const Scaled s = row_scale(r);
                    new (factors + i) Factor(s.scale, c.cols);
                    safe[i] = s.safe;
                }
                encode_any<D, E>(x + r * c.stride + k, n, factors[i], out, false, safe[i],
                                 c.stride * i64(sizeof(T)));
            });
        });
    }

    // factors(column): what encodes from there on.
    template <class F>
    i32 tiles(const FiniteCheck& check, bool again, const F& factors) {
        i32 met = 0;
        i64 unit = 1;
        if (c.column.data) unit = c.row.data ? LINES : TALL;
        parallel(end - begin, unit, c.threads, [&](i64 a, i64 b) {
            FiniteCheck thread_check = check;
            const auto encode = [&](i64 r, i64 k, i64 n, u8* out, bool stream) {
                for (i64 j = 0; j < n; j += RUN) {
                    const i64 run = n - j < RUN ? n - j : RUN;
                    const T* from = x + r * c.stride + k + j;
                    const bool safe = thread_check.needs_safe(from, run);
                    encode_any<D, E>(from, run, factors(k + j), out + j, stream, safe,
                                     check.scans ? RUN * i64(sizeof(T)) : AHEAD);
                }
            };
            if (c.column.data && !c.row.data)
                tall(begin + a, begin + b, thread_check, again, factors, encode);
            else if (c.column.data)
                transposed(begin + a, begin + b, again,
                           [&](i64 r, i64, i64 k, i64 n, u8* out) { encode(r, k, n, out, false); });
            else
                for (i64 r = begin + a; r < begin + b; r++)
                    encode(r, 0, c.cols, c.row.data + r * c.cols, nontemporal);
            thread_check.merge_into(&met);
        });
        return met;
    }

    // Codes that leave only transposed: in tiles so small that reading and writing take turns all the time,
    // and so tall that a page of the transpose, once found, gets several lines.
    static constexpr i64 TALL = 256, NARROW = 64;
    template <class F, class G>
    void tall(i64 first, i64 last, FiniteCheck& check, bool again, const F& factors, const G& encode) const {
        alignas(64) u8 codes[TALL * NARROW];
        const i64 across = (c.cols + NARROW - 1) / NARROW, count = (last - first + TALL - 1) / TALL * across;
        for (i64 t = 0; t < count; t++) {
            const i64 at = cache_order(t, count, again),
                      after = cache_order(t + 1 < count ? t + 1 : t, count, again);
            const i64 r = first + at / across * TALL, k = at % across * NARROW;
            const i64 n = last - r < TALL ? last - r : TALL,
                      width = c.cols - k < NARROW ? c.cols - k : NARROW;
            if (width == NARROW) {
                const i64 r1 = first + after / across * TALL;
                const bool reaches = r1 + n <= last;  // the tile that follows has all these rows
                const T* from = x + r * c.stride + k;
                const T* next = reaches ? x + r1 * c.stride + after % across * NARROW : from;
                i32 met = 0;
                if (!check.always_safe)
                    met = check.scans ? encode_tile<false, true>(from, n, next, factors(k), codes)
                                      : encode_tile<false, false>(from, n, next, factors(k), codes);
                if (check.always_safe || met >= INF_BITS)
                    met = encode_tile<true, true>(from, n, next, factors(k), codes);
                check.largest = check.largest > met ? check.largest : met;
            } else {
                for (i64 i = 0; i < n; i++) encode(r + i, k, width, codes + i * NARROW, false);
            }
            transpose_bytes(codes, NARROW, c.column.data + k * c.rows + r, c.rows, n, width, nontemporal);
        }
    }
    // n rows of NARROW columns to codes one behind the other. Returns the largest magnitude if it scans.
    template <bool Safe, bool Scans, class F>
    i32 encode_tile(const T* from, i64 n, const T* next, const F& f, u8* codes) const {
        VH words[2] = {};
        VI top{};
        u32 history = 0;
        for (i64 i = 0; i < n; i++, from += c.stride, next += c.stride) {
            prefetch(next, 1, 0, NARROW * i64(sizeof(T)));
            for (i64 g = 0; g < NARROW; g += GROUP) {
                if constexpr (Scans && D::pairs) {
                    for (int h = 0; h < 2; h++) {
                        const VH w = load<VH>(from + g + h * 2 * W) & (VH)all(0x7fff7fff);
                        words[h] = words[h] > w ? words[h] : w;
                    }
                } else if constexpr (Scans) {
                    for (int j = 0; j < 4; j++) top = max(top, D::one(from + g + j * W) & all(ABS));
                }
                store(codes + i * NARROW + g, F::template codes<Safe>(f, from + g, g, history));
            }
        }
        for (int h = 0; h < 2; h++)
            top = max(top, max((VI)words[h] << 16, (VI)words[h] & all(i32(0xffff0000))));
        return lane_max(top);
    }
};

}  // namespace QT_NAMESPACE
