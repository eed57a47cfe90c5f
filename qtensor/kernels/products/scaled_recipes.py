"""The recipes of ``torch.nn.functional.scaled_mm``, and its arguments for a quantized operand."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from qtensor.kernels.products.problem import SCALAR_FORMATS, GemmSide
from qtensor.kernels.products.reading import Reading, reading

HALVES = (torch.bfloat16, torch.float16)
MULTIPLE = 16
"""N and K are multiples of this number, and K of twice that with 4-bit codes."""
CODES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float4_e2m1fn_x2,
}
"""Element -> dtype of the codes in torch; of e2m1, one entry holds two codes along K."""

Recipe = tuple[ScalingType, ...]

TENSOR: Recipe = (ScalingType.TensorWise,)
ROW: Recipe = (ScalingType.RowWise,)
BLOCK_1X128: Recipe = (ScalingType.BlockWise1x128,)
BLOCK_128X128: Recipe = (ScalingType.BlockWise128x128,)
BLOCK_1X32: Recipe = (ScalingType.BlockWise1x32,)
BLOCK_1X16: Recipe = (ScalingType.BlockWise1x16,)
TWO_LEVELS: Recipe = (ScalingType.BlockWise1x16, ScalingType.TensorWise)

_E4M3, _E2M1, _E5M2 = ("e4m3", "e4m3"), ("e2m1", "e2m1"), ("e5m2", "e4m3")
PAIRS: dict[tuple[Recipe, Recipe], tuple[tuple[str, str], ...]] = {
    (TENSOR, TENSOR): (_E4M3, _E5M2, ("e4m3", "e5m2")),
    (ROW, ROW): (_E4M3, _E5M2),
    (BLOCK_1X128, BLOCK_1X128): (_E4M3,),
    (BLOCK_1X128, BLOCK_128X128): (_E4M3,),
    (BLOCK_128X128, BLOCK_1X128): (_E4M3,),
    (BLOCK_1X32, BLOCK_1X32): (_E4M3, _E2M1),
    (BLOCK_1X16, BLOCK_1X16): (_E2M1,),
    (TWO_LEVELS, TWO_LEVELS): (_E2M1,),
}
"""Recipes of a and b that torch multiplies -> elements of their codes.

torch 2.13: aten/src/ATen/native/ScaledBlasUtils.cpp and cuda/ScaledBlas.cpp.
"""

GROUPED = (ROW, BLOCK_1X32, TWO_LEVELS)
"""Recipes of ``scaled_grouped_mm``."""

RECIPES = {
    "fp8": TENSOR,
    "fp8_delayed": TENSOR,
    "fp8_rowwise": ROW,
    "mxfp8": BLOCK_1X32,
    "mxfp4": BLOCK_1X32,
    "nvfp4": TWO_LEVELS,
}
"""Format -> recipe; ``fp8_blockwise`` has two."""


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe in words, for example "BlockWise1x16 + TensorWise"."""
    return " + ".join(each.name for each in recipe)


def swizzle_of(recipe: Recipe) -> tuple[SwizzleType, ...]:
    """Return how CUDA kernels want the factors of a recipe."""
    tiled = recipe[0] in (ScalingType.BlockWise1x32, ScalingType.BlockWise1x16)
    first = SwizzleType.SWIZZLE_32_4_4 if tiled else SwizzleType.NO_SWIZZLE
    return (first, *(SwizzleType.NO_SWIZZLE for _ in recipe[1:]))


def pair_refusal(a: Recipe, b: Recipe) -> str | None:
    """Return why torch does not multiply two recipes, or None."""
    if (a, b) in PAIRS:
        return None
    known = ", ".join(" x ".join(map(recipe_text, pair)) for pair in PAIRS)
    return f"scaled_mm multiplies {known}; got {recipe_text(a)} x {recipe_text(b)}"


def elements_refusal(a: Recipe, b: Recipe, elements: tuple[str, str]) -> str | None:
    """Return why torch does not multiply codes of two elements in these recipes, or None."""
    if elements in PAIRS[a, b]:
        return None
    known = ", ".join(map(" x ".join, PAIRS[a, b]))
    pair = f"{recipe_text(a)} x {recipe_text(b)}"
    return f"scaled_mm with {pair} takes codes {known}; got {' x '.join(elements)}"


def sizes_refusal(element: str | None, n: int, k: int) -> str | None:
    """Return why no CUDA kernel of torch multiplies matrices of these sizes, or None."""
    packed = element == "e2m1"
    if n % MULTIPLE == 0 and k % (2 * MULTIPLE if packed else MULTIPLE) == 0:
        return None
    rule = f"N at multiples of {MULTIPLE} and K of {2 * MULTIPLE}"
    rule = rule if packed else f"N and K at multiples of {MULTIPLE}"
    return f"scaled_mm needs {rule}; got N={n}, K={k}"


