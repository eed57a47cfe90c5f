// The ops attention and cache_append_, which call the library of attention (attention/). The rules are those
// of library/attention.py and library/cache.py: a call that breaks one goes to Python, which says which.
#include <cmath>

#include "steps.h"

namespace ops {

namespace {

constexpr double LOG2_E = 1.4426950408889634;
constexpr i64 MOST_INDICES = 1 << 20;  // that a call converts; Python serves larger tables

// The buffers of keys or values.
struct Side {
    const RowFormat* format = nullptr;
    Tensor codes, factors;
    float wide = 1;  // the value of the whole cache, where the format has one
    i64 size = 0;    // of a head

    // Reads the arguments at these places: codes, factors, text of the format, value of the whole cache.
    bool read(const Arguments& call, int codes_at, int factors_at, int text_at, int wide_at);
    bool has_factors() const { return format->factor_id != NO_FACTOR; }
    // What decodes all values of the cache.
    double global() const { return format->divisor == 0 ? 1.0 : float(wide / format->divisor); }
};

i64 byte_stride(const Tensor& t, int dim) { return t.stride[dim] * BYTES[t.dtype]; }

bool Side::read(const Arguments& call, int codes_at, int factors_at, int text_at, int wide_at) {
    format = row_format_of(call.text(text_at));
    if (!format || !call.tensor(codes_at, codes) || codes.dtype != format->dtype) return false;
    if (codes.shape.dim != 4 || !codes.data || codes.stride[3] != 1) return false;
    const i64 *n = codes.shape.size, entries = n[3];
    size = entries / format->bytes * format->codes;
    if (size < 1 || entries % format->bytes || (format->block && size % format->block)) return false;
    if (call.has(factors_at) != has_factors() || call.has(wide_at) != (format->divisor != 0)) return false;
    if (has_factors()) {
        const i64 count = format->block ? size / format->block : 1, want[4] = {n[0], n[1], n[2], count};
        if (!call.tensor(factors_at, factors) || factors.dtype != format->factor_dtype) return false;
        if (!(factors.shape == Shape(4, want)) || (count > 1 && factors.stride[3] != 1)) return false;
    }
    Tensor given;
    if (format->divisor == 0) return true;
    if (!call.tensor(wide_at, given) || !given.is_one(FLOAT32)) return false;
    wide = *(const float*)given.data;
    return true;
}

// Indices as the kernels read them: contiguous int64; null for an argument that the call lacks.
struct Indices {
    const i64* data = nullptr;
    // Returns false unless the argument is absent or has the shape.
    bool read(const Arguments& call, int at, const Shape& shape, Scratch& scratch);
};

bool Indices::read(const Arguments& call, int at, const Shape& shape, Scratch& scratch) {
    Tensor given;
    if (!call.has(at)) return true;
    if (!call.tensor(at, given) || (given.dtype != INT64 && given.dtype != INT32) || !given.data)
        return false;
    const i64 count = shape.elements();
    if (!(given.shape == shape) || count > MOST_INDICES) return false;
    data = (const i64*)given.data;
    if (given.is(INT64)) return true;
    auto* made = (i64*)scratch.get(count * i64(sizeof(i64)));
    const i64 inner = shape.cols(), step = shape.dim == 2 ? given.stride[0] : 0;
    for (i64 i = 0; i < count; i++) {
        const i64 from = i / inner * step + i % inner * given.stride[shape.dim - 1];
        made[i] = given.dtype == INT64 ? ((const i64*)given.data)[from] : ((const i32*)given.data)[from];
    }
    data = made;
    return true;
}

// Reads a block table (batch, columns), if the call has one; columns is 1 else.
bool read_table(const Arguments& call, int at, i64 batch, Scratch& scratch, Indices& table, i64& columns) {
    Tensor given;
    columns = 1;
    if (!call.has(at)) return true;
    if (!call.tensor(at, given) || given.shape.dim != 2) return false;
    columns = given.shape.size[1];
    return table.read(call, at, Shape(batch, columns), scratch);
}

// ---- attention

// Whether float32 holds a number: finite, and 0 for 0 alone.
bool in_float32(double value) {
    const auto rounded = float(value);
    return std::isfinite(rounded) && (rounded != 0) == (value != 0);
}

StoredRows stored(const Side& s) {
    StoredRows r{};
    r.codes = (const u8*)s.codes.data;
    r.outer = byte_stride(s.codes, 0), r.head = byte_stride(s.codes, 1), r.token = byte_stride(s.codes, 2);
    if (s.has_factors()) {
        r.factors = (const u8*)s.factors.data;
        r.factor_outer = byte_stride(s.factors, 0), r.factor_head = byte_stride(s.factors, 1);
        r.factor_token = byte_stride(s.factors, 2);
    }
    const RowFormat& f = *s.format;
    r.element = f.element, r.packed = f.packed, r.block = f.block, r.factor_id = f.factor_id;
    r.stored = s.size;
    return r;
}

// Reads scale, soft cap and window, and what the sides multiply.
bool read_numbers(const Arguments& call, int scale_at, const Side& k, const Side& v, AttentionCall& c) {
    const double scale = call.number(scale_at), soft_cap = call.number(scale_at + 3);
    c.causal = call.flag(scale_at + 1), c.window = call.word(scale_at + 2);
    double factor = LOG2_E * scale;
    if (!in_float32(scale) || !in_float32(factor)) return false;
    if (!(soft_cap >= 0) || !in_float32(soft_cap) || !in_float32(LOG2_E * soft_cap)) return false;
    if (soft_cap != 0) factor = 2.0 * factor / soft_cap;
    if (!in_float32(factor) || c.window < 0 || (c.window && !c.causal)) return false;
    c.pre = float(factor * k.global()), c.cap = float(soft_cap * LOG2_E), c.post = v.global();
    return true;
}

bool read_mask(const Arguments& call, int at, const Shape& q, AttentionCall& c) {
    Tensor mask;
    if (!call.has(at)) return true;
    if (!call.tensor(at, mask) || (mask.dtype != BOOL && !is_float(mask.dtype))) return false;
    if (mask.shape.dim != 4 || !mask.data) return false;
    i64 stride[3];
    for (int i = 0; i < 3; i++) {
        const i64 n = mask.shape.size[i];
        if (n != 1 && n != q.size[i]) return false;
        stride[i] = n == 1 ? 0 : mask.stride[i];
    }
    c.mask = (const u8*)mask.data;
    c.mask_dtype = mask.dtype == BOOL ? 3 : mask.dtype;
    c.mask_batch = stride[0], c.mask_head = stride[1], c.mask_query = stride[2];
    c.mask_token = mask.stride[3], c.mask_tokens = mask.shape.size[3];
    return true;
}

bool read_sinks(const Arguments& call, int at, const Shape& q, Scratch& scratch, AttentionCall& c) {
    Tensor sinks;
    if (!call.has(at)) return true;
    if (!call.tensor(at, sinks) || !is_float(sinks.dtype) || !sinks.data) return false;
    const bool by_head = sinks.shape.dim == 1;
    if (!(sinks.shape == (by_head ? Shape::vector(q.size[1]) : Shape(3, q.size)))) return false;
    if (sinks.dtype != FLOAT32) {
        const i64 count = sinks.shape.elements();
        if (!sinks.contiguous || count > MOST) return false;
        float* made = scratch.floats(count);
        kernels.widen(sinks.data, sinks.dtype, count, made);
        sinks.data = made;
    }
    c.sinks = (const float*)sinks.data;
    c.sink_batch = by_head ? 0 : sinks.stride[0], c.sink_head = sinks.stride[by_head ? 0 : 1];
    c.sink_query = by_head ? 0 : sinks.stride[2];
    return true;
}

// ---- append

// The rows of new tokens of a side, and the buffers that take them.
struct NewRows {
    Tensor given;  // (batch, heads, tokens, size)
    Side side;
    Rows rows;

