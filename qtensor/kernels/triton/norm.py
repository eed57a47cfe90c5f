"""LayerNorm and RMSNorm, forward and backward, and sums over rows (docs/numerics.md, norms).

Sums along a row run over chunks of 128 columns, with a lane for each column. Sums over rows run in
blocks of 64 rows, with a program for each block and tile of columns; a second kernel adds up the
blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div
from qtensor.kernels.triton.common import (
    as_matrix,
    launch,
    load_tile,
    raw,
    store_tile,
    tile_indices,
    tiles,
    to_float32,
)
from qtensor.kernels.triton.elements import reciprocal
from qtensor.kernels.triton.float_math import LANES, ROW_BLOCK, add_halves, rounded

ROWS = 4
"""Rows of a program that sums along rows; each row has a warp."""
COLUMNS = 1024
"""Columns of a program that sums over a block of rows."""
BLOCK_COLUMNS = 128
"""Columns of a program that adds up the blocks: more programs than with ``COLUMNS``."""
WIDE = 1024
"""Columns that a program loads at once where no sum has an order."""


UNROLLED = tl.constexpr(8)
"""Steps of a sum whose loads are under way at once; they are added in order."""


@triton.jit
def _columns(start):
    return start + tl.arange(0, LANES).to(tl.int64)


@triton.jit
def load_gain(weight_ptr, k, cols, CENTERED: tl.constexpr):
    """Return the factors of columns, float32 (len(k),)."""
    gain = to_float32(tl.load(weight_ptr + k, mask=k < cols, other=0))
    return 1.0 + gain if CENTERED else gain


@triton.jit
def normalize(x, mean, rstd, weight_ptr, bias_ptr, k, cols, CENTERED: tl.constexpr):
    """Return the norm of a tile, float32 and not yet rounded; ``mean`` and ``rstd`` are (rows,)."""
    y = (x - mean[:, None]) * rstd[:, None]
    if weight_ptr is not None:
        y = y * load_gain(weight_ptr, k, cols, CENTERED)[None, :]
    if bias_ptr is not None:
        y = y + load_gain(bias_ptr, k, cols, False)[None, :]
    return y


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows, cols, stride_m, stride_k,
    count, eps,
    CENTERED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Normalize BM whole rows.

    ``mean_ptr`` is None for RMSNorm. If ``y_ptr`` is None, only mean and rstd are written.
    """
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    mean = tl.zeros([BM], tl.float32)
    if mean_ptr is not None:
        lanes = tl.zeros([BM, LANES], tl.float32)
        for start in tl.range(0, cols, LANES, loop_unroll_factor=UNROLLED):
            lanes += load_tile(x_ptr, m, _columns(start), rows, cols, stride_m, stride_k)
        mean = tl.div_rn(add_halves(lanes), tl.zeros([BM], tl.float32) + count)
        tl.store(mean_ptr + m, rounded(mean, tl.float32), mask=m < rows)
    lanes = tl.zeros([BM, LANES], tl.float32)
    for start in tl.range(0, cols, LANES, loop_unroll_factor=UNROLLED):
        k = _columns(start)
        c = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k) - mean[:, None]
        lanes += tl.where((k < cols)[None, :], c * c, 0.0)
    variance = tl.div_rn(add_halves(lanes), tl.zeros([BM], tl.float32) + count) + eps
    rstd = reciprocal(tl.sqrt_rn(variance))
    tl.store(rstd_ptr + m, rounded(rstd, tl.float32), mask=m < rows)
    if y_ptr is not None:
        for start in range(0, cols, BK):
            k = start + tl.arange(0, BK).to(tl.int64)
            x = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
            y = normalize(x, mean, rstd, weight_ptr, bias_ptr, k, cols, CENTERED)
            store_tile(y_ptr, rounded(y, y_ptr.dtype.element_ty), m, k, rows, cols, cols, 1)


