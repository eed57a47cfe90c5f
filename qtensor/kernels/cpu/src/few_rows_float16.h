// few_rows_lanes.h with AVX2 or NEON: codes of each format to float16, in the order of the sums.
#pragma once
#include "few_rows.h"

#if QT_ISA == 0 && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace QT_NAMESPACE {

// The largest magnitudes of codes and of codes of factors, to find NaN: decoding with AVX2 or NEON takes it
// for a number. NAN_CODE and NAN_FACTOR of a format are the magnitudes of such a NaN, or 0 if it has none.
struct Most {
    VB codes{}, factors{};
};

#if QT_ISA == 2 || (QT_ISA == 0 && defined(__aarch64__))
#define QT_FLOAT16_STAGES 1                         // few_rows_lanes.h decodes to float16
typedef short VS __attribute__((vector_size(32)));  // 16-bit integers with signs

// ---- vectors of 256 bits in two halves of 128, which no operation here crosses
#if QT_ISA == 2
INLINE VB from_halves(const void* low, const void* high) {
    return (VB)_mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(low)), load<__m128i>(high), 1);
}
// The bytes of `table` at `places`; 0 where a place is 128 or more.
INLINE VB look_up(VB table, VB places) { return (VB)_mm256_shuffle_epi8((__m256i)table, (__m256i)places); }
// Words of `Bits` bits of a and b in turns: those of the lower or of the higher 64 bits of each half.
template <int Bits>
INLINE VB low_in_turns(VB a, VB b) {
    return (VB)(Bits == 16 ? _mm256_unpacklo_epi16((__m256i)a, (__m256i)b)
                           : _mm256_unpacklo_epi64((__m256i)a, (__m256i)b));
}
template <int Bits>
INLINE VB high_in_turns(VB a, VB b) {
    return (VB)(Bits == 16 ? _mm256_unpackhi_epi16((__m256i)a, (__m256i)b)
                           : _mm256_unpackhi_epi64((__m256i)a, (__m256i)b));
}
// Eight float16 to float32, from memory. In registers, they would have to cross to another 128 bits first,
// which one port alone can do: half as many a cycle.
INLINE VF value(const u16* halves) {
    VF to;
    asm("vcvtph2ps %1, %0" : "=x"(to) : "m"(*(const __m128i*)halves));
    return to;
}
#else
typedef u8 Half128 __attribute__((vector_size(16)));
struct Halves {
    Half128 low, high;
};
struct FloatHalves {
    float32x4_t low, high;
};
INLINE VB from_halves(const void* low, const void* high) {
    return bits<VB>(Halves{load<Half128>(low), load<Half128>(high)});
}
template <class Op>
INLINE VB each_half(VB a, VB b, const Op& op) {
    const Halves x = bits<Halves>(a), y = bits<Halves>(b);
    return bits<VB>(Halves{op(x.low, y.low), op(x.high, y.high)});
}
INLINE VB look_up(VB table, VB places) {
    return each_half(table, places,
                     [](Half128 t, Half128 p) { return (Half128)vqtbl1q_u8((uint8x16_t)t, (uint8x16_t)p); });
}
template <int Bits>
INLINE VB low_in_turns(VB a, VB b) {
    return each_half(a, b, [](Half128 x, Half128 y) {
        return Bits == 16 ? (Half128)vzip1q_u16((uint16x8_t)x, (uint16x8_t)y)
                          : (Half128)vzip1q_u64((uint64x2_t)x, (uint64x2_t)y);
    });
}
template <int Bits>
INLINE VB high_in_turns(VB a, VB b) {
    return each_half(a, b, [](Half128 x, Half128 y) {
        return Bits == 16 ? (Half128)vzip2q_u16((uint16x8_t)x, (uint16x8_t)y)
                          : (Half128)vzip2q_u64((uint64x2_t)x, (uint64x2_t)y);
    });
}
INLINE VF value(const u16* halves) {
    const float16x8_t v = (float16x8_t)load<uint16x8_t>(halves);
    return bits<VF>(FloatHalves{vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)});
}
#endif
INLINE VF value(const float* v) { return load<VF>(v); }
INLINE VB twice(const void* half) { return from_halves(half, half); }
INLINE VB maxima(VB a, VB b) { return a > b ? a : b; }
// Bytes as a vector: `make(i)` is byte i.
template <class Make>
INLINE VB bytes_of(const Make& make) {
    alignas(32) u8 bytes[32];
    for (int i = 0; i < 32; i++) bytes[i] = u8(make(i));
    return load<VB>(bytes);
}
constexpr u8 NO_PLACE = 0x80;
// E8M0 codes of eight lanes, which look_up brings to the highest bytes of dwords, to factors. 0 is 2^-127.
// 255, NaN, becomes infinity.
template <class CodeOf>
INLINE VF e8m0_factors(VB codes, const CodeOf& code_of) {
    const VB places = bytes_of([&](int i) { return i % 4 == 3 ? code_of(i / 4) : NO_PLACE; });
    const VU exponents = (VU)look_up(codes, places) >> 1, least = VU{} + 0x400000;
    return (VF)(exponents > least ? exponents : least);
}

