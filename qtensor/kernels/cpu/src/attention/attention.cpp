// Attention over rows of keys and values as they are stored. Chunks of tokens are decoded group by group and
// multiply all rows of queries that share a head of keys; no decoded row leaves the caches.
#include <atomic>

#include "../memory.h"
#include "../threads.h"
#include "decode_avx512.h"
#include "products.h"

namespace QT_NAMESPACE {

#if QT_ISA == 512
extern const Products dot_products;
static const Products pair_products = products_of<PairTile>();
#endif
static const Products float_products = products_of<FloatTile>();

constexpr i64 TILE_ROWS = 128;  // of queries that a decoded group multiplies

// Whether bfloat16 dot products are the fastest: Intel's processors take two cycles for one, and have two
// units for float32 products.
static bool prefers_dots() {
#if QT_ISA == 512
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
#else
    return false;
#endif
}

// How the rows of a side are decoded and multiplied.
struct Way {
    bool pairs, dots;
    Products products;
    Way(const AttentionCall& c, const StoredRows& s) : pairs(false), dots(false), products(float_products) {
#if QT_ISA == 512
        pairs = s.narrow();
        dots = pairs && c.q_dtype == BF16 && (c.dots < 0 ? prefers_dots() : c.dots);
        if (pairs) products = dots ? dot_products : pair_products;
#else
        (void)c, (void)s;
#endif
    }
};

// Where the rows of a sequence and a head lie.
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
    GroupRows rows;
    const u8* factors;
    i64 factor_stride;
    void find(const Addresses& a, i64 t, Seen inside, u8* edge) {
        const bool whole = t >= inside.lo && t + TOKENS - 1 <= inside.hi;
        // Without a page that holds all tokens of the group, it is copied like an edge.
        if (whole && (!a.c.table || a.c.page % TOKENS == 0)) {
            rows = {a.codes(t), a.s.token};
            factors = a.s.factors ? a.factors(t) : nullptr;
            factor_stride = a.s.factor_token;
            return;
        }
        const i64 bytes = a.s.bytes(),
                  factor_bytes = a.s.factor_count() * (a.s.factor_id == FACTOR_ROW ? 4 : 1);
        rows = {edge, bytes};
        factors = edge + TOKENS * bytes;
        factor_stride = factor_bytes;
        memset(edge, 0, size_t(TOKENS * (bytes + factor_bytes)));
        const i64 last = std::min<i64>(TOKENS - 1, inside.hi - t);
        for (i64 i = std::max<i64>(0, inside.lo - t); i <= last; i++) {
            memcpy(edge + i * bytes, a.codes(t + i), size_t(bytes));
            if (factor_bytes)
                memcpy(edge + TOKENS * bytes + i * factor_bytes, a.factors(t + i), size_t(factor_bytes));
        }
    }
};

// Memory of a thread for tiles of up to `rows` rows.
struct Scratch {
    i64 k_size, v_size;
    Array<float> q, scores, chunk, tile, decoded, weights, factors;
    Array<u8> edge;
    Array<Seen> seen;  // by each row of the tile
    static i64 most_factors(const StoredRows& s) { return std::max(1, s.factor_count()); }
    Scratch(const AttentionCall& c, i64 rows)
        : k_size(c.k.size),
          v_size(c.v.size),
          q(rows * k_size),
          scores(rows * SCORE_ROW),
          chunk(rows * v_size),
          tile(TOKENS * std::max(k_size, v_size)),
          decoded(TOKENS * std::max(k_size, v_size)),
          weights(MOST_ROWS * most_factors(c.v) * TOKENS),
          factors(TOKENS * std::max(most_factors(c.k), most_factors(c.v))),
          edge(TOKENS * (4 * std::max(k_size, v_size) + 64)),
          seen(rows) {}
};

// The rows r0 .. r1 of a sequence and a head of keys. A row is a head of queries of the group and a query:
// row = query * groups + head.
struct Tile {
    i64 b, h, r0, r1;
    i64 count() const { return r1 - r0; }
};

class Attention {
public:
    const AttentionCall& c;
    const Way k_way, v_way;
    const bool round_weights;

    explicit Attention(const AttentionCall& call)
        : c(call), k_way(call, call.k), v_way(call, call.v), round_weights(call.q_dtype == BF16) {}

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
    i64 head_of(const Tile& t, i64 row) const { return t.h * c.groups + row % c.groups; }

