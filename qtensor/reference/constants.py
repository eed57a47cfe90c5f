"""Float32 constants on a device: the same whatever the default dtype, device or mode of the first caller."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def table(values: Any, device: torch.device) -> Tensor:
    """A number or (nested) tuple of numbers as a float32 tensor. For callers that keep what they get."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def constant(values: float | tuple[float, ...], device: torch.device) -> Tensor:
    """A number or a few of them as a float32 tensor, made once."""
    return table(values, device)
