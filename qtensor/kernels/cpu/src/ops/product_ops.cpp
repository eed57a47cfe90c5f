// The ops gemm, grouped_gemm, weight_gemm, linear_forward and linear_backward.
#include "products.h"

namespace ops {

namespace {

// Adds the result of a product, of any number of rows' dims, and computes it.
bool add_product(Product& p, Operand& a, Operand& b, Tensors& results) {
    if (!p.plan(a, b)) return false;
    Shape shape = p.layout == NT ? Shape(p.m, p.n) : a.shape;
    shape.size[shape.dim - 1] = p.n;
    Scratch scratch;
    void* y = results.add(shape, p.dtype);
    return multiply(p, a, b, shape.dim == 2 ? results.last() : nullptr, y, scratch);
}

// The products of the matrices of two stacks.
bool add_products(Product& p, Operand& a, Operand& b, Tensors& results) {
    Stack lefts, rights;
    if (p.layout != TN || p.bias.handle) return false;
    if (!lefts.read(a) || !rights.read(b) || lefts.count() != rights.count()) return false;
    Batch batch;
    if (!p.plan(lefts.matrix(0, batch.scratch), rights.matrix(0, batch.scratch))) return false;
    // Python decodes whole stacks.
    p.choice &= ~BY_DECODING;
    const i64 sizes[3] = {lefts.count(), p.m, p.n};
    u8* y = (u8*)results.add(Shape(3, sizes), p.dtype);
    for (i64 i = 0; i < lefts.count(); i++, y += p.m * p.n * BYTES[p.dtype]) {
        Scratch scratch;
        Operand &left = lefts.matrix(i, batch.scratch), &right = rights.matrix(i, batch.scratch);
        if (!multiply(p, left, right, nullptr, y, scratch, &batch)) return false;
    }
    return batch.run();
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
    if (!optional_tensor(call, 8, p.bias)) return false;
    return b.shape.dim == 3 ? add_products(p, a, b, results) : add_product(p, a, b, results);
}

bool grouped_gemm(Arguments& call, Tensors& results) {
    Operand a, b;
    Product p{};
    p.layout = TN, p.dtype = call.dtype(10);
    if (call.text(9) != "TN" || call.has(11) || !is_float(p.dtype)) return false;
    if (!a.read(call, 0) || a.d || a.shape.dim != 2 || !serves(a)) return false;
    b.d = quantizer_of(call.text(4));
    if (!b.d || !call.tensors(3, b.buffers) || !call.shape(5, b.shape)) return false;
    const i64 groups = call.word(8), slots = b.d->slots;
    const bool is_stack = b.shape.dim == 3;
    Stack matrices;
    if (is_stack ? i64(b.buffers.size()) != slots || b.shape.size[0] != groups || !matrices.read(b)
                 : i64(b.buffers.size()) != slots * groups || b.shape.dim != 2)
        return false;
    std::vector<Value> sizes = call.numbers(6);
    Tensor splits;
    if (!optional_tensor(call, 7, splits)) return false;
    if (splits.handle) {
        if (!splits.is_vector(INT64, groups)) return false;
        sizes.assign((const Value*)splits.data, (const Value*)splits.data + groups);
    }
    i64 rows = 0;
    for (const Value size : sizes) {
        if (i64(size) < 0 || i64(size) > a.shape.size[0]) return false;
        rows += i64(size);
    }
    if (i64(sizes.size()) != groups || rows != a.shape.size[0]) return false;
    const i64 n = b.shape.size[b.shape.dim - 2];
    u8* y = (u8*)results.add(Shape(rows, n), p.dtype);
    Operand x;
    x.plain = a.plain;
    Batch batch;
    for (i64 i = 0; i < groups; i++) {
        if (!sizes[size_t(i)]) continue;
        x.shape = Shape(i64(sizes[size_t(i)]), a.shape.size[1]);
        x.plain.shape = x.shape;
        x.plain.look_at_strides();
        x.values[0] = x.values[1] = nullptr;
        b.first = size_t(i * slots), b.at = {};
        b.values[0] = b.values[1] = nullptr;
        Scratch scratch;
        Operand& weight = is_stack ? matrices.matrix(i, batch.scratch) : b;
        if (!p.plan(x, weight) || !multiply(p, x, weight, nullptr, y, scratch, &batch)) return false;
        x.plain.data = (const u8*)x.plain.data + x.shape.size[0] * x.plain.stride[0] * BYTES[x.plain.dtype];
        y += x.shape.size[0] * n * BYTES[p.dtype];
    }
    return batch.run();
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
    p.layout = call.text(5) == "NN" ? NN : TN;
    weight.shape = p.layout == TN ? Shape(n, x.shape.cols()) : Shape(x.shape.cols(), n);
    if (p.layout == TN && call.text(5) != "TN") return false;
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
