"""Block views of (M, K) matrices, padding, and the 128x4 swizzle of scale factors."""

from __future__ import annotations

from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from qtensor.core.buffer_shapes import rows_cols


def as_matrix(x: Tensor) -> Tensor:
    """Return the (M, K) view of a tensor of any rank, in its dtype."""
    return x if x.ndim == 2 else x.reshape(rows_cols(x.shape))


def pad_matrix(x: Tensor, rows: int, cols: int) -> Tensor:
    """Pad ``x`` (M, K) with zeros so that its sizes are multiples of ``rows`` and ``cols``."""
    bottom, right = -x.shape[0] % rows, -x.shape[1] % cols
    return F.pad(x, (0, right, 0, bottom)) if bottom or right else x


def to_blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """Split ``x`` (M, K) into blocks: (M / rows, rows, K / cols, cols), after zero padding.

    The result is a view if no padding is needed.
    """
    x = pad_matrix(x, rows, cols)
    m, k = x.shape
    (down, right), grid = x.stride(), (m // rows, rows, k // cols, cols)
    return x.as_strided(grid, (down * rows, down, right * cols, right))


def block_amax(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block, (m, k) float32, of (m, r, k, c); NaN for NaN."""
    return blocks.abs().amax((1, 3)).float()


def scale_blocks(blocks: Tensor, factors: Tensor, rows: int, cols: int) -> Tensor:
    """Return blocks times their factors as a float32 matrix, cropped to (rows, cols).

    Args:
        blocks: (m, r, k, c).
        factors: float32 (m, k), or larger because of padding.
        rows: rows of the result.
        cols: columns of the result.
    """
    m, _, k, _ = blocks.shape
    factors = crop(factors, m, k).unsqueeze(1).unsqueeze(3)
    return crop((blocks * factors).flatten(2).flatten(0, 1), rows, cols)


def crop(matrix: Tensor, rows: int, cols: int) -> Tensor:
    """Return the top left (rows, cols) of a matrix, as a view."""
    if matrix.shape[0] != rows:
        matrix = matrix.narrow(0, 0, rows)
    return matrix if matrix.shape[1] == cols else matrix.narrow(1, 0, cols)


def from_blocks(blocks: Tensor, rows: int, cols: int) -> Tensor:
    """Join blocks (m, r, k, c) into a (rows, cols) matrix: the inverse of ``to_blocks``."""
    return crop(blocks.flatten(2).flatten(0, 1), rows, cols)


def spread(factors: Tensor, rows: int, cols: int, shape: tuple[int, int]) -> Tensor:
    """Repeat block factors so that each element has one, and crop the result to ``shape``.

    ``factors`` is (ceil(M / rows), ceil(K / cols)); ``shape`` is (M, K).
    """
    if rows > 1:
        factors = factors.repeat_interleave(rows, 0)
    if cols > 1:
        factors = factors.repeat_interleave(cols, 1)
    return factors[: shape[0], : shape[1]]


def write_padded_(out: Tensor, values: Tensor) -> None:
    """Copy ``values`` (r, c) into the top left of ``out``, and leave its padding zero."""
    crop(out, *values.shape).copy_(values)


def swizzle(scales: Tensor) -> Tensor:
    """Return (R, C) scales in 128x4 tiles, each contiguous; tiles are in row-major order.

    R must be a multiple of 128 and C a multiple of 4. Inside a tile the offset of (r, c) is
    ``(r % 32) * 16 + (r // 32) * 4 + c``. The shape stays (R, C).
    """
    tiles = rearrange(scales, "(tr a b) (tc c) -> tr tc b a c", a=4, b=32, c=4)
    return tiles.reshape(scales.shape)


def unswizzle(scales: Tensor) -> Tensor:
    """Return (R, C) scales in row-major order from 128x4 tiles: the inverse of ``swizzle``."""
    rows, cols = scales.shape
    tiles = scales.reshape(rows // 128, cols // 4, 32, 4, 4)
    return rearrange(tiles, "tr tc b a c -> (tr a b) (tc c)")


def write_scales_(out: Tensor, scales: Tensor, swizzled: bool, transposed: bool = False) -> None:
    """Write the factors of one direction into their padded buffer, with zeros as padding.

    Args:
        out: (R, C), the padded buffer.
        scales: (r, c), r <= R, c <= C.
        swizzled: True to write 128x4 tiles; the shape of ``out`` does not change.
        transposed: True if the tiles are those of the transpose (MX columnwise).
    """
    if not swizzled:
        write_padded_(out, scales)
        return
    padded = out.new_zeros(out.shape)
    write_padded_(padded, scales)
    out.copy_(swizzle(padded.t() if transposed else padded).reshape(out.shape))


def read_scales(buffer: Tensor, swizzled: bool, transposed: bool = False) -> Tensor:
    """Return the factors of one direction as a plain (R, C) matrix, which may include padding.

    The inverse of ``write_scales_``.
    """
    if not swizzled:
        return buffer
    return unswizzle(buffer.reshape(buffer.shape[::-1])).t() if transposed else unswizzle(buffer)
