// Writes encoded rows of new tokens into a cache of keys and values.
#include <cstring>

#include "calls.h"

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
