"""Handle aten ops whose result is the subclass: the bytes stay exact, or the op raises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from qtensor.core.buffer_shapes import normalize
from qtensor.core.errors import UnsupportedError, fail
from qtensor.storage import geometry
from qtensor.storage.base import QuantizedTensorStorage, is_quantized
from qtensor.storage.checks import check_nominal
from qtensor.storage.ops.table import PRESERVE, Args, Handler, Kwargs, Op, implements
from qtensor.storage.ops.views import own_copy
from qtensor.storage.ops.write import copy_into, plain
from qtensor.storage.origin import FRESH, Origin, of_copy
from qtensor.storage.rebuild import (
    FLOATING,
    is_row_major,
    map_buffers,
    reshaped,
    same,
    separate,
    set_origin,
    strides_of,
    tensor_of,
    with_buffers,
)

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor


def _of_the_tensor(handler: Handler) -> Handler:
    """Return a handler that does to a reshaped view what it does to the tensor in the view."""

    def run(func: Op, args: Args, kwargs: Kwargs) -> Any:
        t = args[0]
        if (inner := tensor_of(t)) is t:
            return handler(func, args, kwargs)
        result = handler(func, (inner, *args[1:]), kwargs)
        if is_quantized(result):
            return reshaped(result, t.shape)
        return result.view(t.shape) if isinstance(result, torch.Tensor) else result

    return run


_ROW_MAJOR = (None, torch.contiguous_format, torch.preserve_format)


@implements(PRESERVE, "detach", "alias", "lift_fresh")
def _share(func: Op, args: Args, kwargs: Kwargs) -> Any:
    return same(args[0])


def _check_memory_format(
    op: str, t: QuantizedTensor, memory_format: torch.memory_format | None
) -> None:
    """Refuse channels-last formats, because buffers follow the logical shape in row-major order.

    Raises:
        UnsupportedError: ``memory_format`` is not row-major.
    """
    if memory_format not in _ROW_MAJOR:
        rule = "a quantized tensor is stored in contiguous_format"
        fix = "Drop memory_format=, call it on .dequantize(), or give a model its memory format "
        fix += "before quantize_: the inputs of a convolution decide that of its output"
        fail(f"{op}[{t._quantizer.format}]", rule, memory_format, fix, UnsupportedError)


@implements(PRESERVE, "contiguous")
@_of_the_tensor
def _contiguous(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle contiguous, which arrives here in inference mode."""
    t = args[0]
    _check_memory_format("contiguous", t, kwargs.get("memory_format"))
    return same(t) if is_row_major(t) else own_copy(t)


