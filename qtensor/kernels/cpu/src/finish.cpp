// What is left of a product when its sums are known: factors, bias, one rounding.
#include "denormals.h"
#include "row_arithmetic.h"

namespace QT_NAMESPACE {

template <class D>
static void widen_as(const void* x, i64 n, float* y) {
    for (i64 i = 0; i < n; i++) y[i] = D::to_float(((const typename D::T*)x)[i]);
}

// Rounds n floats, at most GROUP, to D.
template <class D>
static void narrow_run(const float* x, i64 n, u16* y) {
    i64 i = 0;
    for (; i + W <= n; i += W) store_one<D>(y + i, load<VF>(x + i), false);
    for (; i < n; i++) put_element(y, i, D::id, x[i]);
}

static void finish(const FinishCall& c) {
    const bool scaled = c.a || c.b;
    const float factor = (c.a ? *c.a : 1.0f) * (c.b ? *c.b : 1.0f);
    float line[GROUP];
    for (i64 r = 0; r < c.rows; r++)
        for (i64 k = 0; k < c.cols; k += GROUP) {
            const i64 n = c.cols - k < GROUP ? c.cols - k : GROUP, first = r * c.cols + k;
            for (i64 i = 0; i < n; i++) line[i] = c.x[first + i];
            if (scaled)
                for (i64 i = 0; i < n; i++) line[i] = line[i] * factor;
            if (c.bias)
                for (i64 i = 0; i < n; i++) line[i] = line[i] + c.bias[k + i];
            if (c.dtype == F32)
                memcpy((float*)c.y + first, line, sizeof(float) * size_t(n));
            else if (c.dtype == BF16)
                narrow_run<Bfloat16>(line, n, (u16*)c.y + first);
            else
                narrow_run<Float16>(line, n, (u16*)c.y + first);
        }
}

}  // namespace QT_NAMESPACE
using namespace QT_NAMESPACE;

extern "C" {

void qt_finish(const FinishCall* call) {
    const KeepDenormals scope;
    finish(*call);
}

// n values of a dtype as floats.
void qt_widen(const void* x, i64 dtype, i64 n, float* y) {
    with_type(dtype, [&](auto type) { widen_as<decltype(type)>(x, n, y); });
}
}
