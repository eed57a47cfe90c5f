"""Device functions: float32 arithmetic with fixed rounding (docs/numerics.md, norms)."""

from __future__ import annotations

import triton
import triton.language as tl

from qtensor.kernels.triton.common import round_bfloat16, to_float32
from qtensor.kernels.triton.elements import as_bits, as_float, reciprocal

LANES = tl.constexpr(128)
"""Number of partial sums of a row."""
ROW_BLOCK = tl.constexpr(64)
"""Number of rows in a block of a sum over rows: blocks are summed first, then their sums."""


@triton.jit
def add_halves(lanes):
    """Add (M, 128) lanes to (M,): lane i plus lane i + 64, then 32, ..., 1.

    Each step adds two numbers, so the order is fixed.
    """
    M: tl.constexpr = lanes.shape[0]
    lanes = tl.sum(tl.reshape(lanes, (M, 2, 64)), 1)
    lanes = tl.sum(tl.reshape(lanes, (M, 2, 32)), 1)
    lanes = tl.sum(tl.reshape(lanes, (M, 2, 16)), 1)
    lanes = tl.sum(tl.reshape(lanes, (M, 2, 8)), 1)
    lanes = tl.sum(tl.reshape(lanes, (M, 2, 4)), 1)
    lanes = tl.sum(tl.reshape(lanes, (M, 2, 2)), 1)
    return tl.sum(lanes, 1)


@triton.jit
def rounded(values, element_type: tl.constexpr):
    """Round float32 values once to the type of a buffer, with one pattern for NaN.

    int16 holds the bits of bfloat16.
    """
    if element_type == tl.int16:
        return round_bfloat16(values).to(tl.int16)
    elif element_type == tl.float16:
        bits = values.to(tl.float16).to(tl.int16, bitcast=True)
        bits = tl.where(values != values, 0x7E00, bits.to(tl.int32)).to(tl.int16)
        return bits.to(tl.float16, bitcast=True)
    else:
        return as_float(tl.where(values != values, 0x7FC00000, as_bits(values)))


@triton.jit
def through(values, DTYPE: tl.constexpr):
    """Round float32 values to a dtype and convert them back."""
    if DTYPE == "bfloat16":
        return to_float32(round_bfloat16(values).to(tl.int16))
    elif DTYPE == "float16":
        return values.to(tl.float16).to(tl.float32)
    else:
        return values


@triton.jit
def exp_nonpositive(v):
    """Return the exponential of v <= 0; NaN for NaN."""
    v = tl.where(v < -104.0, -104.0, v)
    shifted = v * 1.4426950216293335 + 12582912.0
    n = shifted - 12582912.0
    r = (v - n * 0.693359375) - n * -0.00021219444170128554
    square = r * r
    high = square * 0.0013814596459269524 + (r * 0.0083687175065279 + 0.04166838899254799)
    low = r * 0.1666652113199234 + 0.4999999403953552
    p = ((high * square + low) * square + r) + 1.0
    exponent = as_bits(shifted) - 0x4B400000
    half = exponent >> 1
    return p * as_float((half + 127) << 23) * as_float((exponent - half + 127) << 23)


@triton.jit
def exp2(v):
    """Return 2^v for v <= 0: 0 below -96, NaN for NaN (docs/numerics.md, attention)."""
    clamped = tl.where(v < -96.0, -96.0, v)
    shifted = clamped + 12582912.0
    f = clamped - (shifted - 12582912.0)
    y = tl.zeros_like(f) + 0.00015353356138803065
    y = tl.fma(y, f, tl.zeros_like(f) + 0.0013398876180872321)
    y = tl.fma(y, f, tl.zeros_like(f) + 0.009618437848985195)
    y = tl.fma(y, f, tl.zeros_like(f) + 0.055503323674201965)
    y = tl.fma(y, f, tl.zeros_like(f) + 0.24022647738456726)
    y = tl.fma(y, f, tl.zeros_like(f) + 0.6931471824645996)
    y = tl.fma(y, f, tl.zeros_like(f) + 1.0)
    power = as_float((as_bits(shifted) - 0x4B400000 + 127) << 23)
    return tl.where(v < -96.0, 0.0, y * power)


@triton.jit
def sigmoid(v):
    """Return the sigmoid and its derivative."""
    z = exp_nonpositive(as_float(as_bits(v) | -0x80000000))
    above = reciprocal(1.0 + z)
    below = z * above
    return tl.where(v < 0.0, below, above), below * above


@triton.jit
def argument(x, ACT: tl.constexpr):
    """Return the argument of the sigmoid in activation ``ACT``."""
    if ACT == "gelu":
        return x * (1.595769166946411 + 0.07135481387376785 * (x * x))
    elif ACT == "qgelu":
        return x * 1.7020000219345093
    else:
        return x


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Return an activation without a gate."""
    if ACT == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif ACT == "srelu":
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive * positive
    elif ACT == "sigmoid":
        value, _ = sigmoid(x)
        return value
    else:
        low = tl.where(x < -128.0, -128.0, x)
        value, _ = sigmoid(argument(low, ACT))
        return low * value


@triton.jit
def clamped(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Clamp values between two bounds; NaN stays NaN."""
    x = tl.where(x < LOW, LOW, x)
    return tl.where(x > HIGH, HIGH, x)


@triton.jit
def clamped_silu(x, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BOUND: tl.constexpr):
    """Return the activated first half of ``clamped_swiglu`` and its derivative."""
    gate = clamped(x, -BOUND, LIMIT)
    v = gate * ALPHA
    value, slope = sigmoid(v)
    return gate * value, tl.where(x > LIMIT, 0.0, value + v * slope)


@triton.jit
def derivative(x, ACT: tl.constexpr):
    """Return the derivative of ``activate``."""
    if ACT == "relu":
        return tl.where(x <= 0.0, 0.0, tl.where(x > 0.0, 1.0, x))
    elif ACT == "srelu":
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive + positive
    elif ACT == "sigmoid":
        _, slope = sigmoid(x)
        return slope
    else:
        x = tl.where(x < -128.0, -128.0, x)
        x = tl.where(x > 128.0, 128.0, x)
        v = argument(x, ACT)
        value, slope = sigmoid(v)
        if ACT == "gelu":
            return value + (x * slope) * (1.595769166946411 + 0.21406444907188416 * (x * x))
        else:
            return value + v * slope
