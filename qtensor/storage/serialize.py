"""Pickling, copying and shared memory of quantized tensors: names and plain tensors, never classes or live objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.library.codec import parse
from qtensor.storage.registry import lookup


def rebuild(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    canonical: str,
    buffers: dict[str, Tensor],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    """A tensor or storage from what ``reduce`` saved.

    Raises:
        QTensorError: the class or the quantizer is not known here.
    """
    cls, quantizer = lookup(name), parse(canonical)
    kwargs: dict[str, Any] = {
        keyword: buffers.get(keyword) for _, keyword in cls._FLATTEN_TENSOR_BUFFERS
    }
    if issubclass(cls, torch.Tensor):
        kwargs["requires_grad"] = requires_grad
    tensor = cls(torch.Size(shape), dtype, quantizer, **kwargs)
    if is_parameter:
        tensor._is_param = True
    return tensor


def state(t: Any) -> tuple[Any, ...]:
    """The arguments of ``rebuild``."""
    buffers = {slot.keyword: getattr(t, slot.name) for slot in t._quantizer.slots}
    requires_grad = bool(getattr(t, "requires_grad", False))
    is_parameter = bool(getattr(t, "_is_param", False))
    name = type(t).__qualname__
    return (
        name,
        tuple(t.shape),
        t.dtype,
        t._quantizer.canonical,
        buffers,
        requires_grad,
        is_parameter,
    )


def reduce(t: Any) -> tuple[Any, ...]:
    """For ``__reduce_ex__``."""
    saved = list(state(t))
    if getattr(t, "_view_note", None) is not None:
        # A part is saved on its own: sharing bytes with its whole after a load would need the note as well.
        saved[4] = {keyword: buffer.clone() for keyword, buffer in saved[4].items()}
    return rebuild, tuple(saved)


def deepcopy(t: Any, memo: dict[int, Any]) -> Any:
    """For ``__deepcopy__``: every buffer is cloned."""
    if id(t) in memo:
        return memo[id(t)]
    name, shape, dtype, canonical, buffers, requires_grad, is_parameter = state(t)
    copies = {keyword: buffer.clone() for keyword, buffer in buffers.items()}
    memo[id(t)] = rebuild(name, shape, dtype, canonical, copies, requires_grad, is_parameter)
    return memo[id(t)]


torch.serialization.add_safe_globals([rebuild, parse])
