"""New rows of a cache of keys and values."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qtensor.kernels.triton.attention_rows import find_rows, pages_of
from qtensor.kernels.triton.common import launch, raw, tile_for, tile_indices, tiles


@triton.jit
def append_kernel(
    source_ptr, target_ptr, positions_ptr, pages, rows, width, heads, tokens, capacity,
    stride_row, stride_outer, stride_head, stride_token, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Copy a tile of rows (b, h, n) to their positions; those outside the cache are left out."""
    row0, e0 = tile_indices(rows, width, BM, BK)
    row, e = row0 + tl.arange(0, BM), e0 + tl.arange(0, BK)
    b, h = row // tokens // heads, row // tokens % heads
    position = tl.load(positions_ptr + b * tokens + row % tokens, mask=row < rows, other=-1)
    position = position.to(tl.int64)
    inside = (position >= 0) & (position < capacity)
    outer, place, inside = find_rows(pages, b, position, inside)
    inside = inside[:, None] & (e < width)[None, :]
    values = tl.load(source_ptr + (row * stride_row)[:, None] + e[None, :], mask=inside, other=0)
    at = outer * stride_outer + h * stride_head + place * stride_token
    tl.store(target_ptr + at[:, None] + e[None, :], values, mask=inside)


def append_(source: Tensor, target: Tensor, positions: Tensor, block_table: Tensor | None) -> None:
    """Write encoded rows of new tokens into a buffer of a cache.

    Args:
        source: (B * H * N, width or more), its rows contiguous.
        target: (B, H, capacity, width) or (pages, H, page, width), its last dim contiguous.
        positions: (B, N); a token whose position or page is outside the cache is not written.
        block_table: (B, pages of a sequence), or None.
    """
    count, (_, heads, page, width) = positions.numel() * target.shape[1], target.shape
    tile = tile_for((count, width))
    pages = pages_of(target, block_table)
    launch(
        append_kernel,
        tiles((count, width), tile),
        raw(source),
        raw(target),
        positions.contiguous(),
        pages,
        count,
        width,
        heads,
        positions.shape[1],
        page * pages.width,
        source.stride(0),
        *target.stride()[:3],
        BM=tile[0],
        BK=tile[1],
    )
