"""Slice, view, transpose and concatenate the inner buffers of quantized tensors.

Every function takes a tensor or storage and returns buffers in slot order. The dims of a slot
determine how its buffer changes. A result is exact, or an error names the rule. A slice of padded
scales may be shorter than newly quantized scales; readers use only the entries that they need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from einops import rearrange
from torch import Tensor

from qtensor.core import operand
from qtensor.core.buffer_shapes import Shape, buffer_shape, ceil_div, is_empty, rows_cols
from qtensor.core.errors import QTensorError, UnsupportedError, fail, this_rank
from qtensor.core.formats import Dim, FormatSpec, Slot
from qtensor.core.quantizer_registry import Move, QuantizerLike
from qtensor.library.same_rows import equal_when_run, has_data
from qtensor.storage.row_buffers import by_rows, has_row_factors

if TYPE_CHECKING:
    from qtensor.storage.base import QuantizedTensorStorage

TILE = (128, 4)
"""Rows and columns of a tile of swizzled scales."""

_AGAIN = "Call .dequantize() first, then quantize the result"


def _refuse(op: str, t: QuantizedTensorStorage, rule: str, got: object, fix: str = "") -> NoReturn:
    fail(f"{op}[{t._quantizer.format}]", rule, got, fix or _AGAIN, UnsupportedError)


def _as_whole(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a buffer of a slice with the padding of a whole tensor, or ``buffer`` itself."""
    if tuple(buffer.shape) == tuple(shape):
        return buffer
    padding: list[int] = []
    for have, want in zip(reversed(buffer.shape), reversed(shape), strict=True):
        padding += [0, want - have]
    return torch.nn.functional.pad(buffer, padding)


def whole_buffers(t: QuantizedTensorStorage) -> list[Tensor]:
    """Return the buffers of ``t``, each with the shape that a newly quantized tensor has."""
    return [
        _as_whole(getattr(t, slot.name), buffer_shape(slot.dims, t.shape))
        for slot in t._quantizer.slots
    ]


def slice_buffers(t: QuantizedTensorStorage, dim: int, start: int, end: int) -> list[Tensor]:
    """Return the buffers of ``t[..., start:end, ...]``, as views where the bytes are contiguous.

    Args:
        t: quantized tensor or storage, (d0, ..., dn).
        dim: counted from the front.
        start: in [0, size].
        end: in [start, size].

    Raises:
        UnsupportedError: the bounds cut a block or a packed group.
    """
    shape, is_last = t.shape, dim == len(t.shape) - 1
    total = shape[dim]
    rows = (start, end, total)
    outer = math.prod(shape[:dim])
    if not is_last:
        inner = math.prod(shape[dim + 1 : -1])
        rows = (start * inner, end * inner, total * inner)
    result = []
    for slot in t._quantizer.slots:
        buffer = getattr(t, slot.name)
        for index, axis in enumerate(slot.dims):
            if axis.axis == "lead" and not is_last:
                # Each buffer dim before ``lead`` is a single one, so it shifts the dim by one.
                buffer = buffer.narrow(index + dim, start, end - start)
            elif axis.axis == ("k" if is_last else "m"):
                if not is_last and outer != 1 and rows[:2] != (0, rows[2]):
                    rule = "slicing a middle dim needs factors that do not run along it"
                    _refuse("slice", t, rule, f"dim {dim} of {tuple(shape)}")
                buffer = _slice_axis(
                    t, slot, buffer, index, axis, (start, end, total) if is_last else rows
                )
        result.append(buffer)
    return result


