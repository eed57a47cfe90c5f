"""The gradient of a learned factor: Esser et al., "Learned Step Size Quantization", ICLR 2020."""

from __future__ import annotations

import torch
from torch import Tensor


def slopes(x: Tensor, codes: Tensor, step: Tensor, largest: float) -> Tensor:
    """Return the derivatives of ``step * round(x / step)`` by ``step``, float64 like ``x``.

    Rounding counts as the identity: ``code - x / step``. Where ``abs(x / step)`` is at least
    ``largest``, or ``x / step`` is NaN, the value is clipped, and the derivative is the code.

    Args:
        x: float64.
        codes: the values of the codes that ``x`` has, float64 like ``x``.
        step: float64, of a shape that broadcasts.
        largest: the largest code.
    """
    scaled = x / step
    return torch.where(scaled.abs() < largest, codes - scaled, codes)