// ---- 4-bit codes: a lane is a block
struct NibbleCodes {
    using Value = u16;
    static constexpr bool SCALED = true;
    static constexpr u8 NAN_CODE = 0;
    static constexpr float POWER = 1;
    VB high;  // higher bytes of the values as float16; the lower ones are 0
    explicit NibbleCodes(const FewRows& f)
        : high(bytes_of([&](int i) { return float_to_half(f.values[i % 16]) >> 8; })) {}
    // Transposes words of 16 bits: those of a and b in turns.
    INLINE void take_turns(VB& a, VB& b) {
        const VB low = low_in_turns<16>(a, b);
        b = high_in_turns<16>(a, b), a = low;
    }
    // `words`: word i, which is four codes, of each of 16 blocks. The elements of an eight are summed in the
    // order 4 0 5 1 6 2 7 3.
    ALWAYS_INLINE void store_words(VB words, int i, u16* to) const {
        u16* eight = to + i / 2 * 8 * SUMS;
        for (int odd = 0; odd < 2; odd++) {
            const VB codes = (odd ? (VB)((VH)words >> 4) : words) & 15;
            const VH v = (VH)look_up(high, codes);
            const int place = 1 - i % 2 + 2 * odd;
            store(eight + place * SUMS, v << 8);
            store(eight + (place + 4) * SUMS, v & 0xff00);
        }
    }
};
struct Mxfp4Rows : NibbleCodes, LaneIsBlock<32> {
    static constexpr int BYTES = 256, SCALES = 16;
    static constexpr u8 NAN_FACTOR = 0xff;
    using NibbleCodes::NibbleCodes;
    static constexpr int lane_of(int i) { return i % 8 * 2 + i / 8; }
    ALWAYS_INLINE void decode(const u8* p, Most&, u16* to) const {
        VB v[8];
        for (int i = 0; i < 8; i++) v[i] = load<VB>(p + 32 * i);
        for (int i = 0; i < 4; i++) take_turns(v[i], v[i + 4]);
        for (int i = 0; i < 2; i++) take_turns(v[i], v[i + 2]), take_turns(v[i + 4], v[i + 6]);
        for (int i = 0; i < 8; i += 2) take_turns(v[i], v[i + 1]);
        for (int i = 0; i < 8; i++) store_words(v[i], i, to);
    }
    INLINE void factors(const u8* s, Most& most, VF to[2]) {
        const VB codes = twice(s);
        most.factors = maxima(most.factors, codes);
        to[0] = e8m0_factors(codes, [](int lane) { return 2 * lane; });
        to[1] = e8m0_factors(codes, [](int lane) { return 2 * lane + 1; });
    }
};
struct Nvfp4Rows : NibbleCodes, LaneIsBlock<16> {
    static constexpr int BYTES = 128, SCALES = 16;
    static constexpr u8 NAN_FACTOR = 0x7f;
    using NibbleCodes::NibbleCodes;
    static constexpr int lane_of(int i) { return i % 4 * 4 + i / 4; }
    ALWAYS_INLINE void decode(const u8* p, Most&, u16* to) const {
        VB v[4];
        for (int i = 0; i < 4; i++) v[i] = load<VB>(p + 32 * i);
        // Blocks are 64 bits, so that two steps bring pairs of words of four blocks together.
        for (int i = 0; i < 2; i++) take_turns(v[i], v[i + 2]);
        take_turns(v[0], v[1]), take_turns(v[2], v[3]);
        for (int i = 0; i < 2; i++) {
            store_words(low_in_turns<64>(v[i], v[i + 2]), 2 * i, to);
            store_words(high_in_turns<64>(v[i], v[i + 2]), 2 * i + 1, to);
        }
    }
    // float16 has the codes of E4M3 as 2^-8 of their values.
    INLINE void factors(const u8* s, Most& most, VF to[2]) {
        const VB codes = twice(s);
        most.factors = maxima(most.factors, codes & 0x7f);
        const VB places = bytes_of([](int i) { return i % 2 ? lane_of(i / 2) : NO_PLACE; });
        alignas(32) u16 halves[SUMS];
        store(halves, ((VS)look_up(codes, places) >> 1) & short(0xbfff));
        for (int h = 0; h < 2; h++) to[h] = value(halves + h * W) * all(256.0f);
    }
};

