"""Compute LayerNorm and RMSNorm with gradients; eager and compiled code give the same bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.library.norm import NORM, NORM_BACKWARD


class NormFunction(torch.autograd.Function):
    """A norm as a function of autograd. Forward saves the input and the statistics of its rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kind: str,
        eps: float,
        zero_centered_gamma: bool,
    ) -> Tensor:
        """Return the normed ``x`` (..., K)."""
        y, mean, rstd = NORM(x, weight, bias, kind, eps, zero_centered_gamma, x.dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.options = kind, zero_centered_gamma, bias is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of x (..., K), weight (K,), bias (K,), and None for options."""
        x, weight, mean, rstd = ctx.saved_tensors
        kind, zero_centered_gamma, has_bias = ctx.options
        dx, dweight, dbias = NORM_BACKWARD(
            grad, x, weight, mean, rstd, kind, zero_centered_gamma, has_bias
        )
        wanted = ctx.needs_input_grad
        return (
            dx if wanted[0] else None,
            dweight if weight is not None and wanted[1] else None,
            dbias if has_bias and wanted[2] else None,
            None,
            None,
            None,
        )


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    kind: str = "layernorm",
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """Return LayerNorm or RMSNorm over the last dim; docs/numerics.md defines the bytes.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        weight: (K,) or None.
        bias: (K,) or None.
        kind: "layernorm" or "rmsnorm".
        eps: added to the variance.
        zero_centered_gamma: whether the weight is stored minus 1.

    Raises:
        QTensorError: the kind is unknown, or weight or bias have another size than the last dim.
    """
    return NormFunction.apply(x, weight, bias, kind, eps, zero_centered_gamma)
