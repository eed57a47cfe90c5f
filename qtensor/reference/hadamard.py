"""Random Hadamard transform over groups of 16 (docs/numerics.md, NVFP4)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qtensor.reference.constants import table

SIZE = 16
SIGN_MASK = 0xD7E8
"""Bit i is set where sign i is -1."""


def _entries(with_signs: bool) -> tuple[tuple[float, ...], ...]:
    """``diag(signs) @ H16 / 4``: the Sylvester entry (k, j) is -1 to the number of bits that k and j share."""
    return tuple(
        tuple(
            -0.25 if ((k & j).bit_count() + (with_signs and SIGN_MASK >> k)) & 1 else 0.25
            for j in range(SIZE)
        )
        for k in range(SIZE)
    )


@functools.cache
def matrix(with_signs: bool, device: torch.device) -> Tensor:
    """The rotation, float32 (16, 16), H16 in Sylvester order; its entries are +-0.25."""
    return table(_entries(with_signs), device)


def _product(groups: Tensor, factors: Tensor) -> Tensor:
    """(..., 16) @ (16, 16), summed over k = 0..15 one by one in float32: an order that no BLAS changes."""
    result = groups[..., 0:1] * factors[0]
    for k in range(1, SIZE):
        result = result + groups[..., k : k + 1] * factors[k]
    return result


def _flush_bfloat16_subnormals(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(torch.bfloat16).tiny, 0.0, x)


def rotate(x: Tensor, with_signs: bool, dtype: torch.dtype) -> Tensor:
    """``x @ (diag(signs) @ H16) / 4`` over groups of 16 along the last dim, rounded once to ``dtype``.

    bfloat16 subnormals count as zero, before and after: that is what a bfloat16 matmul does on CPU.

    Args:
        x: (..., n) float32 with n a multiple of 16.
        with_signs: False leaves all signs +1.
        dtype: the dtype of the original input.

    Returns:
        float32 like ``x``, with values of ``dtype``.
    """
    if dtype == torch.bfloat16:
        x = _flush_bfloat16_subnormals(x)
    rotated = _product(x.unflatten(-1, (-1, SIZE)), matrix(with_signs, x.device)).flatten(-2)
    rotated = rotated.to(dtype).float()
    return _flush_bfloat16_subnormals(rotated) if dtype == torch.bfloat16 else rotated


def rotate_back(x: Tensor, with_signs: bool) -> Tensor:
    """The inverse of ``rotate`` in float32: the matrix is orthogonal, so its transpose undoes it."""
    return _product(x.unflatten(-1, (-1, SIZE)), matrix(with_signs, x.device).T).flatten(-2)
