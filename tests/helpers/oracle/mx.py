"""MXFP8, MXFP6 and MXFP4: blocks of 32 with an E8M0 scale (docs/numerics.md, MX)."""

from __future__ import annotations

import numpy as np

from .elements import ELEMENTS, FP8_NAN_CODE, Element, decode, encode
from .layout import (
    as_blocks,
    from_blocks,
    matrix_shape,
    pack4,
    pack6,
    pad_to_multiple,
    spread,
    swizzle,
    unpack4,
    unpack6,
    unswizzle,
)
from .options import Options
from .rounding import absmax, ceil_log2, floor_log2, pow2_f32

Buffers = dict[str, np.ndarray]
NAN_SCALE = 255


def scale_codes(amax: np.ndarray, element: Element, mode: str) -> np.ndarray:
    """E8M0 codes (int64) of block amaxes; 255 where the amax is not finite.

    "rceil": the smallest 2^k >= amax / element_max, the quotient rounded to float32. "floor":
    floor(log2 amax) - emax_element. "ceil": ceil(log2 amax) - emax_element. "even": floor(log2 r)
    - emax_element with r = amax rounded, halves up, to the mantissa bits of the element. All clamp
    k to [-127, 127]; a block of zeros has code 0.
    """
    finite = np.isfinite(amax)
    known = np.where(finite, amax, np.float32(0))
    if mode == "rceil":
        with np.errstate(all="ignore"):
            known = known / element.max
        exponent = ceil_log2(known)
    elif mode == "floor":
        exponent = floor_log2(known) - element.emax
    elif mode == "ceil":
        exponent = ceil_log2(known) - element.emax
    elif mode == "even":
        wide = known.astype(np.float64)
        half = np.ldexp(1.0, floor_log2(known) - element.mbits - 1)
        exponent = floor_log2(wide + half) - element.emax
    else:
        raise ValueError(f"scale_mode: rceil, floor, ceil or even; got {mode!r}")
    codes = np.where(known == 0, 0, np.clip(exponent, -127, 127) + 127)
    return np.where(finite, codes, NAN_SCALE)


def _quantize_blocks(
    matrix: np.ndarray, block: tuple[int, int], options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Element codes of the logical matrix and one scale code a block."""
    element = ELEMENTS[options.dtype]
    blocks = as_blocks(matrix, *block)
    scales = scale_codes(absmax(blocks, axis=(2, 3)), element, options.scale_mode)
    broken = scales == NAN_SCALE
    factor = pow2_f32(127 - np.where(broken, 127, scales))
    with np.errstate(all="ignore"):
        codes = encode(blocks * factor[:, :, None, None], element)
    filler = np.uint8(0 if element.specials == "none" else FP8_NAN_CODE)
    codes = np.where(broken[:, :, None, None], filler, codes)
    return from_blocks(codes, *matrix.shape), scales.astype(np.uint8)


def _stored_columnwise(
    codes: np.ndarray, fmt: str, shape: tuple[int, ...], options: Options
) -> np.ndarray:
    """Columnwise codes: the logical shape, or packed along M, as the blocks run: (packed M, K)."""
    if fmt == "mxfp4":
        return pack4(codes.T).T
    if fmt == "mxfp6" and options.packed:
        return pack6(codes.T).T
    return codes.reshape(shape)


def _stored(codes: np.ndarray, fmt: str, shape: tuple[int, ...], options: Options) -> np.ndarray:
    """Rowwise codes: the logical shape, or the packed last dim (1-d for a 0-d tensor)."""
    if fmt == "mxfp4":
        packed = pack4(codes)
    elif fmt == "mxfp6" and options.packed:
        packed = pack6(codes)
    else:
        return codes.reshape(shape)
    return packed.reshape(*shape[:-1], packed.shape[-1])


def _unpack(data: np.ndarray, fmt: str, length: int, options: Options) -> np.ndarray:
    if fmt == "mxfp4":
        return unpack4(data, length)
    return unpack6(data, length) if fmt == "mxfp6" and options.packed else data


def quantize_mx(x: np.ndarray, fmt: str, options: Options) -> Buffers:
    """mxfp8, mxfp6 and mxfp4. Both directions keep the logical (M, K) layout of the data."""
    rows, cols = matrix_shape(x.shape)
    matrix = x.reshape(rows, cols)
    if options.with_2d_quantization:
        codes, scales = _quantize_blocks(matrix, (32, 32), options)
        row, row_scale = codes, np.repeat(scales, 32, axis=0)[:rows]
        col, col_scale = codes, np.repeat(scales, 32, axis=1)[:, :cols]
    else:
        row, row_scale = _quantize_blocks(matrix, (1, 32), options)
        col, col_scale = _quantize_blocks(matrix, (32, 1), options)
    buffers: Buffers = {}
    if options.rowwise:
        buffers["_rowwise_data"] = _stored(row, fmt, x.shape, options)
        buffers["_rowwise_scale_inv"] = (
            swizzle(row_scale) if options.swizzled else pad_to_multiple(row_scale, 128, 4)
        )
    if options.columnwise:
        buffers["_columnwise_data"] = _stored_columnwise(col, fmt, x.shape, options)
        buffers["_columnwise_scale_inv"] = (
            _swizzled_transpose(col_scale)
            if options.swizzled
            else pad_to_multiple(col_scale, 4, 128)
        )
    return buffers


def _swizzled_transpose(scales: np.ndarray) -> np.ndarray:
    """The bytes of the swizzled transpose in the logical shape (only bytes move)."""
    tiles = swizzle(scales.T)
    return tiles.reshape(tiles.shape[::-1])


def dequantize_mx(
    buffers: Buffers, fmt: str, shape: tuple[int, ...], options: Options
) -> np.ndarray:
    """value * 2^(code - 127) in float32; scale code 0 is 2^-127, code 255 is NaN."""
    rows, cols = matrix_shape(shape)
    columnwise = "_rowwise_data" not in buffers
    side = "_columnwise" if columnwise else "_rowwise"
    data = np.atleast_1d(buffers[f"{side}_data"])
    if columnwise and (fmt == "mxfp4" or (fmt == "mxfp6" and options.packed)):
        codes = _unpack(data.T, fmt, rows, options).T
    else:
        codes = _unpack(data.reshape(rows, data.shape[-1]), fmt, cols, options)
    scales = buffers[f"{side}_scale_inv"]
    if options.swizzled:
        scales = (
            unswizzle(scales.reshape(scales.shape[::-1])).T if columnwise else unswizzle(scales)
        )
    factor = np.where(
        scales == NAN_SCALE, np.float32(np.nan), pow2_f32(scales.astype(np.int64) - 127)
    )
    block = (32, 1) if columnwise else (1, 32)
    with np.errstate(all="ignore"):
        values = decode(codes, ELEMENTS[options.dtype]) * spread(factor, *block, rows, cols)
    return values.reshape(shape)