    // The queries of a tile in the order of the positions of keys, and what each sees.
    void begin(const Tile& t, Scratch& w) const {
        const float least = c.k.least();
        const i64 size = c.k.size;
        for (i64 r = t.r0; r < t.r1; r++) {
            w.seen[r - t.r0] = seen_by(c, t.b, r / c.groups);
            const i64 at = t.b * c.q_batch + head_of(t, r) * c.q_head + r / c.groups * c.q_query;
            float* to = w.q + (r - t.r0) * size;
            float* wide = k_way.dots || c.k.element == E2M1 ? (float*)w.decoded : to;
            with_type(c.q_dtype, [&](auto type) {
                using D = decltype(type);
                widen_row<D>((const u8*)((const typename D::T*)c.q + at), size, wide, least);
            });
            if (wide == to) continue;
            u16* halves = (u16*)((u32*)(float*)w.q + (r - t.r0) * size / 2);
            for (i64 i = 0; i < size; i++) {
                const i64 position = c.k.element == E2M1 ? i / 8 * 8 + nibble_position(int(i % 8)) : i;
                if (k_way.dots)
                    halves[position] = u16(bits<u32>(wide[i]) >> 16);
                else
                    to[position] = wide[i];
            }
        }
    }
    const void* query(const Scratch& w, i64 row) const {
        return k_way.dots ? (const void*)((const u32*)(const float*)w.q + row * c.k.size / 2)
                          : (const void*)(w.q + row * c.k.size);
    }

    // What is added to the scores of 16 tokens by a mask, or -inf.
    void add_mask(const Tile& t, i64 row, i64 token, Seen s, float* score) const {
        const i64 at = t.b * c.mask_batch + head_of(t, row) * c.mask_head + row / c.groups * c.mask_query;
        const float log2_e = 1.4426950408889634f;
        for (int i = 0; i < TOKENS; i++) {
            if (token + i < s.lo || token + i > s.hi) continue;
            const i64 place = at + (token + i) * c.mask_token;
            if (c.mask_dtype == 3) {
                if (!c.mask[place]) score[i] = -INFINITY;
                continue;
            }
            with_type(c.mask_dtype, [&](auto type) {
                using D = decltype(type);
                const float m = D::to_float(((const typename D::T*)c.mask)[place]);
                score[i] = fused_one(m, log2_e, score[i]);
            });
        }
    }
    // From sums of products to scores: 16 tokens of a row.
    __attribute__((noinline)) void finish_scores(const Tile& t, i64 row, Seen s, i64 token,
                                                 const float* row_factors, float* score) const {
        const VF pre = all(float(c.pre)), cap = all(float(c.cap));
        for (int g = 0; g < TOKENS; g += W) {
            VF y = load<VF>(score + g);
            if (row_factors) y = y * load<VF>(row_factors + g);
            y = y * pre;
            if (c.cap != 0) {
                const VF minus = (VF)((VI)y | all(i32(0x80000000)));
                const VF z = exp2_of(minus < all(-96.0f) ? all(-96.0f) : minus);
                const VF a = (all(1.0f) - z) / (all(1.0f) + z);
                y = (y < VF{} ? -a : a) * cap;
            }
            store(score + g, y);
        }
        if (c.mask) add_mask(t, row, token, s, score);
        if (token >= s.lo && token + TOKENS - 1 <= s.hi) return;
        for (int i = 0; i < TOKENS; i++)
            if (token + i < s.lo || token + i > s.hi) score[i] = -INFINITY;
    }

    static int tile_index(int rows) { return rows == 8 ? 3 : rows == 4 ? 2 : rows - 1; }
    // Calls f(first row, rows) for tiles of rows.
    template <class F>
    static void by_rows(i64 count, const F& f) {
        for (i64 r = 0, n; r < count; r += n) {
            n = MOST_ROWS;
            while (n > count - r) n /= 2;
            f(r, int(n));
        }
    }
    void decode(const Way& way, const StoredRows& s, const GroupRows& g, bool keys, Scratch& w) const {
#if QT_ISA == 512
        u8* scratch = (u8*)(float*)w.decoded;
        if (way.pairs) {
            (keys ? pair_keys : pair_values)(s, g, scratch, (u32*)(float*)w.tile);
            return;
        }
#endif
        (void)way;
        (keys ? float_keys : float_values)(s, g, w.decoded, w.tile);
    }

