"""Scale factors from amax: the FP8 rule (NUMERICS section 1) and the E8M0 rule (section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.formats import Element

FLOAT32_MAX = torch.finfo(torch.float32).max
E8M0_NAN = 255


def quotient(numerator: Tensor | float, denominator: Tensor | float, like: Tensor) -> Tensor:
    """The IEEE quotient in float32, on the device of ``like``.

    torch divides a number by a tensor, and on CUDA a tensor by a number, by way of the reciprocal, which rounds twice.
    """
    numerator, denominator = (
        v if isinstance(v, Tensor) else torch.full((), v, device=like.device) for v in (numerator, denominator)
    )
    return torch.div(numerator, denominator)


def fp8_scale(
    amax: Tensor, element_max: float, force_pow_2: bool, epsilon: float, overflow: float = FLOAT32_MAX
) -> Tensor:
    """Encode factors ``element_max / amax``.

    Args:
        amax: float32, any shape, >= 0, inf or NaN where the input had one.
        element_max: largest finite magnitude of the element.
        force_pow_2: clear the mantissa of the factor.
        epsilon: lower bound for ``amax``.
        overflow: the factor where the quotient overflows float32.

    Returns:
        float32 like ``amax``; 1 where ``amax`` is 0 or not finite.
    """
    if epsilon > 0:
        amax = amax.clamp(min=epsilon)
    scale = quotient(element_max, amax, amax)
    scale = torch.where(scale.isinf(), overflow, scale)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0)
    if force_pow_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def e8m0_code(amax: Tensor, element: Element, mode: str) -> Tensor:
    """E8M0 scale codes (int32, 0..254, 255 = not finite) of block maxima ``amax`` (float32, >= 0)."""
    # A vectorised maximum may return a NaN with its sign bit set.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    if mode == "rceil":
        ratio = quotient(amax, element.max, amax).view(torch.int32)
        exponent, mantissa = ratio >> 23, ratio & 0x7FFFFF
        below_half_subnormal = (exponent == 0) & (mantissa <= 0x400000)
        code = exponent + ((mantissa > 0) & (exponent != 254) & ~below_half_subnormal)
    else:
        if mode == "even":
            # Rounds the significand to the element's precision, half up, before the exponent is read.
            exponent = (bits + (1 << (22 - element.mantissa_bits))) >> 23
        else:
            exponent = bits >> 23
            if mode == "ceil":
                exponent = exponent + ((bits & 0x7FFFFF) != 0)
        code = (exponent - element.max_exponent).clamp_(0, 254)
    return torch.where(bits >= 0x7F800000, E8M0_NAN, code)


def e8m0_encode_factor(code: Tensor) -> Tensor:
    """``2^(127 - code)`` in float32 for int32 codes 0..254 (code 254 gives the subnormal 2^-127); undefined for 255."""
    return ((254 - code) << 23).clamp_(min=0x00400000).view(torch.float32)


def e8m0_decode_factor(code: Tensor) -> Tensor:
    """``2^(code - 127)`` in float32 for uint8 codes: 0 gives 2^-127, 255 gives NaN."""
    code = code.int()
    factor = (code << 23).clamp_(min=0x00400000)
    return torch.where(code == E8M0_NAN, 0x7FC00000, factor).view(torch.float32)
