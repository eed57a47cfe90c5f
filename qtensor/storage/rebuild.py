"""Make tensors from buffers, and from parts of other tensors; each result is given its origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, is_empty
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.core.torch_state import OWN_KEY
from qtensor.storage.origin import FRESH, TURNED, Origin, Padded

if TYPE_CHECKING:
    from qtensor.storage.base import Context, QuantizedTensorStorage
    from qtensor.storage.tensor import QuantizedTensor

Q = TypeVar("Q", bound="QuantizedTensor")
S = TypeVar("S", bound="QuantizedTensorStorage")
_make = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided

KEYS: tuple[Any, ...] = () if OWN_KEY is None else (None, False, False, OWN_KEY)
"""The last positional arguments of ``_make_wrapper_subclass`` for a quantized tensor."""

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Nominal dtypes, and dtypes of plain GEMM operands."""


def wrap(
    cls: type[Q],
    shape: Shape,
    dtype: torch.dtype,
    quantizer: QuantizerLike,
    buffers: Sequence[Tensor],
    origin: Origin,
    context: Context | None = None,
) -> Q:
    """Return ``cls(...)`` without checks.

    Args:
        cls: the tensor class.
        shape: the logical shape.
        dtype: the nominal dtype.
        quantizer: describes the buffers.
        buffers: inner buffers in slot order; extra tensors at the end are ignored.
        origin: how the buffers relate to those of other tensors.
        context: the flatten context, if there is one already.
    """
    device = buffers[0].device
    t = _make(cls, shape, None, None, None, dtype, _STRIDED, device, False, False, *KEYS)
    for (name, _), buffer in zip(quantizer.attributes, buffers, strict=False):
        setattr(t, name, buffer)
    t._quantizer = quantizer
    if origin is FRESH:
        t._context = context or (cls.__qualname__, dtype, quantizer, quantizer.scale_layout)
    else:
        t._origin = origin
        t._context = context or _context_of(cls, dtype, quantizer, origin)
    return t


def _context_of(
    cls: type[QuantizedTensorStorage], dtype: torch.dtype, quantizer: QuantizerLike, origin: Origin
) -> Context:
    return (cls.__qualname__, dtype, quantizer, quantizer.scale_layout + origin.suffix())


def set_origin(t: QuantizedTensorStorage, origin: Origin) -> None:
    """Give a tensor or storage another origin."""
    t._origin = origin  # type: ignore[misc]  # each class has room for it
    # A bare storage makes its context when it is asked for.
    if hasattr(t, "_context"):
        t._context = _context_of(type(t), t._context[1], t._quantizer, origin)


def of_parts(
    cls: type[Q],
    shape: Shape,
    dtype: torch.dtype,
    quantizer: QuantizerLike,
    parts: Sequence[QuantizedTensor],
    origin: Origin,
    context: Context | None = None,
) -> Q:
    """Return a tensor without buffers, which shows ``parts`` as ``origin.layout`` says.

    Args:
        cls: the tensor class.
        shape: the logical shape.
        dtype: the nominal dtype.
        quantizer: describes the buffers that the tensor would have.
        parts: quantized tensors.
        origin: has the layout.
        context: the flatten context, if there is one already.
    """
    device = parts[0].device
    t = _make(cls, shape, None, None, None, dtype, _STRIDED, device, False, False, *KEYS)
    t._quantizer, t._origin = quantizer, origin
    t._context = context or _context_of(cls, dtype, quantizer, origin)
    set_parts(t, parts)
    return t


RESHAPED = "reshaped"
"""The layout of a tensor under a shape in which its codes and factors have no form."""
FROM_PARTS: dict[str, Callable[[Sequence[QuantizedTensor]], QuantizedTensor]] = {}
"""Functions by layout: each makes a tensor of parts that a compiled graph returns."""


def set_parts(t: QuantizedTensor, parts: Sequence[QuantizedTensor]) -> None:
    """Let a tensor without buffers show ``parts``, which flatten to attributes ``_part0`` ..."""
    t._parts = tuple(parts)
    for name, part in zip(part_names(len(parts)), parts, strict=True):
        setattr(t, name, part)


def part_names(count: int) -> list[str]:
    """Return the names of the attributes that hold the parts of a tensor without buffers."""
    return [f"_part{i}" for i in range(count)]


