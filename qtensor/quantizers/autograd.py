"""The straight-through gradient of quantize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.library.quantize import QUANTIZE


class QuantizeFunction(torch.autograd.Function):
    """Forward: quantize. Backward: the gradient passes unchanged."""

    @staticmethod
    def forward(
        x: Tensor,
        quantizer: Any,
        scale: Tensor | None,
        amax: list[Tensor] | None,
        seed: Tensor | None,
    ) -> tuple[Any, ...]:
        """The tensor, and the amax for delayed scaling."""
        buffers = QUANTIZE(x, quantizer.canonical, scale, amax, seed)
        tensor = quantizer._assemble(buffers, x.shape, x.dtype)
        return tensor, *buffers[len(quantizer.slots) :]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Only the tensor has a gradient."""
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The gradient of the tensor is that of the input."""
        return grad, None, None, None, None
