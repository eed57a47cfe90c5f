"""Element codes: encode float32 values as narrow codes (uint8), decode them, and pack them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.core.errors import fail
from qtensor.core.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Element
from qtensor.reference.constants import table


def encode_fp8_(out: Tensor, values: Tensor, element: Element) -> None:
    """Write float32 ``values`` (any shape; overwritten) as FP8 codes into ``out`` (uint8).

    Saturates to the largest finite code. NaN becomes the positive NaN, because devices differ in
    the sign they keep. Values are clamped before the cast, because the overflow behaviour of a
    torch cast differs between element types and torch versions.
    """
    values = values.clamp_(-element.max, element.max).nan_to_num_(nan=math.nan)
    out.view(element.dtype).copy_(values)  # type: ignore[arg-type]


@functools.cache
def code_values(element: Element) -> tuple[float, ...]:
    """Return the value of every code of an element, indexed by code."""
    if element.dtype is not None and not element.is_integer:
        codes = torch.arange(256, dtype=torch.uint8, device="cpu")
        return tuple(codes.view(element.dtype).to(torch.float32).tolist())
    if element.is_integer:
        count = 1 << element.bits
        first_negative = count // 2 if element.signed else count
        return tuple(float(c - count * (c >= first_negative)) for c in range(count))
    magnitudes = []
    for code in range(1 << (element.bits - 1)):
        exponent, mantissa = divmod(code, 1 << element.mantissa_bits)
        significand = mantissa / (1 << element.mantissa_bits) + (exponent > 0)
        power = max(exponent - 1, 0) + element.min_exponent
        magnitudes.append(significand * 2.0**power)
    return (*magnitudes, *(-v for v in magnitudes))


def encode_narrow(values: Tensor, element: Element, keep_negative_zero: bool = True) -> Tensor:
    """Return 4- or 6-bit codes (uint8, one a byte) of float32 values.

    Rounds to nearest, ties to even, and saturates.

    Args:
        values: float32 without NaN, any shape.
        element: a 4- or 6-bit element.
        keep_negative_zero: True to give -0.0 the code of -0 (MX); False for the code of 0 (NVFP4).
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
            f"the element must be one of {known}",
            element.name,
            "Encode it in your quantizer",
        )
    negative = values.signbit() if keep_negative_zero else values < 0
    return codes.add_(negative, alpha=1 << (element.bits - 1))


_WIDE = {E2M3: E4M3, E3M2: E5M2}


def _encode_through_fp8(magnitude: Tensor, element: Element) -> Tensor:
    """Return codes of magnitudes for E3M2 or E2M3, by a cast to the FP8 type of equal mantissa.

    E5M2 has the mantissa of E3M2 and E4M3 that of E2M3. After scaling so that the smallest
    exponents agree, the codes are equal.
    """
    wide = _WIDE[element]
    aligned = magnitude * 2.0 ** (wide.min_exponent - element.min_exponent)
    return aligned.to(wide.dtype).view(torch.uint8)


def _encode_e2m1(magnitude: Tensor) -> Tensor:
    """Return E2M1 codes of float32 magnitudes.

    The grid spacing is 0.5 below 2, 1 below 4, and 2 above. Rounding with the spacing of another
    range gives a larger code, never a smaller one, so the minimum is right.

    In each range even codes are even multiples of the spacing, so rounding half to even gives ties
    to the even code.
    """
    codes = torch.minimum((magnitude * 2).round_(), magnitude.round().add_(2))
    return torch.minimum(codes, (magnitude * 0.5).round_().add_(4)).to(torch.uint8)


@functools.cache
def _values(element: Element, device: torch.device) -> Tensor:
    """Return the value of every byte as a cached float32 tensor (256,).

    Bits above the element's own are ignored.
    """
    return table(code_values(element) * (256 >> element.bits), device)


@functools.cache
def _pairs(element: Element, device: torch.device) -> Tensor:
    """Return the values of the low and high nibble of every byte, cached, float32 (256, 2)."""
    values = code_values(element)
    return table(tuple((low, high) for high in values for low in values), device)


def decode(codes: Tensor, element: Element) -> Tensor:
    """Return the exact float32 values of codes (uint8, one a byte, any shape).

    Bits of a byte above the element's own are ignored. The table lookup is several times faster
    than torch's FP8 casts on a CPU.
    """
    return _values(element, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def decode_pairs(packed: Tensor, element: Element, count: int) -> Tensor:
    """Return ``count`` float32 values a row from 4-bit codes packed two a byte along the last dim.

    ``packed`` is uint8 (..., ceil(count / 2)); the even index is in the low nibble.
    """
    pairs = _pairs(element, packed.device)
    values = pairs.index_select(0, packed.reshape(-1).int()).view(
        *packed.shape[:-1], 2 * packed.shape[-1]
    )
    return values if values.shape[-1] == count else values[..., :count]


def pack_pairs(codes: Tensor) -> Tensor:
    """Pack (..., n) 4-bit codes into (..., ceil(n / 2)) bytes, even index in the low nibble.

    An odd last code is paired with code 0.
    """
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    # A little-endian pair is low | high << 8. Shifted right by 4, its low byte is high << 4; or-ing
    # the pair itself adds low.
    # Flatten first: contiguous() keeps the strides of dims of size 1, and view refuses them.
    flat = codes.reshape(-1).contiguous()
    pairs = flat.view(torch.int16).view(*codes.shape[:-1], codes.shape[-1] // 2)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def unpack_pairs(packed: Tensor, count: int) -> Tensor:
    """Return ``count`` codes a row, one a byte: the inverse of ``pack_pairs``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :count]


def pack_quads(codes: Tensor) -> Tensor:
    """Pack (..., n) 6-bit codes into (..., ceil(n / 4) * 3) bytes.

    Code i of a group of four takes bits 6i..6i+5 of three little-endian bytes.
    """
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
    """Return ``count`` codes a row, one a byte: the inverse of ``pack_quads``."""
    groups = packed.unflatten(-1, (-1, 3)).int()
    word = groups[..., 0] | groups[..., 1] << 8 | groups[..., 2] << 16
    codes = torch.stack((word, word >> 6, word >> 12, word >> 18), dim=-1).bitwise_and_(0x3F)
    return codes.to(torch.uint8).flatten(-2)[..., :count]
