"""Handle aten views of quantized tensors: slices, reshapes, transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from qtensor.core.buffer_shapes import normalize, rows_cols, squeezed, unsqueezed
from qtensor.core.errors import UnsupportedError, fail
from qtensor.storage import geometry
from qtensor.storage.ops.lazy_view import sliced, transposed_stack
from qtensor.storage.ops.padding import buffers_before, may_end_with_padding
from qtensor.storage.ops.table import PRESERVE, Args, Kwargs, Op, implements
from qtensor.storage.ops.write import plain
from qtensor.storage.origin import FRESH, Padded, Split, of_copy
from qtensor.storage.rebuild import (
    Q,
    in_memory_of,
    map_buffers,
    part,
    reshaped,
    same,
    set_origin,
    strides_of,
    turned_strides,
    viewed_strides,
    with_buffers,
    wrap,
)
from qtensor.storage.row_buffers import has_row_factors

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor


@implements(PRESERVE, "slice")
def _slice(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t, dim, start, end, step = (*args, *(None,) * (5 - len(args)))[:5]
    step = kwargs.get("step", step)
    if step not in (None, 1):
        fail(
            f"slice[{t._quantizer.format}]",
            "the step must be 1",
            step,
            "Dequantize first",
            UnsupportedError,
        )
    dim = normalize(dim or 0, t.ndim)
    total = t.shape[dim]
    start, end = _bounds(start, 0, total), _bounds(end, total, total)
    return slice_tensor(t, dim, start, max(start, end))


def _bounds(value: int | None, default: int, total: int) -> int:
    if value is None:
        return default
    value = value + total if value < 0 else value
    return min(max(value, 0), total)


def slice_tensor(t: Q, dim: int, start: int, end: int) -> Q:
    """Return ``t.narrow(dim, start, end - start)``; ``dim`` is counted from the front.

    Raises:
        UnsupportedError: the bounds cut a block or a packed group.
    """
    total = t.shape[dim]
    shape = (*t.shape[:dim], end - start, *t.shape[dim + 1 :])
    outer = 1 if dim == t.ndim - 1 else math.prod(t.shape[:dim])
    if outer > 1 and end - start != total and _has_rows(t):
        # The factors of the rows between two slices lie between them.
        matrices = view_tensor(t, (outer, *t.shape[dim:]))
        parts = [slice_tensor(m, 0, start, end) for m in torch.ops.aten.unbind(matrices)]
        return sliced(parts, shape)
    is_padded = start == 0 and end < total and may_end_with_padding(t, dim)
    if is_padded and (buffers := buffers_before(t, dim, end)) is not None:
        inside = Padded(same(t), dim, cuts_a_block=True)
        return part(t, buffers, shape, strides=strides_of(t), padded=inside)
    quantizer = t._quantizer
    buffers = geometry.slice_buffers(t, dim, start, end)
    if quantizer.two_dimensional:
        inner = 1 if dim == t.ndim - 1 else math.prod(t.shape[dim + 1 : -1])
        square = quantizer.square_block
        if start * inner % square or (end * inner % square and end != total):
            quantizer = quantizer.without_square_blocks()
    axes = ("k",) if dim == t.ndim - 1 else ("m", "lead")
    shared = [s.name for s in t._quantizer.slots if not any(d.axis in axes for d in s.dims)]
    padded = Padded(same(t), dim) if is_padded else None
    strides = strides_of(t)
    return part(
        t, buffers, shape, strides=strides, shared=shared, quantizer=quantizer, padded=padded
    )


def _has_rows(t: QuantizedTensor) -> bool:
    """Return whether factors of ``t`` run along its rows, each with those of its own row alone."""
    quantizer = t._quantizer
    return has_row_factors(quantizer) and any(
        d.axis == "m" for slot in quantizer.slots for d in slot.dims
    )


def own_copy(t: QuantizedTensor) -> QuantizedTensor:
    """Return a copy of a part as a tensor of its own, with the padding of a whole tensor.

    The copy of a transposed stack whose bytes cannot be laid out is the transpose of a copied one.
    """
    if t._parts:
        try:
            buffers = t.buffers()
        except UnsupportedError:
            if t._origin.layout != "transposed":
                raise
            return transposed_stack(own_copy(t._parts[0]))
        return with_buffers(t, buffers, origin=of_copy(t._origin))
    pairs = zip(t.buffers(), geometry.whole_buffers(t), strict=True)
    buffers = [own.clone() if own is whole else whole.contiguous() for own, whole in pairs]
    return with_buffers(t, buffers, origin=of_copy(t._origin))


@implements(PRESERVE, "select")
def _select(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t, dim, index = args
    dim = normalize(dim, t.ndim)
    total = t.shape[dim]
    if not -total <= index < total:
        raise IndexError(f"index {index} is out of range for dim {dim} of size {total}")
    if dim == t.ndim - 1 and t._quantizer.per_tensor:
        shape = tuple(t.shape[:-1])
        buffers, strides = geometry.select_column(t, index % total), strides_of(t)[:-1]
        return part(t, buffers, shape, strides=strides, shared=["_scale_inv"])
    if dim == t.ndim - 1:
        rule = "the last dim cannot be dropped, because factors run along it"
        fail(
            f"select[{t._quantizer.format}]",
            rule,
            f"dim {dim}",
            "Dequantize first",
            UnsupportedError,
        )
    index = index % total
    selected = slice_tensor(t, dim, index, index + 1)
    shape = (*t.shape[:dim], *t.shape[dim + 1 :])
    if selected._parts:
        return sliced(selected._parts, shape)
    return view_tensor(selected, shape, "select")


@implements(PRESERVE, "split", "split_with_sizes")
def _split(func: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    t, sizes = args[:2]
    dim = normalize(args[2] if len(args) > 2 else kwargs.get("dim", 0), t.ndim)
    total = t.shape[dim]
    whole = not isinstance(sizes, (list, tuple))
    if sizes < 1 and total if whole else sum(sizes) != total or min(sizes, default=0) < 0:
        rule = f"sizes must be positive and cover dim {dim} of {total}"
        fail(f"split[{t._quantizer.format}]", rule, sizes, "Fix the sizes")
    if whole:
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)] or [0]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice_tensor(t, dim, s, s + n) for s, n in zip(starts, sizes, strict=True)]


@implements(PRESERVE, "unbind")
def _unbind(func: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    t = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return [_select(func, (t, dim, i), {}) for i in range(t.shape[normalize(dim, t.ndim)])]


def view_tensor(t: Q, shape: Sequence[int], op: str = "view") -> Q:
    """Return a view of ``t`` with ``shape``; one size may be -1.

    Raises:
        QTensorError: the number of elements differs, or the view cuts rows inside a block.
    """
    shape = tuple(shape)
    unknown = sum(isinstance(n, int) and n == -1 for n in shape)
    if unknown > 1 or (unknown and 0 in shape):
        rule = "at most one size may be -1, and only if no size is 0"
        fail(f"{op}[{t._quantizer.format}]", rule, shape, "Name the sizes")
    if unknown:
        known = math.prod(n for n in shape if not (isinstance(n, int) and n == -1))
        shape = tuple(t.numel() // known if isinstance(n, int) and n == -1 else n for n in shape)
    if math.prod(shape) != t.numel():
        fail(
            f"{op}[{t._quantizer.format}]",
            "the number of elements must not change",
            f"{tuple(t.shape)} to {shape}",
            "Choose another shape",
        )
    quantizer = t._quantizer
    if quantizer.two_dimensional and rows_cols(shape)[1] != rows_cols(t.shape)[1]:
        quantizer = quantizer.without_square_blocks()
    # A view with other rows may need a copy of a reordered buffer.
    buffers = geometry.view_buffers(t, shape, op)
    return part(t, buffers, shape, strides=_viewed_strides(t, shape), quantizer=quantizer)


def _viewed_strides(t: QuantizedTensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a view of ``t``; () where torch has no such view."""
    return None if t._origin.strides is None else viewed_strides(t, shape)


