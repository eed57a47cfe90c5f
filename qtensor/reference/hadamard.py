"""Random Hadamard transform over groups of 16 elements."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qtensor.reference.constants import table

SIZE = 16
SIGN_MASK = 0xD7E8
"""Bit i is set if sign i is -1."""


def _entries(with_signs: bool) -> tuple[tuple[float, ...], ...]:
    """Return the entries of ``diag(signs) @ H16 / 4``.

    The Sylvester entry (k, j) is -1 to the power of the number of bits that k and j share.
    """
    return tuple(
        tuple(
            -0.25 if ((k & j).bit_count() + (with_signs and SIGN_MASK >> k)) & 1 else 0.25
            for j in range(SIZE)
        )
        for k in range(SIZE)
    )


@functools.cache
def matrix(with_signs: bool, device: torch.device) -> Tensor:
    """Return the rotation, float32 (16, 16), with H16 in Sylvester order and entries +-0.25."""
    return table(_entries(with_signs), device)


def _product(groups: Tensor, factors: Tensor) -> Tensor:
    """Return (..., 16) @ (16, 16), summed in float32 over k = 0..15 in order.

    A BLAS call would choose its own order.
    """
    result = groups[..., 0:1] * factors[0]
    for k in range(1, SIZE):
        result = result + groups[..., k : k + 1] * factors[k]
    return result


def _flush_bfloat16_subnormals(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(torch.bfloat16).tiny, 0.0, x)


def rotate(x: Tensor, with_signs: bool, dtype: torch.dtype) -> Tensor:
    """Return ``x @ (diag(signs) @ H16) / 4`` over groups of 16, rounded once to ``dtype``.

    bfloat16 subnormals count as zero before and after, as in a bfloat16 matmul on a CPU.

    Args:
        x: (..., n) float32; n is a multiple of 16.
        with_signs: False keeps all signs +1.
        dtype: the dtype of the original input.

    Returns:
        float32 like ``x``, with values that ``dtype`` represents.
    """
    if dtype == torch.bfloat16:
        x = _flush_bfloat16_subnormals(x)
    rotated = _product(x.unflatten(-1, (-1, SIZE)), matrix(with_signs, x.device)).flatten(-2)
    rotated = rotated.to(dtype).float()
    return _flush_bfloat16_subnormals(rotated) if dtype == torch.bfloat16 else rotated


def rotate_back(x: Tensor, with_signs: bool) -> Tensor:
    """Return the inverse of ``rotate`` in float32, (..., n), by the transpose: it is orthogonal."""
    return _product(x.unflatten(-1, (-1, SIZE)), matrix(with_signs, x.device).T).flatten(-2)
