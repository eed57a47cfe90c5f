"""Quantized matmul: products of decoded operands, accumulated in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``a @ b * factor + bias`` in float32, (..., M, N).

    With a 2D ``b`` all rows are one matrix, so that the order of the sums does not depend on the
    strides of ``a``: torch would take a batched product for some.

    Args:
        a: (..., M, K) float32.
        b: (..., K, N) float32.
        factor: (1,) float32, the product of both per-tensor scale_inv; None without such scales.
        bias: broadcastable to (..., M, N), or None.
    """
    if b.ndim == 2:
        rows = a.reshape(a.shape[:-1].numel(), a.shape[-1])
        y = torch.mm(rows, b).view(*a.shape[:-1], b.shape[1])
    else:
        y = torch.matmul(a, b)
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
