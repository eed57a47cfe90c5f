"""Compute ``torch.nn.functional.scaled_mm`` and ``scaled_grouped_mm`` of quantized tensors.

A call whose ``mat_a`` or ``mat_b`` is quantized reads the codes of that tensor, and the factors
from the arguments of the call, as torch does with plain codes. On a CPU, our gemm computes every
recipe. On a CUDA device, torch's function multiplies plain codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import DtypeError, check, fail
from qtensor.kernels.products import scaled_recipes as recipes
from qtensor.kernels.products.scaled_recipes import Recipe
from qtensor.library.gemm import GEMM
from qtensor.library.grouped import SCALED_GROUPED_GEMM
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.scaled_operands import (
    Side,
    grouped_operand,
    named_recipe,
    refuse_if,
    scaled_operand,
    side_of,
)
from qtensor.storage.ops.table import Args, Kwargs, Op

_OP = "scaled_mm"


class _Call(NamedTuple):
    """The arguments of ``aten::_scaled_mm_v2`` and ``aten::_scaled_grouped_mm_v2``."""

    mat_a: Tensor
    mat_b: Tensor
    scale_a: list[Tensor]
    recipe_a: list[int]
    swizzle_a: list[int]
    scale_b: list[Tensor]
    recipe_b: list[int]
    swizzle_b: list[int]
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    contraction_dim: Sequence[int] = ()
    fast: bool = False
    offs: Tensor | None = None


_FIELDS = {"self": "mat_a", "mat2": "mat_b", "out_dtype": "dtype", "use_fast_accum": "fast"}
"""Argument of the ops -> field of ``_Call``, where the names differ."""


def _call_of(func: Op, args: Args, kwargs: Kwargs) -> _Call:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return _Call(**{_FIELDS.get(name, name): value for name, value in given.items()})


def _recipes(op: str, call: _Call) -> tuple[Recipe, Recipe]:
    """Return the recipes of both operands, a pair that torch multiplies."""
    wanted = named_recipe(op, "a", call.recipe_a), named_recipe(op, "b", call.recipe_b)
    refuse_if(op, recipes.pair_refusal(*wanted), "Fix the recipes")
    return wanted


def _sides(op: str, call: _Call, wanted: tuple[Recipe, Recipe]) -> tuple[Side, Side]:
    """Return both operands of a call, after checking that they fit."""
    a, b = side_of(op, "a", call.mat_a, wanted[0]), side_of(op, "b", call.mat_b, wanted[1])
    rule, got = "K must be equal in mat_a and mat_b", f"{a.k} and {b.k}"
    check(a.k == b.k, op, rule, got, "Fix the shapes")
    fix = "Pad the matrices, or use qtensor.gemm, which takes any size"
    refuse_if(op, recipes.sizes_refusal(a.element, b.rows, a.k), fix)
    fix = "Quantize to these elements"
    refuse_if(op, recipes.elements_refusal(*wanted, (a.element, b.element)), fix)
    rule = "both operands must be rotated alike (with_rht), or none"
    check(a.rotation == b.rotation, op, rule, "one rotated operand", "Quantize both alike")
    dims, last = tuple(call.contraction_dim), call.mat_a.ndim - 1
    fits = not dims or (dims[0] in (last, -1) and dims[1] in (call.mat_b.ndim - 2, -2))
    rule = "contraction_dim must be empty or (-1, -2)"
    check(fits and len(dims) in (0, 2), op, rule, dims, "Transpose an operand")
    fix = "Leave it out"
    packed = b.element == "e2m1"
    check(not (call.fast and packed), op, "use_fast_accum is for FP8 codes", b.element, fix)
    return a, b


def scaled_mm(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``F.scaled_mm`` of quantized tensors.

    What no CUDA kernel of torch computes is refused, so that a test on a CPU finds it.
    """
    call = _call_of(func, args, kwargs)
    for name, mat in (("a", call.mat_a), ("b", call.mat_b)):
        check(mat.ndim == 2, _OP, f"mat_{name} must be a matrix", tuple(mat.shape), "Reshape it")
    wanted = _recipes(_OP, call)
    a, b = _sides(_OP, call, wanted)
    _check_output(call, b)
    left = scaled_operand(a, call.scale_a, wanted[0], call.swizzle_a)
    right = scaled_operand(b, call.scale_b, wanted[1], call.swizzle_b)
    # On a GPU, the function that the caller named computes the product.
    backend = "auto" if left.buffers[0].device.type != "cuda" else "scaled_mm"
    return GEMM(*left, *right, "TN", call.dtype, call.bias, backend, call.fast)


