// The functions that native.py and floats.py call. Each returns 0 if the result is written, 1 if this CPU or
// quantizer has no kernel for it, and 2 if memory ran out. In the last two cases the caller uses the
// reference. A piece of the library (QT_PIECE; sources.py: Piece) has one of the functions, for one
// dtype (QT_DTYPE) if kernels depend on it.
#include <cstring>
#include <new>

#include "calls.h"
#include "denormals.h"
#include "simd.h"
#include "threads.h"

using namespace QT_NAMESPACE;

#ifndef QT_PIECE
#define QT_QUANTIZE
#define QT_DEQUANTIZE
#define QT_LINEAR
#define QT_INTEGER_PRODUCTS
#define QT_NORM
#define QT_ACTIVATION
#define QT_FUSED
#endif

constexpr int ABI = 12;
enum Status { DONE = 0, NO_KERNEL = 1, OUT_OF_MEMORY = 2 };

template <class Arguments>
static Arguments unpack(const void* packed) {
    static_assert(sizeof(void*) == 8 && sizeof(Arguments) % 8 == 0, "fields of 8 bytes");
    Arguments arguments;
    memcpy(&arguments, packed, sizeof arguments);
    return arguments;
}
[[maybe_unused]] static QuantizeCall call_of(const QuantizeArguments& a) {
    return {a.x,      i32(a.dtype), i32(a.threads), a.rows,     a.cols, a.stride, a.row,
            a.column, a.scale_inv,  a.scale,        a.amax_out, a.seed, 0,        0};
}
// Stores the factors of the maxima that a call has written: one, or one a line.
[[maybe_unused]] static void store_globals(const QuantizeArguments& a) {
    const CQuantizer& p = *a.quantizer;
    const float bound = 6.0f * p.e4m3_max;
    for (i64 i = 0; a.row_global && i < (p.row_scaled ? a.rows : 1); i++)
        a.row_global[i] = a.row.amax[i] / bound;
    for (i64 i = 0; a.column_global && i < (p.row_scaled ? a.cols : 1); i++)
        a.column_global[i] = a.column.amax[i] / bound;
}

// Calls f with the type of a dtype and returns a Status; f returns whether there is a kernel. No exception
// may reach the C caller.
template <class F>
static int call_kernel([[maybe_unused]] i64 dtype, const F& f) {
    const KeepDenormals scope;
    try {
#ifdef QT_DTYPE
        return f(QT_DTYPE{}) ? DONE : NO_KERNEL;
#else
        return with_type(dtype, f) ? DONE : NO_KERNEL;
#endif
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    }
}

#ifdef QT_LINEAR
static int run_linear(const LinearArguments& a, i64 threads) {
    LinearCall call = call_of(a);
    call.threads = i32(threads);
    const KeepDenormals scope;
    try {
        const auto run = a.kernel == FEW_ROWS ? few_rows : a.kernel == TILES ? linear_by_tiles : linear;
        return run(*a.quantizer, call) ? DONE : NO_KERNEL;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    }
}
#endif

extern "C" {

int qt_abi() { return ABI * 1000 + int(sizeof(CQuantizer)); }

#ifdef QT_QUANTIZE
// Fills the buffers of a quantizer from x.
int qt_quantize(const void* packed) {
    const QuantizeArguments a = unpack<QuantizeArguments>(packed);
    return call_kernel(a.dtype, [&](auto dtype) {
        if (!quantize_as<decltype(dtype)>(*a.quantizer, call_of(a))) return false;
        store_globals(a);
        return true;
    });
}
#endif

#ifdef QT_LINEAR
// x @ weight by a LinearKernel: each has an order of sums of its own.
int qt_linear(const void* packed) {
    const LinearArguments a = unpack<LinearArguments>(packed);
    return run_linear(a, a.threads);
}

// Several products, which share the threads: each thread that is free takes the next one.
int qt_linear_all(const LinearArguments* calls, i64 count, i64 threads) {
    std::atomic<i64> next{0};
    std::atomic<int> status{DONE};
    parallel(threads, 1, int(threads), [&](i64, i64) {
        for (i64 i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
            const int ended = run_linear(calls[i], 1);
            if (ended != DONE) status = ended;
        }
    });
    return status;
}
#endif

#ifdef QT_INTEGER_PRODUCTS
// a @ b.T of two operands of 4- or 6-bit codes.
int qt_integer_products(const void* packed) {
    const KeepDenormals scope;
    try {
        return integer_products(unpack<IntegerArguments>(packed)) ? DONE : NO_KERNEL;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    }
}
#endif

#ifdef QT_DEQUANTIZE
// Decodes `count` rows from row `first` into y, which holds only these.
int qt_dequantize(const void* packed) {
    const DequantizeArguments a = unpack<DequantizeArguments>(packed);
    return call_kernel(a.dtype,
                       [&](auto dtype) { return dequantize_as<decltype(dtype)>(*a.quantizer, call_of(a)); });
}
#endif

#ifdef QT_NORM
// A norm, or its gradients where the call has dx.
int qt_norm(const NormCall* call, i64 dtype) {
    return call_kernel(dtype, [&](auto type) {
        norm_as<decltype(type)>(*call);
        return true;
    });
}

// The sum of the rows of x.
int qt_sum_rows(const NormCall* call, i64 dtype) {
    return call_kernel(dtype, [&](auto type) {
        sum_rows_as<decltype(type)>(*call);
        return true;
    });
}
#endif

#ifdef QT_ACTIVATION
// An activation, or its gradient where the call has dy.
int qt_activation(const ActivationCall* call, i64 dtype) {
    return call_kernel(dtype, [&](auto type) {
        activation_as<decltype(type)>(*call, nullptr);
        return true;
    });
}
#endif

#ifdef QT_FUSED
// Quantizes a norm or an activation (the other is null) of an input of dtype `input_dtype`. The other
// arguments are those of qt_quantize, with x the memory that keeps the tensor in between, or null.
int qt_fused(const NormCall* norm, const ActivationCall* activation, i64 input_dtype, const void* packed) {
    const QuantizeArguments a = unpack<QuantizeArguments>(packed);
    std::unique_ptr<Producer> producer;
    const int made = call_kernel(input_dtype, [&](auto type) {
        if (norm)
            producer = norm_rows_as<decltype(type)>(*norm);
        else
            activation_as<decltype(type)>(*activation, &producer);
        return producer != nullptr;
    });
    if (made != DONE) return made;
    return call_kernel(a.dtype, [&](auto type) {
        if (!fused_as<decltype(type)>(*a.quantizer, call_of(a), *producer)) return false;
        store_globals(a);
        return true;
    });
}
#endif
}
