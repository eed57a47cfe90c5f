"""Make a tensor from the parts of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.layout import Shape

_make = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided

WHOLE_PRODUCTS = "DeferredInit"
"""Dispatch key that only quantized tensors have, for ``whole_products``.

torch reserves it for a library that is no longer developed, and gives it no meaning of its own.
"""


def _own_key() -> Any:
    """Return the set of this key; None for a torch without it, which then repeats some weights."""
    try:
        return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(WHOLE_PRODUCTS))
    except (AttributeError, RuntimeError):
        return None


OWN_KEY = _own_key()
KEYS: tuple[Any, ...] = () if OWN_KEY is None else (None, False, False, OWN_KEY)
"""The last positional arguments of ``_make_wrapper_subclass`` for a quantized tensor."""

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Nominal dtypes, and dtypes of plain GEMM operands."""

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Entry of a dispatch table: (op, args, kwargs) -> result."""


def wrap(
    cls: Any,
    shape: Shape,
    dtype: torch.dtype,
    quantizer: Any,
    buffers: Sequence[Tensor],
    context: Any = None,
) -> Any:
    """Return ``cls(...)`` without checks, in half the time.

    Args:
        cls: the tensor class.
        shape: the logical shape.
        dtype: the nominal dtype.
        quantizer: describes the buffers.
        buffers: inner buffers in slot order; extra tensors at the end are ignored.
        context: the flatten context, if there is one already.
    """
    device = buffers[0].device
    t = _make(cls, shape, None, None, None, dtype, _STRIDED, device, False, False, *KEYS)
    for (name, _), buffer in zip(quantizer.attributes, buffers, strict=False):
        setattr(t, name, buffer)
    t._quantizer = quantizer
    t._context = context or (cls.__qualname__, dtype, quantizer, quantizer.scale_layout)
    return t


def make_wrapper(t: Any, shape: Shape, quantizer: Any) -> Any:
    """Return a tensor of the class, dtype and device of ``t`` without buffers."""
    name, dtype = t._context[:2]
    cls = type(t)
    other = _make(cls, shape, None, None, None, dtype, _STRIDED, t.device, False, False, *KEYS)
    other._quantizer = quantizer
    other._context = (name, dtype, quantizer, quantizer.scale_layout)
    return other


def same(t: Any) -> Any:
    """Return another tensor with the buffers, quantizer and view note of ``t``."""
    quantizer, context = t._quantizer, t._context
    cls, dtype = type(t), context[1]
    other = _make(cls, t.shape, None, None, None, dtype, _STRIDED, t.device, False, False, *KEYS)
    if (stack := t._stack) is not None:
        other._stack = stack
    else:
        for name, _ in quantizer.attributes:
            setattr(other, name, getattr(t, name))
    other._quantizer, other._context = quantizer, context
    if t._view_note is not None:
        other._view_note = t._view_note
    if t._shards is not None:
        other._shards = t._shards
    if t._splits is not None:
        other._splits = t._splits
    if t._shard_dim:
        other._shard_dim = t._shard_dim
    return other


def with_buffers(
    t: Any,
    buffers: Sequence[Tensor],
    shape: Shape | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantizer: Any = None,
) -> Any:
    """Return a tensor or storage of the class of ``t`` with other buffers.

    Args:
        t: a tensor or storage.
        buffers: the new buffers, in the slot order of ``quantizer``.
        shape: logical shape; that of ``t`` if None.
        dtype: nominal dtype; that of ``t`` if None.
        quantizer: describes the buffers; that of ``t`` if None.
    """
    quantizer = t._quantizer if quantizer is None else quantizer
    named = {slot.keyword: buffer for slot, buffer in zip(quantizer.slots, buffers, strict=True)}
    return type(t)(t.shape if shape is None else shape, dtype or t.dtype, quantizer, **named)


def map_buffers(t: Any, function: Callable[[Tensor], Tensor], **changes: Any) -> Any:
    """Return ``t`` with ``function`` applied to each buffer."""
    return with_buffers(t, [function(b) for b in t.buffers()], **changes)
