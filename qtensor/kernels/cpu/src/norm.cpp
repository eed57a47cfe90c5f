// LayerNorm and RMSNorm, forward and backward, and sums over rows. Compiled once for each dtype of x
// (QT_DTYPE).
#include "row_arithmetic.h"

namespace QT_NAMESPACE {

// A vector of floats in the order of the lanes; `fill` where there is none, and behind its end.
template <class D, bool Pairs>
static void spread_as(float* out, const typename D::T* values, i64 cols, bool plus_one, float fill) {
    const VF one = all(plus_one ? 1.0f : 0.0f);
    for (i64 k = 0; k < cols; k += CHUNK) {
        typename D::T t[CHUNK] = {};
        const bool whole = k + CHUNK <= cols;
        if (!whole) memcpy(t, values + k, sizeof(typename D::T) * size_t(cols - k));
        VF v[VECTORS];
        load_chunk<D, false>(whole ? values + k : t, v);
        float flat[CHUNK];
        for (int j = 0; j < VECTORS; j++) store(flat + j * W, plus_one ? one + v[j] : v[j]);
        for (i64 i = whole ? CHUNK : cols - k; i < CHUNK; i++) flat[i] = fill;
        for (int j = 0; j < VECTORS; j++)
            for (int i = 0; i < W; i++) out[k + j * W + i] = flat[lane_of<Pairs>(j, i)];
    }
}
template <bool Pairs>
static void spread_vector(float* out, const void* values, int dtype, i64 cols, bool plus_one, float fill) {
    if (!values)
        for (i64 at = 0; at < whole_chunks(cols) * CHUNK; at++) out[at] = fill;
    else if (dtype == F32)
        spread_as<Float32, Pairs>(out, (const float*)values, cols, plus_one, fill);
    else if (dtype == BF16)
        spread_as<Bfloat16, Pairs>(out, (const u16*)values, cols, plus_one, fill);
    else
        spread_as<Float16, Pairs>(out, (const u16*)values, cols, plus_one, fill);
}

// f(chunk's elements, first element, real or padded) over a row; the last ones through a copy padded with
// zeros.
template <class D, bool Pairs, class F>
INLINE void each_chunk(const typename D::T* x, i64 cols, const F& f) {
    i64 k = 0;
    VF v[VECTORS];
    for (; k + CHUNK <= cols; k += CHUNK) {
        load_chunk<D, Pairs>(x + k, v);
        f(v, k, false);
    }
    if (k < cols) {
        typename D::T t[CHUNK] = {};
        memcpy(t, x + k, sizeof(typename D::T) * size_t(cols - k));
        load_chunk<D, Pairs>(t, v);
        f(v, k, true);
    }
}
template <class D, bool Pairs>
INLINE void store_chunk(typename D::T* y, const VF v[VECTORS], i64 n, bool stream) {
    if (n >= CHUNK) return store_vectors<D, Pairs>(y, v, VECTORS, stream);
    typename D::T t[CHUNK];
    store_vectors<D, Pairs>(t, v, VECTORS, false);
    memcpy(y, t, sizeof(typename D::T) * size_t(n));
}

template <class D, class DY>
struct NormKernel {
    using T = typename D::T;
    using Y = typename DY::T;
    static constexpr bool pairs = D::pairs && DY::pairs;
    const NormCall& c;
    Array<float> gamma, bias;
    VI mask[VECTORS];

    explicit NormKernel(const NormCall& call)
        : c(call), gamma(whole_chunks(c.cols) * CHUNK), bias(c.bias ? whole_chunks(c.cols) * CHUNK : 0) {
        spread_vector<pairs>(gamma, c.weight, c.weight_dtype, c.cols, c.zero_centered, 1.0f);
        if (c.bias) spread_vector<pairs>(bias, c.bias, c.bias_dtype, c.cols, false, 0.0f);
        tail_masks<pairs>(c.cols, mask);
    }
    const T* row_of(i64 r) const { return (const T*)c.x + r * c.stride; }

