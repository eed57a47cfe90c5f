"""Append zeros to quantized tensors, and drop them again, as DTensor does with uneven shards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, buffer_shape
from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.formats import Slot
from qtensor.library.same_rows import equal_when_run, has_data
from qtensor.storage import geometry
from qtensor.storage.ops.table import PRESERVE, Args, Kwargs, Op, implements
from qtensor.storage.origin import FRESH
from qtensor.storage.rebuild import separate, with_buffers

if TYPE_CHECKING:
    from qtensor.storage.base import QuantizedTensorStorage


@implements(PRESERVE, "constant_pad_nd")
def _pad(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``constant_pad_nd``: append zero bytes, which decode to zeros.

    In a block whose factor is NaN, the appended zeros read as NaN, as every value there does.

    Raises:
        UnsupportedError: the padding is negative, not zero, or before the first entry, or the
            factors run across the dim.
    """
    t, sizes = args[:2]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    after = [0] * (t.ndim - len(sizes) // 2) + list(sizes[1::2])[::-1]
    grown = [dim for dim, n in enumerate(after) if n]
    if value or any(sizes[::2]) or min(after) < 0 or not all([_resizes(t, dim) for dim in grown]):
        fail(
            f"pad[{t._quantizer.format}]",
            "only zeros can be appended, along the first or the last dim",
            f"pad={list(sizes)}, value={value} for {tuple(t.shape)}",
            "Call .dequantize() first",
            UnsupportedError,
        )
    shape = tuple([n + m for n, m in zip(t.shape, after, strict=True)])
    buffers = resized(t, geometry.whole_buffers(t), shape)
    return with_buffers(t, separate(buffers, t), shape, origin=FRESH)


def _resizes(t: QuantizedTensorStorage, dim: int) -> bool:
    """Return whether a change of the size of ``dim`` changes only the end of each buffer."""
    middle = dim not in (0, t.ndim - 1)
    return not (middle and any([d.axis == "m" for s in t._quantizer.slots for d in s.dims]))


def resized(t: QuantizedTensorStorage, buffers: list[Tensor], shape: Shape) -> list[Tensor]:
    """Return ``buffers`` with zeros appended, or entries dropped, for a tensor of ``shape``."""
    slots = t._quantizer.slots
    return [
        _resized(slot, buffer, buffer_shape(slot.dims, shape))
        for slot, buffer in zip(slots, buffers, strict=True)
    ]


def _resized(slot: Slot, buffer: Tensor, size: Shape) -> Tensor:
    if tuple(buffer.shape) == tuple(size):
        return buffer
    if slot.swizzled:
        tiles = geometry.as_tiles(slot, buffer.new_empty(tuple(size))).shape
        return geometry.from_tiles(slot, _fit(geometry.as_tiles(slot, buffer), tiles))
    return _fit(buffer, size)


def _fit(buffer: Tensor, size: Shape) -> Tensor:
    changes: list[int] = []
    for have, want in zip(reversed(buffer.shape), reversed(size), strict=True):
        changes += [0, want - have]
    return torch.nn.functional.pad(buffer, changes).contiguous()


def may_end_with_padding(t: QuantizedTensorStorage, dim: int) -> bool:
    """Return whether a collective or ``new_zeros`` may have left padding at the end of ``dim``."""
    return t._origin.may_be_padded and _resizes(t, dim)


def buffers_before(t: QuantizedTensorStorage, dim: int, size: int) -> list[Tensor] | None:
    """Return the buffers of the first ``size`` entries, which end inside a block before padding.

    They are views, except for swizzled factors of which whole columns of tiles are dropped.
    While tracing there are no bytes to compare, so the graph gets an op that compares them at run
    time, and the buffers are copies.

    Args:
        t: a tensor that may end with padding.
        dim: the dim, not negative.
        size: entries to keep.

    Returns:
        None if the entries end at the end of a block, where an ordinary slice serves; or if the
        other entries are not zero, so that they cannot be padding.

    Raises:
        QTensorError: when a graph runs, if the other entries are not zero bytes.
    """
    if not _cuts_a_block(t, dim, size):
        return None
    shape = (*t.shape[:dim], size, *t.shape[dim + 1 :])
    if not has_data(t.buffers()[0]):
        return _traced_buffers_before(t, shape, dim, size)
    if not ends_with_zeros(t, dim, size):
        return None
    slots = t._quantizer.slots
    sizes = [buffer_shape(slot.dims, shape) for slot in slots]
    whole = geometry.whole_buffers(t)
    return [_first(slot, b, n) for slot, b, n in zip(slots, whole, sizes, strict=True)]


def _first(slot: Slot, buffer: Tensor, size: Shape) -> Tensor:
    """Return the first entries of a buffer."""
    if tuple(buffer.shape) == tuple(size):
        return buffer
    if slot.swizzled:
        tiles = geometry.as_tiles(slot, buffer.new_empty(tuple(size))).shape
        return geometry.from_tiles(slot, geometry.as_tiles(slot, buffer)[: tiles[0], : tiles[1]])
    return buffer[tuple(map(slice, size))]


def _traced_buffers_before(
    t: QuantizedTensorStorage, shape: Shape, dim: int, size: int
) -> list[Tensor]:
    own = geometry.whole_buffers(t)
    again = resized(t, resized(t, own, shape), t.shape)
    message = (
        f"slice[{t._quantizer.format}]: only zeros may be dropped inside of a block; got other "
        f"values after {size} of {t.shape[dim]} in dim {dim}. Slice at a block, or call "
        ".dequantize() first."
    )
    pairs = zip(own, again, strict=True)
    checked = [a if a is b else equal_when_run((a, b), message) for a, b in pairs]
    return [b.clone() for b in resized(t, checked, shape)]


def ends_with_zeros(t: QuantizedTensorStorage, dim: int, size: int) -> bool:
    """Return whether the codes after the first ``size`` entries along ``dim`` are zeros.

    Every factor encodes zeros, so factors of the first entries may then change freely. A tensor
    without data, as in a trace, gives False.
    """
    own = geometry.whole_buffers(t)
    if not has_data(own[0]):
        return False
    shape = (*t.shape[:dim], size, *t.shape[dim + 1 :])
    again = resized(t, resized(t, own, shape), t.shape)
    codes = [i for i, slot in enumerate(t._quantizer.slots) if slot.name.endswith("data")]
    return all([torch.equal(own[i], again[i]) for i in codes])


def _cuts_a_block(t: QuantizedTensorStorage, dim: int, size: int) -> bool:
    """Return whether ``size`` entries along ``dim`` end inside a block."""
    axis, rows = (
        ("k", size) if dim == t.ndim - 1 else ("m", size * math.prod(t.shape[dim + 1 : -1]))
    )
    quantizer = t._quantizer
    blocks = [geometry.granule(s, d) for s in quantizer.slots for d in s.dims if d.axis == axis]
    return any([rows % block for block in (*blocks, quantizer.square_block)])
