"""Products by the bfloat16 dot products of a CPU (AVX512-BF16)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import buffer_shapes, rows_cols
from qtensor.core.formats import Slot
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import QuantizerLike, alloc_slots, parse
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.native import Rows
from qtensor.kernels.products import tiles
from qtensor.kernels.products.problem import GemmSide, Problem
from qtensor.kernels.products.tiles import decoded
from qtensor.kernels.products.weight_rows import rows_of_both, rows_quantizer
from qtensor.reference.blocks import unswizzle

LEAST_SCALE = 24
"""Least E8M0 code of a factor. Values of blocks with smaller factors could be subnormal in
bfloat16, and dot products treat subnormal numbers as zero.
"""
_CHUNK = 1 << 22
"""Bytes of codes that are looked at together."""


class DotProducts:
    """bfloat16 dot products with float32 sums, of operands that bfloat16 holds exactly.

    Factors of rows or of tensors are applied to the sums. The weight is decoded in the cache.
    """

    name = "dot_products"
    detail = " in bfloat16"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why dot products do not serve a problem, or None."""
        reason = tiles.refusal(problem)
        if reason is not None:
            return reason
        for name, side, quantizer in (
            ("a", problem.a, problem.a.quantizer),
            ("b", problem.b, rows_quantizer(problem)),
        ):
            reason = _format_refusal(side, quantizer)
            if reason is not None:
                return f"operand {name}: {reason}"
        if problem.a.shape[-1] % 2:
            return f"dot products take pairs, and K={problem.a.shape[-1]} is odd"
        return None if is_available(native.linear_) else "the CPU has no bfloat16 dot products"

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out`` (..., N); or return why these tensors cannot be taken."""
        left_rows, weight = rows_of_both(self.problem, a, b)
        for name, matrix in (("a", left_rows), ("b", weight)):
            if not has_normal_values(matrix):
                return f"operand {name} has blocks with factors below 2^{LEAST_SCALE - 127}"
        left, factor = decoded(left_rows, torch.bfloat16)
        if left is None:
            return "no kernel decodes the left operand"
        added = None if bias is None else bias.float().expand(weight.shape[0]).contiguous()
        if native.linear_(weight, Rows(left, factor), added, out):
            return None
        return "the CPU, or the format of the right operand, has no dot-product kernel"


def _format_refusal(side: GemmSide, quantizer: QuantizerLike | None) -> str | None:
    """Return why bfloat16 does not hold a format's values exactly; None if it does.

    Factors of rows do not count, because they are applied to the sums.

    Args:
        side: an operand.
        quantizer: of its rows along the contraction; None for a plain operand.
    """
    if quantizer is None:
        return None if side.dtype == torch.bfloat16 else f"{side.dtype} would be rounded"
    spec = quantizer.spec
    if spec.block is None:
        exact = getattr(quantizer, "axis", -1) == -1
    elif spec.scale == "e4m3":
        exact = quantizer.factors_are_local
    else:
        exact = spec.scale == "e8m0" or bool(side.option("force_pow_2_scales", False))
    return None if exact else f"bfloat16 does not hold the values of {side.canonical} exactly"


def has_normal_values(matrix: Operand) -> bool:
    """Return whether every value is zero or a normal bfloat16 number times the factor of its row.

    The check reads the factors of blocks, one for 16 elements or more, without the padding. If a
    factor is too small, it also reads the codes of that block: a block of zeros is accepted.

    Args:
        matrix: rowwise rows; a plain one is bfloat16.
    """
    quantizer = matrix.quantizer
    if quantizer is None:
        return True
    if quantizer.spec.block is None or quantizer.spec.scale == "e4m3":
        return True
    slot, buffer = _named(quantizer, matrix, "_rowwise_scale_inv")
    factors = _without_padding(slot, buffer, matrix)
    least = LEAST_SCALE if quantizer.spec.scale == "e8m0" else 2.0 ** (LEAST_SCALE - 127)
    if factors is None:
        return False
    if not factors.numel() or bool(factors.amin() >= least):
        return True
    small = factors < least
    return not _has_codes(quantizer, matrix, small if slot.dims[0].axis == "m" else small.t())


def _named(quantizer: QuantizerLike, matrix: Operand, name: str) -> tuple[Slot, Tensor]:
    """Return the slot of that name and its buffer."""
    pairs = zip(quantizer.slots, matrix.buffers, strict=False)
    return next((slot, buffer) for slot, buffer in pairs if slot.name == name)


def _without_padding(slot: Slot, factors: Tensor, matrix: Operand) -> Tensor | None:
    """Return the factors that stand for elements, or None where tiles of factors are not whole."""
    if slot.swizzled:
        if factors.shape[0] % 128 or factors.shape[1] % 4:
            return None
        factors = unswizzle(factors)
    dims = tuple(dataclasses.replace(dim, pad=1) for dim in slot.dims)
    (sizes,) = buffer_shapes([dataclasses.replace(slot, dims=dims)], matrix.shape)
    return factors[tuple(slice(size) for size in sizes)]


def _has_codes(quantizer: QuantizerLike, matrix: Operand, wanted: Tensor) -> bool:
    """Return whether a block that is wanted has a code other than zero.

    Args:
        quantizer: of the matrix.
        matrix: rowwise rows.
        wanted: bool (row blocks, column blocks).
    """
    assert quantizer.spec.block is not None  # noqa: S101 - the caller has checked it
    slot, codes = _named(quantizer, matrix, "_rowwise_data")
    rows, _ = rows_cols(matrix.shape)
    codes = codes.reshape(rows, -1)
    packing = slot.dims[-1]
    width = quantizer.spec.block[1] * packing.units // packing.per
    high = -(-rows // wanted.shape[0]) if wanted.shape[0] < rows else 1
    lines = wanted.any(1).repeat_interleave(high)[:rows].nonzero().squeeze(1)
    whole = codes.shape[1] // width * width
    for part in lines.split(max(1, _CHUNK // codes.shape[1])):
        chosen = codes[part]
        blocks = [chosen[:, :whole].reshape(part.numel(), -1, width).amax(-1)]
        if whole < codes.shape[1]:
            blocks.append(chosen[:, whole:].amax(-1, keepdim=True))
        if bool(((torch.cat(blocks, 1) != 0) & wanted[part // high]).any()):
            return True
    return False


@functools.cache
def is_available(linear_: Callable[..., bool]) -> bool:
    """Return whether the CPU and the kernels have dot products, after trying one product."""
    buffers = alloc_slots(parse("fp8").slots, (1, 2), torch.device("cpu"))
    weight = Operand(buffers, "fp8", (1, 2))
    for buffer in weight.buffers:
        buffer.zero_()
    x = torch.zeros(1, 2, dtype=torch.bfloat16)
    return linear_(weight, Rows(x), None, torch.zeros(1, 1, dtype=torch.float32))
