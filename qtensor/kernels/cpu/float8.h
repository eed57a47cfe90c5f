// FP8 with one factor for the tensor, a row or a column.
#pragma once
#include "amax.h"
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
    OneFactor(float f, i64 count) : four{all(f), all(f), all(f), all(f)}, table(f, D::id == BF16 ? count : 0) {}
#else
    OneFactor(float f, i64) : four{all(f), all(f), all(f), all(f)} {}
#endif
    template <bool Safe>
    INLINE VB codes(const OneFactor& o, const T* x, i64) {
#if QT_ISA == 512
        if constexpr (D::id == BF16 && !Safe)
            if (o.table.usable) return codes_of_table<E>(x, o.table, o.four);
#endif
        return encode_group<D, E, Safe, false>(x, o.four);
    }
};
// Factors in the lanes' order (position() in simd.h), 4 vectors a group.
template <class D, class E>
struct LaneFactors {
    const VF* f;
    template <bool Safe>
    INLINE VB codes(const LaneFactors& o, const typename D::T* x, i64 i) {
        return encode_group<D, E, Safe, false>(x, o.f + i / W);
    }
};

// n elements to codes; asks for the elements `ahead` bytes on.
template <class D, class E, bool Safe, class F>
static void encode_run(const typename D::T* x, i64 n, const F& factors, u8* out, bool stream, i64 ahead) {
    using T = typename D::T;
    stream = stream && (uintptr_t(out) & (GROUP - 1)) == 0;
    i64 i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        prefetch((const u8*)(x + i) + ahead, 1, 0, GROUP * sizeof(T));
        store_bytes(out + i, F::template codes<Safe>(factors, x + i, i), stream);
    }
    if (i < n) {
        T t[GROUP] = {};
        u8 codes[GROUP];
        memcpy(t, x + i, sizeof(T) * size_t(n - i));
        store(codes, F::template codes<Safe>(factors, t, i));
        memcpy(out + i, codes, size_t(n - i));
    }
}
template <class D, class E, class F>
static void encode_any(const typename D::T* x, i64 n, const F& factors, u8* out, bool stream, bool safe, i64 ahead = AHEAD) {
    if (safe)
        encode_run<D, E, true>(x, n, factors, out, false, ahead);
    else
        encode_run<D, E, false>(x, n, factors, out, stream, ahead);
}

template <class D, class E>
struct Float8Quantizer {
    using T = typename D::T;
    const Plan& p;
    const QuantizeCall& c;
    const T* x;
    const i64 begin, end;  // rows to quantize
    const bool nontemporal;

