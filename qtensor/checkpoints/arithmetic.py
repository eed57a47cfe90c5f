"""Decode stored codes and factors with the roundings that origins use.

The three classes of docs/checkpoints.md: ``product`` (P), ``in_dtype`` (D), ``scales_first`` (S).
Every function takes and returns plain tensors; elements are float32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qtensor.core.errors import fail

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def float8(codes: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return float32 values of float8 codes, which may be stored as uint8."""
    return codes.view(dtype).float()


def e2m1(codes: Tensor, high_first: bool = False) -> Tensor:
    """Return float32 values (..., K) of packed FP4 codes, uint8 (..., K / 2).

    The even index is in bits 0 to 3 of a byte or, with ``high_first``, in bits 4 to 7.
    """
    codes = codes.view(torch.uint8)
    # Both values of a byte are looked up at once, as 8 bytes.
    return _e2m1_pairs(high_first)[codes.int()].view(torch.float32)


@functools.lru_cache(maxsize=2)
def _e2m1_pairs(high_first: bool) -> Tensor:
    """Return the two float32 values of each byte as one int64, (256,)."""
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.float32)
    byte = torch.arange(256)
    pair = (table[byte & 15], table[byte >> 4])
    return torch.stack(pair[::-1] if high_first else pair, -1).view(torch.int64).flatten()


def fp6(codes: Tensor, exponent_bits: int) -> Tensor:
    """Return float32 values (..., K) of packed FP6 codes, uint8 (..., 3K / 4).

    Of four codes in three bytes, code i is in bits 6i to 6i + 5 of the little-endian word.
    ``exponent_bits`` are 2 for e2m3, 3 for e3m2.
    """
    parts = codes.unflatten(-1, (-1, 3)).int()
    word = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16
    shifts = torch.tensor([0, 6, 12, 18], dtype=torch.int32)
    six = ((word.unsqueeze(-1) >> shifts) & 63).flatten(-2)
    return fp6_codes(six, exponent_bits)


def fp6_codes(codes: Tensor, exponent_bits: int) -> Tensor:
    """Return float32 values of FP6 codes, uint8 or int32; the upper bits do not count.

    ``exponent_bits`` are 2 for e2m3, 3 for e3m2.
    """
    return _fp6_table(exponent_bits)[codes.int() & 63]


def _fp6_table(exponent_bits: int) -> Tensor:
    """Return the 64 values of e2m3 or e3m2."""
    mantissa_bits = 5 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    values = []
    for code in range(32):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor([*values, *(-v for v in values)], dtype=torch.float32)


def e8m0(codes: Tensor) -> Tensor:
    """Return 2^(c - 127) as float32 for E8M0 codes, stored as uint8 or float8_e8m0fnu.

    Raises:
        QTensorError: a code is 255, which no writer makes and origins read differently.
    """
    codes = codes.view(torch.uint8)
    if bool((codes == 255).any()):
        got = f"255 at index {codes.flatten().eq(255).nonzero()[0].item()}"
        fix = "Read it as a quantized tensor: rounding=None decodes 255 to NaN"
        fail("e8m0", 'with rounding="origin", factors are not 255', got, fix)
    return (2.0 ** (torch.arange(255, dtype=torch.float64) - 127)).float()[codes.int()]


def spread(factors: Tensor, block: tuple[int, int], shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the factor of every element, a tensor of ``shape`` (..., N, K).

    A ``block`` is (bh, bw), and ``factors`` are (..., ceil(N / bh), ceil(K / bw)).
    """
    for dim, size in zip((-2, -1), block, strict=True):
        if size != 1:
            factors = factors.repeat_interleave(size, dim)
    return factors[..., : shape[-2], : shape[-1]]


def broadcast(factor: Tensor) -> Tensor:
    """Return the factor of a tensor as (), or the factors of its experts as (E, 1, 1)."""
    return factor.reshape(-1, 1, 1) if factor.numel() > 1 else factor.reshape(())


def product(elements: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return class P: fl(element * factor) in float32, then one rounding to ``dtype``."""
    return (elements * factors.float()).to(dtype)


def in_dtype(elements: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return class D: element and factor are each rounded to ``dtype``, and so is the product."""
    return elements.to(dtype) * factors.to(dtype)


def scales_first(
    elements: Tensor, scales: Tensor, factor: Tensor, block: int, dtype: torch.dtype
) -> Tensor:
    """Return class S: f = fl(s * G) in float32, then fl(element * f), then one rounding.

    Args:
        elements: (..., N, K).
        scales: the factors of the blocks, float32 (..., N, ceil(K / block)).
        factor: the factor G of the tensor, float32, which broadcasts against ``scales``.
        block: elements along K that share a factor.
        dtype: dtype of the result.
    """
    return product(elements, spread(scales * factor, (1, block), elements.shape), dtype)
