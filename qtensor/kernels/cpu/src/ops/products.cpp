// Computes products.
//
// Python chooses who computes a product (products/choice.py). Here are five of its backends: few rows, codes
// multiplied as integers, bfloat16 dot products and tiles, and both operands decoded to float32 and
// multiplied by torch's own mm, whose sums have the same order as in Python under every setting of torch.
#include "products.h"

namespace ops {

namespace {

// ---- few rows

enum Reach { READABLE, ACROSS, NEITHER };  // ACROSS: the codes of a sum are not adjacent

// A matrix as a kernel reads it, in one direction.
struct View {
    const Description* d = nullptr;
    Direction direction = BY_ROWS;
    Shape shape;
    Addresses at;

    bool columns() const { return d->columnwise[direction]; }
    void* data() const { return at.at[4 * columns()]; }
    DecodeBuffers buffers() const {
        const i32 c = columns();
        return {(u8*)data(), at.at[4 * c + 1], (float*)at.at[d->stores_global ? 9 + c : 4 * c + 2]};
    }
};

// Returns whether the codes of a buffer's lines lie across them.
bool lies_across(const Tensor& t) {
    const i64* size = t.shape.size;
    return t.shape.dim == 2 && size[0] != 1 && size[1] != 1 && t.stride[1] > std::max(t.stride[0], i64(1));
}

Reach reach_of(const std::vector<Tensor>& buffers, size_t first, View& view) {
    if (find_buffers(*view.d, buffers, first, view.shape, view.direction, view.at))
        return view.data() ? READABLE : ACROSS;
    for (i32 i = 0; i < view.d->slots && first + size_t(i) < buffers.size(); i++)
        if (is_read(*view.d, view.direction, view.d->slot[i]) && lies_across(buffers[first + size_t(i)]))
            return ACROSS;
    return NEITHER;
}
// The matrix itself.
Reach look(const Operand& b, Direction direction, View& view) {
    view = {b.d, direction, b.shape, b.at};
    if (!b.buffers.empty()) return reach_of(b.buffers, b.first, view);
    return view.data() ? READABLE : NEITHER;
}
// The transpose of a matrix, as views of its buffers.
Reach transpose(const Operand& b, Direction direction, View& view) {
    const Twin* twin = twin_of(*b.d);
    if (!twin || b.buffers.empty()) return NEITHER;
    view = {twin->d, direction, Shape(b.shape.size[1], b.shape.size[0]), {}};
    std::vector<Tensor> buffers;
    for (i32 i = 0; i < twin->d->slots; i++) {
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
        buffers.push_back(t);
    }
    return reach_of(buffers, 0, view);
}
// A weight (N, K) by rows along the contraction.
Reach lines_of(const Operand& b, Layout layout, View& view) {
    const Reach reach = layout == TN ? look(b, BY_ROWS, view) : transpose(b, BY_ROWS, view);
    return reach == READABLE && view.columns() ? ACROSS : reach;
}

// How a (rows, cols) is decoded without the factors of its lines, which follow the sums. Lines are rows, or
// columns where the direction is that of columnwise data. Returns null if the buffers cannot be read.
DequantizeArguments* read_lines(Operand& a, Direction direction, Scratch& scratch, LinearArguments& to) {
    if (!a.find(direction)) return nullptr;
    auto& q = *(CQuantizer*)scratch.get(sizeof(CQuantizer));
    q = a.d->quantizer;
    Addresses from = a.at;
    const bool columns = direction == BY_COLUMNS, stored = q.family == BLOCK && a.d->stores_global;
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
    auto& read = *(DequantizeArguments*)scratch.get(sizeof(DequantizeArguments));
    read = decoding_of(*a.d, from, direction, m, k, without_scale);
    read.quantizer = &q;
    return &read;
}

bool multiply_few_rows(const Product& p, Operand& a, const View& weight, void* y, Batch& batch) {
    Scratch& scratch = batch.scratch;
    LinearArguments l{};
    if (a.d) {
        const DequantizeArguments* quantized = read_lines(a, BY_ROWS, scratch, l);
        void* values = scratch.floats(p.m * p.k);
        if (!quantized || !decode(*quantized, values, FLOAT32)) return false;
        l.x = values, l.x_dtype = FLOAT32, l.stride = p.k;
    } else {
        Rows x;
        if (!x.read(a.plain, scratch)) return false;
        l.x = x.data, l.x_dtype = x.dtype, l.stride = x.stride;
    }
    l.quantizer = &weight.d->quantizer;
    l.m = p.m, l.k = p.k, l.n = p.n, l.threads = p.threads();
    l.weight = weight.buffers();
    l.scale_inv = weight.at.scale_inv();
    l.bias = p.bias_values(scratch);
    l.y = y, l.dtype = p.dtype, l.kernel = FEW_ROWS;
    batch.add(l);
    return true;
}

// ---- integers

// An operand whose buffers are those of a whole tensor, as lines along the contraction.
bool read_codes(Operand& o, Direction direction, Scratch& scratch, LinesOfCodes& lines) {
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
    if (!read_codes(a, p.layout == NT ? BY_COLUMNS : BY_ROWS, scratch, call.a)) return false;
    if (!read_codes(b, p.layout == TN ? BY_ROWS : BY_COLUMNS, scratch, call.b)) return false;
    call.a_quantizer = &a.d->quantizer, call.b_quantizer = &b.d->quantizer;
    call.m = p.m, call.k = p.k, call.n = p.n, call.threads = p.threads();
    call.bias = p.bias_values(scratch);
    call.y = y, call.dtype = p.dtype;
    return kernels.integer_products(&call) == 0;
}

// ---- dot products

// Reads a left operand that bfloat16 holds.
bool read_bfloat16(const Product& p, Operand& a, Scratch& scratch, LinearArguments& to) {
    to.turned = p.layout == NT;
    if (a.d) {
        const Direction direction = p.layout == NT ? BY_COLUMNS : BY_ROWS;
        to.quantized_x = read_lines(a, direction, scratch, to);
        to.x_dtype = BFLOAT16;
        return to.quantized_x && has_normal_values(*a.d, direction, a.shape, a.at);
    }
    Rows x;
    if (!x.read(a.plain, scratch)) return false;
    to.x = x.data, to.x_dtype = x.dtype, to.stride = x.stride;
    return to.x_dtype == BFLOAT16;
}

bool multiply_dots(const Product& p, Operand& a, Operand& b, void* y, Batch& batch) {
    Scratch& scratch = batch.scratch;
    LinearArguments l{};
    if (!read_bfloat16(p, a, scratch, l)) return false;
    const bool both = a.d && b.d;
    const Direction own = !both ? OWN : p.layout == TN ? BY_ROWS : BY_COLUMNS;
    const bool columns = b.d->columnwise[own];
    // The data that hold the value run along the contraction, or along rows across it. Codes that all
    // directions share are looked for in both.
    View view;
    const bool has_lines = columns == (p.layout != TN) || b.d->quantizer.family != BLOCK;
    if (!has_lines || lines_of(b, p.layout, view) != READABLE) {
        const Direction turned = columns ? BY_ROWS : BY_COLUMNS;
        const Reach reach = p.layout == TN ? transpose(b, turned, view) : look(b, own, view);
        if (reach != READABLE) return false;
        l.across = view.columns() ? COLUMNWISE : ROWWISE;
    }
    if (!has_normal_values(*view.d, view.direction, view.shape, view.at)) return false;
    l.quantizer = &view.d->quantizer, l.weight = view.buffers(), l.scale_inv = view.at.scale_inv();
    l.m = p.m, l.k = p.k, l.n = p.n, l.threads = p.threads();
    l.bias = p.bias_values(scratch);
    l.y = y, l.dtype = p.dtype, l.kernel = p.choice & BY_TILES ? TILES : DOTS;
    batch.add(l);
    return true;
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
    const i64 rows = o.shape.rows(), cols = o.shape.cols();
    return decode(decoding_of(*o.d, o.at, direction, rows, cols, o.d->per_tensor), values, FLOAT32);
}

bool multiply_decoded(const Product& p, Operand& a, Operand& b, Handle out, void* y, Scratch& scratch) {
    const bool both = a.d && b.d;
    const Direction left = !both ? OWN : p.layout == NT ? BY_COLUMNS : BY_ROWS;
    const Direction right = !both ? OWN : p.layout == TN ? BY_ROWS : BY_COLUMNS;
    FinishCall f{};
    if (!p.is_small() || (a.d && p.m * p.k > MOST)) return false;
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

}  // namespace

bool Batch::run() const {
    i64 most = 0, all = 0;
    for (const LinearArguments& l : calls_) {
        most = std::max(most, l.m * l.n * l.k);
        all += l.m * l.n * l.k;
    }
    const i64 threads = calls_.size() > 1 && all > ONE_THREAD_PRODUCTS ? all_threads() : 1;
    // Where one product is much of the work, all threads share each.
    if (threads > 1 && most * threads * 2 <= all * 3)
        return kernels.linear_all(calls_.data(), i64(calls_.size()), threads) == 0;
    for (const LinearArguments& l : calls_)
        if (kernels.linear(&l)) return false;
    return true;
}

bool multiply(const Product& p, Operand& a, Operand& b, Handle out, void* y, Scratch& scratch, Batch* batch) {
    if (!batch) {
        Batch single;
        return multiply(p, a, b, out, y, scratch, &single) && single.run();
    }
    if (p.choice & BY_INTEGERS) return multiply_integers(p, a, b, y, scratch);
    if (p.choice & BY_FEW_ROWS) {
        View weight;
        const Reach reach = lines_of(b, p.layout, weight);
        if (reach == READABLE) return multiply_few_rows(p, a, weight, y, *batch);
        if (reach == NEITHER) return false;
    }
    if (p.choice & (BY_DOTS | BY_TILES)) return multiply_dots(p, a, b, y, *batch);
    return p.choice & BY_DECODING && multiply_decoded(p, a, b, out, y, scratch);
}

// ---- stacks

// Returns the entries of a slot's buffer from a matrix to the next one, or -1 if they do not lie so.
static i64 entries_of_a_matrix(const Description& d, const Slot& slot, const Shape& stack) {
    const Dim& outer = slot.dim[0];
    const Shape whole = BufferShape(slot, stack).shape;
    if (outer.axis == ONE) return 0;
    if (outer.axis == LEAD) return whole.elements() / stack.size[0];
    const i64 rows = stack.size[1];
    if (outer.axis != ROWS || rows % outer.per || (d.quantizer.swizzled && outer.pad > 1 && rows % 128))
        return -1;
    return whole.elements() / whole.size[0] * (rows / outer.per * outer.units);
}

bool Stack::read(Operand& stack) {
    if (stack.shape.dim != 3) return false;
    count_ = stack.shape.size[0];
    matrix_.d = stack.d;
    matrix_.shape = Shape(stack.shape.size[1], stack.shape.size[2]);
    if (!stack.d) {
        Tensor& t = matrix_.plain = stack.plain;
        plain_ = (const u8*)t.data;
        step_[0] = t.stride[0] * BYTES[t.dtype];
        t.shape = matrix_.shape;
        t.stride[0] = t.stride[1], t.stride[1] = t.stride[2];
        t.look_at_strides();
        return true;
    }
    const Description& d = *stack.d;
    if (!find_buffers(d, stack.buffers, stack.first, stack.shape, BY_ROWS, at_)) return false;
    for (i32 i = 0; i < d.slots; i++) {
        const Slot& slot = d.slot[i];
        if (!is_read(d, BY_ROWS, slot)) continue;
        const i64 entries = entries_of_a_matrix(d, slot, stack.shape);
        if (entries >= 0) {
            step_[slot.position] = entries * BYTES[slot.dtype];
            continue;
        }
        const bool beside = slot.position == 1 && slot.dtype == FLOAT32 && slot.dims == 2 &&
                            slot.dim[0].axis == COLS && slot.dim[1].axis == ROWS && slot.dim[1].per == 1;
        if (!beside) return false;
        const Shape all = BufferShape(slot, stack.shape).shape;
        lines_ = all.size[0], entries_ = all.size[1], own_ = matrix_.shape.size[0];
        padded_ = BufferShape(slot, matrix_.shape).shape.size[1];
    }
    return true;
}

Operand& Stack::matrix(i64 index, Scratch& scratch) {
    if (!matrix_.d) matrix_.plain.data = plain_ + index * step_[0];
    for (int i = 0; i < POSITIONS; i++)
        matrix_.at.at[i] = at_.at[i] ? (u8*)at_.at[i] + index * step_[i] : nullptr;
    if (lines_) {
        float* own = scratch.floats(lines_ * padded_);
        const float* all = (const float*)at_.at[1] + index * own_;
        for (i64 i = 0; i < lines_; i++) {
            std::copy_n(all + i * entries_, own_, own + i * padded_);
            std::fill(own + i * padded_ + own_, own + (i + 1) * padded_, 0.0f);
        }
        matrix_.at.at[1] = own;
    }
    matrix_.values[0] = matrix_.values[1] = nullptr;
    return matrix_;
}

}  // namespace ops
