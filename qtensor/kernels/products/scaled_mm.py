"""Products by ``torch.nn.functional.scaled_mm``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.kernels.products.problem import Problem, whole
from qtensor.kernels.products.scaled_recipes import (
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    HALVES,
    ROW,
    TENSOR,
    Recipe,
    ScaledReading,
    elements_refusal,
    operand_refusal,
    pair_refusal,
    recipe_of,
    recipe_text,
    sizes_refusal,
)

_HADAMARD = 16
_NO_END = (1000, 0)


class _Range(NamedTuple):
    """Compute capabilities on which torch has kernels: from ``least`` to below ``end``."""

    least: tuple[int, int]
    end: tuple[int, int] = _NO_END

    def __contains__(self, capability: object) -> bool:
        return isinstance(capability, tuple) and self.least <= capability < self.end

    def __str__(self) -> str:
        if self.end == _NO_END:
            return f"{self.least[0]}.{self.least[1]} or later"
        return f"{self.least[0]}.{self.least[1]} to below {self.end[0]}.{self.end[1]}"


def _capabilities(recipe: Recipe, element: str | None) -> _Range:
    """Return where torch's CUDA kernels run (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    if recipe in (TENSOR, ROW):
        return _Range((8, 9))
    if recipe in (BLOCK_1X128, BLOCK_128X128):
        return _Range((9, 0), (10, 0))
    if recipe == BLOCK_1X32 and element == "e2m1":
        return _Range((10, 0), (11, 0))
    return _Range((10, 0))


class ScaledMM:
    """Compute products with ``torch.nn.functional.scaled_mm``: float32 sums and one rounding.

    The function returns its result, which is copied into the output.
    """

    name = "scaled_mm"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.a, self.b = ScaledReading(problem.a), ScaledReading(problem.b)
        self.detail = f": {recipe_text(self.a.recipe)} x {recipe_text(self.b.recipe)}"
        # torch refuses the permission for 4-bit codes; other recipes than these have no use for it.
        self.fast = problem.fast and self.a.recipe in (TENSOR, ROW)

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Return why it does not compute the problem, or None."""
        if problem.capability is None:
            return "torch.nn.functional.scaled_mm needs a CUDA device"
        a, b = problem.a, problem.b
        if problem.batched or 0 in problem.sizes:
            return "scaled_mm multiplies single matrices with elements"
        for name, side in (("a", a), ("b", b)):
            if (reason := operand_refusal(side)) is not None:
                return f"operand {name}: {reason}"
        left, right = recipe_of(a), recipe_of(b)
        if (reason := pair_refusal(left, right)) is not None:
            return reason
        where = _capabilities(left, a.element)
        if problem.capability not in where:
            return f"scaled_mm takes {recipe_text(left)} on compute capability {where}"
        elements = str(a.element), str(b.element)
        return (
            elements_refusal(left, right, elements)
            or sizes_refusal(a.element, *problem.sizes[2:])
            or _rotation_refusal(problem)
            or _output_refusal(problem, left)
        )

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out``; or return why torch cannot take these tensors."""
        problem = self.problem
        if not (whole(problem.a, a, self.a.slots) and whole(problem.b, b, self.b.slots)):
            return "buffers must be those of whole tensors; these are of slices"
        left, right = self.a(a), self.b(b).as_b()
        result = F.scaled_mm(
            left.mat,
            right.mat,
            left.scale,
            list(left.recipe),
            right.scale,
            list(right.recipe),
            list(left.swizzle),
            list(right.swizzle),
            bias=bias,
            output_dtype=problem.dtype,
            use_fast_accum=self.fast,
        )
        out.copy_(result.view(out.shape))
        return None


def _rotation_refusal(problem: Problem) -> str | None:
    """Return why the product of the rotated operands is not that of the tensors, or None."""
    a, b = problem.a, problem.b
    if not (a.rotated or b.rotated):
        return None
    signs = {side.option("with_random_sign_mask") for side in (a, b)}
    if a.rotated != b.rotated or len(signs) > 1 or problem.sizes[3] % _HADAMARD:
        return "rotated operands (with_rht) must both be rotated, with equal signs"
    return None


def _output_refusal(problem: Problem, recipe: Recipe) -> str | None:
    """Return why torch does not write the result or add the bias, or None."""
    dtype, bias = problem.dtype, problem.bias
    only_bfloat16 = recipe == ROW or (recipe == BLOCK_1X32 and problem.a.element == "e2m1")
    if only_bfloat16 and dtype != torch.bfloat16:
        return f"scaled_mm of {problem.a.label} writes bfloat16"
    if dtype not in (*HALVES, torch.float32):
        return f"scaled_mm does not write {dtype}"
    if bias is None:
        return None
    if problem.a.label == "mxfp4":
        return "scaled_mm of mxfp4 adds no bias"
    shape, bias_dtype = bias
    if bias_dtype != dtype or dtype not in HALVES or shape != (problem.sizes[2],):
        return "scaled_mm adds a bias of N values in the result's 16-bit dtype"
    return None
