"""Operands of ``scaled_mm``: codes of a quantized or plain tensor, and the factors of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from qtensor.core.buffer_shapes import ceil_div, round_up
from qtensor.core.encoding import encode_call
from qtensor.core.errors import DtypeError, UnsupportedError, check, fail
from qtensor.core.operand import Operand
from qtensor.kernels.products import scaled_recipes as recipes
from qtensor.kernels.products.problem import GemmSide
from qtensor.kernels.products.scaled_recipes import CODES, Recipe, ScaledReading, recipe_text
from qtensor.storage.base import QuantizedTensorStorage, is_quantized
from qtensor.storage.ops.lazy_view import stack_of

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor

_OP = "scaled_mm"
_ELEMENTS = {dtype: element for element, dtype in CODES.items()}
_SWIZZLED, _PLAIN = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE

# ---- codes


def scaled_side(op: str, t: QuantizedTensorStorage) -> ScaledReading:
    """Return how torch reads a quantized matrix, or a stack of them, that is contracted along K.

    Args:
        op: the calling function, for errors.
        t: (..., rows, K).

    Raises:
        UnsupportedError: torch has no recipe for the tensor.
    """
    side = GemmSide(t._quantizer.canonical, tuple(t.shape), torch.uint8, False, -1)
    reason = recipes.operand_refusal(side)
    if reason is not None:
        name = f"{op}[{t._quantizer.format}]"
        fix = "Use qtensor.gemm, or quantize it rowwise in a format of docs/gemm.md"
        fail(name, reason, t._quantizer.canonical, fix, UnsupportedError)
    return ScaledReading(side)


class Side(NamedTuple):
    """One operand of a call.

    Attributes:
        name: "a" or "b".
        codes: (..., rows, K) plain, in a dtype of torch; of 4-bit codes (..., rows, K / 2).
        element: of the codes.
        rotation: how a quantized tensor was rotated (NVFP4), or None.
    """

    name: str
    codes: Tensor
    element: str
    rotation: bool | None

    @property
    def rows(self) -> int:
        """Lines of a matrix that are not contracted."""
        return self.codes.shape[-2]

    @property
    def k(self) -> int:
        """Length of the contraction, in codes."""
        return self.codes.shape[-1] * (2 if self.element == "e2m1" else 1)


_OWN = {
    recipes.TENSOR: (recipes.TENSOR, recipes.ROW),
    recipes.TWO_LEVELS: (recipes.TWO_LEVELS, recipes.BLOCK_1X16),
}
"""Recipe of a tensor -> recipes that a call may name for its codes; by default its own alone.