def same(t: Q) -> Q:
    """Return an alias of ``t``: another tensor with the same buffers, quantizer and origin."""
    quantizer, context, origin = t._quantizer, t._context, t._origin
    cls, dtype = type(t), context[1]
    if t._parts:
        return of_parts(cls, t.shape, dtype, quantizer, t._parts, origin, context)
    other = _make(cls, t.shape, None, None, None, dtype, _STRIDED, t.device, False, False, *KEYS)
    for name, _ in quantizer.attributes:
        setattr(other, name, getattr(t, name))
    other._quantizer, other._context = quantizer, context
    if origin is not FRESH:
        other._origin = origin
    return other


def reshaped(t: Q, shape: Shape) -> Q:
    """Return ``t`` under another shape, in which its codes and factors need no form."""
    origin = Origin(
        is_copy=t._origin.is_copy, layout=RESHAPED, may_be_padded=t._origin.may_be_padded
    )
    # Another object: the caller may give `t` other buffers.
    return of_parts(type(t), tuple(shape), t._context[1], t._quantizer, [same(t)], origin)


def tensor_of(t: S) -> S:
    """Return the tensor that a reshaped view holds, and any other tensor as it is."""
    return t._parts[0] if t._origin.layout == RESHAPED else t  # type: ignore[return-value]


def take_over(t: QuantizedTensor, value: QuantizedTensor) -> None:
    """Make ``t`` an alias of ``value``, in place.

    ``t`` stays the shard of a DTensor that it was, unless ``value`` is a shard itself.
    """
    origin = value._origin
    if origin.split is None and t._origin.split is not None:
        origin = origin._replace(split=t._origin.split)
    inner = [name for name, _ in t._FLATTEN_TENSOR_BUFFERS]
    for name in (*inner, "_parts", *part_names(len(t._parts))):
        t.__dict__.pop(name, None)
    if value._parts:
        set_parts(t, value._parts)
    else:
        for name in value._quantizer.slot_names:
            setattr(t, name, getattr(value, name))
    t._quantizer, t._context = value._quantizer, value._context
    set_origin(t, origin)


def with_buffers(
    t: S,
    buffers: Sequence[Tensor],
    shape: Shape | None = None,
    *,
    origin: Origin,
    dtype: torch.dtype | None = None,
    quantizer: QuantizerLike | None = None,
) -> S:
    """Return a tensor or storage of the class of ``t`` with other buffers.

    Args:
        t: a tensor or storage.
        buffers: the new buffers, in the slot order of ``quantizer``.
        shape: logical shape; the shape of ``t`` if None.
        origin: how the new buffers relate to those of other tensors.
        dtype: nominal dtype; the one of ``t`` if None.
        quantizer: describes the buffers; the quantizer of ``t`` if None.
    """
    quantizer = t._quantizer if quantizer is None else quantizer
    named = {slot.keyword: buffer for slot, buffer in zip(quantizer.slots, buffers, strict=True)}
    result = type(t)(t.shape if shape is None else shape, dtype or t.dtype, quantizer, **named)
    if origin is not FRESH:
        set_origin(result, origin)
    return result


def part(
    t: S,
    buffers: Sequence[Tensor],
    shape: Shape,
    *,
    strides: Sequence[int] | None = None,
    shared: Sequence[str] = (),
    quantizer: QuantizerLike | None = None,
    padded: Padded | None = None,
) -> S:
    """Return a view of ``t`` or of a part of it.

    Args:
        t: a tensor or storage.
        buffers: the buffers of the view. Where one is not a view of a buffer of ``t``, a write to
            the result raises an error.
        shape: its shape.
        strides: the strides of the same view of a plain tensor; None for row-major order.
        shared: names of the buffers of the view that also serve values outside it.
        quantizer: describes the buffers; the quantizer of ``t`` if None.
        padded: describes ``t``, if only padding may follow the part.
    """
    result = with_buffers(t, buffers, shape, origin=FRESH, quantizer=quantizer)
    old = t._origin
    is_view = shares_memory(result, t)
    # A write to an empty part changes nothing, so it need not reach the whole.
    is_copy = not (is_view or is_empty(shape)) or (padded is not None and padded.cuts_a_block)
    if not is_view:
        # A copy of some buffers alone would mix old and new values after a write to the whole.
        named = zip(result._quantizer.slot_names, result.buffers(), strict=True)
        own = [b.clone() if in_memory_of(b, getattr(t, name)) else b for name, b in named]
        result = with_buffers(result, own, origin=FRESH)
    if strides is not None:
        strides = None if _is_contiguous(shape, strides) else tuple(strides)
    if is_copy or result.numel() != t.numel():
        origin = old._replace(
            is_part=True,
            strides=strides,
            shared=tuple(dict.fromkeys((*old.shared, *shared))),
            is_copy=old.is_copy or is_copy,
            split=None,
            padded=padded if is_view else None,
        )
    else:
        is_same = tuple(shape) == tuple(t.shape)
        keeps_rows = tuple(shape[-1:]) == tuple(t.shape[-1:])
        origin = old._replace(
            strides=strides,
            split=old.split if keeps_rows else None,
            padded=old.padded if is_same else None,
        )
    if origin != FRESH:
        set_origin(result, origin)
    return result


