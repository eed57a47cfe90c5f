"""Arguments that the fused kernels of all devices share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Clamp = tuple[float, float, float, float]
"""The constants of `clamped_swiglu`: alpha, limit, offset, and 128 / alpha."""


@dataclass(frozen=True)
class Target:
    """How a fused kernel quantizes its result.

    Attributes:
        quantizer: the quantizer.
        dtype: the dtype that values are rounded to before they are quantized.
        factors: scale, maxima and seed of the call, as the op `quantize` takes them.
    """

    quantizer: Any
    dtype: torch.dtype
    factors: tuple[Tensor | None, list[Tensor] | None, Tensor | None]
