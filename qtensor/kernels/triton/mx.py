"""MX formats: blocks of 32 with an E8M0 factor; one read for both directions."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.kernels.quantizers import MXLike
from qtensor.kernels.triton.common import (
    SIDES,
    as_matrix,
    block_max,
    launch,
    load_tile,
    round_up,
    spread,
    store_codes,
    store_factors,
    tile_for,
    tile_indices,
    tiles,
    warps_for,
)
from qtensor.kernels.triton.elements import (
    e8m0_code,
    e8m0_factor,
    element_constants,
    encode,
    magnitude_bits,
)


@triton.jit
def _codes(
    x, DM: tl.constexpr, DK: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Return the codes of a tile and the factors of its (DM, DK) blocks."""
    factors = e8m0_code(block_max(magnitude_bits(x), DM, DK), MODE, MANTISSA, LARGEST)
    # The factor of code 255 is NaN, so every value of its block becomes NaN.
    multiplier = e8m0_factor((254 - factors) & 0xFF)
    codes = encode(x * spread(multiplier, DM, DK), True, EXPONENT, MANTISSA, LARGEST)
    return codes, factors


@triton.jit
def quantize_mx_kernel(
    x_ptr, row_ptr, row_factor_ptr, col_ptr, col_factor_ptr, rows, cols, stride_m, stride_k,
    row_groups, col_groups, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, SQUARE: tl.constexpr,
    SWIZZLED: tl.constexpr, MODE: tl.constexpr, PACK: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantize one (BM, BK) tile, multiples of 32, in both directions."""
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    x = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
    blocks_m, blocks_k = tl.cdiv(rows, 32), tl.cdiv(cols, 32)
    if ROWWISE:
        DM: tl.constexpr = 32 if SQUARE else 1
        codes, factors = _codes(x, DM, 32, MODE, EXPONENT, MANTISSA, LARGEST)
        pitch = row_groups * (3 if PACK == 4 else 1)
        store_codes(row_ptr, codes, m0, k0, rows, row_groups, pitch, 1, PACK)
        block = k0 // 32 + tl.arange(0, BK // 32)
        store_factors(
            row_factor_ptr, spread(factors, DM, 1), m, block, rows, blocks_k,
            round_up(blocks_k, 4), SWIZZLED,
        )  # fmt: skip
    if COLUMNWISE:
        DK: tl.constexpr = 32 if SQUARE else 1
        codes, factors = _codes(x, 32, DK, MODE, EXPONENT, MANTISSA, LARGEST)
        if PACK == 1:
            store_codes(col_ptr, codes, m0, k0, rows, cols, cols, 1, 1)
        else:
            # Packing runs along the blocks, so a line is a column of the matrix.
            store_codes(col_ptr, tl.trans(codes), k0, m0, cols, col_groups, 1, cols, PACK)
        block = m0 // 32 + tl.arange(0, BM // 32)
        factors = spread(factors, 1, DK)
        if SWIZZLED:
            store_factors(
                col_factor_ptr, tl.trans(factors), k, block, cols, blocks_m,
                round_up(blocks_m, 4), True,
            )  # fmt: skip
        else:
            store_factors(
                col_factor_ptr, factors, block, k, blocks_m, cols, round_up(cols, 128), False
            )


def pack_of(quantizer: QuantizerLike) -> int:
    """Return how many codes a packed group holds: 1, 2 (in a byte) or 4 (in three bytes)."""
    if quantizer.element.bits == 4:
        return 2
    return 4 if getattr(quantizer, "packed", False) else 1


def quantize_(
    quantizer: MXLike,
    out: dict[str, Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> None:
    """Write codes and factors of each usage."""
    matrix = as_matrix(x)
    pack = pack_of(quantizer)
    square = quantizer.with_2d_quantization
    tile = tile_for(
        matrix.shape,
        (32 if quantizer.columnwise or square else 1, 32 if quantizer.rowwise or square else 1),
    )
    launch(
        quantize_mx_kernel,
        tiles(matrix.shape, tile),
        matrix,
        *(out.get(name) for name in SIDES),
        *matrix.shape,
        *matrix.stride(),
        ceil_div(matrix.shape[1], pack),
        ceil_div(matrix.shape[0], pack),
        ROWWISE=quantizer.rowwise,
        COLUMNWISE=quantizer.columnwise,
        SQUARE=square,
        SWIZZLED=quantizer.swizzled,
        MODE=quantizer.scale_mode,
        PACK=pack,
        **element_constants(quantizer.element),
        BM=tile[0],
        BK=tile[1],
        num_warps=warps_for(quantizer.rowwise + quantizer.columnwise),
    )
