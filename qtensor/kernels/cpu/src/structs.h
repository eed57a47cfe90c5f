// The structs that Python passes to the kernels: a quantizer's fixed facts (CQuantizer) and one call on one
// tensor. structs.py mirrors them.
#pragma once
#include <cstdint>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using i32 = int32_t;
using i64 = int64_t;

enum Dtype { F32 = 0, BF16 = 1, F16 = 2 };
enum ElementId { E4M3 = 0, E5M2 = 1, E2M3 = 2, E3M2 = 3, E2M1 = 4 };
enum Family { TENSOR = 0, ROW = 1, COLUMN = 2, BLOCK = 3 };  // what shares a factor
enum ScaleId { SCALE_F32 = 0, SCALE_E8M0 = 1, SCALE_E4M3 = 2 };
enum E8M0Mode { RCEIL = 0, FLOOR = 1, CEIL = 2, EVEN = 3 };
enum LinearKernel { DOTS = 0, FEW_ROWS = 1, TILES = 2 };
enum Side { NO_SIDE = 0, ROWWISE = 1, COLUMNWISE = 2 };

// The facts of a quantizer.
struct CQuantizer {
    i32 abi;
    i32 family;
    i32 element;
    i32 codes, bytes;  // a packed group: 1 in 1, 2 in 1, 4 in 3
    i32 block;
    i32 square;  // block x block
    i32 scale;
    i32 mode;        // of E8M0
    i32 transposed;  // columnwise buffers are those of the transpose
    i32 swizzled;
    i32 pow2;
    float epsilon;
    // NVFP4
    i32 rotated;  // the Side that is rotated
    i32 signs;
    i32 stochastic;
    i32 row_scaled;
    i32 four_over_six;
    i32 squared_error;
    float e4m3_max;
    float global_divisor;  // decoding divides Buffers::amax by it
};

// The number of a format: its element, block and codes of a packed group. pieces.py has the same formula.
constexpr i32 format_number(i32 element, i32 block, i32 codes) {
    return element * 10000 + codes * 1000 + block;
}
// Whether the kernels of a format are compiled: a piece of the library may have one format alone (QT_FORMAT).
constexpr bool is_compiled([[maybe_unused]] i32 format) {
#ifdef QT_FORMAT
    return format == QT_FORMAT;
#else
    return true;
#endif
}

// One direction's buffers; null where the usage is absent.
struct Buffers {
    u8* data;
    void* scale;         // factors of blocks
    float* amax;         // NVFP4; a call that decodes may hold stored factors here, and a divisor of 1
    const float* given;  // maxima to use instead of those found
};

struct QuantizeCall {
    const void* x;
    i32 dtype, threads;
    i64 rows, cols, stride;  // stride of rows, in elements
    Buffers row, column;
    float* scale_inv;    // fp8 without blocks
    const float* scale;  // encode factors to use
    float* amax_out;     // delayed scaling
    i64 seed;
    i64 begin, end;  // a band of rows; x + begin * stride is its first element. All rows where end is 0
};

struct DequantizeArguments;
// x (m, k) @ weight -> y (m, n), times the factors of the rows of x, plus bias.
struct LinearCall {
    const DequantizeArguments* quantized_x;  // what bfloat16 x is decoded from, or null
    i64 turned;                              // whether x is (k, m); not in few_rows()
    const void* x;
    i32 x_dtype;
    i64 stride;  // of the rows of x, in elements
    i64 m, k, n;
    Buffers weight;
    const float* scale_inv;    // of the weight, fp8 without blocks
    const float* row_factors;  // of x: one, or one a row (row_factor_step 1)
    i64 row_factor_step;
    const float* bias;
    void* y;
    i32 dtype, threads;
    // The weight is (n, k), rowwise (NO_SIDE), or (k, n), of which the data of this Side are read. few_rows()
    // reads the first kind alone.
    i32 across;
    // Whether to use dot products of bfloat16 pairs where they give the same bits, or else multiply-adds of
    // float32; -1 for the faster way.
    i32 pairs;
};

