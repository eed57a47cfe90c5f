"""Multiply the matrices of stacks (E, N, K) one by one.

The factors of a quantized stack cover all of its matrices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import parse
from qtensor.kernels.products.problem import GemmSide, Problem

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


def of_each(problem: Problem) -> Problem:
    """Return the product of each matrix of a batch, without the bias."""
    a, b = (dataclasses.replace(side, shape=side.shape[-2:]) for side in (problem.a, problem.b))
    return dataclasses.replace(problem, a=a, b=b, bias=None)


def batch_refusal(problem: Problem) -> str | None:
    """Return why the products of a batch are not computed one by one, or None."""
    if len(problem.a.shape) != len(problem.b.shape):
        return "one matrix is multiplied with a batch"
    reasons = (stack_refusal(side.canonical, side.shape) for side in (problem.a, problem.b))
    return next(filter(None, reasons), None)


def multiply_each(
    each: Callable[..., str | None],
    out: Tensor,
    a: tuple[GemmSide, list[Tensor]],
    b: tuple[GemmSide, list[Tensor]],
) -> str | None:
    """Write the products of the matrices of two stacks.

    Args:
        each: the runner of one product, for the problem ``of_each``.
        out: (..., M, N).
        a: the left stack and its buffers.
        b: the right stack and its buffers.

    Returns:
        Why it wrote nothing or not all, or None.
    """
    stacks = [_stack(*a), _stack(*b)]
    for i, result in enumerate(out.view(-1, *out.shape[-2:])):
        left, right = (matrix_of(stack, i).buffers for stack in stacks)
        reason = each(result, left, right, None)
        if reason is not None:
            return reason
    return None


def _stack(side: GemmSide, buffers: list[Tensor]) -> Operand:
    shape: Any = side.shape
    if side.quantizer is None:
        # Its dims may lie in any order: copied once, not for each matrix.
        buffers = [buffers[0].reshape(math.prod(shape[:-2]), *shape[-2:])]
    return Operand(buffers, side.canonical, shape)