@implements(PRESERVE, "view", "_unsafe_view", "reshape")
def _view(func: Op, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[1], torch.dtype):
        rule = "the bytes of a quantized tensor are in its inner buffers"
        fix = (
            "View an inner buffer instead. accelerate's disk_offload stores plain arrays: call "
            "disk_offload of qtensor.integrations.offload"
        )
        fail("view.dtype", rule, args[1], fix, UnsupportedError)
    t, shape = args
    # Literally view(-1), which fully_shard calls; flatten() names the size, and is refused.
    if tuple(shape) == (-1,) and t.ndim > 1:
        return _flat(t)
    return view_tensor(t, shape)


def _flat(t: Q) -> Q:
    """Return ``t.view(-1)``; it only holds ``t`` if codes or factors have no 1-D form."""
    quantizer = t._quantizer
    if quantizer.columnwise or quantizer.two_dimensional:
        return reshaped(t, (t.numel(),))
    try:
        return view_tensor(t, (-1,))
    except UnsupportedError:
        return reshaped(t, (t.numel(),))


@implements(PRESERVE, "as_strided")
def _as_strided(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle as_strided for the strides of a contiguous tensor, which fully_shard asks for."""
    t, size, stride = args[0], tuple(args[1]), tuple(args[2])
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if offset in (None, 0) and size[1:] == tuple(t.shape[1:]) and stride == tuple(t.stride()):
        return slice_tensor(t, 0, 0, size[0])
    fail(
        f"as_strided[{t._quantizer.format}]",
        "it can only keep the strides and take the first rows",
        f"size {size}, stride {stride}, offset {offset} of {tuple(t.shape)}",
        "Use slices and views, or dequantize first",
        UnsupportedError,
    )


@implements(PRESERVE, "unsqueeze")
def _unsqueeze(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t = args[0]
    return view_tensor(t, unsqueezed(t.shape, args[1]), "unsqueeze")


@implements(PRESERVE, "squeeze")
def _squeeze(func: Op, args: Args, kwargs: Kwargs) -> Any:
    return view_tensor(args[0], squeezed(args[0].shape, *args[1:]), "squeeze")


def transpose_tensor(t: Q) -> Q:
    """Return the transpose of an (M, K) tensor as views: rowwise data become columnwise.

    The transpose of a slice of swizzled factors is a copy, which refuses writes.
    """
    quantizer, moves = t._quantizer.transpose_plan
    buffers = [
        getattr(t, source) if turn is None else turn(getattr(t, source))
        for _, source, turn in moves
    ]
    turned = wrap(type(t), t.shape[::-1], t._context[1], quantizer, buffers, FRESH)
    sources = [getattr(t, source) for _, source, _ in moves]
    if getattr(quantizer, "swizzled", False) and not all(map(in_memory_of, buffers, sources)):
        # A copy of some buffers alone would mix old and new values after a write to the whole.
        turned = with_turned_origin(map_buffers(turned, torch.clone, origin=FRESH), t)
        set_origin(turned, turned._origin._replace(is_part=True, is_copy=True))
        return turned
    return with_turned_origin(turned, t)


def with_turned_origin(turned: Q, t: QuantizedTensor) -> Q:
    """Return the transpose ``turned`` of an (M, K) tensor ``t`` with its origin."""
    origin = t._origin
    strides = turned_strides(t)
    if origin is FRESH and strides is None:
        return turned
    split, shared = origin.split, origin.shared
    if split:
        axes = {"m": "k", "k": "m"}
        split = tuple([Split(s.group, axes[s.axis]) for s in split])
    if shared:
        names = geometry.counterparts(t.spec)
        shared = tuple([names[name] for name in shared])
    origin = origin._replace(
        shared=shared, split=split, strides=strides, shard_of=None, padded=None
    )
    set_origin(turned, origin)
    return turned


@implements(PRESERVE, "t")
def _t(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t = args[0]
    return transpose_tensor(t) if t.ndim == 2 else _reorder(t, list(range(t.ndim)), "t")


@implements(PRESERVE, "transpose", "permute")
def _permute(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle transpose and permute."""
    t, name = args[0], func._schema.name
    order = list(range(t.ndim))
    if name == "aten::permute":
        order = [normalize(d, t.ndim) for d in args[1]]
    else:
        a, b = (normalize(d, max(t.ndim, 1)) for d in args[1:3])
        if a != b:
            order[a], order[b] = order[b], order[a]
    return _reorder(t, order, name.removeprefix("aten::"))


def _reorder(t: Q, order: list[int], op: str) -> Q:
    """Return ``t.permute(order)``; per-block formats can only swap the last two dims.

    Raises:
        UnsupportedError: factors run along the last dim, and ``order`` moves another dim.
    """
    if sorted(order) != list(range(t.ndim)):
        fail(
            f"{op}[{t._quantizer.format}]",
            f"each of {t.ndim} dims must be named once",
            order,
            "Fix the order",
        )
    if order == sorted(order):
        return same(t)
    shape = tuple(t.shape[i] for i in order)
    if t.ndim == 2:
        return transpose_tensor(t)
    if t._quantizer.per_tensor:
        strides = strides_of(t)
        moved = [strides[i] for i in order] if strides else ()
        return part(t, geometry.permute_buffers(t, order), shape, strides=moved)
    if order[:-2] == list(range(t.ndim - 2)):
        return transposed_stack(t)
    rule = "only the last two dims may be swapped, because factors run along the last"
    fail(
        f"{op}[{t._quantizer.format}]",
        rule,
        f"{tuple(t.shape)} by {order}",
        "Quantize the reordered high-precision tensor",
        UnsupportedError,
    )


@implements(PRESERVE, "expand")
def _expand(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle expand: return the tensor for its own shape, and plain values for more rows.

    Factors cannot be repeated without a copy. ``matmul`` calls the first form for a stack with the
    batch dims of the other operand, and the second form for a stack that it has to repeat. It never
    repeats one matrix (``whole_products``).
    """
    t = args[0]
    sizes = args[1]
    if len(sizes) == t.ndim and all(s in (-1, n) for s, n in zip(sizes, t.shape, strict=True)):
        return same(t)
    return plain(t).expand(sizes)
