"""NVFP4: blocks of 16 with an E4M3 factor below a float32 factor (docs/numerics.md, NVFP4).

A side is a matrix of lines that blocks run along: rows of x (rowwise), or rows of its transpose (columnwise). Maxima
come first, one read; then codes and factors of both sides from one more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.kernels.triton_amax import amax_
from qtensor.kernels.triton_common import (
    SIDES,
    as_matrix,
    block_max,
    launch,
    load_tile,
    round_up,
    split_16,
    spread,
    store_codes,
    store_factors,
    tile_indices,
    tiles,
)
from qtensor.kernels.triton_elements import (
    as_float,
    decode,
    encode,
    encode_e4m3,
    finite_bits,
    magnitude_bits,
    reciprocal,
)
from qtensor.kernels.triton_rotation import rotate, rotated_amax_kernel
from qtensor.kernels.triton_rounding import noise_bytes, stochastic_codes
from qtensor.layout import ceil_div
from qtensor.layout import round_up as round_up_host

TILE = (64, 64)
FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
E2M1_LARGEST = tl.constexpr(0x40C00000)


@triton.jit
def _finite(values):
    """NaN as 0, inf as the largest finite float32."""
    bits = values.to(tl.int32, bitcast=True)
    return as_float(finite_bits(bits & 0x7FFFFFFF) | (bits & ~0x7FFFFFFF))


@triton.jit
def _encode_factor(factors, global_scale):
    """Multipliers of blocks from their E4M3 codes: min(1 / (float(s) / S_enc), FLT_MAX)."""
    decoded = decode(factors, 4, 3)
    return tl.minimum(reciprocal(decoded * reciprocal(global_scale)), FLOAT32_MAX)


@triton.jit
def _block_error(v, factors, global_scale, amax, DM: tl.constexpr, SQUARED: tl.constexpr, E4M3_MAX: tl.constexpr):  # fmt: skip
    """Error of each block if it had these factors: 16 elements in order, then 16 rows by halves 8, 4, 2, 1."""
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
def _quantize(v, amax, noise, DM: tl.constexpr, E4M3_MAX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, SQUARED: tl.constexpr, STOCHASTIC: tl.constexpr):  # fmt: skip
    """Codes of a tile, and the E4M3 codes of its (DM, 16) blocks.

    Args:
        v: (L, N) without NaN or inf.
        amax: (L, 1) or (1, 1).
        noise: random bytes (L, N), int32, where ``STOCHASTIC``.
        DM: lines of a block.
        E4M3_MAX: an option of the format.
        FOUR_OVER_SIX: an option of the format.
        SQUARED: the error of ``FOUR_OVER_SIX`` is the squared one.
        STOCHASTIC: round at random.
    """
    known = tl.where(amax > 0.0, amax, 6.0 * E4M3_MAX)
    global_scale = tl.minimum(tl.div_rn(tl.zeros_like(known) + 6.0 * E4M3_MAX, known), FLOAT32_MAX)
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
def _store_side(data_ptr, factor_ptr, codes, factors, line0, unit0, lines, length, pairs, SWIZZLED: tl.constexpr):  # fmt: skip
    """Write the codes (L, N), ``pairs`` bytes a line, and the factors (L, N / 16) of a side."""
    store_codes(data_ptr, codes, line0, unit0, lines, pairs, pairs, 1, 2)
    blocks = tl.cdiv(length, 16)
    line = line0 + tl.arange(0, codes.shape[0])
    block = unit0 // 16 + tl.arange(0, codes.shape[1] // 16)
    store_factors(
        factor_ptr, factors, line, block, lines, blocks, round_up(blocks, 4), SWIZZLED
    )  # fmt: skip


@triton.jit
def _side(
    x, data_ptr, factor_ptr, amax_ptr, seed_ptr, line0, unit0, lines, length, pairs,
    STREAM: tl.constexpr, DTYPE: tl.constexpr, ROTATED: tl.constexpr, SIGNS: tl.constexpr,
    ROW_SCALED: tl.constexpr, ALIGNED: tl.constexpr, SWIZZLED: tl.constexpr,
    E4M3_MAX: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, SQUARED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """One tile of a side with 1-D blocks: lines, elements of each."""
    v = _finite(rotate(x, SIGNS, DTYPE) if ROTATED else x)
    line = line0 + tl.arange(0, x.shape[0])
    # A rotated side keeps whole groups of 16.
    stored = round_up(length, 16) if ROTATED else length
    if ROW_SCALED:
        amax = tl.load(amax_ptr + line, mask=line < lines, other=0.0)[:, None]
    else:
        amax = tl.load(amax_ptr + tl.arange(0, 1))[:, None]
    N: tl.constexpr = x.shape[1]
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
    """One tile of (BM, BK), multiples of 16, in both directions, each with blocks of its own."""
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    x = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
    if ROWWISE:
        _side(
            x, row_ptr, row_factor_ptr, row_amax_ptr, seed_ptr, m0, k0, rows, cols, row_pairs, 0,
            x_ptr.dtype.element_ty, ROW_ROTATED, SIGNS, ROW_SCALED, ROW_ALIGNED, SWIZZLED,
            E4M3_MAX, FOUR_OVER_SIX, SQUARED, STOCHASTIC,
        )  # fmt: skip
    if COLUMNWISE:
        _side(
            tl.trans(x), col_ptr, col_factor_ptr, col_amax_ptr, seed_ptr, k0, m0, cols, rows,
            col_pairs, 1, x_ptr.dtype.element_ty, COL_ROTATED, SIGNS, ROW_SCALED, COL_ALIGNED,
            SWIZZLED, E4M3_MAX, FOUR_OVER_SIX, SQUARED, STOCHASTIC,
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
    """One tile of 16x16 blocks: one draw and one choice a block serve both directions."""
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
    launch(
        rotated_amax_kernel,
        tiles(lines.shape, TILE),
        lines,
        rotated.zero_().view(torch.int32),
        None if plain is None else plain.zero_().view(torch.int32),
        *lines.shape,
        *lines.stride(),
        PLAIN=plain is not None,
        SIGNS=codec.with_random_sign_mask,
        BM=TILE[0],
        BK=TILE[1],
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
    stochastic = codec.stochastic_rounding and seed is not None
    options = {
        "ROWWISE": codec.rowwise,
        "COLUMNWISE": codec.columnwise,
        "SWIZZLED": codec.swizzled,
        "E4M3_MAX": float(codec.e4m3_max),
        "FOUR_OVER_SIX": codec.use_4over6,
        "SQUARED": codec.err_mode == "mse",
        "STOCHASTIC": stochastic,
        "BM": TILE[0],
        "BK": TILE[1],
    }
    buffers = [out.get(name) for name in SIDES]
    seed = seed.to(x.device) if stochastic and seed is not None else None
    rotated = {side: is_rotated(codec, side) for side in ("rowwise", "columnwise")}
    # A rotated side keeps whole groups of 16; the groups of 16 random bytes fall on blocks where lines have whole ones.
    row_length = round_up_host(cols, 16 if rotated["rowwise"] else 1)
    col_length = round_up_host(rows, 16 if rotated["columnwise"] else 1)
    sizes = (rows, cols, *matrix.stride(), ceil_div(row_length, 2), ceil_div(col_length, 2))
    count = tiles(matrix.shape, TILE)
    if codec.two_dimensional:
        options["ALIGNED"] = cols % 16 == 0
        launch(
            quantize_nvfp4_square_kernel,
            count,
            matrix,
            *buffers,
            maxima[0],
            seed,
            *sizes,
            **options,
        )
        return
    launch(
        quantize_nvfp4_kernel,
        count,
        matrix,
        *buffers,
        out.get("_amax_rowwise"),
        out.get("_amax_columnwise"),
        seed,
        *sizes,
        ROW_ROTATED=rotated["rowwise"],
        COL_ROTATED=rotated["columnwise"],
        SIGNS=codec.with_random_sign_mask,
        ROW_SCALED=codec.row_scaled,
        ROW_ALIGNED=row_length % 16 == 0,
        COL_ALIGNED=col_length % 16 == 0,
        **options,
    )
