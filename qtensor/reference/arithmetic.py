"""Float32 arithmetic whose every rounding is fixed: sums in one order, exp and sigmoid from multiplications and additions.

torch's own reductions and transcendental functions differ in bits between devices, versions, shapes and thread counts.
Elementwise additions, multiplications and divisions are IEEE everywhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.reference.scaling import quotient

LANES = 128
"""Partial sums of a row: element k of a row goes to lane k % LANES."""
ROW_BLOCK = 64
"""Rows that a sum over rows adds up before it adds their sum to those of other blocks."""

EXP_COEFFICIENTS = (
    0.0013814596459269524,
    0.0083687175065279,
    0.04166838899254799,
    0.1666652113199234,
    0.4999999403953552,
)
"""q of exp(r) = 1 + r + r^2 q(r), |r| <= ln(2) / 2, highest power first: a minimax fit, 0.07 ulp in exact arithmetic."""
LOG2_E = 1.4426950216293335
LN2_HIGH = 0.693359375
"""ln(2) to 9 bits, so that its multiples by up to 2^15 are exact."""
LN2_LOW = -0.00021219444170128554
"""ln(2) - LN2_HIGH."""
EXP_LEAST = -104.0
"""exp of it, and of everything below, is 0 in float32."""
_MAGIC = 12582912.0
"""1.5 * 2^23: a float32 of this size has no fraction, so adding it rounds to an integer, half to even."""
_MAGIC_BITS = 0x4B400000


def row_sums(values: Tensor) -> Tensor:
    """(M, K) float32 to (M, 1): lane sums from +0 in order, then lanes added by halves, 64, 32, ..., 1."""
    lanes = F.pad(values, (0, -values.shape[1] % LANES)).unflatten(1, (-1, LANES))
    sums = values.new_zeros(values.shape[0], LANES)
    for chunk in range(lanes.shape[1]):
        sums += lanes[:, chunk]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums


def column_sums(values: Tensor) -> Tensor:
    """(M, K) float32 to (K,): rows from +0 in order within blocks of ``ROW_BLOCK``, then the blocks' sums in order."""
    blocks = F.pad(values, (0, 0, 0, -values.shape[0] % ROW_BLOCK)).unflatten(0, (-1, ROW_BLOCK))
    partial = values.new_zeros(blocks.shape[0], values.shape[1])
    for row in range(ROW_BLOCK):
        partial += blocks[:, row]
    total = values.new_zeros(values.shape[1])
    for block in partial:
        total += block
    return total


def exp_nonpositive(v: Tensor) -> Tensor:
    """Exp of float32 ``v`` <= 0, NaN for NaN, within 1 ulp (2^-149 where the result is subnormal).

    Reduction by the nearest multiple of ln(2) in two parts (Cody and Waite, 1980), a polynomial, and the power of two as
    a product of two, each of which is normal. The polynomial by Estrin's scheme, whose halves do not wait for each other.
    """
    v = torch.where(v < EXP_LEAST, EXP_LEAST, v)
    shifted = v * LOG2_E + _MAGIC
    n = shifted - _MAGIC
    r = (v - n * LN2_HIGH) - n * LN2_LOW
    c4, c3, c2, c1, c0 = EXP_COEFFICIENTS
    square = r * r
    high = square * c4 + (r * c3 + c2)
    p = ((high * square + (r * c1 + c0)) * square + r) + 1.0
    exponent = shifted.view(torch.int32) - _MAGIC_BITS
    half = exponent >> 1
    return p * _power(half) * _power(exponent - half)


def _power(n: Tensor) -> Tensor:
    """2^n of an int32 in -126..127, anything for others (their ``exp`` is NaN already)."""
    return ((n + 127) << 23).view(torch.float32)


def square_root(v: Tensor) -> Tensor:
    """The correctly rounded square root of float32 ``v``.

    torch's own in float32 is not, on a CPU with MKL. The root of a float32 is at least 2^-50 away, relatively, from where
    the rounding to float32 changes, so that a float64 root that is nearly right rounds right.
    """
    return v.double().sqrt().to(torch.float32)


class Sigmoid(NamedTuple):
    """``value`` = sigmoid(v), ``slope`` = its derivative."""

    value: Tensor
    slope: Tensor


def sigmoid(v: Tensor) -> Sigmoid:
    """Both from the exp of minus the magnitude, so that neither overflows nor cancels: within 2.7 and 4.5 ulp."""
    z = exp_nonpositive(-v.abs())
    above = quotient(1.0, 1.0 + z)
    below = z * above
    return Sigmoid(torch.where(v < 0, below, above), below * above)


def write_(out: Tensor, values: Tensor) -> None:
    """Round float32 ``values`` into ``out`` once. NaN gets one pattern, which casts and devices do not agree on."""
    out.copy_(values)
    out.masked_fill_(values.isnan(), math.nan)
