"""Read elements, masked values and rows of quantized tensors by index, and write rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import is_empty, normalize
from qtensor.core.errors import (
    DtypeError,
    IndexRangeError,
    QTensorError,
    UnsupportedError,
    check,
    fail,
)
from qtensor.core.row_format import RowFormat, row_format
from qtensor.library.cache import CACHE_APPEND
from qtensor.storage import geometry
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.table import PRESERVE, Args, Kwargs, Op, implements
from qtensor.storage.ops.views import view_tensor
from qtensor.storage.ops.write import begin_write, encodable, plain
from qtensor.storage.origin import FRESH
from qtensor.storage.rebuild import Q, rows_are_in_order, separate, with_buffers
from qtensor.storage.row_buffers import by_rows

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor

_MASKS = (torch.bool, torch.uint8)


def is_element(index: object, rank: int) -> bool:
    """Return True if ``index`` holds one integer per dim of a tensor with ``rank`` dims."""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) != rank or not rank:
        return False
    return all(
        (isinstance(i, int | torch.SymInt) and not isinstance(i, bool))
        or (hasattr(i, "__index__") and not isinstance(i, Tensor | bool))
        for i in parts
    )


def read_element(t: QuantizedTensor, index: Any) -> Tensor:
    """Return one element of ``t`` as a plain 0-d tensor; its gradient reaches ``t``.

    Args:
        t: quantized tensor, (d0, ..., dn).
        index: one integer per dim.
    """
    parts = index if isinstance(index, tuple) else (index,)
    row: Tensor = t
    if len(parts) > 1:
        try:
            # Decode only one row if a row can be selected exactly.
            row = torch.Tensor.__getitem__(t, parts[:-1])
        except UnsupportedError:
            return t.dequantize()[index]
    return row.dequantize()[parts[-1]]


def select_rows(t: Q, dim: int, index: Tensor, op: str) -> Q:
    """Return the rows of ``t`` that ``index`` names, with the codes and factors of the source.

    Args:
        t: quantized, (d0, ..., dn) with n >= 1.
        dim: must be 0.
        index: (count,) integers in [0, d0).
        op: the name of the calling op, for errors.

    Raises:
        UnsupportedError: ``dim`` is not 0, or other rows share codes or factors with these rows.
    """
    quantizer = t._quantizer
    if t.ndim > 1 and dim == 0:
        shape = (index.shape[0], *t.shape[1:])
        buffers = geometry.select_rows(t, index)
        if buffers is not None:
            if math.prod(t.shape[1:-1]) % quantizer.square_block:
                quantizer = quantizer.without_square_blocks()
            return with_buffers(t, separate(buffers, t), shape, quantizer=quantizer, origin=FRESH)
    fail(
        f"{op}[{quantizer.format}]",
        "rows can be selected along dim 0 if no other row shares their codes or factors",
        f"dim {dim} of {tuple(t.shape)}, {quantizer.canonical}",
        "Call .dequantize() first",
        UnsupportedError,
    )


@implements(PRESERVE, "index_select")
def _index_select(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``aten.index_select``: return quantized rows, or raise an error."""
    t, dim, index = args
    dim = normalize(dim, max(t.ndim, 1))
    return select_rows(t, dim, index.reshape(-1), "index_select")