    // ---- forward
    void forward() {
        const bool stream = c.rows * c.cols > STREAMED;
        parallel(c.rows, 1, c.threads, [&](i64 a, i64 b) {
            for (i64 r = a; r < b; r++)
                rows_forward(row_of(r), (Y*)c.y + r * c.cols, r, r + 1 < b ? row_of(r + 1) : row_of(r),
                             stream);
        });
        if (stream) fence();
    }
    void band(i64 begin, i64 end, Y* y, bool again) const {
        for (i64 r = begin; r < end; r++) {
            const T *x = row_of(r), *next = r + 1 < end ? row_of(r + 1) : x;
            const float mean = c.mean ? c.mean[r] : 0.0f, rstd = c.rstd[r];
            // A NaN is kept without its sign and payload, so it is found anew.
            if (again && mean == mean && rstd == rstd)
                row_out(x, y + (r - begin) * c.cols, mean, rstd, next, false);
            else
                rows_forward(x, y + (r - begin) * c.cols, r, next, false);
        }
    }
    void row_out(const T* x, Y* y, float mean, float rstd, const T* next, bool stream) const {
        if (c.bias)
            rows_out<true>(x, y, mean, rstd, next, stream && aligned(y));
        else
            rows_out<false>(x, y, mean, rstd, next, stream && aligned(y));
    }
    void rows_forward(const T* x, Y* y, i64 r, const T* next, bool stream) const {
        float mean = 0.0f;
        if (c.mean) {
            VF acc[VECTORS] = {};
            each_chunk<D, pairs>(x, c.cols, [&](VF* v, i64, bool) {
                for (int j = 0; j < VECTORS; j++) acc[j] = acc[j] + v[j];
            });
            mean = add_halves<pairs>(acc) / float(c.cols);
            c.mean[r] = mean == mean ? mean : bits<float>(0x7fc00000);
        }
        VF acc[VECTORS] = {};
        each_chunk<D, pairs>(x, c.cols, [&](VF* v, i64, bool padded) {
            for (int j = 0; j < VECTORS; j++) {
                const VF centered = v[j] - all(mean), square = centered * centered;
                acc[j] = acc[j] + (padded ? (VF)((VI)square & mask[j]) : square);
            }
        });
        const float variance = add_halves<pairs>(acc) / float(c.cols) + c.eps, rstd = 1.0f / sqrtf(variance);
        c.rstd[r] = rstd == rstd ? rstd : bits<float>(0x7fc00000);
        row_out(x, y, mean, rstd, next, stream);
    }
    template <bool Bias>
    INLINE void rows_out(const NormKernel& n, const T* x, Y* y, float mean, float rstd, const T* next,
                         bool stream) {
        each_chunk<D, pairs>(x, n.c.cols, [&](VF* v, i64 k, bool) {
            for (i64 i = 0; i < i64(CHUNK * sizeof(T)); i += 64)
                __builtin_prefetch((const u8*)(next + k) + i);
            for (int j = 0; j < VECTORS; j++) {
                v[j] = ((v[j] - all(mean)) * all(rstd)) * load<VF>(n.gamma + k + j * W);
                if (Bias) v[j] = v[j] + load<VF>(n.bias + k + j * W);
            }
            store_chunk<DY, pairs>(y + k, v, n.c.cols - k, stream);
        });
    }
    template <bool Bias>
    void rows_out(const T* x, Y* y, float mean, float rstd, const T* next, bool stream) const {
        rows_out<Bias>(*this, x, y, mean, rstd, next, stream);
    }