@implements(PRESERVE, "clone")
@_of_the_tensor
def _clone(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle clone: the copy of a transpose is a transpose in memory of its own, as in torch."""
    t, memory_format = args[0], kwargs.get("memory_format")
    _check_memory_format("clone", t, memory_format)
    is_part = any(each._origin.is_part for each in (t, *t._parts))
    if is_part or t._parts:
        copied = own_copy(t)
        is_part |= bool(copied._parts)
    else:
        copied = map_buffers(t, torch.clone, origin=of_copy(t._origin))
    if not (is_part or is_row_major(t) or memory_format is torch.contiguous_format):
        strides = t._origin.strides or strides_of(t)
        set_origin(copied, copied._origin._replace(strides=strides))
    return copied


@implements(PRESERVE, "_to_copy")
@_of_the_tensor
def _to_copy(func: Op, args: Args, kwargs: Kwargs) -> Any:
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
    move = (lambda b: b.to(**moves, copy=True)) if "device" in moves else torch.clone
    return map_buffers(t, move, dtype=dtype, origin=of_copy(t._origin))


@implements(PRESERVE, "copy_")
def _copy_(func: Op, args: Args, kwargs: Kwargs) -> Any:
    return copy_into(args[0], args[1])


@implements(PRESERVE, "new_empty", "new_empty_strided", "new_zeros")
def _new(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle new_empty and new_zeros, which name the shape."""
    return _empty(func, args, kwargs)


@implements(PRESERVE, "empty_like")
@_of_the_tensor
def _empty(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle empty_like, new_empty and new_zeros: the quantizer allocates the buffers."""
    t, name = args[0], func._schema.name
    dtype = kwargs.get("dtype") or t.dtype
    shape = tuple(args[1]) if "new_" in name else t.shape
    device = kwargs.get("device") or t.device
    _check_memory_format(name.removeprefix("aten::"), t, kwargs.get("memory_format"))
    if dtype not in FLOATING:
        return torch.zeros(shape, dtype=dtype, device=device)
    tensors = t._quantizer.alloc_tensors(shape, device=device)
    result = with_buffers(t, list(tensors.values()), shape, dtype=dtype, origin=FRESH)
    if name == "aten::new_zeros":
        zeros = torch.zeros(shape, dtype=torch.float32, device=device)
        scale = (
            torch.ones(1, dtype=torch.float32, device=device) if t._quantizer.needs_scale else None
        )
        t._quantizer.update_quantized(zeros, result, scale=scale)
        _take_shared(result, t)
    return result


def _take_shared(zeros: QuantizedTensor, t: QuantizedTensor) -> None:
    """Give a tensor of zeros, which every factor encodes, the factors that rows of ``t`` share.

    A copy of ``t`` into a part of the zeros then moves bytes. fully_shard pads shards in this way.
    """
    for slot in t._quantizer.slots:
        source = getattr(t, slot.name)
        if not any(d.axis in ("m", "lead") for d in slot.dims):
            target = getattr(zeros, slot.name)
            if target.shape == source.shape:
                target.copy_(source)
    # fully_shard makes a padded shard in this way, and then takes the rows before the padding.
    shard_of = t._origin.shard_of or tuple(t.shape)
    set_origin(zeros, Origin(may_be_padded=True, split=t._origin.split, shard_of=shard_of))


@implements(PRESERVE, "cat")
def _cat(func: Op, args: Args, kwargs: Kwargs) -> Any:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = next(t for t in tensors if isinstance(t, QuantizedTensorStorage))
    for t in tensors:
        if getattr(t, "_quantizer", None) != first._quantizer or t.dtype != first.dtype:
            fail(
                f"cat[{first._quantizer.format}]",
                "all parts must have one quantizer and nominal dtype",
                [getattr(getattr(t, "_quantizer", None), "canonical", "plain") for t in tensors],
                "Dequantize them first, or quantize them with one quantizer"
                + geometry.BUCKETS * (first.ndim == 1),
            )
    dim = normalize(dim, first.ndim)
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :])
    for t in tensors:
        if (*t.shape[:dim], *t.shape[dim + 1 :]) != (*first.shape[:dim], *first.shape[dim + 1 :]):
            rule = f"all sizes except that of dim {dim} must be equal"
            fail("cat", rule, [tuple(t.shape) for t in tensors], "Fix the shapes")
    quantizer = first._quantizer
    square = quantizer.square_block
    if any(math.prod(t.shape[dim:-1] or t.shape[-1:]) % square for t in tensors[:-1]):
        quantizer = quantizer.without_square_blocks()
    buffers = separate(geometry.cat_buffers(tensors, dim), first)
    padded = all([t._origin.may_be_padded for t in tensors])
    origin = Origin(may_be_padded=True) if padded else FRESH
    return with_buffers(first, buffers, shape, quantizer=quantizer, origin=origin)


@implements(PRESERVE, "_pin_memory")
@_of_the_tensor
def _pin(func: Op, args: Args, kwargs: Kwargs) -> Any:
    return map_buffers(args[0], lambda b: b.pin_memory(), origin=of_copy(args[0]._origin))


@implements(PRESERVE, "is_pinned")
@_of_the_tensor
def _is_pinned(func: Op, args: Args, kwargs: Kwargs) -> bool:
    return all(b.is_pinned() for b in args[0].buffers())


@implements(PRESERVE, "is_same_size")
def _same_size(func: Op, args: Args, kwargs: Kwargs) -> bool:
    return tuple(args[0].shape) == tuple(args[1].shape)
