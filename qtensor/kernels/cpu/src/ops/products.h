// Operands and products, as the ops that multiply pass them.
#pragma once
#include <algorithm>

#include "steps.h"

namespace ops {

// Up to this many products of elements, and MOST elements of the right operand, one thread computes them
// (integer_products.py, native.py).
constexpr i64 ONE_THREAD_PRODUCTS = 1 << 21;

inline i64 all_threads() {
    u32 count;
    check(torch.torch_get_num_threads(&count));
    return count;
}

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

// Returns whether the ops multiply a left operand, which has no largest size.
inline bool serves(const Operand& a) {
    return a.shape.dim > 0 && a.shape.dim <= MAX_LOGICAL_DIM && a.shape.elements() > 0;
}

// a and b in a layout of the op gemm to y (m, n).
struct Product {
    Layout layout;
    i64 m, n, k, dtype;
    Tensor bias;  // a vector (n), or without a handle
    i32 choice = 0;

    // Returns false if the shapes do not fit each other, or if Python must compute the product.
    bool plan(const Operand& a, const Operand& b) {
        if (b.shape.dim != 2 || !serves(a) || (layout == NT && a.shape.dim != 2)) return false;
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
    i64 threads() const { return m * n * k > ONE_THREAD_PRODUCTS || n * k > MOST ? all_threads() : 1; }
    const float* bias_values(Scratch& scratch) const {
        if (!bias.handle) return nullptr;
        if (bias.dtype == FLOAT32) return (const float*)bias.data;
        float* values = scratch.floats(n);
        kernels.widen(bias.data, bias.dtype, n, values);
        return values;
    }
};

// Products of the matrices of a stack, which share the threads.
class Batch {
    std::vector<LinearArguments> calls_;

public:
    Scratch scratch;  // memory that the calls read
    void add(const LinearArguments& call) { calls_.push_back(call); }
    // Computes what was added, and returns whether there is a kernel for all of it.
    bool run() const;
};

// Computes a product that is planned, or adds a call to `batch`, if that is not null. `out` is the result if
// it is a matrix, else null.
bool multiply(const Product& p, Operand& a, Operand& b, Handle out, void* y, Scratch& scratch,
              Batch* batch = nullptr);

// The matrices of a stack (E, rows, cols), whose factors cover all of them.
class Stack {
    Operand matrix_;
    i64 count_ = 0, step_[POSITIONS] = {};  // bytes from a matrix to the next one
    Addresses at_;
    const u8* plain_ = nullptr;
    // Factors that lie beside those of other matrices, (lines, entries) of 4 bytes; those of one matrix are
    // copied.
    i64 lines_ = 0, entries_ = 0, own_ = 0, padded_ = 0;

public:
    // Returns false if the rowwise buffers of a matrix are no part of those of the stack.
    bool read(Operand& stack);
    i64 count() const { return count_; }
    Operand& matrix(i64 index, Scratch& scratch);
};

}  // namespace ops
