"""Quantized matmul (docs/numerics.md): products of decoded operands, accumulated in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
    """``a @ b`` in float32, times ``factor`` where operands have one factor a tensor, plus ``bias`` in float32.

    Args:
        a: (..., M, K) float32.
        b: (..., K, N) float32.
        factor: (1,) float32 product of the per-tensor scale_inv, or None where there is none.
        bias: broadcastable to (..., M, N), or None.
    """
    y = torch.mm(a, b) if a.ndim == b.ndim == 2 else torch.matmul(a, b)
    if factor is not None:
        y = y * factor
    return y if bias is None else y + bias.float()


def matmul_(out: Tensor, a: Tensor, b: Tensor, factor: Tensor | None, bias: Tensor | None) -> None:
    """``matmul`` of matrices into a float32 ``out``, without tensors between."""
    torch.mm(a, b, out=out)
    if factor is not None:
        out.mul_(factor)
    if bias is not None:
        out.add_(bias)
