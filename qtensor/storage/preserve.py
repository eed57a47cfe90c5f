"""aten ops that keep the subclass: exact on the bytes, or an error."""

from __future__ import annotations

import math
from typing import Any

import torch

from qtensor.errors import UnsupportedError, fail
from qtensor.storage import geometry
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.rebuild import FLOATING, Handler, map_buffers, same, with_buffers
from qtensor.storage.views import VIEWS
from qtensor.storage.write import copy_into, plain


def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return same(args[0])


def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return map_buffers(args[0], torch.clone)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another device moves the buffers; another floating dtype changes the nominal dtype and no byte."""
    t, dtype = args[0], kwargs.get("dtype")
    if dtype is not None and dtype not in FLOATING:
        return func(plain(t), **kwargs)
    moves = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking") and v is not None}
    if "device" in moves:
        return map_buffers(t, lambda b: b.to(**moves, copy=True), dtype=dtype)
    return map_buffers(t, torch.clone, dtype=dtype)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return copy_into(args[0], args[1])


def _empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """empty_like, new_empty, new_zeros: buffers are allocated by the quantizer, never by the C++ allocator."""
    t, name = args[0], func._schema.name
    dtype = kwargs.get("dtype") or t.dtype
    shape = tuple(args[1]) if "new_" in name else t.shape
    device = kwargs.get("device") or t.device
    if dtype not in FLOATING:
        return torch.zeros(shape, dtype=dtype, device=device)
    tensors = t._quantizer.alloc_tensors(shape, device=device)
    result = with_buffers(t, list(tensors.values()), shape, dtype=dtype)
    if name == "aten::new_zeros":
        zeros = torch.zeros(shape, dtype=torch.float32, device=device)
        scale = (
            torch.ones(1, dtype=torch.float32, device=device) if t._quantizer.needs_scale else None
        )
        t._quantizer.update_quantized(zeros, result, scale=scale)
    return result


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = next(t for t in tensors if isinstance(t, QuantizedTensorStorage))
    for t in tensors:
        if getattr(t, "_quantizer", None) != first._quantizer or t.dtype != first.dtype:
            fail(
                f"cat[{first._quantizer.format}]",
                "all parts must have one quantizer and nominal dtype",
                [getattr(getattr(t, "_quantizer", None), "canonical", "plain") for t in tensors],
                "Dequantize them first, or quantize them alike",
            )
    dim = geometry.normalize(dim, first.ndim)
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :])
    for t in tensors:
        if (*t.shape[:dim], *t.shape[dim + 1 :]) != (*first.shape[:dim], *first.shape[dim + 1 :]):
            rule = f"all sizes but that of dim {dim} must be equal"
            fail("cat", rule, [tuple(t.shape) for t in tensors], "Mend the shapes")
    quantizer = first._quantizer
    block = quantizer.spec.block
    square = block[1] if block is not None and quantizer.two_dimensional else 1
    if any(math.prod(t.shape[dim:-1] or t.shape[-1:]) % square for t in tensors[:-1]):
        quantizer = quantizer.without_square_blocks()
    return with_buffers(first, geometry.cat_buffers(tensors, dim), shape, quantizer=quantizer)


def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim, index = args
    index = index.reshape(-1)
    if (
        t.ndim == 2
        and geometry.normalize(dim, 2) == 0
        and t._quantizer.rowwise
        and not t._quantizer.columnwise
    ):
        buffers = geometry.select_rows(t, index)
        if buffers is not None:
            quantizer = t._quantizer.without_square_blocks()
            return with_buffers(t, buffers, (index.shape[0], t.shape[1]), quantizer=quantizer)
    rule = "rows can be picked from 2-D rowwise data whose factors do not span rows"
    fail(
        f"index_select[{t._quantizer.format}]",
        rule,
        f"dim {dim} of {tuple(t.shape)}, {t._quantizer.canonical}",
        "Dequantize first",
        UnsupportedError,
    )


def _pin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return map_buffers(args[0], lambda b: b.pin_memory())


def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(b.is_pinned() for b in args[0].buffers())


def _same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return tuple(args[0].shape) == tuple(args[1].shape)


PRESERVE: dict[str, Handler] = {
    "detach": _share,
    "alias": _share,
    "lift_fresh": _share,
    "contiguous": _share,
    "clone": _clone,
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "empty_like": _empty,
    "new_empty": _empty,
    "new_empty_strided": _empty,
    "new_zeros": _empty,
    "cat": _cat,
    "index_select": _index_select,
    "_pin_memory": _pin,
    "is_pinned": _is_pinned,
    "is_same_size": _same_size,
    **VIEWS,
}
"""Op name (aten) -> handler. The result is the subclass, exact, or a QTensorError that names the rule."""
