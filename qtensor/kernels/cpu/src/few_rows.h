// Few rows of x times a quantized weight that is read once, as it is stored: y = x @ weight.T.
//
// The order of the sums is part of the result (docs/numerics.md, "Few rows"): it depends neither on the
// number of rows nor on threads nor on the instruction set. This file holds
// what the kernels of all instruction sets share: the call, which elements share a lane, the order of x, the
// chunks of rows that threads take, and the prefetch.
#pragma once
#include <algorithm>
#include <type_traits>

#include "avx512_rotation.h"
#include "cpu.h"
#include "memory.h"
#include "scale_layout.h"
#include "threads.h"

namespace QT_NAMESPACE {

constexpr int SUMS = 16;       // partial sums of an element of the result
constexpr i64 STAGE = 512;     // elements of x that lie together for all rows: (stage, row, STAGE)
constexpr i64 MOST_ROWS = 64;  // of x in a call

// A call, with the weight's rows as the kernels read them.
struct FewRows {
    const LinearCall& call;
    i64 m, k, n;
    int block;  // of a factor; 0: none
    const u8* codes;
    i64 code_stride;                           // bytes of a row
    ScaleLayout scales;                        // of blocks
    i64 scale_bytes;                           // of a row, rounded up to whole tiles
    const float* factors;                      // that follow the sum, or null
    i64 factor_step;                           // 0: one for all rows of the weight
    const u8 *low = nullptr, *high = nullptr;  // bytes of the codes' values as bfloat16 (element_codes.h)
    const float* values = nullptr;
    i32 folds_from = 0, folds_count = 0;  // exponents of factors that bfloat16 values of codes can hold
};

// ---- which elements share a lane
// A format has spans of SPAN elements. Step v of a span takes two elements of each lane: place(v, lane, 1),
// then place(v, lane, 0). Where blocks have factors, a span is what shares one vector of factors. Kernels may
// hold the lanes in another order: their lane i is lane_of(i).

// 4-bit codes: a lane is a block.
template <int Block>
struct LaneIsBlock {
    static constexpr int SPAN = SUMS * Block, STEPS = SPAN / 32;
    static constexpr int lane_of(int i) { return i; }
    static constexpr int place(int v, int lane, int half) {
        return lane * Block + v / 4 * 8 + v % 4 + 4 * half;
    }
};
// Wider codes: four lanes are a part, whose eights are taken in order.
template <int Part, int Span>
struct LanesArePart {
    static constexpr int SPAN = Span, STEPS = SPAN / 32, EIGHTS = Part / 8;
    static constexpr int eight(int v, int four) {
        return v / EIGHTS * 4 * Part + four * Part + v % EIGHTS * 8;
    }
    static constexpr int lane_of(int i) { return i; }
    static constexpr int place(int v, int lane, int half) { return eight(v, lane / 4) + lane % 4 * 2 + half; }
};

// ---- x
// A row of x, exactly as X (u16: bfloat16), filled up with zeros.
template <class X>
static void read_row(const LinearCall& c, i64 m, X* to, i64 padded) {
    with_type(c.x_dtype, [&](auto type) {
        using D = decltype(type);
        const auto* from = (const typename D::T*)c.x + m * c.stride;
        if constexpr (std::is_same<typename D::T, X>::value && D::id != F16)
            memcpy(to, from, sizeof(X) * size_t(c.k));
        else
            for (i64 k = 0; k < c.k; k++) {
                const float v = D::to_float(from[k]);
                if constexpr (sizeof(X) == 2)
                    to[k] = X(bits<u32>(v) >> 16);
                else
                    to[k] = v;
            }
    });
    memset(to + c.k, 0, sizeof(X) * size_t(padded - c.k));
}
// float32: a vector of the elements that come first in the sum, then one of the others.
template <class F>
static void arrange(const float* x, float* out) {
    for (i64 first = 0; first < STAGE; first += F::SPAN, x += F::SPAN)
        for (int v = 0; v < F::STEPS; v++)
            for (int half = 1; half >= 0; half--, out += SUMS)
                for (int i = 0; i < SUMS; i++) out[i] = x[F::place(v, F::lane_of(i), half)];
}
// All rows, in the order of a format: (stage, row, STAGE). arrange: one stage.
template <class X, class Arrange>
static void arrange_rows(const FewRows& f, X* to, const Arrange& arrange) {
    const i64 stages = (f.k + STAGE - 1) / STAGE;
    const Array<X> row(stages * STAGE);
    for (i64 m = 0; m < f.m; m++) {
        read_row(f.call, m, (X*)row, stages * STAGE);
        for (i64 i = 0; i < stages; i++) arrange(row + i * STAGE, to + (i * f.m + m) * STAGE);
    }
}

// ---- rows of the weight

// What a thread works on. `following`: the first row of its next chunk, or -1.
struct Chunk {
    i64 first, end, following;
};
// Chunks of rows go to any thread that is free: no sum depends on it. A thread takes its next chunk before it
// begins one, so that memory is fetched ahead across the border.
template <class Work>
static void by_chunks(const FewRows& f, const Work& work) {
    const i64 threads = f.call.threads;
    const i64 chunk = threads > 1 ? std::max<i64>(8, up(f.n / (threads * 16), 8)) : f.n;
    std::atomic<i64> next{0};
    parallel(threads, 1, int(threads), [&](i64, i64) {
        const auto take = [&] {
            const i64 n = next.fetch_add(chunk, std::memory_order_relaxed);
            return n < f.n ? n : -1;
        };
        for (i64 n = take(), following; n >= 0; n = following) {
            following = threads > 1 ? take() : -1;
            work(Chunk{n, smaller(f.n, n + chunk), following});
        }
    });
}
// Prefetch the codes of a span to the first cache level.
template <class F>
INLINE void fetch_span(const u8* codes) {
    for (i64 line = 0; line < F::BYTES; line += 64) __builtin_prefetch(codes + line, 0, 3);
}
// Fetches memory in order, to the second cache level, some sets of rows before their use. The prefetcher of a
// CPU cannot follow several rows that are read at the same time, each from its start.
template <class F, int R>
struct Fetch {
    const u8 *next, *next_scale;
    i64 factor_step = 0;  // bytes, where each span has a float32 of its own
    bool on;
    Fetch(const FewRows& f, const Chunk& chunk, i64 n) {  // while rows n .. n + R are used
        i64 to = n + R * i64(8192 / double(R * f.code_stride) + 1.75);
        if (to >= chunk.end) to = chunk.following < 0 ? -1 : chunk.following + to - chunk.end;
        on = to >= 0 && to < f.n;
        if (!on) to = 0;
        next = f.codes + to * f.code_stride;
        next_scale = next;
        if (F::SCALED && !f.scales.tiles) next_scale = f.scales.base + f.scales.at(to, 0) * f.scales.size;
        if (F::SCALED && !F::SCALES) factor_step = f.scales.block_stride * f.scales.size;
    }
    template <int Elements>
    ALWAYS_INLINE void factors(i64 at) {
        if constexpr (F::SCALED && F::SCALES == 0)
            for (i64 span = at * (Elements / F::SPAN); span < (at + 1) * (Elements / F::SPAN); span++)
                __builtin_prefetch(next_scale + span * factor_step, 0, 2);
    }
    // Prefetch the factors of the `at`-th piece of `Elements` of each of the R rows.
    template <int Elements>
    ALWAYS_INLINE void piece_factors(i64 at) {
        if (!on) return;
        factors<Elements>(at);
        if constexpr (F::SCALES > 0) {
            constexpr i64 scales = i64(R) * Elements / F::SPAN * F::SCALES,
                          every = scales < 64 ? 64 / scales : 1;
            if (at % every == 0)
                for (i64 line = 0; line < (scales < 64 ? 64 : scales); line += 64)
                    __builtin_prefetch(next_scale + at * scales + line, 0, 2);
        }
    }
    // Prefetch the next `count` lines of codes. Locality 2 is the second cache level, 3 the first one as
    // well.
    template <int Locality>
    ALWAYS_INLINE void next_lines(int count) {
        if (!on) return;
#pragma GCC unroll 16
        for (; count > 0; count--, next += 64) __builtin_prefetch(next, 0, Locality);
    }
    // Prefetch the next `Bytes` of codes.
    template <int Bytes>
    ALWAYS_INLINE void next_bytes() {
        if (!on) return;
        for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
        next += Bytes;
    }
    // Prefetch the first span of each of the next R rows. The CPU's own prefetcher predicts the rest of a
    // row.
    ALWAYS_INLINE void starts(const FewRows& f, const Chunk& chunk, i64 n) const {
        const i64 to = n + R < chunk.end ? n + R : chunk.following;
        if (to < 0 || to + R > f.n) return;
        for (i64 r = 0; r < R; r++) fetch_span<F>(f.codes + (to + r) * f.code_stride);
    }
    // begin() starts a piece; lines(count) then prefetches up to `count` more lines of it.
    const u8* piece_end = nullptr;
    template <int Elements>
    void begin(i64 at) {
        if (!on) return;
        piece_end = next + i64(R) * Elements / F::SPAN * F::BYTES;
        factors<Elements>(at);
        if constexpr (F::SCALES > 0) {
            constexpr i64 scales = i64(R) * Elements / F::SPAN * F::SCALES;
            for (i64 line = 0; line < scales; line += 64)
                __builtin_prefetch(next_scale + at * scales + line, 0, 2);
        }
    }
    ALWAYS_INLINE void lines(int count) {
        for (; count > 0 && next < piece_end; count--, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

// The codes of the factors of a row's blocks. From tiles, they are copied to row r of `own`, which is null
// without tiles.
INLINE const u8* scale_codes(const FewRows& f, i64 n, u8* own, int r) {
    const ScaleLayout& s = f.scales;
    if (!s.tiles) return s.base + s.at(n, 0);
    own += r * f.scale_bytes;
    for (i64 b = 0; b < f.scale_bytes; b += 4) memcpy(own + b, s.base + s.at(n, b), 4);
    return own;
}
// Where R rows of the weight begin, from row n on. Rows behind the end of the chunk are its last one.
template <class F, int R>
struct RowAddresses {
    const u8 *code[R], *scale[R];
    // `own`: R * scale_bytes for factors out of tiles.
    RowAddresses(const FewRows& f, i64 n, i64 end, u8* own) {
        for (int r = 0; r < R; r++) {
            const i64 at = smaller(n + r, end - 1);
            code[r] = f.codes + at * f.code_stride;
            scale[r] = nullptr;
            if (F::SCALES)
                scale[r] = scale_codes(f, at, own, r);
            else if (F::SCALED)
                scale[r] = f.scales.base + f.scales.at(at, 0) * f.scales.size;
        }
    }
};

}  // namespace QT_NAMESPACE
