"""NVFP4: E2M1 elements, E4M3 scales of 1x16 or 16x16 blocks, one float32 amax a tensor or a row
(docs/numerics.md, NVFP4).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import rht
from .elements import ELEMENTS, decode, encode
from .layout import (
    as_blocks,
    from_blocks,
    matrix_shape,
    pack4,
    pad_to_multiple,
    spread,
    swizzle,
    unpack4,
    unswizzle,
)
from .options import Options
from .rounding import FLT_MAX

Buffers = dict[str, np.ndarray]
Caster = Callable[[np.ndarray], np.ndarray]
E2M1, E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
ONE, SIX = np.float32(1), np.float32(6)


def amax_of(x: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """max |x|; NaN is ignored, an infinity counts as the largest finite float32."""
    magnitude = np.where(np.isnan(x), np.float32(0), np.minimum(np.abs(x), FLT_MAX))
    return np.asarray(magnitude.max(axis=axis, initial=np.float32(0)), np.float32)


def _round_to_nearest(scaled: np.ndarray) -> np.ndarray:
    """E2M1 codes of x * e; -0.0 -> code 0, NaN -> code 0."""
    return encode(scaled, E2M1, keep_zero_sign=False)


def _round_stochastically(scaled: np.ndarray, random_bytes: np.ndarray) -> np.ndarray:
    """E2M1 codes of t = |x| + (r/256) * step(|x|) floored to the grid of t, capped at 6, with the
    sign of x (none for -0.0).
    """
    magnitude = np.minimum(np.abs(scaled), SIX)
    jittered = magnitude + random_bytes.astype(np.float32) / np.float32(256) * _step(magnitude)
    step = _step(jittered)
    floored = np.minimum(np.floor(jittered / step) * step, SIX)
    return encode(np.where(scaled < 0, -floored, floored), E2M1, keep_zero_sign=True)


def _step(magnitude: np.ndarray) -> np.ndarray:
    half, one, two = np.float32(0.5), np.float32(1), np.float32(2)
    return np.where(magnitude < 2, half, np.where(magnitude < 4, one, two))


def _cast_with_scale(
    blocks: np.ndarray, scale: np.ndarray, s_dec: np.ndarray, cast: Caster
) -> np.ndarray:
    """Codes of the blocks under an E4M3 scale value a block: e = min(1/(s*S_dec), FLT_MAX), q =
    E2M1(clamp(x*e, +-6)).
    """
    multiplier = np.minimum(ONE / (scale * s_dec), FLT_MAX)
    return cast(np.clip(blocks * multiplier[:, :, None, None], -SIX, SIX))


def _candidate_error(
    blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, amax: np.ndarray, options: Options
) -> np.ndarray:
    """4over6 error of one candidate, one a block: 16 elements in order, then (2D) the 16 rows by a
    tree 8/4/2/1, all in float32.
    """
    per_block = (slice(None), slice(None), None, None)
    decoded = (
        decode(codes, E2M1) * scale[per_block] * amax[per_block] / np.float32(6 * options.e4m3_max)
    )
    # A NaN counts as 0, as its code does.
    diff = decoded - np.where(np.isnan(blocks), np.float32(0), blocks)
    terms = np.abs(diff) if options.err_mode == "mae" else diff * diff
    total = terms[..., 0]
    for index in range(1, 16):
        total = total + terms[..., index]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _quantize_matrix(
    matrix: np.ndarray, amax: np.ndarray, random_bytes: np.ndarray | None, options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Element codes of the matrix and E4M3 codes, one a block. `amax`: (1,) for a tensor, (rows,)
    for row scaling.
    """
    block = (16, 16) if options.with_2d_quantization else (1, 16)
    blocks = as_blocks(matrix, *block)
    cast: Caster = _round_to_nearest
    if options.stochastic_rounding:
        if random_bytes is None:
            raise ValueError("stochastic_rounding: random_bits of this direction are needed")
        bytes_of_blocks = as_blocks(random_bytes, *block)

        def cast(scaled: np.ndarray) -> np.ndarray:
            return _round_stochastically(scaled, bytes_of_blocks)

    block_amax = amax_of(blocks, axis=(2, 3))
    amax = np.broadcast_to(amax[:, None], (block_amax.shape[0], 1))
    with np.errstate(all="ignore"):
        s_enc = np.minimum(np.float32(6 * options.e4m3_max) / amax, FLT_MAX)
        s_enc = np.where((amax == 0) | (s_enc == 0), ONE, s_enc)
        s_dec = ONE / s_enc
        if not options.use_4over6:
            base = np.minimum(block_amax * (s_enc * (ONE / SIX)), FLT_MAX)
            scale_codes = encode(base, E4M3)
            codes = _cast_with_scale(blocks, decode(scale_codes, E4M3), s_dec, cast)
            return from_blocks(codes, *matrix.shape), scale_codes
        base = block_amax / SIX * s_enc
        candidates = []
        for stretch in (np.float32(1), np.float32(1.5)):
            scale_codes = encode(stretch * base, E4M3)
            scale = decode(scale_codes, E4M3)
            codes = _cast_with_scale(blocks, scale, s_dec, cast)
            candidates.append((
                codes,
                scale_codes,
                _candidate_error(blocks, codes, scale, amax, options),
            ))
    (codes6, scales6, error6), (codes4, scales4, error4) = candidates
    to4 = error4 < error6
    codes = np.where(to4[:, :, None, None], codes4, codes6)
    return from_blocks(codes, *matrix.shape), np.where(to4, scales4, scales6)


