"""Quantized values that operations of a sequence pass to each other.

The operation that reads a tensor requests a format, and the operation that makes the tensor
quantizes it.

Inside a sequence these values are plain buffers, not tensor subclasses: a tracer sees them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, rows_cols
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import parse
from qtensor.functional.operands import Quantized
from qtensor.library.quantize import QUANTIZE


class Request(NamedTuple):
    """The format that an operation requests for a tensor that another operation makes.

    Attributes:
        canonical: canonical string of the quantizer, usages included; "" for no quantization.
        scale: (1,) float32 encode scale of delayed scaling, or None.
        seed: (1,) int64 for stochastic rounding, or None.
    """

    canonical: str
    scale: Tensor | None = None
    seed: Tensor | None = None

    @property
    def quantizer(self) -> Any:
        """The quantizer that ``canonical`` describes."""
        return parse(self.canonical)


UNROUNDED = Request("")
"""Requests the float32 sums of a linear layer; other operations return their tensor unchanged."""


class Unrounded(NamedTuple):
    """Float32 sums of a product, which are rounded to ``dtype`` after something has been added."""

    sums: Tensor
    dtype: torch.dtype


Input = Tensor | Quantized
"""A plain value, or one that another operation has quantized."""
Value = Input | Unrounded
"""What the operations of a sequence pass to each other."""


def from_buffers(
    buffers: list[Tensor], request: Request, shape: Shape, dtype: torch.dtype
) -> Quantized:
    """Return the buffers that a quantizing op returned as a ``Quantized`` value."""
    amax = None
    if request.scale is not None:
        *buffers, amax = buffers
    return Quantized(Operand(buffers, request.canonical, rows_cols(shape)), shape, dtype, amax)


def produce(y: Tensor, request: Request | None) -> Any:
    """Return ``y`` (..., K) as requested: unchanged, or quantized."""
    if request is None or not request.canonical:
        return y
    matrix = y if y.ndim == 2 else y.reshape(-1, y.shape[-1])
    buffers = QUANTIZE(matrix, request.canonical, request.scale, None, request.seed)
    return from_buffers(buffers, request, y.shape, y.dtype)
