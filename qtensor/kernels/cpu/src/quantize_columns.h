// Blocks of B rows: lanes are columns, so that nothing is transposed; packed codes join the codes of 2 or 4
// rows. What is stored transposed or has square blocks begins with this, too (quantize_transposed.h).
#pragma once
#include "quantize_rows.h"

namespace QT_NAMESPACE {

constexpr i64 COLUMN_TILE = 1024;  // columns whose factors stay in the first cache level while B rows pass

template <class T>
struct Columns {
    const T* x;
    i64 rows, cols, stride;  // rows <= B
    u8* out;                 // the first row of codes of this band
    i64 out_stride;
    i64 column0, block0;
    const T* next;      // rows of the same stride that are read after these, or null
    bool half = false;  // LineQuantizer asks for half of each strip of them
};

template <class D, class E, int B, int Codes>
struct ColumnQuantizer {
    using T = typename D::T;
    static constexpr bool nv = B == NV;
    enum Way { SAFE, PRODUCTS, POW2, QUARTERS };
    const Direction& d;
    const CQuantizer& p;
    GlobalScaleLanes global;
    alignas(64) VI amax[COLUMN_TILE / W];
    alignas(64) VF factor[COLUMN_TILE / W];
    alignas(64) VI stored[COLUMN_TILE / W];
#if QT_ISA == 512
    static constexpr bool quarters = E::width == 4, places = E::width < 8;  // as place_group takes them
    __m512i base[COLUMN_TILE / GROUP][places ? 2 : 1];
#endif

    explicit ColumnQuantizer(const Direction& direction) : d(direction), p(*direction.quantizer) {
        for (int b = 0; b < W; b++) global.set(b, d.global);
    }

    // Codes and factors of MX.
    void run(const Columns<T>& m) {
        const i64 whole = m.cols / GROUP * GROUP;
        for (i64 c = 0; c < whole; c += COLUMN_TILE) {
            Columns<T> t = m;
            t.x += c;
            t.out += c;
            t.column0 += c;
            t.cols = whole - c < COLUMN_TILE ? whole - c : COLUMN_TILE;
            tile(t, d.nontemporal, false);
            for (i64 k = 0; k < t.cols; k += GROUP) put(stored + k / W, t.column0 + k, t.block0, GROUP);
        }
        if (whole < m.cols) tail(m, whole);
    }

    // Columns that do not fill a group: through a copy padded with zeros.
    void tail(const Columns<T>& m, i64 first) {
        const i64 n = m.cols - first;
        T x[B * GROUP] = {};
        u8 out[B * GROUP];
        for (i64 r = 0; r < m.rows; r++) memcpy(x + r * GROUP, m.x + r * m.stride + first, sizeof(T) * n);
        tile({x, m.rows, GROUP, GROUP, out, GROUP, m.column0 + first, m.block0, nullptr}, false, false);
        put(stored, m.column0 + first, m.block0, int(n));
        const i64 lines = (m.rows + Codes - 1) / Codes * (Codes == 4 ? 3 : 1);
        for (i64 r = 0; r < lines; r++) memcpy(m.out + r * m.out_stride + first, out + r * GROUP, n);
    }

    void put(const VI four[4], i64 column, i64 block, int real) {
        u8 t[GROUP];
        store(t, pack<D::pairs>(four));
        const ScaleLayout& s = d.scales;
        if (!s.tiles && s.line_stride == 1) {
            memcpy(s.base + s.at(column, block), t, real);
            return;
        }
        for (int i = 0; i < real; i++) s.put(column + i, block, t[i]);
    }

    // Writes codes, one a byte where `plain`, and `stored`. False, with nothing of value written, where NVFP4
    // meets a value that is not finite.
    bool tile(const Columns<T>& m, bool stream, bool plain) {
        const int groups = int(m.cols / GROUP);
        maxima(m, groups);
        if (p.square) share(4 * groups);
        VI top{};
        for (int j = 0; j < 4 * groups; j++) top = max(top, amax[j]);
        const bool finite = !any(top >= all(INF_BITS));
        if (nv && !finite) return false;
        for (int j = 0; j < 4 * groups; j++) {
            const BlockFactors f = factors_of<E>(amax[j], d, global);
            factor[j] = f.encode;
            stored[j] = f.stored;
        }
        stream = stream && ((uintptr_t(m.out) | uintptr_t(m.out_stride)) & (GROUP - 1)) == 0;
        plain ? encode<1>(m, groups, stream, finite) : encode<Codes>(m, groups, stream, finite);
        return true;
    }

    // A few groups at a time, whose maxima stay in registers.
    void maxima(const Columns<T>& m, int groups) {
        constexpr int at_once = QT_ISA == 512 ? 4 : 2;
        int g = 0;
        for (; g + at_once <= groups; g += at_once) maxima_of<at_once>(m, g);
        for (; g < groups; g++) maxima_of<1>(m, g);
    }
    template <int N>
    INLINE void maxima_of(ColumnQuantizer& q, const Columns<T>& m, int g) {
        const T* x = m.x + g * GROUP;
        VI* out = q.amax + 4 * g;
        if constexpr (D::pairs) {
            VH h[2 * N] = {};
            for (i64 r = 0; r < m.rows; r++)
                for (int i = 0; i < 2 * N; i++) {
                    const VH next = load<VH>(x + r * m.stride + i * 2 * W) & (VH)all(0x7fff7fff);
                    h[i] = h[i] > next ? h[i] : next;
                }
            for (int i = 0; i < 2 * N; i++) {
                out[2 * i] = (VI)h[i] << 16;
                out[2 * i + 1] = (VI)h[i] & all(i32(0xffff0000));
            }
        } else {
            VI v[4 * N] = {};
            for (i64 r = 0; r < m.rows; r++)
                for (int i = 0; i < 4 * N; i++) v[i] = max(v[i], D::one(x + r * m.stride + i * W) & all(ABS));
            for (int i = 0; i < 4 * N; i++) out[i] = v[i];
        }
    }
    template <int N>
    void maxima_of(const Columns<T>& m, int g) {
        maxima_of<N>(*this, m, g);
    }

