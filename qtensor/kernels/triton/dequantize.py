"""Codes and factors to float32, bfloat16 or float16: all formats, either direction.

A side is a matrix of lines that packing and blocks run along: rows of the tensor (rowwise), or its columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

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
from qtensor.layout import ceil_div, round_up


@triton.jit
def _load_codes(ptr, line, unit, lines, length, stride_line, stride_unit, PACK: tl.constexpr):
    """Codes (len(line), len(unit)), int32, of the given elements; PACK 4: two loads each, since codes cross bytes."""
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
    """Codes (len(line), N), int32, two a byte, ``pairs`` bytes a line, from one load a byte."""
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
    """Decode factors (len(line) or 1, N / DU or 1), float32; DL or DU 0: one factor for all lines or units."""
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
def _load_global(amax_ptr, line, lines, E4M3_MAX: tl.constexpr, ROW_SCALED: tl.constexpr):
    """The second level of NVFP4, ``A / (6 * e4m3_max)``: (len(line), 1) or (1, 1)."""
    if ROW_SCALED:
        amax = tl.load(amax_ptr + line, mask=line < lines, other=0.0)
    else:
        amax = tl.load(amax_ptr + tl.arange(0, 1))
    return tl.div_rn(amax, tl.zeros_like(amax) + 6.0 * E4M3_MAX)[:, None]


@triton.jit
def _store_values(out_ptr, values, line, unit, lines, length, stride_line, stride_unit):
    """Write float32 values, rounded once to the type of the output; int16 holds the bits of bfloat16."""
    if out_ptr.dtype.element_ty == tl.int16:
        values = round_bfloat16(values)
    store_tile(out_ptr, values, line, unit, lines, length, stride_line, stride_unit)


@triton.jit
def dequantize_kernel(
    data_ptr, factor_ptr, amax_ptr, out_ptr, lines, length, pairs, data_line, data_unit,
    factor_line, factor_unit, out_line, out_unit, DL: tl.constexpr, DU: tl.constexpr,
    SCALE: tl.constexpr, SWIZZLED: tl.constexpr, PACK: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ROW_SCALED: tl.constexpr, E4M3_MAX: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of BM lines, BK elements of each: element value times factor (times the second level)."""
    line0, unit0 = tile_indices(lines, length, BM, BK)
    line, unit = line0 + tl.arange(0, BM), unit0 + tl.arange(0, BK)
    if PACK == 2:
        codes = _load_pairs(data_ptr, line, unit0, lines, pairs, data_line, data_unit, BK)
    else:
        codes = _load_codes(data_ptr, line, unit, lines, length, data_line, data_unit, PACK)
    factors = _load_factors(
        factor_ptr, line, unit0, lines, length, factor_line, factor_unit, BK, DL, DU, SCALE, SWIZZLED
    )  # fmt: skip
    values = decode(codes, EXPONENT, MANTISSA) * spread(factors, 1, DU)
    if TWO_LEVEL:
        values = values * _load_global(amax_ptr, line, lines, E4M3_MAX, ROW_SCALED)
    _store_values(out_ptr, values, line, unit, lines, length, out_line, out_unit)