    bool read(const Arguments& call, int rows_at, int codes_at, int text_at, int wide_at, Scratch& scratch);
    bool subtract(const Arguments& call, int mean_at, Scratch& scratch);
    bool encode(AppendCall& c, Scratch& scratch);
};

// Whether the op writes such a buffer. Autograd's rules for one that may require a gradient are Python's.
bool is_written(const Tensor& t) {
    for (i64 d = 0; d < t.shape.dim; d++)
        if (t.stride[d] == 0 && t.shape.size[d] > 1) return false;
    return !is_float(t.dtype) || !torch.aoti_torch_grad_mode_is_enabled();
}

bool NewRows::read(const Arguments& call, int rows_at, int codes_at, int text_at, int wide_at,
                   Scratch& scratch) {
    if (!call.tensor(rows_at, given) || given.shape.dim != 4 || !rows.read(given, scratch)) return false;
    if (!call.has(codes_at) || !side.read(call, codes_at, codes_at + 1, text_at, wide_at)) return false;
    if (!is_written(side.codes) || (side.has_factors() && !is_written(side.factors))) return false;
    return given.shape.size[3] == side.size && given.shape.size[1] == side.codes.shape.size[1];
}

// Subtracts (heads, size) or (batch, heads, size) in float32.
bool NewRows::subtract(const Arguments& call, int mean_at, Scratch& scratch) {
    Tensor mean;
    if (!call.has(mean_at)) return true;
    if (!call.tensor(mean_at, mean) || !is_float(mean.dtype) || !mean.contiguous) return false;
    const i64 *n = given.shape.size, heads = n[1], tokens = n[2], size = n[3];
    const i64 each[3] = {n[0], heads, size};
    const bool alike = mean.shape == Shape(heads, size);
    if (!alike && !(mean.shape == Shape(3, each))) return false;
    const i64 elements = given.shape.elements(), count = mean.shape.elements();
    float *made = scratch.floats(elements), *means = scratch.floats(count);
    kernels.widen(rows.data, rows.dtype, elements, made);
    kernels.widen(mean.data, mean.dtype, count, means);
    for (i64 row = 0; row < elements / size; row++) {
        const float* m = means + row / tokens % (alike ? heads : heads * n[0]) * size;
        for (i64 i = 0; i < size; i++) made[row * size + i] = made[row * size + i] - m[i];
    }
    rows.data = made, rows.dtype = FLOAT32;
    return true;
}

AppendedRows appended(const void* from, i64 stride, const Tensor& to) {
    return {(const u8*)from,
            stride,
            to.shape.size[3] * BYTES[to.dtype],
            (u8*)to.writable(),
            byte_stride(to, 0),
            byte_stride(to, 1),
            byte_stride(to, 2)};
}

bool NewRows::encode(AppendCall& c, Scratch& scratch) {
    const Description* d = side.format->quantizer;
    const Shape matrix(given.shape.rows(), side.size);
    if (!d) {
        if (rows.dtype != side.format->dtype) return false;
        c.rows[c.count++] = appended(rows.data, side.size * BYTES[rows.dtype], side.codes);
        return true;
    }
    Addresses encoded;
    complete(*d, matrix, scratch, encoded);
    rows.shape = matrix;
    // The value of the whole cache is the maximum of NVFP4, or what decodes FP8.
    const float scale = 1.0f / side.wide;
    QuantizeOptions options;
    if (side.format->divisor != 0 && side.has_factors()) options.given = &side.wide;
    if (side.format->divisor != 0 && !side.has_factors()) options.scale = &scale;
    if (!quantize_rows(*d, rows, encoded, options)) return false;
    for (int i = 0; i < 1 + side.has_factors(); i++) {
        const Slot& slot = d->slot[i];
        const Tensor& to = i ? side.factors : side.codes;
        const Shape shape = BufferShape(slot, matrix).shape;
        if (shape.dim != 2 || shape.size[1] < to.shape.size[3]) return false;
        c.rows[c.count++] = appended(encoded.at[slot.position], shape.size[1] * BYTES[slot.dtype], to);
    }
    return true;
}

}  // namespace

bool attention(Arguments& call, Tensors& results) {
    enum { Q, K, K_FACTORS, V, V_FACTORS, K_FORMAT, V_FORMAT, LENGTHS, SCALE, POSITIONS = SCALE + 4 };
    enum { FIRST = POSITIONS + 1, MASK, SINKS, TABLE, K_GLOBAL, V_GLOBAL };
    const AttentionKernels* library = attention_kernels();
    Tensor q;
    Side k, v;
    if (!library || !call.tensor(Q, q) || !is_float(q.dtype)) return false;
    if (q.shape.dim != 4 || !q.data || q.stride[3] != 1) return false;
    if (!k.read(call, K, K_FACTORS, K_FORMAT, K_GLOBAL)) return false;
    if (!v.read(call, V, V_FACTORS, V_FORMAT, V_GLOBAL)) return false;
    const i64 *n = q.shape.size, *cache = k.codes.shape.size, batch = n[0], heads = cache[1];
    if (k.size != n[3] || n[1] % heads || memcmp(cache, v.codes.shape.size, 3 * sizeof(i64))) return false;

    Scratch scratch;
    Indices table, lengths, positions, first;
    i64 columns;
    if (!read_table(call, TABLE, batch, scratch, table, columns)) return false;
    if ((!table.data && cache[0] != batch) || cache[2] > MOST_ELEMENTS / columns) return false;
    if (!lengths.read(call, LENGTHS, Shape::vector(batch), scratch)) return false;
    if (!positions.read(call, POSITIONS, Shape(batch, n[2]), scratch)) return false;
    if (!first.read(call, FIRST, Shape::vector(batch), scratch)) return false;

    AttentionCall c{};
    c.q = (const u8*)q.data, c.q_dtype = q.dtype;
    c.q_batch = q.stride[0], c.q_head = q.stride[1], c.q_query = q.stride[2];
    c.batch = batch, c.heads = heads, c.groups = n[1] / heads, c.queries = n[2];
    c.k = stored(k), c.v = stored(v);
    c.table = table.data, c.table_stride = columns, c.page = table.data ? cache[2] : 0;
    c.pages = cache[0], c.capacity = cache[2] * columns;
    c.lengths = lengths.data, c.positions = positions.data, c.first = first.data;
    if (!read_numbers(call, SCALE, k, v, c)) return false;
    if (!read_mask(call, MASK, q.shape, c) || !read_sinks(call, SINKS, q.shape, scratch, c)) return false;
    u32 threads;
    check(torch.torch_get_num_threads(&threads));
    c.threads = threads, c.dots = -1;
    const i64 shape[4] = {batch, n[1], n[2], v.size};
    c.out = results.add(Shape(4, shape), q.dtype);
    return library->attention(&c) == 0;
}

bool cache_append(Arguments& call, Tensors&) {
    enum { K, V, POSITIONS, K_CODES, K_FACTORS, V_CODES, V_FACTORS, K_FORMAT, V_FORMAT, K_MEAN, TABLE };
    enum { K_GLOBAL = TABLE + 1, V_GLOBAL };
    const AttentionKernels* library = attention_kernels();
    Scratch scratch;
    NewRows k, v;
    if (!library || !k.read(call, K, K_CODES, K_FORMAT, K_GLOBAL, scratch)) return false;
    const i64 *n = k.given.shape.size, *cache = k.side.codes.shape.size;
    const bool has_values = call.has(V);
    if (has_values) {
        if (!v.read(call, V, V_CODES, V_FORMAT, V_GLOBAL, scratch)) return false;
        if (memcmp(n, v.given.shape.size, 3 * sizeof(i64))) return false;
        if (memcmp(cache, v.side.codes.shape.size, 3 * sizeof(i64))) return false;
    } else if (call.has(V_CODES) || call.has(V_FACTORS) || call.has(V_GLOBAL) ||
               !call.text(V_FORMAT).empty()) {
        return false;
    }
    Indices positions, table;
    i64 columns;
    if (!read_table(call, TABLE, n[0], scratch, table, columns)) return false;
    if (!table.data && cache[0] != n[0]) return false;
    if (!positions.read(call, POSITIONS, Shape(n[0], n[2]), scratch)) return false;
    if (!k.subtract(call, K_MEAN, scratch)) return false;
    AppendCall c{positions.data, table.data, columns, cache[2], cache[0], cache[2] * columns,
                 n[0],           n[1],       n[2],    0,        {}};
    if (!k.encode(c, scratch) || (has_values && !v.encode(c, scratch))) return false;
    for (i64 i = 0; i < c.count; i++)
        if (!c.rows[i].to) return false;
    return library->append(&c) == 0;
}

}  // namespace ops
