"""Compute the op ``scaled_grouped_gemm``: ``F.scaled_grouped_mm`` on any device.

An operand holds its codes and the factors of all groups as torch takes them: the factors of each
group, padded on their own, lie one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.core.buffer_shapes import buffer_shapes
from qtensor.core.errors import check
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import parse
from qtensor.kernels.products.problem import Pair
from qtensor.kernels.products.scaled_recipes import CODES, GROUPED, RECIPES, swizzle_of
from qtensor.library.define import FILLS, empty
from qtensor.library.gemm import GemmArgs

if TYPE_CHECKING:
    from qtensor.library.grouped import ScaledGroupedArgs

_OP = "scaled_grouped_gemm"


def _check_operand(operand: Operand) -> None:
    """Refuse an operand that is not one of rowwise data in a recipe of groups.

    Raises:
        QTensorError: the format, an option, or a buffer.
    """
    buffers, canonical, shape = operand
    rule = (
        "an operand is quantized rowwise alone, in a format and options that torch takes by groups"
    )
    fix = "Use scaled_grouped_mm_args()"
    check(canonical != "", _OP, rule, "plain values", fix)
    quantizer = parse(canonical)
    fits = RECIPES.get(quantizer.format) in GROUPED and quantizer.rowwise
    check(fits and not quantizer.columnwise, _OP, rule, canonical, fix)
    dtypes = [slot.dtype for slot in quantizer.slots]
    found = [buffer.dtype for buffer in buffers]
    rule = f"the buffers of {canonical} are {', '.join(map(str, dtypes))}"
    check(found == dtypes, _OP, rule, found, "Pass the codes, then the factors")
    wanted, size = tuple(buffer_shapes(quantizer.slots, shape)[0]), tuple(buffers[0].shape)
    check(size == wanted, _OP, f"codes must have shape {wanted}", size, "Fix the shape")


def allocate(args: ScaledGroupedArgs) -> Tensor:
    """Return the result of a call, unwritten, after checking its shapes.

    Raises:
        QTensorError: operands or groups do not fit each other.
    """
    (a, b), offs = args.operands, args.offs
    ranks = len(a.shape), len(b.shape)
    rule = "operands must be matrices or stacks of them, with int32 offs (groups,) for a matrix"
    fits = set(ranks) <= {2, 3} and (offs is None) == (ranks == (3, 3))
    fits = fits and (offs is None or (offs.ndim == 1 and offs.dtype == torch.int32))
    got = f"{tuple(a.shape)}, {tuple(b.shape)}"
    check(fits, _OP, rule, got, "Pass their shapes")
    counts = [x.shape[0] for x in (a, b) if len(x.shape) == 3]
    counts += [] if offs is None else [offs.shape[0]]
    same = all(count == counts[0] for count in counts)
    check(same, _OP, "all must have the same groups", counts, "Fix the shapes")
    check(a.shape[-1] == b.shape[-1], _OP, "K must be equal in a and b", got, "Fix the shapes")
    for operand in (a, b):
        _check_operand(operand)
    shape = (*a.shape[:-1], b.shape[-2])
    if ranks == (2, 2):
        shape = (counts[0], *shape)
    elif ranks == (3, 2):
        shape = shape[1:]
    return empty(a.buffers[0], shape, args.dtype)


def fill(out: Tensor, args: ScaledGroupedArgs) -> None:
    """Write the product of each group, and zeros behind the last one."""
    a, b = args.operands
    if out.is_cuda:
        out.copy_(_by_torch(args))
        return
    along_k = len(a.shape) == len(b.shape) == 2
    if args.offs is None:
        sizes = [0] * a.shape[0]
    else:
        split = a.shape[-1] if along_k else a.shape[0] if len(a.shape) == 2 else b.shape[0]
        sizes = group_sizes(_OP, args.offs.tolist(), split)
    lefts, rights = _pieces(a, sizes, along_k), _pieces(b, sizes, along_k)
    for left, right, part in zip(lefts, rights, _parts(out, args, sizes), strict=True):
        if part.numel():
            result = part if part.is_contiguous() else empty(part)
            FILLS["gemm"](result, GemmArgs(Pair(left, right), "TN", args.dtype))
            if result is not part:
                part.copy_(result)


def _parts(out: Tensor, args: ScaledGroupedArgs, sizes: list[int]) -> Sequence[Tensor]:
    """Return the part of ``out`` that each group writes, after clearing what none writes."""
    left, right = (len(operand.shape) for operand in args.operands)
    if left == right:
        return out.unbind()
    dim = 0 if left == 2 else 1
    rest = out.shape[dim] - sum(sizes)
    *parts, behind = out.split([*sizes, rest], dim)
    behind.zero_()
    return parts


def group_sizes(op: str, ends: list[int], total: int) -> list[int]:
    """Return the sizes of groups that end at ``ends``, for the op that an error names.

    Raises:
        QTensorError: they do not ascend to at most ``total``.
    """
    fits = all(0 <= e <= f for e, f in zip(ends, [*ends[1:], total], strict=True))
    check(fits, op, f"offs must ascend from 0 to at most {total}", ends, "Fix offs")
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _pieces(operand: Operand, sizes: list[int], along_k: bool) -> list[Operand]:
    """Return the matrix of each group.

    Raises:
        QTensorError: the factors end before those of the last group do, or a group of 4-bit codes
            begins inside a byte.
    """
    (codes, *factors), canonical, shape = operand
    slots = parse(canonical).slots
    packed = shape[-1] // codes.shape[-1] if codes.shape[-1] else 1
    flat = [factor.reshape(-1) for factor in factors]
    pieces, start, used = [], 0, [0] * len(flat)
    for i, size in enumerate(sizes):
        if len(shape) == 3:
            part, matrix = codes[i], shape[1:]
        elif not along_k:
            part, matrix = codes.narrow(0, start, size), (size, shape[1])
        else:
            rule = "groups of 4-bit codes must begin at even places along K"
            check(size % packed == 0, _OP, rule, sizes, "Fix offs")
            part = codes.narrow(1, start // packed, size // packed)
            matrix = (shape[0], size)
        buffers = [part.contiguous()]
        for j, needed in enumerate(buffer_shapes(slots, matrix)[1:]):
            count = math.prod(needed)
            rule = "the factors must hold those of every group, each padded on its own"
            fits = used[j] + count <= flat[j].numel()
            check(fits, _OP, rule, tuple(factors[j].shape), "Use scaled_grouped_mm_args()")
            buffers.append(flat[j].narrow(0, used[j], count).view(needed))
            used[j] += count
        pieces.append(Operand(buffers, canonical, matrix))
        start += size
    return pieces


def _by_torch(args: ScaledGroupedArgs) -> Tensor:
    """Return what torch's own function computes on a CUDA device."""
    sides = []
    for operand in args.operands:
        quantizer = parse(operand.canonical)
        codes, scale, *wide = operand.buffers
        factor = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
        scale = scale.view(factor.get(quantizer.spec.scale, torch.float32))
        recipe = RECIPES[quantizer.format]
        mat = codes.view(CODES[quantizer.element.name])
        sides.append((mat, [scale, *wide[:1]], list(recipe), list(swizzle_of(recipe))))
    (a, scale_a, recipe_a, swizzle_a), (b, scale_b, recipe_b, swizzle_b) = sides
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        *(a, b.mT, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b),
        offs=args.offs,
        output_dtype=args.dtype,
    )
