// The ops quantize, quantize_, dequantize and dequantize_, and the steps that they share with products.
#include <new>

#include "steps.h"

namespace ops {

// ---- buffers

// Gives the buffers that have no address yet memory of `make(shape, dtype)`. Padding is zero.
template <class Make>
static void place(const Description& d, const Shape& shape, Addresses& addresses, Make make) {
    for (i32 i = 0; i < d.slots; i++) {
        const Slot& slot = d.slot[i];
        void*& at = addresses.at[slot.position];
        if (at) continue;
        const BufferShape buffer(slot, shape);
        at = make(buffer.shape, slot.dtype);
        if (buffer.padded) memset(at, 0, size_t(buffer.shape.elements() * BYTES[slot.dtype]));
    }
}

void allocate(const Description& d, const Shape& shape, Tensors& results, Addresses& addresses) {
    place(d, shape, addresses, [&](const Shape& size, i64 dtype) { return results.add(size, dtype); });
}

void complete(const Description& d, const Shape& shape, Scratch& scratch, Addresses& addresses) {
    place(d, shape, addresses,
          [&](const Shape& size, i64 dtype) { return scratch.get(size.elements() * BYTES[dtype]); });
}

// Returns whether a buffer has the shape of a slot's. A slice of rows may lack the padding behind the factors
// of its last row.
static bool fits(const Description& d, const Slot& slot, const Tensor& t, const Shape& shape) {
    const Shape whole = BufferShape(slot, shape).shape;
    if (t.dtype != slot.dtype) return false;
    if (t.shape == whole) return true;
    const i64 *have = t.shape.size, *want = whole.size;
    return slot.position == d.rows_of_factors && t.shape.dim == 2 && have[1] == want[1] &&
           have[0] >= shape.rows() && have[0] < want[0];
}

bool find_buffers(const Description& d, const std::vector<Tensor>& buffers, size_t first, const Shape& shape,
                  Direction direction, Addresses& addresses) {
    if (buffers.size() < first + size_t(d.slots)) return false;
    for (i32 i = 0; i < d.slots; i++) {
        const Slot& slot = d.slot[i];
        const Tensor& t = buffers[first + size_t(i)];
        if (!fits(d, slot, t, shape)) return false;
        if (!is_read(d, direction, slot)) continue;
        if (!t.contiguous) return false;
        addresses.at[slot.position] = const_cast<void*>(t.data);
    }
    return true;
}

// ---- factors

static const Slot* find_slot(const Description& d, i32 position) {
    const Slot* end = d.slot + d.slots;
    const Slot* slot = std::find_if(d.slot, end, [=](auto& s) { return s.position == position; });
    return slot == end ? nullptr : slot;
}

// The codes that share an entry of the factors (rows, cols) of a matrix.
class CodesOfFactors {
    const u8* codes_;
    const Slot &factors_, *slot_;
    const i64 size_[3];  // of the matrix by Axis; leading dims count as rows
    i64 line_ = 0;       // bytes of a line of the buffer; 0: they lie in another order
    static i32 axis_of(const Dim& dim) { return dim.axis == LEAD ? ROWS : dim.axis; }

public:
    CodesOfFactors(const Description& d, const Slot& factors, const Shape& shape, const Addresses& from)
        : codes_((const u8*)from.at[factors.position - 1]),
          factors_(factors),
          slot_(find_slot(d, factors.position - 1)),
          size_{1, shape.rows(), shape.cols()} {
        if (!slot_ || !codes_ || BYTES[slot_->dtype] != 1) return;
        const Shape whole = BufferShape(*slot_, shape).shape;
        if (slot_->dims == 2) line_ = whole.size[whole.dim - 1];
    }
    bool are_zeros(i64 i, i64 j) const {
        if (!line_) return false;
        i64 first[3] = {}, end[3] = {};
        for (int dim = 0; dim < 2; dim++) {
            const i32 axis = axis_of(factors_.dim[dim]);
            first[axis] = (dim ? j : i) * factors_.dim[dim].per;
            end[axis] = std::min(first[axis] + factors_.dim[dim].per, size_[axis]);
        }
        const Dim &outer = slot_->dim[0], &inner = slot_->dim[1];
        const auto begin = [&](const Dim& dim) { return first[axis_of(dim)] / dim.per * dim.units; };
        const auto stop = [&](const Dim& dim) {
            return (end[axis_of(dim)] + dim.per - 1) / dim.per * dim.units;
        };
        u8 found = 0;
        for (i64 r = begin(outer); r < stop(outer) && !found; r++)
            for (i64 c = begin(inner); c < stop(inner); c++) found |= codes_[r * line_ + c];
        return !found;
    }
};

// Whether each factor of (rows, cols) is large enough, or stands for zeros.
template <class Factor, class Of>
static bool are_normal(const Shape& count, Factor least, const CodesOfFactors& codes, const Of& of) {
    for (i64 i = 0; i < count.size[0]; i++) {
        bool all = true;
        for (i64 j = 0; j < count.size[1]; j++) all &= of(i, j) >= least;
        for (i64 j = 0; !all && j < count.size[1]; j++)
            if (!(of(i, j) >= least) && !codes.are_zeros(i, j)) return false;
    }
    return true;
}
bool has_normal_values(const Description& d, Direction direction, const Shape& shape, const Addresses& from) {
    if (d.quantizer.family != BLOCK || d.quantizer.scale == SCALE_E4M3) return true;
    const i32 wanted = d.columnwise[direction] ? 5 : 1;
    const Slot* slot = find_slot(d, wanted);
    if (!slot || slot->dims != 2) return false;
    Slot bare = *slot;
    for (Dim& dim : bare.dim) dim.pad = 1;
    const Shape whole = BufferShape(*slot, shape).shape, count = BufferShape(bare, shape).shape;
    const i64 row = whole.size[1];
    const CodesOfFactors codes(d, *slot, shape, from);
    if (d.quantizer.scale == SCALE_F32) {
        const float* factors = (const float*)from.at[wanted];
        return are_normal(count, 0x1p-103f, codes, [=](i64 i, i64 j) { return factors[i * row + j]; });
    }
    constexpr u8 LEAST = 24;
    const u8* factors = (const u8*)from.at[wanted];
    if (!d.quantizer.swizzled)
        return are_normal(count, LEAST, codes, [=](i64 i, i64 j) { return factors[i * row + j]; });
    bool all = true;  // padding too
    for (i64 i = 0; i < whole.elements(); i++) all &= factors[i] >= LEAST;
    if (all) return true;
    const bool lines_first = slot->dim[0].per == 1;
    const i64 tiles = whole.size[lines_first] / 4;
    return are_normal(count, LEAST, codes, [=](i64 i, i64 j) {
        const i64 line = lines_first ? i : j, block = lines_first ? j : i;
        return factors[(line / 128 * tiles + block / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 +
                       block % 4];
    });
}

// ---- quantize

// Copies a tensor of any strides to contiguous memory.
template <class Element>
static void pack(const Tensor& t, Element* to) {
    const i64 cols = t.shape.cols(), lines = t.shape.elements() / cols, outer = t.shape.dim - 1;
    const i64 step = t.stride[outer];
    i64 index[MAX_DIM] = {};
    auto* from = (const Element*)t.data;
    for (i64 line = 0; line < lines; line++) {
        for (i64 k = 0; k < cols; k++) to[k] = from[k * step];
        to += cols;
        for (i64 d = outer; d-- > 0;) {  // to the next line
            from += t.stride[d];
            if (++index[d] < t.shape.size[d]) break;
            from -= index[d] * t.stride[d];
            index[d] = 0;
        }
    }
}

bool Rows::read(const Tensor& t, Scratch& scratch) {
    if (!is_float(t.dtype) || !serves(t.shape)) return false;
    data = t.data;
    dtype = t.dtype;
    shape = t.shape;
    stride = shape.cols();
    if (t.contiguous) return true;
    if (shape.dim == 2 && t.stride[1] == 1 && t.stride[0] >= stride) {
        stride = t.stride[0];
        return true;
    }
    void* packed = scratch.get(shape.elements() * BYTES[dtype]);
    if (BYTES[dtype] == 4)
        pack(t, (u32*)packed);
    else
        pack(t, (u16*)packed);
    data = packed;
    return true;
}

bool QuantizeOptions::read(const Description& d, const Tensor* scales, i64 role, const Tensor* seed_tensor) {
    if (seed_tensor && !seed_tensor->is_one(INT64)) return false;
    if (d.stochastic) {
        if (!seed_tensor) return false;
        seed = *(const i64*)seed_tensor->data;
    }
    if (!d.needs_scale) return true;
    if (!scales || !scales->is(FLOAT32) || scales->shape.elements() <= role) return false;
    scale = (const float*)scales->data + role;
    return true;
}

bool quantize_rows(const Description& d, const Rows& x, const Addresses& to, const QuantizeOptions& options) {
    QuantizeArguments a{};
    a.quantizer = &d.quantizer;
    a.x = x.data;
    a.dtype = x.dtype, a.rows = x.shape.rows(), a.cols = x.shape.cols(), a.stride = x.stride, a.threads = 1;
    a.row = {(u8*)to.at[0], to.at[1], (float*)to.at[2], options.given};
    a.column = {(u8*)to.at[4], to.at[5], (float*)to.at[6], nullptr};
    a.scale_inv = to.scale_inv();
    a.scale = options.scale, a.amax_out = options.amax, a.seed = options.seed;
    a.row_global = (float*)to.at[9], a.column_global = (float*)to.at[10];
    return kernels.quantize(&a) == 0;
}

// The arguments that quantize and quantize_ share; each is null where the call has none.
struct QuantizeInputs {
    Tensor x, scale, seed;
    const Description* d = nullptr;
    QuantizeOptions options;

    bool read(Arguments& call, int scale_at, int seed_at) {
        d = quantizer_of(call.text(1));
        if (!d || !call.tensor(0, x) || call.has(scale_at + 1)) return false;  // amax: maxima of the caller
        if (call.has(scale_at) && !(d->needs_scale && call.tensor(scale_at, scale) && scale.is_one(FLOAT32)))
            return false;
        if (call.has(seed_at) && !call.tensor(seed_at, seed)) return false;
        return options.read(*d, call.has(scale_at) ? &scale : nullptr, 0,
                            call.has(seed_at) ? &seed : nullptr);
    }
};

bool quantize(Arguments& call, Tensors& results) {
    QuantizeInputs q;
    Scratch scratch;
    Rows x;
    if (!q.read(call, 2, 4) || !x.read(q.x, scratch)) return false;
    Addresses addresses;
    allocate(*q.d, x.shape, results, addresses);
    if (q.d->returns_amax) q.options.amax = (float*)results.add(Shape::vector(1), FLOAT32);
    return quantize_rows(*q.d, x, addresses, q.options);
}

bool quantize_in_place(Arguments& call, Tensors&) {
    QuantizeInputs q;
    Scratch scratch;
    Rows x;
    std::vector<Tensor> out;
    if (call.has(6) || !q.read(call, 3, 5)) return false;  // 6: noop_flag
    if (!call.tensors(2, out) || !x.read(q.x, scratch)) return false;
    const auto slots = size_t(q.d->slots);
    const bool has_amax = out.size() > slots;
    if (out.size() < slots || out.size() > slots + size_t(q.d->returns_amax)) return false;
    if (has_amax && !out.back().is_one(FLOAT32)) return false;
    Addresses addresses;
    for (size_t i = 0; i < slots; i++) {
        const Slot& slot = q.d->slot[i];
        if (!out[i].is(slot.dtype) || !(out[i].shape == BufferShape(slot, x.shape).shape)) return false;
        if (!(addresses.at[slot.position] = out[i].writable())) return false;
    }
    if (has_amax && !(q.options.amax = (float*)out.back().writable())) return false;
    return quantize_rows(*q.d, x, addresses, q.options);
}

// ---- decode

DequantizeArguments decoding_of(const Description& d, const Addresses& from, Direction direction, i64 rows,
                                i64 cols, bool without_scale) {
    static const float one = 1.0f;
    const bool columnwise = d.columnwise[direction];
    DequantizeArguments a{};
    a.quantizer = &d.quantizer;
    a.rows = rows, a.cols = cols, a.count = rows, a.threads = 1;
    const int first = columnwise ? 4 : 0, global = columnwise ? 10 : 9;
    const DecodeBuffers read{(u8*)from.at[first], from.at[first + 1],
                             (float*)from.at[d.stores_global ? global : first + 2]};
    (columnwise ? a.column : a.row) = read;
    a.scale_inv = without_scale ? &one : from.scale_inv();
    return a;
}

bool decode(DequantizeArguments call, void* y, i64 dtype) {
    call.y = y, call.dtype = dtype;
    return kernels.dequantize(&call) == 0;
}

static const Description* find_coded(Arguments& call, Shape& shape, Addresses& addresses) {
    const Description* d = quantizer_of(call.text(1));
    std::vector<Tensor> buffers;
    if (!d || !call.shape(2, shape) || !serves(shape) || !call.tensors(0, buffers)) return nullptr;
    if (buffers.size() != size_t(d->slots)) return nullptr;
    return find_buffers(*d, buffers, 0, shape, OWN, addresses) ? d : nullptr;
}

bool dequantize(Arguments& call, Tensors& results) {
    Shape shape;
    Addresses addresses;
    const i64 dtype = call.dtype(3);
    const Description* d = is_float(dtype) ? find_coded(call, shape, addresses) : nullptr;
    if (!d) return false;
    return decode(decoding_of(*d, addresses, OWN, shape.rows(), shape.cols()), results.add(shape, dtype),
                  dtype);
}

bool dequantize_in_place(Arguments& call, Tensors&) {
    Shape shape;
    Addresses addresses;
    Tensor out;
    if (!call.tensor(3, out) || !is_float(out.dtype) || !out.contiguous) return false;
    const Description* d = find_coded(call, shape, addresses);
    if (!d || !(out.shape == shape)) return false;
    void* y = out.writable();
    return y && decode(decoding_of(*d, addresses, OWN, shape.rows(), shape.cols()), y, out.dtype);
}

}  // namespace ops
