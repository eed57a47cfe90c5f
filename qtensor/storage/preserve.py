"""aten ops that keep the subclass: exact on the bytes, or an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import UnsupportedError, fail
from qtensor.library.dequantize import DEQUANTIZE
from qtensor.storage import geometry
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.rebuild import map_buffers, with_buffers

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def plain(t: Any) -> Tensor:
    """The dequantized values, inside dispatch (no autograd)."""
    return DEQUANTIZE(t.buffers(), t._quantizer.canonical, t.shape, t.dtype)


def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    return with_buffers(t, t.buffers())


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
    """Same quantizer: bytes. Otherwise a plain destination gets values, a quantized one requantizes."""
    dst, src = args[0], args[1]
    if not isinstance(dst, QuantizedTensorStorage):
        return dst.copy_(plain(src))
    if tuple(dst.shape) != tuple(src.shape):
        src = (plain(src) if isinstance(src, QuantizedTensorStorage) else src).expand(dst.shape)
    if isinstance(src, QuantizedTensorStorage):
        if src._quantizer == dst._quantizer:
            for to, fro in zip(dst.buffers(), src.buffers(), strict=True):
                _copy_buffer(to, fro)
            return dst
        src = plain(src)
    return requantize_(dst, src)


def _copy_buffer(to: Tensor, fro: Tensor) -> None:
    """Scales of a slice are shorter than padded ones; what both have is what counts."""
    if to.shape != fro.shape:
        sizes = [min(a, b) for a, b in zip(to.shape, fro.shape, strict=True)]
        to, fro = (b[tuple(slice(n) for n in sizes)] for b in (to, fro))
    to.copy_(fro)


def requantize_(dst: Any, values: Tensor) -> Any:
    """Write values into a quantized tensor through its own quantizer."""
    if values.dtype not in FLOATING[:3]:
        values = values.to(torch.float32)
    quantizer = dst._quantizer
    described = quantizer._describe_buffers(dst.shape)
    if all(getattr(dst, name).shape == shape for name, (shape, _) in described.items()):
        quantizer.update_quantized(values.to(dst.device), dst)
        return dst
    # A slice's scales are not padded: quantize apart, then write the bytes through.
    scale = {"scale": dst._scale_inv.reciprocal()} if quantizer.needs_scale else {}
    fresh = quantizer.quantize(values.to(dst.device), **scale)
    for to, fro in zip(dst.buffers(), fresh.buffers(), strict=True):
        _copy_buffer(to, fro)
    return dst


def _empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """empty_like, new_empty, zeros_like, new_zeros: buffers are allocated by the quantizer, never by the C++ allocator."""
    t, name = args[0], func._schema.name
    dtype = kwargs.get("dtype") or t.dtype
    shape = tuple(args[1]) if "new_" in name else t.shape
    device = kwargs.get("device") or t.device
    if dtype not in FLOATING:
        return torch.empty(shape, dtype=dtype, device=device).zero_()
    tensors = t._quantizer.alloc_tensors(shape, device=device)
    result = with_buffers(t, list(tensors.values()), shape, dtype=dtype)
    if "zeros" in name:
        zeros = torch.zeros(shape, device=device)
        scale = torch.ones(1, device=device) if t._quantizer.needs_scale else None
        t._quantizer.update_quantized(zeros, result, scale=scale)
    return result


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim, start, end, step = (*args, *(None,) * (5 - len(args)))[:5]
    step = kwargs.get("step", step)
    if step not in (None, 1):
        fail(f"slice[{t._quantizer.format}]", "the step must be 1", step, "Dequantize first", UnsupportedError)
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
    """``t.narrow(dim, start, end - start)`` with a dim counted from the front."""
    shape = (*t.shape[:dim], end - start, *t.shape[dim + 1 :])
    return with_buffers(t, geometry.slice_buffers(t, dim, start, end), shape)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim, index = args
    dim = geometry.normalize(dim, t.ndim)
    total = t.shape[dim]
    if not -total <= index < total:
        raise IndexError(f"index {index} is out of range for dim {dim} of size {total}")
    if dim == t.ndim - 1:
        rule = "the last dim, along which factors run, cannot be dropped"
        fail(f"select[{t._quantizer.format}]", rule, f"dim {dim}", "Dequantize first", UnsupportedError)
    index = index % total
    part = slice_tensor(t, dim, index, index + 1)
    return view_tensor(part, (*t.shape[:dim], *t.shape[dim + 1 :]), "select")


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    t, sizes = args[:2]
    dim = geometry.normalize(args[2] if len(args) > 2 else kwargs.get("dim", 0), t.ndim)
    total = t.shape[dim]
    if not isinstance(sizes, (list, tuple)):
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)] or [0]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice_tensor(t, dim, s, s + n) for s, n in zip(starts, sizes, strict=True)]


def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    t = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return [_select(func, (t, dim, i), {}) for i in range(t.shape[geometry.normalize(dim, t.ndim)])]


def view_tensor(t: Any, shape: Sequence[int], op: str = "view") -> Any:
    """A view to ``shape``, one of whose sizes may be -1."""
    shape = tuple(shape)
    if any(isinstance(n, int) and n == -1 for n in shape):
        known = math.prod(n for n in shape if not (isinstance(n, int) and n == -1))
        shape = tuple(t.numel() // known if isinstance(n, int) and n == -1 else n for n in shape)
    if math.prod(shape) != t.numel():
        fail(
            f"{op}[{t._quantizer.format}]",
            "the number of elements must stay",
            f"{tuple(t.shape)} to {shape}",
            "Choose another shape",
        )
    return with_buffers(t, geometry.view_buffers(t, shape, op), shape)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[1], torch.dtype):
        rule = "the bytes of a quantized tensor are in its inner buffers"
        fail("view.dtype", rule, args[1], "View an inner buffer instead", UnsupportedError)
    return view_tensor(args[0], args[1])


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    dim = geometry.normalize(args[1], t.ndim + 1)
    return view_tensor(t, (*t.shape[:dim], 1, *t.shape[dim:]), "unsqueeze")


def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    dims = range(t.ndim) if len(args) == 1 else args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    dropped = {geometry.normalize(d, t.ndim) for d in dims}
    return view_tensor(t, [n for i, n in enumerate(t.shape) if i not in dropped or n != 1], "squeeze")


def transpose_tensor(t: Any) -> Any:
    """The transpose of a 2-D tensor: directions change places, no byte moves."""
    quantizer = t._quantizer.transposed()
    return with_buffers(t, geometry.transpose_buffers(t, quantizer), (t.shape[1], t.shape[0]), quantizer=quantizer)


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """t, transpose, permute: 2-D tensors, and orders that leave every dim in place."""
    t, name = args[0], func._schema.name
    order = list(range(t.ndim))
    if name == "aten::permute":
        order = [geometry.normalize(d, t.ndim) for d in args[1]]
    elif name == "aten::t":
        order.reverse()
    else:
        a, b = (geometry.normalize(d, t.ndim) for d in args[1:3])
        order[a], order[b] = order[b], order[a]
    if order == sorted(order):
        return with_buffers(t, t.buffers())
    if t.ndim == 2:
        return transpose_tensor(t)
    if t._quantizer.per_tensor and not t._quantizer.columnwise:
        data = t._data.permute(order)
        return with_buffers(t, [data, t._scale_inv], data.shape)
    rule = "a transpose of more than two dims needs one factor for the tensor and no columnwise data"
    fail(
        f"{name.removeprefix('aten::')}[{t._quantizer.format}]",
        rule,
        f"{tuple(t.shape)} by {order}",
        "Quantize the transposed high-precision tensor, or loop over the leading dim",
        UnsupportedError,
    )


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
    return with_buffers(first, geometry.cat_buffers(tensors, dim), shape)


def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim, index = args
    if t.ndim == 2 and geometry.normalize(dim, 2) == 0 and t._quantizer.rowwise and not t._quantizer.columnwise:
        buffers = geometry.select_rows(t, index)
        if buffers is not None:
            return with_buffers(t, buffers, (index.shape[0], t.shape[1]))
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
    "clone": _clone,
    "contiguous": _share,
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "empty_like": _empty,
    "new_empty": _empty,
    "new_empty_strided": _empty,
    "zeros_like": _empty,
    "new_zeros": _empty,
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
    "t": _permute,
    "transpose": _permute,
    "permute": _permute,
    "cat": _cat,
    "index_select": _index_select,
    "_pin_memory": _pin,
    "is_pinned": _is_pinned,
    "is_same_size": _same_size,
}
"""Op name (aten) -> handler. The result is the subclass, exact, or a QTensorError that names the rule."""
