"""Triton kernels for norms, activations and sums over rows as the table calls them.

The calls of ``kernels.cpu.floats``: each is False, with nothing written, where the reference has to.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from qtensor.kernels.triton_calls import backend

_PLAIN = (Tensor, torch.nn.Parameter)


def _kernels(first: Tensor, *others: Tensor | None) -> ModuleType | None:
    """The kernels; None where there are none, for subclasses, and for tensors without elements."""
    found = backend()
    plain = all(t is None or type(t) in _PLAIN for t in (first, *others))
    return None if isinstance(found, str) or not plain or not first.numel() else found


def norm_(
    outputs: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: tuple[str, float, bool],
) -> bool:
    """Write y, mean and rstd."""
    kernels = _kernels(x, weight, bias)
    if kernels is None:
        return False
    kernels.norm_(outputs, x, weight, bias, settings)
    return True


def norm_backward_(
    outputs: tuple[Tensor, Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: tuple[Tensor | None, Tensor],
    zero_centered: bool,
) -> bool:
    """Write dx, dweight and dbias."""
    kernels = _kernels(x, dy, weight, *stats)
    if kernels is None:
        return False
    kernels.norm_backward_(outputs, dy, x, weight, stats, zero_centered)
    return True


def bias_grad_(out: Tensor, dy: Tensor) -> bool:
    """Write the sum of the rows."""
    kernels = _kernels(dy)
    if kernels is None:
        return False
    kernels.bias_grad_(out, dy)
    return True


def activation_(out: Tensor, x: Tensor, kind: str, dy: Tensor | None = None) -> bool:
    """Write the activation, or the gradient of ``x`` where there is a ``dy``."""
    kernels = _kernels(x, dy)
    if kernels is None:
        return False
    kernels.activation_(out, x, kind, dy)
    return True