@triton.jit
def dequantize_rotated_kernel(
    data_ptr, factor_ptr, amax_ptr, out_ptr, lines, length, data_line, factor_line,
    out_line, out_unit, SWIZZLED: tl.constexpr, SIGNS: tl.constexpr, E4M3_MAX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of rotated NVFP4 lines, rotated back: the sum over the 16 of a group runs in order."""
    line0, unit0 = tile_indices(lines, length, BM, BK)
    line, unit = line0 + tl.arange(0, BM), unit0 + tl.arange(0, BK)
    stored = tl.cdiv(length, 16) * 16
    factors = _load_factors(
        factor_ptr, line, unit0, lines, stored, factor_line, 1, BK, 1, 16, "e4m3", SWIZZLED
    )  # fmt: skip
    level = _load_global(amax_ptr, line, lines, E4M3_MAX, False)
    codes = _load_pairs(data_ptr, line, unit0, lines, data_line, data_line, 1, BK)
    values = decode(codes, 2, 1) * spread(factors, 1, 16) * level
    values = product_16(values, SIGNS, True)
    _store_values(out_ptr, values, line, unit, lines, length, out_line, out_unit)


def dequantize_(codec: Any, buffers: dict[str, Tensor], out: Tensor) -> None:
    """Decode the side that ``codec`` says into ``out`` (contiguous, logical shape)."""
    matrix = as_matrix(out)
    rows, cols = matrix.shape
    columnwise = codec.side() == "_columnwise"
    lines, length = (cols, rows) if columnwise else (rows, cols)
    strides = (1, cols) if columnwise else (cols, 1)
    if codec.format == "nvfp4" and is_rotated(codec, codec.side()[1:]):
        _dequantize_rotated_(codec, buffers, matrix, (lines, length), strides)
        return
    data, factors, options = _layout(codec, buffers, lines, length)
    tile = tile_for((lines, length), (1, max(options["DU"], 4)))
    launch(
        dequantize_kernel,
        tiles((lines, length), tile),
        data,
        factors,
        buffers.get(f"_amax{codec.side()}"),
        matrix,
        lines,
        length,
        ceil_div(length, 2),
        *options.pop("data_strides"),
        *options.pop("factor_strides"),
        *strides,
        **options,
        SCALE=codec.spec.scale,
        SWIZZLED=getattr(codec, "swizzled", False),
        PACK=pack_of(codec),
        TWO_LEVEL=codec.format == "nvfp4",
        ROW_SCALED=getattr(codec, "row_scaled", False),
        E4M3_MAX=float(getattr(codec, "e4m3_max", 0.0)),
        EXPONENT=codec.element.exponent_bits,
        MANTISSA=codec.element.mantissa_bits,
        BM=tile[0],
        BK=tile[1],
    )


def _dequantize_rotated_(
    codec: Any,
    buffers: dict[str, Tensor],
    out: Tensor,
    size: tuple[int, int],
    strides: tuple[int, int],
) -> None:
    side = codec.side()
    groups = ceil_div(size[1], 16)
    tile = tile_for(size, (1, 16))
    launch(
        dequantize_rotated_kernel,
        tiles(size, tile),
        buffers[f"{side}_data"],
        buffers[f"{side}_scale_inv"],
        buffers[f"_amax{side}"],
        out,
        *size,
        groups * 8,
        round_up(groups, 4),
        *strides,
        SWIZZLED=codec.swizzled,
        SIGNS=codec.with_random_sign_mask,
        E4M3_MAX=float(codec.e4m3_max),
        BM=tile[0],
        BK=tile[1],
    )


def _layout(
    codec: Any, buffers: dict[str, Tensor], lines: int, length: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Codes, factors, and where they lie: strides (line, unit), elements that share a factor (0: all)."""
    side = codec.side()
    columnwise = side == "_columnwise"
    if codec.spec.block is None:
        axis = getattr(codec, "axis", None)
        # A factor a row (axis -1) is one a line in rowwise data, and one a unit in columnwise data.
        per_line, per_unit = axis is not None and columnwise == (axis == 0), axis is not None
        options = {
            "data_strides": (length, 1),
            "factor_strides": (1, 1),
            "DL": int(per_line),
            "DU": int(per_unit and not per_line),
        }
        return buffers["_transpose" if columnwise else "_data"], buffers["_scale_inv"], options
    block = codec.spec.block[1]
    count = round_up(ceil_div(length, block), 4)
    pack = pack_of(codec)
    pitch = ceil_div(length, pack) * (3 if pack == 4 else 1)
    data_strides, factor_strides = (pitch, 1), (count, 1)
    square_factors = codec.format == "fp8_blockwise" and codec.two_dimensional
    if codec.format == "fp8_blockwise" and not square_factors:
        factor_strides = (1, round_up(lines, 4))
    if codec.format.startswith("mx") and columnwise:
        # Columnwise MX data keep the layout of the tensor.
        data_strides = (1, lines)
        factor_strides = (count, 1) if codec.swizzled else (1, round_up(lines, 128))
    options = {
        "data_strides": data_strides,
        "factor_strides": factor_strides,
        "DL": block if square_factors else 1,
        "DU": block,
    }
    return buffers[f"{side}_data"], buffers[f"{side}_scale_inv"], options
