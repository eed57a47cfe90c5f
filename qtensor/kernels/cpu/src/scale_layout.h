// The layout of the factors of one direction, from a quantizer and a shape.
#pragma once
#include "scales.h"

namespace QT_NAMESPACE {

INLINE i64 up(i64 n, i64 multiple) { return (n + multiple - 1) / multiple * multiple; }

// Strides of the factors of one direction whose lines are `lines` long in blocks.
INLINE ScaleLayout scale_layout_of(const CQuantizer& p, const Buffers& side, i64 lines, i64 length,
                                   bool columnwise) {
    const i64 blocks = (length + p.block - 1) / p.block;
    ScaleLayout s{(u8*)side.scale, 0, 1, 0, p.scale == SCALE_F32 ? 4 : 1, 0};
    if (p.scale == SCALE_F32) {
        if (p.square)
            s.line_stride = up(blocks, 4);
        else {
            s.line_stride = 1;
            s.block_stride = up(lines, 4);
        }
    } else if (columnwise && !p.transposed) {
        s.line_stride = 1;
        s.block_stride = up(lines, 128);
    } else {
        s.line_stride = up(blocks, 4);
    }
    if (p.swizzled) s.tiles = up(blocks, 4) / 4;
    return s;
}

// The same for reading: stored square factors of float32 have one line for 128 lines.
INLINE ScaleLayout stored_scale_layout_of(const CQuantizer& p, const Buffers& side, i64 lines, i64 length,
                                          bool columnwise) {
    ScaleLayout s = scale_layout_of(p, side, lines, length, columnwise);
    if (p.square && p.scale == SCALE_F32) s.shift = 7;
    return s;
}

}  // namespace QT_NAMESPACE
