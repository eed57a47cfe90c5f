// Which kernel quantizes: formats to template arguments.
#include <new>

#include "quantize_fused.h"

namespace QT_NAMESPACE {

template <class D, class E, int B, int Codes>
static void blocks(const CQuantizer& p, const QuantizeCall& c, bool stream) {
    BlockQuantizer<D, E, B, Codes>(p, c, scale_layout_of(p, c.row, c.rows, c.cols, false),
                                   scale_layout_of(p, c.column, c.cols, c.rows, true), stream)
        .run();
}

// Compiled once for each input dtype (QT_DTYPE), so that a build runs in parallel.
template <class D>
bool quantize_as(const CQuantizer& p, const QuantizeCall& c) {
    const bool stream = c.rows * c.cols > STREAMED;
#define QT_CALL(E, B, CODES) blocks<D, E, B, CODES>(p, c, stream)
#define QT_FLOAT8(E) Float8Quantizer<D, E>(p, c, stream).run()
#include "formats.inc"
    fence();
    return true;
}

template <class D>
bool fused_as(const CQuantizer& p, const QuantizeCall& c, Producer& producer) {
    FusedQuantizer<D> fused(p, c, producer, c.rows * c.cols > STREAMED);
#define QT_CALL(E, B, CODES) fused.template blocks<E, B, CODES>()
#define QT_FLOAT8(E) fused.template float8<E>()
#include "formats.inc"
    fence();
    return true;
}

template bool fused_as<QT_DTYPE>(const CQuantizer&, const QuantizeCall&, Producer&);
template bool quantize_as<QT_DTYPE>(const CQuantizer&, const QuantizeCall&);

}  // namespace QT_NAMESPACE
