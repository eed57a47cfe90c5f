"""Where block factors lie in memory, as pure functions of sizes: what the kernels read and the storages write."""

from __future__ import annotations

from qtensor.layout import ceil_div, round_up

TILE_ROWS, TILE_COLUMNS = 128, 4
"""Of a tile of swizzled factors: 512 bytes, in which 32 rows of 16 bytes hold four groups of 32 rows side by side."""

BLOCK = 128
"""Elements along K that share a blockwise factor."""


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Offset of the factor of block ``column`` of ``row``, with ``columns`` blocks a row.

    The layout of cuBLAS and CUTLASS for block-scaled operands (docs/numerics.md): tiles of 128x4 in row-major order.
    """
    tile = row // TILE_ROWS * ceil_div(columns, TILE_COLUMNS) + column // TILE_COLUMNS
    inner = row % 32 * 16 + row % TILE_ROWS // 32 * TILE_COLUMNS + column % TILE_COLUMNS
    return tile * TILE_ROWS * TILE_COLUMNS + inner


def swizzled_count(rows: int, columns: int) -> int:
    """Entries of the buffer, whole tiles."""
    return round_up(rows, TILE_ROWS) * round_up(columns, TILE_COLUMNS)


def blockwise_shape(rows: int, k: int, block_rows: int) -> tuple[int, int]:
    """Shape of the float32 factors of a (rows, k) operand: the buffers of ``Float8BlockwiseTensorStorage``.

    1x128 blocks: (ceil(k/128), up4(rows)), so that the factors of one block along K lie side by side. 128x128 blocks:
    (ceil(rows/128), up4(ceil(k/128))). Leading dims are multiples of 16 bytes, which TMA needs.
    """
    blocks = ceil_div(k, BLOCK)
    if block_rows == 1:
        return blocks, round_up(rows, 4)
    return ceil_div(rows, block_rows), round_up(blocks, 4)


def blockwise_offset(row: int, block: int, shape: tuple[int, int], block_rows: int) -> int:
    """Offset of the factor of ``block`` along K in ``row``, in a buffer of ``blockwise_shape``."""
    return block * shape[1] + row if block_rows == 1 else row // block_rows * shape[1] + block
