"""The random Hadamard transform over groups of 16 (docs/numerics.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from qtensor.kernels.triton.common import join_16, round_bfloat16, split_16
from qtensor.kernels.triton.elements import magnitude_bits


@triton.jit
def _signed_sum(t, j: tl.constexpr, SHARED: tl.constexpr, SIGNS: tl.constexpr, BACK: tl.constexpr):
    """Add 16 terms in order, with the signs of column j of diag(signs) @ H16.

    If ``BACK``, the signs are those of the transpose. Bit k of ``SHARED`` is set if k and j share
    an odd number of bits, where H16 is -1. Sign i is -1 if bit i of 0xD7E8 is set.
    """
    FLIPS: tl.constexpr = (0xFFFF * ((0xD7E8 >> j) & 1) if BACK else 0xD7E8) if SIGNS else 0
    NEGATIVE: tl.constexpr = SHARED ^ FLIPS
    # Multiply by -1: Triton computes -t as 0 - t, which loses the sign of zero.
    total = t[0] * -1.0 if NEGATIVE & 1 else t[0]
    for k in tl.static_range(1, 16):
        total = total - t[k] if (NEGATIVE >> k) & 1 else total + t[k]
    return total


@triton.jit
def product_16(values, SIGNS: tl.constexpr, BACK: tl.constexpr):
    """Multiply groups of 16 by diag(signs) @ H16 / 4, or (``BACK``) by its transpose.

    A product with -0.25 is exactly the negative of that with 0.25, so one product serves all sums.
    """
    t = split_16(values * 0.25)
    return join_16(
        (
            _signed_sum(t, 0, 0x0000, SIGNS, BACK), _signed_sum(t, 1, 0xAAAA, SIGNS, BACK),
            _signed_sum(t, 2, 0xCCCC, SIGNS, BACK), _signed_sum(t, 3, 0x6666, SIGNS, BACK),
            _signed_sum(t, 4, 0xF0F0, SIGNS, BACK), _signed_sum(t, 5, 0x5A5A, SIGNS, BACK),
            _signed_sum(t, 6, 0x3C3C, SIGNS, BACK), _signed_sum(t, 7, 0x9696, SIGNS, BACK),
            _signed_sum(t, 8, 0xFF00, SIGNS, BACK), _signed_sum(t, 9, 0x55AA, SIGNS, BACK),
            _signed_sum(t, 10, 0x33CC, SIGNS, BACK), _signed_sum(t, 11, 0x9966, SIGNS, BACK),
            _signed_sum(t, 12, 0x0FF0, SIGNS, BACK), _signed_sum(t, 13, 0xA55A, SIGNS, BACK),
            _signed_sum(t, 14, 0xC33C, SIGNS, BACK), _signed_sum(t, 15, 0x6996, SIGNS, BACK),
        )
    )  # fmt: skip


@triton.jit
def _flush_subnormals(values):
    """Replace bfloat16 subnormals by zero."""
    return tl.where(magnitude_bits(values) < 0x00800000, 0.0, values)


@triton.jit
def rotate(values, SIGNS: tl.constexpr, dtype: tl.constexpr):
    """Rotate lines (L, N) in groups of 16, rounded to the dtype of the input (int16: bfloat16)."""
    if dtype == tl.int16:
        rotated = product_16(_flush_subnormals(values), SIGNS, False)
        bits = round_bfloat16(rotated) << 16
        return _flush_subnormals(bits.to(tl.float32, bitcast=True))
    elif dtype == tl.float16:
        return product_16(values, SIGNS, False).to(tl.float16).to(tl.float32)
    else:
        return product_16(values, SIGNS, False)
