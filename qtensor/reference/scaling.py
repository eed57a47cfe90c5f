"""Scale factors from maxima: the FP8 rule and the E8M0 rule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qtensor.core.formats import Element
from qtensor.reference.constants import constant

FLOAT32_MAX = torch.finfo(torch.float32).max
E8M0_NAN = 255


def quotient(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """Return the IEEE float32 quotient of two tensors, or of a tensor and a number.

    torch computes number / tensor (and on CUDA tensor / number) with a reciprocal, which rounds
    twice.
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
    """Return encode scales ``element_max / amax``, float32 like ``amax``.

    Args:
        amax: float32 >= 0, any shape; inf or NaN if the input had one.
        element_max: largest finite magnitude of the element.
        force_pow_2: True to clear the mantissa of the scale.
        epsilon: lower bound for ``amax``.
        overflow: the scale to use if the quotient overflows float32.

    Returns:
        float32 like ``amax``; 1 where ``amax`` is 0 or not finite.
    """
    if epsilon > 0:
        amax = amax.clamp(min=epsilon)
    # Replace maxima that are 0 or not finite by element_max, which gives a scale of exactly 1.
    known = torch.threshold_(amax.nan_to_num(nan=0.0, posinf=0.0), 0.0, element_max)
    scale = quotient(element_max, known).nan_to_num_(posinf=overflow)
    if force_pow_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def e8m0_code(amax: Tensor, element: Element, mode: str) -> Tensor:
    """Return E8M0 scale codes of block maxima, uint8 like ``amax``; 255 if a maximum is not finite.

    ``amax`` is float32 >= 0. NaN values in it are overwritten.
    """
    # Mark all values that are not finite by +inf: a vectorised maximum may set the sign of a NaN.
    amax = amax.nan_to_num_(nan=math.inf, posinf=math.inf)
    if mode == "rceil":
        # Round up to the next power of two: any mantissa bit carries. A ratio of at most 2^-127
        # counts as 0, whose code means 2^-127.
        ratio = torch.threshold_(quotient(amax, element.max), 2.0**-127, 0.0)
        return ratio.view(torch.int32).add_(0x7FFFFF).bitwise_right_shift_(23).to(torch.uint8)
    bits = amax.view(torch.int32)
    finite = bits < 0x7F800000
    # "even" rounds the significand to the element's precision, half up, then reads the exponent.
    bias = {"floor": 0, "ceil": 0x7FFFFF, "even": 1 << (22 - element.mantissa_bits)}[mode]
    exponent = ((bits + bias) >> 23 if bias else bits >> 23) - element.max_exponent
    return torch.where(finite, exponent.clamp_(min=0), E8M0_NAN).to(torch.uint8)


def e8m0_encode_factor(code: Tensor) -> Tensor:
    """Return ``2^(127 - code)``, float32, for uint8 codes; 254 gives subnormal 2^-127, 255 NaN."""
    return e8m0_decode_factor(254 - code)


def e8m0_decode_factor(code: Tensor) -> Tensor:
    """Return ``2^(code - 127)``, float32, for uint8 codes; 0 gives subnormal 2^-127, 255 NaN."""
    return code.view(torch.float8_e8m0fnu).float()
