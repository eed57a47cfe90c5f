"""Read one matrix of a quantized stack (E, N, K), whose factors cover all matrices."""

from __future__ import annotations

import functools
import math

from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.operand import Operand
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


def matrix_of(stack: Operand, index: int) -> Operand:
    """Return matrix number ``index`` of a stack; its buffers are views.

    Args:
        stack: (..., N, K), which ``stack_refusal`` has accepted.
        index: number of the matrix, counted over all leading dims.
    """
    shape, quantizer = stack.shape, stack.quantizer
    count, rows = math.prod(shape[:-2]), shape[-2]
    if quantizer is None:
        values = stack.buffers[0].reshape(count, rows, shape[-1])[index]
        return Operand([values], "", shape[-2:])
    views = []
    for slot, buffer in zip(quantizer.slots, stack.buffers, strict=False):
        for position, dim in enumerate(slot.dims):
            if dim.axis == "lead":
                # The leading dims of the stack are adjacent in the buffer.
                buffer = buffer.flatten(position, position + len(shape) - 3)
                buffer = buffer.select(position, index)
            elif dim.axis == "m":
                first = index * rows // dim.per * dim.units
                buffer = buffer.narrow(position, first, ceil_div(rows, dim.per) * dim.units)
        views.append(buffer)
    return Operand(views, stack.canonical, shape[-2:])