def _stored_scales(scale_codes: np.ndarray, options: Options, rows: int) -> np.ndarray:
    """One row of scales a row of data, zero-padded to 128x4 tiles, swizzled on request (section
    6).
    """
    repeated = (
        np.repeat(scale_codes, 16, axis=0)[:rows] if options.with_2d_quantization else scale_codes
    )
    return swizzle(repeated) if options.swizzled else pad_to_multiple(repeated, 128, 4)


def _random_bytes(options: Options, attribute: str, shape: tuple[int, int]) -> np.ndarray | None:
    given = (options.random_bits or {}).get(attribute)
    return None if given is None else np.asarray(given, np.uint8).reshape(shape)


def _check(options: Options) -> None:
    clashes = {
        "row_scaled with with_rht": options.row_scaled and options.with_rht,
        "row_scaled with with_2d_quantization": options.row_scaled and options.with_2d_quantization,
        "row_scaled with stochastic_rounding": options.row_scaled and options.stochastic_rounding,
        "with_rht with with_2d_quantization": options.with_rht and options.with_2d_quantization,
    }
    for name, clash in clashes.items():
        if clash:
            raise ValueError(f"oracle nvfp4: {name} is not defined")


def quantize_nvfp4(x: np.ndarray, options: Options) -> Buffers:
    """nvfp4. Row-wise data (..., ceil(K/2)); column-wise data (K, ceil(M/2)), quantized from x^T
    (2D: exact transposes).
    """
    _check(options)
    rows, cols = matrix_shape(x.shape)
    matrix = x.reshape(rows, cols)
    axis = 1 if options.row_scaled else None
    row_bytes, col_bytes = (
        _random_bytes(options, "_rowwise_data", (rows, cols)),
        _random_bytes(
            options, "_columnwise_data", (cols, -(-rows // 16) * 16 if options.with_rht else rows)
        ),
    )
    buffers: Buffers = {}
    row_codes = row_scales = None
    if options.rowwise or options.with_2d_quantization:
        if row_bytes is None and col_bytes is not None:
            row_bytes = col_bytes.T
        amax = amax_of(matrix, axis).reshape(-1)
        row_codes, row_scales = _quantize_matrix(matrix, amax, row_bytes, options)
    if options.rowwise:
        data = pack4(row_codes)
        buffers["_rowwise_data"] = data.reshape(*x.shape[:-1], data.shape[-1])
        buffers["_rowwise_scale_inv"] = _stored_scales(row_scales, options, rows)
        buffers["_amax_rowwise"] = amax
    if options.columnwise:
        if options.with_2d_quantization:
            col_codes, col_scales = row_codes.T, row_scales.T
        else:
            turned = np.ascontiguousarray(matrix.T)
            turned = rht.rotate(turned, options) if options.with_rht else turned
            amax = amax_of(turned, axis).reshape(-1)
            col_codes, col_scales = _quantize_matrix(turned, amax, col_bytes, options)
        buffers["_columnwise_data"] = pack4(col_codes)
        buffers["_columnwise_scale_inv"] = _stored_scales(col_scales, options, cols)
        buffers["_amax_columnwise"] = amax
    if options.with_global_scale_inv:
        for side in ("_rowwise", "_columnwise"):
            if f"_amax{side}" in buffers:
                unit = buffers[f"_amax{side}"] / np.float32(6 * options.e4m3_max)
                buffers[f"{side}_global_scale_inv"] = unit
    return buffers


def dequantize_nvfp4(buffers: Buffers, shape: tuple[int, ...], options: Options) -> np.ndarray:
    """fp4 * float(s) * (A / (6 * e4m3_max)), or fp4 * float(s) * the stored factor; a rotated
    column-wise copy is rotated back in float32.
    """
    rows, cols = matrix_shape(shape)
    columnwise = "_rowwise_data" not in buffers
    side = "_columnwise" if columnwise else "_rowwise"
    height, width = (cols, rows) if columnwise else (rows, cols)
    data = buffers[f"{side}_data"]
    turned_back = columnwise and options.with_rht
    width = -(-width // 16) * 16 if turned_back else width
    codes = unpack4(data.reshape(height, data.shape[-1]), width)
    scale_codes = buffers[f"{side}_scale_inv"]
    scale = decode(unswizzle(scale_codes) if options.swizzled else scale_codes, E4M3)
    with np.errstate(all="ignore"):
        if options.with_global_scale_inv:
            unit = buffers[f"{side}_global_scale_inv"]
        else:
            unit = buffers["_amax" + side] / np.float32(6 * options.e4m3_max)
        values = decode(codes, E2M1) * spread(scale, 1, 16, height, width) * unit[:, None]
        if turned_back:
            values = rht.rotate_back(values, options)[:, :rows]
    return (values.T if columnwise else values).reshape(shape)
