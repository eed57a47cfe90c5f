// Attention over rows of keys and values as they are stored. Chunks of tokens are decoded group by group and
// multiply all rows of queries that share a head of keys; no decoded row leaves the caches.
#include <atomic>

#include "../cpu.h"
#include "../threads.h"
#include "codes_avx512.h"
#include "groups.h"
#include "softmax.h"

namespace QT_NAMESPACE {

constexpr i64 TILE_ROWS = 128;   // of queries that a decoded group multiplies
constexpr i64 MOST_SIZE = 1024;  // of heads
// Products of scores up to which a call uses one thread: waking another one costs more time.
constexpr double ONE_THREAD = 1 << 18;

#if QT_ISA == 512
Products dot_products(const StoredRows& s, bool in_registers);
#endif

// How the rows of a side are decoded and multiplied. `in_registers`: without tiles of decoded numbers, which
// pay off when many rows read them.
struct Way {
    bool pairs = false, in_registers = false, dots = false;
    Products products = products_of<FloatTile>();
    const u8* table = nullptr;  // of bytes of bfloat16 numbers, low and high
    Way(const AttentionCall& c, const StoredRows& s) {
#if QT_ISA == 512
        if (!s.narrow()) return;
        pairs = true;
        in_registers = c.rows() <= MOST_ROWS;
        dots = c.q_dtype == BF16 && uses_pairs(c.dots);
        if (!s.plain())
            with_element(s.element, [&](auto type) { table = QT_NAMESPACE::table<decltype(type)>().low; });
        if (dots)
            products = dot_products(s, in_registers);
        else
            products = in_registers ? products_of_codes<FloatSteps>(s) : products_of<PairTile<FloatSteps>>();
#else
        (void)c, (void)s;
#endif
    }
};

// Memory of a thread for tiles of up to `rows` rows.
struct Scratch {
    i64 k_size, v_size;
    Array<float> q, scores, chunk, tile, decoded, weights, factors, row_factors;
    Array<u8> edge;
    Array<QueryRow> rows;
    Array<Partial> here;  // of the chunk
    static i64 most_factors(const StoredRows& s) { return s.factor_count / 4 * 4 + 4; }
    Scratch(const AttentionCall& c, i64 count)
        : k_size(c.k.size),
          v_size(c.v.size),
          q(count * k_size),
          scores(count * SCORE_ROW),
          chunk(count * v_size),
          tile(TOKENS * std::max(k_size, v_size)),
          decoded(TOKENS * std::max(k_size, v_size)),
          weights(MOST_ROWS * most_factors(c.v) * TOKENS),
          factors(TOKENS * std::max(most_factors(c.k), most_factors(c.v))),
          row_factors(CHUNK),
          edge(TOKENS * (4 * std::max(k_size, v_size) + 64)),
          rows(count),
          here(count) {}
};

// The rows r0 .. r1 of a sequence and a head of keys. A row is a head of queries of the group and a query:
// row = query * groups + head.
struct Tile {
    i64 b, h, r0, r1;
    i64 count() const { return r1 - r0; }
};

class Attention {
    static AttentionCall padded(AttentionCall c) {
        c.k.pad(), c.v.pad();
        if (double(c.batch * c.heads * c.rows()) * double(c.capacity) * double(c.k.size) <= ONE_THREAD)
            c.threads = 1;
        return c;
    }

public:
    const AttentionCall c;
    const Way k_way, v_way;
    // What is fetched during products: keys and values during those of keys, then during those of values.
    const Lines k_of_k, v_of_k, v_of_v, k_of_v;

    explicit Attention(const AttentionCall& call)
        : c(padded(call)),
          k_way(c, c.k),
          v_way(c, c.v),
          k_of_k(c.k, k_way.products.key_steps(c.k.size)),
          v_of_k(c.v, k_way.products.key_steps(c.k.size)),
          v_of_v(c.v, Products::value_steps(c.v.size)),
          k_of_v(c.k, Products::value_steps(c.v.size)) {}

    // What any row of the tile sees.
    Seen seen(const Tile& t) const {
        Seen all{INT64_MAX, -1};
        for (i64 m = t.r0 / c.groups; m <= (t.r1 - 1) / c.groups; m++) {
            const Seen s = seen_by(c, t.b, m);
            if (s.none()) continue;
            all.lo = std::min(all.lo, s.lo), all.hi = std::max(all.hi, s.hi);
        }
        return all;
    }

