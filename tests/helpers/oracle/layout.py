"""Shapes, padding, packing and the scale swizzle (docs/numerics.md)."""

from __future__ import annotations

import math

import numpy as np


def ceil_div(value: int, multiple: int) -> int:
    """value / multiple, rounded up."""
    return -(-value // multiple)


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return ceil_div(value, multiple) * multiple


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(M, K) of a logical shape; 0-d is (1, 1), 1-d is (1, K)."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def transposed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(K, *leading); a 0-d tensor counts as (1,)."""
    return (shape[-1], *shape[:-1]) if shape else (1,)


def pad2d(x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """`x` zero-padded at the bottom and the right to (rows, cols)."""
    out = np.zeros((rows, cols), x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def pad_to_multiple(x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """`x` zero-padded so that its sides are multiples of rows and cols."""
    return pad2d(x, up(x.shape[0], rows), up(x.shape[1], cols))


def as_blocks(x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The zero-padded (M, K) matrix as (row block, column block, rows, cols)."""
    padded = pad_to_multiple(x, rows, cols)
    grid = (padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    return padded.reshape(grid).transpose(0, 2, 1, 3)


def from_blocks(blocks: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Inverse of `as_blocks`, cropped to (rows, cols)."""
    row_blocks, col_blocks, block_rows, block_cols = blocks.shape
    matrix = blocks.transpose(0, 2, 1, 3).reshape(row_blocks * block_rows, col_blocks * block_cols)
    return np.ascontiguousarray(matrix[:rows, :cols])


def spread(
    scales: np.ndarray, block_rows: int, block_cols: int, rows: int, cols: int
) -> np.ndarray:
    """One value a block -> one value an element, cropped to (rows, cols)."""
    return np.repeat(np.repeat(scales, block_rows, axis=0), block_cols, axis=1)[:rows, :cols]


def _pad_last(codes: np.ndarray, multiple: int) -> np.ndarray:
    missing = up(codes.shape[-1], multiple) - codes.shape[-1]
    return np.concatenate([codes, np.zeros((*codes.shape[:-1], missing), np.uint8)], axis=-1)


def pack4(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes a byte, EVEN index in the LOW nibble; an odd length is padded by
    a zero code.
    """
    pairs = _pad_last(codes, 2)
    return pairs[..., 0::2] + 16 * pairs[..., 1::2]


def unpack4(data: np.ndarray, length: int) -> np.ndarray:
    """Inverse of `pack4`, cropped to `length` codes."""
    pairs = np.stack([data % 16, data // 16], axis=-1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])[..., :length]


def pack6(codes: np.ndarray) -> np.ndarray:
    """Four 6-bit codes in three bytes: code i in bits 6i..6i+5 of the little-endian 24-bit
    group.
    """
    padded = _pad_last(codes, 4)
    groups = padded.reshape(*codes.shape[:-1], padded.shape[-1] // 4, 4).astype(np.int64)
    word = (groups * 64 ** np.arange(4)).sum(-1)
    triples = np.stack([word % 256, word // 256 % 256, word // 65536], axis=-1).astype(np.uint8)
    return triples.reshape(*codes.shape[:-1], padded.shape[-1] // 4 * 3)


def unpack6(data: np.ndarray, length: int) -> np.ndarray:
    """Inverse of `pack6`, cropped to `length` codes."""
    triples = data.reshape(*data.shape[:-1], data.shape[-1] // 3, 3).astype(np.int64)
    word = (triples * 256 ** np.arange(3)).sum(-1)
    codes = np.stack([word // 64**i % 64 for i in range(4)], axis=-1).astype(np.uint8)
    return codes.reshape(*data.shape[:-1], data.shape[-1] // 3 * 4)[..., :length]


def _swizzle_destination(rows: int, cols: int) -> np.ndarray:
    """Flat destination of every (r, c) of a scale matrix padded to 128x4 tiles."""
    row, col = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    tile = (row // 128) * (cols // 4) + col // 4
    inside = row % 128
    return tile * 512 + (inside % 32) * 16 + (inside // 32) * 4 + col % 4


def swizzle(scales: np.ndarray) -> np.ndarray:
    """Scales in the layout of block-scaled GEMMs, zero-padded to 128x4 tiles; the
    shape of the padded matrix is kept.
    """
    padded = pad_to_multiple(scales, 128, 4)
    out = np.empty(padded.size, padded.dtype)
    out[_swizzle_destination(*padded.shape).ravel()] = padded.ravel()
    return out.reshape(padded.shape)


def unswizzle(scales: np.ndarray) -> np.ndarray:
    """Inverse of `swizzle` (the padding stays)."""
    return scales.ravel()[_swizzle_destination(*scales.shape)]
