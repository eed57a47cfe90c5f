"""Round values at random before a quantizer that rounds to nearest takes them."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor

ROUNDS_AT_RANDOM: ContextVar[bool] = ContextVar("rounds_at_random", default=False)
"""True while an optimizer of ``qtensor.optim.round_parameters_`` writes its parameters."""


def round_at_random(
    values: Tensor, mantissa_bits: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return values with ``1 + mantissa_bits`` significant bits, whose mean over draws is exact.

    A random number is added to the bits that are then cut off (docs/numerics.md). A format with
    this mantissa and scales that are powers of two holds the result exactly where its codes are
    normal numbers.

    Args:
        values: any shape; float32, bfloat16 or float16.
        mantissa_bits: at most 22.
        generator: of the device of ``values``, or None for the default generator.

    Returns:
        A tensor of the shape and dtype of ``values``.
    """
    cut = 1 << (23 - mantissa_bits)
    bits = values.to(torch.float32).view(torch.int32)
    noise = torch.randint(
        0, cut, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = ((bits + noise) & -cut).view(torch.float32).to(values.dtype)
    return torch.where(values.isfinite(), rounded, values)
