"""Float32 arithmetic with fixed rounding: ordered sums, and exp and sigmoid without libm.

torch's own reductions and transcendental functions differ in bits between devices, versions, shapes
and thread counts. Elementwise additions, multiplications and divisions are IEEE everywhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.reference.constants import constant
from qtensor.reference.scaling import quotient

LANES = 128
"""Number of partial sums of a row: element k of a row is added to lane k % LANES."""
ROW_BLOCK = 64
"""Number of rows in a block of a sum over rows: blocks are summed first, then their sums."""

EXP_COEFFICIENTS = (
    0.0013814596459269524,
    0.0083687175065279,
    0.04166838899254799,
    0.1666652113199234,
    0.4999999403953552,
)
"""Coefficients of q in exp(r) = 1 + r + r^2 q(r) for |r| <= ln(2) / 2, highest power first.

A minimax fit; its error is 0.07 ulp in exact arithmetic.
"""
LOG2_E = 1.4426950216293335
LN2_HIGH = 0.693359375
"""ln(2) rounded to 9 bits, so that its multiples by up to 2^15 are exact."""
LN2_LOW = -0.00021219444170128554
"""ln(2) - LN2_HIGH."""
EXP_LEAST = -104.0
"""In float32, exp of this value and of every smaller value is 0."""
_MAGIC = 12582912.0
"""1.5 * 2^23. Float32 numbers of this size have no fraction, so adding this constant to a smaller
float32 rounds it to an integer, ties to even."""
_MAGIC_BITS = 0x4B400000
"""The bits of `_MAGIC`: (v + _MAGIC) has these bits plus the integer."""


def row_sums(values: Tensor) -> Tensor:
    """Return the sum of each row, (M, 1), of (M, K) float32 values.

    Lane i adds the elements i, i + 128, ... to +0 in this order. Then the second half of the lanes
    is added to the first half, until one lane is left.
    """
    lanes = F.pad(values, (0, -values.shape[1] % LANES)).unflatten(1, (-1, LANES))
    sums = values.new_zeros(values.shape[0], LANES)
    for chunk in range(lanes.shape[1]):
        sums += lanes[:, chunk]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums


def column_sums(values: Tensor) -> Tensor:
    """Return the sum of each column, (K,), of (M, K) float32 values.

    The rows of each block of ``ROW_BLOCK`` rows are added to +0 in order, then the sums of the
    blocks are.
    """
    blocks = F.pad(values, (0, 0, 0, -values.shape[0] % ROW_BLOCK)).unflatten(0, (-1, ROW_BLOCK))
    partial = values.new_zeros(blocks.shape[0], values.shape[1])
    for row in range(ROW_BLOCK):
        partial += blocks[:, row]
    total = values.new_zeros(values.shape[1])
    for block in partial:
        total += block
    return total


def exp_nonpositive(v: Tensor) -> Tensor:
    """Return the exponential of float32 ``v`` <= 0 of any shape; NaN for NaN.

    The error is at most 1 ulp (2^-149 if the result is subnormal).

    ``v`` is reduced by the nearest multiple of ln(2), held in two parts (Cody and Waite, 1980). A
    polynomial follows, by Estrin's scheme, whose two halves are independent of each other. The
    power of two is applied as a product of two normal numbers.
    """
    v = torch.where(v < EXP_LEAST, EXP_LEAST, v)
    shifted = v * LOG2_E + _MAGIC
    n = shifted - _MAGIC
    r = (v - n * LN2_HIGH) - n * LN2_LOW
    c4, c3, c2, c1, c0 = EXP_COEFFICIENTS
    square = r * r
    high = square * c4 + (r * c3 + c2)
    exp_r = ((high * square + (r * c1 + c0)) * square + r) + 1.0
    exponent = shifted.view(torch.int32) - _MAGIC_BITS  # n as an integer
    half = exponent >> 1
    return exp_r * _power(half) * _power(exponent - half)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``a * b + c`` of float32 tensors, which broadcast, rounded once.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, 2008), so
    that rounding it to float32 gives the same as rounding the exact sum. The error of the sum comes
    from TwoSum (Knuth, 1969).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    bits = total.view(torch.int64)
    inexact = (error != 0) & total.isfinite() & (bits & 1 == 0)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64).float()


EXP2_COEFFICIENTS = (
    0.00015353356138803065,
    0.0013398876180872321,
    0.009618437848985195,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
    1.0,
)
"""Coefficients of 2^f for |f| <= 1/2, highest power first; the error of ``exp2`` is 0.94 ulp."""
EXP2_LEAST = -96.0
"""``exp2`` of smaller values is 0, so that no result is subnormal."""


def exp2(v: Tensor) -> Tensor:
    """Return 2^v for float32 ``v`` <= 0 of any shape: 0 below ``EXP2_LEAST``, NaN for NaN.

    Horner's rule with fused steps, times a power of two.
    """
    clamped = torch.where(v < EXP2_LEAST, EXP2_LEAST, v)
    n = clamped.round()
    f = clamped - n
    y = torch.full_like(f, EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        y = fused_multiply_add(y, f, constant(coefficient, v.device))
    return torch.where(v < EXP2_LEAST, 0.0, y * _power(n.nan_to_num(nan=0.0).to(torch.int32)))


def _power(n: Tensor) -> Tensor:
    """Return 2^n for int32 ``n`` in -126..127; any float32 for other ``n``.

    Other ``n`` come only from NaN, for which the caller's product is NaN whatever this returns.
    """
    return ((n + 127) << 23).view(torch.float32)


def square_root(v: Tensor) -> Tensor:
    """Return the correctly rounded square root of float32 ``v`` of any shape.

    torch's float32 square root is not correctly rounded on a CPU with MKL. The exact root of a
    float32 is at least 2^-50 (relative) away from the points where rounding to float32 changes, so
    a float64 root that is nearly right rounds to the right float32.
    """
    return v.double().sqrt().to(torch.float32)


class Sigmoid(NamedTuple):
    """``value``: sigmoid(v); ``slope``: its derivative. Both float32 like v."""

    value: Tensor
    slope: Tensor


def sigmoid(v: Tensor) -> Sigmoid:
    """Return the sigmoid and its derivative for float32 ``v`` of any shape.

    Both use exp(-|v|), which neither overflows nor cancels. Errors: at most 2.7 and 4.5 ulp.
    """
    z = exp_nonpositive(-v.abs())
    of_abs = quotient(1.0, 1.0 + z)  # sigmoid(|v|)
    of_minus_abs = z * of_abs  # sigmoid(-|v|)
    return Sigmoid(torch.where(v < 0, of_minus_abs, of_abs), of_minus_abs * of_abs)


def write_(out: Tensor, values: Tensor) -> None:
    """Round float32 ``values`` to the dtype of ``out`` (same shape), and write one NaN pattern.

    The bits of a NaN that ``copy_`` rounds depend on the cast and the device.
    """
    out.copy_(values)
    out.masked_fill_(values.isnan(), math.nan)