    // ---- backward: y is dy
    void backward() {
        const i64 width = whole_chunks(c.cols) * CHUNK, blocks = (c.rows + ROW_BLOCK - 1) / ROW_BLOCK;
        const bool stream = c.rows * c.cols > STREAMED;
        Array<float> of_weight(c.dweight ? blocks * width : 0), of_bias(c.dbias ? blocks * width : 0);
        parallel(blocks, 1, c.threads, [&](i64 a, i64 b) {
            for (i64 block = a; block < b; block++) {
                float* w = c.dweight ? of_weight + block * width : nullptr;
                float* s = c.dbias ? of_bias + block * width : nullptr;
                if (w) memset(w, 0, sizeof(float) * size_t(width));
                if (s) memset(s, 0, sizeof(float) * size_t(width));
                const i64 end = (block + 1) * ROW_BLOCK < c.rows ? (block + 1) * ROW_BLOCK : c.rows;
                for (i64 r = block * ROW_BLOCK; r < end; r++) row_backward(r, w, s, stream);
            }
        });
        if (c.dweight) add_blocks<pairs>(of_weight, blocks, c.cols, c.dweight, c.weight_dtype, c.threads);
        if (c.dbias) add_blocks<pairs>(of_bias, blocks, c.cols, c.dbias, c.bias_dtype, c.threads);
        if (stream) fence();
    }
    INLINE void dy_chunk(const NormKernel& n, const Y* dy, i64 k, VF g[VECTORS]) {
        if (k + CHUNK <= n.c.cols) return load_chunk<DY, pairs>(dy + k, g);
        Y t[CHUNK] = {};
        memcpy(t, dy + k, sizeof(Y) * size_t(n.c.cols - k));
        load_chunk<DY, pairs>(t, g);
    }
    void row_backward(i64 r, float* of_weight, float* of_bias, bool stream) const {
        const T* x = row_of(r);
        const Y* dy = (const Y*)c.y + r * c.y_stride;
        T* dx = (T*)c.dx + r * c.cols;
        const VF mean = all(c.mean ? c.mean[r] : 0.0f), rstd = all(c.rstd[r]);
        VF along[VECTORS] = {}, sum[VECTORS] = {}, grad[VECTORS];
        each_chunk<D, pairs>(x, c.cols, [&](VF* v, i64 k, bool padded) {
            dy_chunk(*this, dy, k, grad);
            for (int j = 0; j < VECTORS; j++) {
                const VF g = grad[j] * load<VF>(gamma + k + j * W), product = g * ((v[j] - mean) * rstd);
                along[j] = along[j] + (padded ? (VF)((VI)product & mask[j]) : product);
                if (c.mean) sum[j] = sum[j] + (padded ? (VF)((VI)g & mask[j]) : g);
            }
        });
        const VF m1 = all(add_halves<pairs>(along) / float(c.cols));
        // Adding -0 changes nothing.
        const VF m2 = all(c.mean ? add_halves<pairs>(sum) / float(c.cols) : -0.0f);
        stream = stream && aligned(dx);
        each_chunk<D, pairs>(x, c.cols, [&](VF* v, i64 k, bool) {
            dy_chunk(*this, dy, k, grad);
            for (int j = 0; j < VECTORS; j++) {
                const VF n = (v[j] - mean) * rstd, g = grad[j] * load<VF>(gamma + k + j * W);
                v[j] = (g - (n * m1 + m2)) * rstd;
                float *w = of_weight + k + j * W, *s = of_bias + k + j * W;
                if (of_weight) store(w, load<VF>(w) + grad[j] * n);
                if (of_bias) store(s, load<VF>(s) + grad[j]);
            }
            store_chunk<D, pairs>(dx + k, v, c.cols - k, stream);
        });
    }
};

// ---- sums over rows
template <class D>
static void sum_rows(const NormCall& c) {
    using T = typename D::T;
    const i64 width = whole_chunks(c.cols) * CHUNK, blocks = (c.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    constexpr int together = 4;  // rows for one pass over the sums
    Array<float> partial(blocks * width);
    parallel(blocks, 1, c.threads, [&](i64 a, i64 b) {
        for (i64 block = a; block < b; block++) {
            float* sums = partial + block * width;
            memset(sums, 0, sizeof(float) * size_t(width));
            const i64 end = (block + 1) * ROW_BLOCK < c.rows ? (block + 1) * ROW_BLOCK : c.rows;
            for (i64 r = block * ROW_BLOCK; r < end; r += together) {
                const T* x = (const T*)c.x + r * c.stride;
                const int rows = int(end - r < together ? end - r : together);
                each_chunk<D, D::pairs>(x, c.cols, [&](VF* v, i64 k, bool padded) {
                    VF acc[VECTORS];
                    for (int j = 0; j < VECTORS; j++) acc[j] = load<VF>(sums + k + j * W) + v[j];
                    for (int i = 1; i < rows; i++) {
                        const T* p = x + i * c.stride + k;
                        T t[CHUNK] = {};
                        if (padded) memcpy(t, p, sizeof(T) * size_t(c.cols - k));
                        load_chunk<D, D::pairs>(padded ? t : p, v);
                        for (int j = 0; j < VECTORS; j++) acc[j] = acc[j] + v[j];
                    }
                    for (int j = 0; j < VECTORS; j++) store(sums + k + j * W, acc[j]);
                });
            }
        }
    });
    add_blocks<D::pairs>(partial, blocks, c.cols, c.y, D::id, c.threads);
}

template <class D, class DY>
static void forward_or_backward(const NormCall& c) {
    if (c.dx)
        NormKernel<D, DY>(c).backward();
    else
        NormKernel<D, DY>(c).forward();
}
template <class D>
void norm_as(const NormCall& c) {
    if (c.y_dtype == F32)
        forward_or_backward<D, Float32>(c);
    else if (c.y_dtype == BF16)
        forward_or_backward<D, Bfloat16>(c);
    else
        forward_or_backward<D, Float16>(c);
}
template <class D>
void sum_rows_as(const NormCall& c) {
    sum_rows<D>(c);
}

template <class D, class DY>
struct NormProducer : Producer {
    NormKernel<D, DY> norm;
    explicit NormProducer(const NormCall& c) : norm(c) {}
    void rows(i64 begin, i64 end, void* out, bool again) override {
        norm.band(begin, end, (typename DY::T*)out, again);
    }
};
template <class D>
std::unique_ptr<Producer> norm_rows_as(const NormCall& c) {
    if (c.y_dtype == F32) return std::make_unique<NormProducer<D, Float32>>(c);
    if (c.y_dtype == BF16) return std::make_unique<NormProducer<D, Bfloat16>>(c);
    return std::make_unique<NormProducer<D, Float16>>(c);
}

template std::unique_ptr<Producer> norm_rows_as<QT_DTYPE>(const NormCall&);
template void norm_as<QT_DTYPE>(const NormCall&);
template void sum_rows_as<QT_DTYPE>(const NormCall&);

}  // namespace QT_NAMESPACE