    void score_group(const Tile& t, i64 first, int i, const Group& g, Ahead ahead, Scratch& w) const {
        const i64 token = first + i * TOKENS;
        decode(k_way, c.k, g.rows, true, w);
        if (c.k.factor_id) decode_factors(c.k, g.factors, g.factor_stride, w.factors);
        const float* of_rows = c.k.factor_id == FACTOR_ROW ? (const float*)w.factors : nullptr;
        const float* of_blocks = c.k.factor_id && !of_rows ? (const float*)w.factors : nullptr;
        by_rows(t.count(), [&](i64 r, int n) {
            float* s = w.scores + r * SCORE_ROW + i * TOKENS;
            k_way.products.scores[tile_index(n)](
                {(const float*)w.tile, c.k.size, c.k.piece(), of_blocks, query(w, r), s, &ahead});
            for (int j = 0; j < n; j++)
                finish_scores(t, t.r0 + r + j, w.seen[r + j], token, of_rows, s + j * SCORE_ROW);
        });
    }
    // Turns the scores of a row into weights.
    __attribute__((noinline)) static Partial soften(float* s, const bool have[GROUPS]) {
        VF most = all(-INFINITY);
        VI some{};
        for (int i = 0; i < CHUNK; i += W) {
            if (!have[i / TOKENS]) continue;
            const VF y = load<VF>(s + i);
            most = y > most ? y : most;
            some |= (VI)(y != all(-INFINITY));
        }
        float top = -INFINITY;
        for (int j = 0; j < W; j++) top = most[j] > top ? most[j] : top;
        if (!any(some)) return {top, 0, false};
        VF lanes[PARTS] = {};
        for (int i = 0; i < GROUPS; i++) {
            if (!have[i]) continue;
            for (int g = 0; g < PARTS; g++) {
                const VF p = exp2_of(load<VF>(s + i * TOKENS + g * W) - all(top));
                store(s + i * TOKENS + g * W, p);
                lanes[g] = lanes[g] + p;
            }
        }
        alignas(64) float sums[TOKENS];
        for (int g = 0; g < PARTS; g++) store(sums + g * W, lanes[g]);
        for (int half = TOKENS / 2; half; half /= 2)
            for (int j = 0; j < half; j++) sums[j] = sums[j] + sums[j + half];
        return {top, sums[0], true};
    }
    // The weights of 16 tokens of a row for each block of values.
    __attribute__((noinline)) void scale_weights(const float* p, i64 blocks, const float* factors,
                                                 void* to) const {
        const VF least = all(c.v.least());
        for (i64 block = 0; block < blocks; block++)
            for (int g = 0; g < TOKENS; g += W) {
                VF v = load<VF>(p + g);
                if (factors) v = v == VF{} ? v : v * load<VF>(factors + block * TOKENS + g);
                v = v < least ? VF{} : v;
                if (round_weights) v = bfloat16_rounded(v);
                const i64 at = block * TOKENS + g;
#if QT_ISA == 512
                if (v_way.dots) {
                    store((u16*)to + at, _mm512_cvtepi32_epi16((__m512i)((VU)v >> 16)));
                    continue;
                }
#endif
                store((float*)to + at, v);
            }
    }
    void add_group(const Tile& t, int i, const Group& g, const Partial* parts, Ahead ahead,
                   Scratch& w) const {
        decode(v_way, c.v, g.rows, false, w);
        if (c.v.factor_id) decode_factors(c.v, g.factors, g.factor_stride, w.factors);
        const i64 blocks = c.v.block ? c.v.factor_count() : 1;
        const i64 p_row = blocks * TOKENS / (v_way.dots ? 2 : 1);
        by_rows(t.count(), [&](i64 r, int n) {
            bool some = false;
            for (int j = 0; j < n; j++) {
                void* to = v_way.dots ? (void*)((u32*)(float*)w.weights + j * p_row)
                                      : (void*)(w.weights + j * p_row);
                some |= parts[r + j].some;
                if (parts[r + j].some)
                    scale_weights(w.scores + (r + j) * SCORE_ROW + i * TOKENS, blocks,
                                  c.v.factor_id ? (const float*)w.factors : nullptr, to);
                else
                    memset(to, 0, size_t(p_row) * 4);
            }
            if (some)
                v_way.products.values[tile_index(n)]({(const float*)w.tile, c.v.size, c.v.block,
                                                      (const float*)w.weights, p_row, w.chunk + r * c.v.size,
                                                      &ahead});
        });
    }
    // A chunk of all rows, merged into parts and sums.
    void add_chunk(const Tile& t, i64 first, Seen inside, Partial* parts, float* sums, Scratch& w) const {
        const Addresses k{c, c.k, t.b, t.h}, v{c, c.v, t.b, t.h};
        bool have[GROUPS];
        for (int i = 0; i < GROUPS; i++) have[i] = !inside.misses(first + i * TOKENS, TOKENS);
        // The rows of a group from `token` on, if all of them are read; fetched in at least `steps` steps.
        const auto ahead = [&](const Addresses& a, i64 token, i64 steps) {
            const bool whole = token + TOKENS <= inside.hi + 1 && token >= inside.lo;
            return Ahead(whole ? a.codes(token) : nullptr, a.s.token, a.s.bytes(), steps);
        };
        const i64 k_steps = c.k.size / 32, v_steps = c.v.size / 16;
        Group g;
        for (int i = 0; i < GROUPS; i++) {
            if (!have[i]) continue;
            g.find(k, first + i * TOKENS, inside, w.edge);
            // Two groups further on; behind the last, the values of the chunk.
            score_group(t, first, i, g,
                        i + 2 < GROUPS ? ahead(k, first + (i + 2) * TOKENS, k_steps)
                                       : ahead(v, first + (i + 2 - GROUPS) * TOKENS, k_steps),
                        w);
        }
        Partial here[TILE_ROWS];
        for (i64 r = 0; r < t.count(); r++) {
            here[r] = soften(w.scores + r * SCORE_ROW, have);
            if (here[r].some) memset(w.chunk + r * c.v.size, 0, sizeof(float) * size_t(c.v.size));
        }
        for (int i = 0; i < GROUPS; i++) {
            if (!have[i]) continue;
            g.find(v, first + i * TOKENS, inside, w.edge);
            add_group(t, i, g, here, ahead(i + 2 < GROUPS ? v : k, first + (i + 2) * TOKENS, v_steps), w);
        }
        for (i64 r = 0; r < t.count(); r++)
            merge(parts[r], sums + r * c.v.size, here[r], w.chunk + r * c.v.size, c.v.size);
    }
    // A segment of all rows: parts and sums are written.
    void add_segment(const Tile& t, i64 first, Seen inside, Partial* parts, float* sums, Scratch& w) const {
        for (i64 r = 0; r < t.count(); r++) parts[r] = {-INFINITY, 0, false};
        for (i64 chunk = first; chunk < first + SEGMENT; chunk += CHUNK)
            if (!inside.misses(chunk, CHUNK)) add_chunk(t, chunk, inside, parts, sums, w);
    }
    // Writes the result of a row.
    void finish(const Tile& t, i64 row, const Partial& part, const float* sums) const {
        const i64 head = head_of(t, row), query = row / c.groups, size = c.v.size;
        const i64 at = ((t.b * c.groups * c.heads + head) * c.queries + query) * size;
        float scale = 1, total = part.sum;
        if (c.sinks && part.some) {
            const float sink =
                c.sinks[t.b * c.sink_batch + head * c.sink_head + query * c.sink_query] * 1.4426950408889634f;
            const float most = part.most < sink ? sink : part.most;
            scale = exp2_of(part.most - most);
            total = fused_one(total, scale, sink == sink ? exp2_of(sink - most) : sink);
        }
        for (i64 e = 0; e < size; e += W) {
            VF v = load<VF>(sums + e) * all(scale) / all(total) * all(float(c.post)) + VF{};
            v = !part.some ? VF{} : v == v ? v : all(NAN);
            const VU b = (VU)bfloat16_rounded(v) >> 16;
            for (int i = 0; i < W; i++) {
                if (c.q_dtype == F32) ((float*)c.out)[at + e + i] = v[i];
                if (c.q_dtype == BF16) ((u16*)c.out)[at + e + i] = u16(b[i]);
                if (c.q_dtype == F16) ((u16*)c.out)[at + e + i] = float16_of(v[i]);
            }
        }
    }
    // Rounded to nearest even.
    static u16 float16_of(float v) {
        const u32 b = bits<u32>(v), sign = b >> 16 & 0x8000, m = b & ABS;
        if (m > u32(INF_BITS)) return 0x7e00;
        if (m >= 0x47800000 - 0x1000) return u16(sign | 0x7c00);
        if (m < 0x38800000) return u16(sign | (bits<u32>(bits<float>(m) + 0.5f) - 0x3f000000));
        return u16(sign | ((m + 0xfff + (m >> 13 & 1)) - 0x38000000) >> 13);
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
    for (i64 r = 0; r < n; r++) finish(t, t.r0 + r, parts[r], sums + r * c.v.size);
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
    const Array<float> sums(tiles * segments * most * c.v.size);
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
            finish(t, t.r0 + r, part, sums + at * c.v.size);
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

// Returns 0, 1 if lengths or pages are outside the cache, 2 if memory ran out.
int qt_attention(const AttentionCall* call) {
    const KeepDenormals scope;
    if (!is_within(*call)) return 1;
    try {
        Attention(*call).run();
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}
}
