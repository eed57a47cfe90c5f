"""FP8 with one scale factor per tensor, row, column or block (docs/numerics.md, FP8).

Per-tensor, per-row and per-column scaling take two kernels: the first writes maxima with atomics,
so any number of programs takes part; the second derives factors from them and writes codes in both
directions. Rows that fit into one program, and blocks of 128, need only one read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.errors import fail
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.kernels.quantizers import Float8Like
from qtensor.kernels.triton.amax import amax_
from qtensor.kernels.triton.common import (
    SIDES,
    as_matrix,
    block_max,
    launch,
    load_tile,
    raise_to,
    round_up,
    spread,
    store_tile,
    tile_for,
    tile_indices,
    tiles,
)
from qtensor.kernels.triton.elements import (
    element_constants,
    encode,
    fp8_scale,
    magnitude_bits,
    reciprocal,
)

BLOCK = 128
LONGEST_ROW = 16384
"""The longest row that one program can hold."""
FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def cast_kernel(
    x_ptr, factor_ptr, data_ptr, transpose_ptr, scale_inv_ptr, rows, cols, stride_m, stride_k,
    epsilon, new_amax_ptr, AXIS: tl.constexpr, SCALE_GIVEN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the codes of one tile in both directions, and decode factors.

    The first tile of a row (``AXIS`` -1), of a column (0) or of the tensor (None) writes its decode
    factors. ``factor_ptr`` holds encode scales if ``SCALE_GIVEN``, otherwise maxima. If
    ``new_amax_ptr`` is not None, the maximum that it holds (int32, the bits of float32) is raised
    to that of the tensor.
    """
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    if AXIS == -1:
        index, size, first = m, rows, k0 == 0
    elif AXIS == 0:
        index, size, first = k, cols, m0 == 0
    else:
        index, size, first = tl.arange(0, 1), 1, tl.program_id(0) == 0
    scale = tl.load(factor_ptr + index, mask=index < size, other=1.0)
    if not SCALE_GIVEN:
        scale = fp8_scale(magnitude_bits(scale), epsilon, FLOAT32_MAX, POWER_OF_TWO, LARGEST)
    written = tl.where(first, size, 0)
    tl.store(scale_inv_ptr + index, reciprocal(scale), mask=index < written)
    scale = scale[None, :] if AXIS == 0 else scale[:, None]
    x = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
    if new_amax_ptr is not None:
        raise_to(new_amax_ptr, magnitude_bits(x))
    codes = encode(x * scale, True, EXPONENT, MANTISSA, LARGEST)
    if ROWWISE:
        store_tile(data_ptr, codes, m, k, rows, cols, cols, 1)
    if COLUMNWISE:
        store_tile(transpose_ptr, tl.trans(codes), k, m, cols, rows, rows, 1)


