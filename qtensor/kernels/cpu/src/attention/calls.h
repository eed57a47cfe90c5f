// The structs of a call of the attention library. kernels/cpu/attention.py and ops/attention_ops.cpp fill
// them.
#pragma once
#include "../structs.h"

// How rows are stored. Elements above E2M1 are plain: STORED_BF16 and so on.
enum Stored { STORED_BF16 = 5, STORED_F16 = 6, STORED_F32 = 7 };
enum FactorId { NO_FACTOR = 0, FACTOR_ROW = 1, FACTOR_E8M0 = 2, FACTOR_E4M3 = 3 };

// The rows of keys or of values. Strides are bytes: of a sequence or page, a head and a token.
struct StoredRows {
    const u8 *codes, *factors;
    i64 outer, head, token;
    i64 factor_outer, factor_head, factor_token;
    i64 element, packed;   // packed: four codes in three bytes
    i64 block, factor_id;  // block: values that share a factor; 0: a row
    i64 stored;            // values of a row: the size of the head
    // The kernels set these. Rows get zeros up to a multiple of 32 values; factors and pieces of such a row.
    i64 size, factor_count, pieces;

    static constexpr i64 SIZE_UNIT = 32;
    bool plain() const { return element > E2M1; }
    // Whether bfloat16 holds every value.
    bool narrow() const { return element <= STORED_BF16; }
    // Bytes of `count` values.
    i64 bytes_of(i64 count) const {
        return element == E2M1          ? count / 2
               : packed                 ? count / 4 * 3
               : element == STORED_F32  ? count * 4
               : element >= STORED_BF16 ? count * 2
                                        : count;
    }
    i64 factors_of(i64 count) const { return factor_id == NO_FACTOR ? 0 : block ? count / block : 1; }
    bool padded() const { return size != stored; }
    i64 bytes() const { return bytes_of(size); }
    void pad() {
        size = (stored + SIZE_UNIT - 1) / SIZE_UNIT * SIZE_UNIT;
        factor_count = factors_of(size), pieces = size / piece();
    }
    int piece() const { return block ? int(block) : 32; }
    float least() const { return plain() ? 0x1p-48f : 0x1p-96f; }
};

struct AttentionCall {
    const u8* q;  // (batch, groups * heads, queries, k.stored), strides in elements
    i64 q_dtype, q_batch, q_head, q_query;
    void* out;  // (batch, groups * heads, queries, v.stored), contiguous, the dtype of q; float32 with `sums`
    float* sums;  // (batch, groups * heads, queries, 2) for the largest score and the sum of weights by which
                  // `out` is not divided; or null
    i64 batch, heads, groups, queries;
    StoredRows k, v;
    const i64* table;  // (batch, table_stride) pages, or null
    i64 table_stride, page, pages, capacity;
    const i64 *lengths, *positions, *first;  // (batch), (batch, queries) or null, (batch) or null
    i64 causal, window;
    const u8* mask;  // with strides in elements, 0 for a dim of size 1; or null
    i64 mask_dtype, mask_batch, mask_head, mask_query, mask_token, mask_tokens;  // dtype 3: bool
    const float* sinks;                                                          // with strides, or null
    i64 sink_batch, sink_head, sink_query;
    i64 threads, dots;  // threads: at most; dots: whether to use bfloat16 dot products; -1 for the faster way
    double pre, cap, post;  // float32 numbers

    i64 rows() const { return groups * queries; }
};

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