def _check_output(call: _Call, b: Side) -> None:
    dtype, bias = call.dtype, call.bias
    legal = (*recipes.HALVES, torch.float32)
    rule = f"output_dtype must be {', '.join(map(str, legal))}"
    fix = "Pass one, and quantize the result if it must be FP8"
    check(dtype in legal, _OP, rule, dtype, fix, DtypeError)
    if bias is None:
        return
    got = f"{tuple(bias.shape)} {bias.dtype} for {dtype}"
    rule = "the bias must have N values in the 16-bit dtype of the result"
    fits = bias.numel() == b.rows and bias.dtype == dtype and dtype in recipes.HALVES
    check(fits and not is_quantized(bias), _OP, rule, got, "Convert it, or add it afterwards")


# ---- groups

_GROUPED = "scaled_grouped_mm"


def scaled_grouped_mm(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``F.scaled_grouped_mm`` of quantized tensors."""
    call = _call_of(func, args, kwargs)
    ranks = call.mat_a.ndim, call.mat_b.ndim
    rule = "mat_a and mat_b must be matrices or stacks of them"
    check(set(ranks) <= {2, 3}, _GROUPED, rule, ranks, "Reshape them")
    wanted = _recipes(_GROUPED, call)
    recipe, known = wanted[0], ", ".join(map(recipes.recipe_text, recipes.GROUPED))
    rule, got = f"groups have the recipes {known}", recipes.recipe_text(recipe)
    check(recipe in recipes.GROUPED, _GROUPED, rule, got, "Quantize to one of them")
    a, b = _sides(_GROUPED, call, wanted)
    rule, got = f"{got} takes e4m3 codes by groups", f"{a.element} x {b.element}"
    check("e5m2" not in (a.element, b.element), _GROUPED, rule, got, "Quantize to e4m3", DtypeError)
    rule = "a stack as mat_a takes RowWise"
    check(ranks[0] == 2 or recipe == recipes.ROW, _GROUPED, rule, got, "Quantize it by rows")
    rule = "there is no bias, and output_dtype must be torch.bfloat16"
    fits = call.bias is None and call.dtype == torch.bfloat16
    check(fits, _GROUPED, rule, call.dtype, "Convert the result, and add the bias to it")
    offs, groups = call.offs, _groups(call)
    copies = groups if ranks == (2, 2) else 1
    left = grouped_operand(a, (call.scale_a, call.swizzle_a), recipe, groups, copies)
    right = grouped_operand(b, (call.scale_b, call.swizzle_b), recipe, groups, copies)
    return SCALED_GROUPED_GEMM(*left, *right, offs, call.dtype)


def _groups(call: _Call) -> int:
    """Return the number of groups, after checking ``offs`` against it."""
    stacks = [mat.shape[0] for mat in (call.mat_a, call.mat_b) if mat.ndim == 3]
    offs = call.offs
    if len(stacks) == 2:
        rule = "two stacks have as many matrices each, and no offs"
        fits = offs is None and stacks[0] == stacks[1]
        check(fits, _GROUPED, rule, f"{stacks}, offs {offs is not None}", "Fix the arguments")
        return stacks[0]
    fits = offs is not None and offs.ndim == 1 and offs.dtype == torch.int32
    rule = f"offs must be int32 ({stacks[0] if stacks else 'groups'},)"
    got = None if offs is None else f"{offs.dtype} {tuple(offs.shape)}"
    if not fits or offs is None or (stacks and offs.shape[0] != stacks[0]):
        fail(_GROUPED, rule, got, "Pass the end of each group")
    return offs.shape[0]
