"""Device code of NVFP4 (docs/numerics.md, NVFP4).

A direction ("side") is read as a matrix of lines along which blocks run: the rows of x (rowwise),
or the rows of its transpose (columnwise).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qtensor.kernels.triton.common import (
    block_max,
    join_16,
    load_tile,
    raise_to,
    round_up,
    split_16,
    spread,
    store_codes,
    store_factors,
    tile_indices,
)
from qtensor.kernels.triton.elements import (
    as_float,
    decode,
    encode,
    encode_e4m3,
    finite_bits,
    magnitude_bits,
    reciprocal,
)
from qtensor.kernels.triton.rotation import rotate
from qtensor.kernels.triton.rounding import noise_bytes, stochastic_codes

FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
E2M1_LARGEST = tl.constexpr(0x40C00000)


@triton.jit
def _finite(values):
    """Replace NaN by 0 and inf by the largest finite float32."""
    bits = values.to(tl.int32, bitcast=True)
    return as_float(finite_bits(bits & 0x7FFFFFFF) | (bits & ~0x7FFFFFFF))


@triton.jit
def _load_element(x_ptr, line, group, i: tl.constexpr, lines, length, stride_line, stride_unit):
    """Load element ``i`` of each block."""
    return load_tile(x_ptr, line, 16 * group + i, lines, length, stride_line, stride_unit)


@triton.jit
def load_side(
    x_ptr, line0, unit0, lines, length, stride_line, stride_unit, L: tl.constexpr, N: tl.constexpr,
    ELEMENTWISE: tl.constexpr, ROTATED: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    """Load the values (L, N) that a direction quantizes, float32 without NaN or inf.

    If ``ELEMENTWISE``, element i of all blocks is one load, which leaves each block in one thread.
    This is faster for lines that are not contiguous, and it allows sums in order.
    """
    line = line0 + tl.arange(0, L)
    if ELEMENTWISE:
        g = unit0 // 16 + tl.arange(0, N // 16)
        v = join_16(
            (
                _load_element(x_ptr, line, g, 0, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 1, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 2, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 3, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 4, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 5, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 6, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 7, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 8, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 9, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 10, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 11, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 12, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 13, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 14, lines, length, stride_line, stride_unit),
                _load_element(x_ptr, line, g, 15, lines, length, stride_line, stride_unit),
            )
        )  # fmt: skip
    else:
        unit = unit0 + tl.arange(0, N)
        v = load_tile(x_ptr, line, unit, lines, length, stride_line, stride_unit)
    return _finite(rotate(v, SIGNS, x_ptr.dtype.element_ty) if ROTATED else v)


@triton.jit
def _encode_factor(factors, global_scale):
    """Return the multipliers of blocks from E4M3 codes: min(1 / (float(s) / S_enc), FLT_MAX)."""
    decoded = decode(factors, 4, 3)
    factor = reciprocal(decoded * reciprocal(global_scale))
    return tl.minimum(factor, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_error(
    v, factors, global_scale, amax, DM: tl.constexpr, SQUARED: tl.constexpr,
    E4M3_MAX: tl.constexpr,
):  # fmt: skip
    """Return the error of each block with these factors.

    The 16 elements of a row are added in order, then 16 rows by halves: 8, 4, 2, 1.
    """
    L: tl.constexpr = v.shape[0]
    NB: tl.constexpr = v.shape[1] // 16
    codes = encode(
        v * spread(_encode_factor(factors, global_scale), DM, 16), False, 2, 1, E2M1_LARGEST
    )
    decoded = decode(codes, 2, 1) * spread(decode(factors, 4, 3), DM, 16)
    difference = tl.div_rn(decoded * amax, tl.zeros_like(decoded) + 6.0 * E4M3_MAX) - v
    terms = split_16(difference * difference if SQUARED else tl.abs(difference))
    error = terms[0]
    for i in tl.static_range(1, 16):
        error = error + terms[i]
    if DM == 16:
        error = tl.sum(tl.reshape(error, (L // 16, 2, 8, NB)), 1)
        error = tl.sum(tl.reshape(error, (L // 16, 2, 4, NB)), 1)
        error = tl.sum(tl.reshape(error, (L // 16, 2, 2, NB)), 1)
        error = tl.sum(error, 1)
    return error


@triton.jit
def _quantize(
    v, amax, noise, DM: tl.constexpr, E4M3_MAX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    SQUARED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Return the codes of a tile and the E4M3 codes of its (DM, 16) blocks.

    Args:
        v: (L, N) without NaN or inf.
        amax: (L, 1) or (1, 1).
        noise: random bytes (L, N), int32, if ``STOCHASTIC``.
        DM: lines of a block.
        E4M3_MAX: the format's option ``e4m3_max``.
        FOUR_OVER_SIX: the format's option ``use_4over6``.
        SQUARED: True if ``FOUR_OVER_SIX`` compares squared errors.
        STOCHASTIC: True for stochastic rounding.
    """
    known = tl.where(amax <= 0.0, 6.0 * E4M3_MAX, amax)
    global_scale = tl.div_rn(tl.zeros_like(known) + 6.0 * E4M3_MAX, known)
    global_scale = tl.minimum(global_scale, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    maxima = as_float(block_max(magnitude_bits(v), DM, 16))
    if FOUR_OVER_SIX:
        base = tl.div_rn(maxima, tl.zeros_like(maxima) + 6.0) * global_scale
        factors, to_4 = encode_e4m3(base), encode_e4m3(base * 1.5)
        error_6 = _block_error(v, factors, global_scale, amax, DM, SQUARED, E4M3_MAX)
        error_4 = _block_error(v, to_4, global_scale, amax, DM, SQUARED, E4M3_MAX)
        factors = tl.where(error_4 < error_6, to_4, factors)
    else:
        factors = encode_e4m3(maxima * (global_scale * (1.0 / 6.0)))
    scaled = v * spread(_encode_factor(factors, global_scale), DM, 16)
    if STOCHASTIC:
        return stochastic_codes(scaled, noise), factors
    else:
        return encode(scaled, False, 2, 1, E2M1_LARGEST), factors


@triton.jit
def _store_side(
    data_ptr, factor_ptr, codes, factors, line0, unit0, lines, length, pairs,
    SWIZZLED: tl.constexpr,
):  # fmt: skip
    """Write the codes (L, N), ``pairs`` bytes a line, and the factors (L, N / 16)."""
    store_codes(data_ptr, codes, line0, unit0, lines, pairs, pairs, 1, 2)
    blocks = tl.cdiv(length, 16)
    line = line0 + tl.arange(0, codes.shape[0])
    block = unit0 // 16 + tl.arange(0, codes.shape[1] // 16)
    store_factors(
        factor_ptr, factors, line, block, lines, blocks, round_up(blocks, 4), SWIZZLED
    )  # fmt: skip


@triton.jit
def _side(
    x_ptr, data_ptr, factor_ptr, amax_ptr, seed_ptr, line0, unit0, lines, length, pairs,
    stride_line, stride_unit, L: tl.constexpr, N: tl.constexpr, STREAM: tl.constexpr,
    ROTATED: tl.constexpr, SIGNS: tl.constexpr, ROW_SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    SWIZZLED: tl.constexpr, E4M3_MAX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    SQUARED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of a direction with 1-D blocks: L lines of N elements."""
    ELEMENTWISE: tl.constexpr = STREAM == 1 or ROTATED or FOUR_OVER_SIX
    v = load_side(
        x_ptr, line0, unit0, lines, length, stride_line, stride_unit, L, N, ELEMENTWISE, ROTATED,
        SIGNS,
    )  # fmt: skip
    line = line0 + tl.arange(0, L)
    # A rotated direction stores whole groups of 16.
    stored = round_up(length, 16) if ROTATED else length
    if ROW_SCALED:
        amax = tl.load(amax_ptr + line, mask=line < lines, other=0.0)[:, None]
    else:
        amax = tl.load(amax_ptr + tl.arange(0, 1))[:, None]
    noise = noise_bytes(seed_ptr, line, unit0, stored, STREAM, N, ALIGNED) if STOCHASTIC else 0
    codes, factors = _quantize(v, amax, noise, 1, E4M3_MAX, FOUR_OVER_SIX, SQUARED, STOCHASTIC)
    _store_side(data_ptr, factor_ptr, codes, factors, line0, unit0, lines, stored, pairs, SWIZZLED)


@triton.jit
def quantize_nvfp4_kernel(
    x_ptr, row_ptr, row_factor_ptr, col_ptr, col_factor_ptr, row_amax_ptr, col_amax_ptr, seed_ptr,
    rows, cols, stride_m, stride_k, row_pairs, col_pairs,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    ROW_ROTATED: tl.constexpr, COL_ROTATED: tl.constexpr, SIGNS: tl.constexpr,
    ROW_SCALED: tl.constexpr, ROW_ALIGNED: tl.constexpr, COL_ALIGNED: tl.constexpr,
    SWIZZLED: tl.constexpr, E4M3_MAX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    SQUARED: tl.constexpr, STOCHASTIC: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantize one (BM, BK) tile, multiples of 16, in both directions with separate blocks."""
    m0, k0 = tile_indices(rows, cols, BM, BK)
    if ROWWISE:
        _side(
            x_ptr, row_ptr, row_factor_ptr, row_amax_ptr, seed_ptr, m0, k0, rows, cols, row_pairs,
            stride_m, stride_k, BM, BK, 0, ROW_ROTATED, SIGNS, ROW_SCALED, ROW_ALIGNED, SWIZZLED,
            E4M3_MAX, FOUR_OVER_SIX, SQUARED, STOCHASTIC,
        )  # fmt: skip
    if COLUMNWISE:
        # The tile is in the cache by now.
        _side(
            x_ptr, col_ptr, col_factor_ptr, col_amax_ptr, seed_ptr, k0, m0, cols, rows, col_pairs,
            stride_k, stride_m, BK, BM, 1, COL_ROTATED, SIGNS, ROW_SCALED, COL_ALIGNED, SWIZZLED,
            E4M3_MAX, FOUR_OVER_SIX, SQUARED, STOCHASTIC,
        )  # fmt: skip


@triton.jit
def quantize_nvfp4_square_kernel(
    x_ptr, row_ptr, row_factor_ptr, col_ptr, col_factor_ptr, amax_ptr, seed_ptr,
    rows, cols, stride_m, stride_k, row_pairs, col_pairs,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    ALIGNED: tl.constexpr, SWIZZLED: tl.constexpr, E4M3_MAX: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr, SQUARED: tl.constexpr, STOCHASTIC: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of 16x16 blocks; both directions share the random draw and the choice."""
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    v = _finite(load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k))
    amax = tl.load(amax_ptr + tl.arange(0, 1))[:, None]
    noise = noise_bytes(seed_ptr, m, k0, cols, 0, BK, ALIGNED) if STOCHASTIC else 0
    codes, factors = _quantize(v, amax, noise, 16, E4M3_MAX, FOUR_OVER_SIX, SQUARED, STOCHASTIC)
    if ROWWISE:
        _store_side(
            row_ptr, row_factor_ptr, codes, spread(factors, 16, 1), m0, k0, rows, cols, row_pairs,
            SWIZZLED,
        )  # fmt: skip
    if COLUMNWISE:
        _store_side(
            col_ptr, col_factor_ptr, tl.trans(codes), tl.trans(spread(factors, 1, 16)),
            k0, m0, cols, rows, col_pairs, SWIZZLED,
        )  # fmt: skip


@triton.jit
def rotated_amax_kernel(
    x_ptr, amax_ptr, plain_amax_ptr, lines, length, stride_line, stride_unit,
    PLAIN: tl.constexpr, SIGNS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Raise the maximum in ``amax_ptr`` (int32, the bits of float32) to that of one rotated tile.

    If ``PLAIN``, also raise the one in ``plain_amax_ptr`` to that of the tile without rotation.
    """
    line0, unit0 = tile_indices(lines, length, BM, BK)
    if PLAIN:
        v = load_side(
            x_ptr, line0, unit0, lines, length, stride_line, stride_unit, BM, BK, True, False, SIGNS
        )  # fmt: skip
        raise_to(plain_amax_ptr, magnitude_bits(v))
    v = load_side(
        x_ptr, line0, unit0, lines, length, stride_line, stride_unit, BM, BK, True, True, SIGNS
    )  # fmt: skip
    raise_to(amax_ptr, magnitude_bits(v))
