// The C interface: what native.py calls.
#include <cstring>

#include "denormals.h"
#include "simd.h"

namespace QT_NAMESPACE {
template <class D>
bool quantize_as(const Plan& p, const QuantizeCall& c);
template <class D>
bool dequantize_as(const Plan& p, const DequantizeCall& c);
bool linear(const Plan& p, const LinearCall& c);
template <class D>
void norm_as(const NormCall& c);
template <class D>
void sum_rows_as(const NormCall& c);
template <class D>
void activation_as(const ActivationCall& c, Producer** made);
template <class D>
Producer* norm_rows_as(const NormCall& c);
template <class D>
bool fused_as(const Plan& p, const QuantizeCall& c, Producer& producer);
}  // namespace QT_NAMESPACE
using namespace QT_NAMESPACE;

constexpr int ABI = 3;

// Arguments as native.py packs them: 8 bytes each, at any address. ctypes takes longer to convert 19 of them than a small tensor
// takes to quantize.
struct QuantizeArguments {
    const Plan* plan;
    const void* x;
    i64 dtype, rows, cols, stride, threads;
    Buffers row, column;
    float* scale_inv;
    const float* scale;
    float* amax_out;
    i64 seed;
};
struct Stored {
    u8* data;
    void* scale;
    float* amax;
};
struct DequantizeArguments {
    const Plan* plan;
    void* y;
    i64 dtype, rows, cols, first, count, threads;
    Stored row, column;
    const float* scale_inv;
};
template <class Arguments>
static Arguments unpack(const void* packed) {
    static_assert(sizeof(void*) == 8 && sizeof(Arguments) % 8 == 0, "fields of 8 bytes");
    Arguments a;
    memcpy(&a, packed, sizeof a);
    return a;
}
static QuantizeCall call_of(const QuantizeArguments& a) {
    return {a.x, i32(a.dtype), i32(a.threads), a.rows, a.cols, a.stride, a.row, a.column, a.scale_inv, a.scale, a.amax_out, a.seed, 0, 0};
}

extern "C" {

int qt_abi() { return ABI * 1000 + int(sizeof(Plan)); }

// Fills the buffers of a plan from x. 0: done; 1: this plan has no kernel.
int qt_quantize(const void* packed) {
    const KeepDenormals scope;
    const QuantizeArguments a = unpack<QuantizeArguments>(packed);
    const QuantizeCall c = call_of(a);
    const bool done = a.dtype == F32    ? quantize_as<Float32>(*a.plan, c)
                      : a.dtype == BF16 ? quantize_as<Bfloat16>(*a.plan, c)
                                        : quantize_as<Float16>(*a.plan, c);
    return done ? 0 : 1;
}

// x @ weight.T; 1: this CPU or plan has no kernel for it.
int qt_linear(const Plan* plan, const void* x, i64 m, i64 k, i64 n, i64 threads, const u8* data, const void* scale,
              const float* amax, const float* scale_inv, const float* row_factors, i64 row_factor_step, const float* bias,
              void* y, i64 dtype) {
    const KeepDenormals scope;
    const LinearCall c{(const u16*)x, m, k, n, {(u8*)data, (void*)scale, (float*)amax, nullptr}, scale_inv, row_factors,
                       row_factor_step, bias, y, i32(dtype), i32(threads)};
    return linear(*plan, c) ? 0 : 1;
}

// Decodes `count` rows from row `first` into y, which holds only these. The same codes back.
int qt_dequantize(const void* packed) {
    const KeepDenormals scope;
    const DequantizeArguments a = unpack<DequantizeArguments>(packed);
    const DequantizeCall c{a.y, i32(a.dtype), i32(a.threads), a.rows, a.cols, a.first, a.count,
                           {a.row.data, a.row.scale, a.row.amax, nullptr}, {a.column.data, a.column.scale, a.column.amax, nullptr},
                           a.scale_inv};
    const bool done = a.dtype == F32    ? dequantize_as<Float32>(*a.plan, c)
                      : a.dtype == BF16 ? dequantize_as<Bfloat16>(*a.plan, c)
                                        : dequantize_as<Float16>(*a.plan, c);
    return done ? 0 : 1;
}

// A norm, or its gradients where the call has dx.
void qt_norm(const NormCall* c, i64 dtype) {
    const KeepDenormals scope;
    dtype == F32 ? norm_as<Float32>(*c) : dtype == BF16 ? norm_as<Bfloat16>(*c) : norm_as<Float16>(*c);
}

// The sum of the rows of x.
void qt_sum_rows(const NormCall* c, i64 dtype) {
    const KeepDenormals scope;
    dtype == F32 ? sum_rows_as<Float32>(*c) : dtype == BF16 ? sum_rows_as<Bfloat16>(*c) : sum_rows_as<Float16>(*c);
}

// An activation, or its gradient where the call has dy.
void qt_activation(const ActivationCall* c, i64 dtype) {
    const KeepDenormals scope;
    dtype == F32    ? activation_as<Float32>(*c, nullptr)
    : dtype == BF16 ? activation_as<Bfloat16>(*c, nullptr)
                    : activation_as<Float16>(*c, nullptr);
}

// Quantizes a norm or an activation (the other is null) of an input of `from`; the rest is as in qt_quantize, x being where the
// result is kept, or null.
int qt_fused(const NormCall* norm, const ActivationCall* activation, i64 from, const void* packed) {
    const KeepDenormals scope;
    const QuantizeArguments a = unpack<QuantizeArguments>(packed);
    const QuantizeCall c = call_of(a);
    Producer* made = nullptr;
    if (norm)
        made = from == F32 ? norm_rows_as<Float32>(*norm) : from == BF16 ? norm_rows_as<Bfloat16>(*norm) : norm_rows_as<Float16>(*norm);
    else
        from == F32    ? activation_as<Float32>(*activation, &made)
        : from == BF16 ? activation_as<Bfloat16>(*activation, &made)
                       : activation_as<Float16>(*activation, &made);
    const bool done = a.dtype == F32    ? fused_as<Float32>(*a.plan, c, *made)
                      : a.dtype == BF16 ? fused_as<Bfloat16>(*a.plan, c, *made)
                                        : fused_as<Float16>(*a.plan, c, *made);
    delete made;
    return done ? 0 : 1;
}
}