@triton.jit
def quantize_rows_kernel(
    x_ptr, data_ptr, scale_inv_ptr, rows, cols, stride_m, stride_k, epsilon,
    POWER_OF_TWO: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write codes and decode factors of BM whole rows of at most BK elements."""
    m, k = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, BK).to(tl.int64)
    x = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
    amax = tl.max(magnitude_bits(x), 1)
    scale = fp8_scale(amax, epsilon, FLOAT32_MAX, POWER_OF_TWO, LARGEST)
    tl.store(scale_inv_ptr + m, reciprocal(scale), mask=m < rows)
    codes = encode(x * scale[:, None], True, EXPONENT, MANTISSA, LARGEST)
    store_tile(data_ptr, codes, m, k, rows, cols, cols, 1)


@triton.jit
def quantize_blocks_kernel(
    x_ptr, row_ptr, row_factor_ptr, col_ptr, col_factor_ptr, rows, cols, stride_m, stride_k,
    epsilon, overflow,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, SQUARE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of blocks of 128 in both directions.

    BK is 128; BM is 128 too if blocks run along M.
    """
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    block_m, block_k = m0 // 128 + tl.arange(0, 1), k0 // 128 + tl.arange(0, 1)
    blocks_m, blocks_k = tl.cdiv(rows, 128), tl.cdiv(cols, 128)
    x = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
    bits = magnitude_bits(x)
    if ROWWISE or SQUARE:
        DM: tl.constexpr = 128 if SQUARE else 1
        scale = fp8_scale(block_max(bits, DM, 128), epsilon, overflow, POWER_OF_TWO, LARGEST)
        codes = encode(x * spread(scale, DM, 128), True, EXPONENT, MANTISSA, LARGEST)
        if ROWWISE:
            store_tile(row_ptr, codes, m, k, rows, cols, cols, 1)
        scale_inv = reciprocal(scale)
        if SQUARE:
            if ROWWISE:
                pitch = round_up(blocks_k, 4)
                store_tile(
                    row_factor_ptr, scale_inv, block_m, block_k, blocks_m, blocks_k, pitch, 1
                )
            if COLUMNWISE:
                pitch = round_up(blocks_m, 4)
                store_tile(
                    col_factor_ptr, scale_inv, block_m, block_k, blocks_m, blocks_k, 1, pitch
                )
                store_tile(col_ptr, tl.trans(codes), k, m, cols, rows, rows, 1)
        else:
            # The factors of 1-D blocks are stored as (blocks along K, M).
            store_tile(row_factor_ptr, scale_inv, m, block_k, rows, blocks_k, 1, round_up(rows, 4))
    if COLUMNWISE and not SQUARE:
        scale = fp8_scale(block_max(bits, 128, 1), epsilon, overflow, POWER_OF_TWO, LARGEST)
        codes = encode(x * spread(scale, 128, 1), True, EXPONENT, MANTISSA, LARGEST)
        store_tile(col_ptr, tl.trans(codes), k, m, cols, rows, rows, 1)
        pitch = round_up(cols, 4)
        store_tile(col_factor_ptr, reciprocal(scale), block_m, k, blocks_m, cols, pitch, 1)


def amax_outputs_(quantizer: QuantizerLike, outputs: list[Tensor], x: Tensor) -> None:
    """Write what ``Quantizer.amax`` returns."""
    for out in outputs:
        amax_(out, x, getattr(quantizer, "axis", None))


def quantize_(
    quantizer: Float8Like,
    out: dict[str, Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> None:
    """Write codes and decode factors of each usage.

    Raises:
        QTensorError: delayed scaling has no scale, or one that is not a single float32.
    """
    if quantizer.format == "fp8_blockwise":
        _quantize_blocks_(quantizer, out, x)
        return
    if quantizer.needs_scale and (
        scale is None or scale.numel() != 1 or scale.dtype != torch.float32
    ):
        fail(
            f"quantize[{quantizer.format}]",
            "scale must be one float32",
            "none" if scale is None else f"{tuple(scale.shape)} {scale.dtype}",
            "Pass the stored scale of shape (1,)",
        )
    axis = getattr(quantizer, "axis", None)
    factors = scale if scale is not None else amax[0] if amax else None
    if (
        factors is None
        and axis == -1
        and not quantizer.columnwise
        and 0 < x.shape[-1] <= LONGEST_ROW
    ):
        _quantize_rows_(quantizer, out, x)
        return
    if factors is None:
        factors = torch.empty_like(out["_scale_inv"])
        amax_(factors, x, axis)
    _cast_(quantizer, out, x, factors, scale_given=scale is not None)


def quantize_with_amax_(
    quantizer: QuantizerLike, out: dict[str, Tensor], x: Tensor, scale: Tensor, amax: Tensor
) -> None:
    """Quantize with ``scale`` and write the maximum of |x| into ``amax`` (1,), in one read."""
    _cast_(quantizer, out, x, scale, scale_given=True, new_amax=amax.zero_().view(torch.int32))


def _cast_(
    quantizer: QuantizerLike,
    out: dict[str, Tensor],
    x: Tensor,
    factors: Tensor,
    *,
    scale_given: bool,
    new_amax: Tensor | None = None,
) -> None:
    matrix = as_matrix(x)
    tile = tile_for(matrix.shape)
    launch(
        cast_kernel,
        # A tensor without elements may still have factors.
        tiles([max(n, 1) for n in matrix.shape], tile),
        matrix,
        factors.contiguous(),
        out.get("_data"),
        out.get("_transpose"),
        out["_scale_inv"],
        *matrix.shape,
        *matrix.stride(),
        getattr(quantizer, "amax_epsilon", 0.0),
        new_amax,
        AXIS=getattr(quantizer, "axis", None),
        SCALE_GIVEN=scale_given,
        POWER_OF_TWO=getattr(quantizer, "force_pow_2_scales", False),
        ROWWISE=quantizer.rowwise,
        COLUMNWISE=quantizer.columnwise,
        **element_constants(quantizer.element),
        BM=tile[0],
        BK=tile[1],
    )


def _quantize_rows_(quantizer: Float8Like, out: dict[str, Tensor], x: Tensor) -> None:
    matrix = as_matrix(x)
    width = triton.next_power_of_2(matrix.shape[1])
    height = max(1, 4096 // width)
    launch(
        quantize_rows_kernel,
        ceil_div(matrix.shape[0], height),
        matrix,
        out["_data"],
        out["_scale_inv"],
        *matrix.shape,
        *matrix.stride(),
        quantizer.amax_epsilon,
        POWER_OF_TWO=quantizer.force_pow_2_scales,
        **element_constants(quantizer.element),
        BM=height,
        BK=width,
        num_warps=8 if width > 4096 else 4,
    )


def _warps(quantizer: Float8Like) -> int:
    """Return the warps of a program: see ``common.warps_for``; tiles along M have 128 rows."""
    if quantizer.two_dimensional or not quantizer.columnwise:
        return 8 if quantizer.two_dimensional else 4
    return 16 if quantizer.rowwise else 8


def _quantize_blocks_(quantizer: Float8Like, out: dict[str, Tensor], x: Tensor) -> None:
    matrix = as_matrix(x)
    along_m = quantizer.columnwise or quantizer.two_dimensional
    tile = (BLOCK, BLOCK) if along_m else (32, BLOCK)
    launch(
        quantize_blocks_kernel,
        tiles(matrix.shape, tile),
        matrix,
        *(out.get(name) for name in SIDES),
        *matrix.shape,
        *matrix.stride(),
        quantizer.amax_epsilon,
        torch.finfo(x.dtype).max,
        ROWWISE=quantizer.rowwise,
        COLUMNWISE=quantizer.columnwise,
        SQUARE=quantizer.two_dimensional,
        POWER_OF_TWO=quantizer.force_pow_2_scales,
        **element_constants(quantizer.element),
        BM=tile[0],
        BK=tile[1],
        num_warps=_warps(quantizer),
    )
