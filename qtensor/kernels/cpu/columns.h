// MX columnwise: blocks of 32 rows, codes in the rows of the tensor. Lanes are columns, so nothing is transposed; packed
// codes join the codes of 2 or 4 rows.
#pragma once
#include "lines.h"

namespace QT_NAMESPACE {

constexpr i64 COLUMN_TILE = 1024;  // columns whose factors stay in the first cache level while 32 rows pass

template <class T>
struct Columns {
    const T* x;
    i64 rows, cols, stride;  // rows <= 32
    u8* out;                 // the first row of codes of this band
    i64 out_stride;
    i64 column0, block0;
    const T* next;           // rows of the same stride that are read after these, or null
};

template <class D, class E, int Codes>
struct ColumnQuantizer {
    using T = typename D::T;
    const Direction& d;
    alignas(64) VI amax[COLUMN_TILE / W];
    alignas(64) VF factor[COLUMN_TILE / W];
    alignas(64) u8 codes[4][COLUMN_TILE];
#if QT_ISA == 512
    __m512i base[COLUMN_TILE / GROUP];
#endif

    explicit ColumnQuantizer(const Direction& direction) : d(direction) {}

    void run(const Columns<T>& m) {
        const i64 whole = m.cols / GROUP * GROUP;
        for (i64 c = 0; c < whole; c += COLUMN_TILE) {
            Columns<T> t = m;
            t.x += c, t.out += c, t.column0 += c;
            t.cols = whole - c < COLUMN_TILE ? whole - c : COLUMN_TILE;
            tile(t, d.nontemporal);
        }
        if (whole < m.cols) tail(m, whole);
    }

    // Columns that do not fill a group: through a copy padded with zeros.
    void tail(const Columns<T>& m, i64 first) {
        const i64 n = m.cols - first;
        T x[MX * GROUP] = {};
        u8 out[MX * GROUP];
        for (i64 r = 0; r < m.rows; r++) memcpy(x + r * GROUP, m.x + r * m.stride + first, sizeof(T) * n);
        tile({x, m.rows, GROUP, GROUP, out, GROUP, m.column0 + first, m.block0, nullptr}, false, n);
        const i64 lines = (m.rows + Codes - 1) / Codes * (Codes == 4 ? 3 : 1);
        for (i64 r = 0; r < lines; r++) memcpy(m.out + r * m.out_stride + first, out + r * GROUP, n);
    }

    void tile(const Columns<T>& m, bool stream, i64 real = -1) {
        const int groups = int(m.cols / GROUP);
        maxima(m, groups);
        bool safe = false;
        for (int g = 0; g < groups; g++) {
            VI stored[4];
            if (d.plan->square) share(amax + 4 * g);
            for (int j = 0; j < 4; j++) {
                safe |= any(amax[4 * g + j] >= all(INF_BITS));
                Factors f = factors_of<E>(amax[4 * g + j], d, GlobalLanes());
                factor[4 * g + j] = f.encode;
                stored[j] = f.stored;
            }
            put(stored, m.column0 + g * GROUP, m.block0, real < 0 ? GROUP : int(real));
        }
        stream = stream && ((uintptr_t(m.out) | uintptr_t(m.out_stride)) & (GROUP - 1)) == 0;
        if (safe)
            encode_rows<true>(m, groups, stream);
        else
            encode_rows<false>(m, groups, stream);
    }

    void maxima(const Columns<T>& m, int groups) {
        for (int i = 0; i < 4 * groups; i++) amax[i] = VI{};
        for (i64 r = 0; r < m.rows; r++)
            for (int g = 0; g < groups; g++) {
                VI v[4];
                D::group(m.x + r * m.stride + g * GROUP, v);
                for (int j = 0; j < 4; j++) amax[4 * g + j] = max(amax[4 * g + j], v[j] & all(ABS));
            }
    }

    // 32x32 blocks: one maximum for the vectors that hold 32 neighbouring columns.
    INLINE void share(VI* m) {
        constexpr int n = MX / W;
        for (int j = 0; j < 4; j += n) {
            VI top = m[j];
            for (int i = 1; i < n; i++) top = max(top, m[j + i]);
            for (int i = 0; i < n; i++) m[j + i] = all(lane_max(top));
        }
    }

    void put(const VI stored[4], i64 column, i64 block, int real) {
        u8 t[GROUP];
        store(t, pack<D::pairs>(stored));
        const Sink& s = d.sink;
        if (!s.tiles && s.line_stride == 1) {
            memcpy(s.base + s.at(s, column, block), t, real);
            return;
        }
        for (int i = 0; i < real; i++) s.put(column + i, block, t[i]);
    }

    INLINE VB pow2_of(const ColumnQuantizer& q, const T* x, int g) {
#if QT_ISA == 512
        if constexpr (D::id == BF16) return pow2_group<E>(x, q.base[g]);
#endif
        return encode_group<D, E, false, false>(x, q.factor + 4 * g);
    }
    // Whether all factors allow pow2_group; fills its bases.
    bool use_pow2(int groups) {
#if QT_ISA == 512
        if constexpr (D::id == BF16) {
            for (int g = 0; g < groups; g++) {
                VI code[4];
                for (int j = 0; j < 4; j++) code[j] = all(254) - (VI)((VU)(VI)factor[4 * g + j] >> 23);
                if (any(min(min(code[0], code[1]), min(code[2], code[3])) < all(LEAST_CODE<E>))) return false;
                base[g] = _mm512_add_epi8((__m512i)pack<true>(code), bytes_of(base_of<E>(0)));
            }
            return true;
        }
#endif
        (void)groups;
        return false;
    }

    template <bool Safe>
    void encode_rows(const Columns<T>& m, int groups, bool stream) {
        constexpr int lines = Codes == 4 ? 3 : 1;
        const bool pow2 = !Safe && use_pow2(groups);
        for (i64 r = 0; r < m.rows; r += Codes) {
            if (m.next) prefetch(m.next + r * m.stride, Codes, m.stride * i64(sizeof(T)), m.cols * i64(sizeof(T)));
            for (int k = 0; k < Codes; k++) {
                if (r + k >= m.rows) {
                    memset(codes[k], 0, size_t(m.cols));
                    continue;
                }
                for (int g = 0; g < groups; g++) {
                    const T* x = m.x + (r + k) * m.stride + g * GROUP;
                    VB packed = pow2 ? pow2_of(*this, x, g) : encode_group<D, E, Safe, false>(x, factor + 4 * g);
                    if (Codes == 1)
                        store_bytes(m.out + r * m.out_stride + g * GROUP, packed, stream);
                    else
                        store(codes[k] + g * GROUP, packed);
                }
            }
            if (Codes > 1) join(m.out + r / Codes * lines * m.out_stride, m.out_stride, groups, stream);
        }
    }

    void join(u8* out, i64 out_stride, int groups, bool stream) {
        for (int g = 0; g < groups; g++) {
            VB c[4];
            for (int k = 0; k < Codes; k++) c[k] = load<VB>(codes[k] + g * GROUP);
            u8* p = out + g * GROUP;
            if (Codes == 2) {
                store_bytes(p, c[0] | c[1] << 4, stream);
            } else {
                store_bytes(p, c[0] | c[1] << 6, stream);
                store_bytes(p + out_stride, c[1] >> 2 | c[2] << 4, stream);
                store_bytes(p + 2 * out_stride, c[2] >> 4 | c[3] << 2, stream);
            }
        }
    }
};

}  // namespace QT_NAMESPACE