// ---- codes of a byte, and MXFP6 packed
// A format that multiplies its values by POWER itself, for x that cannot be multiplied.
template <class F>
struct Multiplied : F {
    using Value = float;
    static constexpr float POWER = 1;
    using F::F;
    ALWAYS_INLINE void decode(const u8* p, Most& most, float* to) const {
        alignas(32) u16 halves[F::SPAN];
        F::decode(p, most, halves);
        for (int i = 0; i < F::SPAN; i += W) store(to + i, value(halves + i) * all(F::POWER));
    }
};
// float16 holds their values divided by POWER: sign, exponent and mantissa are those of the code, shifted.
template <class E, int Codes>  // in a group of bytes
struct ByteCodes {
    using Value = u16;
    // Other formats have no NaN, or those of float16.
    static constexpr u8 NAN_CODE = std::is_same<E, FE4M3>::value ? 0x7f : 0;
    static constexpr float POWER = float(1 << (E::min_exponent - (127 - 14)));
    explicit ByteCodes(const FewRows&) {}
    // The second of each two codes, then the first. Packed, a word has them in its highest 12 bits.
    INLINE void store_eights(VB c, Most& most, u16* to) {
        if (NAN_CODE) most.codes = maxima(most.codes, c & 0x7f);
        constexpr int exponent = E::width - 1 - E::mantissa, right = 5 - exponent;
        // Shifted to the left, the signs are the highest bits. They fill the bits that a shift to the right
        // leaves.
        const VH second = (VH)c << (Codes == 4 ? 0 : 8 - E::width);
        const VH first = (VH)c << (Codes == 4 ? E::width : 16 - E::width);
        constexpr short keep = short(0x8000 | ((1 << (10 + exponent)) - (1 << (10 - E::mantissa))));
        store(to, ((VS)second >> right) & keep), store(to + SUMS, ((VS)first >> right) & keep);
    }
};
template <class E, int Span>
struct Fp8Lines : ByteCodes<E, 1>, LanesArePart<16, Span> {
    static constexpr int BYTES = Span, SCALES = 0;
    static constexpr u8 NAN_FACTOR = 0;
    using ByteCodes<E, 1>::ByteCodes;
    static constexpr int lane_of(int i) { return i / 4 % 2 * 8 + i / 8 * 4 + i % 4; }
    INLINE void decode(const u8* p, Most& most, u16* to) {
        for (int i = 0; i < Span; i += 64) {
            const VB a = load<VB>(p + i), b = load<VB>(p + i + 32);
            ByteCodes<E, 1>::store_eights(low_in_turns<64>(a, b), most, to + i);
            ByteCodes<E, 1>::store_eights(high_in_turns<64>(a, b), most, to + i + 32);
        }
    }
};
// Factors that follow the sums.
template <class E>
struct Fp8Rows : Fp8Lines<E, 64> {
    using Whole = Multiplied<Fp8Rows>;
    static constexpr bool SCALED = false;
    using Fp8Lines<E, 64>::Fp8Lines;
    INLINE void factors(const u8*, Most&, VF*) {}
};
template <class E>
struct Fp8BlockRows : Fp8Lines<E, 128> {
    using Whole = Multiplied<Fp8BlockRows>;
    static constexpr bool SCALED = true;
    using Fp8Lines<E, 128>::Fp8Lines;
    INLINE void factors(const u8* s, Most&, VF to[2]) { to[0] = to[1] = all(load<float>(s)); }
};
// Four blocks of 32 codes, four lanes each.
template <class E, int Codes>
struct MxRows : ByteCodes<E, Codes>, LanesArePart<32, 128> {
    using Whole = Multiplied<MxRows>;
    static constexpr int BLOCK_BYTES = Codes == 4 ? 24 : 32, BYTES = 4 * BLOCK_BYTES, SCALES = 4;
    static constexpr bool SCALED = true;
    static constexpr u8 NAN_FACTOR = 0xff;
    using ByteCodes<E, Codes>::ByteCodes;
    // One half of a block, and the same half of the block after the next.
    INLINE VB half_blocks(const u8* p, int half) {
        p += half * (Codes == 4 ? 8 : 16);
        const VB v = from_halves(p, p + 2 * BLOCK_BYTES);
        if (Codes == 1) return v;
        // Two codes are 12 bits. Words get the bytes in which these lie; every second word is 4 bits too low.
        const int first = 4 * half;
        const VB spread = bytes_of([=](int i) { return first + i % 16 / 4 * 3 + (i % 4 + 1) / 2; });
        const VH factors = (VH)(VU{} + 0x00010010);
        return (VB)((VH)look_up(v, spread) * factors);
    }
    INLINE void decode(const u8* p, Most& most, u16* to) {
        for (int half = 0; half < 2; half++, to += 64) {
            const VB a = half_blocks(p, half), b = half_blocks(p + BLOCK_BYTES, half);
            ByteCodes<E, Codes>::store_eights(low_in_turns<64>(a, b), most, to);
            ByteCodes<E, Codes>::store_eights(high_in_turns<64>(a, b), most, to + 32);
        }
    }
    INLINE void factors(const u8* s, Most& most, VF to[2]) {
        const VB codes = (VB)(VI{} + load<i32>(s));
        most.factors = maxima(most.factors, codes);
        to[0] = e8m0_factors(codes, [](int lane) { return lane / 4; });
        to[1] = e8m0_factors(codes, [](int lane) { return 2 + lane / 4; });
    }
};
#endif

}  // namespace QT_NAMESPACE