    static int tile_index(int rows) { return rows == 8 ? 3 : rows == 4 ? 2 : rows - 1; }
    // Calls f(first row, rows) for blocks of rows that are multiplied at once.
    template <class F>
    static void by_rows(i64 count, const F& f) {
        for (i64 r = 0, n; r < count; r += n) {
            n = MOST_ROWS;
            while (n > count - r) n /= 2;
            f(r, int(n));
        }
    }
    QueryRow row_of(const Tile& t, i64 r) const {
        const i64 row = t.r0 + r, query = row / c.groups;
        return {t.b, t.h * c.groups + row % c.groups, query, seen_by(c, t.b, query)};
    }
    // A row of queries to pairs that are n apart, in the order of the codes of keys.
    void interleave(const float* row, i64 size, int n, i64 at, float* q) const {
        const bool nibbles = c.k.element == E2M1;
        for (i64 i = 0; i < size / 2; i++, at += n) {
            const i64 low = nibbles ? i / 4 * 8 + i % 4 : 2 * i, high = low + (nibbles ? 4 : 1);
            if (k_way.dots)
                ((u32*)q)[at] = bits<u32>(row[low]) >> 16 | (bits<u32>(row[high]) & 0xffff0000);
            else
                q[2 * at] = row[low], q[2 * at + 1] = row[high];
        }
    }
    // The queries of a tile as products read them, and what each sees.
    void begin(const Tile& t, Scratch& w) const {
        const i64 size = c.k.size;
        for (i64 r = 0; r < t.count(); r++) w.rows[r] = row_of(t, r);
        by_rows(t.count(), [&](i64 first, int n) {
            for (int r = 0; r < n; r++) {
                const QueryRow& row = w.rows[first + r];
                const i64 at = row.b * c.q_batch + row.head * c.q_head + row.query * c.q_query;
                with_type(c.q_dtype, [&](auto type) {
                    using D = decltype(type);
                    auto* from = (const u8*)((const typename D::T*)c.q + at);
                    if (c.k.padded()) {
                        memset(w.edge, 0, sizeof(typename D::T) * size_t(size));
                        memcpy(w.edge, from, sizeof(typename D::T) * size_t(c.k.stored));
                        from = w.edge;
                    }
                    widen_row<D>(from, size, w.decoded, c.k.least());
                });
                interleave(w.decoded, size, n, first * size / 2 + r, w.q);
            }
        });
    }
    const void* query(const Scratch& w, i64 row) const {
        return k_way.dots ? (const void*)((const u16*)(const float*)w.q + row * c.k.size)
                          : (const void*)(w.q + row * c.k.size);
    }

