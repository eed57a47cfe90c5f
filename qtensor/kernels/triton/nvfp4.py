"""NVFP4: blocks of 16 with an E4M3 factor, and a float32 factor above (docs/numerics.md, NVFP4).

One read computes the maxima of the tensor (or of rows and columns), and a second read the codes and
factors of both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div, round_up
from qtensor.core.devices import check_not_captured
from qtensor.kernels.quantizers import NVFP4Like
from qtensor.kernels.triton.amax import amax_
from qtensor.kernels.triton.common import (
    SIDES,
    as_matrix,
    launch,
    tile_for,
    tiles,
    warps_for,
)
from qtensor.kernels.triton.nvfp4_kernels import (
    quantize_nvfp4_kernel,
    quantize_nvfp4_square_kernel,
    rotated_amax_kernel,
)


def is_rotated(quantizer: NVFP4Like, side: str) -> bool:
    """Return True if the data of direction ``side`` are rotated."""
    return quantizer.with_rht and side == quantizer.rht_side


def usages(quantizer: NVFP4Like) -> list[str]:
    """Return the directions that the quantizer writes."""
    return [side for side in ("rowwise", "columnwise") if getattr(quantizer, side)]


def amax_outputs_(quantizer: NVFP4Like, outputs: list[Tensor], x: Tensor) -> None:
    """Write what ``Quantizer.amax`` returns: a maximum for each usage, after the rotation."""
    by_side = dict(zip(usages(quantizer), outputs, strict=True))
    if quantizer.with_rht and quantizer.rht_side in by_side:
        rotated = by_side.pop(quantizer.rht_side)
        _rotated_amax_(quantizer, rotated, next(iter(by_side.values()), None), x)
    elif quantizer.row_scaled:
        for side, out in by_side.items():
            amax_(out, x, -1 if side == "rowwise" else 0, finite=True)
    else:
        amax_(outputs[0], x, finite=True)
        for out in outputs[1:]:
            out.copy_(outputs[0])


def _rotated_amax_(quantizer: NVFP4Like, rotated: Tensor, plain: Tensor | None, x: Tensor) -> None:
    matrix = as_matrix(x)
    lines = matrix if quantizer.rht_side == "rowwise" else matrix.t()
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
        SIGNS=quantizer.with_random_sign_mask,
        BM=tile[0],
        BK=tile[1],
    )


def _tensor_factors_(
    quantizer: NVFP4Like, out: dict[str, Tensor], x: Tensor, amax: list[Tensor] | None
) -> list[Tensor]:
    """Write the maxima, and the factors that are stored beside them; return the maxima."""
    maxima = [out[f"_amax_{side}"] for side in usages(quantizer)]
    if amax:
        for stored, maximum in zip(maxima, amax, strict=True):
            stored.copy_(maximum)
    else:
        amax_outputs_(quantizer, maxima, x)
    if quantizer.with_global_scale_inv:
        for side, maximum in zip(usages(quantizer), maxima, strict=True):
            # A tensor as divisor: torch multiplies by the reciprocal of a number.
            bound = torch.full_like(maximum, 6.0 * quantizer.e4m3_max)
            torch.div(maximum, bound, out=out[f"_{side}_global_scale_inv"])
    return maxima


def _on_device(seed: Tensor, device: torch.device) -> Tensor:
    """Return the seed on the device of its kernel.

    Raises:
        QTensorError: it would have to be copied while a CUDA graph is captured.
    """
    if seed.device != device:
        rule = f"in a CUDA graph the seed must be on {device}; every replay would use the same"
        fix = "Pass a seed on the device, and change its value before a replay"
        check_not_captured(device, "quantize[nvfp4]", rule, fix)
    return seed.to(device)


def quantize_(
    quantizer: NVFP4Like,
    out: dict[str, Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> None:
    """Write codes, factors and maxima of each usage."""
    maxima = _tensor_factors_(quantizer, out, x, amax)
    matrix = as_matrix(x)
    rows, cols = matrix.shape
    square, stochastic = (
        quantizer.two_dimensional,
        quantizer.stochastic_rounding and seed is not None,
    )
    least = 16 if quantizer.columnwise or square else 1, 16 if quantizer.rowwise or square else 1
    tile = tile_for(matrix.shape, least)
    rotated = {side: is_rotated(quantizer, side) for side in ("rowwise", "columnwise")}
    # A rotated direction stores whole groups of 16. A draw of 16 random bytes falls on one block if
    # lines have a multiple of 16 elements.
    row_length = round_up(cols, 16 if rotated["rowwise"] else 1)
    col_length = round_up(rows, 16 if rotated["columnwise"] else 1)
    directions = quantizer.rowwise + quantizer.columnwise
    buffers = [out.get(name) for name in SIDES]
    buffers += maxima[:1] if square else [out.get("_amax_rowwise"), out.get("_amax_columnwise")]
    one_dimensional = {
        "ROW_ROTATED": rotated["rowwise"],
        "COL_ROTATED": rotated["columnwise"],
        "SIGNS": quantizer.with_random_sign_mask,
        "ROW_SCALED": quantizer.row_scaled,
        "ROW_ALIGNED": row_length % 16 == 0,
        "COL_ALIGNED": col_length % 16 == 0,
    }
    launch(
        quantize_nvfp4_square_kernel if square else quantize_nvfp4_kernel,
        tiles(matrix.shape, tile),
        matrix,
        *buffers,
        _on_device(seed, x.device) if stochastic and seed is not None else None,
        rows,
        cols,
        *matrix.stride(),
        ceil_div(row_length, 2),
        ceil_div(col_length, 2),
        **({"ALIGNED": cols % 16 == 0} if square else one_dimensional),
        ROWWISE=quantizer.rowwise,
        COLUMNWISE=quantizer.columnwise,
        SWIZZLED=quantizer.swizzled,
        E4M3_MAX=float(quantizer.e4m3_max),
        FOUR_OVER_SIX=quantizer.use_4over6,
        SQUARED=quantizer.err_mode == "mse",
        STOCHASTIC=stochastic,
        BM=tile[0],
        BK=tile[1],
        # Neither rotated nor random codes, nor square blocks, gain from more warps.
        num_warps=warps_for(1 if square or stochastic or quantizer.with_rht else directions),
    )
