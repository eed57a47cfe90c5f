"""Append zeros to quantized tensors, and drop them again, as DTensor does with uneven shards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import UnsupportedError, fail
from qtensor.formats import Slot
from qtensor.layout import Shape, buffer_shape
from qtensor.library.same_rows import equal_when_run, has_data
from qtensor.storage import geometry
from qtensor.storage.rebuild import with_buffers


def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    return with_buffers(t, resized(t, geometry.whole_buffers(t), shape), shape)


def _resizes(t: Any, dim: int) -> bool:
    """Return whether a change of the size of ``dim`` changes only the end of each buffer."""
    middle = dim not in (0, t.ndim - 1)
    return not (middle and any([d.axis == "m" for s in t._quantizer.slots for d in s.dims]))


def resized(t: Any, buffers: list[Tensor], shape: Shape) -> list[Tensor]:
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


def keep_origin(result: Any, t: Any) -> Any:
    """Return ``result``, marked as a result of a gather or scatter where ``t`` is one."""
    result._is_gathered = getattr(t, "_is_gathered", False)
    result._is_scattered = getattr(t, "_is_scattered", False)
    return result


def drop_padding(t: Any, dim: int, size: int) -> Any | None:
    """Return a copy of the first ``size`` entries of a gathered or scattered tensor.

    A trace has no data: an op compares bytes when the graph runs.

    Args:
        t: a tensor that may end with padding.
        dim: the dim, not negative.
        size: entries to keep.

    Returns:
        None if the other entries are not zero bytes, so that they cannot be padding; or if a
        slice of the gathered tensor gives the same.

    Raises:
        QTensorError: when a graph runs, if the other entries are not zero bytes.
    """
    cuts = _cuts_a_block(t, dim, size)
    if not (0 < size < t.shape[dim] and _resizes(t, dim) and (cuts or t._is_scattered)):
        return None
    shape = (*t.shape[:dim], size, *t.shape[dim + 1 :])
    own = geometry.whole_buffers(t)
    again = resized(t, resized(t, own, shape), t.shape)
    if has_data(own[0]):
        if not all([torch.equal(a, b) for a, b in zip(own, again, strict=True)]):
            return None
    else:
        message = (
            f"slice[{t._quantizer.format}]: only zeros may be dropped inside of a block; got other "
            f"values after {size} of {t.shape[dim]} in dim {dim}. Slice at a block, or call "
            ".dequantize() first."
        )
        pairs = zip(own, again, strict=True)
        own = [a if a is b else equal_when_run((a, b), message) for a, b in pairs]
    kept = with_buffers(t, [b.clone() for b in resized(t, own, shape)], shape)
    # torch may drop padding of the other dim next.
    return keep_origin(kept, t)


def part_of_zeros(t: Any, size: int) -> list[Tensor] | None:
    """Return views of the buffers of the first ``size`` rows of a result of ``new_zeros``.

    ``fully_shard`` copies a shorter shard into them, and keeps them.

    Returns:
        None if ``size`` is at a block, or if codes after it are no longer zero.
    """
    if not 0 < size < t.shape[0] or not _cuts_a_block(t, 0, size):
        return None
    shape = (size, *t.shape[1:])
    own = geometry.whole_buffers(t)
    again = resized(t, resized(t, own, shape), t.shape)
    slots = t._quantizer.slots
    codes = [i for i, slot in enumerate(slots) if slot.name.endswith("data")]
    if not has_data(own[0]) or any([not torch.equal(own[i], again[i]) for i in codes]):
        return None
    sizes = [buffer_shape(slot.dims, shape) for slot in slots]
    if any([s.swizzled and b.shape != n for s, b, n in zip(slots, own, sizes, strict=True)]):
        return None
    return [b[tuple(map(slice, size))] for b, size in zip(own, sizes, strict=True)]


def _cuts_a_block(t: Any, dim: int, size: int) -> bool:
    """Return whether ``size`` entries along ``dim`` end inside a block."""
    axis, rows = (
        ("k", size) if dim == t.ndim - 1 else ("m", size * math.prod(t.shape[dim + 1 : -1]))
    )
    quantizer = t._quantizer
    blocks = [geometry.granule(s, d) for s in quantizer.slots for d in s.dims if d.axis == axis]
    if quantizer.two_dimensional:
        blocks.append(quantizer.spec.block[1])
    return any([rows % block for block in blocks])
