// The steps that the ops consist of: memory for buffers, quantize, decode.
#pragma once
#include <list>
#include <memory>
#include <vector>

#include "../memory.h"
#include "description.h"

namespace ops {

constexpr i64 MAX_LOGICAL_DIM = 8;
// Most elements of a tensor that the ops quantize or decode. The kernels use one thread up to this size
// (native.py: ONE_THREAD); beyond it they compute for so long that the time of Python does not matter.
constexpr i64 MOST = 1 << 19;

// Memory until the end of the scope, at multiples of 64 bytes.
class Scratch {
    std::list<Array<u8>> pieces_;

public:
    void* get(i64 bytes) { return pieces_.emplace_back(bytes); }
    float* floats(i64 count) { return (float*)get(count * i64(sizeof(float))); }
};

// The addresses of a quantized tensor's buffers by position, null for absent ones.
struct Addresses {
    void* at[POSITIONS] = {};
    float* scale_inv() const { return (float*)at[SHARED]; }
};

// Returns whether the ops quantize or decode tensors of such a shape.
inline bool serves(const Shape& shape) {
    return shape.dim > 0 && shape.dim <= MAX_LOGICAL_DIM && shape.elements() > 0 && shape.elements() <= MOST;
}

// Adds the buffers of a tensor to `results`, in slot order. Padding is zero.
void allocate(const Description& d, const Shape& shape, Tensors& results, Addresses& addresses);
// Gives the buffers that have no address yet scratch memory.
void complete(const Description& d, const Shape& shape, Scratch& scratch, Addresses& addresses);

// Finds the addresses of the buffers that a direction reads, among tensors from number `first` on. Returns
// false if a kernel cannot read them: they are those of a part of a tensor, or do not fit the shape.
bool find_buffers(const Description& d, const std::vector<Tensor>& buffers, size_t first, const Shape& shape,
                  Direction direction, Addresses& addresses);
// Returns whether a direction reads the buffer of a slot.
inline bool is_read(const Description& d, Direction direction, const Slot& slot) {
    const i32 global = d.stores_global ? 9 + d.columnwise[direction] : -1, at = slot.position;
    return at == SHARED || at == global || (at < SHARED && (at >= 4) == d.columnwise[direction]);
}

// A tensor as the quantize kernels read it: rows of contiguous elements.
struct Rows {
    const void* data = nullptr;
    i64 dtype = OTHER_TYPE, stride = 0;
    Shape shape;
    // Returns false if the ops do not quantize such a tensor. Copies it to scratch memory where rows are not
    // contiguous.
    bool read(const Tensor& t, Scratch& scratch);
};

struct QuantizeOptions {
    const float* scale = nullptr;
    const float* given = nullptr;  // the maximum to use for rowwise data
    float* amax = nullptr;
    i64 seed = 0;
    // Reads arguments of an op, null where there are none: scales (of which number `role` counts) and a seed.
    // Returns false if they are not what the quantizer takes.
    bool read(const Description& d, const Tensor* scales, i64 role, const Tensor* seed_tensor);
};
bool quantize_rows(const Description& d, const Rows& x, const Addresses& to, const QuantizeOptions& options);

// The arguments that decode buffers of a tensor (rows, cols) in a direction, but for the memory of the
// result. `without_scale`: leaves out the factor that all elements share.
DequantizeArguments decoding_of(const Description& d, const Addresses& from, Direction direction, i64 rows,
                                i64 cols, bool without_scale = false);
// Decodes to contiguous memory.
bool decode(DequantizeArguments call, void* y, i64 dtype);

// Returns whether bfloat16 holds every value as zero or as a normal number (dot_products.py:
// has_normal_values).
bool has_normal_values(const Description& d, Direction direction, const Shape& shape, const Addresses& from);

// ---- the ops. Each reads its arguments and adds its results; it returns false, with nothing written that
// the caller sees, if Python must serve the call.
bool quantize(Arguments& call, Tensors& results);
bool quantize_in_place(Arguments& call, Tensors& results);
bool dequantize(Arguments& call, Tensors& results);
bool dequantize_in_place(Arguments& call, Tensors& results);
bool gemm(Arguments& call, Tensors& results);
bool grouped_gemm(Arguments& call, Tensors& results);
bool weight_gemm(Arguments& call, Tensors& results);
bool linear_forward(Arguments& call, Tensors& results);
bool linear_backward(Arguments& call, Tensors& results);
bool delayed_begin(Arguments& call, Tensors& results);
bool record_amax(Arguments& call, Tensors& results);
bool record_gradient_amax(Arguments& call, Tensors& results);
bool advance_step(Arguments& call, Tensors& results);
bool attention(Arguments& call, Tensors& results);
bool cache_append(Arguments& call, Tensors& results);

}  // namespace ops
