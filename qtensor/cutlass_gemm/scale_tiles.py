"""Memory layout of block scale factors: buffer shapes as pure functions of sizes.

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
