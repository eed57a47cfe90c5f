// Which kernel activates: kinds to template arguments. Compiled once for each dtype (QT_DTYPE).
#include "activation.h"

namespace QT_NAMESPACE {

constexpr i64 SLICE = 4096;  // elements of a row without gates that a thread takes at a time

template <class D, int A, bool Gated>
static void run(const ActivationCall& c) {
    using T = typename D::T;
    const T *x = (const T*)c.x, *dy = (const T*)c.dy;
    T* out = (T*)c.out;
    const bool stream = c.rows * c.cols > STREAMED;
    const i64 h = c.cols, wide = Gated ? 2 * h : h;
    if (!Gated && c.stride == h && (!dy || c.dy_stride == h)) {
        parallel(c.rows * h, SLICE, c.threads, [&](i64 a, i64 b) {
            if (dy)
                ActivationKernel<D, A>::template backward<false>(c, dy + a, x + a, nullptr, out + a, nullptr,
                                                                 b - a, stream);
            else
                ActivationKernel<D, A>::template forward<false>(c, x + a, nullptr, out + a, b - a, stream);
        });
    } else {
        parallel(c.rows, 1, c.threads, [&](i64 first, i64 end) {
            for (i64 r = first; r < end; r++) {
                const T *a = x + r * c.stride, *b = Gated ? a + h : a;
                T *da = out + r * (dy ? wide : h), *db = Gated ? da + h : da;
                if (dy)
                    ActivationKernel<D, A>::template backward<Gated>(c, dy + r * c.dy_stride, a, b, da, db, h,
                                                                     stream);
                else
                    ActivationKernel<D, A>::template forward<Gated>(c, a, b, da, h, stream);
            }
        });
    }
    if (stream) fence();
}

template <class D, int A, bool Gated>
struct ActivationProducer : Producer {
    const ActivationCall& c;
    explicit ActivationProducer(const ActivationCall& call) : c(call) {}
    void rows(i64 begin, i64 end, void* out, bool) override {
        using T = typename D::T;
        for (i64 r = begin; r < end; r++) {
            const T* a = (const T*)c.x + r * c.stride;
            ActivationKernel<D, A>::template forward<Gated>(c, a, Gated ? a + c.cols : a,
                                                            (T*)out + (r - begin) * c.cols, c.cols, false);
        }
    }
};

// A producer of rows where `made` is asked for, else the whole output.
template <class D, int A>
static void run_or_produce(const ActivationCall& c, std::unique_ptr<Producer>* made) {
    if (c.gated && made)
        made->reset(new ActivationProducer<D, A, true>(c));
    else if (c.gated)
        run<D, A, true>(c);
    else if constexpr (A != SIGMOID && A != CLAMPED) {
        if (made)
            made->reset(new ActivationProducer<D, A, false>(c));
        else
            run<D, A, false>(c);
    }
}

template <class D>
void activation_as(const ActivationCall& c, std::unique_ptr<Producer>* made) {
    switch (c.kind) {
        case GELU:
            return run_or_produce<D, GELU>(c, made);
        case QGELU:
            return run_or_produce<D, QGELU>(c, made);
        case RELU:
            return run_or_produce<D, RELU>(c, made);
        case SILU:
            return run_or_produce<D, SILU>(c, made);
        case SRELU:
            return run_or_produce<D, SRELU>(c, made);
        case SIGMOID:
            return run_or_produce<D, SIGMOID>(c, made);
        default:
            return run_or_produce<D, CLAMPED>(c, made);
    }
}

template void activation_as<QT_DTYPE>(const ActivationCall&, std::unique_ptr<Producer>*);

}  // namespace QT_NAMESPACE
