"""Finish a product in torch where its kernel does not add the bias or write the dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qtensor.kernels.cpu import native
from qtensor.kernels.products.problem import Problem


def kernel_finishes(problem: Problem) -> bool:
    """Return whether a kernel of the CPU adds the bias of a product and writes its dtype."""
    bias = problem.bias
    return problem.dtype in native.DTYPES and (bias is None or len(bias[0]) < 2)


def finish_in_torch(
    out: Tensor, bias: Tensor | None, multiply: Callable[[Tensor], str | None]
) -> str | None:
    """Write a product plus a bias of any shape, both in float32, rounded once to any dtype.

    Args:
        out: of any floating dtype.
        bias: broadcastable to ``out``, or None.
        multiply: writes the product into a float32 tensor of the shape of ``out``; or returns why
            it wrote nothing.

    Returns:
        What ``multiply`` returns.
    """
    total = torch.empty_like(out, dtype=torch.float32)
    reason = multiply(total)
    if reason is None:
        total = total if bias is None else total + bias.float()
        out.copy_(torch.where(total.isnan(), torch.nan, total))
    return reason
