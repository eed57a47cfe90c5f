"""FP8 with float32 scales: per tensor, per row, delayed, and blockwise (docs/numerics.md)."""

from __future__ import annotations

import numpy as np

from .elements import ELEMENTS, decode, encode
from .layout import as_blocks, from_blocks, matrix_shape, pad2d, spread, transposed_shape, up
from .options import Options
from .rounding import DTYPE_MAX, FLT_MAX, absmax, floor_log2, pow2_f32

Buffers = dict[str, np.ndarray]


def scale_of_amax(amax: np.ndarray, options: Options, overflow: np.float32) -> np.ndarray:
    """scale = fp8_max / amax with the general rules of docs/numerics.md; `overflow` replaces a
    quotient that overflows float32.
    """
    amax = np.maximum(amax, np.float32(options.amax_epsilon))
    with np.errstate(all="ignore"):
        scale = ELEMENTS[options.dtype].max / amax
    scale = np.where(np.isposinf(scale), overflow, scale)
    scale = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), scale).astype(np.float32)
    return pow2_f32(floor_log2(scale)) if options.force_pow_2_scales else scale


def _cast(x: np.ndarray, scale: np.ndarray, options: Options) -> np.ndarray:
    with np.errstate(all="ignore"):
        return encode(x * scale, ELEMENTS[options.dtype])


def _reciprocal(scale: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (np.float32(1) / scale).astype(np.float32)


def quantize_scaled(x: np.ndarray, fmt: str, options: Options) -> Buffers:
    """fp8, fp8_delayed and fp8_rowwise: one scale a tensor, a given scale, one scale a row or a
    column of the (M, K) view.
    """
    matrix = x.reshape(matrix_shape(x.shape))
    buffers: Buffers = {}
    if fmt == "fp8_delayed":
        scale = np.asarray(options.scale, np.float32).reshape(1)
        buffers["amax"] = absmax(matrix).reshape(1)
    elif fmt == "fp8_rowwise":
        axis = options.axis % 2
        shape = (matrix.shape[0], 1) if axis == 1 else (1, matrix.shape[1])
        scale = scale_of_amax(absmax(matrix, axis=axis).reshape(shape), options, FLT_MAX)
    else:
        scale = scale_of_amax(absmax(matrix).reshape(1), options, FLT_MAX)
    data = _cast(matrix, scale, options)
    if options.rowwise:
        buffers["_data"] = data.reshape(x.shape)
    if options.columnwise:
        buffers["_transpose"] = np.ascontiguousarray(data.T).reshape(transposed_shape(x.shape))
    buffers["_scale_inv"] = _reciprocal(scale)
    return buffers


def dequantize_scaled(buffers: Buffers, shape: tuple[int, ...], options: Options) -> np.ndarray:
    """float(q) * scale_inv."""
    rows, cols = matrix_shape(shape)
    codes = (
        buffers["_data"].reshape(rows, cols)
        if "_data" in buffers
        else buffers["_transpose"].reshape(cols, rows).T
    )
    with np.errstate(all="ignore"):
        return (decode(codes, ELEMENTS[options.dtype]) * buffers["_scale_inv"]).reshape(shape)


def _quantize_blocks(
    matrix: np.ndarray, block: tuple[int, int], options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the logical matrix and scale_inv, one a block."""
    blocks = as_blocks(matrix, *block)
    scale = scale_of_amax(absmax(blocks, axis=(2, 3)), options, DTYPE_MAX[options.in_dtype])
    codes = _cast(blocks, scale[:, :, None, None], options)
    return from_blocks(codes, *matrix.shape), _reciprocal(scale)


def quantize_blockwise(x: np.ndarray, options: Options) -> Buffers:
    """fp8_blockwise with its GEMM-ready scales: 1-D scales are transposed, the last dim is padded
    to 4.
    """
    rows, cols = matrix_shape(x.shape)
    matrix = x.reshape(rows, cols)
    buffers: Buffers = {}
    if options.block_scaling_dim == 2:
        row_codes, scale_inv = _quantize_blocks(matrix, (128, 128), options)
        col_codes, row_scale, col_scale = row_codes.T, scale_inv, scale_inv.T
    else:
        row_codes, scale_inv = _quantize_blocks(matrix, (1, 128), options)
        col_codes, scale_inv_t = _quantize_blocks(np.ascontiguousarray(matrix.T), (1, 128), options)
        row_scale, col_scale = scale_inv.T, scale_inv_t.T
    if options.rowwise:
        buffers["_rowwise_data"] = row_codes.reshape(x.shape)
        buffers["_rowwise_scale_inv"] = pad2d(
            row_scale, row_scale.shape[0], up(row_scale.shape[1], 4)
        )
    if options.columnwise:
        buffers["_columnwise_data"] = np.ascontiguousarray(col_codes).reshape(
            transposed_shape(x.shape)
        )
        buffers["_columnwise_scale_inv"] = pad2d(
            col_scale, col_scale.shape[0], up(col_scale.shape[1], 4)
        )
    return buffers


def dequantize_blockwise(buffers: Buffers, shape: tuple[int, ...], options: Options) -> np.ndarray:
    """float(q) * scale_inv of the block; the column-wise copy when there is no row-wise one."""
    rows, cols = matrix_shape(shape)
    columnwise = "_rowwise_data" not in buffers
    height, width = (cols, rows) if columnwise else (rows, cols)
    side = "_columnwise" if columnwise else "_rowwise"
    codes = buffers[f"{side}_data"].reshape(height, width)
    scale_inv = buffers[f"{side}_scale_inv"]
    block = (128, 128) if options.block_scaling_dim == 2 else (1, 128)
    scale_inv = scale_inv if options.block_scaling_dim == 2 else scale_inv.T
    with np.errstate(all="ignore"):
        values = decode(codes, ELEMENTS[options.dtype]) * spread(scale_inv, *block, height, width)
    return (values.T if columnwise else values).reshape(shape)
