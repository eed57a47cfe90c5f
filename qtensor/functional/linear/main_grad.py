"""Notify a weight that a backward pass has added its gradient to ``main_grad``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.library.gradient import REPORT_ACCUMULATED


class ReportAccumulated(torch.autograd.Function):
    """The identity. Its backward runs right before that of the layer and notifies the weight."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, report: Tensor) -> Tensor:
        """Return a view of ``out`` (..., N)."""
        ctx.save_for_backward(report)
        ctx.set_materialize_grads(False)
        return out.view_as(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Return the gradient (..., N) unchanged."""
        if grad is not None:
            REPORT_ACCUMULATED(*ctx.saved_tensors)
        return grad, None


def report_when_accumulated(out: Tensor, report: Tensor) -> Tensor:
    """Return ``out``; its backward first calls the listener of the key ``report[0]``.

    An op calls the listener, because hooks on a result of a compiled graph need compiled autograd.

    Args:
        out: (..., N), of a layer that adds its weight gradients to ``main_grad``; plain or
            quantized.
        report: (2,) int64 on the CPU: see ``report_accumulated_``.
    """
    return ReportAccumulated.apply(out, report)
