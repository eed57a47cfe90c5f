// Which kernel quantizes: formats to template arguments.
#include <new>

#include "blocks.h"
#include "float8.h"
#include "sinks.h"

namespace QT_NAMESPACE {

template <class D, class E, int B, int Codes>
static void blocks(const Plan& p, const QuantizeCall& c, bool stream) {
    BlockQuantizer<D, E, B, Codes>(p, c, sink_of(p, c.row, c.rows, c.cols, false), sink_of(p, c.column, c.cols, c.rows, true),
                                   stream)
        .run();
}

// Compiled once for each input dtype (QT_DTYPE), so that a build runs in parallel.
template <class D>
bool quantize_as(const Plan& p, const QuantizeCall& c) {
    // An output that would push everything else out of the cache goes around it.
    const bool stream = c.rows * c.cols > (i64(8) << 20);
    if (p.family != BLOCK) {
        if (p.element == E4M3)
            Float8Quantizer<D, FE4M3>(p, c, stream).run();
        else
            Float8Quantizer<D, FE5M2>(p, c, stream).run();
        fence();
        return true;
    }
#define QT_CALL(E, B, CODES) blocks<D, E, B, CODES>(p, c, stream)
#include "formats.inc"
#undef QT_CALL
    fence();
    return true;
}

template bool quantize_as<QT_DTYPE>(const Plan&, const QuantizeCall&);

}  // namespace QT_NAMESPACE
