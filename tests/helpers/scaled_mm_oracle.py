"""``F.scaled_mm`` by torch's documentation: values of codes and factors in float64.

It shares no code with ``qtensor``. The shapes, dtypes and strides of a call are those that torch's
own function takes on a CUDA device: torch checks them with fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
SCALED_MM = F.scaled_mm


def codes(mat: Tensor) -> Tensor:
    """Return the float64 values of codes (rows, K) without factors."""
    if mat.dtype != torch.float4_e2m1fn_x2:
        return mat.double()
    packed = mat.view(torch.uint8).int()
    return E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2)]


def tile_offset(row: int, column: int, columns: int) -> int:
    """Return where SWIZZLE_32_4_4 stores a factor."""
    tile = row // 128 * -(-columns // 4) + column // 4
    inside = row % 128
    return tile * 512 + inside % 32 * 16 + inside // 32 * 4 + column % 4


def factors(
    shape: tuple[int, int], scale: Tensor, recipe: ScalingType, swizzle: SwizzleType
) -> Tensor:
    """Return the float64 factor of each value of (rows, K)."""
    rows, k = shape
    values = scale.double()
    if recipe in (ScalingType.TensorWise, ScalingType.RowWise):
        return values.reshape(-1, 1).expand(rows, k)
    if recipe == ScalingType.BlockWise1x128:
        return values.repeat_interleave(128, 1)[:, :k]
    if recipe == ScalingType.BlockWise128x128:
        grid = values.t()[:, : -(-k // 128)]
        return grid.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :k]
    block = 16 if recipe == ScalingType.BlockWise1x16 else 32
    columns = -(-k // block)
    if swizzle == SwizzleType.SWIZZLE_32_4_4:
        flat = values.reshape(-1)
        places = [[tile_offset(r, c, columns) for c in range(columns)] for r in range(rows)]
        values = flat[torch.tensor(places)]
    return values.repeat_interleave(block, 1)[:, :k]


def decoded(
    mat: Tensor, scale: Sequence[Tensor], recipe: Sequence[ScalingType], swizzle: Sequence[Any]
) -> Tensor:
    """Return the float64 values (rows, K) of an operand with K as its last dim."""
    values = codes(mat)
    for each, kind, order in zip(scale, recipe, swizzle, strict=True):
        values = values * factors(tuple(values.shape), each, kind, order)
    return values


def on_cuda(value: Any) -> Any:
    """Return a fake tensor on a CUDA device with the shape, strides and dtype of ``value``."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return [on_cuda(each) for each in value] if isinstance(value, list) else value


def check_on_cuda(*args: Any, **kwargs: Any) -> Tensor:
    """Let torch check the arguments of a call for a CUDA device; return the fake result."""
    with FakeTensorMode():
        return SCALED_MM(*map(on_cuda, args), **{name: on_cuda(v) for name, v in kwargs.items()})


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: list[Tensor],
    scale_recipe_a: list[ScalingType],
    scale_b: list[Tensor],
    scale_recipe_b: list[ScalingType],
    swizzle_a: list[SwizzleType],
    swizzle_b: list[SwizzleType],
    *,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Tensor:
    """Take the place of torch's function, which computes few recipes on a CPU."""
    call = (mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b)
    # Of MXFP4, torch 2.13 counts half of the factors when it traces.
    mxfp4 = mat_a.dtype == torch.float4_e2m1fn_x2 and len(scale_a) == 1
    if not mxfp4:
        options = {"bias": bias, "output_dtype": output_dtype, "use_fast_accum": use_fast_accum}
        check_on_cuda(*call, **options)
    left = decoded(mat_a, scale_a, scale_recipe_a, swizzle_a)
    rights = [
        each.t() if kind == ScalingType.RowWise else each
        for each, kind in zip(scale_b, scale_recipe_b, strict=True)
    ]
    right = decoded(mat_b.t(), rights, scale_recipe_b, swizzle_b)
    result = left @ right.t()
    return (result if bias is None else result + bias.double()).to(output_dtype)
