"""Read one matrix of a quantized stack (E, N, K), whose factors cover all matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from torch import Tensor

from qtensor.core.buffer_shapes import Shape, ceil_div
from qtensor.core.quantizer_registry import parse

_TILE_ROWS = 128
"""Rows of the factors of a tile (docs/numerics.md, swizzled factors)."""


@functools.lru_cache(maxsize=1024)
def stack_refusal(canonical: str, shape: tuple[int, ...]) -> str | None:
    """Return why the buffers of one matrix of a stack are not views of the stack's; or None.

    Args:
        canonical: text of the quantizer, or "" for plain values.
        shape: (..., N, K) of the stack.
    """
    rows = shape[-2]
    for slot in parse(canonical).slots if canonical else ():
        for index, dim in enumerate(slot.dims):
            if dim.axis != "m":
                continue
            if slot.swizzled and index:
                return f"the tiles of {slot.name} lie across the matrices of the stack"
            shared = dim.per * (_TILE_ROWS if slot.swizzled else 1)
            if rows % shared:
                return f"{shared} rows share entries of {slot.name}, and a matrix has {rows}"
    return None


def matrix_buffers(
    canonical: str, buffers: Sequence[Tensor], shape: Shape, index: int
) -> list[Tensor]:
    """Return the buffers of matrix number ``index`` of a stack, as views.

    Args:
        canonical: text of the quantizer, or "" for plain values.
        buffers: of the stack, in slot order.
        shape: (..., N, K) of the stack, which ``stack_refusal`` has accepted.
        index: number of the matrix, counted over all leading dims.
    """
    count, rows = math.prod(shape[:-2]), shape[-2]
    if not canonical:
        return [buffers[0].reshape(count, rows, shape[-1])[index]]
    views = []
    for slot, buffer in zip(parse(canonical).slots, buffers, strict=False):
        for position, dim in enumerate(slot.dims):
            if dim.axis == "lead":
                # The leading dims of the stack are adjacent in the buffer.
                buffer = buffer.flatten(position, position + len(shape) - 3)
                buffer = buffer.select(position, index)
            elif dim.axis == "m":
                first = index * rows // dim.per * dim.units
                buffer = buffer.narrow(position, first, ceil_div(rows, dim.per) * dim.units)
        views.append(buffer)
    return views