@triton.jit
def norm_input_gradient_kernel(
    x_ptr, dy_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, rows, cols, stride_m, stride_k,
    dy_stride_m, dy_stride_k, count, CENTERED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the input gradient of BM whole rows."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    rstd = tl.load(rstd_ptr + m, mask=m < rows, other=0.0)[:, None]
    mean = tl.zeros([BM], tl.float32)[:, None]
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + m, mask=m < rows, other=0.0)[:, None]
    along = tl.zeros([BM, LANES], tl.float32)
    total = tl.zeros([BM, LANES], tl.float32)
    for start in tl.range(0, cols, LANES, loop_unroll_factor=UNROLLED):
        k = _columns(start)
        inside = (k < cols)[None, :]
        n = (load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k) - mean) * rstd
        g = load_tile(dy_ptr, m, k, rows, cols, dy_stride_m, dy_stride_k)
        if weight_ptr is not None:
            g = g * load_gain(weight_ptr, k, cols, CENTERED)[None, :]
        along += tl.where(inside, g * n, 0.0)
        total += tl.where(inside, g, 0.0)
    along = tl.div_rn(add_halves(along), tl.zeros([BM], tl.float32) + count)[:, None]
    total = tl.div_rn(add_halves(total), tl.zeros([BM], tl.float32) + count)[:, None]
    for start in range(0, cols, BK):
        k = start + tl.arange(0, BK).to(tl.int64)
        n = (load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k) - mean) * rstd
        g = load_tile(dy_ptr, m, k, rows, cols, dy_stride_m, dy_stride_k)
        if weight_ptr is not None:
            g = g * load_gain(weight_ptr, k, cols, CENTERED)[None, :]
        away = n * along
        if mean_ptr is not None:
            away = away + total
        dx = rounded((g - away) * rstd, dx_ptr.dtype.element_ty)
        store_tile(dx_ptr, dx, m, k, rows, cols, cols, 1)


@triton.jit
def sum_rows_kernel(
    x_ptr, dy_ptr, mean_ptr, rstd_ptr, product_ptr, sum_ptr, rows, cols, stride_m, stride_k,
    dy_stride_m, dy_stride_k, BK: tl.constexpr,
):  # fmt: skip
    """Sum dy * normalized x, and dy, over one block of rows and a tile of columns.

    A sum is skipped if its pointer is None.
    """
    block, k0 = tile_indices(tl.cdiv(rows, ROW_BLOCK), cols, 1, BK)
    k = k0 + tl.arange(0, BK)
    product = tl.zeros([1, BK], tl.float32)
    total = tl.zeros([1, BK], tl.float32)
    for row in tl.range(0, ROW_BLOCK, loop_unroll_factor=UNROLLED):
        m = block * ROW_BLOCK + row + tl.arange(0, 1)
        dy = load_tile(dy_ptr, m, k, rows, cols, dy_stride_m, dy_stride_k)
        if product_ptr is not None:
            n = load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k)
            if mean_ptr is not None:
                n = n - tl.load(mean_ptr + m, mask=m < rows, other=0.0)[:, None]
            n = n * tl.load(rstd_ptr + m, mask=m < rows, other=0.0)[:, None]
            product += dy * n
        total += dy
    line = block + tl.arange(0, 1)
    if product_ptr is not None:
        store_tile(product_ptr, product, line, k, block + 1, cols, cols, 1)
    if sum_ptr is not None:
        store_tile(sum_ptr, total, line, k, block + 1, cols, cols, 1)


@triton.jit
def add_blocks_kernel(partial_ptr, out_ptr, blocks, cols, BK: tl.constexpr):
    """Add the blocks' sums (blocks, cols) of a tile of columns, in order."""
    k = tl.program_id(0).to(tl.int64) * BK + tl.arange(0, BK)
    total = tl.zeros([BK], tl.float32)
    offset = k
    for _ in tl.range(0, blocks, loop_unroll_factor=UNROLLED):
        total += tl.load(partial_ptr + offset, mask=k < cols, other=0.0)
        offset += cols
    tl.store(out_ptr + k, rounded(total, out_ptr.dtype.element_ty), mask=k < cols)


