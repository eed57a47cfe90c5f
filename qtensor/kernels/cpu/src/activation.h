// Activations and their derivatives, gated or not.
#pragma once
#include "row_arithmetic.h"

namespace QT_NAMESPACE {

enum Activation { GELU = 0, QGELU = 1, RELU = 2, SILU = 3, SRELU = 4, SIGMOID = 5, CLAMPED = 6 };

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
    if (A == RELU) {
        const VF one_or_nan = x > VF{} ? all(1.0f) : x;
        return {x <= VF{} ? VF{} : one_or_nan, rectified(x)};
    }
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
    return {s.value + (x * s.slope) * (all(1.595769166946411f) + all(0.21406444907188416f) * (x * x)),
            low * s.value};
}

// x, or the bound where x is above it; NaN stays.
INLINE VF at_most(VF x, float bound) { return x > all(bound) ? all(bound) : x; }

// One vector of a result from those of a and, where there is a gate, b.
template <int A, bool Gated>
INLINE VF value_of(VF a, VF b, const ActivationCall& c) {
    if (A == CLAMPED) {
        const VF gate = at_most(at_least(a, -c.bound), c.limit);
        const VF linear = at_most(at_least(b, -c.limit), c.limit) + all(c.offset);
        return (gate * sigmoid(gate * all(c.alpha)).value) * linear;
    }
    return Gated ? activate<A>(a) * b : activate<A>(a);
}
// The gradients of both, in their place.
template <int A, bool Gated>
INLINE void gradients_of(VF dy, VF& a, VF& b, const ActivationCall& c) {
    if (A == CLAMPED) {
        const VF gate = at_most(at_least(a, -c.bound), c.limit), v = gate * all(c.alpha);
        const VF linear = at_most(at_least(b, -c.limit), c.limit) + all(c.offset);
        const Sigmoid s = sigmoid(v);
        const VF slope = a > all(c.limit) ? VF{} : s.value + v * s.slope;
        a = (dy * linear) * slope;
        const VF magnitude = (VF)((VI)b & all(i32(0x7fffffff)));
        b = magnitude > all(c.limit) ? VF{} : dy * (gate * s.value);
        return;
    }
    const Slope s = derivative<A>(a);
    a = (Gated ? dy * b : dy) * s.slope;
    if (Gated) b = dy * s.value;
}

// f(elements i .. i + GROUP) for a row of n; the last ones through copies padded with zeros.
template <class D, int A>
struct ActivationKernel {
    using T = typename D::T;
    static constexpr bool pairs = D::pairs;
    INLINE void load4(const T* p, VF v[4]) {
        VI r[4];
        D::group(p, r);
        for (int j = 0; j < 4; j++) v[j] = (VF)r[j];
    }
    template <bool Gated>
    INLINE void forward_group(const ActivationCall& c, const T* a, const T* b, T* y, bool stream) {
        VF u[4], v[4] = {};
        load4(a, u);
        if (Gated) load4(b, v);
        for (int j = 0; j < 4; j++) u[j] = value_of<A, Gated>(u[j], v[j], c);
        store_vectors<D, pairs>(y, u, 4, stream);
    }
    template <bool Gated>
    INLINE void backward_group(const ActivationCall& c, const T* dy, const T* a, const T* b, T* da, T* db,
                               bool stream) {
        VF u[4], v[4] = {}, g[4];
        load4(a, u);
        load4(dy, g);
        if (Gated) load4(b, v);
        for (int j = 0; j < 4; j++) gradients_of<A, Gated>(g[j], u[j], v[j], c);
        store_vectors<D, pairs>(da, u, 4, stream);
        if (Gated) store_vectors<D, pairs>(db, v, 4, stream);
    }
    template <bool Gated>
    static void forward(const ActivationCall& c, const T* a, const T* b, T* y, i64 n, bool stream) {
        stream = stream && aligned(y);
        i64 i = 0;
        for (; i + GROUP <= n; i += GROUP) {
            look_ahead<GROUP * sizeof(T)>(a + i);
            if (Gated) look_ahead<GROUP * sizeof(T)>(b + i);
            forward_group<Gated>(c, a + i, b + i, y + i, stream);
        }
        if (i == n) return;
        const size_t rest = sizeof(T) * size_t(n - i);
        T t[3][GROUP] = {};
        memcpy(t[0], a + i, rest);
        if (Gated) memcpy(t[1], b + i, rest);
        forward_group<Gated>(c, t[0], t[1], t[2], false);
        memcpy(y + i, t[2], rest);
    }
    template <bool Gated>
    static void backward(const ActivationCall& c, const T* dy, const T* a, const T* b, T* da, T* db, i64 n,
                         bool stream) {
        stream = stream && aligned(da) && aligned(db);
        i64 i = 0;
        for (; i + GROUP <= n; i += GROUP) {
            look_ahead<GROUP * sizeof(T)>(dy + i);
            look_ahead<GROUP * sizeof(T)>(a + i);
            if (Gated) look_ahead<GROUP * sizeof(T)>(b + i);
            backward_group<Gated>(c, dy + i, a + i, b + i, da + i, db + i, stream);
        }
        if (i == n) return;
        const size_t rest = sizeof(T) * size_t(n - i);
        T t[5][GROUP] = {};
        memcpy(t[0], dy + i, rest);
        memcpy(t[1], a + i, rest);
        if (Gated) memcpy(t[2], b + i, rest);
        backward_group<Gated>(c, t[0], t[1], t[2], t[3], t[4], false);
        memcpy(da + i, t[3], rest);
        if (Gated) memcpy(db + i, t[4], rest);
    }
};

}  // namespace QT_NAMESPACE
