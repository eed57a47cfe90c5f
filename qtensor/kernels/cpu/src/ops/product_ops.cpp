// The ops gemm, weight_gemm, linear_forward and linear_backward.
//
// Python chooses who computes a product (products/choice.py). These ops compute the products of four of its
// backends: few rows, codes multiplied as integers, bfloat16 dot products, and both operands decoded to
// float32 and multiplied by torch's own mm, whose sums have the same order as in Python under every setting
// of torch.
#include <algorithm>

#include "steps.h"

namespace ops {

namespace {

// Up to this many products of elements, one thread computes them (integer_products.py, native.py).
constexpr i64 ONE_THREAD_PRODUCTS = 1 << 23;

// An operand of a product: a plain tensor, or a quantized one by its buffers.
struct Operand {
    const Description* d = nullptr;  // null: plain
    Shape shape;                     // logical
    Tensor plain;
    std::vector<Tensor> buffers;  // of which those from `first` on belong to the operand
    size_t first = 0;
    Addresses at;                 // of buffers that the op has made
    const float* values[2] = {};  // decoded by rows, by columns

    i64 dtype() const { return d ? d->slot[0].dtype : plain.dtype; }
    // Finds the addresses of the buffers that a direction reads.
    bool find(Direction direction) {
        return buffers.empty() || find_buffers(*d, buffers, first, shape, direction, at);
    }
    // Reads (buffers, quantizer, shape) from number `i` of a call's arguments on.
    bool read(Arguments& call, int i) {
        if (!call.tensors(i, buffers) || !call.shape(i + 2, shape) || buffers.empty()) return false;
        const std::string_view text = call.text(i + 1);
        if (!text.empty()) {
            d = quantizer_of(text);
            return d && buffers.size() == size_t(d->slots);
        }
        plain = buffers[0];
        return buffers.size() == 1 && is_float(plain.dtype) && plain.shape == shape;
    }
};

// a and b in a layout of the op gemm to y (m, n).
struct Product {
    Layout layout;
    i64 m, n, k, dtype;
    Tensor bias;  // a vector (n), or without a handle
    i32 choice = 0;

