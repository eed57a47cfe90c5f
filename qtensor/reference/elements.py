"""Element codes: float32 values to narrow codes (uint8) and back, and packing of sub-byte codes."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.errors import fail
from qtensor.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Element
from qtensor.reference.constants import table


def encode_fp8_(out: Tensor, values: Tensor, element: Element) -> None:
    """Write ``values`` (float32, any shape; overwritten) as FP8 codes into ``out`` (uint8, same shape).

    Saturates to the largest finite code; NaN becomes the positive NaN (devices differ in the sign they keep). The clamp comes first because the overflow behaviour of a torch
    cast differs between element types and torch versions.
    """
    values = values.clamp_(-element.max, element.max).nan_to_num_(nan=math.nan)
    out.view(element.dtype).copy_(values)  # type: ignore[arg-type]


@functools.cache
def code_values(element: Element) -> tuple[float, ...]:
    """The value of every code of an element, by code."""
    if element.dtype is not None:
        codes = torch.arange(256, dtype=torch.uint8, device="cpu")
        return tuple(codes.view(element.dtype).to(torch.float32).tolist())
    magnitudes = []
    for code in range(1 << (element.bits - 1)):
        exponent, mantissa = divmod(code, 1 << element.mantissa_bits)
        significand = mantissa / (1 << element.mantissa_bits) + (exponent > 0)
        power = max(exponent - 1, 0) + element.min_exponent
        magnitudes.append(significand * 2.0**power)
    return (*magnitudes, *(-v for v in magnitudes))


def encode_narrow(values: Tensor, element: Element, keep_negative_zero: bool = True) -> Tensor:
    """Float32 values to 4- or 6-bit codes, one a byte: nearest, ties to even, saturating.

    Args:
        values: any shape, float32, no NaN.
        element: a 4- or 6-bit element.
        keep_negative_zero: -0.0 becomes the code of -0 (MX formats) rather than 0 (NVFP4).
    """
    magnitude = values.abs().clamp_(max=element.max)
    if element == E2M1:
        codes = _encode_e2m1(magnitude)
    elif element in _WIDE:
        codes = _encode_through_fp8(magnitude, element)
    else:
        known = ", ".join(e.name for e in (E2M1, *_WIDE))
        fail(
            "encode",
            f"the narrow element must be one of {known}",
            element.name,
            "Encode it in your quantizer",
        )
    negative = values.signbit() if keep_negative_zero else values < 0
    return codes.add_(negative, alpha=1 << (element.bits - 1))


_WIDE = {E2M3: E4M3, E3M2: E5M2}


def _encode_through_fp8(magnitude: Tensor, element: Element) -> Tensor:
    """E3M2 and E2M3 have the mantissas of E5M2 and E4M3: with the smallest exponents aligned, the codes are equal."""
    wide = _WIDE[element]
    aligned = magnitude * 2.0 ** (wide.min_exponent - element.min_exponent)
    return aligned.to(wide.dtype).view(torch.uint8)


def _encode_e2m1(magnitude: Tensor) -> Tensor:
    """The grid is 0.5 apart below 2, 1 below 4, 2 above; rounding in the wrong range gives a larger code, never a smaller.

    Even codes are even multiples of their range's step, so rounding half to even is ties to the even code.
    """
    codes = torch.minimum((magnitude * 2).round_(), magnitude.round().add_(2))
    return torch.minimum(codes, (magnitude * 0.5).round_().add_(4)).to(torch.uint8)


@functools.cache
def _values(element: Element, device: torch.device) -> Tensor:
    """Return the value of every byte, float32 (256,); bits above the element's own are ignored."""
    return table(code_values(element) * (256 >> element.bits), device)


@functools.cache
def _pairs(element: Element, device: torch.device) -> Tensor:
    """The values of the low and the high nibble of every byte, float32 (256, 2)."""
    values = code_values(element)
    return table(tuple((low, high) for high in values for low in values), device)


def decode(codes: Tensor, element: Element) -> Tensor:
    """Decode codes, one a byte, to float32, exactly; bits of a byte above the element's own are ignored.

    A table is several times faster than torch's FP8 casts on a CPU.
    """
    return _values(element, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def decode_pairs(packed: Tensor, element: Element, count: int) -> Tensor:
    """4-bit codes, two a byte along the last dim (even index in the low nibble), to ``count`` float32 values a row."""
    pairs = _pairs(element, packed.device)
    values = pairs.index_select(0, packed.reshape(-1).int()).view(
        *packed.shape[:-1], 2 * packed.shape[-1]
    )
    return values if values.shape[-1] == count else values[..., :count]


def pack_pairs(codes: Tensor) -> Tensor:
    """(..., n) 4-bit codes to (..., ceil(n / 2)) bytes, even index in the low nibble, an odd tail padded with code 0."""
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    # A little-endian pair is low | high << 8; its low byte after the shift is low | high << 4.
    # Flat first: contiguous() leaves the strides of dims of size 1 as they are, which view refuses.
    flat = codes.reshape(-1).contiguous()
    pairs = flat.view(torch.int16).view(*codes.shape[:-1], codes.shape[-1] // 2)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def unpack_pairs(packed: Tensor, count: int) -> Tensor:
    """Inverse of ``pack_pairs``: ``count`` codes a row, one a byte."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :count]


def pack_quads(codes: Tensor) -> Tensor:
    """(..., n) 6-bit codes to (..., ceil(n / 4) * 3) bytes: code i of a group in bits 6i..6i+5, little-endian."""
    codes = F.pad(codes, (0, -codes.shape[-1] % 4)).unflatten(-1, (-1, 4)).int()
    word = codes[..., 0] | codes[..., 1] << 6 | codes[..., 2] << 12 | codes[..., 3] << 18
    return (
        torch
        .stack((word, word >> 8, word >> 16), dim=-1)
        .bitwise_and_(0xFF)
        .to(torch.uint8)
        .flatten(-2)
    )


def unpack_quads(packed: Tensor, count: int) -> Tensor:
    """Inverse of ``pack_quads``: ``count`` codes a row, one a byte."""
    groups = packed.unflatten(-1, (-1, 3)).int()
    word = groups[..., 0] | groups[..., 1] << 8 | groups[..., 2] << 16
    codes = torch.stack((word, word >> 6, word >> 12, word >> 18), dim=-1).bitwise_and_(0x3F)
    return codes.to(torch.uint8).flatten(-2)[..., :count]
