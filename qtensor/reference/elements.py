"""Element codes: float32 values to narrow codes (uint8) and back, and packing of sub-byte codes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.formats import Element


def encode_fp8_(out: Tensor, values: Tensor, element: Element) -> None:
    """Write ``values`` (float32, any shape) as FP8 codes into ``out`` (uint8, same shape).

    Saturates to the largest finite code; NaN becomes the positive NaN (devices differ in the sign they keep). The clamp comes first because the overflow behaviour of a torch
    cast differs between element types and torch versions.
    """
    values = values.clamp(-element.max, element.max).nan_to_num_(nan=float("nan"))
    out.view(element.dtype).copy_(values)


def decode_fp8(codes: Tensor, element: Element) -> Tensor:
    """FP8 codes (uint8) to float32, exactly."""
    return codes.view(element.dtype).float()


@functools.cache
def code_values(element: Element) -> tuple[float, ...]:
    """The value of every code of a 4- or 6-bit element, by code."""
    magnitudes = []
    for code in range(1 << (element.bits - 1)):
        exponent, mantissa = divmod(code, 1 << element.mantissa_bits)
        significand = mantissa / (1 << element.mantissa_bits) + (exponent > 0)
        power = max(exponent - 1, 0) + element.min_exponent
        magnitudes.append(significand * 2.0**power)
    return (*magnitudes, *(-v for v in magnitudes))


@functools.cache
def _thresholds(element: Element, device: torch.device) -> Tensor:
    """Ascending bounds: the code of a magnitude is the number of bounds strictly below it.

    A midpoint between an even code and the next odd one stays (strictly below does not count it); between an odd code
    and the next even one it moves up, so the bound is the float just below the midpoint. That is ties to even.
    """
    magnitudes = code_values(element)[: 1 << (element.bits - 1)]
    middles = torch.tensor([(a + b) / 2 for a, b in zip(magnitudes, magnitudes[1:], strict=False)])
    below = torch.nextafter(middles, torch.zeros(()))
    odd = torch.arange(len(middles)) % 2 == 1
    return torch.where(odd, below, middles).to(device)


def encode_narrow(values: Tensor, element: Element, keep_negative_zero: bool = True) -> Tensor:
    """Float32 values to 4- or 6-bit codes, one a byte: nearest, ties to even, saturating.

    Args:
        values: any shape, float32, no NaN.
        element: a 4- or 6-bit element.
        keep_negative_zero: -0.0 becomes the code of -0 (MX formats) rather than 0 (NVFP4).
    """
    codes = torch.bucketize(values.abs().contiguous(), _thresholds(element, values.device), out_int32=True)
    negative = values.signbit() if keep_negative_zero else values < 0
    return codes.to(torch.uint8).bitwise_or_(negative.to(torch.uint8) << (element.bits - 1))


@functools.cache
def _value_table(element: Element, codes_per_entry: int, device: torch.device) -> Tensor:
    values = torch.tensor(code_values(element), device=device)
    if codes_per_entry == 1:
        return values
    low = values.repeat(len(values))
    return torch.stack((low, values.repeat_interleave(len(values))), dim=-1)


def decode_narrow(codes: Tensor, element: Element) -> Tensor:
    """4- or 6-bit codes, one a byte, to float32."""
    return _value_table(element, 1, codes.device)[codes.int()]


def decode_pairs(packed: Tensor, element: Element, count: int) -> Tensor:
    """4-bit codes, two a byte along the last dim (even index in the low nibble), to ``count`` float32 values a row."""
    pairs = _value_table(element, 2, packed.device)[packed.int()]
    return pairs.flatten(-2)[..., :count]


def pack_pairs(codes: Tensor) -> Tensor:
    """(..., n) 4-bit codes to (..., ceil(n / 2)) bytes, even index in the low nibble, an odd tail padded with code 0."""
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: Tensor, count: int) -> Tensor:
    """Inverse of ``pack_pairs``: ``count`` codes a row, one a byte."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :count]


def pack_quads(codes: Tensor) -> Tensor:
    """(..., n) 6-bit codes to (..., ceil(n / 4) * 3) bytes: code i of a group in bits 6i..6i+5, little-endian."""
    codes = F.pad(codes, (0, -codes.shape[-1] % 4)).unflatten(-1, (-1, 4)).int()
    word = codes[..., 0] | codes[..., 1] << 6 | codes[..., 2] << 12 | codes[..., 3] << 18
    return torch.stack((word, word >> 8, word >> 16), dim=-1).bitwise_and_(0xFF).to(torch.uint8).flatten(-2)


def unpack_quads(packed: Tensor, count: int) -> Tensor:
    """Inverse of ``pack_quads``: ``count`` codes a row, one a byte."""
    groups = packed.unflatten(-1, (-1, 3)).int()
    word = groups[..., 0] | groups[..., 1] << 8 | groups[..., 2] << 16
    codes = torch.stack((word, word >> 6, word >> 12, word >> 18), dim=-1).bitwise_and_(0x3F)
    return codes.to(torch.uint8).flatten(-2)[..., :count]
