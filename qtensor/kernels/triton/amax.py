"""Largest magnitudes of a tensor, its rows or its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.kernels.triton.common import (
    as_matrix,
    launch,
    load_tile,
    raise_to,
    resident,
    tile_at,
    tile_for,
    tile_indices,
    tiles,
)
from qtensor.kernels.triton.elements import finite_bits, magnitude_bits


@triton.jit
def _magnitudes(x_ptr, m, k, rows, cols, stride_m, stride_k, FINITE: tl.constexpr):
    """Return the bits of the magnitudes of a tile.

    If ``FINITE``, NaN is ignored and inf counts as the largest finite float32. Otherwise inf and
    NaN compare above all numbers.
    """
    bits = magnitude_bits(load_tile(x_ptr, m, k, rows, cols, stride_m, stride_k))
    return finite_bits(bits) if FINITE else bits


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, rows, cols, stride_m, stride_k, count,
    FINITE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Raise the maximum in ``amax_ptr`` (int32, the bits of a float32) to that of some tiles.

    ``count`` is the number of tiles of the matrix.
    """
    most = tl.zeros([BM, BK], tl.int32)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        m0, k0 = tile_at(index, cols, BM, BK)
        m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
        bits = _magnitudes(x_ptr, m, k, rows, cols, stride_m, stride_k, FINITE)
        most = tl.maximum(most, bits)
    raise_to(amax_ptr, most)


@triton.jit
def axis_amax_kernel(
    x_ptr, amax_ptr, rows, cols, stride_m, stride_k,
    FINITE: tl.constexpr, AXIS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Raise the maxima of rows or columns in ``amax_ptr`` to those of one tile."""
    m0, k0 = tile_indices(rows, cols, BM, BK)
    m, k = m0 + tl.arange(0, BM), k0 + tl.arange(0, BK)
    bits = _magnitudes(x_ptr, m, k, rows, cols, stride_m, stride_k, FINITE)
    if AXIS == -1:
        tl.atomic_max(amax_ptr + m, tl.max(bits, 1), mask=m < rows, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr + k, tl.max(bits, 0), mask=k < cols, sem="relaxed")


def amax_(out: Tensor, x: Tensor, axis: int | None = None, *, finite: bool = False) -> None:
    """Write the maxima of |x| over the tensor, or over one axis of its (M, K) view.

    Args:
        out: float32, contiguous, with 1, M or K entries.
        x: any shape; float32, bfloat16 or float16.
        axis: -1 for one maximum a row, 0 for one a column, None for one maximum.
        finite: True to ignore NaN and count inf as the largest finite float32.
    """
    matrix = as_matrix(x)
    tile = tile_for(matrix.shape)
    # The bits of magnitudes are ordered like integers, so an integer atomic joins the programs.
    bits, count = out.zero_().view(torch.int32), tiles(matrix.shape, tile)
    sizes = (*matrix.shape, *matrix.stride())
    constants = {"FINITE": finite, "BM": tile[0], "BK": tile[1]}
    if axis is None:
        programs = resident(count, out.device)
        launch(amax_kernel, programs, matrix, bits, *sizes, count, **constants)
    else:
        launch(axis_amax_kernel, count, matrix, bits, *sizes, AXIS=axis, **constants)
