"""Handle aten ops whose result is the subclass: the bytes stay exact, or the op raises."""

from __future__ import annotations

import math
from typing import Any

import torch

from qtensor.errors import UnsupportedError, fail
from qtensor.storage import geometry, indexing, padding
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.checks import check_nominal
from qtensor.storage.rebuild import FLOATING, Handler, map_buffers, same, with_buffers
from qtensor.storage.views import VIEWS, own_copy
from qtensor.storage.write import copy_into, plain

_ROW_MAJOR = (None, torch.contiguous_format, torch.preserve_format)


def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return same(args[0])


def _check_memory_format(op: str, t: Any, memory_format: torch.memory_format | None) -> None:
    """Refuse channels-last formats, because buffers follow the logical shape in row-major order.

    Raises:
        UnsupportedError: ``memory_format`` is not row-major.
    """
    if memory_format not in _ROW_MAJOR:
        rule = "a quantized tensor is stored in contiguous_format"
        fix = "Drop memory_format=, or call it on .dequantize()"
        fail(f"{op}[{t._quantizer.format}]", rule, memory_format, fix, UnsupportedError)


def _contiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle contiguous: a part is copied into a tensor of its own."""
    t = args[0]
    _check_memory_format("contiguous", t, kwargs.get("memory_format"))
    result = same(t) if t._view_note is None else own_copy(t)
    return padding.keep_origin(result, t)


def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    _check_memory_format("clone", t, kwargs.get("memory_format"))
    return map_buffers(t, torch.clone) if t._view_note is None else own_copy(t)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``to``: move the buffers, and change the nominal dtype without changing a byte.

    An integer or bool dtype gives plain values.

    Raises:
        DtypeError: a floating dtype cannot be a nominal dtype, for example float8.
        UnsupportedError: the memory format is channels-last.
    """
    t, dtype = args[0], kwargs.get("dtype")
    _check_memory_format("to", t, kwargs.get("memory_format"))
    if dtype is not None and dtype not in FLOATING:
        if dtype.is_floating_point or dtype.is_complex:
            check_nominal(f"to[{t._quantizer.format}]", dtype)
        return func(plain(t), **kwargs)
    moves = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking") and v is not None}
    if "device" in moves:
        return map_buffers(t, lambda b: b.to(**moves, copy=True), dtype=dtype)
    return map_buffers(t, torch.clone, dtype=dtype)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return copy_into(args[0], args[1])


def _empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle empty_like, new_empty and new_zeros: the quantizer allocates the buffers."""
    t, name = args[0], func._schema.name
    dtype = kwargs.get("dtype") or t.dtype
    shape = tuple(args[1]) if "new_" in name else t.shape
    device = kwargs.get("device") or t.device
    _check_memory_format(name.removeprefix("aten::"), t, kwargs.get("memory_format"))
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
        _take_shared(result, t)
    return result


def _take_shared(zeros: Any, t: Any) -> None:
    """Give a tensor of zeros, which every factor encodes, the factors that rows of ``t`` share.

    A copy of ``t`` into a part of the zeros then moves bytes: fully_shard pads shards so.
    """
    for slot in t._quantizer.slots:
        source = getattr(t, slot.name)
        if not any(d.axis in ("m", "lead") for d in slot.dims):
            target = getattr(zeros, slot.name)
            if target.shape == source.shape:
                target.copy_(source)
    zeros._shards = getattr(t, "_shards", None)
    zeros._is_zeros = True


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
                "Dequantize them first, or quantize them with one quantizer",
            )
    dim = geometry.normalize(dim, first.ndim)
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :])
    for t in tensors:
        if (*t.shape[:dim], *t.shape[dim + 1 :]) != (*first.shape[:dim], *first.shape[dim + 1 :]):
            rule = f"all sizes except that of dim {dim} must be equal"
            fail("cat", rule, [tuple(t.shape) for t in tensors], "Fix the shapes")
    quantizer = first._quantizer
    block = quantizer.spec.block
    square = block[1] if block is not None and quantizer.two_dimensional else 1
    if any(math.prod(t.shape[dim:-1] or t.shape[-1:]) % square for t in tensors[:-1]):
        quantizer = quantizer.without_square_blocks()
    joined = with_buffers(first, geometry.cat_buffers(tensors, dim), shape, quantizer=quantizer)
    if all(getattr(t, "_is_gathered", False) for t in tensors):
        joined._is_gathered = True
    return joined


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
    "contiguous": _contiguous,
    "clone": _clone,
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "empty_like": _empty,
    "new_empty": _empty,
    "new_empty_strided": _empty,
    "new_zeros": _empty,
    "constant_pad_nd": padding.pad,
    "cat": _cat,
    "index": indexing.index,
    "index_select": indexing.index_select,
    "_pin_memory": _pin,
    "is_pinned": _is_pinned,
    "is_same_size": _same_size,
    **VIEWS,
}
"""Handlers of exact ops by aten op name. A handler raises a QTensorError that names the rule."""
