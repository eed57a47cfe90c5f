"""Activations with gradients, by ops whose bytes are the same in eager and compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.library.activation import ACTIVATION, ACTIVATION_BACKWARD, clamped_swiglu

__all__ = ["ActivationFunction", "activation", "clamped_swiglu"]


class ActivationFunction(torch.autograd.Function):
    """An activation as a function of autograd. Forward saves the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        """Return the activation of ``x`` (..., H), or (..., 2H) for a gated kind."""
        ctx.save_for_backward(x)
        ctx.kind = kind
        return ACTIVATION(x, kind)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of ``x``, in its shape."""
        (x,) = ctx.saved_tensors
        return ACTIVATION_BACKWARD(grad, x, ctx.kind), None


def activation(x: Tensor, kind: str) -> Tensor:
    """Return the activation (..., H) with a given name.

    Args:
        x: (..., H), or (..., 2H) for a gated kind, whose first half is activated and multiplied by
            the second.
        kind: gelu (by tanh), qgelu, relu, silu, srelu, geglu, qgeglu, reglu, sreglu, swiglu, glu,
            or what ``clamped_swiglu`` returns.

    Raises:
        QTensorError: no such kind, or an odd last dim for a gated one.
    """
    return ActivationFunction.apply(x, kind)
