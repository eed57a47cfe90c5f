"""Decode codes and factors to float32, bfloat16 or float16, for all formats and directions.

A direction is read as a matrix of lines, along which packing and blocks run: the rows of the tensor
(rowwise) or its columns (columnwise). A unit is an element of a line.
"""

from __future__ import annotations

from typing import Any, cast

import triton
import triton.language as tl
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div, round_up
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.kernels.quantizers import MXLike, NVFP4Like
from qtensor.kernels.triton.common import (
    as_matrix,
    factor_offsets,
    launch,
    offsets_2d,
    round_bfloat16,
    spread,
    store_tile,
    tile_for,
    tile_indices,
    tiles,
)
from qtensor.kernels.triton.elements import decode, e8m0_factor
from qtensor.kernels.triton.mx import pack_of
from qtensor.kernels.triton.nvfp4 import is_rotated
from qtensor.kernels.triton.rotation import product_16


@triton.jit
def _load_codes(ptr, line, unit, lines, length, stride_line, stride_unit, PACK: tl.constexpr):
    """Return int32 codes (len(line), len(unit)).

    Codes of ``PACK`` 4 cross bytes, so each needs two loads.
    """
    inside = (line < lines)[:, None] & (unit < length)[None, :]
    if PACK == 1:
        offsets = offsets_2d(line, unit, stride_line, stride_unit)
        return tl.load(ptr + offsets, mask=inside, other=0).to(tl.int32)
    else:
        bit = unit % 4 * 6
        start = unit // 4 * 3
        offsets = offsets_2d(line, start + bit // 8, stride_line, stride_unit)
        low = tl.load(ptr + offsets, mask=inside, other=0).to(tl.int32)
        offsets = offsets_2d(line, start + tl.minimum(bit // 8 + 1, 2), stride_line, stride_unit)
        high = tl.load(ptr + offsets, mask=inside, other=0).to(tl.int32)
        return ((low | (high << 8)) >> (bit % 8).to(tl.int32)[None, :]) & 0x3F


@triton.jit
def _load_pairs(ptr, line, unit0, lines, pairs, stride_line, stride_unit, N: tl.constexpr):
    """Return int32 codes (len(line), N), packed two a byte with ``pairs`` bytes a line.

    Each byte is loaded once.
    """
    byte_index = unit0 // 2 + tl.arange(0, N // 2)
    inside = (line < lines)[:, None] & (byte_index < pairs)[None, :]
    offsets = offsets_2d(line, byte_index, stride_line, stride_unit)
    byte = tl.load(ptr + offsets, mask=inside, other=0).to(tl.int32)
    return tl.reshape(tl.join(byte & 0xF, byte >> 4), (line.shape[0], N))


@triton.jit
def _load_factors(
    ptr, line, unit0, lines, length, stride_line, stride_unit, N: tl.constexpr,
    DL: tl.constexpr, DU: tl.constexpr, SCALE: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """Return decode factors (len(line) or 1, N / DU or 1), float32.

    ``DL`` 0 means one factor for all lines, ``DU`` 0 one for all units.
    """
    if DL == 0:
        r, r_inside = tl.arange(0, 1), tl.full((1,), 1, tl.int1)
    else:
        r, r_inside = line // DL, line < lines
    if DU == 0:
        c, c_inside = tl.arange(0, 1), tl.full((1,), 1, tl.int1)
    else:
        c = unit0 // DU + tl.arange(0, N // DU)
        c_inside = c < tl.cdiv(length, DU)
    if SWIZZLED:
        offsets = factor_offsets(r, c, stride_line, True)
    else:
        offsets = offsets_2d(r, c, stride_line, stride_unit)
    stored = tl.load(ptr + offsets, mask=r_inside[:, None] & c_inside[None, :], other=0)
    if SCALE == "e8m0":
        return e8m0_factor(stored.to(tl.int32))
    elif SCALE == "e4m3":
        return decode(stored, 4, 3)
    else:
        return stored


@triton.jit
def _load_global(global_ptr, line, lines, DIVISOR: tl.constexpr, ROW_SCALED: tl.constexpr):
    """Return the second level of NVFP4: (len(line), 1) or (1, 1).

    It is ``A / (6 * e4m3_max)``, or the stored factor, with a divisor of 1.
    """
    if ROW_SCALED:
        stored = tl.load(global_ptr + line, mask=line < lines, other=0.0)
    else:
        stored = tl.load(global_ptr + tl.arange(0, 1))
    if DIVISOR != 1.0:
        stored = tl.div_rn(stored, tl.zeros_like(stored) + DIVISOR)
    return stored[:, None]


@triton.jit
def _store_values(out_ptr, values, line, unit, lines, length, stride_line, stride_unit):
    """Write float32 values, rounded once to the output's type; int16 holds the bits of bfloat16."""
    if out_ptr.dtype.element_ty == tl.int16:
        values = round_bfloat16(values)
    store_tile(out_ptr, values, line, unit, lines, length, stride_line, stride_unit)


@triton.jit
def dequantize_kernel(
    data_ptr, factor_ptr, global_ptr, out_ptr, lines, length, pairs, data_line, data_unit,
    factor_line, factor_unit, out_line, out_unit, DL: tl.constexpr, DU: tl.constexpr,
    SCALE: tl.constexpr, SWIZZLED: tl.constexpr, PACK: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ROW_SCALED: tl.constexpr, DIVISOR: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Decode one tile of BM lines and BK units: element value * factor (* second level)."""
    line0, unit0 = tile_indices(lines, length, BM, BK)
    line, unit = line0 + tl.arange(0, BM), unit0 + tl.arange(0, BK)
    if PACK == 2:
        codes = _load_pairs(data_ptr, line, unit0, lines, pairs, data_line, data_unit, BK)
    else:
        codes = _load_codes(data_ptr, line, unit, lines, length, data_line, data_unit, PACK)
    factors = _load_factors(
        factor_ptr, line, unit0, lines, length, factor_line, factor_unit, BK, DL, DU, SCALE,
        SWIZZLED,
    )  # fmt: skip
    values = decode(codes, EXPONENT, MANTISSA) * spread(factors, 1, DU)
    if TWO_LEVEL:
        values = values * _load_global(global_ptr, line, lines, DIVISOR, ROW_SCALED)
    _store_values(out_ptr, values, line, unit, lines, length, out_line, out_unit)


@triton.jit
def dequantize_rotated_kernel(
    data_ptr, factor_ptr, global_ptr, out_ptr, lines, length, data_line, factor_line,
    out_line, out_unit, SWIZZLED: tl.constexpr, SIGNS: tl.constexpr, DIVISOR: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Decode one tile of rotated NVFP4 lines and rotate it back; sums over a group run in order."""
    line0, unit0 = tile_indices(lines, length, BM, BK)
    line, unit = line0 + tl.arange(0, BM), unit0 + tl.arange(0, BK)
    stored = tl.cdiv(length, 16) * 16
    factors = _load_factors(
        factor_ptr, line, unit0, lines, stored, factor_line, 1, BK, 1, 16, "e4m3", SWIZZLED
    )  # fmt: skip
    level = _load_global(global_ptr, line, lines, DIVISOR, False)
    codes = _load_pairs(data_ptr, line, unit0, lines, data_line, data_line, 1, BK)
    values = decode(codes, 2, 1) * spread(factors, 1, 16) * level
    values = product_16(values, SIGNS, True)
    _store_values(out_ptr, values, line, unit, lines, length, out_line, out_unit)


def dequantize_(quantizer: QuantizerLike, buffers: dict[str, Tensor], out: Tensor) -> None:
    """Decode the direction ``quantizer.side()`` into ``out`` (contiguous, logical shape)."""
    matrix = as_matrix(out)
    rows, cols = matrix.shape
    columnwise = quantizer.side() == "_columnwise"
    lines, length = (cols, rows) if columnwise else (rows, cols)
    strides = (1, cols) if columnwise else (cols, 1)
    two_level = cast(NVFP4Like, quantizer) if quantizer.format == "nvfp4" else None
    if two_level is not None and is_rotated(two_level, quantizer.side()[1:]):
        _dequantize_rotated_(two_level, buffers, matrix, (lines, length), strides)
        return
    data, factors, options = _addressing(quantizer, buffers, lines, length)
    tile = tile_for((lines, length), (1, max(options["DU"], 4)))
    launch(
        dequantize_kernel,
        tiles((lines, length), tile),
        data,
        factors,
        buffers[two_level.global_buffer(quantizer.side())] if two_level is not None else None,
        matrix,
        lines,
        length,
        ceil_div(length, 2),
        *options.pop("data_strides"),
        *options.pop("factor_strides"),
        *strides,
        **options,
        SCALE=quantizer.spec.scale,
        SWIZZLED=getattr(quantizer, "swizzled", False),
        PACK=pack_of(quantizer),
        TWO_LEVEL=two_level is not None,
        ROW_SCALED=getattr(quantizer, "row_scaled", False),
        DIVISOR=two_level.global_divisor if two_level is not None else 1.0,
        EXPONENT=quantizer.element.exponent_bits,
        MANTISSA=quantizer.element.mantissa_bits,
        BM=tile[0],
        BK=tile[1],
    )


def _dequantize_rotated_(
    quantizer: NVFP4Like,
    buffers: dict[str, Tensor],
    out: Tensor,
    size: tuple[int, int],
    strides: tuple[int, int],
) -> None:
    side = quantizer.side()
    groups = ceil_div(size[1], 16)
    tile = tile_for(size, (1, 16))
    launch(
        dequantize_rotated_kernel,
        tiles(size, tile),
        buffers[f"{side}_data"],
        buffers[f"{side}_scale_inv"],
        buffers[quantizer.global_buffer(side)],
        out,
        *size,
        groups * 8,
        round_up(groups, 4),
        *strides,
        SWIZZLED=quantizer.swizzled,
        SIGNS=quantizer.with_random_sign_mask,
        DIVISOR=quantizer.global_divisor,
        BM=tile[0],
        BK=tile[1],
    )


def _addressing(
    quantizer: QuantizerLike, buffers: dict[str, Tensor], lines: int, length: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the codes, the factors, and how the kernel finds both.

    The options are the strides (line, unit) and how many elements share a factor (0: all).
    """
    side = quantizer.side()
    columnwise = side == "_columnwise"
    if quantizer.spec.block is None:
        axis = getattr(quantizer, "axis", None)
        # Per-row factors (axis -1) are one a line in rowwise data, and one a unit in columnwise
        # data.
        per_line, per_unit = axis is not None and columnwise == (axis == 0), axis is not None
        options = {
            "data_strides": (length, 1),
            "factor_strides": (1, 1),
            "DL": int(per_line),
            "DU": int(per_unit and not per_line),
        }
        return buffers["_transpose" if columnwise else "_data"], buffers["_scale_inv"], options
    block = quantizer.spec.block[1]
    count = round_up(ceil_div(length, block), 4)
    pack = pack_of(quantizer)
    pitch = ceil_div(length, pack) * (3 if pack == 4 else 1)
    data_strides, factor_strides = (pitch, 1), (count, 1)
    square_factors = quantizer.format == "fp8_blockwise" and quantizer.two_dimensional
    if quantizer.format == "fp8_blockwise" and not square_factors:
        factor_strides = (1, round_up(lines, 4))
    if quantizer.format.startswith("mx") and columnwise:
        # Columnwise MX data have the layout of the tensor.
        data_strides = (1, lines)
        swizzled = cast(MXLike, quantizer).swizzled
        factor_strides = (count, 1) if swizzled else (1, round_up(lines, 128))
    options = {
        "data_strides": data_strides,
        "factor_strides": factor_strides,
        "DL": block if square_factors else 1,
        "DU": block,
    }
    return buffers[f"{side}_data"], buffers[f"{side}_scale_inv"], options
