// Lines of 4- and 6-bit codes as small integers: twice an e2m1 value, eight times an e2m3 value. Lines run
// along the contraction of a product.
#pragma once
#include <algorithm>

#include "fused.h"
#include "memory.h"
#include "row_arithmetic.h"
#include "scale_layout.h"
#include "transpose.h"
#include "transpose_avx512.h"

namespace QT_NAMESPACE {

constexpr int VECTORS_A_PANEL = 2;
constexpr i64 PANEL_LINES = VECTORS_A_PANEL * W;  // of the right operand, columns of the result
// Multiplication takes unsigned integers on the left where the CPU has no other instruction.
#if QT_ISA > 0
constexpr bool UNSIGNED_LEFT = true;
#else
constexpr bool UNSIGNED_LEFT = false;
#endif

// The integers of an element: its value times UNIT.
struct Integers {
    float unit;
    i32 largest;
    alignas(64) int8_t of[64];  // by code
};
template <class E>
constexpr Integers integers(float unit) {
    Integers t{unit, 0, {}};
    for (u32 c = 0; c < 64; c++) {
        const u32 code = c & ((1u << E::width) - 1), magnitude = code & ((1u << (E::width - 1)) - 1);
        const u32 exponent = magnitude >> E::mantissa, fraction = magnitude & ((1u << E::mantissa) - 1);
        const i32 v = exponent ? i32((fraction | 1u << E::mantissa) << (exponent - 1)) : i32(fraction);
        t.of[c] = int8_t(code >> (E::width - 1) ? -v : v);
        t.largest = v > t.largest ? v : t.largest;
    }
    return t;
}
inline const Integers& integers_of(const CQuantizer& q) {
    static constexpr Integers e2m1 = integers<FE2M1>(2.0f), e2m3 = integers<FE2M3>(8.0f);
    return q.element == E2M1 ? e2m1 : e2m3;
}

// GROUP codes to integers.
template <bool SixBits>
INLINE VB look_up(VB codes, const Integers& t) {
#if QT_ISA == 512
    return (VB)_mm512_permutexvar_epi8((__m512i)codes, _mm512_load_si512(t.of));
#elif QT_ISA == 2
    const auto part = [&](int i) { return _mm256_broadcastsi128_si256(load<__m128i>(t.of + 16 * i)); };
    const __m256i c = (__m256i)codes;
    if (!SixBits) return (VB)_mm256_shuffle_epi8(part(0), c);
    // Bits 4 and 5 choose the table; a shuffle reads the four low bits and gives 0 where the top one is set.
    const __m256i low = _mm256_and_si256(c, _mm256_set1_epi8(15));
    const __m256i upper = _mm256_slli_epi16(c, 3), sign = _mm256_slli_epi16(c, 2);
    const __m256i positive =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(part(0), low), _mm256_shuffle_epi8(part(1), low), upper);
    return (VB)_mm256_blendv_epi8(positive, _mm256_sub_epi8(_mm256_setzero_si256(), positive), sign);
#else
    VB r;
    for (int i = 0; i < GROUP; i++) r[i] = u8(t.of[codes[i]]);
    return r;
#endif
}

// An operand as the kernels read it.
struct Codes {
    const CQuantizer& quantizer;
    const LinesOfCodes& lines;
    const Integers& table;
    i64 length;  // of a line
    i64 padded;  // to whole blocks and groups
    i64 stride;  // of decoded lines: lines a power of two apart would share few places of a cache
    i64 blocks;
    i64 bytes;  // of a line's codes
    Codes(const CQuantizer& q, const LinesOfCodes& l, i64 k)
        : quantizer(q),
          lines(l),
          table(integers_of(q)),
          length(k),
          padded(up(k, 64)),
          stride(padded + 64),
          blocks((k + q.block - 1) / q.block),
          bytes((k + q.codes - 1) / q.codes * q.bytes) {}
    i64 across_stride() const { return up(bytes, 64) + 64; }
    i64 across_bytes(i64 count) const { return lies_across() ? count * across_stride() : 0; }
    bool lies_across() const { return lines.line_stride == 1 && lines.byte_stride != 1; }
};

constexpr i64 PIECE = 64;  // codes that are decoded together
constexpr i64 piece_bytes(int packed) { return PIECE / packed * (packed == 4 ? 3 : 1); }

