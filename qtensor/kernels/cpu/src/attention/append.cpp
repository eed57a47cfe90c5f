// Writes encoded rows of new tokens into a cache of keys and values.
#include "attention.h"

namespace QT_NAMESPACE {

// Rows (batch, heads, tokens) one after the other, and where they go. Strides are bytes; `width` of a row.
struct AppendedRows {
    const u8* from;
    i64 from_stride, width;
    u8* to;
    i64 outer, head, token;
};
struct AppendCall {
    const i64 *positions, *table;  // (batch, tokens); (batch, table_stride) or null
    i64 table_stride, page, pages, capacity;
    i64 batch, heads, tokens;
    i64 count;
    AppendedRows rows[4];  // codes and factors of keys and values

    // Where a token is written; false if that is outside the cache.
    bool place(i64 b, i64 position, i64& outer, i64& at) const {
        if (position >= capacity) return false;
        outer = table ? table[b * table_stride + position / page] : b;
        at = table ? position % page : position;
        return !table || (outer >= 0 && outer < pages);
    }
};

}  // namespace QT_NAMESPACE
using namespace QT_NAMESPACE;

extern "C" {

i64 qt_append_abi() { return 1000 + i64(sizeof(AppendCall)); }

// Returns 0, or 1 with nothing written if a position or page is outside the cache.
int qt_cache_append(const AppendCall* call) {
    const AppendCall& c = *call;
    i64 outer, at;
    for (i64 b = 0; b < c.batch; b++)
        for (i64 n = 0; n < c.tokens; n++) {
            const i64 position = c.positions[b * c.tokens + n];
            if (position >= 0 && !c.place(b, position, outer, at)) return 1;
        }
    for (i64 b = 0; b < c.batch; b++)
        for (i64 n = 0; n < c.tokens; n++) {
            const i64 position = c.positions[b * c.tokens + n];
            if (position < 0) continue;  // The token is not written.
            c.place(b, position, outer, at);
            for (i64 i = 0; i < c.count; i++) {
                const AppendedRows& r = c.rows[i];
                for (i64 h = 0; h < c.heads; h++)
                    memcpy(r.to + outer * r.outer + h * r.head + at * r.token,
                           r.from + ((b * c.heads + h) * c.tokens + n) * r.from_stride, size_t(r.width));
            }
        }
    return 0;
}
}
