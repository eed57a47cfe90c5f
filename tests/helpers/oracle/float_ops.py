"""Norms, activations and bias gradients in numpy, element by element where an order matters: what
docs/numerics.md says.
"""

import numpy as np

F = np.float32
LANES, ROW_BLOCK = 128, 64
COEFFICIENTS = [0x3AB51218, 0x3C091CF2, 0x3D2AAC79, 0x3E2AAA49, 0x3EFFFFFE]


def row_sum(row):
    """One float32 row, lane by lane."""
    lanes = [F(0)] * LANES
    for k, value in enumerate(row):
        lanes[k % LANES] = F(lanes[k % LANES] + value)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [F(a + b) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


def column_sum(values):
    """(M, K) to (K,)."""
    total = np.zeros(values.shape[1], F)
    for start in range(0, len(values), ROW_BLOCK):
        block = np.zeros(values.shape[1], F)
        for row in values[start : start + ROW_BLOCK]:
            block = block + row
        total = total + block
    return total


def mean(values):
    return np.array([[row_sum(row) / F(len(row))] for row in values], F).reshape(-1, 1)


def norm(x, gamma, bias, kind, eps):
    """y, mean, rstd of a float32 (M, K)."""
    average = mean(x) if kind == "layernorm" else None
    centered = x if average is None else x - average
    rstd = F(1) / np.sqrt(mean(centered * centered) + F(eps))
    y = centered * rstd
    y = y if gamma is None else y * gamma
    return (y if bias is None else y + bias), average, rstd


def norm_backward(dy, x, gamma, average, rstd):
    """dx, and the rows' contributions to the gradients of weight and bias summed up."""
    n = (x if average is None else x - average) * rstd
    g = dy if gamma is None else dy * gamma
    away = n * mean(g * n)
    away = away if average is None else away + mean(g)
    return (g - away) * rstd, column_sum(dy * n), column_sum(dy)


def exp(v):
    """Of float32 <= 0."""
    v = np.where(v < -104, F(-104), v)
    n = (v * F(1.442695) + F(1.5 * 2**23)) - F(1.5 * 2**23)
    r = (v - n * F(355 / 512)) - n * F(-2.12194442e-4)
    c = np.array(COEFFICIENTS, np.uint32).view(F)
    r2 = r * r
    q = (r2 * c[0] + (r * c[1] + c[2])) * r2 + (r * c[3] + c[4])
    p = (q * r2 + r) + F(1)
    return np.ldexp(p, np.nan_to_num(n).astype(np.int32))


def sigmoid(v):
    z = exp(-np.abs(v))
    above = F(1) / (F(1) + z)
    below = z * above
    return np.where(v < 0, below, above), below * above


def clamped_swiglu(a, b, dy, alpha, limit, offset):
    """The activation, and the gradients of both halves."""
    alpha, limit, offset = F(alpha), F(limit), F(offset)
    bound = F(128) / alpha
    g = np.where(a < -bound, -bound, a)
    g = np.where(g > limit, limit, g)
    clipped = np.where(b < -limit, -limit, b)
    clipped = np.where(clipped > limit, limit, clipped) + offset
    v = g * alpha
    s, slope = sigmoid(v)
    da = (dy * clipped) * np.where(a > limit, F(0), s + v * slope)
    db = np.where(np.abs(b) > limit, F(0), dy * (g * s))
    return (g * s) * clipped, da, db


C1, C2, C3 = F(1.5957691216), F(0.0713548162), F(0.2140644488)


def activate(x, kind):
    """The activation and its derivative."""
    if kind in ("relu", "srelu"):
        r = np.where(x <= 0, F(0), x)
        step = np.where(x > 0, F(1), r)
        return (r, step) if kind == "relu" else (r * r, r + r)
    if kind == "sigmoid":
        return sigmoid(x)
    low = np.where(x < -128, F(-128), x)
    both = np.where(low > 128, F(128), low)

    def argument(t):
        if kind == "gelu":
            return t * (C1 + C2 * (t * t))
        return t * F(1.702) if kind == "qgelu" else t

    value = low * sigmoid(argument(low))[0]
    v = argument(both)
    s, slope = sigmoid(v)
    if kind == "gelu":
        return value, s + (both * slope) * (C1 + C3 * (both * both))
    return value, s + v * slope