struct DequantizeCall {
    void* y;
    i32 dtype, threads;
    i64 rows, cols;
    i64 first, count;     // rows to decode; y holds only these
    i64 left, width;      // columns of these, from the first of a block on; not where codes lie transposed
    Buffers row, column;  // exactly one has data
    const float* scale_inv;
};

// y (rows, cols) = norm(x), or sums of the rows of x to y (cols); with dx the gradients, y being dy.
struct NormCall {
    const void* x;
    i64 rows, cols, stride;  // stride of rows, in elements
    void* y;
    i64 y_stride;                // of dy
    const void *weight, *bias;   // or null
    float *mean, *rstd;          // a row; mean is null for RMSNorm
    void *dx, *dweight, *dbias;  // in the dtypes of x, of the weight, and of bias_dtype
    i32 y_dtype, weight_dtype, bias_dtype, zero_centered, threads;
    float eps;
};

// out (rows, cols) = act(x), x (rows, 2 cols) where gated; with dy (rows, cols) the gradient of x.
struct ActivationCall {
    const void *x, *dy;
    void* out;
    i64 rows, cols, stride, dy_stride;
    i32 kind, gated, threads;
    float alpha, limit, offset, bound;  // of CLAMPED
};

// What a fused kernel quantizes, made a few rows at a time.
struct Producer {
    // out holds only these, one behind the other; `again`: they have been made before.
    virtual void rows(i64 begin, i64 end, void* out, bool again) = 0;
    virtual ~Producer() = default;
};

// ---- Arguments that native.py packs for functions of c_interface.cpp: 8 bytes each, at any address. ctypes
// takes longer to convert 21 of them than a small tensor takes to quantize. The ops (ops/) pass them too.
struct QuantizeArguments {
    const CQuantizer* quantizer;
    const void* x;
    i64 dtype, rows, cols, stride, threads;
    Buffers row, column;
    float* scale_inv;
    const float* scale;
    float* amax_out;
    i64 seed;
    float *row_global, *column_global;  // NVFP4: where the factors that decode are stored, or null
};
struct DecodeBuffers {
    u8* data;
    void* scale;
    float* amax;
};
struct DequantizeArguments {
    const CQuantizer* quantizer;
    void* y;
    i64 dtype, rows, cols, first, count, threads;
    DecodeBuffers row, column;
    const float* scale_inv;
};
struct LinearArguments {
    const CQuantizer* quantizer;
    const DequantizeArguments* quantized_x;  // instead of x, without memory of its own
    i64 turned;
    const void* x;
    i64 x_dtype, stride, m, k, n, threads;
    DecodeBuffers weight;
    const float *scale_inv, *row_factors;
    i64 row_factor_step;
    const float* bias;
    void* y;
    i64 dtype, kernel, across;
    i64 pairs = -1;  // whether to use dot products of bfloat16 pairs, 0 or 1; -1 for the faster way
};
// An operand of a product of integers, as lines along the contraction. Strides count bytes; those of a line's
// bytes or of lines are 1.
struct LinesOfCodes {
    const u8* codes;
    i64 line_stride, byte_stride;
    const u8* scales;
    i64 scale_line_stride, scale_block_stride;
    i64 tiles;             // 128x4 tiles of factors beside each other; 0: strides count
    const float* factors;  // that follow the sums: one, or one a line (factor_step 1), or null
    i64 factor_step;
};
// y (m, n) = a (m, k) @ b (n, k).T, plus bias, both of 4- or 6-bit codes.
struct IntegerArguments {
    const CQuantizer *a_quantizer, *b_quantizer;
    LinesOfCodes a, b;
    i64 m, k, n, threads;
    const float* bias;
    void* y;
    i64 dtype;
};
// y (rows, cols) = x * (a * b) + bias, rounded once. a and b are one factor each; null counts as 1.
struct FinishCall {
    const float* x;
    i64 rows, cols;
    const float *a, *b;
    const float* bias;  // cols values, or null
    void* y;            // may be x
    i64 dtype;
};
