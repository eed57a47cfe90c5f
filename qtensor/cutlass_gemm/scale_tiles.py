"""Memory layout of block scale factors: offsets and buffer shapes as pure functions of sizes.

The kernels read these layouts, and the storages write them.
"""

from __future__ import annotations

from qtensor.core.buffer_shapes import ceil_div, round_up

TILE_ROWS, TILE_COLUMNS = 128, 4
"""Size of a tile of swizzled factors.

A tile is 512 bytes: 32 lines of 16 bytes, and each line holds 4 factors of 4 rows.
"""

BLOCK = 128
"""Number of elements along K that share one blockwise factor."""


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Return the offset of the factor of block ``column`` of ``row``; a row has ``columns`` blocks.

    This is the layout of cuBLAS and CUTLASS for block-scaled operands (docs/numerics.md, "Swizzled
    factors"): tiles of 128x4 in row-major order.
    """
    tile = row // TILE_ROWS * ceil_div(columns, TILE_COLUMNS) + column // TILE_COLUMNS
    inner = row % 32 * 16 + row % TILE_ROWS // 32 * TILE_COLUMNS + column % TILE_COLUMNS
    return tile * TILE_ROWS * TILE_COLUMNS + inner


def swizzled_count(rows: int, columns: int) -> int:
    """Return the number of entries of the swizzled buffer, which holds whole tiles."""
    return round_up(rows, TILE_ROWS) * round_up(columns, TILE_COLUMNS)


def blockwise_shape(rows: int, k: int, block_rows: int) -> tuple[int, int]:
    """Return the shape of the float32 factors of a (rows, k) operand.

    The buffers of ``Float8BlockwiseTensorStorage`` have this shape. For 1x128 blocks it is
    (ceil(k / 128), up4(rows)): the factors of one block along K are contiguous. For 128x128 blocks
    it is (ceil(rows / 128), up4(ceil(k / 128))). TMA needs leading dims of a multiple of 16 bytes.
    """
    blocks = ceil_div(k, BLOCK)
    if block_rows == 1:
        return blocks, round_up(rows, 4)
    return ceil_div(rows, block_rows), round_up(blocks, 4)


def blockwise_offset(row: int, block: int, shape: tuple[int, int], block_rows: int) -> int:
    """Return the offset of the factor of ``block`` along K in ``row``.

    ``shape`` is the buffer's shape, as ``blockwise_shape`` returns it.
    """
    return block * shape[1] + row if block_rows == 1 else row // block_rows * shape[1] + block
