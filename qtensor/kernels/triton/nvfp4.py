"""NVFP4: blocks of 16 with an E4M3 factor below a float32 factor (docs/numerics.md, NVFP4).

Maxima of the tensor (or its rows and columns) come first, one read; then codes and factors of both sides from one more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.kernels.triton.amax import amax_
from qtensor.kernels.triton.common import SIDES, as_matrix, launch, tile_for, tiles
from qtensor.kernels.triton.nvfp4_kernels import (
    quantize_nvfp4_kernel,
    quantize_nvfp4_square_kernel,
    rotated_amax_kernel,
)
from qtensor.layout import ceil_div, round_up


def is_rotated(codec: Any, side: str) -> bool:
    """Whether the data of ``side`` are rotated."""
    return codec.with_rht and side == codec.rht_side


def usages(codec: Any) -> list[str]:
    """The directions that are asked for."""
    return [side for side in ("rowwise", "columnwise") if getattr(codec, side)]


def amax_outputs_(codec: Any, outputs: list[Tensor], x: Tensor) -> None:
    """Write what ``Quantizer.amax`` returns: a maximum for each usage, after the rotation."""
    by_side = dict(zip(usages(codec), outputs, strict=True))
    if codec.with_rht and codec.rht_side in by_side:
        rotated = by_side.pop(codec.rht_side)
        _rotated_amax_(codec, rotated, next(iter(by_side.values()), None), x)
    elif codec.row_scaled:
        for side, out in by_side.items():
            amax_(out, x, -1 if side == "rowwise" else 0, finite=True)
    else:
        amax_(outputs[0], x, finite=True)
        for out in outputs[1:]:
            out.copy_(outputs[0])


def _rotated_amax_(codec: Any, rotated: Tensor, plain: Tensor | None, x: Tensor) -> None:
    matrix = as_matrix(x)
    lines = matrix if codec.rht_side == "rowwise" else matrix.t()
    tile = tile_for(lines.shape, (1, 16))
    launch(
        rotated_amax_kernel,
        tiles(lines.shape, tile),
        lines,
        rotated.zero_().view(torch.int32),
        None if plain is None else plain.zero_().view(torch.int32),
        *lines.shape,
        *lines.stride(),
        PLAIN=plain is not None,
        SIGNS=codec.with_random_sign_mask,
        BM=tile[0],
        BK=tile[1],
    )


def quantize_(
    codec: Any,
    out: dict[str, Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> None:
    """Write codes, factors and maxima of each usage."""
    maxima = [out[f"_amax_{side}"] for side in usages(codec)]
    if amax:
        for stored, given in zip(maxima, amax, strict=True):
            stored.copy_(given)
    else:
        amax_outputs_(codec, maxima, x)
    matrix = as_matrix(x)
    rows, cols = matrix.shape
    square, stochastic = codec.two_dimensional, codec.stochastic_rounding and seed is not None
    least = 16 if codec.columnwise or square else 1, 16 if codec.rowwise or square else 1
    tile = tile_for(matrix.shape, least)
    rotated = {side: is_rotated(codec, side) for side in ("rowwise", "columnwise")}
    # A rotated side keeps whole groups of 16; the groups of 16 random bytes fall on blocks where lines have whole ones.
    row_length = round_up(cols, 16 if rotated["rowwise"] else 1)
    col_length = round_up(rows, 16 if rotated["columnwise"] else 1)
    buffers = [out.get(name) for name in SIDES]
    buffers += maxima[:1] if square else [out.get("_amax_rowwise"), out.get("_amax_columnwise")]
    one_dimensional = {
        "ROW_ROTATED": rotated["rowwise"],
        "COL_ROTATED": rotated["columnwise"],
        "SIGNS": codec.with_random_sign_mask,
        "ROW_SCALED": codec.row_scaled,
        "ROW_ALIGNED": row_length % 16 == 0,
        "COL_ALIGNED": col_length % 16 == 0,
    }
    launch(
        quantize_nvfp4_square_kernel if square else quantize_nvfp4_kernel,
        tiles(matrix.shape, tile),
        matrix,
        *buffers,
        seed.to(x.device) if stochastic and seed is not None else None,
        rows,
        cols,
        *matrix.stride(),
        ceil_div(row_length, 2),
        ceil_div(col_length, 2),
        **({"ALIGNED": cols % 16 == 0} if square else one_dimensional),
        ROWWISE=codec.rowwise,
        COLUMNWISE=codec.columnwise,
        SWIZZLED=codec.swizzled,
        E4M3_MAX=float(codec.e4m3_max),
        FOUR_OVER_SIX=codec.use_4over6,
        SQUARED=codec.err_mode == "mse",
        STOCHASTIC=stochastic,
        BM=tile[0],
        BK=tile[1],
    )