// Decodes a piece of a line, whose bytes are adjacent, from element k on to integers plus `shift`. Behind the
// end of the line there are zeros.
template <bool SixBits, int Packed>
INLINE void decode_piece(const Codes& c, const u8* line, i64 k, VB shift, u8* to) {
    constexpr i64 BYTES = piece_bytes(Packed), STEP = BYTES * GROUP / PIECE;
    const i64 at = BYTES * (k / PIECE), left = c.bytes - at;
    alignas(64) u8 last[2 * PIECE];
    const u8* from = line + at;
    // load_quads reads up to 8 bytes more than it uses.
    if (left < BYTES + (Packed == 4 ? 8 : 0)) {
        memset(last, 0, sizeof last);
        memcpy(last, from, size_t(smaller(left, BYTES)));
        from = last;
    }
    for (i64 i = 0; i < PIECE / GROUP; i++, from += STEP) {
        const VB codes = Packed == 1 ? load<VB>(from) : Packed == 2 ? load_nibbles(from) : load_quads(from);
        store(to + i * GROUP, look_up<SixBits>(codes, c.table) + shift);
    }
}
// Calls f with the types of codes: whether they have six bits, and how many are packed in a group.
template <class F>
INLINE void with_codes(const CQuantizer& q, const F& f) {
    using std::bool_constant;
    using std::integral_constant;
    if (q.codes == 2) return f(bool_constant<false>(), integral_constant<int, 2>());
    if (q.codes == 1) return f(bool_constant<true>(), integral_constant<int, 1>());
    f(bool_constant<true>(), integral_constant<int, 4>());
}

// Lines whose bytes are adjacent.
struct Rows {
    const u8* first;
    i64 stride;
};
// The lines first .. first + count; transposed to `across` where their bytes are not adjacent.
static Rows rows_of(const Codes& c, i64 first, i64 count, u8* across) {
    const u8* from = c.lines.codes + first * c.lines.line_stride;
    if (!c.lies_across()) return {from, c.lines.line_stride};
    transpose_bytes(from, c.lines.byte_stride, across, c.across_stride(), c.bytes, count, false);
    return {across, c.across_stride()};
}

// The factors of n codes, times `unit`. Returns the largest bits.
INLINE VI decode_factors(const Codes& c, const u8* codes, i64 n, float unit, float* to) {
    const bool power_of_two = c.quantizer.scale == SCALE_E8M0;
    VI most{};
    for (i64 i = 0; i < n; i += W) {
        alignas(64) u8 last[W] = {};
        if (i + W > n) memcpy(last, codes + i, size_t(n - i));
        const VI code = widen(i + W > n ? last : codes + i), magnitude = code & 0x7f;
        VI v;
        if (power_of_two) {
            v = code << 23;
            v = code == all(0) ? all(0x00400000) : v;
            v = code == all(255) ? all(0x7fc00000) : v;
        } else {
            // The exponent of a float is larger by 120.
            v = (VI)((VF)(magnitude << 20) * all(0x1p120f)) | (code & 0x80) << 24;
            v = magnitude == all(0x7f) ? all(0x7fc00000) : v;
        }
        const VF factor = (VF)v * all(unit);
        most = max(most, (VI)factor);
        if (i + W <= n)
            store(to + i, factor);
        else
            memcpy(to + i, &factor, sizeof(float) * size_t(n - i));
    }
    return most;
}
// The codes of factors of lines, as (count, blocks), or as (blocks, count) with `ld` between blocks. Returns
// where they are: in place, or in `to`, which has room for whole tiles.
static const u8* factor_codes(const Codes& c, i64 first, i64 count, bool by_lines, i64& ld, u8* to) {
    const LinesOfCodes& l = c.lines;
    if (l.tiles) {
        const ScaleLayout s{const_cast<u8*>(l.scales), 0, 0, l.tiles, 1, 0};
        ld = by_lines ? up(c.blocks, 4) : count;
        for (i64 line = 0; line < count; line++)
            for (i64 b = 0; b < c.blocks; b += 4) {
                const u8* four = l.scales + s.at(first + line, b);
                for (i64 i = 0; i < 4; i++) to[by_lines ? line * ld + b + i : (b + i) * ld + line] = four[i];
            }
        return to;
    }
    const u8* from = l.scales + first * l.scale_line_stride;
    const i64 inner = by_lines ? l.scale_block_stride : l.scale_line_stride;
    const i64 outer = by_lines ? l.scale_line_stride : l.scale_block_stride;
    if (inner == 1) {
        ld = outer;
        return from;
    }
    const i64 rows = by_lines ? count : c.blocks, cols = by_lines ? c.blocks : count;
    ld = cols;
    if (outer == 1)
        transpose_bytes(from, inner, to, cols, cols, rows, false);
    else
        for (i64 r = 0; r < rows; r++)
            for (i64 i = 0; i < cols; i++) to[r * cols + i] = from[r * outer + i * inner];
    return to;
}

}  // namespace QT_NAMESPACE
