"""Where the buffers of a quantized tensor lie: their sizes, and the addresses that kernels take.

Every address of a buffer comes from `addresses`, which checks the buffer first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape, buffer_shape, buffer_shapes, rows_cols
from qtensor.kernels.cpu.structs import CQuantizer, c_quantizer, refusal

SHARED = 8
POSITIONS = 11
"""Number of addresses of a call."""
# Index of a buffer's address in a call: data, scales, amax and the caller's amax of the rowwise
# direction, the same four of the columnwise direction, the scales that both directions share, and
# the stored tensor-wide factors of both directions.
POSITION_OF = {
    "_data": 0,
    "_rowwise_data": 0,
    "_rowwise_scale_inv": 1,
    "_amax_rowwise": 2,
    "_transpose": 4,
    "_columnwise_data": 4,
    "_columnwise_scale_inv": 5,
    "_amax_columnwise": 6,
    "_scale_inv": SHARED,
    "_rowwise_global_scale_inv": 9,
    "_columnwise_global_scale_inv": 10,
}


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of a quantizer's buffers for one shape, as the kernels take it.

    Attributes:
        c_quantizer: the struct that the kernels read.
        address: the address of that struct.
        rows: rows of the (M, K) view.
        cols: its columns.
        slots: (slot, position among the addresses of a call, shape, dtype) of each buffer.
        scale_inv: slot of the one buffer of scales that both directions share, or None.
        factors: number of elements of that buffer.
        amax_entries: (position, number of elements) of each amax of the caller, in the order of
            `Quantizer.amax`.
        reads_columnwise: whether the values of the tensor are read from the columnwise buffers.
        stores_global: whether tensor-wide factors are stored, and a decode reads them in place of
            the maxima.
        factors_of_rows: position of the rowwise factors if each row has its own line of them,
            followed by lines of padding; else None.
        unpadded: the size of each slot's buffer without padding.
    """

    c_quantizer: CQuantizer
    address: int
    rows: int
    cols: int
    slots: tuple[tuple[int, int, torch.Size, torch.dtype], ...]
    scale_inv: int | None
    factors: int
    amax_entries: tuple[tuple[int, int], ...]
    reads_columnwise: bool
    stores_global: bool
    factors_of_rows: int | None
    unpadded: tuple[torch.Size, ...]

    def read_positions(self, columnwise: bool) -> tuple[int, int, int]:
        """Return the positions of the buffers of one direction that a decode reads."""
        if self.stores_global:
            return (4, 5, 10) if columnwise else (0, 1, 9)
        return (4, 5, 6) if columnwise else (0, 1, 2)


_LAYOUTS: dict[tuple[str, torch.Size], BufferLayout | None] = {}
_MAX_LAYOUTS = 4096


def buffer_layout(quantizer: Any, shape: Shape) -> BufferLayout | None:
    """Return the layout for a quantizer and a shape, or None if the kernels do not serve them.

    They do not serve quantizers that `refusal` refuses, nor tensors without elements.
    """
    key = quantizer.canonical, shape
    try:
        return _LAYOUTS[key]  # type: ignore[index]
    except KeyError:
        if len(_LAYOUTS) >= _MAX_LAYOUTS:
            _LAYOUTS.clear()
        served = refusal(quantizer) is None and 0 not in shape
        layout = _new_buffer_layout(quantizer, shape) if served else None
        return _LAYOUTS.setdefault(key, layout)  # type: ignore[arg-type]


def _new_buffer_layout(quantizer: Any, shape: Shape) -> BufferLayout:
    names = [slot.name for slot in quantizer.slots]
    sizes = [torch.Size(size) for size in buffer_shapes(quantizer.slots, shape)]
    shared = names.index("_scale_inv") if "_scale_inv" in names else None
    slots = tuple(
        (i, POSITION_OF[slot.name], sizes[i], slot.dtype) for i, slot in enumerate(quantizer.slots)
    )
    positions = [position for _, position, _, _ in slots]
    entries = (
        [torch.Size(size).numel() for size in quantizer.amax_shapes(shape)]
        if _has_amax(quantizer)
        else []
    )
    amax_positions = (3,) if shared is not None else tuple(p + 3 for p in (0, 4) if p in positions)
    reads_columnwise = 0 not in positions if shared is not None else is_columnwise(quantizer, None)
    struct_of_quantizer = c_quantizer(quantizer)
    rows, cols = rows_cols(shape)
    return BufferLayout(
        c_quantizer=struct_of_quantizer,
        address=ctypes.addressof(struct_of_quantizer),
        rows=rows,
        cols=cols,
        slots=slots,
        scale_inv=shared,
        factors=0 if shared is None else sizes[shared].numel(),
        amax_entries=tuple(zip(amax_positions, entries, strict=False)),
        reads_columnwise=reads_columnwise,
        stores_global=9 in positions or 10 in positions,
        factors_of_rows=position_of_row_factors(quantizer),
        unpadded=tuple(
            torch.Size(buffer_shape(tuple(replace(dim, pad=1) for dim in slot.dims), shape))
            for slot in quantizer.slots
        ),
    )


