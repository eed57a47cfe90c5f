// Quantizes float16: rows are widened to float32, which changes no value, a few at a time, and the kernels of
// float32 quantize them while they are in the cache. Kernels of its own would take as long to compile.
#include "calls.h"
#include "memory.h"
#include "simd.h"
#include "threads.h"

namespace QT_NAMESPACE {

static void widen(const u16* x, i64 n, float* y) {
    i64 i = 0;
    for (; i + W <= n; i += W) store(y + i, Float16::one(x + i));
    for (; i < n; i++) y[i] = half_to_float(x[i]);
}

// The rows of a tensor as float32.
struct WideRows : Producer {
    const QuantizeCall& c;
    explicit WideRows(const QuantizeCall& call) : c(call) {}
    void rows(i64 begin, i64 end, void* out, bool) override {
        for (i64 r = begin; r < end; r++)
            widen((const u16*)c.x + r * c.stride, c.cols, (float*)out + (r - begin) * c.cols);
    }
};

// What another producer makes in float16, as float32. `kept`: where it stays, or null.
struct WideProduct : Producer {
    Producer& made;
    const i64 cols;
    u16* const kept;
    WideProduct(Producer& producer, const QuantizeCall& c)
        : made(producer), cols(c.cols), kept((u16*)const_cast<void*>(c.x)) {}
    void rows(i64 begin, i64 end, void* out, bool again) override {
        const i64 count = (end - begin) * cols;
        const Array<u16> buffer(kept ? 0 : count);
        u16* at = kept ? kept + begin * cols : (u16*)buffer;
        if (!kept || !again) made.rows(begin, end, at, again);
        widen(at, count, (float*)out);
    }
};

static QuantizeCall wide_call(const QuantizeCall& c, const float* x) {
    QuantizeCall wide = c;  // its dtype stays: rotated values are rounded to it
    wide.x = x;
    wide.stride = c.cols;
    return wide;
}

template <>
bool fused_as<Float16>(const CQuantizer& p, const QuantizeCall& c, Producer& producer) {
    WideProduct wide(producer, c);
    return fused_as<Float32>(p, wide_call(c, nullptr), wide);
}

template <>
bool quantize_as<Float16>(const CQuantizer& p, const QuantizeCall& c) {
    if (c.rows * c.cols == 0) return quantize_as<Float32>(p, c);
    WideRows rows(c);
    return fused_as<Float32>(p, wide_call(c, nullptr), rows);
}

}  // namespace QT_NAMESPACE
