"""Read elements, masked values and rows of quantized tensors by index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import normalize
from qtensor.core.errors import UnsupportedError, fail
from qtensor.storage import geometry
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.table import PRESERVE, Args, Kwargs, Op, implements
from qtensor.storage.ops.views import view_tensor
from qtensor.storage.ops.write import plain
from qtensor.storage.origin import FRESH
from qtensor.storage.rebuild import Q, separate, with_buffers

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
