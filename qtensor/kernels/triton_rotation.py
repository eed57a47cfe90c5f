"""The random Hadamard transform over groups of 16 (docs/numerics.md, random Hadamard transform)."""

from __future__ import annotations

import triton
import triton.language as tl

from qtensor.kernels.triton_common import load_tile, round_bfloat16, tile_indices
from qtensor.kernels.triton_elements import finite_bits, magnitude_bits

SIGN_MASK = tl.constexpr(0xD7E8)
"""Bit i is set where sign i is -1."""


@triton.jit
def _shared_bits(i: tl.constexpr):
    """Parity of the bits that i shares with 0..15: the signs of a line of H16, or of a column."""
    shared = i & tl.arange(0, 16)
    shared = shared ^ (shared >> 2)
    return (shared ^ (shared >> 1)) & 1


@triton.jit
def hadamard_line(i: tl.constexpr, SIGNS: tl.constexpr):
    """Entries (i, 0..15) of diag(signs) @ H16 / 4, float32."""
    flipped: tl.constexpr = ((SIGN_MASK >> i) & 1) if SIGNS else 0
    return tl.where(_shared_bits(i) == flipped, 0.25, -0.25)


@triton.jit
def hadamard_column(i: tl.constexpr, SIGNS: tl.constexpr):
    """Entries (0..15, i) of diag(signs) @ H16 / 4, float32."""
    flipped = (SIGN_MASK >> tl.arange(0, 16)) & 1 if SIGNS else tl.zeros((16,), tl.int32)
    return tl.where(_shared_bits(i) == flipped, 0.25, -0.25)


@triton.jit
def flush_subnormals(values):
    """Bfloat16 subnormals as zero."""
    return tl.where(magnitude_bits(values) < 0x00800000, 0.0, values)


@triton.jit
def load_rotated(x_ptr, line, unit0, lines, length, stride_line, stride_unit, N: tl.constexpr, SIGNS: tl.constexpr):  # fmt: skip
    """Lines (len(line), N) of a matrix rotated in groups of 16, rounded to the dtype of the input.

    One element of each group is read at a time: the sum runs over them in order.
    """
    L: tl.constexpr = line.shape[0]
    BFLOAT16: tl.constexpr = x_ptr.dtype.element_ty == tl.int16
    FLOAT16: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    group = unit0 + 16 * tl.arange(0, N // 16)
    total = tl.zeros((L, N // 16, 16), tl.float32)
    for i in tl.static_range(16):
        values = load_tile(x_ptr, line, group + i, lines, length, stride_line, stride_unit)
        if BFLOAT16:
            values = flush_subnormals(values)
        term = values[:, :, None] * hadamard_line(i, SIGNS)[None, None, :]
        total = term if i == 0 else total + term
    rotated = tl.reshape(total, (L, N))
    if BFLOAT16:
        bits = round_bfloat16(rotated) << 16
        rotated = flush_subnormals(bits.to(tl.float32, bitcast=True))
    if FLOAT16:
        rotated = rotated.to(tl.float16).to(tl.float32)
    return rotated


@triton.jit
def rotated_amax_kernel(
    x_ptr, amax_ptr, lines, length, stride_line, stride_unit,
    SIGNS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Raise the maximum in ``amax_ptr`` (bits of float32, int32) to that of one rotated tile."""
    line0, unit0 = tile_indices(lines, length, BM, BK)
    line = line0 + tl.arange(0, BM)
    values = load_rotated(x_ptr, line, unit0, lines, length, stride_line, stride_unit, BK, SIGNS)
    tl.atomic_max(amax_ptr, tl.max(tl.max(finite_bits(magnitude_bits(values)), 1), 0))