def _slice_axis(
    t: QuantizedTensorStorage,
    slot: Slot,
    buffer: Tensor,
    index: int,
    axis: Dim,
    bounds: tuple[int, int, int],
) -> Tensor:
    start, end, total = bounds
    if start == 0 and end == total:
        return buffer
    needed = granule(slot, axis)
    kind = "Row" if axis.axis == "m" else "Column"
    if start % needed or (end % needed and end != total):
        rule = f"{kind} slicing of {slot.name} requires bounds at a multiple of {needed}"
        slots = t._quantizer.slots
        every = math.lcm(*[granule(s, d) for s in slots for d in s.dims if d.axis == axis.axis])
        inner = 1 if axis.axis == "k" else math.prod(t.shape[1:-1])
        fix = f"Slice at multiples of {every}, or call .dequantize() first"
        if this_rank():
            shard = f"Shard({t.ndim - 1 if axis.axis == 'k' else 0})"
            fix += (
                f". {shard} over n ranks needs a size whose n-th part, rounded up, is a multiple "
                f"of {every // math.gcd(every, inner)}"
            )
        _refuse("slice", t, rule, f"{start}:{end} of {total}", fix)
    first, last = start // axis.per * axis.units, ceil_div(end, axis.per) * axis.units
    if not slot.swizzled:
        return buffer.narrow(
            buffer.ndim - len(slot.dims) + index if index else 0, first, last - first
        )
    return _slice_tiles(slot, buffer, axis, first, last)


def granule(slot: Slot, axis: Dim) -> int:
    """Return the elements along ``axis`` after which a buffer of ``slot`` can be cut."""
    if not slot.swizzled:
        return axis.per
    return axis.per * (TILE[0] if axis.pad == TILE[0] else TILE[1])