    Float8Quantizer(const Plan& plan, const QuantizeCall& call, bool stream)
        : p(plan), c(call), x((const T*)call.x), begin(call.begin), end(call.end ? call.end : call.rows), nontemporal(stream) {}

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
        if (own || c.amax_out) found = amax_tensor<D>(c, false);
        if (!c.scale) scale = scale_of(own ? found : bits<i32>(*c.row.given));
        *c.scale_inv = 1.0f / scale;
        if (c.amax_out) *c.amax_out = bits<float>(found > INF_BITS ? 0x7fc00000 : found);
        with_factor(OneFactor<D, E>(scale, c.rows * c.cols), is_odd(scale) ? 1 : own || c.amax_out ? found >= INF_BITS : -1);
    }

    // Codes with the factor of the tensor; `safe` as careful() has it.
    void with_factor(const OneFactor<D, E>& f, int safe) {
        if (c.column.data || (c.stride != c.cols && c.rows > 1))
            tiles(safe, [&](i64, i64) -> const OneFactor<D, E>& { return f; });
        else
            flat(f, safe);
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
        if (c.column.data) return turned_rows();
        parallel(end - begin, 1, c.threads, [&](i64 a, i64 b) {
            for (i64 r = begin + a; r < begin + b; r++) {
                const Scaled s = row_scale(r);
                const OneFactor<D, E> f(s.scale, c.cols);
                // A row that stays in the cache while it is read twice; the next one comes meanwhile.
                const i64 next = c.stride * i64(sizeof(T));
                encode_any<D, E>(x + r * c.stride, c.cols, f, c.row.data + r * c.cols, nontemporal, s.safe, next < 1 << 16 ? next : AHEAD);
            }
        });
    }

    void columns() {
        i32* amax = (i32*)c.scale_inv;
        if (!c.scale && !c.row.given) amax_columns<D>(c, false, amax);
        if (!c.scale && c.row.given) memcpy(amax, c.row.given, sizeof(i32) * size_t(c.cols));
        const i64 groups = (c.cols + GROUP - 1) / GROUP;
        int safe = -1;
        for (i64 k = 0; c.scale && k < c.cols; k++)
            if (is_odd(c.scale[k])) safe = 1;
        VF* factors = new (std::align_val_t(64)) VF[size_t(4 * groups)];
        for (i64 g = 0; g < groups; g++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < W; i++) {
                    const i64 k = g * GROUP + position<D>(j, i);
                    factors[4 * g + j][i] = k >= c.cols ? 0.0f : c.scale ? c.scale[k] : scale_of(amax[k]);
                }
        for (i64 g = 0; g < groups; g++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < W; i++) {
                    const i64 k = g * GROUP + position<D>(j, i);
                    if (k < c.cols) c.scale_inv[k] = 1.0f / factors[4 * g + j][i];
                }
        tiles(safe, [&](i64, i64 k) { return LaneFactors<D, E>{factors + k / W}; });
        operator delete[](factors, std::align_val_t(64));
    }

    // A given factor that is no positive finite number: signs and NaN are those of the products.
    static bool is_odd(float scale) { return !(scale > 0 && scale <= FLT_MAX); }

    // The factor of a row: given, from a given maximum, or from its own. Stores its inverse.
    struct Scaled {
        float scale;
        bool safe;  // signs and NaN need care
    };
    Scaled row_scale(i64 r) const {
        const i32 own = amax_run<D>(x + r * c.stride, c.cols), given = ((i32*)c.scale_inv)[r];
        const float scale = c.scale ? c.scale[r] : scale_of(c.row.given ? given : own);
        c.scale_inv[r] = 1.0f / scale;
        return {scale, own >= INF_BITS || is_odd(scale)};
    }

    // safe: 1 or 0 where it is known whether there are values that are not finite, else -1.
    static bool careful(const T* from, i64 n, int safe) { return safe < 0 ? amax_run<D>(from, n) >= INF_BITS : safe; }

    void flat(const OneFactor<D, E>& f, int safe) {
        const T* from = x + begin * c.cols;
        u8* out = c.row.data + begin * c.cols;
        parallel((end - begin) * c.cols, RUN, c.threads, [&](i64 a, i64 b) {
            // Backwards: what the pass for the maximum read last is still in the cache.
            constexpr i64 part = 16 * RUN;
            for (i64 at = a + (b - a - 1) / part * part; at >= a; at -= part)
                for (i64 i = at; i < b && i < at + part; i += RUN) {
                    const i64 n = b - i < RUN ? b - i : RUN;
                    encode_any<D, E>(from + i, n, f, out + i, nontemporal, careful(from + i, n, safe));
                }
        });
    }

    static constexpr i64 BAND = 256, TILE = 128;  // rows and columns of a tile that is transposed

    void turned_rows() {
        constexpr i64 band = 64;  // few, so that they stay in the cache while they are read twice
        parallel(end - begin, band, c.threads, [&](i64 a, i64 b) {
            OneFactor<D, E>* f = (OneFactor<D, E>*)operator new(sizeof(OneFactor<D, E>) * band, std::align_val_t(64));
            Tile tile(*this);
            for (i64 r = begin + a; r < begin + b; r += band) {
                const i64 n = begin + b - r < band ? begin + b - r : band;
                bool safe = false;
                for (i64 i = 0; i < n; i++) {
                    const Scaled s = row_scale(r + i);
                    new (f + i) OneFactor<D, E>(s.scale, c.cols);
                    safe |= s.safe;
                }
                for (i64 k = 0; k < c.cols; k += TILE)
                    tile.run(r, n, k, safe, [&](i64 row, i64) -> const OneFactor<D, E>& { return f[row]; });
            }
            operator delete(f, std::align_val_t(64));
        });
    }

    // factors(row of the tile, column): what encodes a row of a tile.
    template <class F>
    void tiles(int safe, const F& factors) {
        parallel(end - begin, c.column.data ? BAND : 1, c.threads, [&](i64 a, i64 b) {
            const i64 last = begin + b;
            if (c.column.data) {
                Tile tile(*this);
                for (i64 r = begin + a; r < last; r += BAND)
                    for (i64 k = 0; k < c.cols; k += TILE) tile.run(r, last - r < BAND ? last - r : BAND, k, safe, factors);
                return;
            }
            for (i64 r = begin + a; r < last; r++)
                for (i64 k = 0; k < c.cols; k += RUN) {
                    const i64 n = c.cols - k < RUN ? c.cols - k : RUN;
                    const T* from = x + r * c.stride + k;
                    encode_any<D, E>(from, n, factors(0, k), c.row.data + r * c.cols + k, nontemporal, careful(from, n, safe));
                }
        });
    }

    // Codes of a tile, which leave as they are and transposed.
    struct Tile {
        const Float8Quantizer& q;
        u8 *codes, *turned;
        explicit Tile(const Float8Quantizer& quantizer)
            : q(quantizer), codes(new (std::align_val_t(64)) u8[size_t(2 * BAND * TILE)]), turned(codes + BAND * TILE) {}
        ~Tile() { operator delete[](codes, std::align_val_t(64)); }

        template <class F>
        void run(i64 row0, i64 n, i64 k, int safe, const F& factors) {
            const QuantizeCall& c = q.c;
            const i64 width = c.cols - k < TILE ? c.cols - k : TILE;
            // The tile to the right, row by row.
            const i64 ahead = k + 2 * TILE <= c.cols ? TILE * i64(sizeof(T)) : 0;
            for (i64 r = 0; r < n; r++) {
                const T* from = q.x + (row0 + r) * c.stride + k;
                encode_any<D, E>(from, width, factors(r, k), codes + r * TILE, false, careful(from, width, safe), ahead);
                if (!c.row.data) continue;
                u8* row = c.row.data + (row0 + r) * c.cols + k;
                put_bytes(row, codes + r * TILE, width, q.nontemporal);
            }
            turn_bytes(codes, TILE, c.column.data + k * c.rows + row0, c.rows, n, width, q.nontemporal, turned);
        }
    };
};

}  // namespace QT_NAMESPACE
