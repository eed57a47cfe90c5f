"""Quantized matmul: products of decoded operands, accumulated in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``a @ b * factor + bias`` in float32, (..., M, N).

    Args:
        a: (..., M, K) float32.
        b: (..., K, N) float32.
        factor: (1,) float32, the product of both per-tensor scale_inv; None without such scales.
        bias: broadcastable to (..., M, N), or None.
    """
    y = torch.mm(a, b) if a.ndim == b.ndim == 2 else torch.matmul(a, b)
    if factor is not None:
        y = y * factor
    return y if bias is None else y + bias.float()


def matmul_(out: Tensor, a: Tensor, b: Tensor, factor: Tensor | None, bias: Tensor | None) -> None:
    """Write ``matmul`` of (M, K) and (K, N) float32 into float32 ``out``, without temporaries."""
    torch.mm(a, b, out=out)
    if factor is not None:
        out.mul_(factor)
    if bias is not None:
        out.add_(bias)