    // Square blocks: one maximum for the vectors that hold B neighbouring columns, or for half of two
    // vectors.
    void share(int count) {
        constexpr bool halves = D::pairs && 2 * W > B;
        constexpr int n = halves ? 2 : B / W;
        for (int j = 0; j < count; j += n) {
            VI top = amax[j];
            for (int i = 1; i < n; i++) top = max(top, amax[j + i]);
            if (!halves) top = all(lane_max(top));
            for (int step = 1; halves && step < W / 2; step *= 2) top = max(top, exchanged(top, step));
            for (int i = 0; i < n; i++) amax[j + i] = top;
        }
    }
    // Lane i gets what lane i ^ step has.
    INLINE VI exchanged(VI v, int step) {
        VI at;
        for (int i = 0; i < W; i++) at[i] = i ^ step;
        return shuffled(v, at);
    }

    template <int Joined>
    void encode(const Columns<T>& m, int groups, bool stream, bool finite) {
        if (!finite) return encode_rows<SAFE, Joined>(m, groups, stream);
#if QT_ISA == 512
        if constexpr (nv || (quarters && !D::pairs)) {
            if (use_quarters(groups)) return encode_rows<QUARTERS, Joined>(m, groups, stream);
        } else if constexpr (D::id == BF16) {
            if ((p.scale == SCALE_E8M0 || p.pow2) && use_pow2(groups))
                return encode_rows<POW2, Joined>(m, groups, stream);
        }
#endif
        encode_rows<PRODUCTS, Joined>(m, groups, stream);
    }
#if QT_ISA == 512
    bool use_quarters(int groups) {
        bool small = true;
        for (int j = 0; j < 4 * groups; j++) {
            factor[j] = useful_factor(amax[j], factor[j]);
            small &= fits_quarters<D, !nv>(amax[j], factor[j]);
        }
        for (int j = 0; small && j < 4 * groups; j++) factor[j] = factor[j] * all(4.0f);
        return small;
    }
    // Whether all factors allow pow2_group and place_group; fills their bases.
    bool use_pow2(int groups) {
        for (int g = 0; g < groups; g++) {
            VI code[4];
            for (int j = 0; j < 4; j++) {
                code[j] = all(254) - (VI)((VU)(VI)factor[4 * g + j] >> 23);
                code[j] = amax[4 * g + j] == all(0) ? all(127) : code[j];
            }
            if (any(min(min(code[0], code[1]), min(code[2], code[3])) < all(LEAST_CODE<E>))) return false;
            if constexpr (places)
                for (int h = 0; h < 2; h++)
                    base[g][h] = _mm512_slli_epi16(
                        (__m512i)((code[2 * h] | code[2 * h + 1] << 16) + all(0x10001 * LEAST_PLACE<E>)), 8);
            else
                base[g][0] = _mm512_add_epi8((__m512i)pack<true>(code), bytes_of(base_of<E>(0)));
        }
        return true;
    }
#endif

    template <Way way>
    INLINE VB codes_of(const ColumnQuantizer& q, const T* x, int g) {
#if QT_ISA == 512
        if constexpr (way == POW2 && places) return place_group<E>(x, q.base[g]);
        if constexpr (way == POW2 && !places) return pow2_group<E>(x, q.base[g][0]);
        if constexpr (way == QUARTERS) return quarters_group<D, !nv>(x, q.factor + 4 * g);
#endif
        return encode_group<D, E, way == SAFE, nv>(x, q.factor + 4 * g);
    }

    // What codes_of() has left for all joined codes at once.
    template <Way way>
    INLINE VB ordered(VB codes) {
#if QT_ISA == 512
        if constexpr (way == QUARTERS || (way == POW2 && places)) return in_order<D::pairs>(codes);
#endif
        return codes;
    }

    template <Way way, int Joined>
    void encode_rows(const Columns<T>& m, int groups, bool stream) {
        constexpr int lines = Joined == 4 ? 3 : 1;
        u8* out = m.out;
        for (i64 r = 0; r < m.rows; r += Joined, out += lines * m.out_stride) {
            const T* x = m.x + r * m.stride;
            for (int g = 0; g < groups; g++) {
                // Little by little, as in encode_strips.h.
                if (m.next && (!m.half || g & SECOND_HALF<B>))
                    prefetch(m.next + r * m.stride + g * GROUP, Joined, m.stride * i64(sizeof(T)),
                             GROUP * i64(sizeof(T)));
                VB c[Joined];
                for (int k = 0; k < Joined; k++)
                    c[k] = r + k < m.rows ? codes_of<way>(*this, x + k * m.stride + g * GROUP, g) : VB{};
                u8* to = out + g * GROUP;
                if constexpr (Joined == 1) {
                    store_bytes(to, ordered<way>(c[0]), stream);
                } else if constexpr (Joined == 2) {
                    // As words: codes leave no bits for the byte beside them.
                    store_bytes(to, ordered<way>(c[0] | (VB)((VH)c[1] << 4)), stream);
                } else {
                    store_bytes(to, ordered<way>(c[0] | c[1] << 6), stream);
                    store_bytes(to + m.out_stride, ordered<way>(c[1] >> 2 | c[2] << 4), stream);
                    store_bytes(to + 2 * m.out_stride, ordered<way>(c[2] >> 4 | c[3] << 2), stream);
                }
            }
        }
    }
};

}  // namespace QT_NAMESPACE