class ScaledOperand(NamedTuple):
    """An operand as ``scaled_mm`` takes it.

    Attributes:
        mat: codes (rows, K) in a dtype of ``CODES``, contiguous.
        scale: the decode factors, in the shapes that the recipe asks for.
        recipe: what each entry of ``scale`` belongs to.
        swizzle: the order of the bytes of each entry of ``scale``.
    """

    mat: Tensor
    scale: list[Tensor]
    recipe: Recipe
    swizzle: tuple[SwizzleType, ...]

    def as_b(self) -> ScaledOperand:
        """Return the right operand: ``mat`` (K, rows), and factors of rows as (1, rows)."""
        scale = [self.scale[0].t()] if self.recipe == ROW else self.scale
        return self._replace(mat=self.mat.t(), scale=scale)


class ScaledReading:
    """Turns the buffers of an operand into arguments of ``scaled_mm``.

    Args:
        side: an operand that ``operand_refusal`` accepts.
    """

    def __init__(self, side: GemmSide) -> None:
        self.side = side
        self.recipe = recipe_of(side)
        self.reading: Reading = reading(side, _kernel_recipe(side))

    @property
    def slots(self) -> tuple[int, ...]:
        """Indices of the buffers in use, which must be those of a whole tensor."""
        return self.reading.slots

    @property
    def rows(self) -> int:
        """Lines of the matrix that are not contracted."""
        shape = self.side.shape
        return math.prod(shape[:-1]) if self.side.contracted == -1 else shape[-1]

    def __call__(self, buffers: list[Tensor]) -> ScaledOperand:
        """Return the arguments; all are views, except where bytes must move."""
        swizzle = swizzle_of(self.recipe)
        return ScaledOperand(self.codes(buffers), self.scale(buffers), self.recipe, swizzle)

    def codes(self, buffers: list[Tensor]) -> Tensor:
        """Return the codes (rows, K) in torch's dtype."""
        side, codes = self.side, self.reading.codes(buffers)
        if side.label == "mxfp8" and side.side == "_columnwise":
            # Stored as the rowwise codes are: the contraction runs along the first dim.
            codes = codes.reshape(-1, codes.shape[-1]).t().contiguous()
        return codes.view(CODES[str(side.element)]).reshape(self.rows, -1)

    def scale(self, buffers: list[Tensor]) -> list[Tensor]:
        """Return the factors, one tensor for each entry of the recipe."""
        read = self.reading
        wide = None if read.scale is None else read.scale(buffers)
        if wide is not None and read.factors is None:
            return [wide.reshape(1) if self.recipe == TENSOR else wide.reshape(self.rows, 1)]
        assert read.factors is not None  # noqa: S101 - every other recipe has factors of blocks
        factors = read.factors(buffers)
        if self.recipe == BLOCK_1X128:
            return [factors[:, : self.rows].contiguous().t()]
        if self.recipe == BLOCK_128X128:
            return [factors.t()]
        if wide is None:
            return [factors.view(torch.float8_e8m0fnu)]
        divisor = self.side.option("global_divisor")
        if divisor != 1:
            # A tensor as divisor: by a number, CUDA multiplies by the reciprocal.
            wide = wide / torch.full_like(wide, divisor)
        return [factors.view(torch.float8_e4m3fn), wide]


def _kernel_recipe(side: GemmSide) -> str:
    return "fp8" if side.label in (*SCALAR_FORMATS, "fp8_rowwise") else side.label


def recipe_of(side: GemmSide) -> Recipe:
    """Return the recipe of an operand that ``operand_refusal`` accepts."""
    if side.label == "fp8_blockwise":
        return BLOCK_128X128 if side.option("block_scaling_dim") == 2 else BLOCK_1X128
    return RECIPES[side.label]


def operand_refusal(side: GemmSide) -> str | None:
    """Return why torch has no recipe for an operand, or None."""
    if side.label != "fp8_blockwise" and side.label not in RECIPES:
        return f"scaled_mm has no recipe for {side.label}"
    if side.label == "fp8_rowwise" and not side.factors_follow:
        return "factors run along the contraction"
    if side.option("row_scaled"):
        return "scaled_mm has no recipe for blocks of 16 with factors of rows (row_scaled)"
    has_blocks = side.label != "fp8_rowwise" and not side.option("per_tensor")
    if has_blocks and (side.side == "_rowwise") != (side.contracted == -1):
        return "blocks must run along the contraction"
    return None
