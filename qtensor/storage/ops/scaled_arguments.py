"""The arguments of ``scaled_mm`` and ``scaled_grouped_mm`` that quantized tensors give."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from qtensor.core.buffer_shapes import ceil_div, round_up
from qtensor.core.errors import check
from qtensor.kernels.products.scaled_recipes import (
    BLOCK_1X32,
    GROUPED,
    ROW,
    ScaledOperand,
    ScaledReading,
    recipe_text,
)
from qtensor.library.scaled_grouped import group_sizes
from qtensor.reference.blocks import swizzle, unswizzle
from qtensor.storage.ops.scaled_operands import scaled_side

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor


def scaled_mm_args(t: QuantizedTensor, side: str, codes: bool) -> dict[str, Any]:
    """Return what ``QuantizedTensor.scaled_mm_args`` returns."""
    rule, fix = 'side must be "a" or "b"', "Pass one of them"
    check(side in ("a", "b"), "scaled_mm_args", rule, repr(side), fix)
    name = f"scaled_mm_args[{t._quantizer.format}]"
    fix = "Reshape it, or use scaled_grouped_mm_args for a stack"
    check(t.ndim == 2, name, "the tensor must be a matrix", tuple(t.shape), fix)
    read, buffers = scaled_side("scaled_mm_args", t), t.buffers()
    check_whole(name, read, buffers)
    given = read(buffers)
    given = given.as_b() if side == "b" else given
    mat = given.mat if codes else t.t() if side == "b" else t
    return {
        f"mat_{side}": mat,
        f"scale_{side}": given.scale,
        f"scale_recipe_{side}": list(given.recipe),
        f"swizzle_{side}": list(given.swizzle),
    }


def scaled_grouped_mm_args(
    t: QuantizedTensor, side: str, offs: Tensor | None, along_k: bool, codes: bool
) -> dict[str, Any]:
    """Return what ``QuantizedTensor.scaled_grouped_mm_args`` returns."""
    name = f"scaled_grouped_mm_args[{t._quantizer.format}]"
    rule, fix = 'side must be "a" or "b"', "Pass one of them"
    check(side in ("a", "b"), name, rule, repr(side), fix)
    fits = offs is None or (isinstance(offs, Tensor) and offs.dtype is torch.int32)
    rule, got = "offs must be an int32 tensor", str(getattr(offs, "dtype", type(offs).__name__))
    check(fits, name, rule, got, "Pass the end of each group, or None for a stack")
    rule = "the tensor must be a matrix with offs, or a stack without"
    fits = t.ndim == (3 if offs is None else 2) and not (along_k and offs is None)
    got = f"{tuple(t.shape)}, offs {'given' if offs is not None else None}"
    check(fits, name, rule, got, "Reshape it, or pass offs")
    read, buffers = scaled_side("scaled_grouped_mm_args", t), t.buffers()
    check_whole(name, read, buffers)
    given = grouped(read, buffers, offs, along_k)
    plain = given.mat.view(*t.shape[:-1], -1)
    mat = plain if codes else t
    return {
        f"mat_{side}": mat.mT if side == "b" else mat,
        f"scale_{side}": given.scale,
        f"scale_recipe_{side}": list(given.recipe),
        f"swizzle_{side}": list(given.swizzle),
    }


def check_whole(op: str, read: ScaledReading, buffers: list[Tensor]) -> None:
    """Refuse buffers of a slice, which lack the padding that kernels read.

    Raises:
        QTensorError: with the way out.
    """
    sizes = read.side.sizes
    fits = all(tuple(buffers[i].shape) == tuple(sizes[i]) for i in read.slots)
    rule = "the buffers must be those of a whole tensor"
    check(fits, op, rule, "a slice", "Call .contiguous() or .clone() on it first")


# ---- factors of groups


def grouped(
    read: ScaledReading, buffers: list[Tensor], offs: Tensor | None, along_k: bool
) -> ScaledOperand:
    """Return an operand whose factors are laid out group by group.

    Shapes do not depend on the values of ``offs``: there is room for the padding of any groups.
    """
    given, shape = read(buffers), read.side.shape
    op, known = "scaled_grouped_mm_args", ", ".join(map(recipe_text, GROUPED))
    sizes: list[int] = []
    if type(offs) is Tensor and offs.is_cpu and not is_compiling():
        sizes = group_sizes(op, offs.tolist(), shape[-1] if along_k else shape[0])
    rule, got = f"groups have the recipes {known}", recipe_text(given.recipe)
    check(given.recipe in GROUPED, op, rule, got, "Quantize to one of them")
    groups = shape[0] if offs is None else offs.shape[0]
    if given.recipe == ROW:
        rows = given.scale[0].reshape(shape[:-1])
        return given._replace(scale=[rows.repeat(groups) if along_k else rows])
    tiles, *wide = given.scale
    block = 32 if given.recipe == BLOCK_1X32 else 16
    lines, blocks = math.prod(shape[:-1]), ceil_div(shape[-1], block)
    factors = unswizzle(tiles.view(torch.uint8).reshape(round_up(lines, 128), -1))
    factors = factors[:lines, :blocks]
    if offs is None:
        padded = F.pad(factors.unflatten(0, shape[:-1]), (0, -blocks % 4, 0, -shape[-2] % 128))
        laid_out = swizzle(padded.flatten(0, 1)).view(groups, -1)
    elif along_k:
        rule = f"groups along K must have multiples of {block} values"
        fits = not any(size % block for size in sizes)
        check(fits, op, rule, sizes, "Pad the groups before quantizing")
        laid_out = _along_k(factors, offs // block)
    else:
        laid_out = _along_rows(factors, offs)
    # The one factor of the tensor is that of each group.
    wide = [each.expand(groups).contiguous() for each in wide]
    return given._replace(scale=[laid_out.view(tiles.dtype), *wide])


def _places(ends: Tensor, total: int, unit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the entries of padded groups come from.

    Args:
        ends: (groups,) integers: the end of each group.
        total: number of entries.
        unit: each group is padded to a multiple of it.

    Returns:
        The source of each padded entry, ``total`` for padding; the group of each unit, ``groups``
        behind the last one; and the first unit of each group, with the end of the last one.
    """
    ends = ends.long()
    starts = F.pad(ends[:-1], (1, 0))
    last = F.pad(((ends - starts + unit - 1) // unit).cumsum(0), (1, 0))
    units = (total + ends.shape[0] * (unit - 1)) // unit
    number = torch.arange(units, device=ends.device)
    group = torch.searchsorted(last[1:], number, right=True)
    known = group.clamp(max=ends.shape[0] - 1)
    inside = torch.arange(unit, device=ends.device)
    source = (starts[known] + (number - last[known]) * unit)[:, None] + inside
    valid = (source < ends[known][:, None]) & (group < ends.shape[0])[:, None]
    return torch.where(valid, source, total).flatten(), group, last


def _along_rows(factors: Tensor, offs: Tensor) -> Tensor:
    """Return factors (rows, blocks) of groups of rows, each padded to tiles of 128x4."""
    source, _, _ = _places(offs, factors.shape[0], 128)
    return swizzle(F.pad(factors, (0, -factors.shape[1] % 4, 0, 1))[source])


def _along_k(factors: Tensor, ends: Tensor) -> Tensor:
    """Return factors (rows, blocks) of groups of blocks; the tiles of a group are adjacent."""
    source, group, first = _places(ends, factors.shape[1], 4)
    padded = F.pad(factors, (0, 1, 0, -factors.shape[0] % 128))[:, source]
    down, across = padded.shape[0] // 128, group.shape[0]
    tiles = swizzle(padded).view(down, across, -1)
    # What lies behind the last group counts as a group of its own.
    first = F.pad(first, (0, 1), value=across)
    width = (first[1:] - first[:-1])[group]
    row = torch.arange(down, device=ends.device)[:, None]
    begin = first[:-1][group]
    place = down * begin + row * width + torch.arange(across, device=ends.device) - begin
    laid_out = torch.empty_like(tiles).flatten(0, 1)
    laid_out[place.flatten()] = tiles.flatten(0, 1)
    return laid_out.view(padded.shape)
