"""Read the buffers of an operand as the matrices and factors that kernels multiply."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from qtensor.core.errors import QTensorError
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.kernels.products.problem import GemmSide
from qtensor.kernels.quantizers import NVFP4Like
from qtensor.reference.blocks import swizzle
from qtensor.reference.scaling import quotient

Reader = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Reading:
    """Describe how a kernel reads an operand: functions from the buffers to its arguments.

    Attributes:
        codes: returns the matrix of codes, in the kernel's layout, contiguous.
        slots: indices of the buffers in use, which must be those of a whole tensor.
        factors: returns the factors of blocks; None if the format has none.
        scale: returns one float32 factor, or one for each row; None if the format has none.
        lines: True if ``scale`` returns one factor for each row.
        rearranges: True if ``factors`` puts the stored factors into tiles, a copy at each call.
    """

    codes: Reader
    slots: tuple[int, ...]
    factors: Reader | None = None
    scale: Reader | None = None
    lines: bool = False
    rearranges: bool = False


def reading(operand: GemmSide, recipe: str) -> Reading:
    """Return how a kernel of the recipe reads an operand."""
    if recipe == "fp8":
        return _read_fp8(operand)
    data = operand.slot(f"{operand.side}_data")
    factors = operand.slot(f"{operand.side}_scale_inv")
    if data is None or factors is None:
        raise QTensorError(f"gemm[{operand.label}]: no {operand.side} buffers")
    slots = (data, factors)
    if recipe == "fp8_blockwise":
        return Reading(_item(data), slots, _item(factors))
    transposed = operand.side == "_columnwise" and recipe in ("mxfp8", "mxfp4")
    codes = _transposed(data) if transposed and recipe == "mxfp4" else _item(data)
    swizzled = bool(operand.option("swizzled"))
    tiles = _tiles(factors, transposed, swizzled)
    if recipe != "nvfp4":
        return Reading(codes, slots, tiles, rearranges=not swizzled)
    level = operand.slot(operand.global_buffer or "")
    if level is None:
        raise QTensorError(f"gemm[{operand.label}]: no {operand.global_buffer}")
    scaled_rows = bool(operand.option("row_scaled"))
    return Reading(codes, (*slots, level), tiles, _item(level), scaled_rows, not swizzled)


def _read_fp8(operand: GemmSide) -> Reading:
    """Return how FP8 codes are read, with the contracted dim last.

    ``_data`` and ``_transpose`` hold the same bytes, so that one of them is enough.
    """
    scale = operand.slot("_scale_inv")
    straight = operand.slot("_data" if operand.contracted == -1 else "_transpose")
    other = operand.slot("_transpose" if operand.contracted == -1 else "_data")
    lines = operand.label == "fp8_rowwise"
    if scale is None:
        raise QTensorError(f"gemm[{operand.label}]: no _scale_inv")
    if straight is not None:
        return Reading(_item(straight), (straight, scale), None, _item(scale), lines)
    if other is None:
        raise QTensorError(f"gemm[{operand.label}]: no codes")
    codes = _last_first(other) if operand.contracted == -1 else _transposed(other)
    return Reading(codes, (other, scale), None, _item(scale), lines)


@functools.cache
def _item(slot: int) -> Reader:
    return lambda buffers: buffers[slot]


@functools.cache
def _transposed(slot: int) -> Reader:
    """Return a reader of the codes, transposed: bytes are moved, none is changed."""
    return lambda buffers: buffers[slot].t().contiguous()


@functools.cache
def _last_first(slot: int) -> Reader:
    """Return a reader of ``_transpose`` (K, ...) as (..., K)."""
    return lambda buffers: buffers[slot].movedim(0, -1).contiguous()


@functools.cache
def _tiles(slot: int, transposed: bool, swizzled: bool) -> Reader:
    """Return a reader of factors in tiles of 128x4, those of the transpose if ``transposed``."""
    if swizzled:
        return lambda buffers: buffers[slot]
    if transposed:
        return lambda buffers: swizzle(buffers[slot].t())
    return lambda buffers: swizzle(buffers[slot])


def without_line_factors(
    quantizer: QuantizerLike, buffers: Sequence[Tensor], global_name: str | None
) -> tuple[list[Tensor], Tensor | None]:
    """Return buffers whose values lack the factors of lines or of the tensor, and those factors.

    A product applies these factors to its sums.

    Args:
        quantizer: of the buffers.
        buffers: in slot order.
        global_name: the buffer of the tensor-wide factor of a two-level format, or None.

    Returns:
        The buffers with ones in place of the factors, and the factors, float32 (n,), one or one for
        each line; None if the format has no such factor.
    """
    replaced, factor = list(buffers), None
    for i, slot in enumerate(quantizer.slots[: len(replaced)]):
        if slot.name == "_scale_inv":
            factor = replaced[i].reshape(-1)
            replaced[i] = torch.ones_like(replaced[i])
        elif slot.name == global_name:
            divisor = cast(NVFP4Like, quantizer).global_divisor
            factor = quotient(replaced[i], divisor)
            replaced[i] = torch.full_like(replaced[i], divisor)
    return replaced, factor
