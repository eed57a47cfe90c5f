"""Float32 constants on a device, independent of the caller's default dtype, device and mode."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def table(values: Any, device: torch.device) -> Tensor:
    """Return a number or a (nested) tuple of numbers as a new float32 tensor.

    Callers cache the result.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def constant(values: float | tuple[float, ...], device: torch.device) -> Tensor:
    """Return a number or a tuple of numbers as a cached float32 tensor."""
    return table(values, device)