    // The rows of a group as products read them.
    GroupRows decode(const Way& way, const StoredRows& s, const GroupCodes& codes, bool keys,
                     Scratch& w) const {
#if QT_ISA == 512
        if (way.pairs) {
            const GroupCodes bytes = unpacked(s, codes, (u8*)(float*)w.decoded);
            if (!way.in_registers)
                (keys ? pair_keys : pair_values)(s, bytes, way.table, (u32*)(float*)w.tile);
            else if (keys)
                code_keys(s, bytes, (__m512i*)(float*)w.tile);
            return {s, bytes, way.table, w.tile};
        }
#endif
        (keys ? float_keys : float_values)(s, codes, w.decoded, w.tile);
        return {s, codes, way.table, w.tile};
    }
    // Sums of products of the group i of a chunk.
    void score_group(i64 rows, int i, const Group& g, const Ahead& ahead, Scratch& w) const {
        const GroupRows keys = decode(k_way, c.k, g.codes, true, w);
        float* factors = c.k.factor_id == FACTOR_ROW ? w.row_factors + i * TOKENS : w.factors;
        if (c.k.factor_id) decode_factors(c.k, g.factors, g.factor_stride, factors);
        const float* of_blocks = c.k.block ? factors : nullptr;
        by_rows(rows, [&](i64 r, int n) {
            float* s = w.scores + r * SCORE_ROW + i * TOKENS;
            k_way.products.scores[tile_index(n)]({keys, of_blocks, query(w, r), s, ahead.for_rows(r)});
        });
    }
    void add_group(i64 rows, int i, const Group& g, const Ahead& ahead, Scratch& w) const {
        const GroupRows values = decode(v_way, c.v, g.codes, false, w);
        const float* factors = c.v.factor_id ? (const float*)w.factors : nullptr;
        if (factors) decode_factors(c.v, g.factors, g.factor_stride, w.factors);
        const i64 blocks = c.v.block ? c.v.factor_count : 1;
        const auto scale = c.q_dtype != BF16 ? scale_weights<Weights::EXACT>
                           : v_way.dots      ? scale_weights<Weights::HALVES>
                                             : scale_weights<Weights::ROUNDED>;
        by_rows(rows, [&](i64 r, int n) {
            scale(w.scores + r * SCORE_ROW + i * TOKENS, n, factors, blocks, c.v.least(), w.weights);
            v_way.products.values[tile_index(n)](
                {values, w.weights, w.chunk + r * c.v.size, ahead.for_rows(r)});
        });
    }
    // A chunk of all rows, merged into parts and sums.
    void add_chunk(const Tile& t, i64 chunk, Seen inside, Partial* parts, float* sums, Scratch& w) const {
        const Addresses k{c, c.k, t.b, t.h}, v{c, c.v, t.b, t.h};
        const i64 rows = t.count(), size = c.v.size;
        const int first = int(std::max<i64>(0, inside.lo - chunk) / TOKENS),
                  end = int(std::min<i64>(CHUNK - 1, inside.hi - chunk) / TOKENS) + 1;
        // The lines of a later group that is read whole; else of the one that is read now.
        const auto ahead = [&](const Addresses& a, const Lines& lines, int group, const Group& now) {
            const i64 token = chunk + group * TOKENS;
            return lines.ahead(inside.covers(token, TOKENS) ? a.codes(token) : now.codes.at);
        };
        Group g;
        for (int i = first; i < end; i++) {
            g.find(k, chunk + i * TOKENS, inside, w.edge);
            // Behind the last keys, the values of the chunk.
            const int next = i + groups_ahead(c.k);
            score_group(rows, i, g,
                        next < end ? ahead(k, k_of_k, next, g) : ahead(v, v_of_k, next - end + first, g), w);
        }
        for (i64 r = 0; r < rows; r++) {
            float* s = w.scores + r * SCORE_ROW;
            const float* row_factors = c.k.factor_id == FACTOR_ROW ? (const float*)w.row_factors : nullptr;
            finish_scores(c, w.rows[r], chunk, first, end, row_factors, s);
            w.here[r] = soften(first, end, s);
        }
        memset(w.chunk, 0, sizeof(float) * size_t(rows * size));
        for (int i = first; i < end; i++) {
            g.find(v, chunk + i * TOKENS, inside, w.edge);
            const int next = i + groups_ahead(c.v);  // behind the last values, the keys of the next chunk
            add_group(rows, i, g, next < end ? ahead(v, v_of_v, next, g) : ahead(k, k_of_v, next, g), w);
        }
        for (i64 r = 0; r < rows; r++) merge(parts[r], sums + r * size, w.here[r], w.chunk + r * size, size);
    }
    // A segment of all rows: parts and sums are written.
    void add_segment(const Tile& t, i64 first, Seen inside, Partial* parts, float* sums, Scratch& w) const {
        for (i64 r = 0; r < t.count(); r++) parts[r] = {-INFINITY, 0, false};
        for (i64 chunk = first; chunk < first + SEGMENT; chunk += CHUNK)
            if (!inside.misses(chunk, CHUNK)) add_chunk(t, chunk, inside, parts, sums, w);
    }
    void run() const;
    void run_whole(const Tile& t, Scratch& w, Partial* parts, float* sums) const;
};

// All segments of a tile, in order. parts, sums: of twice the rows.
void Attention::run_whole(const Tile& t, Scratch& w, Partial* parts, float* sums) const {
    const Seen inside = seen(t);
    const i64 n = t.count();
    begin(t, w);
    for (i64 r = 0; r < n; r++) parts[r] = {-INFINITY, 0, false};
    if (!inside.none())
        for (i64 s = inside.lo / SEGMENT * SEGMENT; s <= inside.hi; s += SEGMENT) {
            add_segment(t, s, inside, parts + n, sums + n * c.v.size, w);
            for (i64 r = 0; r < n; r++)
                merge(parts[r], sums + r * c.v.size, parts[n + r], sums + (n + r) * c.v.size, c.v.size);
        }
    for (i64 r = 0; r < n; r++) write_result(c, w.rows[r], parts[r], sums + r * c.v.size);
}

// Threads take tiles, or segments of tiles if there are too few of them.
void Attention::run() const {
    const i64 rows = c.rows(), tile = std::min(rows, std::max<i64>(1, TILE_ROWS / c.groups) * c.groups);
    const i64 most = std::min(tile, TILE_ROWS), tiles_of_head = (rows + most - 1) / most;
    const i64 tiles = c.batch * c.heads * tiles_of_head;
    const auto tile_at = [&](i64 i) {
        const i64 part = i % tiles_of_head, head = i / tiles_of_head;
        return Tile{head / c.heads, head % c.heads, part * most, std::min(rows, (part + 1) * most)};
    };
    std::atomic<i64> next{0};
    if (c.threads == 1 || tiles >= 4 * c.threads) {
        parallel(c.threads, 1, int(c.threads), [&](i64, i64) {
            Scratch w(c, most);
            const Array<Partial> parts(2 * most);
            const Array<float> sums(2 * most * c.v.size);
            for (i64 i; (i = next.fetch_add(1)) < tiles;) run_whole(tile_at(i), w, parts, sums);
        });
        return;
    }
    i64 first = INT64_MAX, last = -1;
    for (i64 i = 0; i < tiles; i++) {
        const Seen s = seen(tile_at(i));
        if (!s.none()) first = std::min(first, s.lo / SEGMENT), last = std::max(last, s.hi / SEGMENT);
    }
    const i64 segments = std::max<i64>(0, last - first + 1);
    const Array<Partial> parts(tiles * segments * most);
    const Array<float> sums(std::max<i64>(1, tiles * segments) * most * c.v.size);
    if (!segments) std::fill_n((float*)sums, most * c.v.size, 0.0f);  // which results without a token read
    parallel(c.threads, 1, int(c.threads), [&](i64, i64) {
        Scratch w(c, most);
        i64 arranged = -1;
        for (i64 i; (i = next.fetch_add(1)) < tiles * segments;) {
            const Tile t = tile_at(i / segments);
            if (arranged != i / segments) begin(t, w);
            arranged = i / segments;
            add_segment(t, (first + i % segments) * SEGMENT, seen(t), parts + i * most,
                        sums + i * most * c.v.size, w);
        }
    });
    for (i64 i = 0; i < tiles; i++) {
        const Tile t = tile_at(i);
        for (i64 r = 0; r < t.count(); r++) {
            Partial part{-INFINITY, 0, false};
            const i64 at = i * segments * most + r;
            for (i64 s = 0; s < segments; s++)
                merge(part, sums + at * c.v.size, parts[at + s * most], sums + (at + s * most) * c.v.size,
                      c.v.size);
            write_result(c, row_of(t, r), part, sums + at * c.v.size);
        }
    }
}

// Whether lengths and pages are within the cache.
static bool is_within(const AttentionCall& c) {
    for (i64 b = 0; b < c.batch; b++) {
        if (c.lengths[b] < 0 || c.lengths[b] > c.capacity) return false;
        if (c.mask && c.lengths[b] > c.mask_tokens) return false;
        if (!c.table) continue;
        for (i64 p = 0; p * c.page < c.lengths[b]; p++) {
            const i64 page = c.table[b * c.table_stride + p];
            if (page < 0 || page >= c.pages) return false;
        }
    }
    return true;
}

}  // namespace QT_NAMESPACE
using namespace QT_NAMESPACE;

