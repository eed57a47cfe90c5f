// Dequantizes to float16: kernels of float32 decode a few rows at a time, which are rounded while they are in
// the cache. Rows with kernels of their own would have the same values and take as long to compile.
#include "avx512_rotation.h"
#include "calls.h"
#include "memory.h"
#include "threads.h"

namespace QT_NAMESPACE {

static void narrow(const float* x, i64 n, u16* y) {
    i64 i = 0;
    for (; i + W <= n; i += W) store(y + i, to_half(load<VF>(x + i)));
    for (; i < n; i++) y[i] = float_to_half(x[i]);
}

template <>
bool dequantize_as<Float16>(const CQuantizer& p, const DequantizeCall& c) {
    constexpr i64 ELEMENTS = 1 << 15;  // of a band of rows, which stays in the second cache level
    constexpr i64 ACROSS = 128;  // rows of a band whose codes lie transposed: they share lines of memory
    const i64 least = c.row.data ? 1 : ACROSS, fitting = ELEMENTS / (c.cols > 0 ? c.cols : 1);
    const i64 height = fitting > least ? fitting / least * least : least;
    const i64 bands = (c.count + height - 1) / height;
    const bool apart = bands >= c.threads;  // else the threads share each band
    std::atomic<bool> served{true};
    parallel(bands, 1, apart ? c.threads : 1, [&](i64 a, i64 b) {
        const Array<float> wide(smaller(height, c.count) * c.cols);
        for (i64 band = a; band < b && served; band++) {
            DequantizeCall part = c;  // its dtype stays: rotated values are rounded to it
            part.y = (float*)wide;
            part.first = c.first + band * height;
            part.count = smaller(c.count - band * height, height);
            part.threads = apart ? 1 : c.threads;
            if (!dequantize_as<Float32>(p, part)) served = false;
            u16* y = (u16*)c.y + band * height * c.cols;
            parallel(part.count * c.cols, 4096, part.threads,
                     [&](i64 first, i64 end) { narrow(wide + first, end - first, y + first); });
        }
    });
    return served;
}

}  // namespace QT_NAMESPACE
