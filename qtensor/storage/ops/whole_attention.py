"""Receive ``scaled_dot_product_attention`` of quantized tensors before torch decomposes it."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.core.errors import QTensorError
from qtensor.core.row_format import row_format
from qtensor.core.torch_state import in_autocast, in_forward_mode, in_transform
from qtensor.library.quantize import INPUT_DTYPES
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.ops.attention import attention


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention over codes; what the op does not offer, torch does on decoded values.

    That is a call with a gradient, dropout, autocast or a transform, operands of other ranks than
    4 or that are broadcast, formats whose factors serve several rows, and every wrong call.
    """
    computes_here = not (dropout_p or (is_causal and attn_mask is not None) or _is_watched(q, k, v))
    if computes_here and _fits(q, k, v, enable_gqa) and _mask_fits(attn_mask, q, k):
        positions = None
        if is_causal:  # torch counts the positions of queries from the first token.
            steps = torch.arange(q.shape[2], device=q.device)
            positions = steps.expand(q.shape[0], -1)
        mask = attn_mask
        if mask is not None:
            mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
            mask = mask.expand(*mask.shape[:3], k.shape[2])
        return attention(
            _plain(q), k, v, positions=positions, mask=mask, causal=is_causal, scale=scale
        )
    q, k, v = (_plain(t) for t in (q, k, v))
    attn_mask = None if attn_mask is None else _plain(attn_mask)
    return torch.nn.functional.scaled_dot_product_attention(
        *(q, k, v, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
    )


def _plain(t: Tensor) -> Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensorStorage) else t


def _is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if a call needs a gradient, or autocast or a transform changes it."""
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return gradient or in_autocast(q.device) or in_transform() or in_forward_mode()


def _fits(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    if not (q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype):
        return False
    same = q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    heads = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not (same and heads and (enable_gqa or q.shape[1] == k.shape[1])):
        return False
    return q.dtype in INPUT_DTYPES and _has_rows(k) and _has_rows(v)


def _has_rows(t: Tensor) -> bool:
    """Return whether the op reads a tensor as it is stored."""
    if not isinstance(t, QuantizedTensorStorage):
        return True
    try:
        form = row_format(t._quantizer.canonical)
    except QTensorError:
        return False
    return t.shape[-1] % (form.block or 1) == 0


def _mask_fits(mask: Tensor | None, q: Tensor, k: Tensor) -> bool:
    """Return whether a mask is one that torch takes."""
    if mask is None:
        return True
    if isinstance(mask, QuantizedTensorStorage) or mask.requires_grad:
        return False
    sizes = zip(reversed(mask.shape), reversed((*q.shape[:3], k.shape[2])), strict=False)
    known = mask.dtype in (torch.bool, q.dtype)
    return known and mask.ndim in (2, 3, 4) and all(n in (1, most) for n, most in sizes)