extern "C" {

// The size of the struct that Python fills.
i64 qt_attention_abi() { return 1000 + i64(sizeof(AttentionCall)); }

// Returns 0, 1 if lengths or pages are outside the cache or heads are too large, 2 if memory ran out.
int qt_attention(const AttentionCall* call) {
    const KeepDenormals scope;
    if (call->k.stored > MOST_SIZE || call->v.stored > MOST_SIZE || !is_within(*call)) return 1;
    try {
        Attention(*call).run();
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

// Joins two parts of an attention, each float32 values (batch, heads, queries, size) and their sums. Of
// `call`, what the result and the sinks need is set; heads are those of the queries.
int qt_join(const AttentionCall* call, const float* values, const float* sums, const float* more,
            const float* more_sums) {
    const KeepDenormals scope;
    const AttentionCall& c = *call;
    const i64 size = c.v.stored, padded = (size + TOKENS - 1) / TOKENS * TOKENS;
    const auto part = [](const float* s) { return Partial{s[0], s[1], s[1] != 0}; };
    try {
        const Array<float> row(padded), next(padded);
        std::fill_n((float*)row, padded, 0.0f), std::fill_n((float*)next, padded, 0.0f);
        for (i64 i = 0; i < c.batch * c.heads * c.queries; i++) {
            Partial done = part(sums + 2 * i);
            memcpy(row, values + i * size, sizeof(float) * size_t(size));
            memcpy(next, more + i * size, sizeof(float) * size_t(size));
            merge(done, row, part(more_sums + 2 * i), next, padded);
            const i64 head = i / c.queries;
            write_result(c, {head / c.heads, head % c.heads, i % c.queries, {}}, done, row);
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}
}
