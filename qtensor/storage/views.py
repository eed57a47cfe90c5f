"""Handle aten views of quantized tensors: slices, reshapes, transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from qtensor.errors import QTensorError, UnsupportedError, fail, this_rank
from qtensor.layout import rows_cols
from qtensor.storage import geometry
from qtensor.storage.base import ViewNote
from qtensor.storage.flat import FlatView
from qtensor.storage.padding import drop_padding, part_of_zeros
from qtensor.storage.parameter_names import name_parameter
from qtensor.storage.rebuild import Handler, same, with_buffers, wrap
from qtensor.storage.transposed_stack import transpose_stack
from qtensor.storage.write import inherit_note, note_part, plain


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    dim = geometry.normalize(dim or 0, t.ndim)
    total = t.shape[dim]
    start, end = _bounds(start, 0, total), _bounds(end, total, total)
    return slice_tensor(t, dim, start, max(start, end))


def _bounds(value: int | None, default: int, total: int) -> int:
    if value is None:
        return default
    value = value + total if value < 0 else value
    return min(max(value, 0), total)


def slice_tensor(t: Any, dim: int, start: int, end: int) -> Any:
    """Return ``t.narrow(dim, start, end - start)``; ``dim`` is counted from the front.

    Raises:
        UnsupportedError: the bounds cut a block or a packed group.
    """
    total = t.shape[dim]
    shape = (*t.shape[:dim], end - start, *t.shape[dim + 1 :])
    if start == 0 and (getattr(t, "_is_gathered", False) or getattr(t, "_is_scattered", False)):
        kept = drop_padding(t, dim, end)
        if kept is not None:
            return kept
    quantizer, buffers = t._quantizer, None
    if start == 0 == dim and getattr(t, "_is_zeros", False):
        buffers = part_of_zeros(t, end)
    is_padded = buffers is not None
    if buffers is None:
        try:
            buffers = geometry.slice_buffers(t, dim, start, end)
        except QTensorError as error:
            if this_rank():  # fully_shard and distribute_tensor cut parameters so
                name_parameter(error, t)
            raise
    if quantizer.two_dimensional and not is_padded:
        inner = 1 if dim == t.ndim - 1 else math.prod(t.shape[dim + 1 : -1])
        square = quantizer.spec.block[1]
        if start * inner % square or (end * inner % square and end != total):
            quantizer = quantizer.without_square_blocks()
    sliced = with_buffers(t, buffers, shape, quantizer=quantizer)
    if getattr(t, "_is_gathered", False):
        part = own_copy(sliced)
        part._is_gathered = True
        return part
    if getattr(t, "_is_zeros", False):
        sliced._shard_dim = dim  # fully_shard takes the part of a rank from its padded form
    if start == 0 and dim == 0 and getattr(t, "_shards", None) is not None:
        # fully_shard takes the rows of a shard from its padded form.
        sliced._shards = t._shards
    if start == 0 and end == total:
        return inherit_note(sliced, t)
    axes = ("k",) if dim == t.ndim - 1 else ("m", "lead")
    shared = [s.name for s in t._quantizer.slots if not any(d.axis in axes for d in s.dims)]
    return note_part(sliced, t, shared)


def own_copy(t: Any) -> Any:
    """Return a copy of a part as a tensor of its own, with the padding of a whole tensor."""
    pairs = zip(t.buffers(), geometry.whole_buffers(t), strict=True)
    buffers = [own.clone() if own is whole else whole.contiguous() for own, whole in pairs]
    return with_buffers(t, buffers)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim, index = args
    dim = geometry.normalize(dim, t.ndim)
    total = t.shape[dim]
    if not -total <= index < total:
        raise IndexError(f"index {index} is out of range for dim {dim} of size {total}")
    if dim == t.ndim - 1 and t._quantizer.per_tensor:
        shape = tuple(t.shape[:-1])
        picked = with_buffers(t, geometry.select_column(t, index % total), shape)
        return note_part(picked, t, ["_scale_inv"])
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
    return view_tensor(selected, (*t.shape[:dim], *t.shape[dim + 1 :]), "select")


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    t, sizes = args[:2]
    dim = geometry.normalize(args[2] if len(args) > 2 else kwargs.get("dim", 0), t.ndim)
    total = t.shape[dim]
    whole = not isinstance(sizes, (list, tuple))
    if sizes < 1 and total if whole else sum(sizes) != total or min(sizes, default=0) < 0:
        rule = f"sizes must be positive and cover dim {dim} of {total}"
        fail(f"split[{t._quantizer.format}]", rule, sizes, "Fix the sizes")
    if whole:
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)] or [0]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice_tensor(t, dim, s, s + n) for s, n in zip(starts, sizes, strict=True)]


def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    t = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return [_select(func, (t, dim, i), {}) for i in range(t.shape[geometry.normalize(dim, t.ndim)])]


def view_tensor(t: Any, shape: Sequence[int], op: str = "view") -> Any:
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
    if t._stack is not None and shape == tuple(t.shape):
        return same(t)
    quantizer = t._quantizer
    if quantizer.two_dimensional and rows_cols(shape)[1] != rows_cols(t.shape)[1]:
        quantizer = quantizer.without_square_blocks()
    viewed = with_buffers(t, geometry.view_buffers(t, shape, op), shape, quantizer=quantizer)
    # A view with other rows may need a copy of a reordered buffer.
    return note_part(viewed, t, ())


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[1], torch.dtype):
        rule = "the bytes of a quantized tensor are in its inner buffers"
        fix = (
            "View an inner buffer instead. accelerate's disk_offload stores plain arrays: call "
            "disk_offload of qtensor.integrations.offload"
        )
        fail("view.dtype", rule, args[1], fix, UnsupportedError)
    t, shape = args
    # Literally view(-1), which fully_shard calls; flatten() names the size, and is refused.
    if tuple(shape) == (-1,) and t.ndim > 1 and _has_no_flat_form(t):
        return FlatView(t)
    return view_tensor(t, shape)


def _has_no_flat_form(t: Any) -> bool:
    """Return whether the blocks of ``t`` do not run along one dim."""
    quantizer = t._quantizer
    return bool(quantizer.columnwise or quantizer.two_dimensional)


def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    dim = geometry.normalize(args[1], t.ndim + 1)
    return view_tensor(t, (*t.shape[:dim], 1, *t.shape[dim:]), "unsqueeze")


def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    dims = (
        range(t.ndim)
        if len(args) == 1
        else args[1]
        if isinstance(args[1], (list, tuple))
        else [args[1]]
    )
    dropped = {geometry.normalize(d, max(t.ndim, 1)) for d in dims}
    return view_tensor(
        t, [n for i, n in enumerate(t.shape) if i not in dropped or n != 1], "squeeze"
    )


def transpose_tensor(t: Any) -> Any:
    """Return the transpose of an (M, K) tensor as views: rowwise data become columnwise."""
    quantizer, moves = t._quantizer.transpose_plan
    buffers = [
        getattr(t, source) if turn is None else turn(getattr(t, source))
        for _, source, turn in moves
    ]
    turned = wrap(type(t), t.shape[::-1], t._context[1], quantizer, buffers)
    if t._view_note is not None:
        inherit_note(
            turned,
            t,
            ViewNote(shared=tuple(geometry.counterparts(t.spec)[n] for n in t._view_note.shared)),
        )
    return turned


def _t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    return transpose_tensor(t) if t.ndim == 2 else _reorder(t, list(range(t.ndim)), "t")


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle transpose and permute."""
    t, name = args[0], func._schema.name
    order = list(range(t.ndim))
    if name == "aten::permute":
        order = [geometry.normalize(d, t.ndim) for d in args[1]]
    else:
        a, b = (geometry.normalize(d, max(t.ndim, 1)) for d in args[1:3])
        if a != b:
            order[a], order[b] = order[b], order[a]
    return _reorder(t, order, name.removeprefix("aten::"))


def _reorder(t: Any, order: list[int], op: str) -> Any:
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
        return inherit_note(with_buffers(t, geometry.permute_buffers(t, order), shape), t)
    if order[:-2] == list(range(t.ndim - 2)):
        if (stack := t._stack) is not None:
            return same(stack)
        quantizer = t._quantizer.transposed()
        if quantizer.two_dimensional and (
            t.shape[-2] % quantizer.spec.block[1] or t.shape[-1] % quantizer.spec.block[1]
        ):
            quantizer = quantizer.without_square_blocks()
        return transpose_stack(t, quantizer)
    rule = "only the last two dims may be swapped, because factors run along the last"
    fail(
        f"{op}[{t._quantizer.format}]",
        rule,
        f"{tuple(t.shape)} by {order}",
        "Quantize the reordered high-precision tensor",
        UnsupportedError,
    )


def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


VIEWS: dict[str, Handler] = {
    "slice": _slice,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbind,
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "as_strided": _as_strided,
    "t": _t,
    "transpose": _permute,
    "permute": _permute,
    "expand": _expand,
}
"""Handlers of view ops by aten op name."""