def _wide(cols: int) -> int:
    """Return how many columns a program loads at once: few widths, as each is a compilation."""
    return WIDE if cols > LANES.value else LANES.value


def _vector(t: Tensor | None) -> Tensor | None:
    return None if t is None else raw(t.contiguous())


def norm_(
    outputs: tuple[Tensor | None, Tensor, Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: tuple[str, float, bool],
) -> None:
    """Write y, mean and rstd of a norm; y may be None.

    ``settings`` holds the kind, eps, and True if the weight is centered at zero.
    """
    y, mean, rstd = outputs
    kind, eps, centered = settings
    matrix = as_matrix(x)
    launch(
        norm_kernel,
        ceil_div(matrix.shape[0], ROWS),
        matrix,
        _vector(weight),
        _vector(bias),
        None if y is None else raw(y),
        mean if kind == "layernorm" else None,
        rstd,
        *matrix.shape,
        *matrix.stride(),
        float(matrix.shape[1]),
        eps,
        CENTERED=centered,
        BM=ROWS,
        BK=_wide(matrix.shape[1]),
    )


def norm_backward_(
    outputs: tuple[Tensor, Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: tuple[Tensor | None, Tensor],
    centered: bool,
) -> None:
    """Write dx, dweight and dbias; skip dweight and dbias if they are empty.

    ``stats`` is (mean, rstd); the mean is None for RMSNorm.
    """
    dx, dweight, dbias = outputs
    matrix, grad = as_matrix(x), as_matrix(dy)
    mean, rstd = None if stats[0] is None else stats[0].contiguous(), stats[1].contiguous()
    strides = (*matrix.stride(), *grad.stride())
    launch(
        norm_input_gradient_kernel,
        ceil_div(matrix.shape[0], ROWS),
        matrix,
        grad,
        _vector(weight),
        mean,
        rstd,
        raw(dx),
        *matrix.shape,
        *strides,
        float(matrix.shape[1]),
        CENTERED=centered,
        BM=ROWS,
        BK=_wide(matrix.shape[1]),
    )
    _sum_rows_((dweight, dbias), (matrix, grad), mean, rstd)


def bias_grad_(out: Tensor, dy: Tensor) -> None:
    """Write the sum of the rows of ``dy`` into ``out``."""
    matrix = as_matrix(dy)
    _sum_rows_((out.new_empty(0), out), (None, matrix), None, None)


def _sum_rows_(
    outputs: tuple[Tensor, Tensor],
    inputs: tuple[Tensor | None, Tensor],
    mean: Tensor | None,
    rstd: Tensor | None,
) -> None:
    """Write the sums of dy * n and of dy over the rows; skip a sum if its output is empty."""
    x, dy = inputs
    rows, cols = dy.shape
    blocks = ceil_div(rows, ROW_BLOCK.value)
    partial: list[Any] = [
        torch.empty(blocks, cols, dtype=torch.float32, device=dy.device) if out.numel() else None
        for out in outputs
    ]
    if all(sums is None for sums in partial):
        return
    width = min(COLUMNS, triton.next_power_of_2(cols))
    launch(
        sum_rows_kernel,
        tiles((blocks, cols), (1, width)),
        x,
        dy,
        mean,
        rstd,
        *partial,
        rows,
        cols,
        *(dy.stride() if x is None else x.stride()),
        *dy.stride(),
        BK=width,
    )
    for out, sums in zip(outputs, partial, strict=True):
        if sums is not None:
            programs = ceil_div(cols, BLOCK_COLUMNS)
            launch(add_blocks_kernel, programs, sums, raw(out), blocks, cols, BK=BLOCK_COLUMNS)