def _is_contiguous(shape: Shape, strides: Sequence[int]) -> bool:
    """Return whether a plain tensor is contiguous; False if a size is symbolic."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=False):
        if not (isinstance(size, int) and isinstance(stride, int)):
            return False
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return len(strides) == len(shape)


def strides_of(t: QuantizedTensor) -> tuple[int, ...]:
    """Return the strides of the same view of a plain tensor; () where they are unknown."""
    strides = t._origin.strides
    if strides == TURNED:
        return (1, t.shape[0])
    if t._origin.layout == "transposed":
        strides = strides_of(t._parts[0])
        return (*strides[:-2], *strides[:-3:-1])
    return t.stride() if strides is None else strides


def viewed_strides(t: QuantizedTensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a view of ``t``; () where torch has none, or sizes are symbolic."""
    strides = strides_of(t)
    if not (strides and all(isinstance(n, int) for n in (*t.shape, *shape, *strides))):
        return ()
    like = torch.empty_strided(tuple(t.shape), strides, device="meta")
    try:
        return like.view(tuple(shape)).stride()
    except RuntimeError:
        return ()


def turned_strides(t: QuantizedTensor) -> tuple[int, ...] | None:
    """Return the strides of the transpose of a matrix ``t``; None for row-major order."""
    known = t._origin.strides
    if known == TURNED:
        return None
    strides = strides_of(t)[::-1]
    if known is None and not _is_contiguous(t.shape[::-1], strides):
        return TURNED
    return None if _is_contiguous(t.shape[::-1], strides) else strides


def is_row_major(t: QuantizedTensor) -> bool:
    """Return whether the same view of a plain tensor is contiguous."""
    if t._origin.layout == "transposed":
        return _is_contiguous(t.shape, strides_of(t))
    return t._origin.strides is None


def rows_are_in_order(t: QuantizedTensor) -> bool:
    """Return what ``is_row_major`` does, also where sizes are symbolic: the graph gets guards."""
    strides, expected = strides_of(t), 1
    if is_row_major(t) or not strides or all(isinstance(n, int) for n in (*t.shape, *strides)):
        return is_row_major(t)
    for size, stride in zip(reversed(t.shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def shares_memory(view: QuantizedTensorStorage, whole: QuantizedTensorStorage) -> bool:
    """Return whether each buffer of ``view`` is in the memory of that buffer of ``whole``."""
    return all(
        in_memory_of(getattr(view, slot.name), getattr(whole, slot.name))
        for slot in view._quantizer.slots
    )


def in_memory_of(view: Tensor, whole: Tensor) -> bool:
    """Return whether both tensors lie in one memory."""
    return view.untyped_storage()._cdata == whole.untyped_storage()._cdata


def separate(buffers: Sequence[Tensor], t: QuantizedTensorStorage) -> list[Tensor]:
    """Return ``buffers`` with copies of those that ``t`` holds: a result owns its memory."""
    held = {id(buffer) for buffer in t.buffers()}
    return [buffer.clone() if id(buffer) in held else buffer for buffer in buffers]


def map_buffers(
    t: S, function: Callable[[Tensor], Tensor], *, origin: Origin, dtype: torch.dtype | None = None
) -> S:
    """Return ``t`` with ``function`` applied to each buffer, and another nominal dtype."""
    return with_buffers(t, [function(b) for b in t.buffers()], origin=origin, dtype=dtype)
