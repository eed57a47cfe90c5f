"""Quantized values between the operations of a sequence: who reads one says how, who makes it quantizes.

Inside of a sequence they are plain buffers, not tensor subclasses: tracing sees through them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.functional.operands import Quantized, quantize_buffers
from qtensor.layout import Shape
from qtensor.library.codec import parse


class Request(NamedTuple):
    """How an operation would like a tensor that another one makes for it.

    Attributes:
        canonical: text of the quantizer, usages included.
        scale: (1,) float32 encode factor of delayed scaling.
        seed: (1,) int64 for stochastic rounding.
    """

    canonical: str
    scale: Tensor | None = None
    seed: Tensor | None = None

    @property
    def quantizer(self) -> Any:
        """The quantizer itself."""
        return parse(self.canonical)


UNROUNDED = Request("")
"""Asks a linear layer for its float32 sums; other tensors come as they are."""


class Unrounded(NamedTuple):
    """Float32 sums of a product, to be rounded to ``dtype`` once something has been added to them."""

    sums: Tensor
    dtype: torch.dtype


def collected(
    buffers: list[Tensor], request: Request, shape: Shape, dtype: torch.dtype
) -> Quantized:
    """What an op that quantizes returned, as a value."""
    if request.scale is None:
        return Quantized(buffers, request.canonical, shape, dtype, None)
    return Quantized(buffers[:-1], request.canonical, shape, dtype, buffers[-1])


def produce(y: Tensor, request: Request | None) -> Any:
    """``y`` (..., K) as it was asked for: itself, or quantized."""
    if request is None or not request.canonical:
        return y
    matrix = y if y.ndim == 2 else y.reshape(-1, y.shape[-1])
    buffers = quantize_buffers(matrix, request.canonical, request.scale, None, request.seed)
    return collected(buffers, request, y.shape, y.dtype)
