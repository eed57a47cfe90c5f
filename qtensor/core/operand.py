"""``Operand``: how layers, ops and kernels pass a tensor that a product reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, ceil_div, rows_cols
from qtensor.core.formats import Slot
from qtensor.core.quantizer_registry import QuantizerLike, parse, transposed


class Operand(NamedTuple):
    """A tensor that a product reads: the buffers of a quantized tensor, or one plain tensor.

    Attributes:
        buffers: in the slot order of the quantizer; the tensor itself if it is plain.
        canonical: text of the quantizer, "" for a plain tensor.
        shape: the logical shape.
    """

    buffers: list[Tensor]
    canonical: str
    shape: Shape

    @property
    def quantizer(self) -> QuantizerLike | None:
        """The quantizer; None for a plain tensor."""
        return parse(self.canonical) if self.canonical else None

    def transpose(self) -> Operand:
        """Return the transpose of a matrix; its buffers are views of these."""
        quantizer = self.quantizer
        if quantizer is None:
            return Operand([self.buffers[0].t()], "", self.shape[::-1])
        twin, buffers = transposed(quantizer, self.buffers)
        return Operand(buffers, twin.canonical, self.shape[::-1])

    def as_rows(self) -> Operand | None:
        """Return the rows (N, K) of a transposed weight (K, N), as views.

        Such an operand, the result of ``weight.t()``, has columnwise data alone: the rows of the
        weight, transposed.

        Returns:
            The operand (N, K), or None for any other operand.
        """
        quantizer = self.quantizer
        if quantizer is None or quantizer.rowwise or len(self.shape) != 2:
            return None
        return self.transpose()


def plain_operand(t: Tensor) -> Operand:
    """Return the operand of a tensor in high precision."""
    return Operand([t], "", t.shape)


ROW_STEP = 128
"""Rows of a tensor of any format can be cut out at multiples of this number."""


def decodes_in_rows(quantizer: QuantizerLike) -> bool:
    """Return True if some rows of the buffers decode to those rows of the values."""
    return bool(quantizer.rowwise and not quantizer.columnwise_value)


def row_parts(
    quantizer: QuantizerLike,
    buffers: Sequence[Tensor],
    shape: Sequence[int],
    bounds: tuple[int, int],
) -> list[Tensor]:
    """Return views of buffers that hold some rows; tensor-wide factors are in every part.

    ``bounds`` are the first row of the (M, K) view, a multiple of ``ROW_STEP``, and the end.
    """
    rows = rows_cols(shape)[0]
    start, stop = bounds
    found = []
    for slot, buffer in zip(quantizer.slots, buffers, strict=True):
        axes = [dim.axis for dim in slot.dims]
        if axes[0] == "lead":
            found.append(buffer.reshape(rows, buffer.numel() // max(rows, 1))[start:stop])
        elif "m" in axes:
            at = axes.index("m")
            dim = slot.dims[at]
            first = start // dim.per * dim.units
            end = buffer.shape[at] if stop == rows else ceil_div(stop, dim.per) * dim.units
            found.append(buffer.narrow(at, first, end - first))
        else:
            found.append(buffer)
    return found


def select_rows(
    slots: Sequence[Slot], buffers: Sequence[Tensor], shape: Shape, index: Tensor
) -> list[Tensor] | None:
    """Return the buffers of the entries of dim 0 that ``index`` names.

    Args:
        slots: of the buffers.
        buffers: of a tensor (d0, ..., dn) with n >= 1, in the order of ``slots``.
        shape: of the tensor.
        index: (count,) integers in [0, d0).

    Returns:
        The buffers of a tensor (count, d1, ..., dn); None if entries share codes or factors.
    """
    inner = math.prod(shape[1:-1])
    result = []
    for slot, buffer in zip(slots, buffers, strict=True):
        position = next((i for i, d in enumerate(slot.dims) if d.axis in ("lead", "m")), None)
        if position is None:
            result.append(buffer)
            continue
        axis = slot.dims[position]
        # An entry of dim 0 may hold several rows: with whole blocks, none shares a factor.
        if slot.swizzled or inner % axis.per:
            return None
        each = 1 if axis.axis == "lead" else inner // axis.per * axis.units
        result.append(buffer.index_select(position, _positions(index, each)))
    return result


def _positions(index: Tensor, each: int) -> Tensor:
    """Return the positions that the entries ``index`` cover, if ``each`` lie in an entry."""
    if each == 1:
        return index
    return (index[:, None] * each + torch.arange(each, device=index.device)).reshape(-1)
