// What Python tells the ops: quantizers, plans of linear layers and choices of products. C++ does not parse
// texts and does not know which buffers a format has. descriptions.py has the same structs.
#pragma once
#include <string_view>

#include "../attention/calls.h"
#include "torch_abi.h"

namespace ops {

enum Axis { LEAD = 0, ROWS = 1, COLS = 2, ONE = 3 };
struct Dim {  // Dim of core/formats.py
    i32 axis, per, units, pad;
};
constexpr int MAX_SLOTS = 10, MAX_SLOT_DIMS = 4;
struct Slot {
    i32 position, dtype, dims;
    Dim dim[MAX_SLOT_DIMS];
};

// Positions of buffers (buffers.py): data, scales and amax of the rowwise direction at 0, 1 and 2, those of
// the columnwise direction at 4, 5 and 6; scales that both share; stored factors of the tensor at 9 and 10.
constexpr int SHARED = 8, POSITIONS = 11;
enum Direction { OWN = 0, BY_ROWS = 1, BY_COLUMNS = 2 };

// A quantizer.
struct Description {
    CQuantizer quantizer;
    i32 slots;
    i32 needs_scale, returns_amax, stochastic, per_tensor, stores_global;
    i32 columnwise[3];    // by Direction: whether the columnwise buffers are read
    i32 rows_of_factors;  // position of factors with a line for each row and lines of padding behind, or -1
    Slot slot[MAX_SLOTS];
    const char* text;  // for Python
};

// The transpose of a matrix is one of another quantizer, whose slot i views the buffer of slot source[i], as
// turned[i] says.
enum Turned { AS_IT_IS = 0, TRANSPOSED = 1, RESHAPED = 2 };
struct Twin {
    const Description* d;
    i32 source[MAX_SLOTS], turned[MAX_SLOTS];
};

// The text of linear_forward. `part`: the buffers that the product reads; `kept`: those that are results, or
// null.
struct PlannedOperand {
    const Description *all, *part, *kept;
};
struct ForwardPlan {
    PlannedOperand x, weight;
    i64 dtype;
};
// The text of linear_backward.
struct BackwardPlan {
    const Description *dy, *dy_rows, *dy_columns;
    const Description *x, *weight;  // the kept buffers, or null
    i64 dtype, weight_dtype, bias;
};

// How a cache stores rows (core/row_format.py). dtypes are TensorTypes; a group of `codes` takes `bytes`
// entries.
struct RowFormat {
    const Description* quantizer;  // null for plain rows
    i64 dtype, factor_dtype, codes, bytes;
    i64 element, packed, block, factor_id;  // as StoredRows has them
    double divisor;  // the value of the whole cache, divided by this, decodes; 0 if there is none
};

enum Layout { TN = 0, NN = 1, NT = 2 };
// All that the choice of a product's kernel depends on. A plain operand has no quantizer.
struct Problem {
    const Description *a, *b;
    i64 a_rows, a_cols, b_rows, b_cols;
    i64 a_dtype, b_dtype, layout, dtype, bias_dtype;  // bias_dtype: OTHER_TYPE without a bias of (N,)
    bool operator==(const Problem& o) const { return memcmp(this, &o, sizeof o) == 0; }
};
// Bits of a choice; none: Python computes the product.
enum Choice { BY_FEW_ROWS = 1, BY_DECODING = 2, BY_INTEGERS = 4, BY_DOTS = 8, BY_TILES = 16 };

// Return what Python describes, or null if it describes no such text. The result is never freed.
const Description* quantizer_of(std::string_view text);
const Twin* twin_of(const Description& d);
const ForwardPlan* forward_plan_of(std::string_view text);
const BackwardPlan* backward_plan_of(std::string_view text);
const RowFormat* row_format_of(std::string_view text);
i32 choose(const Problem& problem);
bool in_backward();
bool may_run_again();  // a checkpoint may compute the current call again, or is doing so

// The kernels (c_interface.cpp, finish.cpp), in the order of native_ops.py.
struct Kernels {
    int (*quantize)(const QuantizeArguments*);
    int (*dequantize)(const DequantizeArguments*);
    int (*linear)(const LinearArguments*);
    int (*linear_all)(const LinearArguments*, i64 count, i64 threads);
    int (*integer_products)(const IntegerArguments*);
    int (*sum_rows)(const NormCall*, i64 dtype);
    void (*finish)(const FinishCall*);
    void (*widen)(const void* x, i64 dtype, i64 n, float* y);
};
extern Kernels kernels;

// The library of attention, or null if there is none.
struct AttentionKernels {
    int (*attention)(const AttentionCall*);
    int (*append)(const AppendCall*);
};
const AttentionKernels* attention_kernels();

// ---- sizes of buffers

inline i64 entries(const Dim& d, i64 rows, i64 cols) {
    const i64 n = d.axis == ROWS ? rows : d.axis == COLS ? cols : 1;
    const i64 count = (n + d.per - 1) / d.per * d.units;
    return (count + d.pad - 1) / d.pad * d.pad;
}
inline bool has_padding(const Dim& d, i64 rows, i64 cols) {
    const i64 n = d.axis == ROWS ? rows : d.axis == COLS ? cols : 0;
    return n % d.per || n / d.per * d.units % d.pad;
}
struct BufferShape {
    Shape shape;
    bool padded = false;
    // Of a tensor whose logical shape has at most MAX_DIM - 1 dims.
    BufferShape(const Slot& slot, const Shape& logical) {
        const i64 rows = logical.rows(), cols = logical.cols();
        for (i32 i = 0; i < slot.dims; i++) {
            const Dim& d = slot.dim[i];
            if (d.axis == LEAD) {
                for (i64 k = 0; k + 1 < logical.dim; k++) shape.size[shape.dim++] = logical.size[k];
            } else {
                shape.size[shape.dim++] = entries(d, rows, cols);
                padded |= has_padding(d, rows, cols);
            }
        }
    }
};

}  // namespace ops
