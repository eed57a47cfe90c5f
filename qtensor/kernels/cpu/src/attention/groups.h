// Where the rows of groups of tokens lie.
#pragma once
#include "../memory.h"
#include "products.h"

namespace QT_NAMESPACE {

// The rows of a sequence and a head.
struct Addresses {
    const AttentionCall& c;
    const StoredRows& s;
    i64 b, h;
    i64 place(i64 t, i64& outer) const {
        outer = c.table ? c.table[b * c.table_stride + t / c.page] : b;
        return c.table ? t % c.page : t;
    }
    const u8* codes(i64 t) const {
        i64 outer;
        const i64 at = place(t, outer);
        return s.codes + outer * s.outer + h * s.head + at * s.token;
    }
    const u8* factors(i64 t) const {
        i64 outer;
        const i64 at = place(t, outer);
        return s.factors + outer * s.factor_outer + h * s.factor_head + at * s.factor_token;
    }
};

// A group of rows with factors. Tokens outside lo .. hi are not read; they are zeros.
struct Group {
    GroupCodes codes;
    const u8* factors;
    i64 factor_stride;
    void find(const Addresses& a, i64 t, Seen inside, u8* edge) {
        // Rows without their zeros, and groups that no page holds whole, are copied like an edge.
        if (inside.covers(t, TOKENS) && (!a.c.table || a.c.page % TOKENS == 0) && !a.s.padded()) {
            codes = {a.codes(t), a.s.token};
            factors = a.s.factors ? a.factors(t) : nullptr;
            factor_stride = a.s.factor_token;
            return;
        }
        const i64 bytes = a.s.bytes(), factor_size = a.s.factor_id == FACTOR_ROW ? 4 : 1;
        const i64 factor_bytes = a.s.factor_count * factor_size;
        const i64 from = a.s.bytes_of(a.s.stored), from_factors = a.s.factors_of(a.s.stored) * factor_size;
        codes = {edge, bytes};
        factors = edge + TOKENS * bytes;
        factor_stride = factor_bytes;
        memset(edge, 0, size_t(TOKENS * (bytes + factor_bytes)));
        const i64 last = std::min<i64>(TOKENS - 1, inside.hi - t);
        for (i64 i = std::max<i64>(0, inside.lo - t); i <= last; i++) {
            memcpy(edge + i * bytes, a.codes(t + i), size_t(from));
            if (factor_bytes)
                memcpy(edge + TOKENS * bytes + i * factor_bytes, a.factors(t + i), size_t(from_factors));
        }
    }
};

// From the group that is read to the one that is fetched.
static inline int groups_ahead(const StoredRows& s) {
    return int(std::max<i64>(2, std::min<i64>(8, 8192 / (TOKENS * s.bytes()))));
}
// The lines of memory of a group of rows, spread over the steps of a product.
class Lines {
    const Array<i64> at;
    bool two;

public:
    Lines(const StoredRows& s, i64 steps) : at(steps) {
        const i64 bytes = s.bytes_of(s.stored);
        const bool one_run = s.token == bytes;
        const i64 run = ((one_run ? TOKENS : 1) * bytes + 63) / 64, lines = one_run ? run : run * TOKENS;
        for (i64 step = 0; step < steps; step++) {
            const i64 line = step * lines / steps;
            at[step] = line / run * s.token + line % run * 64;
        }
        two = lines > steps;
    }
    Ahead ahead(const u8* codes) const { return {codes, at, two}; }
};

}  // namespace QT_NAMESPACE