    // Returns false if the shapes do not fit each other, or if Python must compute the product.
    bool plan(const Operand& a, const Operand& b) {
        if (b.shape.dim != 2 || !serves(a.shape) || (layout == NT && a.shape.dim != 2)) return false;
        m = layout == NT ? a.shape.cols() : a.shape.rows();
        k = layout == NT ? a.shape.rows() : a.shape.cols();
        n = layout == TN ? b.shape.rows() : b.shape.cols();
        if ((layout == TN ? b.shape.cols() : b.shape.rows()) != k || n < 1 || !is_float(dtype)) return false;
        if (bias.handle && !(is_float(bias.dtype) && bias.is_vector(bias.dtype, n))) return false;
        choice = choose({a.d, b.d, a.shape.rows(), a.shape.cols(), b.shape.rows(), b.shape.cols(), a.dtype(),
                         b.dtype(), layout, dtype, bias.handle ? bias.dtype : OTHER_TYPE});
        return choice != 0;
    }
    bool is_small() const { return std::max(m * n, n * k) <= MOST; }
    i64 threads() const {
        u32 count = 1;
        if (m * n * k > ONE_THREAD_PRODUCTS) check(torch.torch_get_num_threads(&count));
        return count;
    }
    const float* bias_values(Scratch& scratch) const {
        if (!bias.handle) return nullptr;
        if (bias.dtype == FLOAT32) return (const float*)bias.data;
        float* values = scratch.floats(n);
        kernels.widen(bias.data, bias.dtype, n, values);
        return values;
    }
};

// ---- few rows

enum Reach { READABLE, ACROSS, NEITHER };  // ACROSS: the codes of a sum are not adjacent

// A weight (N, K) by rows along the contraction.
struct Weight {
    const Description* d = nullptr;
    Addresses at;
};

// Returns whether the codes of a buffer's lines lie across them.
bool lies_across(const Tensor& t) {
    const i64* size = t.shape.size;
    return t.shape.dim == 2 && size[0] != 1 && size[1] != 1 && t.stride[1] > std::max(t.stride[0], i64(1));
}

// The transpose of a matrix, as views of its buffers.
Reach transpose(const Operand& b, Weight& weight) {
    const Twin* twin = twin_of(*b.d);
    if (!twin || b.buffers.empty()) return NEITHER;
    weight.d = twin->d;
    std::vector<Tensor> views;
    bool is_across = false;
    for (i32 i = 0; i < weight.d->slots; i++) {
        Tensor t = b.buffers[b.first + size_t(twin->source[i])];
        if (twin->turned[i]) {
            if (t.shape.dim != 2) return NEITHER;
            std::swap(t.shape.size[0], t.shape.size[1]);
            std::swap(t.stride[0], t.stride[1]);
            if (twin->turned[i] == RESHAPED) {
                if (!t.contiguous) return NEITHER;
                t.stride[0] = t.shape.size[1], t.stride[1] = 1;
            }
            t.look_at_strides();
        }
        is_across |= is_read(*weight.d, BY_ROWS, weight.d->slot[i]) && lies_across(t);
        views.push_back(t);
    }
    const Shape turned(b.shape.size[1], b.shape.size[0]);
    if (find_buffers(*weight.d, views, 0, turned, BY_ROWS, weight.at))
        return weight.at.at[0] ? READABLE : ACROSS;
    return is_across ? ACROSS : NEITHER;
}

Reach weight_of(Operand& b, Layout layout, Weight& weight) {
    if (layout != TN) return transpose(b, weight);
    if (!b.find(BY_ROWS) || !b.at.at[0]) return NEITHER;
    weight = {b.d, b.at};
    return READABLE;
}

// Decodes a (rows, cols) without the factors of its lines, which follow the sums. Lines are rows, or columns
// where the direction is that of columnwise data.
bool decode_lines(Operand& a, Direction direction, i64 dtype, Scratch& scratch, LinearArguments& to) {
    if (!a.find(direction)) return false;
    Description local = *a.d;
    CQuantizer& q = local.quantizer;
    Addresses from = a.at;
    const bool columns = direction == BY_COLUMNS, stored = q.family == BLOCK && local.stores_global;
    const i64 m = a.shape.rows(), k = a.shape.cols(), lines = columns ? k : m;
    bool without_scale = false;
    float*& global = (float*&)from.at[stored ? 9 + columns : columns ? 6 : 2];
    if (q.family == TENSOR || q.family == (columns ? COLUMN : ROW)) {
        to.row_factors = from.scale_inv();
        to.row_factor_step = q.family != TENSOR;
        q.family = TENSOR;
        without_scale = true;
    } else if (q.family == BLOCK && global) {
        float* factors = scratch.floats(lines);
        for (i64 i = 0; i < (q.row_scaled ? lines : 1); i++) factors[i] = global[i] / q.global_divisor;
        to.row_factors = factors;
        to.row_factor_step = q.row_scaled;
        q.row_scaled = 0;
        global = &q.global_divisor;
    }
    void* values = scratch.get(m * k * BYTES[dtype]);
    to.x = values, to.x_dtype = dtype, to.stride = k;
    return decode(local, from, direction, m, k, values, dtype, without_scale);
}

bool multiply_few_rows(const Product& p, Operand& a, const Weight& weight, void* y) {
    Scratch scratch;
    LinearArguments l{};
    if (a.d) {
        if (!decode_lines(a, BY_ROWS, FLOAT32, scratch, l)) return false;
    } else {
        Rows x;
        if (!x.read(a.plain, scratch)) return false;
        l.x = x.data, l.x_dtype = x.dtype, l.stride = x.stride;
    }
    u32 threads = 1;
    if (p.n * p.k > MOST) check(torch.torch_get_num_threads(&threads));
    const void* const* at = weight.at.at;
    l.quantizer = &weight.d->quantizer;
    l.m = p.m, l.k = p.k, l.n = p.n, l.threads = threads;
    l.weight = {(u8*)at[0], (void*)at[1], (float*)at[weight.d->stores_global ? 9 : 2]};
    l.scale_inv = weight.at.scale_inv();
    l.bias = p.bias_values(scratch);
    l.y = y, l.dtype = p.dtype, l.few = 1;
    return kernels.linear(&l) == 0;
}

// ---- integers

// An operand whose buffers are those of a whole tensor, as lines along the contraction.
bool read_lines(Operand& o, Direction direction, Scratch& scratch, LinesOfCodes& lines) {
    if (!o.find(direction)) return false;
    const bool columns = o.d->columnwise[direction];
    const i64 count = direction == BY_COLUMNS ? o.shape.cols() : o.shape.rows();
    for (i32 i = 0; i < o.d->slots; i++) {
        const Slot& slot = o.d->slot[i];
        const bool is_data = slot.position == (columns ? 4 : 0),
                   is_scale = slot.position == (columns ? 5 : 1);
        if (!is_data && !is_scale) continue;
        // Lines lie across the last dim if it is theirs.
        const BufferShape whole(slot, o.shape);
        const i64 last = whole.shape.cols();
        const bool across = direction == BY_COLUMNS && slot.dim[slot.dims - 1].axis == COLS;
        i64& line = is_data ? lines.line_stride : lines.scale_line_stride;
        i64& along = is_data ? lines.byte_stride : lines.scale_block_stride;
        line = across ? 1 : last, along = across ? last : 1;
        // Tiles are those of lines and blocks in both directions; four blocks a tile.
        if (is_scale && o.d->quantizer.swizzled)
            lines.tiles = (across ? whole.shape.size[whole.shape.dim - 2] : last) / 4;
        (is_data ? lines.codes : lines.scales) = (const u8*)o.at.at[slot.position];
    }
    const float* global = (const float*)o.at.at[o.d->stores_global ? 9 + columns : columns ? 6 : 2];
    if (!global) return true;
    const i64 factors = o.d->quantizer.row_scaled ? count : 1;
    float* divided = scratch.floats(factors);
    for (i64 i = 0; i < factors; i++) divided[i] = global[i] / o.d->quantizer.global_divisor;
    lines.factors = divided, lines.factor_step = o.d->quantizer.row_scaled;
    return true;
}

bool multiply_integers(const Product& p, Operand& a, Operand& b, void* y, Scratch& scratch) {
    IntegerArguments call{};
    if (!read_lines(a, p.layout == NT ? BY_COLUMNS : BY_ROWS, scratch, call.a)) return false;
    if (!read_lines(b, p.layout == TN ? BY_ROWS : BY_COLUMNS, scratch, call.b)) return false;
    call.a_quantizer = &a.d->quantizer, call.b_quantizer = &b.d->quantizer;
    call.m = p.m, call.k = p.k, call.n = p.n, call.threads = p.threads();
    call.bias = p.bias_values(scratch);
    call.y = y, call.dtype = p.dtype;
    return kernels.integer_products(&call) == 0;
}

// ---- dot products

// Reads the left operand as bfloat16 rows along the contraction.
bool read_bfloat16(Operand& a, Layout layout, Scratch& scratch, LinearArguments& to) {
    if (a.d) {
        const Direction direction = layout == NT ? BY_COLUMNS : BY_ROWS;
        if (!decode_lines(a, direction, BFLOAT16, scratch, to)) return false;
        if (!has_normal_factors(*a.d, direction, a.shape, a.at)) return false;
    } else {
        Rows x;
        if (!x.read(a.plain, scratch)) return false;
        to.x = x.data, to.x_dtype = x.dtype, to.stride = x.stride;
    }
    if (to.x_dtype != BFLOAT16) return false;
    if (layout != NT) return true;
    const i64 k = a.shape.rows(), m = a.shape.cols();
    u16* turned = (u16*)scratch.get(k * m * i64(sizeof(u16)));
    for (i64 row = 0; row < m; row += 32)
        for (i64 i = 0; i < k; i++)
            for (i64 j = row; j < std::min(row + 32, m); j++)
                turned[j * k + i] = ((const u16*)to.x)[i * to.stride + j];
    to.x = turned, to.stride = k;
    return true;
}

bool multiply_dots(const Product& p, Operand& a, Operand& b, void* y) {
    Scratch scratch;
    LinearArguments l{};
    Weight weight;
    if (!read_bfloat16(a, p.layout, scratch, l)) return false;
    const bool both = a.d && b.d;
    const Direction own = !both ? OWN : p.layout == TN ? BY_ROWS : BY_COLUMNS;
    // Lines along the contraction hold the value only if they are the data that this product reads.
    const bool has_lines = p.layout == TN || b.d->columnwise[own] || b.d->quantizer.family != BLOCK;
    if (has_lines && weight_of(b, p.layout, weight) == READABLE) {
        const Shape turned(p.n, p.k);
        if (!has_normal_factors(*weight.d, BY_ROWS, turned, weight.at)) return false;
        l.quantizer = &weight.d->quantizer;
        const void* const* at = weight.at.at;
        l.weight = {(u8*)at[0], (void*)at[1], (float*)at[weight.d->stores_global ? 9 : 2]};
        l.scale_inv = weight.at.scale_inv();
    } else {
        if (p.layout == TN || !b.find(own) || !has_normal_factors(*b.d, own, b.shape, b.at)) return false;
        const bool columns = b.d->columnwise[own];
        void* const* at = b.at.at;
        l.weight = {(u8*)at[4 * columns], at[4 * columns + 1],
                    (float*)at[b.d->stores_global ? 9 + columns : 4 * columns + 2]};
        l.quantizer = &b.d->quantizer, l.scale_inv = b.at.scale_inv();
        l.across = columns ? COLUMNWISE : ROWWISE;
    }
    l.m = p.m, l.k = p.k, l.n = p.n, l.threads = p.threads();
    l.bias = p.bias_values(scratch);
    l.y = y, l.dtype = p.dtype;
    return kernels.linear(&l) == 0;
}

// ---- decoded operands

// The float32 values of an operand; `factor` is one that they lack.
bool read_values(Operand& o, Direction direction, Scratch& scratch, const float*& factor) {
    if (!o.d) {
        const Tensor& t = o.plain;
        // mm chooses its routine by strides, also by those of a dim of size 1.
        i64 step = 1;
        for (i64 i = t.shape.dim; i-- > 0; step *= t.shape.size[i])
            if (t.stride[i] != step) return false;
        if (t.dtype == FLOAT32) {
            o.values[0] = (const float*)t.data;
        } else {
            float* values = scratch.floats(step);
            kernels.widen(t.data, t.dtype, step, values);
            o.values[0] = values;
        }
        return true;
    }
    if (!o.find(direction)) return false;
    if (o.d->per_tensor) factor = o.at.scale_inv();
    const float*& known = o.values[o.d->columnwise[direction]];
    if (known) return true;
    float* values = scratch.floats(o.shape.elements());
    known = values;
    return decode(*o.d, o.at, direction, o.shape.rows(), o.shape.cols(), values, FLOAT32, o.d->per_tensor);
}

bool multiply_decoded(const Product& p, Operand& a, Operand& b, Handle out, void* y, Scratch& scratch) {
    const bool both = a.d && b.d;
    const Direction left = !both ? OWN : p.layout == NT ? BY_COLUMNS : BY_ROWS;
    const Direction right = !both ? OWN : p.layout == TN ? BY_ROWS : BY_COLUMNS;
    FinishCall f{};
    if (!p.is_small()) return false;
    if (!read_values(a, left, scratch, f.a) || !read_values(b, right, scratch, f.b)) return false;
    Tensors views;
    views.add_view(a.values[a.d ? a.d->columnwise[left] : 0], p.m, p.k, p.layout == NT);
    const Handle left_view = views.last();
    views.add_view(b.values[b.d ? b.d->columnwise[right] : 0], p.k, p.n, p.layout == TN);
    const Handle right_view = views.last();
    f.bias = p.bias_values(scratch);
    f.x = (const float*)y;
    if (p.dtype != FLOAT32 || !out) {
        f.x = scratch.floats(p.m * p.n);
        views.add_view(f.x, p.m, p.n, false);
        out = views.last();
    }
    check(torch.aoti_torch_cpu_mm_out(out, left_view, right_view));
    if (f.x == y && !f.a && !f.b && !f.bias) return true;
    f.rows = p.m, f.cols = p.n, f.y = y, f.dtype = p.dtype;
    kernels.finish(&f);
    return true;
}

// Computes a product that is planned. `out` is the result if it is a matrix, else null.
bool multiply(const Product& p, Operand& a, Operand& b, Handle out, void* y, Scratch& scratch) {
    if (p.choice & INTEGER) return multiply_integers(p, a, b, y, scratch);
    if (p.choice & FEW_ROWS) {
        Weight weight;
        const Reach reach = weight_of(b, p.layout, weight);
        if (reach == READABLE) return multiply_few_rows(p, a, weight, y);
        if (reach == NEITHER) return false;
    }
    if (p.choice & DOTS) return multiply_dots(p, a, b, y);
    return p.choice & DECODE && multiply_decoded(p, a, b, out, y, scratch);
}

// Adds the result of a product, of any number of rows' dims, and computes it.
bool add_product(Product& p, Operand& a, Operand& b, Tensors& results) {
    if (!p.plan(a, b)) return false;
    Shape shape = p.layout == NT ? Shape(p.m, p.n) : a.shape;
    shape.size[shape.dim - 1] = p.n;
    Scratch scratch;
    void* y = results.add(shape, p.dtype);
    return multiply(p, a, b, shape.dim == 2 ? results.last() : nullptr, y, scratch);
}

bool optional_tensor(Arguments& call, int i, Tensor& t) { return !call.has(i) || call.tensor(i, t); }
const Tensor* present(const Tensor& t) { return t.handle ? &t : nullptr; }

}  // namespace

bool gemm(Arguments& call, Tensors& results) {
    if (call.text(9) != "auto" || call.flag(10)) return false;  // the caller has chosen who computes
    const std::string_view layout = call.text(6);
    Product p{};
    p.layout = layout == "TN" ? TN : layout == "NN" ? NN : NT;
    p.dtype = call.dtype(7);
    if (p.layout == NT && layout != "NT") return false;
    Operand a, b;
    if (!a.read(call, 0) || !b.read(call, 3) || (!a.d && !b.d)) return false;
    return optional_tensor(call, 8, p.bias) && add_product(p, a, b, results);
}

bool weight_gemm(Arguments& call, Tensors& results) {
    Operand x, weight;
    Product p{};
    const i64 n = call.word(3);
    if (!call.tensor(0, x.plain) || x.plain.shape.dim == 0 || !is_float(x.plain.dtype)) return false;
    weight.d = quantizer_of(call.text(2));
    if (!weight.d || !call.tensors(1, weight.buffers) || n < 1 || n > MOST_ELEMENTS) return false;
    if (weight.buffers.size() != size_t(weight.d->slots)) return false;
    x.shape = x.plain.shape;
    weight.shape = Shape(n, x.shape.cols());
    p.layout = TN;
    p.dtype = x.plain.dtype;
    return optional_tensor(call, 4, p.bias) && add_product(p, x, weight, results);
}

bool linear_forward(Arguments& call, Tensors& results) {
    const ForwardPlan* plan = forward_plan_of(call.text(3));
    Tensor scales, inputs[2], seeds[2];
    Product p{};
    p.layout = TN;
    if (!plan || !call.tensor(0, inputs[0]) || !call.tensor(1, inputs[1])) return false;
    if (!optional_tensor(call, 2, p.bias) || !optional_tensor(call, 4, scales)) return false;
    if (!optional_tensor(call, 5, seeds[0]) || !optional_tensor(call, 6, seeds[1])) return false;
    if (scales.handle && scales.shape.dim != 1) return false;
    p.dtype = plan->dtype;
    const PlannedOperand* planned[2] = {&plan->x, &plan->weight};
    Scratch scratch;
    Rows rows[2];
    QuantizeOptions options[2];
    Operand operands[2];
    for (int i = 0; i < 2; i++) {
        if (inputs[i].shape.dim != 2 || !rows[i].read(inputs[i], scratch)) return false;
        if (!options[i].read(*planned[i]->all, present(scales), i, present(seeds[i]))) return false;
        operands[i].d = planned[i]->part;
        operands[i].shape = rows[i].shape;
    }
    if (!p.plan(operands[0], operands[1])) return false;
    void* y = results.add(Shape(p.m, p.n), p.dtype);
    const Handle out = results.last();
    for (int i = 0; i < 2; i++)
        if (planned[i]->kept) allocate(*planned[i]->kept, rows[i].shape, results, operands[i].at);
    for (int i = 0; i < 2; i++) {
        if (planned[i]->all->returns_amax) options[i].amax = (float*)results.add(Shape::vector(1), FLOAT32);
        complete(*planned[i]->all, rows[i].shape, scratch, operands[i].at);
        if (!quantize_rows(*planned[i]->all, rows[i], operands[i].at, options[i])) return false;
    }
    return multiply(p, operands[0], operands[1], out, y, scratch);
}

bool linear_backward(Arguments& call, Tensors& results) {
    const BackwardPlan* plan = backward_plan_of(call.text(3));
    Tensor given, scales, seed;
    Operand dy, dy_columns, x, weight;
    const i64 columns = call.word(2);
    if (!plan || !call.tensor(0, given) || given.shape.dim != 2 || !call.tensors(1, x.buffers)) return false;
    if (columns < 1 || columns > MOST) return false;
    if (!optional_tensor(call, 4, scales) || !optional_tensor(call, 5, seed)) return false;
    if (scales.handle && scales.shape.dim != 1) return false;
    Scratch scratch;
    Rows rows;
    QuantizeOptions options;
    if (!rows.read(given, scratch) || !options.read(*plan->dy, present(scales), 2, present(seed)))
        return false;
    const i64 m = rows.shape.size[0], n = rows.shape.size[1];
    weight.buffers = x.buffers;
    weight.first = plan->x ? size_t(plan->x->slots) : 0;
    if (x.buffers.size() != weight.first + (plan->weight ? size_t(plan->weight->slots) : 0)) return false;
    x.d = plan->x, x.shape = Shape(m, columns);
    weight.d = plan->weight, weight.shape = Shape(n, columns);
    dy.d = plan->dy_rows, dy_columns.d = plan->dy_columns;
    dy.shape = dy_columns.shape = rows.shape;

    Product dgrad{}, wgrad{};
    dgrad.layout = NN, dgrad.dtype = plan->dtype;
    wgrad.layout = NT, wgrad.dtype = plan->weight_dtype;
    if (weight.d && !dgrad.plan(dy, weight)) return false;
    if (x.d && !wgrad.plan(dy_columns, x)) return false;
    void *dx = nullptr, *dw = nullptr;
    Handle dx_out = nullptr, dw_out = nullptr;
    if (weight.d) dx = results.add(Shape(m, columns), dgrad.dtype), dx_out = results.last();
    if (x.d) dw = results.add(Shape(n, columns), wgrad.dtype), dw_out = results.last();
    void* bias = plan->bias ? results.add(Shape::vector(n), rows.dtype) : nullptr;
    if (plan->dy->returns_amax) options.amax = (float*)results.add(Shape::vector(1), FLOAT32);
    complete(*plan->dy, rows.shape, scratch, dy.at);
    dy_columns.at = dy.at;
    if (!quantize_rows(*plan->dy, rows, dy.at, options)) return false;
    if (weight.d && !multiply(dgrad, dy, weight, dx_out, dx, scratch)) return false;
    // Where both directions hold the same codes, their values are decoded once.
    if (dy.d == dy_columns.d) std::copy(dy.values, dy.values + 2, dy_columns.values);
    if (x.d && !multiply(wgrad, dy_columns, x, dw_out, dw, scratch)) return false;
    if (!bias) return true;
    NormCall sum{};
    sum.x = rows.data, sum.rows = m, sum.cols = n, sum.stride = rows.stride, sum.y = bias, sum.threads = 1;
    return kernels.sum_rows(&sum, rows.dtype) == 0;
}

}  // namespace ops
