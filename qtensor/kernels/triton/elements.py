"""Device functions for element codes and block factors, in integer arithmetic.

A float8 cast follows the rounding rules of the GPU, and Triton's interpreter rounds it wrongly.
Codes are therefore built from the bits of the float32 value: one integer rounding if the code is
normal, one magic addition if it is subnormal. Compile-time constants describe an element: its
``EXPONENT`` and ``MANTISSA`` bits and ``LARGEST``, the float32 bits of its largest finite value.
All values are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qtensor.core.formats import Element
from qtensor.kernels.triton.common import float_bits


def element_constants(element: Element) -> dict[str, int]:
    """Return the constants that describe an element, as keyword arguments of a kernel."""
    return {
        "EXPONENT": element.exponent_bits,
        "MANTISSA": element.mantissa_bits,
        "LARGEST": float_bits(element.max),
    }


@triton.jit
def as_bits(values):
    """Return the bits of float32 values, int32."""
    return values.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """Return float32 values from their bits, int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(values):
    """Return the bits of |values|.

    As integers they have the order of magnitudes, inf and NaN on top.
    """
    return as_bits(values) & 0x7FFFFFFF


@triton.jit
def finite_bits(bits):
    """Replace NaN by 0 and inf by the largest finite float32, in bits of magnitudes."""
    return tl.where(bits > 0x7F800000, 0, tl.minimum(bits, 0x7F7FFFFF))


@triton.jit
def encode(
    values, KEEP_ZERO_SIGN: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Return int32 codes of values: nearest, ties to even, saturating; NaN is 0x7F (FP8) or 0.

    If ``KEEP_ZERO_SIGN``, -0.0 gets the code of -0, otherwise 0.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    MIN_EXPONENT: tl.constexpr = 2 - (1 << (EXPONENT - 1))
    MAGIC: tl.constexpr = (MIN_EXPONENT - MANTISSA + 23 + 127) << 23
    NAN: tl.constexpr = 0x7F if EXPONENT + MANTISSA == 7 else 0
    magnitude = magnitude_bits(values)
    bits = tl.minimum(magnitude, LARGEST)
    half = ((1 << (SHIFT - 1)) - 1) - ((MIN_EXPONENT + 126) << 23)
    normal = (bits + half + ((bits >> SHIFT) & 1)) >> SHIFT
    # Adding 2^23 steps of the subnormal grid rounds to that grid.
    subnormal = as_bits(as_float(bits) + tl.full([], MAGIC, tl.int32).to(tl.float32, bitcast=True))
    codes = tl.where(bits < ((MIN_EXPONENT + 127) << 23), subnormal - MAGIC, normal)
    negative = as_bits(values) < 0 if KEEP_ZERO_SIGN else values < 0.0
    codes = codes | (negative.to(tl.int32) << (EXPONENT + MANTISSA))
    return tl.where(magnitude > 0x7F800000, NAN, codes)


@triton.jit
def encode_e4m3(values):
    """Return E4M3 codes, int32."""
    return encode(values, True, 4, 3, 0x43E00000)


@triton.jit
def decode(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the exact values of codes of any integer type."""
    codes = codes.to(tl.int32)
    WIDTH: tl.constexpr = EXPONENT + MANTISSA
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    magnitude = codes & ((1 << WIDTH) - 1)
    # Read as a float32, the fields have the wrong exponent bias. One exact product by a power of
    # two corrects it, for subnormals too.
    power = tl.full([], (127 + 127 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    bits = as_bits(as_float(magnitude << (23 - MANTISSA)) * power)
    if WIDTH == 7 and MANTISSA == 3:
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    if WIDTH == 7 and MANTISSA == 2:
        bits = tl.where(magnitude == 0x7C, 0x7F800000, bits)
        bits = tl.where(magnitude > 0x7C, 0x7FC00000, bits)
    return as_float(bits | (((codes >> WIDTH) & 1) << 31))


@triton.jit
def e8m0_code(amax, MODE: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """Return int32 E8M0 codes of block maxima given as bits; 255 if a maximum is not finite."""
    if MODE == "rceil":
        largest = tl.full([], LARGEST, tl.int32).to(tl.float32, bitcast=True)
        ratio = as_bits(tl.div_rn(as_float(amax), tl.zeros_like(as_float(amax)) + largest))
        # A ratio of at most 2^-127 counts as 0, whose code means 2^-127; any mantissa bit carries.
        code = (tl.where(ratio <= 0x400000, 0, ratio) + 0x7FFFFF) >> 23
    else:
        BIAS: tl.constexpr = (
            0 if MODE == "floor" else (0x7FFFFF if MODE == "ceil" else 1 << (22 - MANTISSA))
        )
        MAX_EXPONENT: tl.constexpr = (LARGEST >> 23) - 127
        code = tl.maximum(((amax & 0x7FFFFFFF) + BIAS >> 23) - MAX_EXPONENT, 0)
    return tl.where(amax >= 0x7F800000, 255, code)


@triton.jit
def e8m0_factor(code):
    """Return ``2^(code - 127)`` for int32 codes: 0 gives the subnormal 2^-127, 255 NaN."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return as_float(tl.where(code == 255, 0x7FC00000, bits))


@triton.jit
def fp8_scale(amax, epsilon, overflow, POWER_OF_TWO: tl.constexpr, LARGEST: tl.constexpr):
    """Return encode scales ``largest / amax`` of maxima given as bits; 1 for 0, inf and NaN."""
    known = as_float(tl.where(amax >= 0x7F800000, 0, amax))
    known = tl.maximum(known, epsilon, propagate_nan=tl.PropagateNan.ALL)
    known = tl.where(known > 0.0, known, 1.0)
    largest = tl.full([], LARGEST, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.zeros_like(known) + largest, known)
    scale = tl.where(as_bits(scale) == 0x7F800000, overflow, scale)
    lost = (amax >= 0x7F800000) | ((amax == 0) & (epsilon <= 0.0))
    scale = tl.where(lost, 1.0, scale)
    return as_float(as_bits(scale) & 0x7F800000) if POWER_OF_TWO else scale


@triton.jit
def reciprocal(values):
    """Return the IEEE quotient 1 / values."""
    return tl.div_rn(tl.zeros_like(values) + 1.0, values)
