"""Convert between the tensor factor of NVFP4 in files and the amax that our tensors hold.

Files hold a factor G, or its reciprocal; our NVFP4 tensors hold an amax A and decode with
fl(A / (6 * L)), where L is the largest block factor, 448 or 256. This module is the only place
that knows the conversion.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_STEPS = 2
"""Neighbours on each side, in float32 units, that the search tries."""


class Amax(NamedTuple):
    """Hold an amax that gives a factor exactly.

    Attributes:
        amax: float32 (1,).
        e4m3_max: L, 448 or 256.
    """

    amax: Tensor
    e4m3_max: float


def nvfp4_amax(factor: Tensor) -> Amax | None:
    """Return A and L with fl(A / 6L) equal to ``factor``, or None if no amax gives it.

    Args:
        factor: G, one float32, positive and finite.
    """
    factor = factor.reshape(1)
    for e4m3_max in (448.0, 256.0):
        near = _neighbours(factor * (6 * e4m3_max))
        hits = near[nvfp4_factor(near, e4m3_max) == factor]
        if len(hits):
            return Amax(hits[:1], e4m3_max)
    return None


def nvfp4_amax_of_divisor(divisor: Tensor) -> Amax | None:
    """Return A with fl(2688 / A) equal to ``divisor``, or None if no amax gives it.

    A bfloat16 number is preferred, because it is the amax of every bfloat16 weight.

    Args:
        divisor: compressed-tensors' global scale g, one float32, positive and finite.
    """
    divisor = divisor.reshape(1)
    guess = nvfp4_divisor(divisor, 448.0)
    near = torch.cat((guess.bfloat16().float(), _neighbours(guess)))
    hits = near[nvfp4_divisor(near, 448.0) == divisor]
    return Amax(hits[:1], 448.0) if len(hits) else None


def _neighbours(guess: Tensor) -> Tensor:
    """Return the finite, positive float32 numbers around ``guess``, the nearest first."""
    steps = torch.tensor(sorted(range(-_STEPS, _STEPS + 1), key=abs), dtype=torch.int32)
    near = (guess.view(torch.int32) + steps).view(torch.float32)
    return near[torch.isfinite(near) & (near > 0)]


def nvfp4_factor(amax: Tensor, e4m3_max: float) -> Tensor:
    """Return G = fl(A / 6L), float32 of the shape of ``amax``."""
    return amax / (6 * e4m3_max)


def nvfp4_divisor(amax: Tensor, e4m3_max: float) -> Tensor:
    """Return g = fl(6L / A), float32 of the shape of ``amax``."""
    return torch.full_like(amax, 6 * e4m3_max) / amax
