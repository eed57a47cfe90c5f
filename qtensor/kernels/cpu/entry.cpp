// The C interface: what native.py calls.
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

constexpr int ABI = 1;

extern "C" {

int qt_abi() { return ABI * 1000 + int(sizeof(Plan)); }

// Fills the buffers of `plan` from x. 0: done; 1: this plan has no kernel.
int qt_quantize(const Plan* plan, const void* x, i64 dtype, i64 rows, i64 cols, i64 stride, i64 threads, u8* row_data,
                void* row_scale, float* row_amax, const float* row_given, u8* column_data, void* column_scale,
                float* column_amax, const float* column_given, float* scale_inv, const float* scale, float* amax_out,
                i64 seed) {
    const QuantizeCall c{x, i32(dtype), i32(threads), rows, cols, stride, {row_data, row_scale, row_amax, row_given},
                         {column_data, column_scale, column_amax, column_given}, scale_inv, scale, amax_out, seed, 0, 0};
    const bool done = dtype == F32    ? quantize_as<Float32>(*plan, c)
                      : dtype == BF16 ? quantize_as<Bfloat16>(*plan, c)
                                      : quantize_as<Float16>(*plan, c);
    return done ? 0 : 1;
}

// x @ weight.T; 1: this CPU or plan has no kernel for it.
int qt_linear(const Plan* plan, const void* x, i64 m, i64 k, i64 n, i64 threads, const u8* data, const void* scale,
              const float* amax, const float* scale_inv, const float* row_factors, i64 row_factor_step, const float* bias,
              void* y, i64 dtype) {
    const LinearCall c{(const u16*)x, m, k, n, {(u8*)data, (void*)scale, (float*)amax, nullptr}, scale_inv, row_factors,
                       row_factor_step, bias, y, i32(dtype), i32(threads)};
    return linear(*plan, c) ? 0 : 1;
}

// Decodes `count` rows from row `first` into y, which holds only these. The same codes back.
int qt_dequantize(const Plan* plan, void* y, i64 dtype, i64 rows, i64 cols, i64 first, i64 count, i64 threads,
                  const u8* row_data, const void* row_scale, const float* row_amax, const u8* column_data,
                  const void* column_scale, const float* column_amax, const float* scale_inv) {
    const DequantizeCall c{y, i32(dtype), i32(threads), rows, cols, first, count,
                           {(u8*)row_data, (void*)row_scale, (float*)row_amax, nullptr},
                           {(u8*)column_data, (void*)column_scale, (float*)column_amax, nullptr}, scale_inv};
    const bool done = dtype == F32    ? dequantize_as<Float32>(*plan, c)
                      : dtype == BF16 ? dequantize_as<Bfloat16>(*plan, c)
                                      : dequantize_as<Float16>(*plan, c);
    return done ? 0 : 1;
}

// A norm, or its gradients where the call has dx.
void qt_norm(const NormCall* c, i64 dtype) {
    dtype == F32 ? norm_as<Float32>(*c) : dtype == BF16 ? norm_as<Bfloat16>(*c) : norm_as<Float16>(*c);
}

// The sum of the rows of x.
void qt_sum_rows(const NormCall* c, i64 dtype) {
    dtype == F32 ? sum_rows_as<Float32>(*c) : dtype == BF16 ? sum_rows_as<Bfloat16>(*c) : sum_rows_as<Float16>(*c);
}

// An activation, or its gradient where the call has dy.
void qt_activation(const ActivationCall* c, i64 dtype) {
    dtype == F32    ? activation_as<Float32>(*c, nullptr)
    : dtype == BF16 ? activation_as<Bfloat16>(*c, nullptr)
                    : activation_as<Float16>(*c, nullptr);
}

// Quantizes a norm or an activation (the other is null) of an input of `from`, whose result is `dtype`; x: where the result
// is kept, or null. The other arguments, and what comes back, are those of qt_quantize.
int qt_fused(const NormCall* norm, const ActivationCall* activation, i64 from, const Plan* plan, void* x, i64 dtype, i64 rows,
             i64 cols, i64 threads, u8* row_data, void* row_scale, float* row_amax, const float* row_given, u8* column_data,
             void* column_scale, float* column_amax, const float* column_given, float* scale_inv, const float* scale,
             float* amax_out, i64 seed) {
    const QuantizeCall c{x, i32(dtype), i32(threads), rows, cols, cols, {row_data, row_scale, row_amax, row_given},
                         {column_data, column_scale, column_amax, column_given}, scale_inv, scale, amax_out, seed, 0, 0};
    Producer* made = nullptr;
    if (norm)
        made = from == F32 ? norm_rows_as<Float32>(*norm) : from == BF16 ? norm_rows_as<Bfloat16>(*norm) : norm_rows_as<Float16>(*norm);
    else
        from == F32    ? activation_as<Float32>(*activation, &made)
        : from == BF16 ? activation_as<Bfloat16>(*activation, &made)
                       : activation_as<Float16>(*activation, &made);
    const bool done = dtype == F32    ? fused_as<Float32>(*plan, c, *made)
                      : dtype == BF16 ? fused_as<Bfloat16>(*plan, c, *made)
                                      : fused_as<Float16>(*plan, c, *made);
    delete made;
    return done ? 0 : 1;
}
}
