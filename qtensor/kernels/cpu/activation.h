// Activations and their derivatives, gated or not.
#pragma once
#include "floats.h"

namespace QT_NAMESPACE {

enum Activation { GELU = 0, QGELU = 1, RELU = 2, SILU = 3, SRELU = 4, SIGMOID = 5 };

template <int A>
INLINE VF argument(VF x) {
    if (A == GELU) return x * (all(1.595769166946411f) + all(0.07135481387376785f) * (x * x));
    return A == QGELU ? x * all(1.7020000219345093f) : x;
}
INLINE VF rectified(VF x) { return x <= VF{} ? VF{} : x; }

template <int A>
INLINE VF activate(VF x) {
    if (A == RELU) return rectified(x);
    if (A == SRELU) return rectified(x) * rectified(x);
    if (A == SIGMOID) return sigmoid(x).value;
    x = at_least(x, -128.0f);
    return x * sigmoid(argument<A>(x)).value;
}
// The derivative; the activation too where there is a gate.
struct Slope {
    VF slope, value;
};
template <int A>
INLINE Slope derivative(VF x) {
    if (A == RELU) return {x <= VF{} ? VF{} : x > VF{} ? all(1.0f) : x, rectified(x)};
    if (A == SRELU) return {rectified(x) + rectified(x), rectified(x) * rectified(x)};
    if (A == SIGMOID) {
        Sigmoid s = sigmoid(x);
        return {s.slope, s.value};
    }
    const VF low = at_least(x, -128.0f);
    x = low > all(128.0f) ? all(128.0f) : low;
    const VF v = argument<A>(x);
    const Sigmoid s = sigmoid(v);
    // Beyond 128 the sigmoid is what it is at 128.
    if (A != GELU) return {s.value + v * s.slope, low * s.value};
    return {s.value + (x * s.slope) * (all(1.595769166946411f) + all(0.21406444907188416f) * (x * x)), low * s.value};
}

// f(elements i .. i + GROUP) for a row of n; the last ones through copies padded with zeros.
template <class D, int A>
struct Rows {
    using T = typename D::T;
    static constexpr bool pairs = D::pairs;
    INLINE void load4(const T* p, VF v[4]) {
        VI r[4];
        D::group(p, r);
        for (int j = 0; j < 4; j++) v[j] = (VF)r[j];
    }
    template <bool Gated>
    INLINE void forward_group(const T* a, const T* b, T* y, bool stream) {
        VF u[4], v[4];
        load4(a, u);
        for (int j = 0; j < 4; j++) u[j] = activate<A>(u[j]);
        if (Gated) {
            load4(b, v);
            for (int j = 0; j < 4; j++) u[j] = u[j] * v[j];
        }
        store_vectors<D, pairs>(y, u, 4, stream);
    }
    template <bool Gated>
    INLINE void backward_group(const T* dy, const T* a, const T* b, T* da, T* db, bool stream) {
        VF u[4], v[4], g[4];
        load4(a, u);
        load4(dy, g);
        if (Gated) load4(b, v);
        for (int j = 0; j < 4; j++) {
            const Slope s = derivative<A>(u[j]);
            u[j] = (Gated ? g[j] * v[j] : g[j]) * s.slope;
            if (Gated) v[j] = g[j] * s.value;
        }
        store_vectors<D, pairs>(da, u, 4, stream);
        if (Gated) store_vectors<D, pairs>(db, v, 4, stream);
    }
    template <bool Gated>
    static void forward(const T* a, const T* b, T* y, i64 n, bool stream) {
        stream = stream && aligned(y);
        i64 i = 0;
        for (; i + GROUP <= n; i += GROUP) {
            look_ahead<GROUP * sizeof(T)>(a + i);
            if (Gated) look_ahead<GROUP * sizeof(T)>(b + i);
            forward_group<Gated>(a + i, b + i, y + i, stream);
        }
        if (i == n) return;
        const size_t rest = sizeof(T) * size_t(n - i);
        T t[3][GROUP] = {};
        memcpy(t[0], a + i, rest);
        if (Gated) memcpy(t[1], b + i, rest);
        forward_group<Gated>(t[0], t[1], t[2], false);
        memcpy(y + i, t[2], rest);
    }
    template <bool Gated>
    static void backward(const T* dy, const T* a, const T* b, T* da, T* db, i64 n, bool stream) {
        stream = stream && aligned(da) && aligned(db);
        i64 i = 0;
        for (; i + GROUP <= n; i += GROUP) {
            look_ahead<GROUP * sizeof(T)>(dy + i);
            look_ahead<GROUP * sizeof(T)>(a + i);
            if (Gated) look_ahead<GROUP * sizeof(T)>(b + i);
            backward_group<Gated>(dy + i, a + i, b + i, da + i, db + i, stream);
        }
        if (i == n) return;
        const size_t rest = sizeof(T) * size_t(n - i);
        T t[5][GROUP] = {};
        memcpy(t[0], dy + i, rest);
        memcpy(t[1], a + i, rest);
        if (Gated) memcpy(t[2], b + i, rest);
        backward_group<Gated>(t[0], t[1], t[2], t[3], t[4], false);
        memcpy(da + i, t[3], rest);
        if (Gated) memcpy(db + i, t[4], rest);
    }
};

}  // namespace QT_NAMESPACE
