"""Arguments that the fused kernels of all devices share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Clamp = tuple[float, float, float, float]
"""The constants of `clamped_swiglu`: alpha, limit, offset, and 128 / alpha."""


class Factors(NamedTuple):
    """The tensors of a call that decide how values are encoded, as the op `quantize` takes them.

    Attributes:
        scale: factor (1,) float32 of delayed scaling, or None.
        amax: maxima to use instead of those of the values, or None.
        seed: (1,) int64 for stochastic rounding, or None.
    """

    scale: Tensor | None = None
    amax: list[Tensor] | None = None
    seed: Tensor | None = None


@dataclass(frozen=True)
class Target:
    """How a fused kernel quantizes its result.

    Attributes:
        quantizer: the quantizer.
        dtype: the dtype that values are rounded to before they are quantized.
        factors: scale, maxima and seed of the call.
    """

    quantizer: Any
    dtype: torch.dtype
    factors: Factors
