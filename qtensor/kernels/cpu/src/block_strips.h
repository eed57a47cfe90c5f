// Which blocks a strip of W blocks has, where its elements lie and where its codes go.
#pragma once
#include "simd.h"

namespace QT_NAMESPACE {

// A matrix whose rows are cut into blocks, and where their codes and factors go.
template <class T>
struct Lines {
    const T* x;
    i64 count, length, stride;  // lines, elements of a line, elements between lines
    u8* out;
    i64 out_stride;     // bytes between lines
    i64 line0, block0;  // of the first line and block, within the whole direction
    i64 total;          // elements of a whole line, which number the random bytes
};

template <class D, int B, int Codes>
struct StripLayout {
    using T = typename D::T;
    static constexpr int bytes = B * (Codes == 4 ? 3 : 1) / Codes;  // of a block's codes
    const Lines<T>& m;
    i64 blocks;              // a line
    bool flat_in, flat_out;  // the blocks of all lines lie one behind the other

    explicit StripLayout(const Lines<T>& lines)
        : m(lines),
          blocks((lines.length + B - 1) / B),
          flat_in(lines.length % B == 0 && lines.stride == lines.length),
          flat_out(lines.length % B == 0 && lines.out_stride == blocks * bytes) {}
    bool direct(i64 line, i64 block, bool flat) const {
        return (flat && (line * blocks + block + W) <= m.count * blocks) || (block + W) * B <= m.length;
    }
    const T* source(i64 line, i64 block) const { return m.x + line * m.stride + block * B; }
    u8* target(i64 line, i64 block) const { return m.out + line * m.out_stride + block * bytes; }
    void gather(i64 line, i64 block, T* scratch) const {
        for (int b = 0; b < W; b++) {
            const i64 n = line < m.count ? m.length - block * B : 0;
            if (n >= B) {
                memcpy(scratch + b * B, source(line, block), sizeof(T) * B);
            } else {
                memset(scratch + b * B, 0, sizeof(T) * B);
                if (n > 0) memcpy(scratch + b * B, source(line, block), sizeof(T) * size_t(n));
            }
            if (++block == blocks) {
                block = 0;
                line++;
            }
        }
    }
    void scatter(i64 line, i64 block, const u8* scratch, bool whole, bool stream) const {
        for (int b = 0; b < W && line < m.count; b++) {
            const i64 n = m.length - block * B;
            if (n < B && !whole)
                memcpy(target(line, block), scratch + b * bytes,
                       size_t((n + Codes - 1) / Codes * (Codes == 4 ? 3 : 1)));
            else if (bytes % GROUP == 0 && stream)
                put_bytes(target(line, block), scratch + b * bytes, bytes, true);
            else
                memcpy(target(line, block), scratch + b * bytes, bytes);
            if (++block == blocks) {
                block = 0;
                line++;
            }
        }
    }
};

}  // namespace QT_NAMESPACE