def as_tiles(slot: Slot, buffer: Tensor) -> Tensor:
    """Return a view (rows of tiles, columns of tiles, bytes of a tile) of swizzled scales."""
    flipped = slot.dims[0].pad != TILE[0]
    shape = buffer.shape[::-1] if flipped else buffer.shape
    return buffer.reshape(shape[0] // TILE[0], shape[1] // TILE[1], math.prod(TILE))


def from_tiles(slot: Slot, tiles: Tensor) -> Tensor:
    """Return swizzled scales of ``slot`` made of tiles; the inverse of ``as_tiles``."""
    sizes = (tiles.shape[0] * TILE[0], tiles.shape[1] * TILE[1])
    return tiles.reshape(sizes[::-1] if slot.dims[0].pad != TILE[0] else sizes)


def _cat_tiles(slot: Slot, axis: Dim, buffers: Sequence[Tensor]) -> Tensor:
    """Return the swizzled scales of parts that begin and end at tiles."""
    along = 0 if axis.pad == TILE[0] else 1
    return from_tiles(slot, torch.cat([as_tiles(slot, b) for b in buffers], along))


def _slice_tiles(slot: Slot, buffer: Tensor, axis: Dim, first: int, last: int) -> Tensor:
    """Return a slice of swizzled scales: rows of tiles are a view, columns of tiles a copy."""
    tiles = as_tiles(slot, buffer)
    along = 0 if axis.pad == TILE[0] else 1
    kept = tiles.narrow(along, first // TILE[along], ceil_div(last - first, TILE[along]))
    return from_tiles(slot, kept)


BUCKETS = (
    ". Libraries that join parameters need plain ones: leave out parameters_as_bucket_view=True of "
    "ZeroRedundancyOptimizer. For DistributedDataParallel, call "
    "qtensor.distributed.broadcast_parameters(model) first, and pass init_sync=False; models with "
    "quantized buffers also need broadcast_buffers=False"
)
"""Ends the error of an op that libraries call to join parameters."""


def view_buffers(t: QuantizedTensorStorage, shape: Shape, op: str = "view") -> list[Tensor]:
    """Return the buffers of a view of ``t`` with ``shape``, which has as many elements.

    Raises:
        UnsupportedError: the view cuts rows inside a block.
    """
    if is_empty(shape):
        return _view_empty(t, shape)
    old_k, new_k = rows_cols(t.shape)[1], rows_cols(shape)[1]
    if old_k == new_k:
        return [_view_leading(t, slot, shape) for slot in t._quantizer.slots]
    if t._quantizer.columnwise:
        rule = "a view that changes the last dim needs a tensor without columnwise data"
        _refuse(
            op,
            t,
            rule,
            f"{tuple(t.shape)} to {tuple(shape)}",
            "Call update_usage(columnwise=False) first" + BUCKETS * (len(shape) == 1),
        )
    return [_view_regroup(t, slot, shape, op) for slot in t._quantizer.slots]


def _view_empty(t: QuantizedTensorStorage, shape: Shape) -> list[Tensor]:
    """Return the buffers of a view without elements; only their padding may differ."""
    buffers = []
    for slot in t._quantizer.slots:
        buffer, wanted = getattr(t, slot.name), buffer_shape(slot.dims, shape)
        fits = buffer.numel() == math.prod(wanted)
        buffers.append(buffer.reshape(wanted) if fits else buffer.new_zeros(wanted))
    return buffers


def _view_leading(t: QuantizedTensorStorage, slot: Slot, shape: Shape) -> Tensor:
    """Return the buffer of ``slot`` for a view that changes only the dims before the last."""
    buffer = getattr(t, slot.name)
    if "lead" not in [d.axis for d in slot.dims]:
        return buffer
    return buffer.reshape(buffer_shape(slot.dims, shape))


def _view_regroup(t: QuantizedTensorStorage, slot: Slot, shape: Shape, op: str) -> Tensor:
    """Return the buffer of ``slot`` for a view that changes the length of the rows.

    Raises:
        UnsupportedError: the buffer has partial groups, or padding between rows.
    """
    buffer = getattr(t, slot.name)
    if all(d.axis == "one" for d in slot.dims):
        return buffer
    per = slot.dims[-1].per
    old_rows, old_k = rows_cols(t.shape)
    new_rows, new_k = rows_cols(shape)
    fix = _AGAIN + BUCKETS * (len(shape) == 1)
    plain = (
        slot.dims[0].axis in ("lead", "m") and slot.dims[0].per == 1 and slot.dims[-1].axis == "k"
    )
    if not plain or slot.swizzled or old_k % per or new_k % per:
        rule = f"the last dim may change only in whole blocks of rowwise data ({slot.name})"
        _refuse(op, t, rule, f"{tuple(t.shape)} to {tuple(shape)}", fix)
    width = old_k // per * slot.dims[-1].units
    new_width = new_k // per * slot.dims[-1].units
    if slot.dims[0].axis == "lead":
        return buffer.reshape(*shape[:-1], new_width)
    if buffer.shape[-1] != width and old_rows != 1:
        rule = f"the rows of {slot.name} are padded, so they are not contiguous"
        _refuse(op, t, rule, f"{width} factors a row stored in {buffer.shape[-1]}", fix)
    return buffer[:old_rows, :width].reshape(new_rows, new_width)


_SWAPPED = {"lead": "k", "m": "k", "k": "m", "one": "one"}


def counterparts(spec: FormatSpec) -> dict[str, str]:
    """Return a dict from each inner buffer's name to its name in the transposed tensor."""
    row, column, both = (
        [b.name for b in spec.inner if b.usage == usage]
        for usage in ("rowwise", "columnwise", "both")
    )
    return {
        **dict(zip(row + column, column + row, strict=True)),
        **dict(zip(both, both, strict=True)),
    }


def transpose_plan(quantizer: QuantizerLike) -> tuple[QuantizerLike, tuple[Move, ...]]:
    """Return the views that transpose a 2-D tensor with this quantizer.

    Returns:
        The new quantizer, and for each of its slots the constructor keyword, the source buffer and
        the function that makes the view of it.
    """
    target = quantizer.transposed()
    other = counterparts(quantizer.spec)
    sources = {slot.name: slot for slot in quantizer.slots}
    moves = []
    if not target.slots:
        rule = "the spec of a format must have columnwise buffers, which a transpose needs"
        fail(f"transpose[{quantizer.format}]", rule, quantizer.spec.attributes, "Add them")
    for slot in target.slots:
        source = sources[other[slot.name]]
        moved = [_SWAPPED[d.axis] for d in source.dims]
        wanted = ["m" if d.axis == "lead" else d.axis for d in slot.dims]
        if moved not in (wanted, wanted[::-1]):
            fail(
                f"transpose[{quantizer.format}]",
                f"{slot.name} cannot hold the dims of {source.name}",
                f"{moved} for {wanted}",
                "Override _transposed_options of the quantizer, or dequantize first",
                UnsupportedError,
            )
        turn = None if moved == wanted else _reverse_shape if slot.swizzled else torch.t
        moves.append((slot.keyword, source.name, turn))
    return target, tuple(moves)


def permute_buffers(t: QuantizedTensorStorage, order: Sequence[int]) -> list[Tensor]:
    """Return views of the buffers of ``t.permute(order)``, for a tensor with one factor."""
    result = []
    for slot in t._quantizer.slots:
        buffer = getattr(t, slot.name)
        if slot.dims[0].axis == "lead":
            buffer = buffer.permute(*order)
        elif slot.dims[0].axis == "k":
            buffer = buffer.movedim(0, -1).permute(*order).movedim(-1, 0)
        result.append(buffer)
    return result


def select_column(t: QuantizedTensorStorage, index: int) -> list[Tensor]:
    """Return views of the buffers of ``t[..., index]``, for a tensor with one factor."""
    result = []
    for slot in t._quantizer.slots:
        buffer = getattr(t, slot.name)
        if slot.dims[0].axis == "lead":
            buffer = buffer.select(-1, index)
        elif slot.dims[0].axis == "k":
            column = buffer.select(0, index)
            buffer = column.movedim(-1, 0) if column.ndim else column.reshape(1)
        result.append(buffer)
    return result


def transpose_each(t: QuantizedTensorStorage, quantizer: QuantizerLike) -> list[Tensor]:
    """Return new buffers of ``t`` with its last two dims swapped.

    If ``t`` has shape (..., A, B) and E is the product of the leading dims, then ``t`` is stored as
    a matrix (E * A, B), and the result as a matrix (E * B, A).

    Args:
        t: quantized tensor or storage, (..., A, B).
        quantizer: describes the new buffers.

    Raises:
        UnsupportedError: a group runs across the last two dims.
    """
    shape = tuple(t.shape)
    outer = math.prod(shape[:-2])
    turned = (*shape[:-2], shape[-1], shape[-2])
    other = counterparts(t.spec)
    sources = {slot.name: slot for slot in t._quantizer.slots}
    result: list[Tensor] = []
    if not t.numel():
        return list(quantizer.alloc_tensors(turned, device=t.device).values())
    for slot in quantizer.slots:
        source = sources[other[slot.name]]
        buffer = getattr(t, source.name)
        if all(d.axis == "one" for d in source.dims):
            result.append(buffer.clone())
            continue
        if len(source.dims) != 2 or any(d.axis == "one" for d in source.dims) or source.swizzled:
            rule = f"{source.name} cannot be regrouped over more than two dims"
            _refuse("transpose", t, rule, f"{shape}, {t._quantizer.canonical}")
        matrix = _crop(t, source, buffer, shape)
        before = " ".join("b" if d.axis == "k" else "(e a)" for d in source.dims)
        after = " ".join("a" if d.axis == "k" else "(e b)" for d in slot.dims)
        moved = rearrange(matrix, f"{before} -> {after}", e=outer)
        fresh = buffer.new_zeros(buffer_shape(slot.dims, turned))
        target = fresh.view(moved.shape) if any(d.axis == "lead" for d in slot.dims) else fresh
        target[: moved.shape[0], : moved.shape[1]].copy_(moved)
        result.append(fresh)
    return result


def _crop(t: QuantizedTensorStorage, slot: Slot, buffer: Tensor, shape: Shape) -> Tensor:
    """Return a buffer as a matrix without padding.

    Raises:
        UnsupportedError: a group runs across dims.
    """
    rows, cols = rows_cols(shape)
    sizes = []
    for dim in slot.dims:
        along, total = (cols, cols) if dim.axis == "k" else (shape[-2], rows)
        if along % dim.per:
            _refuse(
                "transpose",
                t,
                f"the last two dims must be multiples of {dim.per} for {slot.name}",
                tuple(shape),
            )
        sizes.append(total // dim.per * dim.units)
    if any(d.axis == "lead" for d in slot.dims):
        return buffer.reshape(sizes)
    return buffer[: sizes[0], : sizes[1]]


def _reverse_shape(buffer: Tensor) -> Tensor:
    """Return the same swizzled bytes with the shape reversed: a view, or a copy for a slice.

    The tiles of a slice may lie apart, and then no strides show them in the other shape.
    """
    return buffer.reshape(buffer.shape[::-1])


def cat_buffers(tensors: Sequence[QuantizedTensorStorage], dim: int) -> list[Tensor]:
    """Return the buffers of the concatenation along ``dim`` of tensors with one quantizer.

    They have the padding of a whole tensor, also if parts lack it.

    Raises:
        QTensorError: a part does not end at a block, or the parts have different shared factors.
    """
    first = tensors[0]
    is_last = dim == first.ndim - 1
    if not is_last and dim != 0 and not has_row_factors(first._quantizer):
        rule = "concatenating along a middle dim needs factors of single rows"
        _refuse("cat", first, rule, f"dim {dim} of {tuple(first.shape)}")
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :])
    return [
        _as_whole(_cat_slot(tensors, slot, dim, is_last), buffer_shape(slot.dims, shape))
        for slot in first._quantizer.slots
    ]


def _cat_slot(
    tensors: Sequence[QuantizedTensorStorage], slot: Slot, dim: int, is_last: bool
) -> Tensor:
    first = tensors[0]
    buffers = [getattr(t, slot.name) for t in tensors]
    wanted = ("k",) if is_last else ("lead", "m")
    index = next((i for i, d in enumerate(slot.dims) if d.axis in wanted), None)
    if index is None:
        return _shared(tensors, slot, buffers)
    axis = slot.dims[index]
    if axis.axis == "lead":
        return torch.cat(buffers, index + dim)
    if not is_last and dim != 0:
        return torch.cat([by_rows(t, slot) for t in tensors], dim).flatten(0, first.ndim - 2)
    sizes = [rows_cols(t.shape)[1 if is_last else 0] for t in tensors]
    needed = granule(slot, axis)
    for size in sizes[:-1]:
        if size % needed:
            rule = f"all parts but the last must be a multiple of {needed} for {slot.name}"
            _refuse("cat", first, rule, sizes)
    if slot.swizzled:
        return _cat_tiles(slot, axis, buffers)
    index = index if index == 0 else buffers[0].ndim - len(slot.dims) + index
    parts = [
        b.narrow(index, 0, ceil_div(size, axis.per) * axis.units)
        for b, size in zip(buffers, sizes, strict=True)
    ]
    joined = torch.cat(parts, index)
    padding = -joined.shape[index] % axis.pad
    if padding:
        zeros = list(joined.shape)
        zeros[index] = padding
        joined = torch.cat((joined, joined.new_zeros(zeros)), index)
    return joined


def _shared(tensors: Sequence[QuantizedTensorStorage], slot: Slot, buffers: list[Tensor]) -> Tensor:
    """Return the buffer that all parts share, because it does not run along the dim.

    Raises:
        QTensorError: the buffer differs between parts.
    """
    first = buffers[0]
    others = [other for other in buffers[1:] if not _same_memory(first, other)]
    op, rule = f"cat[{tensors[0]._quantizer.format}]", f"{slot.name} must be equal in all parts"
    fix = "Concatenate the dequantized tensors and quantize the result"
    fix += BUCKETS * (len(tensors[0].shape) == 1)
    if others and not has_data(first):
        message = f"{op}: {rule}; got other values in one of them. {fix}."
        return equal_when_run((first, *others), message)
    for other in others:
        if not torch.equal(other, first):
            fail(op, rule, [b.flatten()[:4].tolist() for b in buffers], fix, QTensorError)
    return first


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are the same view of one storage; this reads no data."""
    return a is b or (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and (a.storage_offset(), a.shape, a.stride()) == (b.storage_offset(), b.shape, b.stride())
    )


def select_rows(
    t: QuantizedTensorStorage, index: Tensor, slots: Sequence[Slot] | None = None
) -> list[Tensor] | None:
    """Return the buffers of the rows that ``index`` names, or None if rows share codes or factors.

    Args:
        t: quantized, (d0, ..., dn) with n >= 1.
        index: (count,) integers in [0, d0).
        slots: of the buffers that are wanted; None for all.

    Returns:
        Buffers, in slot order, of a tensor of shape (count, d1, ..., dn).
    """
    slots = t._quantizer.slots if slots is None else slots
    buffers = [getattr(t, slot.name) for slot in slots]
    return operand.select_rows(slots, buffers, t.shape, index)
