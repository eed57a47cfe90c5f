"""The end of a product with float32 sums: factors, bias, and one rounding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qtensor.kernels.triton.common import (
    as_matrix,
    launch,
    load_tile,
    raw,
    store_tile,
    tile_for,
    tile_indices,
    tiles,
    to_float32,
)
from qtensor.kernels.triton.float_math import rounded


@triton.jit
def _factors(ptr, index, size, EACH: tl.constexpr):
    """Return the factors of lines, float32 (len(index),), or one for all, (1,)."""
    if EACH:
        return tl.load(ptr + index, mask=index < size, other=0.0)
    else:
        return tl.load(ptr + tl.arange(0, 1))


@triton.jit
def finish_product_kernel(
    sums_ptr, row_ptr, column_ptr, bias_ptr, out_ptr, rows, cols,
    EACH_ROW: tl.constexpr, EACH_COLUMN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write one tile of ``sums * row factor * column factor + bias``; each may be None."""
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    values = load_tile(sums_ptr, m, k, rows, cols, cols, 1)
    if row_ptr is not None:
        values = values * _factors(row_ptr, m, rows, EACH_ROW)[:, None]
    if column_ptr is not None:
        values = values * _factors(column_ptr, k, cols, EACH_COLUMN)[None, :]
    if bias_ptr is not None:
        values = values + to_float32(tl.load(bias_ptr + k, mask=k < cols, other=0))[None, :]
    store_tile(out_ptr, rounded(values, out_ptr.dtype.element_ty), m, k, rows, cols, cols, 1)


def finish_product_(
    out: Tensor,
    sums: Tensor,
    row_factor: Tensor | None,
    column_factor: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Multiply sums by factors, add a bias, and round once.

    Args:
        out: (..., N), contiguous.
        sums: float32, of the shape of ``out``, contiguous.
        row_factor: float32, one or one for each row; or None.
        column_factor: float32, one or one for each column; or None.
        bias: (N,), or None.
    """
    source, target = as_matrix(sums), as_matrix(out)
    tile = tile_for(target.shape)
    launch(
        finish_product_kernel,
        tiles(target.shape, tile),
        source,
        row_factor,
        column_factor,
        None if bias is None else raw(bias.contiguous()),
        target,
        *target.shape,
        EACH_ROW=row_factor is not None and row_factor.numel() > 1,
        EACH_COLUMN=column_factor is not None and column_factor.numel() > 1,
        BM=tile[0],
        BK=tile[1],
    )