@implements(PRESERVE, "index")
def _index(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``aten.index``: return quantized rows for integers along dim 0, else plain values."""
    t, indices = args
    leaves = [i for i in indices if i is not None]
    if not is_quantized(t) or any(is_quantized(i) for i in leaves):
        rule = "indices must be plain integer or bool tensors"
        fail("index", rule, "a quantized tensor as index", "Pass integers", UnsupportedError)
    rows = indices[0]
    if len(leaves) != 1 or rows is None or rows.dtype in _MASKS or t.ndim < 2:
        return func(plain(t), indices)
    flat = rows.reshape(-1)
    flat = torch.where(flat < 0, flat + t.shape[0], flat)
    picked = select_rows(t, 0, flat, "index")
    if rows.ndim == 1:
        return picked
    return view_tensor(picked, (*rows.shape, *t.shape[1:]), "index")


def check_index(index: Tensor, first: int, size: int, op: str) -> None:
    """Refuse indices below ``first`` or not below ``size``; those of a graph are not known.

    Raises:
        IndexRangeError: the message names one of them.
    """
    if type(index) is not Tensor or index.is_meta or not index.numel():
        return
    least, most = (int(n) for n in index.aminmax())
    rule = f"an index must be from {first} to {size - 1}, since the dim has {size} rows"
    wrong = least if least < first else most
    fits = first <= least and most < size
    check(fits, op, rule, wrong, "Pass an index of the tensor", IndexRangeError)


def write_rows(t: Q, dim: int, index: Tensor, src: Tensor, op: str) -> Q:
    """Write rows into ``t``, in place: bytes of the same quantizer, or values, which it encodes.

    Other rows are not read or written. A factor or maximum of the whole tensor stays as it is.

    Args:
        t: quantized, (d0, ..., dn).
        dim: any but the last.
        index: (count,) integers in [0, size of ``dim``), each once.
        src: plain or quantized, of the shape of ``t`` with ``count`` in place of ``dim``.
        op: the name of the calling op, for errors.

    Raises:
        DtypeError: the dtypes of ``t`` and ``src`` differ.
        QTensorError: a shape is wrong, or a factor serves several rows.
    """
    quantizer, shape = t._quantizer, tuple(t.shape)
    label, wanted = f"{op}[{quantizer.format}]", (*shape[:dim], index.numel(), *shape[dim + 1 :])
    form = _row_format(quantizer.canonical)
    if form is None or dim == len(shape) - 1 or t._parts or not rows_are_in_order(t):
        rule = "rows are written along any dim but the last, into a row-major tensor without "
        rule += "columnwise data, whose factors belong to one row or to the whole"
        got = f"dim {dim} of {shape}, {quantizer.canonical}"
        fix = "Write to the values of .dequantize(), and quantize them again"
        if t._parts:
            got += ", a view that is not row-major"
            fix = "Write into the tensor whose view it is, or quantize its values again"
        fail(label, rule, got, fix, UnsupportedError)
    rule = f"the rows must have the shape {wanted}"
    check(tuple(src.shape) == wanted, label, rule, tuple(src.shape), "Reshape them")
    rule = f"the rows must have the dtype of the tensor, {t.dtype}, as torch has it"
    check(src.dtype == t.dtype, label, rule, src.dtype, f"Call .to({t.dtype})", DtypeError)
    begin_write(t)
    if is_empty(wanted):
        return t
    wide = t.buffers()[-1] if form.divisor else None
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 : -1])
    slots = [slot for slot in quantizer.slots if slot.dims[0].axis in ("lead", "m")]
    rows = [by_rows(t, slot) for slot in slots]
    if is_quantized(src) and _has_bytes(src, t, wide):
        new = [by_rows(src, slot) for slot in slots]
        for to, source in zip(rows, new, strict=True):
            to.index_copy_(dim, index, source[..., : to.shape[-1]])
        return t
    values = encodable(_values_of(src))
    if wide is not None:
        first = values.abs().amax().float() if form.factor is not None else 1.0
        wide.copy_(torch.where(wide == 0, first, wide))
    steps = torch.arange(inner, device=index.device)
    # Beyond the end, where the op refuses it; a negative position would not be written.
    index = torch.where(index < 0, shape[dim], index)
    positions = (index.reshape(-1, 1) * inner + steps).flatten().expand(outer, -1)
    flat = [each.view(outer, 1, shape[dim] * inner, each.shape[-1]) for each in rows]
    factors = flat[1][..., : form.factors(shape[-1])] if len(flat) > 1 else None
    x = values.reshape(outer, 1, -1, shape[-1])
    sides = (flat[0], factors, None, None, form.text, "")
    CACHE_APPEND(x, None, positions, *sides, k_global=wide)
    return t


def _row_format(canonical: str) -> RowFormat | None:
    """Return the format of single rows; None if a factor serves several of them."""
    try:
        return row_format(canonical)
    except QTensorError:
        return None


def _has_bytes(src: QuantizedTensor, t: QuantizedTensor, wide: Tensor | None) -> bool:
    """Return whether the bytes of ``src`` mean in ``t`` what they mean in ``src``."""
    if src._quantizer != t._quantizer or src._parts:
        return False
    return wide is None or torch.equal(src.buffers()[-1], wide)


@implements(PRESERVE, "index_copy_")
def _index_copy_(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t, dim, index, src = args
    if not is_quantized(t):
        return func(t, dim, index, plain(src))
    dim = normalize(dim, t.ndim)
    check_index(index, 0, t.shape[dim], "index_copy_")
    return write_rows(t, dim, index, src, "index_copy_")


@implements(PRESERVE, "index_put_")
def _index_put_(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``t[:, index] = rows`` with one vector of integers."""
    t, indices, src = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not is_quantized(t):
        return func(t, indices, plain(src), accumulate)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if accumulate or len(dims) != 1 or indices[dims[0]].dtype in _MASKS:
        rule = "rows are assigned by one vector of integers, without accumulation"
        got = [None if i is None else f"{i.dtype} {tuple(i.shape)}" for i in indices]
        fix = "Call .dequantize() first, and quantize the result"
        fail(f"index_put_[{t._quantizer.format}]", rule, got, fix, UnsupportedError)
    dim, index = dims[0], indices[dims[0]].reshape(-1)
    shape = (*t.shape[:dim], index.numel(), *t.shape[dim + 1 :])
    src = src if tuple(src.shape) == shape else _values_of(src).expand(shape)
    check_index(index, -t.shape[dim], t.shape[dim], "index_put_")
    index = torch.where(index < 0, index + t.shape[dim], index)
    return write_rows(t, dim, index, src, "index_put_")


def _values_of(t: Tensor) -> Tensor:
    """Return the values of a quantized tensor, and a plain one as it is."""
    return plain(t) if is_quantized(t) else t
