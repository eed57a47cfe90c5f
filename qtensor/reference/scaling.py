"""Scale factors from amax: the FP8 rule (docs/numerics.md) and the E8M0 rule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qtensor.formats import Element
from qtensor.reference.constants import constant

FLOAT32_MAX = torch.finfo(torch.float32).max
E8M0_NAN = 255


def quotient(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """The IEEE quotient in float32 of two tensors, or of a tensor and a number.

    torch divides a number by a tensor, and on CUDA a tensor by a number, by way of the reciprocal, which rounds twice.
    """
    if isinstance(denominator, Tensor):
        if not isinstance(numerator, Tensor):
            numerator = constant(numerator, denominator.device)
    elif isinstance(numerator, Tensor):
        denominator = constant(denominator, numerator.device)
    return torch.div(numerator, denominator)


def fp8_scale(
    amax: Tensor,
    element_max: float,
    force_pow_2: bool,
    epsilon: float,
    overflow: float = FLOAT32_MAX,
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
    # Where there is no finite maximum above 0, element_max stands for it and gives exactly 1.
    known = torch.threshold_(amax.nan_to_num(nan=0.0, posinf=0.0), 0.0, element_max)
    scale = quotient(element_max, known).nan_to_num_(posinf=overflow)
    if force_pow_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def e8m0_code(amax: Tensor, element: Element, mode: str) -> Tensor:
    """E8M0 scale codes (uint8; 255 = not finite) of block maxima ``amax`` (float32, >= 0). Overwrites NaN in ``amax``."""
    # One mark for what is not finite, with a known sign: a vectorised maximum may return a NaN with its sign bit set.
    amax = amax.nan_to_num_(nan=math.inf, posinf=math.inf)
    if mode == "rceil":
        # Up to the next power of two: any mantissa bit carries. What is at most 2^-127 counts as 0, whose code is 2^-127.
        ratio = torch.threshold_(quotient(amax, element.max), 2.0**-127, 0.0)
        return ratio.view(torch.int32).add_(0x7FFFFF).bitwise_right_shift_(23).to(torch.uint8)
    bits = amax.view(torch.int32)
    finite = bits < 0x7F800000
    # "even" rounds the significand to the element's precision, half up, before the exponent is read.
    bias = {"floor": 0, "ceil": 0x7FFFFF, "even": 1 << (22 - element.mantissa_bits)}[mode]
    exponent = ((bits + bias) >> 23 if bias else bits >> 23) - element.max_exponent
    return torch.where(finite, exponent.clamp_(min=0), E8M0_NAN).to(torch.uint8)


def e8m0_encode_factor(code: Tensor) -> Tensor:
    """``2^(127 - code)`` in float32 for uint8 codes; 254 gives the subnormal 2^-127, 255 NaN."""
    return e8m0_decode_factor(254 - code)


def e8m0_decode_factor(code: Tensor) -> Tensor:
    """``2^(code - 127)`` in float32 for uint8 codes: 0 gives the subnormal 2^-127, 255 NaN."""
    return code.view(torch.float8_e8m0fnu).float()
