// The kernels: what c_interface.cpp calls. Each returns whether it serves the call.
#pragma once
#include <memory>

#include "structs.h"

namespace QT_NAMESPACE {

struct Float32;
struct Float16;

inline DequantizeCall call_of(const DequantizeArguments& a) {
    const auto buffers = [](const DecodeBuffers& b) { return Buffers{b.data, b.scale, b.amax, nullptr}; };
    return {a.y,    i32(a.dtype),   i32(a.threads),    a.rows,     a.cols, a.first, a.count, 0,
            a.cols, buffers(a.row), buffers(a.column), a.scale_inv};
}

inline LinearCall call_of(const LinearArguments& a) {
    const Buffers weight{a.weight.data, a.weight.scale, a.weight.amax, nullptr};
    return {a.quantized_x, a.turned, a.x,          i32(a.x_dtype), a.stride,      a.m,
            a.k,           a.n,      weight,       a.scale_inv,    a.row_factors, a.row_factor_step,
            a.bias,        a.y,      i32(a.dtype), i32(a.threads), i32(a.across), i32(a.pairs)};
}

template <class D>
bool quantize_as(const CQuantizer& quantizer, const QuantizeCall& call);
template <class D>
bool dequantize_as(const CQuantizer& quantizer, const DequantizeCall& call);
bool linear(const CQuantizer& quantizer, const LinearCall& call);
bool linear_by_tiles(const CQuantizer& quantizer, const LinearCall& call);
bool few_rows(const CQuantizer& quantizer, const LinearCall& call);
bool integer_products(const IntegerArguments& call);
template <class D>
void norm_as(const NormCall& call);
template <class D>
void sum_rows_as(const NormCall& call);
template <class D>
void activation_as(const ActivationCall& call, std::unique_ptr<Producer>* producer);
template <class D>
std::unique_ptr<Producer> norm_rows_as(const NormCall& call);
template <class D>
bool fused_as(const CQuantizer& quantizer, const QuantizeCall& call, Producer& producer);

// dequantize_float16.cpp and quantize_float16.cpp
template <>
bool dequantize_as<Float16>(const CQuantizer& quantizer, const DequantizeCall& call);
template <>
bool quantize_as<Float16>(const CQuantizer& quantizer, const QuantizeCall& call);
template <>
bool fused_as<Float16>(const CQuantizer& quantizer, const QuantizeCall& call, Producer& producer);

}  // namespace QT_NAMESPACE