The factor of a tensor can be repeated for each row. That of NVFP4 can be left out, for callers that
multiply the result by it.
"""


def side_of(op: str, name: str, mat: Tensor, recipe: Recipe) -> Side:
    """Return an operand, ``mat_a`` (..., M, K) or ``mat_b`` (..., K, N), after checking it.

    Raises:
        QTensorError: its codes do not lie along K, or the recipe is not one of its format.
    """
    if not is_quantized(mat):
        return Side(name, *_plain_codes(op, name, mat), None)
    if name == "b":
        stack = mat.t() if mat.ndim == 2 else stack_of(mat)
        rule = "mat_b must be the transpose of matrices (..., N, K)"
        check(stack is not None, op, rule, tuple(mat.shape), "Pass stack.mT")
        mat = cast("QuantizedTensor", stack)
    read = scaled_side(op, mat)
    known = _OWN.get(read.recipe, (read.recipe,))
    rule = f"mat_{name} is {mat._quantizer.format}, whose recipe is {recipe_text(read.recipe)}"
    check(recipe in known, op, rule, recipe_text(recipe), "Pass that recipe")
    rotation = bool(read.side.option("with_random_sign_mask")) if read.side.rotated else None
    codes = read.codes(mat.buffers())
    return Side(name, codes.view(*mat.shape[:-1], -1), str(read.side.element), rotation)


def _plain_codes(op: str, name: str, mat: Tensor) -> tuple[Tensor, str]:
    """Return plain codes with K as the last dim, and their element."""
    rule = f"mat_{name} must be quantized, or hold codes in {', '.join(map(str, _ELEMENTS))}"
    check(mat.dtype in _ELEMENTS, op, rule, mat.dtype, "Quantize it", DtypeError)
    codes = mat.mT if name == "b" else mat
    order = "column-major, the .mT of row-major codes" if name == "b" else "row-major"
    rule, fix = f"mat_{name} must be {order}", "Copy it into that order"
    check(codes.is_contiguous(), op, rule, f"strides {mat.stride()}", fix)
    return codes, _ELEMENTS[mat.dtype]


def named_recipe(op: str, name: str, numbers: Sequence[int]) -> Recipe:
    """Return the recipe that an op gets as integers.

    Raises:
        QTensorError: an integer is not a member of ``ScalingType``.
    """
    known = {kind.value: kind for kind in ScalingType.__members__.values()}
    rule = f"scale_recipe_{name} must hold members of ScalingType"
    check(all(n in known for n in numbers), op, rule, list(numbers), "Pass ScalingType.TensorWise")
    return tuple(known[n] for n in numbers)


def refuse_if(op: str, reason: str | None, fix: str) -> None:
    """Raise an error with ``reason`` if there is one.

    Raises:
        QTensorError: there is one.
    """
    if reason is not None:
        rule, _, got = reason.partition("; got ")
        fail(op, rule, got, fix)


# ---- codes and factors


def scaled_operand(
    side: Side, scale: Sequence[Tensor], recipe: Recipe, swizzle: Sequence[int]
) -> Operand:
    """Return the operand (rows, K) of the gemm op that has these codes and factors.

    Args:
        side: the codes.
        scale: the factors, in the shapes that torch documents for the recipe.
        recipe: what the factors belong to.
        swizzle: ``SwizzleType`` of each factor, as integers; none for plain ones.

    Raises:
        QTensorError: a factor has another dtype, shape or order.
    """
    name = f"scale_{side.name}"
    _check_number(_OP, name, scale, recipe)
    swizzled = _is_swizzled(_OP, side.name, recipe, swizzle)
    codes, shape = side.codes.view(torch.uint8), (side.rows, side.k)
    text = operand_text(recipe, side.element, swizzled)
    if recipe == recipes.TENSOR:
        _check_factor(name, scale[0], torch.float32, None, 1)
        return Operand([codes, scale[0].reshape(1)], text, shape)
    if recipe == recipes.ROW:
        size = (side.rows, 1) if side.name == "a" else (1, side.rows)
        _check_factor(name, scale[0], torch.float32, size, side.rows)
        return Operand([codes, scale[0].reshape(side.rows, 1)], text, shape)
    if recipe in (recipes.BLOCK_1X128, recipes.BLOCK_128X128):
        return Operand([codes, _factors_of_128(side, scale[0], recipe)], text, shape)
    block = 32 if recipe == recipes.BLOCK_1X32 else 16
    factors = _tiles(side, scale[0], block, swizzled)
    if block == 32:
        return Operand([codes, factors], text, shape)
    wide = torch.ones(1, dtype=torch.float32, device=codes.device)
    if len(recipe) == 2:
        _check_factor(f"{name}[1]", scale[1], torch.float32, None, 1)
        wide = scale[1].reshape(1)
    # A product reads the factor, not the amax.
    return Operand([codes, factors, wide, wide], text, shape)


def operand_text(recipe: Recipe, element: str, swizzled: bool) -> str:
    """Return the quantizer of codes and factors in the recipe, as ops take it.

    Factors of 128 values may be any numbers; NVFP4 has the factor of the tensor, not its amax.
    """
    options = {}
    if element == "e5m2":
        options["dtype"] = element
    if recipe in (recipes.BLOCK_1X128, recipes.BLOCK_128X128):
        name = "fp8_blockwise"
        if recipe == recipes.BLOCK_128X128:
            options["block_scaling_dim"] = "2"
        options["force_pow_2_scales"] = "False"
    elif recipe == recipes.BLOCK_1X32:
        name = "mxfp4" if element == "e2m1" else "mxfp8"
    else:
        names = {recipes.TENSOR: "fp8", recipes.ROW: "fp8_rowwise"}
        name = names.get(recipe, "nvfp4")
    if swizzled:
        options["swizzled"] = "True"
    if name == "nvfp4":
        options["with_global_scale_inv"] = "True"
    return encode_call(name, options)


def _check_number(op: str, name: str, scale: Sequence[Tensor], recipe: Recipe) -> None:
    rule = f"{name} must hold {len(recipe)} plain tensors for {recipe_text(recipe)}"
    fits = len(scale) == len(recipe) and not any(is_quantized(each) for each in scale)
    check(fits, op, rule, [type(each).__name__ for each in scale], "Pass the decode factors")


def _is_swizzled(op: str, name: str, recipe: Recipe, swizzle: Sequence[int]) -> bool:
    """Return whether the factors of blocks are in tiles of 128x4."""
    tiled = recipe[0] in (ScalingType.BlockWise1x32, ScalingType.BlockWise1x16)
    numbers = list(swizzle) or [_PLAIN.value] * len(recipe)
    legal = [_SWIZZLED.value, _PLAIN.value] if tiled else [_PLAIN.value]
    rest = all(number == _PLAIN.value for number in numbers[1:])
    fits = len(numbers) == len(recipe) and numbers[0] in legal and rest
    names = [kind.name for kind in SwizzleType.__members__.values() if kind.value in legal]
    rule = f"swizzle_{name} must hold {' or '.join(names)}"
    rule += " and NO_SWIZZLE" if len(recipe) == 2 else ""
    check(fits, op, f"{rule} for {recipe_text(recipe)}", list(swizzle), "Pass it")
    return numbers[0] == _SWIZZLED.value


def _check_factor(
    name: str, factor: Tensor, dtype: torch.dtype, size: tuple[int, ...] | None, count: int
) -> None:
    """Refuse a factor of another dtype, number of entries, or shape (None: any shape)."""
    rule = f"{name} must be {dtype} with {size or count} entries"
    got = f"{factor.dtype} {tuple(factor.shape)}"
    fits = factor.dtype == dtype and factor.numel() == count
    fits = fits and (size is None or tuple(factor.shape) == size)
    fix = "Use scaled_mm_args() of the quantized tensor"
    check(fits, _OP, rule, got, fix)


def _factors_of_128(side: Side, factor: Tensor, recipe: Recipe) -> Tensor:
    """Return the buffer of float32 factors of 1x128 or 128x128 blocks."""
    blocks, square = ceil_div(side.k, 128), recipe == recipes.BLOCK_128X128
    size = (round_up(blocks, 4), ceil_div(side.rows, 128)) if square else (side.rows, blocks)
    name = f"scale_{side.name}"
    _check_factor(name, factor, torch.float32, size, size[0] * size[1])
    stored = factor.t()
    rule = f"{name} must be column-major, with strides (1, {size[0]})"
    check(stored.is_contiguous(), _OP, rule, factor.stride(), "Use scaled_mm_args()")
    return stored if square else F.pad(stored, (0, -side.rows % 4))


def _tiles(side: Side, factor: Tensor, block: int, swizzled: bool) -> Tensor:
    """Return the buffer of E8M0 or E4M3 factors, uint8 (up128(rows), up4(K / block))."""
    dtype = torch.float8_e8m0fnu if block == 32 else torch.float8_e4m3fn
    blocks, name = ceil_div(side.k, block), f"scale_{side.name}"
    padded = round_up(side.rows, 128), round_up(blocks, 4)
    if swizzled:
        _check_factor(name, factor, dtype, None, padded[0] * padded[1])
        fix = "Call .contiguous()"
        check(factor.is_contiguous(), _OP, f"{name} must be contiguous", factor.stride(), fix)
        return factor.view(torch.uint8).reshape(padded)
    _check_factor(name, factor, dtype, (side.rows, blocks), side.rows * blocks)
    rows, columns = padded[0] - side.rows, padded[1] - blocks
    return F.pad(factor.contiguous().view(torch.uint8), (0, columns, 0, rows))


def grouped_operand(
    side: Side,
    factors: tuple[Sequence[Tensor], Sequence[int]],
    recipe: Recipe,
    groups: int,
    copies: int,
) -> Operand:
    """Return an operand of the op ``scaled_grouped_gemm``.

    Args:
        side: the codes of all groups.
        factors: the factors in the shapes that torch documents, and their ``SwizzleType``.
        recipe: what the factors belong to.
        groups: the number of groups.
        copies: how often a matrix has the factors of its rows: once a group along K.

    Raises:
        QTensorError: a factor has another dtype, shape or order.
    """
    op, name, (scale, swizzle) = "scaled_grouped_mm", f"scale_{side.name}", factors
    _check_number(op, name, scale, recipe)
    swizzled = _is_swizzled(op, side.name, recipe, swizzle)
    codes, stacked = side.codes, side.codes.ndim == 3
    got, fix = f"{scale[0].dtype} {tuple(scale[0].shape)}", "Use scaled_grouped_mm_args()"
    if recipe == recipes.ROW:
        size = (groups, side.rows) if stacked else (side.rows * copies,)
        fits = scale[0].dtype == torch.float32 and tuple(scale[0].shape) == size
        check(fits, op, f"{name} must be torch.float32 of shape {size}", got, fix)
    else:
        check(swizzled, op, f"{name} must be in SWIZZLE_32_4_4", list(swizzle), fix)
        _check_group_tiles(op, side, scale[0], groups, 32 if recipe == recipes.BLOCK_1X32 else 16)
    buffers = [codes.view(torch.uint8), _bytes(scale[0])]
    if len(recipe) == 2:
        wide = scale[1]
        fits = wide.dtype == torch.float32 and wide.numel() == groups
        got = f"{wide.dtype} {tuple(wide.shape)}"
        check(fits, op, f"{name}[1] must be torch.float32 with one entry a group", got, fix)
        buffers += [wide.reshape(-1)] * 2
    text = operand_text(recipe, side.element, swizzled)
    return Operand(buffers, text, (*codes.shape[:-1], side.k))


def _check_group_tiles(op: str, side: Side, factor: Tensor, groups: int, block: int) -> None:
    """Refuse factors of blocks that are not those of all groups."""
    dtype = torch.float8_e8m0fnu if block == 32 else torch.float8_e4m3fn
    each = round_up(side.rows, 128) * round_up(ceil_div(side.k, block), 4)
    shape = tuple(factor.shape)
    if side.codes.ndim == 3:
        fits, wanted = shape == (groups, each), f"({groups}, {each})"
    else:
        # How many there are depends on the sizes of the groups.
        fits, wanted = len(shape) == 2 and shape[0] >= side.rows, f"(at least {side.rows}, ...)"
    rule = f"scale_{side.name} must be contiguous {dtype} of shape {wanted}"
    fits = fits and factor.dtype == dtype and factor.is_contiguous()
    check(fits, op, rule, f"{factor.dtype} {shape}", "Use scaled_grouped_mm_args()")


def _bytes(factor: Tensor) -> Tensor:
    """Return factors as buffers hold them: FP8 numbers as bytes."""
    return factor if factor.dtype == torch.float32 else factor.view(torch.uint8)