def position_of_row_factors(quantizer: Any) -> int | None:
    """Return the position of the rowwise factors if each row has a line of them, else None."""
    slot = next((s for s in quantizer.slots if s.name == "_rowwise_scale_inv"), None)
    if slot is None or slot.swizzled or slot.dims[0].axis != "m" or slot.dims[0].per != 1:
        return None
    return POSITION_OF[slot.name]


def _has_rows(buffer: Tensor, rows: int, size: torch.Size) -> bool:
    """Return whether a buffer has a line for each row, as those of ``size`` are."""
    return buffer.ndim == 2 and rows <= buffer.shape[0] and buffer.shape[1] == size[1]


def is_columnwise(quantizer: Any, columnwise: bool | None) -> bool:
    """Return whether a direction, or the quantizer's own for None, is stored columnwise."""
    return bool(quantizer.side(columnwise) == "_columnwise")


def _has_amax(quantizer: Any) -> bool:
    return quantizer.spec.block is None or quantizer.spec.scale == "e4m3"


def has_memory(t: Tensor) -> bool:
    """Return whether native code on a CPU may access the memory of `t` at once.

    The class of `t` must leave ops to torch: the result of a collective that still runs waits in
    its own `__torch_dispatch__`, and a fake tensor has no memory.
    """
    return t.is_cpu and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    """Return whether native code can access the elements of `t` as an array of `dtype`."""
    return t.dtype is dtype and t.is_contiguous() and has_memory(t)


def addresses(
    layout: BufferLayout,
    buffers: Sequence[Tensor],
    unpadded: bool = False,
    read: Sequence[int] = range(POSITIONS),
) -> list[int] | None:
    """Return the addresses of the buffers by position, 0 for buffers that are absent.

    Args:
        layout: of the buffers.
        buffers: in slot order.
        unpadded: True if the kernel does not read the padding that follows the factors of rows, as
            slices of rows lack it.
        read: positions of the buffers that the kernel reads; the others are not checked.

    Returns:
        None if a buffer is not that of a whole tensor: a part has no padding, and the kernels write
        and read padding.
    """
    if len(buffers) < len(layout.slots):
        return None
    pointers = [0] * POSITIONS
    for slot, position, size, dtype in layout.slots:
        if position not in read:
            continue
        buffer = buffers[slot]
        if not is_plain(buffer, dtype):
            return None
        if buffer.shape != size and not (
            unpadded and position == layout.factors_of_rows and _has_rows(buffer, layout.rows, size)
        ):
            return None
        pointers[position] = buffer.data_ptr()
    return pointers


def _is_transposed(buffer: Tensor) -> bool:
    if buffer.ndim < 2 or 1 in buffer.shape[-2:]:
        return False
    return buffer.stride(-1) > max(buffer.stride(-2), 1)


def whole_copies(
    layout: BufferLayout, buffers: Sequence[Tensor], read: Sequence[int]
) -> list[Tensor] | None:
    """Return the buffers of a part of a tensor as those of a whole one: contiguous and padded.

    Args:
        layout: of the part.
        buffers: in slot order.
        read: positions of the buffers that a kernel reads; the others are returned as they are.

    Returns:
        None if a kernel cannot read such buffers, or if the elements of a line are not adjacent
        in memory, as in a transpose: copying them takes longer than other ways to read them.
    """
    whole = list(buffers)
    if len(whole) < len(layout.slots):
        return None
    for slot, position, size, dtype in layout.slots:
        buffer = whole[slot]
        if position not in read:
            continue
        if buffer.dtype is not dtype or not has_memory(buffer):
            return None
        if buffer.ndim != len(size) or _is_transposed(buffer):
            return None
        if any(have > want for have, want in zip(buffer.shape, size, strict=True)):
            return None
        if any(
            have < least for have, least in zip(buffer.shape, layout.unpadded[slot], strict=True)
        ):
            return None
        if buffer.shape != size:
            padded = buffer.new_zeros(size)
            padded[tuple([slice(have) for have in buffer.shape])] = buffer
            buffer = padded
        whole[slot] = buffer.contiguous()
    return whole
